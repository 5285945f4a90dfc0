"""What a row says, and what a run is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.model import Shape

NO_DEVICE = "not run: no device"
RAN = "ran"
ON_HOST = "CPU part only: results are right, time is not judged"

DENSE = Shape(layers=36, hidden=3072, inner=8192, heads=24, kv_heads=8, head=128, vocab=65536)
"""8 GB, 399 tensors."""
EXPERTS = Shape(
    layers=48, hidden=512, inner=192, heads=8, kv_heads=2, head=64, vocab=32000, experts=128
)
"""3.8 GB, 18,867 tensors."""
SMALL = Shape(layers=3, hidden=256, inner=512, heads=4, kv_heads=2, head=64, vocab=512)
SMALL_EXPERTS = attrs.evolve(SMALL, layers=2, inner=128, experts=16)


@attrs.frozen(kw_only=True)
class Run:
    """One run of the script.

    Attributes:
        clock: of the device.
        ceilings: what the machine can do at best, see :func:`benchmarks.gpu.clock.ceilings`.
        rounds: pairs that count, for each row.
        scale: part of the layers; 1 is the size that the limits are meant for.
        small: the smallest sizes, to see that everything runs.
    """

    clock: Clock
    ceilings: dict[str, float]
    rounds: int
    scale: float
    small: bool

    def dense(self, part: float = 1.0, method: str = "none") -> Shape:
        """Return the dense shape, or a part of its layers."""
        return attrs.evolve(self._of(SMALL if self.small else DENSE, part), method=method)

    def experts(self) -> Shape:
        """Return the shape with experts."""
        return self._of(SMALL_EXPERTS if self.small else EXPERTS, 1.0)

    def _of(self, shape: Shape, part: float) -> Shape:
        part = 1.0 if self.small else part * self.scale
        return attrs.evolve(shape, layers=max(2, round(shape.layers * part)))


@attrs.define(kw_only=True)
class Row:
    """The result of one row.

    Attributes:
        id: such as "G1".
        what: what is measured.
        status: whether it ran.
        figures: what was measured, in seconds and bytes.
        must: by limit whether it was held; ``None`` where it cannot be judged.
        goal: likewise.
        note: what a reader has to know.
    """

    id: str
    what: str
    status: str = RAN
    figures: dict[str, Any] = attrs.field(factory=dict)
    must: dict[str, bool | None] = attrs.field(factory=dict)
    goal: dict[str, bool | None] = attrs.field(factory=dict)
    note: str = ""

    @property
    def failed(self) -> bool:
        """Whether a result was wrong, or a limit that must be held was not."""
        return self.status.startswith("WRONG") or False in self.must.values()

    def judge(self, run: Run, kind: str, limit: str, held: Callable[[], bool]) -> None:
        """Note whether a limit is held, if there is a device to judge on.

        Args:
            run: the run.
            kind: "must" or "goal".
            limit: it, in words.
            held: says so.
        """
        table = self.must if kind == "must" else self.goal
        table[limit] = held() if run.clock.on_device else None

    @classmethod
    def made(cls, run: Run, identity: str, what: str) -> Row:
        """Return a new one for a row that also runs on the host."""
        return cls(id=identity, what=what, status=RAN if run.clock.on_device else ON_HOST)
