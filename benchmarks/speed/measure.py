"""Times of several ways to do the same, taken in turn, and the limits that memory sets."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch

from benchmarks.speed.models import Source


class WrongResult(Exception):
    """A model does not hold what was loaded; nothing of that counts."""


@attrs.frozen
class Taken:
    """What one call took.

    Attributes:
        cpu: seconds of this thread.
        wall: seconds.
        faults: pages that were touched for the first time.
    """

    cpu: float
    wall: float
    faults: int


def taken(call: Callable[[], Any]) -> Taken:
    """Do it and say what it took; garbage of what came before is collected first."""
    gc.collect()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    cpu, wall = time.thread_time(), time.perf_counter()
    call()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    return Taken(cpu, wall, resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults)


@attrs.define
class Series:
    """What each arm took in each round, in the order of the rounds; the warm-up is not in it."""

    arms: dict[str, list[Taken]] = attrs.field(factory=dict)
    wrong: dict[str, str] = attrs.field(factory=dict)

    def add(self, arm: str, one: Taken) -> None:
        """Keep one more."""
        self.arms.setdefault(arm, []).append(one)

    def cpu(self, arm: str) -> float:
        """Return the median of the seconds of CPU time."""
        return statistics.median(one.cpu for one in self.arms[arm])

    def least(self, arm: str) -> float:
        """Return the least seconds of CPU time."""
        return min(one.cpu for one in self.arms[arm])

    def wall(self, arm: str) -> float:
        """Return the median of the seconds."""
        return statistics.median(one.wall for one in self.arms[arm])

    def ratio(self, arm: str, other: str, *, wall: bool = False) -> float:
        """Return the median, over the rounds, of one arm's time over another's."""
        key = "wall" if wall else "cpu"
        pairs = zip(self.arms[arm], self.arms[other], strict=True)
        return statistics.median(getattr(a, key) / getattr(b, key) for a, b in pairs)

    def plain(self) -> dict[str, Any]:
        """Return everything for the result's file."""
        found: dict[str, Any] = {}
        for arm, all_of in self.arms.items():
            found[arm] = {
                "cpu_median_s": self.cpu(arm),
                "cpu_min_s": self.least(arm),
                "wall_median_s": self.wall(arm),
                "wall_min_s": min(one.wall for one in all_of),
                "rounds": [attrs.astuple(one) for one in all_of],
            }
            if arm in self.wrong:
                found[arm]["wrong result"] = self.wrong[arm]
        return found


def in_turn(
    arms: dict[str, Callable[[int], Any]],
    rounds: int,
    *,
    before: Callable[[int], Any] = lambda number: None,
    between: Callable[[int], Any] = lambda number: None,
    check: Callable[[int, str], str | None] = lambda number, arm: None,
    may_be_wrong: tuple[str, ...] = ("native",),
) -> Series:
    """Run all arms one after the other, round after round, after one round that does not count.

    Args:
        arms: by name, what is called with the number of the round, from 0 for the warm-up.
        rounds: how many count.
        before: called before each round.
        between: called before each arm.
        check: called after each arm has run; what is wrong with the result, if anything is.
        may_be_wrong: arms whose wrong results are noted. A wrong result of another is an error.
    """
    series = Series()
    for number in range(rounds + 1):
        before(number)
        for arm, run in arms.items():
            between(number)
            said: list[Any] = []
            one = taken(lambda run=run, number=number, said=said: said.append(run(number)))
            # An arm that waits for others in between says itself what it took.
            one = said[0] if isinstance(said[0], Taken) else one
            wrong = check(number, arm)
            if wrong and arm not in may_be_wrong:
                raise WrongResult(f"round {number}: {arm} gave a wrong result: {wrong}")
            if wrong:
                series.wrong.setdefault(arm, wrong)
            if number:
                series.add(arm, one)
    return series


class Limits:
    """The same bytes moved without any thought: in one piece (L1), and tensor by tensor (L2)."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.flat = torch.zeros_like(source.flat)
        self.targets = []
        start = source.flat.data_ptr()
        for tensor in source.tensors.values():
            offset = tensor.data_ptr() - start
            view = self.flat[offset : offset + tensor.nbytes].view(tensor.dtype)
            self.targets.append((view.view(tensor.shape), tensor))

    def memmove(self, _: int = 0) -> None:
        """Move all bytes by one call of the C library."""
        ctypes.memmove(self.flat.data_ptr(), self.source.flat.data_ptr(), self.source.flat.nbytes)

    def loop(self, _: int = 0) -> None:
        """Copy tensor by tensor."""
        for target, tensor in self.targets:
            target.copy_(tensor)
