"""The tensors of one load: where loaders write, what has arrived, what memory stages them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from weightload.framework import Framework
from weightload.intake import Intake
from weightload.ledger import Region, RegionLedger, meet, volume
from weightload.observer import Watched
from weightload.record import SharedRegions, Slot, record_of, slots_of
from weightload.scope import Scope
from weightload.scribe import Scribe
from weightload.staging import Area, Staging
from weightload.storage import TensorSpec

if TYPE_CHECKING:
    from weightload.layer import Unit

__all__ = ["Counts", "Entry", "Load", "join", "missing_part"]


@attrs.define(kw_only=True, eq=False, repr=False)
class Entry:
    """One tensor that a load fills: where loaders write, and what has arrived.

    Attributes:
        names: qualified names under which the model knows it; tied tensors have several.
        slots: the places in the model that hold it.
        tensor: what loaders write to, the live tensor or its twin.
        ledger: what arrived.
        gaps: regions that no checkpoint brings; ``None`` if nobody knows yet.
        shared: regions that several source tensors fill.
        required: whether a load must bring all of it when nobody knows the gaps.
        readers: what is processed when it, and all else that is read then, is complete.
        staging: the memory behind the twin; ``None`` if loaders write to the live tensor.
        watched: the observer's handle.
        closed: whether its unit was processed, so that nothing more may arrive.
        read: whether a hook has run that reads it, so that it may not change any more.
        sources: what the last complete load filled it with: source name by region.
        kept: whether it stayed away, and keeps its value, as the scope allows.
        expected: whether some of it, which a load may leave out, was announced by this one.
    """

    names: list[str]
    slots: list[Slot]
    tensor: torch.Tensor
    ledger: RegionLedger
    gaps: list[Region] | None
    required: bool
    shared: SharedRegions = attrs.field(factory=SharedRegions)
    readers: list[Unit] = attrs.field(factory=list)
    staging: Staging | None = None
    watched: Watched | None = None
    closed: bool = False
    read: bool = False
    sources: dict[Region, str | None] = attrs.field(factory=dict)
    kept: bool = False
    expected: bool = False

    @property
    def packed(self) -> bool:
        """Whether a hook changes the tensor, so that its live form is another one."""
        for module, section, name in self.slots:
            record = record_of(module)
            slot = None if record is None else record.staged.get((section, name))
            if slot is not None and slot.packed:
                return True
        return False

    @property
    def touched(self) -> bool:
        """Whether anything arrived, in a known place or not."""
        return self.ledger.touched or bool(self.shared.names)

    @property
    def hollow(self) -> bool:
        """Whether it has no elements, could come, and has not."""
        return self.required and 0 in self.ledger.shape and not self.ledger.touched

    @property
    def awaited(self) -> list[str]:
        """Names that may come, and of which the regions that have arrived say nothing.

        The last time they brought what has a default, or no element.
        """
        gaps = self.gaps or ()
        if not gaps and len(self.sources) <= self.ledger.count:
            return []
        return [
            name
            for region, name in self.sources.items()
            if name is not None
            and not self.ledger.has(region)
            and not (volume(region) and not any(meet(region, gap) for gap in gaps))
        ]

    @property
    def complete(self) -> bool:
        """Whether everything arrived that a checkpoint brings."""
        return self.ledger.complete(self.gaps or ())


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
    hooks_spared: int = 0
    hooks_in_pieces: int = 0
    layers_in_place: int = 0
    layers_staged: int = 0
    staging_peak_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the numbers of two parts of one load."""
        return Counts(*map(operator.add, attrs.astuple(self), attrs.astuple(other)))


