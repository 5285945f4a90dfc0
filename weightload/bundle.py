"""The tensors of one call of ``load``, or of one file, that came as they are expected to come again.

A trainer sends the same names in the same order every time. What was found out about each of them
can be compared with all of them at once then, by few calls that each look at a whole list; and what
is staged is begun and ended once for each tensor of the model, not for each that comes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from operator import attrgetter
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from weightload.ledger import Region
from weightload.moving import LARGE, carry, move
from weightload.pieces import AT_ONCE, MOST, Chunk, Pieced, pieces_of, runs_of
from weightload.record import SourceFact
from weightload.staging import BUCKET

if TYPE_CHECKING:
    from weightload.recorded import Copy, Recorded, Route

__all__ = ["PLAIN", "Addresses", "Bundle", "Fill", "Portion"]

Addresses = Sequence[int] | Mapping[int, int]
"""Where the first element of each tensor is, by its position in the skeleton."""

PLAIN = frozenset((torch.Tensor, nn.Parameter))
"""Types of tensors that are nothing but memory."""
_AT_ONCE = 256
"""Runs that are moved without a look at anything else, such as an interrupt."""
_ALIGNED = 64
_WORTH_A_LOOK = 64 << 20
"""Bytes after which somebody may want to know how far this is."""


@attrs.frozen(eq=False, repr=False)
class Fill:
    """A tensor that is staged, all of which comes in one portion.

    Attributes:
        place: its qualified name.
        at: its position in the skeleton, or a negative number if it is only there in a load; its
            address is among those that are returned when the portion begins.
        loader: its own loader when the plan was recorded.
        regions: which source fills which part of it; no two parts have an element in common.
        nbytes: its size.
    """

    place: str
    at: int
    loader: object
    regions: dict[Region, str | None]
    nbytes: int


@attrs.frozen(eq=False, repr=False)
class Portion:
    """Some tensors of a bundle that follow each other.

    Attributes:
        start: position of the first one.
        stop: position behind the last one.
        single: whether each of them has to be looked at; there is nothing else in the portion then.
        nbytes: their size.
        facts: what is remembered about each name.
        runs: for each run of bytes the position of its tensor from ``start`` on, the place, the first
            byte there, the first byte in the source and the number of bytes.
        live: the places that are written where they are.
        fills: the others that are staged as a whole.
        chunks: pieces that are processed at the end of the portion.
    """

    start: int
    stop: int
    single: bool = True
    nbytes: int = 0
    facts: dict[str, SourceFact] = attrs.field(factory=dict)
    runs: list[tuple[int, int, int, int, int]] = attrs.field(factory=list)
    live: frozenset[int] = frozenset()
    fills: list[Fill] = attrs.field(factory=list)
    chunks: list[Chunk] = attrs.field(factory=list)

    def move(self, tensors: Sequence[torch.Tensor], addresses: Addresses) -> None:
        """Move all runs.

        Args:
            tensors: of the whole bundle, for which :meth:`Bundle.fits` was true.
            addresses: of the places.
        """
        first = [*map(torch.Tensor.data_ptr, tensors[self.start : self.stop])]
        for begin in range(0, len(self.runs), _AT_ONCE):
            runs = self.runs[begin : begin + _AT_ONCE]
            targets = [addresses[place] + to for _, place, to, _, _ in runs]
            sources = [first[at] + start for at, _, _, start, _ in runs]
            sizes = [nbytes for *_, nbytes in runs]
            how = carry if max(sizes) >= LARGE else move
            deque(map(how, targets, sources, sizes), maxlen=0)

    def pieces(
        self, offsets: Sequence[int], addresses: Addresses
    ) -> Iterator[tuple[int, int, int]]:
        """Yield for each run where it begins in a file, its size and the address that it goes to.

        Args:
            offsets: where the tensors of the whole bundle begin in the file.
            addresses: of the places.
        """
        first = self.start
        for at, place, to, start, nbytes in self.runs:
            yield offsets[first + at] + start, nbytes, addresses[place] + to


@attrs.frozen(eq=False, repr=False)
class Bundle:
    """What is known about tensors that come one after the other.

    Attributes:
        names: theirs, in the order in which they come; no name twice.
        shapes: theirs.
        dtypes: theirs.
        sizes: theirs, in bytes.
        portions: what has to be done for them.
        threads: whether large runs were left to several threads.
        pieced: the tensors that are processed in pieces, by qualified name.
    """

    names: tuple[str, ...]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    sizes: list[int]
    portions: list[Portion]
    threads: bool
    pieced: Mapping[str, Pieced]

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        recorded: Recorded,
        owners: Mapping[str, object],
        pieced: Mapping[str, Pieced],
        *,
        threads: bool,
    ) -> Bundle | None:
        """Make it of names that a plan knows, ``None`` if it does not.

        Args:
            names: what comes.
            recorded: the plan.
            owners: for each place that may be staged what it is processed with.
            pieced: the places that are processed in pieces.
            threads: whether large runs are better left to several threads.
        """
        routes = [recorded.routes.get(name) for name in names]
        known = [route for route in routes if route is not None]
        if len(known) < len(names) or len(set(names)) < len(names):
            return None
        return cls(
            names=names,
            shapes=[route.shape for route in known],
            dtypes=[route.dtype for route in known],
            sizes=[route.nbytes for route in known],
            portions=_Cutter(names, known, recorded, owners, pieced, threads).portions(),
            threads=threads,
            pieced=pieced,
        )

    @property
    def helps(self) -> bool:
        """Whether something is taken together."""
        return not all(portion.single for portion in self.portions)

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether as many tensors, which have come under the names, are what they were."""
        return (
            PLAIN.issuperset(map(type, tensors))
            and [*map(attrgetter("dtype"), tensors)] == self.dtypes
            and [*map(torch.Tensor.size, tensors)] == self.shapes
            and all(map(torch.Tensor.is_contiguous, tensors))
            and all(map(attrgetter("is_cpu"), tensors))
            and not any(map(torch.Tensor.is_neg, tensors))
        )


