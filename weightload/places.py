"""The places inside a Python object where a tensor can be, without a list of known classes."""

from __future__ import annotations

import collections
import enum
import functools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Place", "is_atom", "is_opaque", "places_of", "tensors_in"]

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, type, range, slice, enum.Enum,
    type(Ellipsis), type(NotImplemented), re.Pattern, types.ModuleType, types.CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo,
    torch.iinfo, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
_COMMON = frozenset(map(id, _ATOMS))
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_CALLABLES = (functools.partial, types.FunctionType, types.MethodType)
_BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)

Key = tuple[str, Any]


class Place(NamedTuple):
    """One place inside an object.

    Attributes:
        name: how it is written after the object's own path, as in ``.scale`` or ``[3]``.
        value: what is there.
        put: puts something else there; ``None`` where only a new object could hold it.
    """

    name: str
    value: Any
    put: Callable[[Any], None] | None


def is_atom(value: Any) -> bool:
    """Whether ``value`` holds no tensor and no foreign resource."""
    if id(type(value)) in _COMMON:  # those of what is most often asked about
        return True
    if isinstance(value, _BUILTIN_METHODS):
        return isinstance(value.__self__, type(None) | types.ModuleType | type)
    return isinstance(value, _ATOMS)


def is_opaque(value: Any) -> bool:
    """Whether ``value`` manages a foreign resource, so that nobody knows what it refers to."""
    if isinstance(value, (*_CONTAINERS, *_CALLABLES, *_BUILTIN_METHODS, torch.Tensor)):
        return False
    cls = type(value)
    if is_atom(value):
        return False
    if hasattr(cls, "__del__") or isinstance(value, torch.ScriptObject):
        return True
    return not hasattr(value, "__dict__") and not any("__slots__" in vars(c) for c in cls.__mro__)


def places_of(value: Any) -> dict[Key, Place]:
    """Return every place of ``value``, without entering what is there.

    Equal keys of two objects of one kind mean the same place. Sets have none: nothing says which
    of their items took the place of which.
    """
    found: dict[Key, Place] = {}
    if isinstance(value, dict):
        for key, item in value.items():
            put = functools.partial(value.__setitem__, key)
            found["item", key] = Place(f"[{_key_text(key)}]", item, put)
    elif isinstance(value, list | collections.deque):
        for index, item in enumerate(value):
            put = functools.partial(value.__setitem__, index)
            found["item", index] = Place(f"[{index}]", item, put)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            found["item", index] = Place(f"[{index}]", item, None)
    elif isinstance(value, functools.partial):
        _partial_places(value, found)
    elif isinstance(value, types.FunctionType):
        _function_places(value, found)
    elif isinstance(value, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
        found["self", ""] = Place("", value.__self__, None)
        return found
    _attribute_places(value, found)
    return found


def _key_text(key: Any) -> str:
    plain = isinstance(key, str | int | float | bytes | tuple | frozenset | type(None))
    return repr(key) if plain else type(key).__name__


def _partial_places(value: functools.partial[Any], found: dict[Key, Place]) -> None:
    def put_function(function: Any) -> None:
        _set_partial(value, function, value.args)

    def put_arguments(arguments: Any) -> None:
        _set_partial(value, value.func, arguments)

    found["function", ""] = Place("", value.func, put_function)
    found["arguments", ""] = Place(".args", value.args, put_arguments)
    for name, item in value.keywords.items():
        put = functools.partial(value.keywords.__setitem__, name)
        found["keyword", name] = Place(f".{name}", item, put)


def _set_partial(value: Any, function: Any, arguments: Any) -> None:
    # Every holder of the partial is to see the change, so it stays the same object.
    value.__setstate__((function, arguments, value.keywords, vars(value) or None))


def _function_places(value: types.FunctionType, found: dict[Key, Place]) -> None:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            item = cell.cell_contents
        except ValueError:  # a cell that was never filled
            continue
        put = functools.partial(setattr, cell, "cell_contents")
        found["cell", name] = Place(f".{name}", item, put)
    for name in ("defaults", "kwdefaults"):
        item = getattr(value, f"__{name}__")
        if item is not None:
            put = functools.partial(setattr, value, f"__{name}__")
            found["attribute", f"__{name}__"] = Place(f".{name}", item, put)


def _attribute_places(value: Any, found: dict[Key, Place]) -> None:
    mine = getattr(value, "__dict__", None)
    if isinstance(mine, dict):
        for name, item in mine.items():
            found["attribute", name] = Place(
                f".{name}", item, functools.partial(mine.__setitem__, name)
            )
    for at, name in _slots_of(type(value)):
        cls = type(value).__mro__[at]
        slot = vars(cls)[name]
        try:
            item = slot.__get__(value)
        except AttributeError:  # a slot that was never filled
            continue
        put = functools.partial(slot.__set__, value)
        found["slot", (cls.__qualname__, name)] = Place(f".{name}", item, put)


_slots: weakref.WeakKeyDictionary[type, list[tuple[int, str]]] = weakref.WeakKeyDictionary()


def _slots_of(cls: type) -> list[tuple[int, str]]:
    """Return the slots of a class: which of its bases each is of, and its name."""
    try:
        found = _slots.get(cls)
    except TypeError:  # classes of this kind cannot be remembered
        return _find_slots(cls)
    if found is None:
        found = _slots[cls] = _find_slots(cls)
    return found


def _find_slots(cls: type) -> list[tuple[int, str]]:
    return [
        (at, name)
        for at, base in enumerate(cls.__mro__)
        if "__slots__" in vars(base)
        for name, slot in vars(base).items()
        if isinstance(slot, types.MemberDescriptorType)
    ]


def tensors_in(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield path and object for every tensor and every opaque object in ``value``.

    Modules are not entered: a reference to one leads to the whole model.
    """
    queue = [(where, value)]
    seen: dict[int, Any] = {}
    for path, item in queue:
        if id(item) in seen or is_atom(item) or isinstance(item, torch.nn.Module):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor) or is_opaque(item):
            yield path, item
        elif isinstance(item, set | frozenset):
            queue += [(f"{path}{{}}", inner) for inner in item]
        else:
            queue += [(path + place.name, place.value) for place in places_of(item).values()]
