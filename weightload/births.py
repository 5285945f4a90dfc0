"""Knows which tensors a hook made, so that none is missed that lives on where nothing tracks it.

What a hook puts on its module, on a strategy object or into anything that these hold is found by
walking them. A table that belongs to a Python module, or an object that was there before and is
not tracked, is not walked; but a tensor that was made while the hook ran and that is still alive
afterwards must be somewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightload.storage import storage_key

__all__ = ["Births"]

_FIRST_SEEN = ("aten::lift_fresh", "aten::lift_fresh_copy")
"""Operations whose argument nobody has seen before: what ``torch.tensor`` made of numbers."""


class Births(TorchDispatchMode):
    """Notes the storage of every tensor that operations make while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and look at what it returns."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = () if func._schema.name in _FIRST_SEEN else _keys((args, kwargs))
        for tensor in tree_leaves(result):
            key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
            if key is not None and key not in known and tensor.numel():
                # The weak reference keeps the key from being used again.
                text = f"shape {tuple(tensor.shape)}, {tensor.dtype}"
                self._made[key] = StorageWeakRef(tensor.untyped_storage()), text
        return result

    @property
    def keys(self) -> set[int]:
        """The storage keys of all that was made, whether it is still alive or not."""
        return set(self._made)

    @property
    def storages(self) -> dict[int, StorageWeakRef]:
        """What is still alive, by storage key."""
        return {key: storage for key, (storage, _) in self._made.items() if not storage.expired()}

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
            text
            for key, (storage, text) in self._made.items()
            if key not in known and not storage.expired()
        ]


def _keys(values: Any) -> set[int | None]:
    return {storage_key(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
