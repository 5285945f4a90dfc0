"""Finds out who holds a tensor's memory, and finds the tensors that look at it.

Python counts references to objects, torch counts uses of tensors and storages. Where all of them are
accounted for, nobody else holds anything.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from weightload.frames import local_values
from weightload.storage import storage_key

__all__ = ["CAN_COUNT", "find_views", "is_held", "uses_inside"]

Tensor = torch.Tensor

_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)
CAN_COUNT = (
    _storage_uses is not None
    and _tensor_uses is not None
    and sys.version_info < (3, 14)  # later ones do not count all references
    and getattr(sys, "_is_gil_enabled", lambda: True)()
)
"""Whether torch and Python say how often an object is used."""


def _references(value: object) -> int:
    """Return how many references there are to ``value``, but for those of this call."""
    return sys.getrefcount(value) - _CALL


_CALL = 0
_probe = torch.empty(0)
_CALL = _references(_probe) - 1
_inside = _probe[:]
_COUNTED = _references(_probe) > 1
"""Whether a use of a tensor inside torch counts as a reference to its Python object."""
del _probe, _inside


_OF_PYTHON = 1000
"""Objects that a Python itself may hide when it starts; 3.12 hides 375."""


def is_held(tensor: Tensor, memory: torch.UntypedStorage | None, dead: list[object]) -> bool:
    """Whether anything holds ``memory``, other than its owner, and variables that nobody will read.

    Args:
        tensor: what was handed out. One attribute of the owner refers to it.
        memory: the storage that it had when it was handed out; likewise.
        dead: what dead variables hold.
    """
    if memory is None or _storage_uses is None or _tensor_uses is None:
        return True
    uses = _storage_uses(memory._cdata) - 1
    if _references(memory) > 2 + (_COUNTED and uses > 0):  # the owner's, and the argument
        return True
    views: dict[int, Tensor] = {}
    found: Counter[int] = Counter()
    pairs: dict[int, Any] = {}
    key = memory._cdata
    if storage_key(tensor) == key:
        views[id(tensor)] = tensor
        found[id(tensor)] = 2
    for value in dead:
        if isinstance(value, tuple):
            pairs[id(value)] = value
            found[id(value)] += 2  # in the variable, and in the list
        elif isinstance(value, Tensor) and storage_key(value) == key:
            views[id(value)] = value
            found[id(value)] += 2
    for pair in pairs:
        if _references(pairs[pair]) == found[pair] + 1:
            for value in pairs[pair]:
                if isinstance(value, Tensor) and storage_key(value) == key:
                    views[id(value)] = value
                    found[id(value)] += 1
    value = None
    if uses > len(views):
        return True
    bases = Counter(id(view._base) for view in views.values() if view._base is not None)
    for each in views:
        inside = _tensor_uses(views[each]) - 1  # held by other tensors, or by an extension
        counted = _COUNTED and inside > 0
        if inside > bases[each] or _references(views[each]) > found[each] + 1 + counted:
            return True
    return False


def uses_inside(tensor: Tensor, views: list[Any]) -> int:
    """Return how often torch or an extension holds ``tensor``, other than as the base of views."""
    if _tensor_uses is None:
        return 1
    bases = sum(isinstance(view, Tensor) and view._base is tensor for view in _unique(views))
    return max(0, _tensor_uses(tensor) - 1 - bases)


def find_views(
    keys: Collection[int], places: Callable[[], Iterable[Tensor]]
) -> tuple[list[Tensor], Collection[int]]:
    """Search the heap for tensors that look at certain memory.

    Args:
        keys: storage keys.
        places: returns tensors to look at besides.

    Returns:
        The tensors, and the ids of those that something holds which the collector does not see. A
        numpy array is such a thing: it has the address of its base, and would not follow it.
    """
    hidden = gc.get_freeze_count()  # an engine may have hidden its heap from the collector
    if hidden:
        gc.unfreeze()
    try:
        found = _unique(
            value
            for value in itertools.chain(places(), gc.get_objects())
            if issubclass(type(value), Tensor) and storage_key(value) in keys
        )
        return found, _hidden(found)
    finally:
        if hidden > _OF_PYTHON:
            gc.freeze()


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _hidden(found: list[Tensor]) -> Collection[int]:
    """Return the ids of the tensors with references that the collector does not see."""
    ids = {id(value) for value in found}
    seen: Counter[int] = Counter()
    end = object()  # tells the tuple of the call, which newer Pythons give as a holder too
    for holder in gc.get_referrers(*found, end) if found else ():
        if holder is not found and not (type(holder) is tuple and holder and holder[-1] is end):
            seen.update(id(value) for value in gc.get_referents(holder) if id(value) in ids)
    local = local_values(sys._getframe(1), dead=False)
    seen.update(2 * [id(value) for value in local if id(value) in ids])  # here and in that list
    holder = None
    hidden = set()
    for index in range(len(found)):
        counted = seen[id(found[index])] + 1
        if uses_inside(found[index], found):
            hidden.add(id(found[index]))
        elif _tensor_uses is not None and _COUNTED:
            counted += _tensor_uses(found[index]) > 1
        if _references(found[index]) > counted:
            hidden.add(id(found[index]))
    return hidden
