"""Tensors outside parameters and buffers: new values into old storage, wherever they hide.

A hook that runs again rebuilds what hangs on a layer: kernel objects, quantisation configs,
closures, partials. Captured graphs and other holders know the old tensors. So the old value and
the new one are walked in step, and where both hold a tensor at the same place, the new object
gets the old tensor, whose value is to be overwritten with the new one.

No list of classes is needed: attributes, slots, dicts, lists, tuples, partials, bound methods and
closure cells are walked. The walk ends where old and new are the same object, so that what is
shared with the rest of the engine (configs, groups, modules) is never entered. An object that
manages a foreign resource (it has ``__del__``, or comes from a C extension) is opaque: it is
taken whole, as the hook made it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from weightload.storage import describe_change

__all__ = ["Reconciliation"]

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device,
    torch.Size, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


@attrs.define(repr=False)
class Reconciliation:
    """Collects what is to be copied, and what cannot be, while values are walked.

    Attributes:
        copies: pairs of old tensor and new tensor; the value of the new is to go into the old.
        moved: tensors of which the new one had to be taken, as text with the reason.
        opaque: whether an opaque object was rebuilt. It may know the address of a tensor that the
            hook made, so what the hook made must live as long as it does.
    """

    copies: list[tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=list)
    moved: list[str] = attrs.field(factory=list)
    opaque: bool = False
    _seen: dict[tuple[int, int], tuple[Any, Any, Any]] = attrs.field(factory=dict)
    _patches: list[Callable[[], None]] = attrs.field(factory=list)

    def match(self, old: Any, new: Any, where: str) -> Any:
        """Return the value to put where ``old`` was, ``new`` being what the hook put there.

        Nothing is changed until :meth:`apply`; what is returned may be patched then.

        Args:
            old: the value before the hook ran.
            new: the value after.
            where: path for messages.
        """
        if old is new or isinstance(new, _ATOMS):
            return new
        key = (id(old), id(new))
        if key not in self._seen:
            # Both are kept, so that their ids stay theirs while the walk goes on.
            self._seen[key] = (old, new, new)
            self._seen[key] = (old, new, self._match(old, new, where))
        return self._seen[key][2]

    def apply(self) -> None:
        """Put the old tensors into the new objects. The values must have been copied."""
        for patch in self._patches:
            patch()
        self._patches.clear()

    def _match(self, old: Any, new: Any, where: str) -> Any:
        if isinstance(new, torch.Tensor):
            return self._match_tensor(old, new, where)
        if _is_opaque(new):
            self.opaque = True
            return new
        if type(old) is not type(new):
            # Nothing to compare with: every tensor inside is at a place that did not exist.
            return new
        if isinstance(new, tuple):
            return self._match_tuple(old, new, where)
        if isinstance(new, functools.partial):
            return self._match_partial(old, new, where)
        if isinstance(new, types.MethodType):
            self.match(old.__self__, new.__self__, where)
            return new
        for name, before, after, put in _slots_of(old, new):
            kept = self.match(before, after, f"{where}{name}")
            if kept is not after:
                self._patches.append(functools.partial(put, kept))
        return new

    def _match_tensor(self, old: Any, new: torch.Tensor, where: str) -> Any:
        if not isinstance(old, torch.Tensor):
            if old is not None:
                self.moved.append(f"{where}: {type(old).__name__} became a tensor")
            return new
        problem = describe_change(old, new)
        if problem is None and type(old) is not type(new) and _has_inner(new):
            problem = f"type {type(old).__name__} became {type(new).__name__}"
        if problem is not None:
            self.moved.append(f"{where}: {problem}")
            return new
        self.copies.append((old, new))
        return old

    def _match_tuple(self, old: tuple[Any, ...], new: tuple[Any, ...], where: str) -> Any:
        if len(old) != len(new):
            self.moved.append(f"{where}: {len(old)} items became {len(new)}")
            return new
        items = [
            self.match(before, after, f"{where}[{index}]")
            for index, (before, after) in enumerate(zip(old, new, strict=True))
        ]
        if all(kept is after for kept, after in zip(items, new, strict=True)):
            return new
        return type(new)._make(items) if hasattr(new, "_make") else type(new)(items)

    def _match_partial(
        self, old: functools.partial[Any], new: functools.partial[Any], where: str
    ) -> Any:
        function = self.match(old.func, new.func, where)
        args = self.match(old.args, new.args, f"{where}.args")
        keywords = {
            name: self.match(old.keywords.get(name), value, f"{where}.{name}")
            for name, value in new.keywords.items()
        }
        if (
            function is new.func
            and args is new.args
            and all(keywords[name] is value for name, value in new.keywords.items())
        ):
            return new
        return functools.partial(function, *args, **keywords)


_Slot = tuple[str, Any, Any, Callable[[Any], None]]


def _slots_of(old: Any, new: Any) -> Iterator[_Slot]:
    """Yield name, old value, new value and a setter for each place that both objects have."""
    if isinstance(new, dict):
        for key in new:
            if key in old:
                yield f"[{key!r}]", old[key], new[key], functools.partial(new.__setitem__, key)
    elif isinstance(new, list):
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield f"[{index}]", before, after, functools.partial(new.__setitem__, index)
    elif isinstance(new, types.FunctionType):
        yield from _cells_of(old, new)
    else:
        for name in _attribute_names(new):
            if _has(old, name) and _has(new, name):
                put = functools.partial(object.__setattr__, new, name)
                if isinstance(new, torch.nn.Module) and name in vars(new):
                    put = functools.partial(vars(new).__setitem__, name)
                yield f".{name}", getattr(old, name), getattr(new, name), put


def _cells_of(old: types.FunctionType, new: types.FunctionType) -> Iterator[_Slot]:
    if old.__code__ is not new.__code__:
        return
    names = new.__code__.co_freevars
    cells = zip(names, old.__closure__ or (), new.__closure__ or (), strict=False)
    for name, before, after in cells:
        try:
            values = before.cell_contents, after.cell_contents
        except ValueError:  # a cell that was never filled
            continue
        yield f".{name}", *values, functools.partial(setattr, after, "cell_contents")
    yield (
        ".defaults",
        old.__defaults__,
        new.__defaults__,
        functools.partial(setattr, new, "__defaults__"),
    )
    if old.__kwdefaults__ and new.__kwdefaults__:
        yield (
            ".kwdefaults",
            old.__kwdefaults__,
            new.__kwdefaults__,
            functools.partial(setattr, new, "__kwdefaults__"),
        )


def _attribute_names(value: Any) -> Iterator[str]:
    yield from tuple(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name


def _has(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _has_inner(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _is_opaque(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | set | frozenset):
        return False
    if isinstance(value, functools.partial | types.FunctionType | types.MethodType):
        return False
    cls = type(value)
    if hasattr(cls, "__del__") or isinstance(value, torch.ScriptObject):
        return True
    return not hasattr(value, "__dict__") and not any("__slots__" in vars(c) for c in cls.__mro__)
