"""The tensors of one call of ``load`` that came as they are expected to come again.

A trainer sends the same names in the same order every time. What was found out about each of them
can be compared with all of them at once then, by few calls that each look at a whole list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, eq, is_, methodcaller
from typing import Any

import attrs
import torch
from torch import nn

from weightload.moving import move
from weightload.record import SourceFact

__all__ = ["PLAIN", "Bundle"]

PLAIN = frozenset((torch.Tensor, nn.Parameter))
"""Types of tensors that are nothing but memory."""
_AT_ONCE = 256
"""Tensors that are moved without a look at anything else, such as an interrupt."""

_Runs = Mapping[str, Sequence[tuple[int, int, int, int]]]


@attrs.frozen(eq=False, repr=False)
class Portion:
    """Some tensors of a bundle that follow each other.

    Attributes:
        start: position of the first one.
        stop: position behind the last one.
        nbytes: their size.
        runs: for each run of bytes the position of its tensor from ``start`` on, the place, the first
            byte there, the first byte in the source and the number of bytes.
    """

    start: int
    stop: int
    nbytes: int
    runs: list[tuple[int, int, int, int, int]]


@attrs.frozen(eq=False, repr=False)
class Bundle:
    """What is known about tensors that go to their places as runs of bytes.

    Attributes:
        names: theirs, in the order in which they came; no name twice.
        shapes: theirs.
        dtypes: theirs.
        facts: what is remembered about each name.
        portions: of all that has to be moved.
    """

    names: list[str]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    facts: list[SourceFact]
    portions: list[Portion]

    @classmethod
    def of(cls, names: list[str], routes: Mapping[str, Any], runs: _Runs) -> Bundle:
        """Make it of names that all have a route; those without runs go nowhere."""
        mine = [routes[name] for name in names]
        portions = []
        for begin in range(0, len(names), _AT_ONCE):
            some = range(begin, min(begin + _AT_ONCE, len(names)))
            nbytes = sum(mine[at].nbytes for at in some)
            portions.append(
                Portion(
                    begin,
                    some.stop,
                    nbytes,
                    [(at - begin, *run) for at in some for run in runs.get(names[at], ())],
                )
            )
        return cls(
            names=names,
            shapes=[route.shape for route in mine],
            dtypes=[route.dtype for route in mine],
            facts=[route.fact for route in mine],
            portions=portions,
        )

    @property
    def writes(self) -> bool:
        """Whether anything is moved."""
        return any(portion.runs for portion in self.portions)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many tensors, which have come under the names, are what they were."""
        return (
            PLAIN.issuperset(map(type, tensors))
            and all(map(is_, map(attrgetter("dtype"), tensors), self.dtypes))
            and all(map(eq, map(attrgetter("shape"), tensors), self.shapes))
            and all(map(methodcaller("is_contiguous"), tensors))
            and all(map(attrgetter("is_cpu"), tensors))
            and not any(map(methodcaller("is_neg"), tensors))
        )

    def move(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Iterator[Portion]:
        """Move all runs, and yield each portion when that is done.

        Args:
            tensors: for which :meth:`fits` was true.
            addresses: of the places.
        """
        for portion in self.portions:
            mine = tensors[portion.start : portion.stop]
            first = [*map(methodcaller("data_ptr"), mine)]
            targets = [addresses[place] + to for _, place, to, _, _ in portion.runs]
            sources = [first[at] + start for at, _, _, start, _ in portion.runs]
            sizes = [nbytes for *_, nbytes in portion.runs]
            deque(map(move, targets, sources, sizes), maxlen=0)
            yield portion
