"""Learns from a load: what hooks did, what no checkpoint brings, what shares memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import attrs
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from weightload.births import Births
from weightload.entries import Entry, Load
from weightload.errors import UnsupportedError
from weightload.layer import Hook, Unit
from weightload.ledger import Region, full_region
from weightload.observer import StaleReads, Watched, WriteObserver
from weightload.pieces import Trial
from weightload.record import ObjectState, Slot, StagedSlot, make_record, read_by, slots_of
from weightload.recording import HookRecording, scope_of
from weightload.storage import TensorSpec, inner_tensors, new_group, select, storage_key

__all__ = ["Learning"]


class Learning:
    """Runs hooks, records what the first run of each does, and keeps it for later loads."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._touched: list[Slot] = []
        self._aliases: list[list[tuple[Slot, TensorSpec]]] = []

    def run_hook(self, unit: Unit, hook: Hook) -> None:
        """Run one hook, recorded if it is the first time."""
        unit.allocate()
        self._load.counts.hooks_run += 1
        if not hook.first:
            self.run_again(unit, hook)
            return
        scope = scope_of(hook.module, self._load.framework.registry)
        recording = HookRecording.start(scope, self._seeds_of, self._slot_of)
        writes = _WrittenStorages(recording.loose)
        observer = WriteObserver(writes)
        for tensor in (*recording.tensors, *recording.loose.values()):
            observer.watch(tensor)
        births = Births()
        try:
            with self._reads_of(hook) as touch, observer, births:
                births.reads = StaleReads({}, touch)
                hook.run()
        except BaseException:
            recording.undo(writes.before)
            raise
        self._holders.made_by(hook.module, births)
        self._touched += recording.finish(hook.module, hook.rule.role, writes.keys, writes.before)

    def run_again(self, unit: Unit, hook: Hook) -> None:
        """Run a hook that was recorded; what it writes to live tensors directly is kept aside."""
        loose = {
            key: tensor
            for key, tensor in unit.loose.items()
            if storage_key(tensor) is not None and storage_key(tensor) not in self._in_slots
        }
        writes = _WrittenStorages(loose)
        observer = WriteObserver(writes)
        for tensor in loose.values():
            observer.watch(tensor)
        watching = observer if loose else nullcontext()
        landings = unit.landings(hook)
        unit.births.begin(landings, self._land, noting=self._load.judging)
        before = self._states_around(unit, hook) if self._load.judging else []
        if self._load.judging and hook.converts and unit.staged and len(unit.hooks) == 1:
            hook.trial = Trial.of(hook.module, hook.converts)
        try:
            with self._reads_of(hook) as touch:
                staged = self._staged_for(unit, hook)
                unit.births.reads = StaleReads(self._load.stale, touch, staged)
                with watching, unit.births:
                    hook.run()
        finally:
            unit.births.reads = None
            for key, value in writes.before.items():
                unit.take_back(loose[key], value)
        if self._load.judging:
            hook.rooms = unit.births.rooms
            hook.changed = any(one.differences(ObjectState.of(one.owner)) for one in before)
            for mine in (*unit.births.keys, *map(storage_key, loose.values())):
                hook.used.pop(mine, None)
        self._holders.made_by(hook.module, unit.births)

    def _staged_for(self, unit: Unit, hook: Hook) -> set[int]:
        """Return where in live memory that is staged which a hook uses.

        Only the object tells which of both is read there, so that the old weights are not protected
        from the hooks that use the new ones.
        """
        near = [*unit.modules.values(), *read_by(hook.module, hook.rule.role)]
        keys = (storage_key(tensor) for module in near for _, _, tensor in slots_of(module))
        return {key for key in keys if key in self._load.stale}

    def _land(self, live: torch.Tensor) -> None:
        """Let a hook write to a live tensor, which holds the old value no longer."""
        self._load.mark_dirty()
        self._load.stale.pop(storage_key(live) or 0, None)

    def _states_around(self, unit: Unit, hook: Hook) -> list[ObjectState]:
        """Look at what a hook may change, if no commit is going to compare it."""
        if unit.staged:
            return []
        scope = scope_of(hook.module, self._load.framework.registry)
        return [ObjectState.of(owner) for owner in scope]

    def forget_holders(self) -> None:
        """Look again which modules hold what: there are more of them now."""
        for name in ("_holders", "_in_slots"):
            vars(self).pop(name, None)

    def everything_arrived(self) -> None:
        """Let hooks read what did not come and may stay away."""
        self._load.arriving = False

    @contextmanager
    def _reads_of(self, hook: Hook) -> Iterator[Callable[[int], None]]:
        """Give what is to be called with each storage key, and note which modules a hook read.

        Raises:
            ProcessingError: a hook reads what has not arrived yet, as it did not at the first load.
        """
        own = {id(module) for module in hook.module.modules()}
        read: dict[int, nn.Module] = {}

        def touch(storage: int) -> None:
            self._load.allocate(storage)
            if self._load.judging:
                hook.used[storage] = self._entry_at(storage)
            holders = [*self._holders.of(storage), *self._staged_at(storage)]
            if any(module is hook.module for module in holders):
                return
            for module in holders:
                read[id(module)] = module
                if self._load.arriving and id(module) not in own:
                    self._refuse_early(hook, storage)

        yield touch
        make_record(hook.module).reads.setdefault(hook.rule.role, list(read.values()))

    def _staged_at(self, storage: int) -> Iterator[nn.Module]:
        """Yield the modules whose tensors are staged in a storage, which they were given since."""
        for entry in self._entries_staged_at(storage):
            yield from (module for module, _, _ in entry.slots)

    def _entries_staged_at(self, storage: int) -> Iterator[Entry]:
        staging = self._load.stagings.get(storage)
        for twin in staging.twins if staging is not None else ():
            entry = self._load.by_tensor.get(id(twin))
            if entry is not None:
                yield entry

    def _entry_at(self, storage: int) -> Entry | None:
        """Return what loaders write to in a storage."""
        # Memory goes from one layer to the next: what is staged in it now counts.
        return next(self._entries_staged_at(storage), self._in_slots.get(storage))

    def _refuse_early(self, hook: Hook, storage: int) -> None:
        for entry in self._load.entries:
            awaited = not (entry.touched if self._load.initial else entry.complete)
            if awaited and entry.required and storage_key(entry.tensor) == storage:
                raise UnsupportedError(
                    f"it reads {entry.names[0]!r}, which has not arrived yet"
                    + (
                        ". Construct the model with memory, so that hooks run when all is there"
                        if self._load.initial
                        else ", and did not read it at the first load. Load with commit='atomic'"
                    ),
                    parameter=entry.names[0],
                )

    @functools.cached_property
    def _holders(self) -> _Holders:
        """Which modules hold which storages."""
        return _Holders(self._load.modules.values())

    @functools.cached_property
    def _in_slots(self) -> dict[int | None, Entry]:
        """What loaders write to, by storage key."""
        return {storage_key(entry.tensor): entry for entry in self._load.entries}

    def _slot_of(self, tensor: torch.Tensor) -> Slot | None:
        entry = self._load.by_tensor.get(id(tensor))
        return entry.slots[0] if entry is not None else None

    def _seeds_of(self, slot: Slot) -> list[tuple[Region, torch.Tensor]]:
        module, section, name = slot
        tensor = vars(module)[section][name]
        entry = self._load.by_tensor.get(id(tensor))
        if entry is None or tensor.is_meta:
            return []
        if id(entry) in self._load.seeds:
            return self._load.seeds[id(entry)][1]
        if self._load.initial and not self._load.intake.seen:
            # Without names nobody knows what a checkpoint brings; what was constructed counts.
            number = self._load.framework.constructed.get(storage_key(tensor) or 0)
            if number is None:
                return []
            filled = torch.full((), number, dtype=tensor.dtype, device=tensor.device)
            return [(full_region(tensor.shape), filled.expand(tensor.shape))]
        return [(region, select(tensor, region).clone()) for region in entry.ledger.missing()]

    def start_learning(self) -> None:
        """Note, after the first load and before the first hook, which tensors share storage."""
        slots: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        for module in self._load.modules.values():
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
        named = bool(self._load.intake.seen)
        for entry in self._load.entries:
            for module, section, name in entry.slots:
                make_record(module).tainted.discard((section, name))
            if entry.touched and named and not self._load.partial:
                for module, section, name in entry.slots:
                    sources = make_record(module).sources
                    stayed = sources.get((section, name), {}) if entry.kept else {}
                    sources[section, name] = {**stayed, **entry.ledger.written}
            if entry.gaps is None and named:
                for module, section, name in entry.slots:
                    record = make_record(module)
                    if entry.touched:
                        # Of what nothing was loaded into, the engine may change the shape.
                        record.gaps[section, name] = entry.ledger.missing()
                    if entry.shared.names or entry.shared.overlaps:
                        record.shared[section, name] = entry.shared
            if id(entry) in self._load.seeds:
                spec, seeds = self._load.seeds[id(entry)]
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


