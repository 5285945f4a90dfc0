"""Watches a model being constructed: which tensors are filled with one number, and which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weightload.storage import storage_key

__all__ = ["ConstructedValues"]

_FIXED = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "zero_": 0,
    "ones": 1, "ones_like": 1, "new_ones": 1,
}  # fmt: skip
_GIVEN = {"full": 1, "full_like": 1, "fill_": 1, "new_full": 2}


class ConstructedValues:
    """The numbers that whole storages were filled with; works on the meta device too.

    Attributes:
        values: the number by storage key. A key stays valid as long as this object lives; it
            keeps no memory alive.
    """

    def __init__(self) -> None:
        self.values: dict[int, float | int] = {}
        self._weak: dict[int, StorageWeakRef] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is constructed inside this block."""
        with _Fills(self), _Scalars(self):
            yield

    def note(self, tensor: torch.Tensor, value: float | int | None) -> None:
        """Note that ``tensor`` was filled with ``value``, or with something else if ``None``."""
        key = storage_key(tensor)
        if key is None:
            return
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        if value is None or not whole:
            self.values.pop(key, None)
            return
        self.values[key] = value
        # The weak reference keeps the key from being used for another storage.
        self._weak[key] = StorageWeakRef(tensor.untyped_storage())


class _Fills(TorchDispatchMode):
    def __init__(self, found: ConstructedValues) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor):
            return result
        name = func._schema.name.rpartition(":")[2]
        value: Any = _FIXED.get(name)
        if name in _GIVEN:
            value = args[_GIVEN[name]]
        if isinstance(value, int | float):
            self._found.note(result, value)
        elif name.endswith("_") and not name.startswith("_"):
            self._found.note(result, None)
        return result


class _Scalars(TorchFunctionMode):
    """Sees tensors that are made from one number, whose value the meta device loses."""

    def __init__(self, found: ConstructedValues) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.tensor and args and isinstance(args[0], int | float):
            self._found.note(result, args[0])
        return result
