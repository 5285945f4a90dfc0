"""Runs hooks and commits units, in the order and at the moments that one session needs."""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from weightload.board import Board
from weightload.entries import Entry
from weightload.errors import UsageError
from weightload.layer import Hook, Unit
from weightload.progress import Progress
from weightload.registry import Role
from weightload.verifying import Verification

__all__ = ["Processing"]

_Twins = list[tuple[Entry, torch.Tensor]]


@attrs.define(kw_only=True, eq=False, repr=False)
class Processing:
    """The processing half of one open session.

    Attributes:
        board: what there is to process.
        progress: is told about every step.
        stream: whether a unit is committed as soon as it is processed.
    """

    board: Board
    progress: Progress
    stream: bool
    _twins: dict[int, _Twins] = attrs.field(factory=dict)

    def settle(self, waiting: Collection[int] = ()) -> None:
        """Process the units that became complete, now that no loader is at work on them.

        Args:
            waiting: ids of modules that another loader may still be at work on.
        """
        step = self.progress.step
        for unit in self.board.arrivals.take_ready(waiting):
            self.run(unit, [hook for hook in unit.hooks if hook.rule.role is Role.QUANT])
        self.progress.step = step

    def early(self, module: nn.Module, role: Role) -> bool:
        """Run one hook now; return whether there was one to run.

        Raises:
            UsageError: an attention module contains one that has not been quantised.
            IncompleteLoadError: weights that it reads have not arrived.
        """
        hook = self.board.hook_of(module, role)
        if hook is None or hook.attempted:
            return False
        waiting = [
            other.name
            for other in self.board.hooks
            if role is Role.ATTENTION
            and other.rule.role is Role.QUANT
            and not other.attempted
            and any(other.module is inner for inner in module.modules())
        ]
        if waiting:
            raise UsageError(
                f"Attention module {hook.name!r} contains {', '.join(waiting)}, not yet "
                f"quantised; call process_quant on it first.",
                module=hook.name,
            )
        unit = self.board.unit_of(module)
        self.board.completeness.check_complete(unit, hook)
        # What is packed together is packed in order: a hook may read what the one before it made.
        before = unit.hooks[: unit.hooks.index(hook)] if role is Role.QUANT else []
        self.run(unit, [*(one for one in before if one.rule.role is role), hook])
        if not unit.staged and not unit.committed:
            self.board.arrivals.end_of_first(unit)
        return True

    def run(self, unit: Unit, hooks: list[Hook]) -> None:
        """Run hooks, and commit the unit when it has no others to wait for."""
        self.progress.step = "process"
        with _disable_current_modes(), self.progress.timed("process", unit.name):
            if unit.pieces is not None:
                self.progress.module = unit.name
                self.board.finish_pieces(unit)
            if unit.renewal is not None and not unit.hooks[0].attempted:
                self.progress.module = unit.name
                if self.board.renew(unit):
                    self._end(unit)
            for hook in hooks:
                if not hook.attempted:
                    self._keep_twins(unit)
                    self.progress.module = hook.name
                    self.board.learning.run_hook(unit, hook)
                    for entry in hook.reads:
                        entry.read = True
            self.progress.module = None
            if self.stream and unit.staged and all(hook.done for hook in unit.hooks):
                self.board.plan(unit)
                self._commit(unit)
                self._end(unit)

    def rest(self) -> None:
        """Run every hook that has not run; all that is going to arrive has."""
        self.board.learning.everything_arrived()
        for hook in self.board.hooks:
            if not hook.done:
                self.run(self.board.unit_of(hook.module), [hook])

    def plan_all(self) -> None:
        """Work out every commit that is left, so that nothing of it can fail later on."""
        for unit in self._waiting():
            self.board.plan(unit)
        self.board.plan_rebound()

    def commit_all(self) -> None:
        """Commit everything that was planned."""
        waiting = self._waiting()
        with self.progress.timed("commit"):
            for unit in waiting:
                self._commit(unit)
            if self.board.rebound.changes_something:
                self.progress.mark_dirty()
                self.board.commit_rebound()
            for unit in waiting:
                self.board.release(unit)
        with _disable_current_modes():
            for unit in waiting:
                self._verify(unit)

    def _waiting(self) -> list[Unit]:
        return [unit for unit in self.board.units if unit.staged]

    def _commit(self, unit: Unit) -> None:
        self.progress.step, self.progress.module = "commit", unit.name
        if unit.changes_something:
            self.progress.mark_dirty()
        with self.progress.timed("copy", unit.name):
            self.board.commit(unit)
            with _disable_current_modes():
                unit.rebind()
        self.progress.module = None

    def _end(self, unit: Unit) -> None:
        self.board.release(unit)
        self._verify(unit)

    def _keep_twins(self, unit: Unit) -> None:
        """Copy what the hooks of a unit are going to read, to process it a second time."""
        verification = self.board.verification
        if verification is None or not unit.staged or unit.fresh or id(unit) in self._twins:
            return
        if verification.wants(unit.name, "unit"):
            self._twins[id(unit)] = [
                (entry, entry.tensor.detach().clone())
                for entry in unit.entries
                if entry.staging is not None and entry.staging.allocated
            ]

    def _verify(self, unit: Unit) -> None:
        twins = self._twins.pop(id(unit), None)
        verification = self.board.verification
        if twins is None or verification is None:
            return
        with self.progress.timed("verify"):
            _compare_again(unit, twins, verification, self.board.learning.run_again)


def _compare_again(
    unit: Unit, twins: _Twins, verification: Verification, run: Callable[[Unit, Hook], None]
) -> None:
    """Process a committed unit a second time, aside, and compare with what is live.

    Args:
        unit: it has been committed and released.
        twins: the tensors that its hooks read, with what they held before.
        verification: is told what was compared.
        run: runs a hook that was recorded.
    """
    again = Unit(
        modules=unit.modules,
        hooks=[Hook(name=h.name, module=h.module, rule=h.rule) for h in unit.hooks],
        changes=unit.changes,
        slots=unit.slots,
        inferred=unit.inferred,
    )
    again.park()
    try:
        again.point_aliases()
        again.allocate()
        with torch.no_grad():
            for entry, value in twins:
                module, section, name = entry.slots[0]
                vars(module)[section][name].detach().copy_(value)
        for hook in again.hooks:
            run(again, hook)
        again.plan_commit()
        verification.units += 1
        for name, live, new in again.planned_copies():
            verification.compare(f"{unit.name}: {name}", live, new)
    finally:
        again.restore()