class _Holders:
    """Which modules hold which storages: their parameters and buffers, what their hooks made."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: dict[int, list[nn.Module]] = {}
        # A weak reference keeps a key from being used again, and frees the memory all the same.
        self._pins: dict[int, StorageWeakRef] = {}
        for module in modules:
            self._add_slots(module)

    def of(self, storage: int) -> Sequence[nn.Module]:
        """Return the modules that hold a storage."""
        return self._modules.get(storage, ())

    def made_by(self, module: nn.Module, births: Births) -> None:
        """Note what is left of what the hook of ``module`` made."""
        for key, pin in births.storages.items():
            self._add(key, pin, module)
        for inner in module.modules():
            self._add_slots(inner)

    def _add_slots(self, module: nn.Module) -> None:
        for _, _, tensor in slots_of(module):
            for part in inner_tensors(tensor).values() or (tensor,):
                key = storage_key(part)
                if key is not None and key not in self._pins:
                    self._add(key, StorageWeakRef(part.untyped_storage()), module)
                elif key is not None:
                    self._add(key, self._pins[key], module)

    def _add(self, key: int, pin: StorageWeakRef, module: nn.Module) -> None:
        self._pins[key] = pin
        known = self._modules.setdefault(key, [])
        if not any(module is one for one in known):
            known.append(module)


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

    def writing(self) -> None:
        """Nothing to do."""

    def after_write(self, watched: Watched, region: Region | None) -> None:
        """Nothing to do."""

    def before_read(self, watched: Watched, region: Region | None) -> None:
        """Nothing to do."""
