"""The working state of one open session: its hooks and units, and the parts that serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import torch
from torch import nn

from weightload.arrivals import Arrivals
from weightload.completeness import Completeness
from weightload.entries import Entry, Load, Staging, join
from weightload.errors import StorageChangedError, UnsupportedError, name_some
from weightload.framework import Framework
from weightload.intake import Intake
from weightload.layer import Hook, Unit
from weightload.learning import Learning
from weightload.ledger import Region, RegionLedger, full_region
from weightload.record import (
    ModuleRecord,
    SharedRegions,
    Slot,
    StagedSlot,
    made_by_hooks,
    make_record,
    record_of,
    slots_of,
)
from weightload.registry import Role
from weightload.storage import Fingerprint, TensorSpec, new_group, select, storage_key
from weightload.units import build_units

__all__ = ["Board"]


class Board:
    """Finds what has to be done and holds it; the session says when.

    Attributes:
        framework: what the model belongs to.
        modules: every module of the tree by qualified name.
        hooks: in order of processing.
        units: in the order of the tree.
        arrivals: listens to writes.
        completeness: tells what is missing.
        learning: runs hooks, and keeps what the load teaches.
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
        allow_missing: Iterable[str] = (),
    ) -> None:
        self._load = Load(
            framework=framework,
            modules=modules,
            intake=intake,
            initial=initial,
            atomic=atomic and not initial,
            allow_missing=tuple(allow_missing),
            mark_dirty=mark_dirty,
        )
        self.framework = framework
        self.modules = modules
        self.hooks: list[Hook] = []
        self.units: list[Unit] = []
        self.arrivals = Arrivals(self._load)
        self.completeness = Completeness(self._load)
        self.learning = Learning(self._load)
        self._members: dict[int, Unit] = {}
        self._marks: list[tuple[str, Slot, Fingerprint]] = []
        self._stale_keys: dict[int, list[int]] = {}

    # ------------------------------------------------------------------ opening

    def open(self) -> None:
        """Find hooks and units, fingerprint, park, and start to watch."""
        for name, module in self.modules.items():
            record = record_of(module)
            if record is not None and record.copied:
                raise UnsupportedError(
                    f"Module {name!r} is a copy of a loaded module: what its first processing did "
                    f"belongs to the original. Load the original, or make the copy before the "
                    f"first load.",
                    module=name,
                )
            self.hooks += [
                Hook(name=name, module=module, rule=rule)
                for rule in self.framework.registry.rules_for(module, name)
            ]
        order = list(Role)
        self.hooks.sort(key=lambda hook: order.index(hook.rule.role))
        root = next(iter(self.modules.values()))
        rule = self.framework.model_rule(root)
        if rule is not None:
            self.hooks.append(Hook(name="", module=root, rule=rule))
        self._refuse_unrecorded()
        self._marks = [
            (join(name, key), (module, section, key), Fingerprint.of(tensor))
            for name, module in self.modules.items()
            for section, key, tensor in slots_of(module)
        ]
        self.units, self._members = build_units(self.modules, self.hooks, self._also_staged())
        placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]] = {}
        for unit in self.units:
            if not self._load.initial or unit.changes or unit.slots:
                unit.fresh = self._load.initial and not unit.changes
                placed.update(unit.park())
        for unit in self.units:
            if unit.staged:
                unit.point_aliases()
        for name, (module, section, key), mark in self._marks:
            if (id(module), section, key) in placed and mark.storage is not None and mark.nbytes:
                self._load.stale[mark.storage._cdata] = name
                self._stale_keys.setdefault(id(module), []).append(mark.storage._cdata)
        self._watch(placed)

    def _refuse_unrecorded(self) -> None:
        strange = [hook for hook in self.hooks if hook.first and not self._load.initial]
        if strange:
            names = name_some(f"{hook.name} ({hook.rule.role.value})" for hook in strange)
            raise UnsupportedError(
                f"Modules that have to be processed were not part of the load that made this "
                f"model: {names}. What their hooks did is not known, so it cannot be undone. Load "
                f"them through a session of their own first.",
                modules=[hook.name for hook in strange[:10]],
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
        if record is not None and (section, name) in record.gaps:
            return record.gaps[section, name]
        return None if self._load.intake.manifest is None else [full_region(tensor.shape)]

    def _watch(self, placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]]) -> None:
        for name, module in self.modules.items():
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
                    and not _seeded_whole(record, section, key),
                    shared=self._shared_of(record, section, key),
                    staging=staging,
                )
                self.arrivals.watch(entry)
                self._load.entries.append(entry)
                self._load.by_tensor[id(tensor)] = entry
                if unit is not None:
                    unit.entries.append(entry)
        for unit in self.units:
            self._find_reads(unit)

    def _find_reads(self, unit: Unit) -> None:
        """Enter what must be complete before the hooks of ``unit`` may run."""
        found = self._load.entries_of(unit.modules.values())
        for hook in unit.hooks:
            inside = self._load.entries_of(hook.module.modules())
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

    def plan(self, unit: Unit) -> None:
        """Work out the commit of ``unit``; changes nothing."""
        self._load.grow(unit.allocate())
        if not unit.fresh:
            unit.plan_commit()

    def commit(self, unit: Unit) -> None:
        """Copy what was planned for ``unit`` into live storage; its staging is left."""
        count = unit.commit()
        self._load.counts.bytes_committed += count.nbytes
        self._load.counts.tensors_derived += count.derived
        self._load.counts.tensors_moved += count.moved

    def release(self, unit: Unit) -> None:
        """End the staging of a committed ``unit`` and close its tensors to further writes."""
        entries = [entry for entry in unit.entries if entry.staging is not None]
        self._load.grow(-unit.release())
        for module in unit.modules.values():
            for key in self._stale_keys.pop(id(module), ()):
                self._load.stale.pop(key, None)
        for entry in entries:
            self.arrivals.end(entry)

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
            raise StorageChangedError(
                f"Live tensors changed during the load: {name_some(problems)}. Captured graphs "
                f"and kernels that know the old ones are stale; start the engine again."
            )

    def restore(self) -> None:
        """Put every unit that was not committed back as it was.

        After a failed first load that is what loaders have to find when it is tried again.
        """
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

    def counts(self) -> dict[str, int]:
        """Return the numbers for the receipt."""
        return attrs.asdict(self._load.counts)

    def close(self) -> None:
        """Stop watching and let go of everything."""
        self._load.close()
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
