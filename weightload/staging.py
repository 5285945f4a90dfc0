"""Memory for what is staged: twins of tensors that a hook changes, until they are processed.

Mostly that is memory of a pool. Two things are better off in the memory of the live tensor itself:
what processing leaves where it was, once live memory is written anyway; and what comes before another
unit is complete, so that much would be staged at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs
import torch

from weightload.errors import StagingBudgetError, name_some
from weightload.ledger import Region
from weightload.pool import Pool
from weightload.storage import select

__all__ = ["BUCKET", "Area", "Staging"]

BUCKET = 64 << 20
"""Bytes that may be staged at once without a thought: what a bucket of a transport has."""


@attrs.define(kw_only=True, eq=False, repr=False)
class Staging:
    """Memory for the twins of one storage, allocated when something first touches them.

    Attributes:
        storage: the storage of the twins; of zero bytes until it is allocated.
        nbytes: size that it gets.
        twins: the tensors that look into it.
        seeds: twin, region and value of what no checkpoint brings.
        name: of its unit, for messages.
        pool: where the memory is from, if not from the system.
        host: the live tensor in whose memory it may be staged.
        settles: whether processing is known to leave the new value where the checkpoint's was, so
            that nothing has to be copied if it is staged there.
        hosted: whether it is.
    """

    storage: torch.UntypedStorage
    nbytes: int
    name: str = ""
    pool: Pool | None = None
    host: torch.Tensor | None = None
    settles: bool = False
    hosted: bool = False
    twins: list[torch.Tensor] = attrs.field(factory=list)
    seeds: list[tuple[torch.Tensor, Region, torch.Tensor]] = attrs.field(factory=list)
    allocated: bool = False

    def allocate(self) -> None:
        """Give the twins their memory and the seeds."""
        self.storage.resize_(self.nbytes)
        self._allocated()

    def allocate_from(self, pool: Pool) -> None:
        """Give the twins memory of a pool, which changes their storage.

        Only while nobody can have a view of a twin.
        """
        self.pool = pool
        self._move_to(pool.take(self.nbytes, self.storage.device))

    def allocate_in(self, host: torch.Tensor) -> None:
        """Give the twins the memory of a live tensor, which is overwritten then.

        Only while nobody can have a view of a twin.
        """
        self.hosted = True
        self._move_to(host.untyped_storage())

    def _move_to(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for twin in self.twins:
                twin.set_(storage, twin.storage_offset(), twin.shape, twin.stride())
        self._allocated()

    def _allocated(self) -> None:
        self.allocated = True
        with torch.no_grad():
            for twin, region, value in self.seeds:
                select(twin, region).copy_(value)

    @property
    def _ours_alone(self) -> bool:
        """Whether nobody but the twins and this object knows the memory."""
        holders = getattr(torch._C, "_storage_Use_Count", None)
        if holders is None or not self.allocated:
            return False
        return bool(holders(self.storage._cdata) <= 1 + len(self.twins))

    def release(self, keep: Collection[int] = ()) -> None:
        """Take the memory away from the twins.

        ``keep`` are ids of twins that have become live.

        What else looks into the storage (a view that a hook kept) keeps it alive. A loader that
        still holds a twin finds no memory, and the observer refuses a write to it.
        """
        if self.pool is None and not self.hosted and not keep and self._ours_alone:
            # Nothing is allocated here, so that the heap is not fragmented from layer to layer.
            self.storage.resize_(0)
            self.allocated = False
            return
        for twin in self.twins:
            if id(twin) not in keep:
                twin.data = torch.empty(0, dtype=twin.dtype, device=twin.device)
        self.allocated = False
        if self.pool is not None:
            self.pool.give(self.storage)


@attrs.define(kw_only=True, eq=False, repr=False)
class Area:
    """What one session has staged.

    Attributes:
        budget: bytes that may be staged at once; ``None`` for any number.
        dirty: says whether live memory has been written, so that an abort poisons in any case.
        peak: bytes that were staged at once, without those in live memory.
        crowded: whether units waited with much memory, or would have without live memory.
        expects: whether that is expected from the beginning.
    """

    budget: int | None = None
    dirty: Callable[[], bool] = bool
    peak: int = 0
    crowded: bool = False
    expects: bool = False
    _waiting: dict[int, Staging] = attrs.field(factory=dict)
    _staged: int = 0

    def hosts(self, staging: Staging) -> bool:
        """Whether something is better staged in its live tensor's own memory."""
        crowded = self._crowded(staging)
        self.crowded = self.crowded or crowded
        if staging.host is None:
            return False
        return crowded or self.expects or (staging.settles and self.dirty())

    def _crowded(self, staging: Staging) -> bool:
        """Whether other units wait for the rest of what they need, with much memory."""
        limit = BUCKET if self.budget is None else min(BUCKET, self.budget)
        sizes = [one.nbytes for one in self._waiting.values() if one.name != staging.name]
        own = [one.nbytes for one in self._waiting.values() if one.name == staging.name]
        return bool(sizes) and sum(sizes) + sum(own) + staging.nbytes > limit

    def has_room(self, nbytes: int) -> bool:
        """Whether the budget allows to stage so many bytes more."""
        return self.budget is None or self._staged + nbytes <= self.budget

    def host(self, staging: Staging, host: torch.Tensor) -> None:
        """Stage something in its live tensor's own memory."""
        staging.allocate_in(host)
        self._waiting[id(staging)] = staging

    def allocate(self, staging: Staging) -> None:
        """Give memory of the system.

        Raises:
            StagingBudgetError: that would be too much.
        """
        if not staging.allocated:
            self._enter(staging)
            staging.allocate()

    def allocate_from(self, staging: Staging, pool: Pool) -> None:
        """Give memory of a pool, which changes the storage of the twins.

        Raises:
            StagingBudgetError: that would be too much.
        """
        if not staging.allocated:
            self._enter(staging)
            staging.allocate_from(pool)

    def _enter(self, staging: Staging) -> None:
        after = self._staged + staging.nbytes
        if self.budget is not None and after > self.budget:
            waiting = dict.fromkeys(one.name for one in self._waiting.values() if not one.hosted)
            raise StagingBudgetError(
                f"To stage {staging.name!r} takes {staging.nbytes} bytes, beside {self._staged} "
                f"bytes for what waits to be complete ({name_some(waiting) or 'nothing'}); the "
                f"budget is {self.budget} bytes. Send what is processed together one after the "
                f"other, or give the session a larger staging_budget.",
                module=staging.name,
                needed=after,
                budget=self.budget,
            )
        self._waiting[id(staging)] = staging
        self._staged = after
        self.peak = max(self.peak, after)

    def release(self, staging: Staging, keep: Collection[int] = ()) -> None:
        """Take the memory back; see :meth:`Staging.release`."""
        staging.release(keep)
        known = self._waiting.pop(id(staging), None) is not None
        if known and not staging.hosted:
            self._staged -= staging.nbytes
