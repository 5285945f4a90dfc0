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
        step: what is being done, such as ``"load"`` or ``"process"``.
        module: qualified name of the module that is being processed.
        seconds: time spent in each phase.
        layer_seconds: time spent in processing and committing each unit, by its name.
    """

    dirty: bool = False
    step: str = "prepare"
    module: str | None = None
    seconds: dict[str, float] = attrs.field(factory=dict)
    layer_seconds: dict[str, float] = attrs.field(factory=dict)

    def mark_dirty(self) -> None:
        """Note that a live byte is about to be written."""
        self.dirty = True

    @contextmanager
    def timed(self, phase: str, layer: str | None = None) -> Iterator[None]:
        """Add the time of the block to a phase, and to a layer."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
            if layer is not None:
                self.layer_seconds[layer] = self.layer_seconds.get(layer, 0.0) + spent
