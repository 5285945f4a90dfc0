"""The working state of one open session: its hooks and units, and the parts that serve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

import attrs
import torch
from torch import nn

from weightload.arrivals import Arrivals
from weightload.completeness import Completeness
from weightload.entries import Counts, Entry, Load, join
from weightload.errors import StorageChangedError, UnsupportedError, name_some
from weightload.express import Express
from weightload.framework import Framework
from weightload.intake import Intake
from weightload.layer import Hook, Unit
from weightload.learning import Learning
from weightload.ledger import Region, RegionLedger, full_region, meet, without
from weightload.partial import gaps_outside, names_of, select_units
from weightload.parts import find_memory, find_part
from weightload.rebound import ReboundAttributes
from weightload.record import (
    ModuleRecord,
    SharedRegions,
    Slot,
    SourceFact,
    StagedSlot,
    made_by_hooks,
    make_record,
    read_by,
    record_of,
    slots_of,
)
from weightload.recorded import Recorded
from weightload.registry import Role
from weightload.scope import Scope
from weightload.scribe import Scribe
from weightload.skeleton import Body
from weightload.staging import Area, Staging
from weightload.storage import Fingerprint, TensorSpec, look_of, new_group, select, storage_key
from weightload.units import build_units

__all__ = ["Board"]


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
        if not self._load.atomic:
            self._use_live_memory(recorded, body)
        return Express(self._load, self.arrivals, recorded)

    def _use_live_memory(self, recorded: Recorded, body: Body) -> None:
        """Stage and process in live memory what is known to end there.

        What was found out holds as long as a live tensor looks into its memory as it did, and is
        alone there: somebody may have given it other memory since.
        """
        if not recorded.hosts and not recorded.landings:
            return
        looking = Counter(map(storage_key, body.tensors))
        for entry in self._load.entries:
            staging, (module, section, name) = entry.staging, entry.slots[0]
            known = recorded.hosts.get(entry.names[0])
            if staging is None or staging.allocated or known is None:
                continue
            if not self._members[id(module)].staged:
                continue  # it is done
            live = self._members[id(module)].live_tensor(module, section, name)
            settles, look = known
            if looking[storage_key(live)] == 1 and look_of(live) == look:
                staging.host, staging.settles = live, settles
        for hook in self.hooks:
            landings = recorded.landings.get((hook.name, hook.rule.role), {})
            for at, (path, section, name) in landings.items():
                unit = self._members.get(id(hook.module))
                if unit is None or not unit.staged or path not in self.modules:
                    continue
                live = unit.live_tensor(self.modules[path], section, name)
                if looking[storage_key(live)] == 1:
                    hook.landings[at] = self.modules[path], section, name

    def recorded(self, model: nn.Module) -> Recorded | None:
        """Return the plan of this load, which has finished, if it was recorded."""
        if self._load.scribe is None:
            return None
        return Recorded.of(self._load.scribe.plan(self._load), model, self._load)

    def judge(self) -> None:
        """Look which hooks do the same whatever is loaded, for :meth:`judged`."""
        self._load.judging = not self._load.initial

    def judged(self, recorded: Recorded) -> None:
        """Enter into a plan which part of the model needs more than copies; this load has finished."""
        if self._load.judging and recorded.part is None:
            entries = {name: entry for entry in self._load.entries for name in entry.names}
            recorded.part = find_part(self.units, self._members, self._load, recorded, entries)
            recorded.hosts, recorded.landings = find_memory(self.units, self._load)

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
        hooks = self._find_hooks(modules)
        self._refuse_wrapped(modules)
        marks = [
            (join(name, key), (module, section, key), Fingerprint.of(tensor))
            for name, module in modules.items()
            for section, key, tensor in slots_of(module)
        ]
        self._marks += marks
        units, members = build_units(modules, hooks, self._also_staged())
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
        self._watch(modules, units, placed)

    def _find_hooks(self, modules: Mapping[str, nn.Module]) -> list[Hook]:
        """Return the hooks of modules, in order of processing, and enter them among all."""
        hooks = []
        for name, module in modules.items():
            record = record_of(module)
            if record is not None and record.copied:
                raise UnsupportedError(
                    f"Module {name!r} is a copy of a loaded module: what its first processing did "
                    f"belongs to the original. Load the original, or make the copy before the "
                    f"first load.",
                    module=name,
                )
            hooks += [
                Hook(name=name, module=module, rule=rule)
                for rule in self.framework.registry.rules_for(module, name)
            ]
        order = list(Role)
        hooks.sort(key=lambda hook: order.index(hook.rule.role))
        rule = self.framework.model_rule(modules[""]) if "" in modules else None
        if rule is not None:
            hooks.append(Hook(name="", module=modules[""], rule=rule, last=True))
        self._refuse_unrecorded(hooks)
        self.hooks += hooks
        self.hooks.sort(key=lambda hook: (hook.last, order.index(hook.rule.role)))
        return hooks

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

    def _refuse_unrecorded(self, hooks: list[Hook]) -> None:
        strange = [hook for hook in hooks if hook.first and not self._load.initial]
        if strange:
            names = name_some(f"{hook.name} ({hook.rule.role.value})" for hook in strange)
            raise UnsupportedError(
                f"Modules that have to be processed were not part of the load that made this "
                f"model: {names}. What their hooks did is not known, so it cannot be undone. Load "
                f"them through a session of their own first.",
                modules=[hook.name for hook in strange[:10]],
            )

    def _refuse_wrapped(self, modules: Mapping[str, nn.Module]) -> None:
        """Refuse to load into tensor subclasses that hold their data in tensors inside them."""
        if self._load.initial and not self.framework.requires_all:
            return  # the framework's own loaders fill them, and nothing has to be seen
        made = {slot for module in modules.values() for slot in made_by_hooks(module)}
        found = []
        for name, module in modules.items():
            record = record_of(module) or ModuleRecord()
            for section, key, tensor in slots_of(module):
                slot = record.staged.get((section, key))
                cls = type(tensor) if slot is None else slot.spec.cls
                brought = key not in module._non_persistent_buffers_set
                brought = brought and (id(module), section, key) not in made
                if brought and hasattr(cls, "__tensor_flatten__"):
                    found.append(f"{join(name, key)} ({cls.__qualname__})")
        if found:
            raise UnsupportedError(
                f"Loaders would have to write into tensor subclasses that hold their data in other "
                f"tensors, and such writes cannot be seen: {name_some(found)}. Construct the model "
                f"with plain tensors, and let a hook wrap them.",
                parameters=found[:10],
            )

    def _also_staged(self) -> dict[int, list[StagedSlot]]:
        """Return the tensors that are staged only because nothing live may be written yet."""
        if self._load.initial:
            return self._without_data()
        if not self._load.atomic:
            return {}
        shared: dict[int, int] = {}
        found: dict[int, list[StagedSlot]] = {}
        made = {slot for module in self.modules.values() for slot in made_by_hooks(module)}
        for module in self.modules.values():
            record = record_of(module)
            for section, name, tensor in slots_of(module):
                key = storage_key(tensor)
                if key is None or (id(module), section, name) in made:
                    continue
                if record is not None and (section, name) in record.staged:
                    continue
                gaps = self._gaps_of(module, section, name, tensor)
                whole = [full_region(tensor.shape)]
                wanted = self._load.intake.wanted
                if wanted is not None and not wanted & names_of(
                    record or ModuleRecord(), section, name
                ):
                    continue
                spec = TensorSpec.of(tensor, shared.setdefault(key, new_group()))
                seeds = [
                    (region, select(tensor, region)) for region in (whole if gaps is None else gaps)
                ]
                slot = StagedSlot(section=section, name=name, spec=spec, seeds=seeds)
                found.setdefault(id(module), []).append(slot)
        return found

    def _without_data(self) -> dict[int, list[StagedSlot]]:
        """Return the tensors that were constructed on meta: their memory comes as they load."""
        device = self.framework.device
        shared: dict[int | None, int] = {}
        found: dict[int, list[StagedSlot]] = {}
        for module in self.modules.values():
            for section, name, tensor in slots_of(module):
                if tensor.is_meta:
                    group = shared.setdefault(storage_key(tensor), new_group())
                    spec = attrs.evolve(TensorSpec.of(tensor, group), device=device)
                    slot = StagedSlot(section=section, name=name, spec=spec, seeds=[])
                    found.setdefault(id(module), []).append(slot)
        return found

    def _shared_of(self, record: ModuleRecord | None, section: str, name: str) -> SharedRegions:
        known = record.shared.get((section, name)) if record is not None else None
        return known if known is not None and not self._load.initial else SharedRegions()

    def _gaps_of(
        self, module: nn.Module, section: str, name: str, tensor: torch.Tensor
    ) -> list[Region] | None:
        """Return the regions that no checkpoint brings, ``None`` if nobody knows."""
        record = record_of(module)
        if self._load.initial:
            return None
        wanted = self._load.intake.wanted
        if wanted is not None:
            known = record or ModuleRecord()
            if id(module) not in self._members or (section, name) not in known.staged:
                return gaps_outside(known, section, name, tensor.shape, wanted)
        gaps = None if record is None else record.gaps.get((section, name))
        if gaps is None and self._load.intake.manifest is not None:
            gaps = [full_region(tensor.shape)]
        if wanted is None or record is None or not gaps:
            return gaps
        sources = record.sources.get((section, name), {})
        promised = [region for region, source in sources.items() if source in wanted]
        return without(tensor.shape, gaps, promised)

    def _watch(
        self,
        modules: Mapping[str, nn.Module],
        units: list[Unit],
        placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]],
    ) -> None:
        for name, module in modules.items():
            record = record_of(module)
            unit = self._members.get(id(module))
            for section, key, tensor in slots_of(module):
                gaps = self._gaps_of(module, section, key, tensor)
                entry = self._load.by_tensor.get(id(tensor))
                if entry is not None:
                    entry.names.append(join(name, key))
                    entry.slots.append((module, section, key))
                    continue
                _, staging = placed.get((id(module), section, key), (None, None))
                entry = Entry(
                    names=[join(name, key)],
                    slots=[(module, section, key)],
                    tensor=tensor,
                    ledger=RegionLedger(shape=tuple(tensor.shape)),
                    gaps=gaps,
                    required=isinstance(tensor, nn.Parameter)
                    and not self._load.partial
                    and not _seeded_whole(record, section, key),
                    shared=self._shared_of(record, section, key),
                    staging=staging,
                    sources={} if record is None else record.sources.get((section, key), {}),
                )
                self.arrivals.watch(entry)
                self._note_optional(entry)
                self._load.entries.append(entry)
                self._load.by_tensor[id(tensor)] = entry
                if unit is not None:
                    unit.entries.append(entry)
        ids = {id(module) for module in self.modules.values()}
        for unit in units:
            self._find_reads(unit, ids)
            self.arrivals.guard(unit)

    def _note_optional(self, entry: Entry) -> None:
        """Note the names that have come, and that a load may leave out all the same."""
        if self._load.partial:
            return  # what is left alone is in kernel format, and nothing of it is optional
        for region, name in entry.sources.items() if entry.gaps else ():
            if name is not None and any(meet(region, gap) for gap in entry.gaps or ()):
                self._load.intake.optional.add(name)

    def _find_reads(self, unit: Unit, ids: Collection[int]) -> None:
        """Enter what must be complete before the hooks of ``unit`` may run."""
        found = self._load.entries_of(unit.modules.values())
        for hook in unit.hooks:
            other = read_by(hook.module, hook.rule.role)
            known = [module for module in other if id(module) in ids]
            inside = self._load.entries_of((*hook.module.modules(), *known))
            hook.reads = list(inside.values())
            if hook.rule.role is Role.QUANT:
                found |= inside
        unit.reads = list(found.values())
        for entry in unit.reads:
            entry.readers.append(unit)

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
            if whole and alone and not any(e in lost for e in unit.entries):
                self._keep(unit)
            else:
                lost += absent
        for entry in missing:
            entry.kept = entry not in lost
        self.kept = [entry.names[0] for entry in missing if entry.kept]
        return lost

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
        unit.restore()
        unit.committed = True
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

    def release(self, unit: Unit) -> None:
        """End the staging of a committed ``unit`` and close its tensors to further writes."""
        entries = [entry for entry in unit.entries if entry.staging is not None]
        unit.release()
        self._load.counts.layers_staged += 1
        self._no_longer_stale(unit)
        for entry in entries:
            self.arrivals.end(entry)

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


def _seeded_whole(record: ModuleRecord | None, section: str, name: str) -> bool:
    """Whether the value that the tensor was constructed with is known."""
    slot = record.staged.get((section, name)) if record is not None else None
    return slot is not None and any(
        region == full_region(slot.spec.shape) for region, _ in slot.seeds
    )
