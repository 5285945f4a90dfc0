"""What sources of named tensors are, and what they yield."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from weightload.errors import UsageError, WeightMismatchError

__all__ = ["FILLED", "Pair", "pairs_of", "unless_empty", "unpack"]

Pair = tuple[str, torch.Tensor]

FILLED: Any = object()
"""What a source yields when it has put tensors to their places itself."""


def pairs_of(weights: Mapping[str, torch.Tensor] | Iterable[Pair]) -> Iterable[Pair]:
    """Return name and tensor pairs, whatever kind of source was given.

    Raises:
        UsageError: it is none.
    """
    if not isinstance(weights, Iterable):
        raise UsageError(
            f"Weights are a mapping of names to tensors, or an iterable of (name, tensor) pairs; "
            f"found {type(weights).__name__}."
        )
    return weights.items() if isinstance(weights, Mapping) else weights


def unpack(pair: Any) -> tuple[Any, Any]:
    """Return the two parts of what a source yielded.

    Raises:
        WeightMismatchError: it has not two parts.
    """
    try:
        name, tensor = pair
    except (TypeError, ValueError):
        raise WeightMismatchError(
            f"A source yields (name, tensor) pairs; found {type(pair).__name__}."
        ) from None
    return name, tensor


def unless_empty(feed: Iterator[Any]) -> Iterator[Any] | None:
    """Return what there is to iterate, ``None`` if nothing is left for the loaders."""
    first = list(itertools.islice(feed, 1))
    if not first:
        return None

    def rest() -> Iterator[Any]:
        yield first.pop()
        yield from feed

    return rest()
