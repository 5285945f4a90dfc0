"""How far one session has come, in which step it is, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

__all__ = ["Progress"]


@attrs.define(kw_only=True)
class Progress:
    """What is known about a session that fails now.

    Attributes:
        dirty: whether a live byte was written, or is about to be: an abort poisons from then on.
        dirty_since: when that began, on the clock of ``time.perf_counter``.
        step: what is being done, such as ``"load"`` or ``"process"``.
        module: qualified name of the module that is being processed.
        seconds: time spent in each phase.
        layer_seconds: time spent in processing and committing each unit, by its name.
    """

    dirty: bool = False
    dirty_since: float | None = None
    step: str = "prepare"
    module: str | None = None
    seconds: dict[str, float] = attrs.field(factory=dict)
    layer_seconds: dict[str, float] = attrs.field(factory=dict)

    _depth: int = 0
    _left: float | None = None

    def mark_dirty(self) -> None:
        """Note that a live byte is about to be written."""
        if not self.dirty:
            self.dirty, self.dirty_since = True, time.perf_counter()

    def is_dirty(self) -> bool:
        """Whether a live byte was written, or is about to be."""
        return self.dirty

    @property
    def dirty_seconds(self) -> float:
        """Time since the first live byte was written; 0 if none was."""
        return 0.0 if self.dirty_since is None else time.perf_counter() - self.dirty_since

    @contextmanager
    def called(self, step: str) -> Iterator[None]:
        """Time a call of the session, and what has passed since the call before it."""
        if not self._depth and self._left is not None:
            self.spend("between", time.perf_counter() - self._left)
        self._depth += 1
        try:
            with self.timed(step):
                yield
        finally:
            self._depth -= 1
            self._left = time.perf_counter()

    def spend(self, phase: str, seconds: float) -> None:
        """Add time to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    @contextmanager
    def timed(self, phase: str, layer: str | None = None) -> Iterator[None]:
        """Add the time of the block to a phase, and to a layer."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.spend(phase, spent)
            if layer is not None:
                self.layer_seconds[layer] = self.layer_seconds.get(layer, 0.0) + spent
