"""Regions, compared with plain sets of indices."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from weightload.ledger import RegionLedger, full_region, locate, meet, uncovered, volume


def cells(region):
    """Return the set of index tuples that a region holds."""
    return set(itertools.product(*(range(*span) for span in region)))


def everything(shape):
    return cells(full_region(shape))


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
sized_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def spans(draw, size):
    first = draw(st.integers(0, size))
    stop = draw(st.integers(first, size))
    return first, stop, draw(st.integers(1, 3))


def regions(shape):
    return st.tuples(*(spans(size) for size in shape))


shape_and_regions = shapes.flatmap(
    lambda shape: st.tuples(st.just(shape), st.lists(regions(shape), max_size=5))
)


# ------------------------------------------------------------------------------ locate


@st.composite
def views(draw):
    """Return a base whose elements are their own numbers, and a view made by random steps.

    The third value says whether dimensions were cut anew after they had been joined.
    """
    joined = cut = False
    shape = draw(sized_shapes)
    base = torch.arange(math.prod(shape)).view(shape)
    if draw(st.booleans()):
        base = base.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):  # a base that is a part of something larger
        base = base[:: draw(st.integers(1, 2))]
        base = base.narrow(-1, 0, draw(st.integers(1, base.shape[-1])))
    view = base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(
            st.sampled_from(
                ["narrow", "select", "step", "transpose", "flatten", "unflatten", "unsqueeze"]
            )
        )
        dim = draw(st.integers(0, max(view.ndim - 1, 0)))
        if kind == "unsqueeze":
            view = view.unsqueeze(dim)
            continue
        if view.ndim == 0:
            continue
        size = view.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, size))
            view = view.narrow(dim, start, draw(st.integers(0, size - start)))
        elif kind == "select" and size:
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "step":
            start, step = draw(st.integers(0, size)), draw(st.integers(1, 3))
            view = view[(slice(None),) * dim + (slice(start, None, step),)]
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.ndim - 1)))
        elif kind == "flatten":
            try:
                view = view.view(-1)
            except RuntimeError:
                continue
            joined = True
        elif kind == "unflatten" and size and size % 2 == 0:
            view = view.unflatten(dim, (2, size // 2))
            cut = cut or joined
    return base, view, cut


def located(base, view):
    return locate(
        view.storage_offset() - base.storage_offset(),
        view.shape,
        view.stride(),
        base.shape,
        base.stride(),
    )


def is_product_of_spans(indices, ndim):
    """Whether a set of index tuples is one span per dimension."""
    parts = [sorted({index[dim] for index in indices}) for dim in range(ndim)]
    if any(len({b - a for a, b in itertools.pairwise(part)}) > 1 for part in parts):
        return False
    return len(indices) == math.prod(len(part) for part in parts)


@given(views())
def test_a_view_is_located_exactly_where_its_elements_are(pair):
    """Each view is the region of its elements, or no region; no view that is one is refused,
    but for those whose dimensions run across those of the base."""
    base, view, cut = pair
    numbers = {int(base[index]): index for index in everything(base.shape)}
    indices = {numbers[int(number)] for number in view.reshape(-1)}
    region = located(base, view)
    if region is not None:
        assert cells(region) == indices
    else:
        assert cut or not indices or not is_product_of_spans(indices, base.ndim)


@given(views(), st.integers(2, 3))
def test_an_expanded_view_is_no_region(pair, times):
    """What it holds would be counted several times."""
    base, view, _ = pair
    assume(view.numel() > 0)
    expanded = view.unsqueeze(0).expand(times, *view.shape)
    assert located(base, expanded) is None


@given(views())
def test_a_view_that_is_not_inside_is_no_region(pair):
    base, view, _ = pair
    assume(view.numel() > 0)
    inside = (view.shape, view.stride(), base.shape, base.stride())
    assert locate(-1, *inside) is None
    last = sum((size - 1) * step for size, step in zip(base.shape, base.stride(), strict=True))
    assert locate(last + 1, *inside) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda base: base, ((0, 6, 1), (0, 4, 1))),
        (lambda base: base.narrow(0, 2, 3), ((2, 5, 1), (0, 4, 1))),
        (lambda base: base[1], ((1, 2, 1), (0, 4, 1))),
        (lambda base: base[:, 2], ((0, 6, 1), (2, 3, 1))),
        (lambda base: base[1::2], ((1, 6, 2), (0, 4, 1))),
        (lambda base: base[0::2, ::3], ((0, 5, 2), (0, 4, 3))),
        (lambda base: base.t(), ((0, 6, 1), (0, 4, 1))),
        (lambda base: base.t()[1:3], ((0, 6, 1), (1, 3, 1))),
        (lambda base: base.view(2, 3, 4)[1], ((3, 6, 1), (0, 4, 1))),
        (lambda base: base.view(3, 2, 4)[:, 1], ((1, 6, 2), (0, 4, 1))),
        (lambda base: base.view(-1)[4:12], ((1, 3, 1), (0, 4, 1))),
        (lambda base: base.view(-1)[5], ((1, 2, 1), (1, 2, 1))),
        (lambda base: base.view(-1)[3:9], None),
        (lambda base: base.view(-1)[::3], None),
        (lambda base: base.diagonal(), None),
        (lambda base: base[:1].expand(6, 4), None),
    ],
)
def test_what_loaders_write_to_is_found(make, expected):
    """Shards, rows, interleaved rows, transposed and fused views of a weight of 6 by 4."""
    base = torch.empty(6, 4)
    assert located(base, make(base)) == expected


def test_a_scalar_is_its_own_region():
    assert located(torch.tensor(1.0), torch.tensor(1.0)) == ()
    assert located(torch.tensor(1.0), torch.tensor(1.0).view(1)) == ()


def test_a_view_without_elements_is_a_region_without_elements():
    base = torch.empty(6, 4)
    assert cells(located(base, base[3:3])) == set()


# ------------------------------------------------------------------------------ uncovered


@given(shape_and_regions)
@example(((), []))
@example(((), [()]))
def test_what_is_uncovered_are_disjoint_regions_that_hold_the_rest(drawn):
    shape, covered = drawn
    rest = uncovered(shape, covered)
    union = set().union(*(cells(region) for region in rest))
    assert union == everything(shape).difference(*(cells(region) for region in covered))
    assert len(union) == sum(len(cells(region)) for region in rest)
    assert len(union) == sum(volume(region) for region in rest)


@given(sized_shapes.flatmap(lambda shape: st.tuples(regions(shape), regions(shape))))
def test_regions_meet_if_they_have_an_index_in_common(pair):
    one, two = pair
    assert meet(one, two) == bool(cells(one) & cells(two))


# ------------------------------------------------------------------------------ the ledger


class Model:
    """The ledger as a dict from index tuple to the set of sources that wrote it."""

    def __init__(self, shape):
        self.sources = {index: set() for index in everything(shape)}

    def enter(self, region, source):
        for index in cells(region):
            self.sources[index].add(source)

    @property
    def empty(self):
        return {index for index, sources in self.sources.items() if not sources}

    @property
    def conflicts(self):
        return [sources for sources in self.sources.values() if len(sources) > 1]


deliveries = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape),
        st.lists(st.tuples(regions(shape), st.sampled_from("abc")), max_size=6),
    )
)


@given(deliveries, st.data())
def test_the_ledger_keeps_what_a_set_of_indices_would(drawn, data):
    """Missing, complete, writers and conflicts agree with the brute-force model."""
    shape, writes = drawn
    ledger, model = RegionLedger(shape=shape), Model(shape)
    exact = {}
    for region, source in writes:
        before = exact.get(region)
        told = ledger.enter(region, source)
        assert told == (before if before != source else None)
        exact[region] = source
    for region, source in exact.items():
        model.enter(region, source)
    assert ledger.touched == bool(writes)
    assert set(ledger.regions) == exact.keys()
    missing = ledger.missing()
    assert set().union(*(cells(region) for region in missing)) == model.empty
    assert ledger.complete() == (not model.empty)
    gaps = data.draw(st.lists(regions(shape), max_size=3))
    left = model.empty.difference(*(cells(gap) for gap in gaps))
    assert ledger.complete(gaps) == (not left)
    assert set().union(*(cells(region) for region in ledger.missing(gaps))) == left
    asked = data.draw(regions(shape))
    touching = [source for region, source in exact.items() if cells(region) & cells(asked)]
    assert sorted(ledger.writers(asked)) == sorted(touching)
    assert ledger.leaves_out(asked) == bool(cells(asked) & model.empty)
    conflict = ledger.conflict()
    if conflict is None:
        assert not model.conflicts
    else:
        assert any(set(conflict) <= sources for sources in model.conflicts)
        assert conflict[0] != conflict[1]


def test_a_shard_that_came_twice_does_not_hide_the_one_that_never_came():
    """Counting elements would call this complete."""
    ledger = RegionLedger(shape=(4, 2))
    first = ((0, 2, 1), (0, 2, 1))
    assert ledger.enter(first, "q") is None
    assert ledger.enter(first, "k") == "q"
    assert ledger.writer(first) == "k"
    assert not ledger.complete()
    assert ledger.missing() == [((2, 4, 1), (0, 2, 1))]


def test_one_source_may_write_one_region_again():
    """A loader that copies and then transforms in place is one delivery."""
    ledger = RegionLedger(shape=(2,))
    assert ledger.enter(((0, 2, 1),), "w") is None
    assert ledger.enter(((0, 2, 1),), "w") is None
    assert ledger.complete()
    assert ledger.conflict() is None


def test_an_empty_tensor_is_complete_from_the_start():
    assert RegionLedger(shape=(0, 4)).complete()
    assert RegionLedger(shape=(4, 0)).missing() == []


def test_a_scalar_is_complete_after_one_write():
    ledger = RegionLedger(shape=())
    assert not ledger.complete()
    assert ledger.missing() == [()]
    ledger.enter((), "scale")
    assert ledger.complete()
