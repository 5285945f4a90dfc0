"""Knows which tensors a hook made, so that none is missed that lives on where nothing tracks it.

What a hook puts on its module, on a strategy object or into anything that these hold is found by
walking them. A table that belongs to a Python module, or an object that was there before and is
not tracked, is not walked; but a tensor that was made while the hook ran and that is still alive
afterwards must be somewhere.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightload import observer
from weightload.observer import StaleReads
from weightload.pool import Pool
from weightload.storage import look_of, storage_key

__all__ = ["Births", "Room"]

Room = tuple[int, int]
"""Which tensor of those that a hook makes to write into: where it is made, and the how manieth there."""

_ROOMS = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    )
)
"""Operations that give a tensor whose values are arbitrary."""
_OWN = (os.path.join(os.path.dirname(torch.__file__), ""), __file__, observer.__file__)
"""Where code is that is between a hook and what it calls."""
_WORTH = 1 << 20
"""Bytes from which on it takes longer to clear new memory than to look for some that was used."""
_FIRST_SEEN = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""Operations whose argument nobody has seen before: what ``torch.tensor`` made of numbers."""


class Births(TorchDispatchMode):
    """Notes the storage of every tensor that operations make while it is entered.

    Attributes:
        pool: where large tensors on a CPU, that a hook makes to write into, get their memory from;
            other devices have such a pool of their own.
        rooms: the storage key of each tensor that the present hook made to write into.
        reads: looks at each operation before it runs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool: Pool | None = None
        self.rooms: dict[Room, int | None] = {}
        self._landings: Mapping[Room, torch.Tensor] = {}
        self._base = 0
        self._named = False
        self._land: Callable[[torch.Tensor], object] = id
        self.reads: StaleReads | None = None
        self._made: dict[int, tuple[StorageWeakRef, torch.Size, torch.dtype]] = {}
        self._lent: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, if it may be, and look at what it returns."""
        kwargs = kwargs or {}
        if self.reads is not None:
            self.reads.check(args, kwargs)
        result = func(*args, **kwargs)
        if func in _ROOMS and not kwargs.get("pin_memory") and self._place(result):
            return result  # nothing new: it looks into a live tensor
        known: set[int | None] | None = None
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
            if key is None or key in self._made or not tensor.numel():
                continue
            if known is None:
                seen = func._schema.name not in _FIRST_SEEN
                known = _keys((args, kwargs)) if seen else set()
            if key not in known:
                # The weak reference keeps the key from being used again.
                hold = StorageWeakRef(tensor.untyped_storage())
                self._made[key] = hold, tensor.shape, tensor.dtype
        return result

    def begin(
        self,
        landings: Mapping[Room, torch.Tensor],
        land: Callable[[torch.Tensor], None],
        *,
        noting: bool,
    ) -> None:
        """Get ready for the next hook, which the caller is going to call.

        Args:
            landings: live tensors whose new values the hook is known to write into tensors that it
                makes for that, by the names of these in :attr:`rooms`. It gets the memory of the
                live ones at once.
            land: called with a live tensor before its memory is given away.
            noting: whether somebody is going to ask for :attr:`rooms`.
        """
        self.rooms, self._landings, self._land = {}, landings, land
        self._named = noting or bool(landings)
        self._base = id(sys._getframe(1))

    def _place(self, tensor: torch.Tensor) -> bool:
        """Say where a tensor has its memory that was just made, and has no pages yet.

        Returns:
            Whether that is a live tensor's.
        """
        if storage_key(tensor) is None:
            return False
        if not self._named:
            if self.pool is not None:
                self._lend(tensor, self.pool)
            return False
        site, number = self._site(), 0
        while (site, number) in self.rooms:
            number += 1
        live = self._landings.get((site, number))
        if live is not None and look_of(tensor) == look_of(live):
            self._land(live)
            place = live.storage_offset()
            tensor.set_(live.untyped_storage(), place, tensor.shape, tensor.stride())
        else:
            live = None
            if self.pool is not None:
                self._lend(tensor, self.pool)
        self.rooms[site, number] = storage_key(tensor)
        return live is not None

    def _site(self) -> int:
        """Return a number for the place in the hook, with all calls that led there."""
        frame: FrameType | None = sys._getframe(2)
        calls: list[tuple[str, int, int]] = []
        while frame is not None and id(frame) != self._base:
            code = frame.f_code
            if not code.co_filename.startswith(_OWN):
                calls.append((code.co_filename, code.co_firstlineno, frame.f_lasti))
            frame = frame.f_back
        return hash(tuple(calls))

    def _lend(self, tensor: torch.Tensor, pool: Pool) -> None:
        """Give a tensor memory that was used before."""
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.device.type != "cpu" or nbytes < _WORTH:
            return
        self.give_back()
        block = pool.take(nbytes, tensor.device)
        tensor.set_(block, tensor.storage_offset(), tensor.shape, tensor.stride())
        self._lent.append(block)

    def give_back(self) -> None:
        """Give back to the pool what the hook has let go of."""
        if self.pool is not None:
            self._lent = [block for block in self._lent if not self.pool.give(block)]

    @property
    def keys(self) -> set[int]:
        """The storage keys of all that was made, whether it is still alive or not."""
        return set(self._made)

    @property
    def storages(self) -> dict[int, StorageWeakRef]:
        """What is still alive, by storage key."""
        return {key: storage for key, (storage, *_) in self._made.items() if not storage.expired()}

    def alive(self, known: Collection[int | None]) -> list[str]:
        """Say what is still alive, by shape and type of its first view.

        Args:
            known: keys of storages that are not asked about.
        """
        if not self._left(known):
            return []
        gc.collect(1)  # what was left in a cycle is not held by anybody
        return self._left(known)

    def _left(self, known: Collection[int | None]) -> list[str]:
        return [
            f"shape {tuple(shape)}, {dtype}"
            for key, (storage, shape, dtype) in self._made.items()
            if key not in known and not storage.expired()
        ]


def _keys(values: Any) -> set[int | None]:
    return {storage_key(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
