"""Whether everything came that was promised, and once: asked at the end, and before a hook."""

from __future__ import annotations

import math

import attrs

from weightload.entries import Entry, Load, missing_part
from weightload.errors import (
    DuplicateWeightError,
    IncompleteLoadError,
    WeightMismatchError,
    name_some,
)
from weightload.layer import Hook, Unit
from weightload.pairs import same_values
from weightload.record import make_record
from weightload.registry import Role

__all__ = ["Completeness"]


@attrs.frozen
class Completeness:
    """Reads the ledgers of one load."""

    _load: Load

    def missing(self) -> list[Entry]:
        """Return the tensors that this load promised and did not bring."""
        return [
            entry
            for entry in self._load.entries
            if not entry.closed and not entry.kept and self._is_missing(entry)
        ]

    def describe(self, entries: list[Entry]) -> list[str]:
        """Return the name of each tensor, with the part that is missing."""
        return [f"{entry.names[0]}{missing_part(entry)}{self._needed(entry)}" for entry in entries]

    def may_miss(self, entry: Entry) -> bool:
        """Whether a tensor may stay away, by its own names or by those of its sources."""
        scope = self._load.scope
        if self._load.initial or scope.may_miss(*entry.names):
            return scope.may_miss(*entry.names)
        sources = {name for name in entry.sources.values() if name is not None}
        absent = (sources | entry.shared.names) - self._load.intake.seen.keys()
        return bool(absent) and all(scope.may_miss(name) for name in absent)

    def _is_missing(self, entry: Entry) -> bool:
        if not self._load.initial:
            if entry.gaps is None:
                return entry.required and not entry.ledger.complete()
            needed = bool(self._names_missing(entry)) or self._load.keeps_optional(entry)
            return not entry.complete or needed
        if entry.touched:
            return False
        if any((section, name) in make_record(m).tainted for m, section, name in entry.slots):
            return True
        if not (entry.required and self._load.framework.requires_all):
            return False
        return math.prod(entry.ledger.shape) > 0 and not self.may_miss(entry)

    def _names_missing(self, entry: Entry) -> list[str]:
        """Return names that are needed although others brought the whole tensor."""
        intake, names = self._load.intake, entry.shared.names
        if not entry.shared.ordered or (intake.wanted is not None and not names & intake.wanted):
            return []
        return sorted(names - intake.seen.keys())

    def _needed(self, entry: Entry) -> str:
        names = self._names_missing(entry)
        return f" (without {name_some(names)})" if names else ""

    def check_overlaps(self) -> None:
        """Check that no two names filled parts of a tensor that overlap.

        Raises:
            DuplicateWeightError: they did, and did not in the load that made the model.
        """
        for entry in self._load.entries:
            conflict = None if entry.shared.overlaps else entry.ledger.conflict()
            if conflict is None:
                continue
            if self._load.initial:
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
        manifest = self._load.intake.manifest or {}
        for name, tensor in self._load.intake.unclaimed.items():
            place = manifest[name].place
            entry = next((one for one in self._load.entries if place in one.names), None)
            live = None
            if entry is not None:
                module, section, key = entry.slots[0]
                live = vars(module)[section].get(key) if entry.closed else entry.tensor
            if entry is not None and len(entry.names) == 1 and place in self._load.intake.computed:
                continue  # others had their part in it, and another came last this time
            if (
                live is not None
                and live.numel() == tensor.numel()
                and same_values(live.detach().flatten(), tensor.to(live).flatten())
            ):
                continue
            raise WeightMismatchError(
                f"{name!r} filled {place!r} in the load that made the model, and the model's "
                f"loaders ignored it now, although its value is another. If the two were tied "
                f"since, they differ in these weights: start the engine again on them. If not, "
                f"the loaders have to take what they are given.",
                name=name,
                place=place,
            )

    def incomplete(self, entries: list[Entry], advice: str = "") -> IncompleteLoadError:
        """Make the error that says which tensors never arrived."""
        return self.never_came(self.describe(entries), len(self._load.intake.seen), advice)

    def never_came(self, names: list[str], received: int, advice: str = "") -> IncompleteLoadError:
        """Make the error that says what never arrived, by name."""
        empty = " The source was empty or exhausted." if received == 0 else ""
        if not self._load.initial and self._load.intake.manifest is None:
            advice = f"{advice} {self._load.framework.advice}"
        return IncompleteLoadError(
            f"{len(names)} tensors never arrived whole: {name_some(names)}. {received} source "
            f"tensors were received.{empty}{advice and ' ' + advice.strip()}",
            missing=names[:10],
            missing_count=len(names),
            received=received,
        )

    def check_complete(self, unit: Unit, hook: Hook) -> None:
        """Check that everything came that a hook is going to read.

        A first load cannot tell padding from a part that never came, but it knows of what nothing
        came at all.

        Raises:
            IncompleteLoadError: something did not.
        """
        reads = unit.reads if hook.rule.role is Role.QUANT else hook.reads
        if self._load.initial:
            absent = [e for e in reads if self._is_missing(e)]
        elif unit.staged:
            absent = [e for e in reads if not e.complete or self._names_missing(e)]
        else:
            absent = []
        if absent:
            raise self.incomplete(absent)
