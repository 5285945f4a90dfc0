"""Everything that hangs on a model, by identity: to show that something left no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn

from weightload.digest import digest

__all__ = ["Inventory"]

_DEPTH = 4
"""How far objects that are no modules are looked into."""


@attrs.frozen(repr=False)
class Inventory:
    """What every attribute of every module, of what modules hold, and of every tensor is.

    Two inventories of one model are equal if each attribute is the same object, each container
    holds the same objects, and each tensor has the same bits at the same address.

    Attributes:
        facts: by path, what is there: object identities, places and bits.
        holds: everything that was looked at, so that no identity is used again.
    """

    facts: dict[str, Any]
    holds: list[Any]

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        """Look at ``model``."""
        facts: dict[str, Any] = {}
        holds: list[Any] = []
        seen: set[int] = set()
        for name, module in model.named_modules(remove_duplicate=False):
            facts[f"{name}()"] = id(module)
            for path, fact, value in _walk(module, name, seen, _DEPTH):
                facts[path] = fact
                holds.append(value)
        return cls(facts, holds)

    def differences(self, later: Inventory) -> list[str]:
        """Return the paths at which ``later`` has something else."""
        return [
            path
            for path in sorted(self.facts.keys() | later.facts.keys())
            if self.facts.get(path) != later.facts.get(path)
        ]


def _walk(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any, Any]]:
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    inner: dict[Any, Any] = {}
    if isinstance(value, torch.Tensor):
        yield f"{path} data", _place(value), value
    if isinstance(value, dict):
        inner = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        inner = {f"[{number}]": item for number, item in enumerate(value)}
    elif isinstance(value, set | frozenset):
        yield f"{path} items", sorted(map(id, value)), value
    elif callable(value) and hasattr(value, "__closure__"):
        for number, cell in enumerate(value.__closure__ or ()):
            inner[f".cell{number}"] = getattr(cell, "cell_contents", None)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        inner = {f".{name}": item for name, item in vars(value).items()}
    yield f"{path} names", list(inner) if not isinstance(value, nn.Module) else sorted(inner), value
    for name, item in inner.items():
        plain = isinstance(item, int | float | str | bytes | bool | type(None))
        yield f"{path}{name}", (type(item).__name__, repr(item) if plain else id(item)), item
        if not plain and not isinstance(item, nn.Module):
            yield from _walk(item, f"{path}{name}", seen, depth - 1)


def _place(tensor: torch.Tensor) -> Any:
    if hasattr(type(tensor), "__tensor_flatten__") or tensor.layout is not torch.strided:
        return tuple(tensor.shape), tensor.dtype
    storage = tensor.untyped_storage()
    form = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
    if tensor.is_meta:
        return storage._cdata, form
    bits = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return storage._cdata, storage.data_ptr(), storage.nbytes(), form, digest(bits)
