"""The working state of one open session: what is watched, what has arrived, what is ready."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from weightload.errors import (
    DuplicateWeightError,
    IncompleteLoadError,
    StorageChangedError,
    UnsupportedError,
    WeightMismatchError,
    name_some,
)
from weightload.framework import Framework
from weightload.intake import Intake
from weightload.layer import Entry, Hook, Staging, Unit, build_units
from weightload.ledger import Region, RegionLedger, full_region, meet, uncovered
from weightload.observer import Watched, WriteObserver
from weightload.record import (
    HookRecording,
    ModuleRecord,
    SharedRegions,
    Slot,
    StagedSlot,
    made_by_hooks,
    make_record,
    record_of,
    scope_of,
    slots_of,
)
from weightload.registry import Role
from weightload.storage import Fingerprint, TensorSpec, new_group, select, storage_key

if TYPE_CHECKING:
    from weightload.session import WeightLoadSession

__all__ = ["Board"]


@attrs.define
class Counts:
    """Numbers for the receipt."""

    bytes_written: int = 0
    bytes_committed: int = 0
    tensors_in_place: int = 0
    tensors_staged: int = 0
    tensors_checked: int = 0
    tensors_derived: int = 0
    tensors_moved: int = 0
    hooks_run: int = 0
    staging_peak_bytes: int = 0


class Board:
    """Listens to the observer and keeps the ledgers; see the session for the order of things."""

    def __init__(
        self,
        *,
        session: WeightLoadSession,
        framework: Framework,
        modules: dict[str, nn.Module],
        intake: Intake,
        initial: bool,
        atomic: bool,
        allow_missing: Iterable[str] = (),
    ) -> None:
        self.framework = framework
        self.modules = modules
        self.observer = WriteObserver(self)
        self.hooks: list[Hook] = []
        self.units: list[Unit] = []
        self._session = session
        self._intake = intake
        self._initial = initial
        self._atomic = atomic and not initial
        self._allow_missing = tuple(allow_missing)
        self._members: dict[int, Unit] = {}
        self._entries: list[Entry] = []
        self._by_tensor: dict[int, Entry] = {}
        self._by_watched: dict[int, Entry] = {}
        self._stagings: dict[int, Staging] = {}
        self._closed: dict[int, Entry] = {}
        self._ready: dict[int, Unit] = {}
        self._trial: Intake | None = None
        self._expected: list[tuple[Entry, Region]] = []
        self._marks: list[tuple[str, Slot, Fingerprint]] = []
        self._touched: list[Slot] = []
        self._aliases: list[list[tuple[Slot, TensorSpec]]] = []
        self._seeds: dict[int, tuple[TensorSpec, list[tuple[Region, torch.Tensor]]]] = {}
        self._staging_now = 0
        self._counts = Counts()

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
            (_join(name, key), (module, section, key), Fingerprint.of(tensor))
            for name, module in self.modules.items()
            for section, key, tensor in slots_of(module)
        ]
        self.units, self._members = build_units(self.modules, self.hooks, self._also_staged())
        placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]] = {}
        for unit in self.units:
            if not self._initial or unit.changes or unit.slots:
                unit.fresh = self._initial and not unit.changes
                placed.update(unit.park())
        for unit in self.units:
            if unit.staged:
                unit.point_aliases()
        self._watch(placed)

    def _refuse_unrecorded(self) -> None:
        strange = [hook for hook in self.hooks if hook.first and not self._initial]
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
        if self._initial:
            return self._without_data()
        if not self._atomic:
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
        return known if known is not None and not self._initial else SharedRegions()

    def _gaps_of(
        self, module: nn.Module, section: str, name: str, tensor: torch.Tensor
    ) -> list[Region] | None:
        """Return the regions that no checkpoint brings, ``None`` if nobody knows."""
        record = record_of(module)
        if self._initial:
            return None
        if record is not None and (section, name) in record.gaps:
            return record.gaps[section, name]
        return None if self._intake.manifest is None else [full_region(tensor.shape)]

    def _watch(self, placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]]) -> None:
        for name, module in self.modules.items():
            record = record_of(module)
            unit = self._members.get(id(module))
            for section, key, tensor in slots_of(module):
                gaps = self._gaps_of(module, section, key, tensor)
                entry = self._by_tensor.get(id(tensor))
                if entry is not None:
                    entry.names.append(_join(name, key))
                    entry.slots.append((module, section, key))
                    continue
                _, staging = placed.get((id(module), section, key), (None, None))
                entry = Entry(
                    names=[_join(name, key)],
                    slots=[(module, section, key)],
                    tensor=tensor,
                    ledger=RegionLedger(shape=tuple(tensor.shape)),
                    gaps=gaps,
                    required=isinstance(tensor, nn.Parameter)
                    and not _seeded_whole(record, section, key),
                    shared=self._shared_of(record, section, key),
                    staging=staging,
                )
                entry.watched = self.observer.watch(tensor)
                self._entries.append(entry)
                self._by_tensor[id(tensor)] = entry
                if unit is not None:
                    unit.entries.append(entry)
                if entry.watched is not None:
                    self._by_watched[id(entry.watched)] = entry
                    if staging is not None:
                        self._stagings[entry.watched.storage] = staging
        for unit in self.units:
            self._find_reads(unit)

    def _find_reads(self, unit: Unit) -> None:
        """Enter what must be complete before the hooks of ``unit`` may run."""
        found = self._entries_of(unit.modules.values())
        for hook in unit.hooks:
            inside = self._entries_of(hook.module.modules())
            hook.reads = list(inside.values())
            if hook.rule.role is Role.QUANT:
                found |= inside
        unit.reads = list(found.values())
        for entry in unit.reads:
            entry.readers.append(unit)

    def _entries_of(self, modules: Iterable[nn.Module]) -> dict[int, Entry]:
        tensors = (tensor for module in modules for _, _, tensor in slots_of(module))
        entries = [self._by_tensor[id(tensor)] for tensor in tensors]
        return {id(entry): entry for entry in entries}

    # ------------------------------------------------------------------ listening

    def before_touch(self, storage: int) -> None:
        """Give a twin its memory before the first operation on it."""
        staging = self._stagings.get(storage)
        if staging is not None:
            self._grow(staging.allocate())
            return
        entry = self._closed.get(storage)
        if entry is not None:
            raise DuplicateWeightError(
                f"{self._intake.current!r} arrived after {entry.names[0]!r} was complete and "
                f"processed: something was sent twice.",
                name=self._intake.current,
                parameter=entry.names[0],
            )

    def before_write(
        self,
        watched: Watched,
        region: Region | None,
        target: torch.Tensor,
        source: torch.Tensor | None,
    ) -> bool:
        """Check one write, enter it into the ledger, and say whether it is to be done."""
        entry = self._by_watched.get(id(watched))
        if entry is None:
            return True
        intake = self._trial or self._intake
        name = intake.name_of(source)
        if name is None and source is None and region is not None:
            # A model that collects its source first goes on with what it has copied.
            name = entry.ledger.writer(region)
        if source is not None:
            self._check_copy(intake, name, entry, target, source)
        intake.consumed(name, entry.names[0])
        if self._trial is not None:
            if region is not None and entry.gaps:
                self._keep_defaults(entry, region)
                self._expected.append((entry, region))
            return False
        first = self._initial or self._intake.lenient
        if region is not None and not first and self._counts_less(entry, region, name):
            self._note_ready(entry)
            return False
        if region is not None and entry.gaps:
            self._keep_defaults(entry, region)
        if entry.staging is None:
            self._session.mark_dirty()
        self._counts.bytes_written += target.numel() * target.element_size()
        if region is None:
            if first and name is not None and not self.observer.shares(watched):
                # Nobody can say which part it fills: every name that does so is needed.
                entry.shared.ordered = True
                entry.shared.names.add(name)
            return True
        other = entry.ledger.enter(region, name)
        if other is not None and first:
            entry.shared.winner[region] = name
            entry.shared.names |= {one for one in (name, other) if one is not None}
        elif other is not None and not {name, other} <= entry.shared.names:
            if source is not None and torch.equal(target, source.to(target)):
                return False
            raise DuplicateWeightError(
                f"{name!r} and {other!r} both fill {entry.names[0]!r} "
                f"({' = '.join(entry.names)}), with different values.",
                name=name,
                other=other,
                parameter=entry.names[0],
            )
        return True

    def _keep_defaults(self, entry: Entry, region: Region) -> None:
        """Keep what a part holds that no checkpoint brought so far, before one brings it.

        A later load may leave it out again, and must find the default.
        """
        if entry.watched is None or self.observer.shares(entry.watched):
            return
        if not any(meet(region, gap) for gap in entry.gaps or ()):
            return
        spec = TensorSpec.of(entry.tensor)
        seeds = [(gap, select(entry.tensor, gap).clone()) for gap in entry.gaps or ()]
        for module, section, name in entry.slots:
            slot = StagedSlot(section=section, name=name, spec=spec, seeds=seeds)
            make_record(module).staged.setdefault((section, name), slot)

    def _counts_less(self, entry: Entry, region: Region, name: str | None) -> bool:
        """Whether a name that counts more than ``name`` has filled the region already."""
        winner = entry.shared.winner.get(region, name)
        return winner != name and not entry.shared.ordered and entry.ledger.writer(region) == winner

    def before_read(self, watched: Watched, region: Region | None) -> None:
        """Note, in a first load, that a loader computes with what its tensor held before."""
        entry = self._by_watched.get(id(watched))
        if entry is None or self._trial is not None or entry.tensor.is_meta:
            return
        region = full_region(entry.ledger.shape) if region is None else region
        self._refuse_unknown_value(entry, region)
        if not (self._initial or self._intake.lenient):
            return
        name = self._intake.current
        if id(entry) not in self._seeds and entry.ledger.leaves_out(region):
            self._seeds[id(entry)] = (
                TensorSpec.of(entry.tensor),
                [(rest, select(entry.tensor, rest).clone()) for rest in entry.ledger.missing()],
            )
        others = {other for other in entry.ledger.writers(region) if other not in (name, None)}
        if name is not None and others:
            entry.shared.ordered = True
            entry.shared.names |= {name, *(other for other in others if other is not None)}

    def _refuse_unknown_value(self, entry: Entry, region: Region) -> None:
        if self._initial:
            return
        unknown = entry.gaps is None and entry.required and entry.staging is not None
        if unknown and entry.ledger.leaves_out(region):
            raise UnsupportedError(
                f"A loader computes with the value that {entry.names[0]!r} was constructed with, "
                f"which is not known. {self.framework.advice}",
                parameter=entry.names[0],
            )

    def _check_copy(
        self,
        intake: Intake,
        name: str | None,
        entry: Entry,
        target: torch.Tensor,
        source: torch.Tensor,
    ) -> None:
        if source.dtype != target.dtype and name is not None:
            intake.casts.add(name)
        if source.numel() == target.numel():
            return
        fact = intake.manifest.get(name) if intake.manifest is not None and name else None
        if self._initial or (fact is not None and fact.broadcast):
            if name is not None:
                intake.broadcast.add(name)
            return
        raise WeightMismatchError(
            f"{name!r} brings shape {tuple(source.shape)} for a place of shape "
            f"{tuple(target.shape)} in {entry.names[0]!r}. Tensors are never broadcast.",
            name=name,
            expected=tuple(target.shape),
            found=tuple(source.shape),
        )

    def after_write(self, watched: Watched, region: Region | None) -> None:
        """Note when the unit of a tensor is complete."""
        entry = self._by_watched.get(id(watched))
        if entry is not None:
            self._note_ready(entry)

    def _note_ready(self, entry: Entry) -> None:
        if self._atomic or not entry.complete:
            return
        for unit in entry.readers:
            if (unit.fresh or not self._initial) and unit.complete and self._repeated(unit):
                self._ready[id(unit)] = unit

    def _repeated(self, unit: Unit) -> bool:
        """Whether the names came that only repeat a value: their loaders need the twins."""
        return all(name in self._intake.seen for entry in unit.reads for name in entry.shared.names)

    def take_ready(self) -> list[Unit]:
        """Return the units that became complete since the last call."""
        ready, self._ready = self._ready, {}
        return [unit for unit in ready.values() if not unit.committed]

    @contextmanager
    def rehearsal(self, trial: Intake) -> Iterator[None]:
        """Let loaders run without any write; ``trial`` learns which names have a place.

        A place that no checkpoint brought so far, and this one is going to, is waited for.
        """
        self._trial = trial
        try:
            yield
        finally:
            self._trial = None
        for entry, region in self._expected:
            brought = uncovered(entry.ledger.shape, entry.gaps or ())
            entry.gaps = uncovered(entry.ledger.shape, [*brought, region])
        self._expected.clear()

    def _grow(self, nbytes: int) -> None:
        self._staging_now += nbytes
        peak = max(self._counts.staging_peak_bytes, self._staging_now)
        self._counts.staging_peak_bytes = peak

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

    def run_hook(self, unit: Unit, hook: Hook) -> None:
        """Run one hook, recorded if it is the first time."""
        self._grow(unit.allocate())
        self._counts.hooks_run += 1
        if not hook.first:
            hook.run()
            return
        scope = scope_of(hook.module, self.framework.registry)
        recording = HookRecording.start(scope, self._seeds_of, self._slot_of)
        writes = _WrittenStorages(recording.loose)
        observer = WriteObserver(writes)
        for tensor in (*recording.tensors, *recording.loose.values()):
            observer.watch(tensor)
        try:
            with observer:
                hook.run()
        except BaseException:
            recording.undo(writes.before)
            raise
        self._touched += recording.finish(hook.module, hook.rule.role, writes.keys, writes.before)

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        entry = self._by_tensor.get(id(tensor))
        return entry.slots[0] if entry is not None else None

    def _seeds_of(self, slot: Slot) -> list[tuple[Region, torch.Tensor]]:
        module, section, name = slot
        tensor = vars(module)[section][name]
        entry = self._by_tensor.get(id(tensor))
        if entry is None or tensor.is_meta:
            return []
        if id(entry) in self._seeds:
            return self._seeds[id(entry)][1]
        if self._initial and not self._intake.seen:
            # Without names nobody knows what a checkpoint brings; what was constructed counts.
            number = self.framework.constructed.get(storage_key(tensor) or 0)
            if number is None:
                return []
            filled = torch.full((), number, dtype=tensor.dtype, device=tensor.device)
            return [(full_region(tensor.shape), filled.expand(tensor.shape))]
        return [(region, select(tensor, region).clone()) for region in entry.ledger.missing()]

    def plan(self, unit: Unit) -> None:
        """Work out the commit of ``unit``; changes nothing."""
        self._grow(unit.allocate())
        if not unit.fresh:
            unit.plan_commit()

    def commit(self, unit: Unit) -> None:
        """Copy what was planned for ``unit`` into live storage; its staging is left."""
        count = unit.commit()
        self._counts.bytes_committed += count.nbytes
        self._counts.tensors_derived += count.derived
        self._counts.tensors_moved += count.moved

    def release(self, unit: Unit) -> None:
        """End the staging of a committed ``unit`` and close its tensors to further writes."""
        entries = [entry for entry in unit.entries if entry.staging is not None]
        self._staging_now -= unit.release()
        for entry in entries:
            self._stop_watching(entry)
            left = self.observer.watch(entry.tensor)
            if left is not None:
                self._closed[left.storage] = entry

    def _stop_watching(self, entry: Entry) -> None:
        if entry.watched is not None:
            self._stagings.pop(entry.watched.storage, None)
            self._by_watched.pop(id(entry.watched), None)
            self.observer.forget(entry.watched)
            entry.watched = None

    # ------------------------------------------------------------------ completeness

    def missing(self) -> list[str]:
        """Return the names of the tensors that this load promised and did not bring."""
        return [
            f"{entry.names[0]}{_described(entry)}{self._needed(entry)}"
            for entry in self._entries
            if not entry.closed and self._is_missing(entry)
        ]

    def _is_missing(self, entry: Entry) -> bool:
        if not self._initial:
            if entry.gaps is None:
                return entry.required and not entry.ledger.complete()
            return not entry.complete or bool(self._names_missing(entry))
        if not (entry.required and self.framework.requires_all):
            return False
        if entry.ledger.touched or entry.shared.names:
            return False
        allowed = (
            fnmatch.fnmatchcase(name, pattern)
            for name in entry.names
            for pattern in self._allow_missing
        )
        return math.prod(entry.ledger.shape) > 0 and not any(allowed)

    def _names_missing(self, entry: Entry) -> list[str]:
        """Return names that are needed although others brought the whole tensor."""
        if not entry.shared.ordered:
            return []
        return sorted(entry.shared.names - self._intake.seen.keys())

    def _needed(self, entry: Entry) -> str:
        names = self._names_missing(entry)
        return f" (without {name_some(names)})" if names else ""

    def check_overlaps(self) -> None:
        """Check that no two names filled parts of a tensor that overlap.

        Raises:
            DuplicateWeightError: they did, and did not in the load that made the model.
        """
        for entry in self._entries:
            conflict = None if entry.shared.overlaps else entry.ledger.conflict()
            if conflict is None:
                continue
            if self._initial:
                entry.shared.overlaps = True
                continue
            one, two = conflict
            raise DuplicateWeightError(
                f"{one!r} and {two!r} fill parts of {entry.names[0]!r} that overlap. Send each "
                f"part once.",
                name=one,
                other=two,
                parameter=entry.names[0],
            )

    def check_unclaimed(self) -> None:
        """Check the tensors that had a place of their own once, and share one with another now.

        A framework may tie two parameters after it has loaded both with equal values. From then
        on its loaders ignore the second name, whose values must still be those of the first.

        Raises:
            WeightMismatchError: they differ, so that the model would have to be untied.
        """
        manifest = self._intake.manifest or {}
        for name, tensor in self._intake.unclaimed.items():
            place = manifest[name].place
            entry = next((one for one in self._entries if place in one.names), None)
            live = None
            if entry is not None:
                module, section, key = entry.slots[0]
                live = vars(module)[section].get(key) if entry.closed else entry.tensor
            if (
                live is not None
                and live.numel() == tensor.numel()
                and torch.equal(live.detach().flatten(), tensor.to(live).flatten())
            ):
                continue
            raise WeightMismatchError(
                f"{name!r} filled {place!r} in the load that made the model, and the model's "
                f"loaders ignored it now. The two that were tied then differ in these weights; "
                f"start the engine again on them.",
                name=name,
                place=place,
            )

    def incomplete(self, names: list[str], received: int) -> IncompleteLoadError:
        """Make the error that says what never arrived."""
        empty = " The source was empty or exhausted." if received == 0 else ""
        advice = ""
        if not self._initial and self._intake.manifest is None:
            advice = f" {self.framework.advice}"
        return IncompleteLoadError(
            f"{len(names)} tensors never arrived whole: {name_some(names)}. {received} source "
            f"tensors were received.{empty}{advice}",
            missing=names[:10],
            missing_count=len(names),
            received=received,
        )

    def check_complete(self, unit: Unit, hook: Hook) -> None:
        """Check that everything came that a hook is going to read, in a reload.

        Raises:
            IncompleteLoadError: something did not.
        """
        reads = unit.reads if hook.rule.role is Role.QUANT else hook.reads
        names = [
            f"{entry.names[0]}{_described(entry)}{self._needed(entry)}"
            for entry in reads
            if not entry.complete or self._names_missing(entry)
        ]
        if unit.staged and names:
            raise self.incomplete(names, len(self._intake.seen))

    # ------------------------------------------------------------------ learning, ending

    def start_learning(self) -> None:
        """Note, after the first load and before the first hook, which tensors share storage."""
        slots: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        for module in self.modules.values():
            for section, name, tensor in slots_of(module):
                key = storage_key(tensor)
                if key is not None:
                    slots.setdefault(key, []).append(((module, section, name), tensor))
        for shared in slots.values():
            if len(shared) > 1:
                group = new_group()
                self._aliases.append(
                    [(slot, TensorSpec.of(tensor, group)) for slot, tensor in shared]
                )

    def learn(self) -> None:
        """Enter into the modules' records what this load taught."""
        named = bool(self._intake.seen)
        for entry in self._entries:
            if entry.gaps is None and named:
                for module, section, name in entry.slots:
                    record = make_record(module)
                    record.gaps[section, name] = entry.ledger.missing()
                    if entry.shared.names or entry.shared.overlaps:
                        record.shared[section, name] = entry.shared
            if id(entry) in self._seeds:
                spec, seeds = self._seeds[id(entry)]
                for module, section, name in entry.slots:
                    slot = StagedSlot(section=section, name=name, spec=spec, seeds=seeds)
                    make_record(module).staged.setdefault((section, name), slot)
                self._touched += entry.slots
        touched = {(id(module), section, name) for module, section, name in self._touched}
        for group in self._aliases:
            if not any((id(m), section, name) in touched for (m, section, name), _ in group):
                continue
            for (module, section, name), spec in group:
                staged = make_record(module).staged
                known = staged.get((section, name))
                staged[section, name] = (
                    StagedSlot(section=section, name=name, spec=spec, seeds=[])
                    if known is None
                    else attrs.evolve(known, spec=attrs.evolve(known.spec, group=spec.group))
                )

    def verify(self) -> None:
        """Check that every live tensor is where it was, and that nothing is on meta.

        Raises:
            StorageChangedError: a tensor moved, changed its form, or holds no data.
        """
        problems = []
        for name, (module, section, key), mark in self._marks:
            now = vars(module)[section].get(key)
            if not self._initial:
                self._counts.tensors_checked += 1
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
        for entry in self._entries if self._initial else ():
            if entry.staging is None and id(entry) in self._seeds:
                for region, value in self._seeds[id(entry)][1]:
                    select(entry.tensor, region).copy_(value)

    def counts(self) -> dict[str, int]:
        """Return the numbers for the receipt."""
        return attrs.asdict(self._counts)

    def close(self) -> None:
        """Stop watching and let go of everything."""
        loaded = [entry for entry in self._entries if entry.ledger.touched]
        staged = sum(entry.staging is not None for entry in loaded)
        self._counts.tensors_staged = staged
        self._counts.tensors_in_place = len(loaded) - staged
        self.observer = WriteObserver(self)
        for collection in (
            self.hooks, self.units, self._members, self._entries, self._by_tensor,
            self._by_watched, self._stagings, self._expected, self._closed, self._ready, self._marks,
            self._touched, self._aliases, self._seeds, self.modules,
        ):  # fmt: skip
            collection.clear()  # type: ignore[attr-defined]