@attrs.define(kw_only=True, eq=False, repr=False)
class Load:
    """What the parts of one open session share.

    Attributes:
        framework: what the model belongs to.
        modules: every module of the tree by qualified name.
        intake: what has been received.
        initial: whether this is the load that makes the model.
        atomic: whether nothing live may be written before the end.
        scope: what the load promises to bring.
        strict: whether tensors that kernels know must keep their storage, wherever they are.
        mark_dirty: to be called before a live byte is written.
        entries: the tensors.
        by_tensor: the entry of each tensor that loaders see, by id.
        seeds: by id of the entry, values that a loader of the first load computed with.
        stale: names of live tensors that are staged and not committed, by storage key.
        stagings: the memory behind the twins, by storage key.
        scribe: records what loaders do; ``None`` if that is known.
        trial: counts instead what loaders take that are run without any write, while they are.
        judging: whether to look which hooks do the same whatever is loaded.
        area: gives memory to what is staged.
        arriving: whether more may come; what has not arrived by the end may stay away.
        counts: numbers for the receipt.
    """

    framework: Framework
    modules: dict[str, nn.Module]
    intake: Intake
    initial: bool
    atomic: bool
    scope: Scope
    strict: bool
    mark_dirty: Callable[[], None]
    entries: list[Entry] = attrs.field(factory=list)
    by_tensor: dict[int, Entry] = attrs.field(factory=dict)
    seeds: dict[int, ConstructedPart] = attrs.field(factory=dict)
    stale: dict[int, str] = attrs.field(factory=dict)
    stagings: dict[int, Staging] = attrs.field(factory=dict)
    scribe: Scribe | None = None
    trial: Intake | None = None
    judging: bool = False
    arriving: bool = True
    area: Area = attrs.field(factory=Area)
    counts: Counts = attrs.field(factory=Counts)

    @property
    def partial(self) -> bool:
        """Whether the load brings some names only."""
        return self.intake.wanted is not None

    @property
    def teaches(self) -> bool:
        """Whether names and order are learned from this load, rather than checked."""
        return self.initial or self.intake.lenient

    def entries_of(self, modules: Iterable[nn.Module]) -> dict[int, Entry]:
        """Return the entries of the tensors that ``modules`` hold themselves, by id."""
        tensors = (tensor for module in modules for _, _, tensor in slots_of(module))
        entries = [self.by_tensor[id(tensor)] for tensor in tensors]
        return {id(entry): entry for entry in entries}

    def keeps_optional(self, entry: Entry) -> bool:
        """Whether a part with a default, that came before, may stay away and keep its value."""
        if self.initial or self.partial or not entry.gaps:
            return False
        return any(
            source is not None
            and source not in self.intake.seen
            and self.scope.may_miss(source, *entry.names)
            and any(meet(region, gap) for gap in entry.gaps)
            for region, source in entry.sources.items()
        )

    def allocate(self, storage: int) -> None:
        """Give a twin its memory before the first operation on it."""
        staging = self.stagings.get(storage)
        if staging is not None:
            self.area.allocate(staging)

    def close(self) -> None:
        """Let go of the model."""
        loaded = [entry for entry in self.entries if entry.ledger.touched]
        self.counts.staging_peak_bytes = self.area.peak
        # A scribe knows tensors, and a caller may keep the session.
        self.scribe = self.intake.scribe = None
        in_place = {id(entry.slots[0][0]) for entry in loaded if entry.staging is None}
        self.counts.layers_in_place = len(in_place)
        self.counts.tensors_staged = sum(entry.staging is not None for entry in loaded)
        self.counts.tensors_in_place = len(loaded) - self.counts.tensors_staged
        for collection in (
            self.entries,
            self.by_tensor,
            self.seeds,
            self.stale,
            self.stagings,
            self.modules,
        ):
            collection.clear()


ConstructedPart = tuple[TensorSpec, list[tuple[Region, torch.Tensor]]]
"""What a tensor was when a loader first computed with it, and its values from before."""


def join(module: str, name: str) -> str:
    """Return the qualified name of a tensor."""
    return f"{module}.{name}" if module else name


def missing_part(entry: Entry) -> str:
    """Say which part of a tensor is missing, if some of it arrived."""
    if not entry.ledger.touched:
        return ""
    missing = entry.ledger.missing(entry.gaps or ())
    if not missing:
        return ""
    parts = ["[" + ", ".join(f"{a}:{b}" for a, b, _ in region) + "]" for region in missing[:3]]
    more = f" and {len(missing) - 3} more parts" if len(missing) > 3 else ""
    return " " + " ".join(parts) + more