class _Cutter:
    """Cuts what comes into portions, each of which fills all of the tensors, or pieces, it begins."""

    def __init__(
        self,
        names: Sequence[str],
        routes: Sequence[Route],
        recorded: Recorded,
        owners: Mapping[str, object],
        pieced: Mapping[str, Pieced],
        threads: bool,
    ) -> None:
        self._names, self._routes = names, routes
        self._plan = recorded.plan
        self._places = dict(recorded.skeleton.places)
        for place in owners:  # what hooks take away is not there between loads
            self._places.setdefault(place, -1 - len(self._places))
        self._owners, self._pieced, self._threads = owners, pieced, threads
        self._numbers = count(-1 - len(self._places), -1)

    def portions(self) -> list[Portion]:
        """Return them."""
        found: list[Portion] = []
        begun = [[*self._begins(route)] for route in self._routes]
        left = Counter(chain.from_iterable(begun))
        waiting: set[object] = set()
        start = size = 0
        for at, route in enumerate(self._routes):
            alone = not all(map(self._moves, route.copies))
            if alone and not waiting and start < at:
                found.append(self._portion(start, at))
                start = at
            for one in begun[at]:
                left[one] -= 1
                (waiting.add if left[one] else waiting.discard)(one)
            size = route.nbytes + (size if start < at else 0)
            ends = alone or any(copy.place in self._owners for copy in route.copies)
            ends = ends or (bool(begun[at]) and size >= AT_ONCE)
            if not waiting and (ends or size >= _WORTH_A_LOOK or at + 1 - start >= _AT_ONCE):
                found.append(self._portion(start, at + 1))
                start = at + 1
        if start < len(self._routes):
            found.append(self._portion(start, len(self._routes)))
        return found

    def _begins(self, route: Route) -> Iterator[object]:
        """Yield what a tensor fills, or helps to fill, and is filled by one portion if possible."""
        for copy in route.copies:
            if copy.place in self._owners:
                yield copy.place
            elif copy.place in self._pieced:
                yield from ((copy.place, piece) for piece in pieces_of(copy))

    def _moves(self, copy: Copy) -> bool:
        """Whether a write is a run of bytes that one thread moves."""
        return copy.start is not None and not (self._threads and copy.nbytes >= LARGE)

    def _portion(self, start: int, stop: int) -> Portion:
        names, routes = self._names[start:stop], self._routes[start:stop]
        copies = [(at, copy) for at, route in enumerate(routes) for copy in route.copies]
        fills: dict[str, list[tuple[str, Copy]]] = {}
        for at, copy in copies:
            if copy.place in self._owners:
                fills.setdefault(copy.place, []).append((names[at], copy))
        made = [self._fill(place, mine) for place, mine in fills.items()]
        whole = [fill for fill in made if fill is not None]
        crowded = (
            len({self._owners[fill.place] for fill in whole}) > 1
            and sum(fill.nbytes for fill in whole) > BUCKET
        )
        if len(whole) < len(made) or crowded or not all(self._moves(copy) for _, copy in copies):
            return Portion(start, stop)
        chunks = self._chunks([copy for _, copy in copies if copy.place in self._pieced])
        if chunks is None:
            return Portion(start, stop)
        places = self._places
        homes = {
            (chunk.at, piece): chunk.place
            for chunk in chunks
            for piece in range(chunk.first, chunk.stop)
        }

        def home(copy: Copy) -> int:
            at = places[copy.place]
            return homes[at, copy.region[0][0]] if copy.place in self._pieced else at

        return Portion(
            start=start,
            stop=stop,
            single=False,
            nbytes=sum(route.nbytes for route in routes),
            facts={name: route.fact for name, route in zip(names, routes, strict=True)},
            runs=[(at, home(c), c.to, c.start or 0, c.nbytes) for at, c in copies],
            live=frozenset(
                places[c.place]
                for _, c in copies
                if c.place not in fills and c.place not in self._pieced
            ),
            fills=whole,
            chunks=chunks,
        )

    def _chunks(self, copies: Sequence[Copy]) -> list[Chunk] | None:
        """Return the pieces that writes fill, ``None`` if that is not all of each, or too much."""
        filled: dict[str, Counter[int]] = {}
        for copy in copies:
            span, mine = pieces_of(copy), filled.setdefault(copy.place, Counter())
            for piece in span:
                mine[piece] += copy.count // max(1, len(span))
        found: list[Chunk] = []
        offset = 0
        for place, counts in filled.items():
            one = self._pieced[place]
            if {*counts.values()} != {one.numel}:
                return None
            for first, stop in runs_of(sorted(counts), one.count):
                start = first * one.nbytes
                number = next(self._numbers)
                found.append(Chunk(number, one.at, first, stop, offset, start))
                offset += -(-(stop - first) * one.nbytes // _ALIGNED) * _ALIGNED
        return found if offset <= MOST else None

    def _fill(self, place: str, mine: list[tuple[str, Copy]]) -> Fill | None:
        """Return what fills a place, ``None`` if that is not all of it."""
        count = sum(copy.count for _, copy in mine)
        if count != math.prod(self._plan.places[place].shape):
            return None
        return Fill(
            place=place,
            at=self._places[place],
            loader=mine[0][1].loader,
            regions={copy.region: name for name, copy in mine},
            nbytes=sum(copy.nbytes for _, copy in mine),
        )
