"""Bytes are carried by the way that is the fastest on this machine, and arrive whole.

Damage shown: bytes that are not a multiple of a word, or not aligned to one, are cut off or misplaced; the
slow way is taken for good.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightload import moving

SIZE = 3 << 20


@pytest.fixture(scope="module")
def memory():
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)
    return source, torch.zeros(SIZE, dtype=torch.uint8)


@pytest.mark.parametrize(
    "way", [moving.move, moving._copy, moving.carry], ids=["move", "copy", "carry"]
)
@given(
    to=st.integers(0, 70),
    start=st.integers(0, 70),
    nbytes=st.one_of(st.integers(0, 300), st.integers(2 * moving.LARGE, 2 * moving.LARGE + 70)),
)
def test_exactly_these_bytes_are_carried(memory, way, to, start, nbytes):
    source, target = memory
    target.zero_()
    way(target.data_ptr() + to, source.data_ptr() + start, nbytes)
    assert torch.equal(target[to : to + nbytes], source[start : start + nbytes])
    assert not target[:to].any()
    assert not target[to + nbytes :].any()


@pytest.mark.parametrize("rates", [(1.0, 2.0), (2.0, 1.0), (3.0, 2.0, 1.0)])
def test_the_fastest_way_is_taken_once_each_was_tried(rates):
    now, taken = [0.0], []

    def way(number, rate):
        def carry(target, source, nbytes):
            taken.append(number)
            now[0] += nbytes * rate

        return carry

    race = moving.Race([way(*pair) for pair in enumerate(rates)], tried=100, clock=lambda: now[0])
    sizes = itertools.cycle([10, 20, 30])
    while len({*taken}) < len(rates) or len(taken) < 40:
        race(0, 0, next(sizes))
    assert {*taken[: len(rates)]} == {*range(len(rates))}
    assert {*taken[-10:]} == {rates.index(min(rates))}
    assert len(taken) < 60


def test_small_and_large_runs_are_judged_apart(monkeypatch):
    """A C library may write large runs past the caches, and small ones not."""
    taken = []
    for name in ("move", "_large", "_huge"):
        monkeypatch.setattr(moving, name, lambda *args, name=name: taken.append(name))
    for nbytes in (0, moving.LARGE - 1, moving.LARGE, moving._HUGE - 1, moving._HUGE):
        moving.carry(0, 0, nbytes)
    assert taken == ["move", "move", "_large", "_large", "_huge"]


def test_one_slow_run_does_not_decide():
    """The first run into a page that was never touched takes many times as long."""
    now, taken = [0.0], []

    def way(number, rate):
        def carry(target, source, nbytes):
            slow = 100 if number not in taken else 1
            taken.append(number)
            now[0] += nbytes * rate * (slow if number == 0 else 1)

        return carry

    race = moving.Race([way(0, 1.0), way(1, 1.5)], tried=100, clock=lambda: now[0])
    for _ in range(40):
        race(0, 0, 10)
    assert {*taken[-10:]} == {0}
