"""Regions of a tensor: where a write landed, what is covered, what is missing.

Counting elements cannot tell a shard that came twice from one that never came, so the ledger
keeps the regions themselves. A region is one span of indices per dimension of the tensor; all
arithmetic is on integers and needs no tensor library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

__all__ = [
    "Region",
    "RegionLedger",
    "Span",
    "full_region",
    "locate",
    "meet",
    "uncovered",
    "volume",
    "without",
]

Span = tuple[int, int, int]
"""Start, stop and step of the indices taken along one dimension, as in ``range``."""
Region = tuple[Span, ...]
"""One span per dimension; the empty tuple is the one element of a scalar."""


def full_region(shape: Sequence[int]) -> Region:
    """Return the region that holds every element of a tensor of ``shape``."""
    return tuple((0, size, 1) for size in shape)


def volume(region: Region) -> int:
    """Return how many elements ``region`` holds."""
    return math.prod(len(range(*span)) for span in region)


def locate(
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    base_size: Sequence[int],
    base_stride: Sequence[int],
) -> Region | None:
    """Express a strided view as a region of the tensor that it looks into.

    Args:
        offset: elements between the first element of the base and that of the view.
        size: shape of the view.
        stride: strides of the view, in elements.
        base_size: shape of the base.
        base_stride: strides of the base, in elements; its dimensions must not overlap.

    Returns:
        The region, or ``None`` if the view is no product of spans of the base's dimensions.
        A view without elements gives a region without elements.
    """
    if 0 in size:
        return tuple((0, 0, 1) for _ in base_size) if base_size else None
    order = sorted(
        (dim for dim in range(len(base_size)) if base_size[dim] > 1),
        key=lambda dim: base_stride[dim],
        reverse=True,
    )
    start = [0] * len(base_size)
    rest = offset
    for dim in order:
        start[dim], rest = divmod(rest, base_stride[dim])
    if rest or offset < 0:
        return None
    spans: list[Span] = [(first, first + 1, 1) for first in start]
    taken: set[int] = set()
    for length, step in sorted(zip(size, stride, strict=True), key=lambda item: item[1]):
        if length > 1 and not _walk(length, step, order, base_size, base_stride, spans, taken):
            return None
    for dim, (_, stop, _) in enumerate(spans):
        if stop > base_size[dim]:
            return None
    return tuple(spans)


def _walk(
    length: int,
    step: int,
    order: Sequence[int],
    base_size: Sequence[int],
    base_stride: Sequence[int],
    spans: list[Span],
    taken: set[int],
) -> bool:
    """Spread ``length`` steps over the base's dimensions, from the innermost that fits outwards."""
    for dim in reversed(order):
        if length == 1:
            return True
        jump, rest = divmod(step, base_stride[dim])
        if rest or not 0 < jump < base_size[dim]:
            continue
        first, _, inner = spans[dim]
        if dim in taken:
            # Two dimensions of the view split this one between them.
            count = len(range(*spans[dim]))
            if jump != inner * count:
                continue
            length, jump = count * length, inner
        taken.add(dim)
        if first + (length - 1) * jump < base_size[dim]:
            spans[dim] = (first, first + (length - 1) * jump + 1, jump)
            return True
        # The view runs over the end of this dimension into the next outer one, which is a
        # region only if it takes the same places in each row.
        count, rest = divmod(base_size[dim], jump)
        if rest or first >= jump or length % count:
            return False
        spans[dim] = (first, first + (count - 1) * jump + 1, jump)
        length //= count
        step = base_size[dim] * base_stride[dim]
    return length == 1


def uncovered(shape: Sequence[int], regions: Iterable[Region]) -> list[Region]:
    """Return disjoint regions that together hold what ``regions`` leave out of ``shape``."""
    return _uncovered(tuple(shape), list(regions), 0)


def without(
    shape: Sequence[int], regions: Iterable[Region], taken: Iterable[Region]
) -> list[Region]:
    """Return disjoint regions that hold what ``regions`` hold and ``taken`` do not."""
    return uncovered(shape, [*uncovered(shape, regions), *taken])


def _uncovered(shape: tuple[int, ...], regions: list[Region], dim: int) -> list[Region]:
    if dim == len(shape):
        return [] if regions else [()]
    if not regions:
        return [full_region(shape[dim:])] if all(shape[dim:]) else []
    missing: list[Region] = []
    for first, stop, present in _slabs(shape[dim], regions, dim):
        missing += [((first, stop, 1), *inner) for inner in _uncovered(shape, present, dim + 1)]
    return missing


def _slabs(size: int, regions: list[Region], dim: int) -> Iterable[tuple[int, int, list[Region]]]:
    """Cut one dimension where regions begin or end; yield each piece with who is present in it."""
    starts: dict[int, list[int]] = {}
    stops: dict[int, list[int]] = {}
    for index, region in enumerate(regions):
        for first, stop in _runs(region[dim]):
            starts.setdefault(first, []).append(index)
            stops.setdefault(stop, []).append(index)
    cuts = sorted({0, size, *starts, *stops})
    present: dict[int, None] = {}
    for first, stop in itertools.pairwise(cuts):
        for index in stops.get(first, ()):
            present.pop(index, None)
        for index in starts.get(first, ()):
            present[index] = None
        yield first, stop, [regions[index] for index in present]


