"""Listens to the observer: which write belongs where, whether it may be done, what is ready."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from weightload.casting import check_copy
from weightload.entries import Entry, Load
from weightload.errors import (
    DuplicateWeightError,
    UnexpectedWeightError,
    UnsupportedError,
    name_some,
)
from weightload.guards import Guards, too_late
from weightload.intake import Intake
from weightload.layer import Unit
from weightload.ledger import Region, full_region, meet, without
from weightload.observer import Watched, WriteObserver
from weightload.pairs import same_values
from weightload.pool import Pool
from weightload.record import StagedSlot, make_record, slots_of
from weightload.staging import Staging
from weightload.storage import TensorSpec, inner_tensors, select

__all__ = ["Arrivals"]


class Arrivals:
    """Enters every write of one load into the ledgers.

    Attributes:
        observer: sees the writes while it is entered.
        guards: refuses writes to what is staged.
    """

    def __init__(self, load: Load) -> None:
        self.observer = WriteObserver(self)
        self.guards = Guards(load, self.observer)
        self._load = load
        self._by_watched: dict[int, Entry] = {}
        self._closed: dict[int, Entry] = {}
        self._alone: dict[int, Entry] = {}
        self._ready: dict[int, Unit] = {}
        self._dirties = False
        self._left: set[int] = set()
        self._expected: list[tuple[Entry, Region]] = []

    def watch(self, entry: Entry) -> None:
        """Watch writes to the tensor of ``entry``."""
        entry.watched = self.observer.watch(entry.tensor)
        if entry.watched is not None:
            self._by_watched[id(entry.watched)] = entry
            if entry.staging is not None:
                self._load.stagings[entry.watched.storage] = entry.staging
        elif self._load.partial:
            for part in inner_tensors(entry.tensor).values():
                watched = self.observer.watch(part)
                if watched is not None:
                    self._alone[watched.storage] = entry

    def end(self, entry: Entry) -> None:
        """Refuse all further writes to the tensor of ``entry``, whose unit is done."""
        if entry.watched is not None:
            self._load.stagings.pop(entry.watched.storage, None)
            self._by_watched.pop(id(entry.watched), None)
            self.observer.forget(entry.watched)
            entry.watched = None
        self._close(entry.tensor, entry)
        if entry.staging is not None:
            self.guards.take_back(entry.staging)

    def _close(self, tensor: torch.Tensor, entry: Entry) -> None:
        left = self.observer.watch(tensor)
        if left is not None:
            self._closed[left.storage] = entry

    def end_of_first(self, unit: Unit) -> None:
        """Refuse further writes to what a hook of a first load has read, and to what it made."""
        for module in unit.modules.values():
            for section, key, tensor in slots_of(module):
                for entry in unit.entries:
                    if (module, section, key) in entry.slots:
                        known = self._load.by_tensor.get(id(tensor))
                        if known is None:
                            self._close(tensor, entry)
        for hook in unit.hooks:
            for entry in hook.reads if hook.attempted else ():
                self.end(entry)

    def stage(self, staging: Staging, pool: Pool) -> None:
        """Give twins memory before the first copy to them, which no loader has made.

        That is memory of the live tensor, if it may be, and of a pool otherwise.
        """
        if self._load.area.hosts(staging) and staging.host is not None:
            self.host(staging)
        else:
            self._load.area.allocate_from(staging, pool)
            self._watch_again(staging)

    def host(self, staging: Staging) -> None:
        """Give twins the memory of the live tensor that is to be their host."""
        if staging.host is None:
            return
        self._load.mark_dirty()
        # Loaders that write it write the twin.
        self.guards.lend(staging, staging.host)
        self._load.area.host(staging, staging.host)
        self._watch_again(staging)

    def _watch_again(self, staging: Staging) -> None:
        for twin in staging.twins:
            entry = self._load.by_tensor.get(id(twin))
            if entry is not None and entry.watched is not None:
                self._load.stagings.pop(entry.watched.storage, None)
                self._by_watched.pop(id(entry.watched), None)
                self.observer.forget(entry.watched)
                self.watch(entry)

    def before_touch(self, storage: int) -> None:
        """Give a twin its memory before the first operation on it."""
        if storage in self._load.stagings:
            self._load.allocate(storage)
            return
        entry = self._closed.get(storage)
        if entry is not None:
            raise too_late(self._load, entry.names[0])

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
            self.guards.refuse(watched.storage, write=True)
            if watched.storage in self._alone:
                raise self._outside(self._load.intake.current, self._alone[watched.storage])
            return True
        if id(entry) in self._left:
            return False
        intake = self._load.trial or self._load.intake
        name = intake.name_of(source)
        if name is None and source is None and region is not None:
            # A model that collects its source first goes on with what it has copied.
            name = entry.ledger.writer(region)
        if source is not None:
            check_copy(intake, name, entry, target, source, initial=self._load.initial)
        intake.consumed(name, entry.names[0], source)
        if self._load.trial is not None:
            if region is not None and entry.gaps:
                self._keep_defaults(entry, region)
                self._expected.append((entry, region))
            return False
        if self._load.partial:
            self._check_scope(entry, watched, region, name)
        if self._load.scribe is not None:
            known = None if self.observer.shares(watched) else region
            self._load.scribe.wrote(entry, watched, known, target, source)
        first = self._load.teaches
        if region is None and not first:
            self._check_placeless(intake, entry, name)
        if region is not None and not first and self._counts_less(entry, region, name):
            self.note_ready(entry)
            return False
        if region is not None and entry.gaps:
            self._keep_defaults(entry, region)
        if entry.staging is None:
            self._dirties = True
        if intake.verification is not None and not entry.packed:
            intake.verification.note(entry, region, target, source)
        self._load.counts.bytes_written += target.numel() * target.element_size()
        if region is None:
            if entry.read:
                raise too_late(self._load, entry.names[0])
            if first and not self.observer.shares(watched):
                # Nobody can say which part it fills: every name that does so is needed.
                self._need_all(entry, name)
            return True
        if first and name is None and entry.ledger.has(region):
            self._need_all(entry, None)
        if entry.read and not (entry.ledger.has(region) and source is not None):
            raise too_late(self._load, entry.names[0])
        other = entry.ledger.enter(region, name)
        if other is not None and first:
            entry.shared.winner[region] = name
            entry.shared.names |= {one for one in (name, other) if one is not None}
        elif other is not None and not self._may_follow(entry, name, other):
            if source is not None and same_values(target, source.to(target)):
                return False
            raise DuplicateWeightError(
                f"{name!r} and {other!r} both fill {entry.names[0]!r} "
                f"({' = '.join(entry.names)}), with different values.",
                name=name,
                other=other,
                parameter=entry.names[0],
            )
        return True

    def writing(self) -> None:
        """Note that live memory is written, if it is: nothing has refused the operation."""
        if self._dirties:
            self._load.mark_dirty()
        self._dirties = False

    def _check_scope(
        self, entry: Entry, watched: Watched, region: Region | None, name: str | None
    ) -> None:
        """Refuse a write of a partial load to what it did not promise."""
        gaps = entry.gaps or []
        if region is None and self.observer.shares(watched):
            outside = False  # what it shares its memory with knows the region
        elif region is None:
            outside = name not in entry.shared.names and name not in entry.sources.values()
        else:
            outside = any(meet(region, gap) for gap in gaps)
        if outside:
            raise self._outside(name, entry)

    def _outside(self, name: str | None, entry: Entry) -> UnexpectedWeightError:
        return UnexpectedWeightError(
            f"{name!r} was going to fill a part of {entry.names[0]!r} that is not in the scope of "
            f"this session.",
            name=name,
            parameter=entry.names[0],
        )

    def _check_placeless(self, intake: Intake, entry: Entry, name: str | None) -> None:
        """Refuse a write to no known place by a name that filled other tensors the last time.

        Raises:
            UnexpectedWeightError: it did.
        """
        names = entry.shared.names
        if name in names or not names or intake.manifest is None:
            return
        if name is not None and name in intake.manifest:
            raise UnexpectedWeightError(
                f"{name!r} was going to fill a part of {entry.names[0]!r}, which "
                f"{name_some(sorted(names))} filled in the load that made the model.",
                name=name,
                parameter=entry.names[0],
            )

    def _need_all(self, entry: Entry, *names: str | None) -> None:
        """Note that all names are needed, in the order in which they come.

        Where nobody knows to which name a write belongs, because a model collected its source
        first, all names are that have come so far.
        """
        entry.shared.ordered = True
        known = [name for name in names if name is not None]
        entry.shared.names |= set(known if len(known) == len(names) else self._load.intake.seen)

    def _may_follow(self, entry: Entry, name: str | None, other: str) -> bool:
        """Whether one name may fill what another has filled, as at the first load."""
        if name is None:
            return entry.shared.ordered
        return {name, other} <= entry.shared.names

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
            slot = StagedSlot(section=section, name=name, spec=spec, seeds=seeds, packed=False)
            make_record(module).staged.setdefault((section, name), slot)

    def _counts_less(self, entry: Entry, region: Region, name: str | None) -> bool:
        """Whether a name that counts more than ``name`` has filled the region already."""
        winner = entry.shared.winner.get(region, name)
        return winner != name and not entry.shared.ordered and entry.ledger.writer(region) == winner

    def before_read(self, watched: Watched, region: Region | None) -> None:
        """Note, in a first load, that a loader computes with what its tensor held before."""
        entry = self._by_watched.get(id(watched))
        if entry is None:
            self.guards.refuse(watched.storage, write=False)
        if entry is None or self._load.trial is not None or entry.tensor.is_meta:
            return
        if self._load.scribe is not None:
            self._load.scribe.computed(entry)
        region = full_region(entry.ledger.shape) if region is None else region
        self._refuse_unknown_value(entry, region)
        if not self._load.teaches:
            return
        name = self._load.intake.current
        if id(entry) not in self._load.seeds and entry.ledger.leaves_out(region):
            self._load.seeds[id(entry)] = (
                TensorSpec.of(entry.tensor),
                [(rest, select(entry.tensor, rest).clone()) for rest in entry.ledger.missing()],
            )
        others = set(entry.ledger.writers(region)) - ({name} if name is not None else set())
        if others:
            self._need_all(entry, name, *others)

    def _refuse_unknown_value(self, entry: Entry, region: Region) -> None:
        if self._load.initial:
            return
        unknown = entry.gaps is None and entry.required and entry.staging is not None
        if unknown and entry.ledger.leaves_out(region):
            raise UnsupportedError(
                f"A loader computes with the value that {entry.names[0]!r} was constructed with, "
                f"which is not known. {self._load.framework.advice}",
                parameter=entry.names[0],
            )

    def after_write(self, watched: Watched, region: Region | None) -> None:
        """Note when the unit of a tensor is complete."""
        entry = self._by_watched.get(id(watched))
        if entry is not None:
            self.note_ready(entry)

    def note_ready(self, entry: Entry) -> None:
        """Note which units are complete now that something has arrived for ``entry``."""
        if self._load.atomic or not entry.complete:
            return
        for unit in entry.readers:
            if (unit.fresh or not self._load.initial) and unit.complete and self._repeated(unit):
                self._ready[id(unit)] = unit

    @property
    def ready(self) -> bool:
        """Whether a unit is complete and has not been taken yet."""
        return bool(self._ready)

    def _repeated(self, unit: Unit) -> bool:
        """Whether the names came that only repeat a value, bring no element, or replace a default.

        A first load does not know which tensors without elements will come, and a later one not where
        names belong that are new to the model, and were announced without their data.
        """
        intake = self._load.intake
        if self._load.initial and any(entry.hollow for entry in unit.reads):
            return False
        if any(entry.gaps for entry in unit.reads) and not intake.announced <= intake.seen.keys():
            return False
        return all(
            name in intake.seen
            for entry in unit.reads
            for name in (*entry.shared.names, *entry.awaited)
        )

    def take_ready(self, waiting: Collection[int] = ()) -> list[Unit]:
        """Return the units that became complete since the last call.

        Args:
            waiting: ids of modules whose units have to wait until a later call.
        """
        ready, self._ready = self._ready, {}
        for key, unit in ready.items() if waiting else ():
            if any(id(module) in waiting for module in unit.modules.values()):
                self._ready[key] = unit
        return [u for key, u in ready.items() if not u.committed and key not in self._ready]

    @contextmanager
    def again(self, name: str, shared: Collection[int]) -> Iterator[None]:
        """Let the loaders of a draft have a tensor that the target's had.

        Nothing that came under its name to a module of both is written a second time.

        Args:
            name: source name.
            shared: ids of the modules that belong to both.
        """
        self._left = {
            id(entry)
            for entry in self._load.entries
            if any(id(module) in shared for module, _, _ in entry.slots)
            and name in entry.ledger.written.values()
        }
        try:
            yield
        finally:
            self._left = set()

    @contextmanager
    def rehearsal(self, trial: Intake) -> Iterator[None]:
        """Let loaders run without any write; ``trial`` learns which names have a place.

        A place that no checkpoint brought so far, and this one is going to, is waited for.
        """
        self._load.trial = trial
        try:
            yield
        finally:
            self._load.trial = None
        for entry, region in self._expected:
            entry.gaps = without(entry.ledger.shape, entry.gaps or (), [region])
            entry.expected = True
        self._expected.clear()
