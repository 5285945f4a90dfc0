"""Sources that fail or hold what does not fit, each with the error that it ends a session with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightload.errors import DuplicateWeightError, UnexpectedWeightError, WeightMismatchError

__all__ = ["FAULTS", "SourceFault", "fails_after"]

Tensor = torch.Tensor


class SourceFault(Exception):
    """What a source raises."""


def _wrong_shape(name: str, tensor: Tensor) -> Any:
    return name, torch.cat([tensor, tensor])


FAULTS: dict[str, tuple[type[BaseException], Callable[[str, Tensor], Any]]] = {
    "source": (SourceFault, lambda name, tensor: None),
    "interrupt": (KeyboardInterrupt, lambda name, tensor: None),
    "again": (DuplicateWeightError, lambda name, tensor: None),
    "unknown": (UnexpectedWeightError, lambda name, tensor: ("nowhere.weight", tensor)),
    "shape": (WeightMismatchError, _wrong_shape),
    "broadcast": (WeightMismatchError, lambda name, tensor: (name, tensor[:1])),
    "meta": (WeightMismatchError, lambda name, tensor: (name, tensor.to("meta"))),
    "no pair": (WeightMismatchError, lambda name, tensor: name),
}
"""By what is wrong: the error, and what makes a wrong pair of one that fits."""


def fails_after(
    pairs: Iterable[tuple[str, Tensor]], error: BaseException
) -> Iterator[tuple[str, Tensor]]:
    """Yield what fits, then raise."""
    yield from pairs
    raise error
