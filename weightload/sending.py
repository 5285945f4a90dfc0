"""Puts weights into operations that workers can be asked for, wherever they are.

A folder is named, and every worker reads it. Tensors go through one shared-memory file, which all
workers of a machine read; it is written once, however many they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from weightload.bucket import BucketWriter
from weightload.intake import Intake, pairs_of

__all__ = ["Weights", "is_folder", "operations"]

Weights = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Operation = tuple[str, dict[str, Any]]


def is_folder(weights: Any) -> bool:
    """Whether weights are read by the workers themselves; ``None`` is the engine's own folder."""
    return weights is None or isinstance(weights, str | Path)


def operations(
    weights: Weights | None, *, check_finite: bool = False, bucket_bytes: int | None = None
) -> Generator[Operation]:
    """Yield operations with their arguments, of builtin types only.

    All workers must have done one before the next is asked for: the memory is used again.

    Args:
        weights: a checkpoint folder, ``None`` for the one that the engine was started on, or
            named tensors.
        check_finite: refuse a mapping with NaN or infinity before anything is sent.
        bucket_bytes: capacity of the shared memory; a tensor that is larger makes it grow.

    Raises:
        WeightMismatchError: see ``check_finite``.
    """
    if weights is None or isinstance(weights, str | Path):
        yield "load_path", {"path": None if weights is None else str(weights)}
        return
    if isinstance(weights, Mapping):
        if check_finite:
            intake = Intake(manifest=None, check_finite=True)
            for name, tensor in weights.items():
                intake.check_pair(name, tensor)
        forms = {
            name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for name, tensor in weights.items()
        }
        yield "check", {"shapes": forms}
    writer = BucketWriter() if bucket_bytes is None else BucketWriter(bucket_bytes)
    try:
        for table in writer.fill(pairs_of(weights)):
            yield "load_bucket", {"path": writer.path, "table": table}
    finally:
        writer.close()
