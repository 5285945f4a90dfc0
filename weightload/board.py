"""The working state of one open session: its hooks and units, and the parts that serve it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from weightload.arrivals import Arrivals
from weightload.completeness import Completeness
from weightload.entering import also_staged, enter
from weightload.entries import Counts, Entry, Load, join
from weightload.errors import StorageChangedError, name_some
from weightload.express import Express
from weightload.framework import Framework
from weightload.hooks import find_hooks, order_of, refuse_wrapped
from weightload.hosting import find_memory, use_memory
from weightload.intake import Intake
from weightload.layer import Hook, Unit
from weightload.learning import Learning
from weightload.pairs import same_bits
from weightload.partial import select_units
from weightload.parts import find_part, find_renewals
from weightload.pieces import Pieces, converts_of
from weightload.rebound import ReboundAttributes
from weightload.record import (
    Slot,
    SourceFact,
    make_record,
    slots_of,
)
from weightload.recorded import Recorded
from weightload.registry import Role
from weightload.scope import Scope
from weightload.scribe import Scribe
from weightload.skeleton import Body
from weightload.staging import Area, Staging
from weightload.storage import Fingerprint, select, storage_key
from weightload.units import build_units

__all__ = ["Board"]

_UNSURE = 3
"""Loads with pieces that are what they were, after which these are taken for frozen."""


class Board:
    """Finds what has to be done and holds it; the session says when.

    Attributes:
        framework: what the model belongs to.
        modules: every module of the tree by qualified name.
        hooks: in order of processing.
        units: in the order of the tree.
        kept: names of the tensors that stayed away and keep their values, as the scope allows.
        rebound: attributes that loaders bind to modules which are not parked.
        moved: what could not keep its storage, as text with the reason.
        arrivals: listens to writes.
        completeness: tells what is missing.
        learning: runs hooks, and keeps what the load teaches.
        verification: what is compared at the end, if that was asked for.
    """

    def __init__(
        self,
        *,
        mark_dirty: Callable[[], None],
        framework: Framework,
        modules: dict[str, nn.Module],
        intake: Intake,
        initial: bool,
        atomic: bool,
        scope: Scope,
        strict: bool,
        area: Area | None = None,
    ) -> None:
        self._load = Load(
            framework=framework,
            modules=modules,
            intake=intake,
            initial=initial,
            atomic=atomic and not initial,
            scope=scope,
            strict=strict,
            mark_dirty=mark_dirty,
            area=area or Area(),
        )
        self.framework = framework
        self.modules = modules
        self.moved: list[str] = []
        self.kept: list[str] = []
        self.rebound = ReboundAttributes()
        self.hooks: list[Hook] = []
        self.units: list[Unit] = []
        self.verification = intake.verification
        self.arrivals = Arrivals(self._load)
        self.completeness = Completeness(self._load)
        self.learning = Learning(self._load)
        self._members: dict[int, Unit] = {}
        self._marks: list[tuple[str, Slot, Fingerprint]] = []
        self._stale_keys: dict[int, list[int]] = {}

    @property
    def entries(self) -> list[Entry]:
        """The tensors that the load fills."""
        return self._load.entries

    @property
    def crowded(self) -> bool:
        """Whether much waited at once to be complete."""
        return self._load.area.crowded

    @property
    def manifest(self) -> Mapping[str, SourceFact] | None:
        """The source names of the load that made the model, if they are known."""
        return self._load.intake.manifest

    # ------------------------------------------------------------------ plans

    def start_recording(self) -> None:
        """Record what loaders do with what they get."""
        self._load.scribe = self._load.intake.scribe = scribe = Scribe()
        self.arrivals.observer.uses = scribe.used

    def express(self, recorded: Recorded, body: Body) -> Express:
        """Return the short way of a plan that holds now.

        Args:
            recorded: the plan.
            body: what the whole model consists of.
        """
        self._load.area.expects = recorded.pool.crowded
        for unit in self.units:
            unit.births.pool = recorded.pool
            if not self._load.strict and not self._load.atomic and self.verification is None:
                unit.renewal = recorded.renewals.get(unit.name)
        if not self._load.atomic:
            use_memory(self._load, self.hooks, self._members, recorded, body)
        return Express(self._load, self.arrivals, recorded)

    def recorded(self, model: nn.Module) -> Recorded | None:
        """Return the plan of this load, which has finished, if it was recorded."""
        if self._load.scribe is None:
            return None
        return Recorded.of(self._load.scribe.plan(self._load), model, self._load)

    def judge(self) -> None:
        """Look which hooks do the same whatever is loaded, for :meth:`judged`; before :meth:`open`.

        Not in an atomic load, which stages everything: the next one that does not will show it.
        """
        self._load.judging = not (self._load.initial or self._load.atomic)

    def judged(self, recorded: Recorded) -> None:
        """Enter into a plan which part of the model needs more than copies; this load has finished."""
        if self._load.judging and recorded.part is None:
            if any(unit.unsure for unit in self.units) and recorded.unsure < _UNSURE:
                recorded.unsure += 1
                return
            entries = {name: entry for entry in self._load.entries for name in entry.names}
            find = functools.partial(
                find_part, self.units, self._members, self._load, recorded, entries
            )
            recorded.part = find()
            if not recorded.part.whole and any(unit.pieced for unit in self.units):
                part = find(in_pieces=True)
                recorded.in_pieces = part if part.pieced else None
            recorded.hosts, recorded.landings = find_memory(self.units, self._load)
            recorded.renewals = dict(find_renewals(self.units))

    # ------------------------------------------------------------------ opening

    def open(self) -> None:
        """Find hooks and units, fingerprint, park, and start to watch."""
        self._open(self.modules)
        self._watch_rebound()

    def extend(self, modules: Mapping[str, nn.Module]) -> None:
        """Do the same for the rest of a model, of which a part was opened before.

        Args:
            modules: every module of the tree by qualified name.
        """
        rest = {name: module for name, module in modules.items() if name not in self.modules}
        order = {name: at for at, name in enumerate(modules)}
        self.modules.clear()
        self.modules.update(modules)
        self._open(rest)
        self.units.sort(key=lambda unit: order[unit.name])
        self.learning.forget_holders()
        self._watch_rebound()

    def _open(self, modules: Mapping[str, nn.Module]) -> None:
        hooks = find_hooks(modules, self.framework, initial=self._load.initial)
        for hook in hooks if self._load.judging else ():
            hook.converts = converts_of(hook.rule, hook.name, hook.module)
        self.hooks += hooks
        self.hooks.sort(key=order_of)
        if not self._load.initial or self.framework.requires_all:
            # Otherwise the framework's own loaders fill them, and nothing has to be seen.
            refuse_wrapped(modules)
        marks = [
            (join(name, key), (module, section, key), Fingerprint.of(tensor))
            for name, module in modules.items()
            for section, key, tensor in slots_of(module)
        ]
        self._marks += marks
        units, members = build_units(modules, hooks, also_staged(self._load, self._members))
        self._members.update(members)
        if self._load.partial:
            units = self._leave_rest(units)
        self.units += units
        placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]] = {}
        for unit in units:
            unit.area = self._load.area
            if not self._load.initial or unit.changes or unit.slots:
                unit.fresh = self._load.initial and not unit.changes
                placed.update(unit.park())
        for unit in units:
            if unit.staged:
                unit.point_aliases()
        for name, (module, section, key), mark in marks:
            if (id(module), section, key) in placed and mark.storage is not None and mark.nbytes:
                self._load.stale[mark.storage._cdata] = name
                self._stale_keys.setdefault(id(module), []).append(mark.storage._cdata)
        enter(self._load, self.arrivals, self._members, modules, units, placed)

    def _watch_rebound(self) -> None:
        if not self._load.initial:
            parked = {id(m) for unit in self.units if unit.staged for m in unit.modules.values()}
            self.rebound = ReboundAttributes.of(
                {name: m for name, m in self.modules.items() if id(m) not in parked}
            )

    def _leave_rest(self, units: list[Unit]) -> list[Unit]:
        """Leave alone what a load of some names does not change."""
        wanted = self._load.intake.wanted or frozenset()
        units = select_units(self.modules, units, wanted)
        chosen = {id(unit) for unit in units}
        self._members = {key: unit for key, unit in self._members.items() if id(unit) in chosen}
        self.hooks = [hook for hook in self.hooks if id(hook.module) in self._members]
        return units

    # ------------------------------------------------------------------ processing

    def hook_of(self, module: nn.Module, role: Role) -> Hook | None:
        """Return the hook of ``module`` in ``role``, or ``None``."""
        for hook in self.hooks:
            if hook.module is module and hook.rule.role is role:
                return hook
        return None

    def unit_of(self, module: nn.Module) -> Unit:
        """Return the unit that ``module`` is in; modules with hooks always are in one."""
        return self._members[id(module)]

    def leave_out(self, missing: list[Entry]) -> list[Entry]:
        """Let tensors that may stay away keep their values; return those that may not.

        What is processed together stays away as a whole.
        """
        if self._load.initial:
            return missing
        allowed = {id(entry) for entry in missing if self.completeness.may_miss(entry)}
        lost = [entry for entry in missing if id(entry) not in allowed]
        seen = self._load.intake.seen.keys()
        for entry in missing:
            if id(entry) in allowed and entry.staging is not None and not entry.packed:
                allowed.discard(id(entry))
                if entry.shared.ordered and entry.shared.names & seen:
                    lost.append(entry)  # nobody knows which part of it has come
                else:
                    self._fill_from_live(entry)
        for unit in self.units:
            absent = [e for e in unit.entries if e.staging is not None and id(e) in allowed]
            if not absent:
                continue
            whole = not any(
                e.ledger.touched or e.shared.names & seen for e in (*unit.entries, *unit.reads)
            )
            alone = all(
                reader is unit or all(hook.rule.role is not Role.QUANT for hook in reader.hooks)
                for entry in absent
                for reader in entry.readers
            )
            settled = not any(e in lost for e in unit.entries) and not self._resets(unit, absent)
            if whole and alone and settled:
                self._keep(unit)
            else:
                lost += absent
        for entry in missing:
            entry.kept = entry not in lost
        self.kept = [entry.names[0] for entry in missing if entry.kept]
        return lost

    def _resets(self, unit: Unit, absent: list[Entry]) -> bool:
        """Whether something that hooks of ``unit`` read gets another value: its default."""
        for entry in (*unit.entries, *unit.reads):
            if entry in absent or entry.staging is None or entry.ledger.touched:
                continue
            if 0 in entry.ledger.shape or self._load.keeps_optional(entry):
                continue
            if entry.packed:
                if entry.awaited:
                    return True  # nobody knows which value it has now
                continue
            module, section, name = entry.slots[0]
            live = self._members[id(module)].live_tensor(module, section, name)
            for twin, region, default in entry.staging.seeds:
                if twin is entry.tensor and not same_bits(select(live, region), default):
                    return True
        return False

    def _fill_from_live(self, entry: Entry) -> None:
        """Give a twin the live values of what stayed away."""
        module, section, name = entry.slots[0]
        live = self._members[id(module)].live_tensor(module, section, name)
        self.arrivals.before_touch(storage_key(entry.tensor) or 0)
        with torch.no_grad():
            for region in entry.ledger.missing():
                select(entry.tensor, region).copy_(select(live, region))

    def _keep(self, unit: Unit) -> None:
        """Put the live state of ``unit`` back, of which nothing has arrived."""
        for hook in unit.hooks:
            hook.attempted = hook.done = True
        self._put_back(unit)

    def _put_back(self, unit: Unit) -> None:
        """End a unit whose live tensors hold what they should, without a commit."""
        unit.put_back()
        self._no_longer_stale(unit)
        for entry in unit.entries:
            self.arrivals.end(entry)

    def plan(self, unit: Unit) -> None:
        """Work out the commit of ``unit``; changes nothing."""
        unit.allocate()
        if not unit.fresh:
            unit.plan_commit()
            doing = f"Processing module {unit.name!r}"
            self._refuse_moved(doing, unit.name, unit.planned_moves)

    def plan_rebound(self) -> None:
        """Work out what becomes of tensors that loaders bound to modules; changes nothing.

        Raises:
            StorageChangedError: one cannot keep its storage, and must.
        """
        moved = self.rebound.plan()
        self._refuse_moved("Loading the model", "", moved)
        self._load.counts.tensors_moved += len(self.rebound.found.moved)
        self.moved += moved

    def commit_rebound(self) -> None:
        """Copy new values into the tensors that were bound to modules before."""
        self._load.counts.tensors_derived += len(self.rebound.found.copies)
        self._load.counts.bytes_committed += self.rebound.commit()

    def _refuse_moved(self, doing: str, name: str, moved: list[str]) -> None:
        """With strict storage, refuse what cannot keep its storage, before the commit."""
        if self._load.strict and moved:
            raise StorageChangedError(
                f"{doing} again gave tensors that kernels know and that "
                f"cannot keep their storage: {name_some(moved)}. Captured graphs would read the "
                f"old ones. Give the module a rule with a rebind hook, or pass strict=False if "
                f"nothing was captured.",
                module=name,
                moved=moved[:10],
            )

    def commit(self, unit: Unit) -> None:
        """Copy what was planned for ``unit`` into live storage; its staging is left."""
        count = unit.commit(judge=self._load.judging)
        self._load.counts.bytes_committed += count.nbytes
        self._load.counts.tensors_derived += count.derived
        self._load.counts.tensors_moved += count.moved
        self.moved += unit.planned_moves

    def renew(self, unit: Unit) -> bool:
        """Run the one hook of a unit that is known to make some attributes anew, and commit them.

        Returns:
            Whether it did nothing else. If it did, it has run, and the rest is left to be done.
        """
        unit.allocate()
        self._load.counts.hooks_run += 1
        unit.hooks[0].run()
        if unit.renewal is None or not unit.renewed:
            return False
        self._load.mark_dirty()
        unit.commit_renewed()
        self.moved += unit.renewal.moves
        return True

    def release(self, unit: Unit) -> None:
        """End the staging of a committed ``unit`` and close its tensors to further writes."""
        entries = [entry for entry in unit.entries if entry.staging is not None]
        unit.release()
        self._load.counts.layers_staged += 1
        self._no_longer_stale(unit)
        for entry in entries:
            self.arrivals.end(entry)

    def go_on(self, pieces: Pieces) -> None:
        """Let modules be finished in pieces of which pieces have been processed already.

        What loaders bring of the others from now on, they write where it is processed.
        """
        begun = pieces.modules
        for entry in self._load.entries:
            place, (module, section, name) = entry.names[0], entry.slots[0]
            if place not in pieces or pieces.pieced[place].module not in begun:
                continue
            unit = self._members[id(module)]
            if entry.staging is not None and not entry.staging.allocated:
                entry.staging.host = unit.live_tensor(module, section, name)
                self.arrivals.host(entry.staging)
            unit.pieces = pieces

    def finish_pieces(self, unit: Unit) -> None:
        """Process the pieces that are left of a unit that is complete, and end it."""
        if unit.pieces is None:
            return
        for hook in unit.hooks:
            hook.attempted = True
        unit.pieces.finish(unit.hooks[0].name)
        for hook in unit.hooks:
            hook.done = True
        unit.pieces = None
        self._load.counts.layers_staged += 1
        self._load.counts.hooks_in_pieces += len(unit.hooks)
        self._put_back(unit)

    def _no_longer_stale(self, unit: Unit) -> None:
        for module in unit.modules.values():
            for key in self._stale_keys.pop(id(module), ()):
                self._load.stale.pop(key, None)

    def verify(self) -> None:
        """Check that every live tensor is where it was, and that nothing is on meta.

        Raises:
            StorageChangedError: a tensor moved, changed its form, or holds no data.
        """
        problems = []
        for name, (module, section, key), mark in self._marks:
            now = vars(module)[section].get(key)
            if not self._load.initial:
                self._load.counts.tensors_checked += 1
                gone = now is None
                problem = "it is gone" if gone else mark.difference(now)
                if problem is not None:
                    problems.append(f"{name}: {problem}")
                    continue
            if now is not None and now.is_meta and mark.device.type != "meta":
                problems.append(f"{name}: it is on the meta device")
        if problems:
            raise StorageChangedError.during_load(problems)

    def compare(self) -> None:
        """Compare live tensors with what was sent, if that was asked for.

        Raises:
            VerificationError: they differ.
        """
        if self.verification is not None:
            self.verification.compare_in_place(self._live_of)
            self.verification.check()

    def _live_of(self, entry: Entry) -> torch.Tensor | None:
        """Return the live tensor of an entry, ``None`` if a hook has made it another one."""
        if entry.packed:
            return None
        module, section, name = entry.slots[0]
        live: torch.Tensor | None = vars(module)[section].get(name)
        return live

    def restore(self) -> None:
        """Put every unit that was not committed back as it was.

        After a failed first load that is what loaders have to find when it is tried again.
        """
        self.rebound.restore()
        for unit in reversed(self.units):
            if unit.staged:
                unit.restore()
        for entry in self._load.entries if self._load.initial else ():
            if entry.staging is None and id(entry) in self._load.seeds:
                for region, value in self._load.seeds[id(entry)][1]:
                    select(entry.tensor, region).copy_(value)
            elif entry.touched:
                for module, section, name in entry.slots:
                    make_record(module).tainted.add((section, name))

    def counts(self) -> Counts:
        """Return the numbers for the receipt."""
        return self._load.counts

    def close(self) -> None:
        """Stop watching and let go of everything."""
        self._load.close()
        self.rebound.close()
        self.hooks.clear()
        self.units.clear()
        self._members.clear()
        self._marks.clear()
        self.arrivals = Arrivals(self._load)
        self.learning = Learning(self._load)