class _WrittenStorages:
    """Listens for in-place writes of a hook.

    Attributes:
        keys: the storages that it wrote to.
        before: by id, what tensors that are no parameters or buffers held before.
    """

    def __init__(self, loose: Mapping[int, torch.Tensor]) -> None:
        self.keys: dict[int, None] = {}
        self.before: dict[int, torch.Tensor] = {}
        self._loose = loose

    def before_touch(self, storage: int) -> None:
        """Reading is of no interest."""

    def before_write(
        self,
        watched: Watched,
        region: Region | None,
        target: torch.Tensor,
        source: torch.Tensor | None,
    ) -> bool:
        """Note the storage."""
        if target.numel():
            self.keys[watched.storage] = None
        key = id(watched.tensor)
        if key in self._loose and key not in self.before:
            self.before[key] = watched.tensor.detach().clone()
        return True

    def after_write(self, watched: Watched, region: Region | None) -> None:
        """Nothing to do."""

    def before_read(self, watched: Watched, region: Region | None) -> None:
        """Nothing to do."""


def _seeded_whole(record: ModuleRecord | None, section: str, name: str) -> bool:
    """Whether the value that the tensor was constructed with is known."""
    slot = record.staged.get((section, name)) if record is not None else None
    return slot is not None and any(
        region == full_region(slot.spec.shape) for region, _ in slot.seeds
    )


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _described(entry: Entry) -> str:
    """Say which part of a tensor is missing, if some of it arrived."""
    if not entry.ledger.touched:
        return ""
    missing = entry.ledger.missing(entry.gaps or ())
    if not missing:
        return ""
    parts = ["[" + ", ".join(f"{a}:{b}" for a, b, _ in region) + "]" for region in missing[:3]]
    more = f" and {len(missing) - 3} more parts" if len(missing) > 3 else ""
    return " " + " ".join(parts) + more
