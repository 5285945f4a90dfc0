"""Takes tensors to their places by a recorded plan, past the model's loaders.

Whatever is not exactly as it was recorded is left to the loaders, and to the checks that watch them:
a name takes the short way only if nothing can be wrong with it. What arrives is entered into the
same ledgers on both ways, so that completeness is measured against the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weightload.arrivals import Arrivals
from weightload.batching import Batch
from weightload.bundle import PLAIN, Fill
from weightload.entries import Entry, Load
from weightload.ledger import meet
from weightload.moving import LARGE, carry, move, unwatched
from weightload.reading import Place
from weightload.recorded import Copy, Recorded, Route, loader_of
from weightload.transport import has_memory

__all__ = ["Express"]


class Express:
    """The short way of one session that has opened a board.

    Args:
        load: what the parts of the session share.
        arrivals: is told what has arrived.
        recorded: the plan, which holds now.

    Attributes:
        stale: whether something came that the plan does not know, or a loader is another one, so
            that the next load has to record anew.
    """

    def __init__(self, load: Load, arrivals: Arrivals, recorded: Recorded) -> None:
        self.stale = False
        self.recorded = recorded
        self._load = load
        self._arrivals = arrivals
        self._entries = {name: entry for entry in load.entries for name in entry.names}
        self._checked: dict[str, bool] = {}
        self._begun: dict[str, tuple[Entry, int]] = {}
        self._threads = torch.get_num_threads() > 1
        self._batch = Batch()

    def takes(self, name: Any, tensor: Any) -> bool:
        """Take one tensor to its places; return whether that was done.

        If not, nothing was done, and the tensor has to go through the loaders.
        """
        intake = self._load.intake
        route = self.recorded.route(name, self._entries) if type(name) is str else None
        if route is None:
            self.stale = self.stale or not self.recorded.knows(name)
            return False
        if (
            type(tensor) not in PLAIN
            or name in intake.seen
            or tensor.dtype is not route.dtype
            or tensor.shape != route.shape
            or not tensor.is_contiguous()
            or tensor.is_meta
            or tensor.is_neg()
            or not has_memory(tensor)
            or (route.casts and intake.check_finite)
        ):
            return False
        if intake.check_finite:
            intake.check_pair(name, tensor)
        return self.put(name, tensor, route)

    def put(self, name: str, tensor: torch.Tensor, route: Route) -> bool:
        """Do the same with a tensor whose form is known to be that of its route."""
        if len(route.copies) == 1 and self._continue(name, tensor, route, route.copies[0]):
            return True
        found = []
        for copy in route.copies:
            entry = self._entries[copy.place]
            if not self._fits(copy, entry):
                return False
            found.append((copy, entry))
        intake = self._load.intake
        intake.take(name, tensor, route.fact, route.nbytes)
        if route.casts:
            intake.casts.add(name)
        for copy, entry in found:
            self._do(name, copy, entry, tensor)
        if self._batch and self._arrivals.ready:
            self.flush()  # the hooks of what is complete read it
        return True

    def _continue(self, name: str, tensor: torch.Tensor, route: Route, copy: Copy) -> bool:
        """Move one run of bytes to where others have been moved before; return whether that is done.

        Many experts go to one tensor; what is true of it has been looked at for the first of them.
        """
        entry, address = self._begun.get(copy.place, (None, 0))
        if (
            entry is None
            or copy.start is None
            or entry.closed
            or entry.read
            or entry.watched is None
            or entry.ledger.has(copy.region)
            or not tensor.is_cpu
            or (copy.nbytes >= LARGE and self._threads)
        ):
            return False
        self._load.intake.take(name, tensor, route.fact, route.nbytes)
        move(address + copy.to, tensor.data_ptr() + copy.start, copy.nbytes)
        self._load.counts.bytes_written += copy.nbytes
        entry.ledger.fill(copy.region, name, copy.count)
        if entry.readers and not entry.ledger.lacks:
            self._arrivals.note_ready(entry)
        return True

    @property
    def ready(self) -> bool:
        """Whether something is complete and has to be processed."""
        return self._arrivals.ready

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Place] | None:
        """Enter one tensor as if it had come, and return where its parts have to be put at once.

        Until that is done nothing of the session may go on.

        Returns:
            ``None`` if that is not all that has to be done: nothing was done then, and the tensor
            has to come. No place if nothing takes it.
        """
        intake = self._load.intake
        route = self.recorded.route(name, self._entries)
        if (
            route is None
            or not route.reads
            or name in intake.seen
            or dtype is not route.dtype
            or shape != route.shape
            or intake.check_finite
            or intake.verification is not None
        ):
            return None
        entries = [self._entries[copy.place] for copy in route.copies]
        for copy, entry in zip(route.copies, entries, strict=True):
            if not self._fits(copy, entry):
                return None
        intake.take(name, None, route.fact, route.nbytes)
        found, guard = [], unwatched()
        try:
            for copy, entry in zip(route.copies, entries, strict=True):
                self._prepare(entry)
                found.append(copy.reserve(entry.tensor, _address(entry)))
                self._note(name, copy, entry)
        finally:
            del guard
        return found

    @property
    def owners(self) -> dict[str, int]:
        """The places that this takes tensors to, with a number for what each is processed with."""
        return {
            name: id(entry.readers[0] if entry.readers else entry)
            for name, entry in self._entries.items()
        }

    def expects(self, fills: Sequence[Fill]) -> bool:
        """Whether nothing has come yet for some tensors, all is as it was recorded, and they fit."""
        nbytes = 0
        for fill in fills:
            entry = self._entries[fill.place]
            if entry.ledger.touched or entry.gaps or not self._takes_writes(entry, fill):
                return False
            if entry.staging is not None and not entry.staging.allocated:
                nbytes += entry.staging.nbytes
        return self._load.area.has_room(nbytes)

    def begin(self, fills: Sequence[Fill]) -> dict[int, int]:
        """Get ready for all that tensors take which are expected, and return their addresses."""
        found, guard = {}, unwatched()
        try:
            for fill in fills:
                entry = self._entries[fill.place]
                self._prepare(entry)
                found[fill.at] = _address(entry)
        finally:
            del guard
        return found

    def end(self, fills: Sequence[Fill]) -> None:
        """Note that they are filled."""
        for fill in fills:
            entry = self._entries[fill.place]
            self._load.counts.bytes_written += fill.nbytes
            entry.ledger.fill_all(fill.regions)
            if entry.readers:
                self._arrivals.note_ready(entry)

    def flush(self) -> None:
        """Do what waits to be copied on a device."""
        if self._batch:
            guard = unwatched()
            try:
                self._batch.flush()
            finally:
                del guard

    def enter(self, names: Iterable[str], sent: Iterable[tuple[Copy, int]]) -> None:
        """Note what has been taken to its places before the board was opened.

        Args:
            names: what has come.
            sent: digests of what was sent, to be compared at the end.
        """
        verification = self._load.intake.verification
        if verification is not None:
            for copy, value in sent:
                shape = copy.write.target.shape
                verification.remember(self._entries[copy.place], copy.region, value, shape)
        for name in names:
            route = self.recorded.route(name, self._entries)
            for copy in route.copies if route is not None else ():
                entry = self._entries[copy.place]
                if not entry.ledger.has(copy.region):
                    entry.ledger.fill(copy.region, name, copy.count)

    def _fits(self, copy: Copy, entry: Entry) -> bool:
        """Whether a write can be done, and means what it meant when it was recorded."""
        if entry.ledger.has(copy.region):
            return False
        if entry.gaps and any(meet(copy.region, gap) for gap in entry.gaps):
            return False
        return self._takes_writes(entry, copy)

    def _takes_writes(self, entry: Entry, what: Copy | Fill) -> bool:
        """Whether a tensor may be written, and its loader is the one that it was."""
        if entry.closed or entry.read or entry.watched is None:
            return False
        checked = self._checked.get(what.place)
        if checked is None:
            same = loader_of(entry.tensor) == what.loader
            self.stale = self.stale or not same
            checked = self._checked[what.place] = same and not entry.shared.names
        return checked

    def _prepare(self, entry: Entry) -> None:
        """Let a tensor be written: give it memory, or note that live memory is written."""
        if entry.staging is None:
            self._load.mark_dirty()
        elif not entry.staging.allocated:
            self._arrivals.stage(entry.staging, self.recorded.pool)

    def _do(self, name: str, copy: Copy, entry: Entry, tensor: torch.Tensor) -> None:
        guard = unwatched()  # what is known
        try:
            self._prepare(entry)
            watched, verification = entry.watched, self._load.intake.verification
            if verification is not None and not entry.packed:
                target = copy.target(entry.tensor)
                verification.note(entry, copy.region, target, copy.source(tensor))
            if (
                copy.start is not None
                and tensor.is_cpu
                and (copy.nbytes < LARGE or not self._threads)
                and watched is not None
                and watched.hold.device.type == "cpu"
            ):
                first = _address(entry)
                carry(first + copy.to, tensor.data_ptr() + copy.start, copy.nbytes)
                if verification is None and not entry.gaps:
                    self._begun[copy.place] = entry, first
            else:
                copy.carry_out(entry.tensor, tensor, self._batch)
        finally:
            del guard
        self._note(name, copy, entry)

    def _note(self, name: str, copy: Copy, entry: Entry) -> None:
        self._load.counts.bytes_written += copy.nbytes
        entry.ledger.fill(copy.region, name, copy.count)
        if entry.readers:
            self._arrivals.note_ready(entry)


def _address(entry: Entry) -> int:
    """Return where the first element of a watched tensor is; 0 if it is not watched."""
    watched = entry.watched
    if watched is None:
        return 0
    return watched.hold.data_ptr() + watched.base_offset * entry.tensor.element_size()
