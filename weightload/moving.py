"""Copies values from one tensor to another by the fastest call that the platform has."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["LARGE", "Race", "carry", "move", "unwatched"]

LARGE = 1 << 20
"""Bytes from which on several threads copy faster than one."""

Move = Callable[[int, int, int], object]
"""Copies bytes: called with target address, source address and their number."""

move: Move = ctypes.memmove
"""Copy bytes. A third of the time that a tensor's own ``copy_`` needs for a small run."""

unwatched: Callable[[], object] = getattr(torch._C, "_DisableTorchDispatch", object)
"""Makes an object during whose life no dispatch mode is asked.

Let go of it in a ``finally`` clause: the traceback of an exception keeps what a function has."""

_HUGE = 16 << 20
"""Bytes from which on some C libraries write past the processor's caches."""
_TRIED = 512 << 20
"""Bytes that each way carries before it is known which is faster."""
_WORD = 8


def _copy(target: int, source: int, nbytes: int) -> None:
    """Copy bytes as torch copies a tensor of integers; what is not aligned to these is moved."""
    if not nbytes or (target | source | nbytes) % _WORD:
        move(target, source, nbytes)
        return
    memory, guard = ctypes.c_char * nbytes, unwatched()
    try:
        torch.frombuffer(memory.from_address(target), dtype=torch.int64).copy_(
            torch.frombuffer(memory.from_address(source), dtype=torch.int64)
        )
    finally:
        del guard


class Race:
    """Carries bytes by each of several ways in turn, and by the fastest from then on.

    Which one that is depends on processor and C library: a tensor's own ``copy_`` was seen to be a tenth
    faster than ``memmove``, and on another machine half as fast.

    Args:
        ways: each can copy any bytes.
        tried: bytes that each carries before that.
        clock: gives seconds.
    """

    def __init__(
        self,
        ways: Sequence[Move] = (move, _copy),
        tried: int = _TRIED,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._ways = list(ways)
        self._tried = tried
        self._clock = clock
        self._carried = [0] * len(ways)
        self._rates: list[list[float]] = [[] for _ in ways]
        self._best: Move | None = None

    def __call__(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes."""
        if self._best is not None:
            self._best(target, source, nbytes)
            return
        number = self._carried.index(min(self._carried))
        started = self._clock()
        self._ways[number](target, source, nbytes)
        self._rates[number].append((self._clock() - started) / nbytes)
        self._carried[number] += nbytes
        if min(self._carried) >= self._tried:
            each = [*map(statistics.median, self._rates)]  # some runs are the first in their pages
            self._best = self._ways[each.index(min(each))]


_large, _huge = Race(), Race()


def carry(target: int, source: int, nbytes: int) -> None:
    """Copy bytes in the way that is the fastest for so many of them on this machine.

    Args:
        target: address.
        source: address.
        nbytes: how many; the two runs must not overlap.
    """
    if nbytes < LARGE:
        move(target, source, nbytes)
    elif nbytes < _HUGE:
        _large(target, source, nbytes)
    else:
        _huge(target, source, nbytes)