def _runs(span: Span) -> Iterable[tuple[int, int]]:
    first, stop, step = span
    if step == 1:
        return [(first, stop)] if stop > first else []
    return ((index, index + 1) for index in range(first, stop, step))


@attrs.define(kw_only=True)
class RegionLedger:
    """What arrived for one tensor: which region, and which source name brought it.

    Writes of one source may overlap: a loader that copies and then transforms in place is one
    delivery. Writes of different sources may not.
    """

    shape: tuple[int, ...]
    _whole: int = attrs.field(init=False)
    _written: dict[Region, str | None] = attrs.field(factory=dict, init=False)
    _volume: int = attrs.field(default=0, init=False)
    _disjoint: bool = attrs.field(default=True, init=False)

    def __attrs_post_init__(self) -> None:
        """Count the elements."""
        self._whole = math.prod(self.shape)

    def enter(self, region: Region, source: str | None) -> str | None:
        """Enter one write.

        Returns:
            The name of another source that filled exactly this region before, else ``None``.
        """
        if region in self._written:
            before = self._written[region]
            self._written[region] = source
            return before if before != source else None
        self._written[region] = source
        self._volume += volume(region)
        self._disjoint = False  # until somebody has looked
        return None

    def fill(self, region: Region, source: str, count: int) -> None:
        """Enter a write of ``count`` elements to a region that shares none with those of others.

        A plan has only such regions. As long as there are no others, counting tells what is missing.
        """
        self._written[region] = source
        self._volume += count

    def fill_all(self, regions: Mapping[Region, str | None]) -> None:
        """Enter writes that fill all of the tensor; no two of them have an element in common."""
        self._written.update(regions)
        self._volume = self._whole

    @property
    def lacks(self) -> bool:
        """Whether so little has arrived that something must be missing."""
        return self._volume < self._whole

    def has(self, region: Region) -> bool:
        """Whether exactly this region was filled."""
        return region in self._written

    def writer(self, region: Region) -> str | None:
        """Return the source that filled exactly this region, if one did."""
        return self._written.get(region)

    def writers(self, region: Region) -> list[str | None]:
        """Return the sources that filled any element of this region."""
        return [source for other, source in self._written.items() if meet(region, other)]

    def leaves_out(self, region: Region) -> bool:
        """Whether some element of this region has not arrived."""
        return any(meet(region, other) for other in self.missing())

    @property
    def written(self) -> dict[Region, str | None]:
        """The source of each region that was written, in order of arrival."""
        return dict(self._written)

    @property
    def count(self) -> int:
        """How many regions were written."""
        return len(self._written)

    @property
    def touched(self) -> bool:
        """Whether anything arrived."""
        return bool(self._written)

    @property
    def regions(self) -> list[Region]:
        """The regions that were written, in order of arrival."""
        return list(self._written)

    def complete(self, not_expected: Sequence[Region] = ()) -> bool:
        """Whether everything arrived but for the regions that no checkpoint brings."""
        if not not_expected and self._volume < self._whole:
            return False
        count = self._volume + sum(map(volume, not_expected))
        if count < self._whole:
            return False
        if self._disjoint and count == self._whole:
            return True
        return not self.missing(not_expected)

    def missing(self, not_expected: Sequence[Region] = ()) -> list[Region]:
        """Return the regions that have not arrived, as disjoint regions."""
        if full_region(self.shape) in self._written:
            return []
        if self._disjoint and self._volume == math.prod(self.shape):
            return []
        return uncovered(self.shape, [*self._written, *not_expected])

    def conflict(self) -> tuple[str | None, str | None] | None:
        """Return two sources whose regions overlap, or ``None``.

        A source is ``None`` when nobody knows which name a write belongs to.
        """
        covered = math.prod(self.shape) - sum(map(volume, self.missing()))
        if self._volume == covered:
            return None
        return _first_conflict(list(self._written.items()), 0, len(self.shape), self.shape)


def meet(one: Region, two: Region) -> bool:
    """Whether two regions of one tensor have an element in common."""
    return all(_share(first, second) for first, second in zip(one, two, strict=True))


def _share(one: Span, two: Span) -> bool:
    first, stop = max(one[0], two[0]), min(one[1], two[1])
    if one[2] == 1 and two[2] == 1:
        return first < stop
    shorter, longer = sorted((range(*one), range(*two)), key=len)
    return any(index in longer for index in shorter)


def _first_conflict(
    items: list[tuple[Region, str | None]], dim: int, ndim: int, shape: tuple[int, ...]
) -> tuple[str | None, str | None] | None:
    if len({source for _, source in items}) < 2:
        return None
    if dim == ndim:
        first, second, *_ = dict.fromkeys(source for _, source in items)
        return first, second
    regions = [region for region, _ in items]
    sources = dict(items)
    for _, _, present in _slabs(shape[dim], regions, dim):
        if len(present) > 1:
            inner = [(region, sources[region]) for region in present]
            found = _first_conflict(inner, dim + 1, ndim, shape)
            if found is not None:
                return found
    return None
