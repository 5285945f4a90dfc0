"""Puts weights into operations that workers can be asked for, wherever they are.

A folder is named, and every worker reads it. Tensors go through one shared-memory file, which all
workers of a machine read; it is written once, however many they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch

from weightload.arena import Arena
from weightload.intake import Intake
from weightload.packing import BucketWriter, forms_of, size_of
from weightload.reading import Checkpoint
from weightload.reporting import LoadProgress, Reporter
from weightload.sources import pairs_of
from weightload.wire import ALIGNMENT

__all__ = ["Sent", "Weights", "is_folder", "operations"]

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Operation = tuple[str, dict[str, Any]]

BUCKET_BYTES = 64 << 20
"""Size of the memory through which tensors go to other processes; larger ones go in parts."""


def is_folder(weights: Any) -> bool:
    """Whether workers read the weights from files; ``None`` is the engine's own folder."""
    return weights is None or isinstance(weights, str | os.PathLike | Checkpoint)


class Sent:
    """Counts what has been sent, and reports it.

    Args:
        callback: gets a :class:`LoadProgress`; ``None`` to count for nobody.
        weights: what is sent.

    Raises:
        UsageError: a mapping holds something that cannot be sent.
    """

    def __init__(self, callback: Callable[[LoadProgress], object] | None, weights: Any) -> None:
        tensors = nbytes = None
        if isinstance(weights, Mapping) and callback is not None:
            tensors, nbytes = len(weights), _size_of_all(weights)
        self._reporter = None if callback is None else Reporter(callback, tensors, nbytes)
        self._tensors = self._nbytes = 0

    def add(self, record: Any) -> None:
        """Count the tensors that a bucket's record makes complete."""
        if self._reporter is None or not record or "rows" not in record:
            return
        for _, dtype, shape, _, begin, length in record["rows"]:
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            self._tensors += begin + length == size
            self._nbytes += length
        self._reporter.tell(self._tensors, self._nbytes)

    def close(self) -> None:
        """Report for the last time."""
        if self._reporter is not None:
            self._reporter.tell(self._tensors, self._nbytes, ended=True)


def _size_of_all(weights: Mapping[str, torch.Tensor], *, between: int = 0) -> int:
    if isinstance(weights, Checkpoint):  # knows it without a look at its tensors
        return weights.nbytes
    return sum(size_of(name, one) + between for name, one in weights.items())


def operations(
    weights: Weights | None, *, check_finite: bool = False, bucket_bytes: int | None = None
) -> Generator[Operation]:
    """Yield operations with their arguments, of builtin types only.

    All workers must have done one before the next is asked for: the memory is used again.

    Args:
        weights: a checkpoint folder or files, ``None`` for the folder that the engine was started
            on, or named tensors.
        check_finite: refuse a mapping with NaN or infinity before anything is sent.
        bucket_bytes: size of the shared memory, by default :data:`BUCKET_BYTES`.

    Raises:
        UsageError: a tensor cannot be sent; one of a mapping, before anything is sent.
        WeightMismatchError: see ``check_finite``; or a source yields something that is no pair.
    """
    if weights is None or isinstance(weights, str | os.PathLike):
        yield "load_path", {"path": None if weights is None else os.fspath(weights)}
        return
    if isinstance(weights, Checkpoint):
        yield "load_files", {"files": [str(file) for file in weights.files]}
        return
    nbytes = bucket_bytes or BUCKET_BYTES
    if isinstance(weights, Mapping):
        nbytes = min(nbytes, _size_of_all(weights, between=ALIGNMENT))
    if isinstance(weights, Mapping) and check_finite:
        intake = Intake(manifest=None, check_finite=True)
        for name, tensor in weights.items():
            intake.check_pair(name, tensor)
    forms = forms_of(weights) if isinstance(weights, Mapping) else None
    arena = Arena.create(nbytes)
    try:
        writer = BucketWriter(arena.memory, forms=forms)
        where = {"path": arena.path, "nbytes": arena.memory.numel(), "token": arena.token}
        yield "open_buckets", {"where": where, "opening": writer.opening()}
        arena.unlink()
        for record in writer.fill(pairs_of(weights)):
            yield "load_bucket", {"record": record}
        yield "close_buckets", {"record": writer.closing()}
    finally:
        arena.close(remove=True)
