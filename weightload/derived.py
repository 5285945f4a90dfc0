"""Tensors outside parameters and buffers: new values into old storage, wherever they hide.

A hook that runs again rebuilds what hangs on a layer: kernel objects, quantisation configs,
closures, partials, wrappers around tensors. Captured graphs and other holders know the old
tensors. So the old value and the new one are walked in step, and where both hold a tensor at the
same place, the new object gets the old tensor, whose value is to be overwritten with the new one.

No list of classes is needed: attributes, slots, dicts, lists, tuples, partials, bound methods,
closure cells, the inner tensors of tensor subclasses and the attributes of tensors are walked.
The walk ends where old and new are the same object, so that what is shared with the rest of the
engine (configs, groups, modules) is never entered. An object that manages a foreign resource (it
has ``__del__``, or comes from a C extension) is opaque: it is taken whole, as the hook made it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.pairs import Pairs
from weightload.places import Place, is_atom, is_opaque, places_of, tensors_in
from weightload.record import MISSING
from weightload.storage import describe_change, inner_tensors, storage_key

__all__ = ["Reconciliation"]

Tensor = torch.Tensor


@attrs.frozen(eq=False, repr=False)
class _Matched:
    """An old tensor, the new one, what is put in its place, and why its storage was not kept."""

    old: Tensor
    new: Tensor
    value: Tensor
    problem: str | None


@attrs.define(repr=False)
class Reconciliation:
    """Collects what is to be copied, and what cannot be, while values are walked.

    Attributes:
        dressed: by id of a tensor that the hook found, the attributes that it had then.
        pairs: the live tensors and their new values.
        opaque_paths: where an opaque object was rebuilt. It may know the address of a tensor that
            the hook made, so what the hook made must live as long as it does.
        conflicts: tensors that were to keep their value and would not, as text.
        alike: whether everything but the values of tensors is what it was, though maybe made anew.
    """

    dressed: Mapping[int, Mapping[str, Any]] = attrs.field(factory=dict)
    pairs: Pairs = attrs.field(factory=Pairs)
    opaque_paths: list[str] = attrs.field(factory=list)
    conflicts: list[str] = attrs.field(factory=list)
    alike: bool = True
    _moved: dict[str, str] = attrs.field(factory=dict)
    _lost: list[tuple[str, Tensor, str]] = attrs.field(factory=list)
    _gained: list[tuple[str, Tensor, str]] = attrs.field(factory=list)
    _seen: dict[tuple[int, int], tuple[Any, Any, Any]] = attrs.field(factory=dict)
    _tensors: dict[tuple[int, int], _Matched] = attrs.field(factory=dict)
    _patches: list[Callable[[], None]] = attrs.field(factory=list)

    @property
    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of old tensor and new tensor; the value of the new is to go into the old."""
        return self.pairs.copies

    @property
    def renews(self) -> bool:
        """Whether no tensor with elements is another one, and nothing has to be put anywhere."""
        made = [found.new for found in self._tensors.values() if found.new is not found.old]
        found = self._moved or self._lost or self._gained or self._patches or self.conflicts
        return not found and not any(tensor.numel() for tensor in made)

    @property
    def patches(self) -> int:
        """How many things are going to be put into new objects."""
        return len(self._patches)

    @property
    def opaque(self) -> bool:
        """Whether an opaque object was rebuilt."""
        return bool(self.opaque_paths)

    @property
    def moved(self) -> list[str]:
        """Tensors of which the new one had to be taken, that are gone or new, with the reason.

        What only is at another place than before is not among them.
        """
        fits = [found for found in self._tensors.values() if found.problem is None]
        kept = {id(found.old) for found in fits}
        kept |= {id(one) for _, one, _ in self._lost} & {id(one) for _, one, _ in self._gained}
        replaced = {id(found.new) for found in fits}
        texts = dict(self._moved)
        for path, tensor, reason in self._lost:
            if id(tensor) not in kept:
                texts.setdefault(path, reason)
        for path, tensor, reason in self._gained:
            if id(tensor) not in kept | replaced:
                texts.setdefault(path, reason)
        return [f"{path}: {reason}" for path, reason in texts.items()]

    @property
    def found_keys(self) -> set[int | None]:
        """Keys of the storages of every new tensor that was found."""
        gained = [tensor for _, tensor, _ in self._gained]
        queue = [*(found.new for found in self._tensors.values()), *gained]
        for tensor in queue:
            queue += inner_tensors(tensor).values()
        return {storage_key(tensor) for tensor in queue}

    def match(self, old: Any, new: Any, where: str) -> Any:
        """Return the value to put where ``old`` was, ``new`` being what the hook put there.

        Nothing is changed until :meth:`apply`; what is returned may be patched then.

        Args:
            old: the value before the hook ran, ``MISSING`` if there was none.
            new: the value after, ``MISSING`` if there is none.
            where: path for messages.
        """
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            value, problem = self.match_tensor(old, new, where)
            if problem is not None:
                self._moved[where] = problem
            return value
        if old is new:
            return new
        if is_atom(old) and is_atom(new):
            self.alike = self.alike and type(old) is type(new) and _equal(old, new)
            return new
        key = (id(old), id(new))
        if key not in self._seen:
            # Both are kept, so that their ids stay theirs while the walk goes on.
            self._seen[key] = (old, new, new)
            self._seen[key] = (old, new, self._match(old, new, where))
        return self._seen[key][2]

    def match_tensor(self, old: Tensor, new: Tensor, where: str) -> tuple[Tensor, str | None]:
        """Return the tensor to put where ``old`` was, and why it is not in the old storage.

        The attributes of tensors are walked as those of other objects are.
        """
        key = (id(old), id(new))
        if key not in self._tensors:
            value, problem = self._pair(old, new, where)
            self._tensors[key] = _Matched(old, new, value, problem)
            if old is not new:
                self._match_attributes(old, new, value, where)
        found = self._tensors[key]
        return found.value, found.problem

    def later(self, patch: Callable[[], None]) -> None:
        """Let ``patch`` put an old tensor into a new object when the values have been copied."""
        self._patches.append(patch)

    def apply(self) -> None:
        """Put the old tensors into the new objects. The values must have been copied."""
        for patch in self._patches:
            patch()
        self._patches.clear()

    # ------------------------------------------------------------------ tensors

    def _pair(self, old: Tensor, new: Tensor, where: str) -> tuple[Tensor, str | None]:
        if old is new:
            problem = self.pairs.hold(old, where)
            if problem is not None:
                self.conflicts.append(f"{where}: {problem}")
            return old, None
        if not _wraps(old) and not _wraps(new):
            problem = self.pairs.add(old, new, where)
            return (old if problem is None else new), problem
        problem = describe_change(old, new)
        if problem is None and not _same_kind(old, new):
            problem = f"type {type(old).__name__} became {type(new).__name__}"
        before, after = inner_tensors(old), inner_tensors(new)
        if problem is None and before.keys() != after.keys():
            problem = f"inner tensors {sorted(before)} became {sorted(after)}"
        if problem is not None:
            return new, problem
        mark, patches = self.pairs.mark(), len(self._patches)
        inner: dict[str, Tensor] = {}
        for name, part in after.items():
            inner[name], problem = self._pair(before[name], part, f"{where}.{name}")
            if problem is not None:
                self.pairs.back_to(mark)
                del self._patches[patches:]
                return new, f"inner tensor {name!r}: {problem}"
        same = all(inner[name] is before[name] for name in inner)
        return self._wrapper(old, new, inner, same=same), None

    def _wrapper(self, old: Any, new: Any, inner: dict[str, Tensor], *, same: bool) -> Tensor:
        """Return a wrapper like ``new`` around the inner tensors; the old one if it is like that.

        Args:
            old: the wrapper before.
            new: the wrapper that the hook made.
            inner: what it is to hold.
            same: whether that is what ``old`` holds.
        """
        if not hasattr(type(new), "__tensor_flatten__"):
            for name, part in inner.items():
                self._patches.append(functools.partial(vars(new).__setitem__, name, part))
            value: Tensor = new
            return value
        context = new.__tensor_flatten__()[1]
        if same and _equal(old.__tensor_flatten__()[1], context):
            value = old
            return value
        value = type(new).__tensor_unflatten__(inner, context, new.shape, new.stride())
        return nn.Parameter(value, new.requires_grad) if isinstance(new, nn.Parameter) else value

    def _match_attributes(self, old: Tensor, new: Tensor, value: Tensor, where: str) -> None:
        """Give ``value`` the attributes that the hook gave ``new``."""
        found = self.dressed.get(id(new), {})
        before, inner = vars(old), inner_tensors(new)
        for name, after in vars(new).items():
            if name in inner or (name in found and found[name] is after):
                continue
            kept = self.match(before.get(name, MISSING), after, f"{where}.{name}")
            if vars(value).get(name, MISSING) is not kept:
                self._patches.append(functools.partial(vars(value).__setitem__, name, kept))

    # ------------------------------------------------------------------ other objects

    def _match(self, old: Any, new: Any, where: str) -> Any:
        if old is MISSING:
            return self._differ(old, new, where, "it was not there before")
        if new is MISSING:
            return self._differ(old, new, where, "it is gone")
        if is_opaque(old) and is_opaque(new):
            self.opaque_paths.append(where)
            return new
        if not _same_kind(old, new):
            return self._differ(old, new, where, f"{_kind(old)} became {_kind(new)}")
        if isinstance(new, types.FunctionType) and old.__code__ is not new.__code__:
            return self._differ(old, new, where, f"{_kind(old)} became another function")
        if isinstance(new, set | frozenset):
            shared = {id(item) for item in old} & {id(item) for item in new}
            gone, added = (
                [item for item in items if id(item) not in shared] for items in (old, new)
            )
            if gone or added:
                self._differ(gone, added, where, "nothing says which item of a set it was")
            return new
        before, after = places_of(old), places_of(new)
        kept = {}
        for key, place in after.items():
            other = before.pop(key, None)
            value = other.value if other is not None else MISSING
            kept[key] = self.match(value, place.value, where + place.name)
        for place in before.values():
            self.match(place.value, MISSING, where + place.name)
        changed = {key for key, place in after.items() if kept[key] is not place.value}
        if any(after[key].put is None for key in changed):
            return _rebuilt(new, list(kept.values()))
        for key in changed:
            self._patches.append(functools.partial(_put(after[key]), kept[key]))
        return new

    def _differ(self, old: Any, new: Any, where: str, reason: str) -> Any:
        """Note every tensor that is lost or gained where old and new cannot be compared."""
        self.alike = False
        for path, tensor in tensors_in(old, where):
            if isinstance(tensor, Tensor):
                self._lost.append((path, tensor, reason))
        for path, tensor in tensors_in(new, where):
            if isinstance(tensor, Tensor):
                self._gained.append((path, tensor, reason))
            else:
                self.opaque_paths.append(path)
        return new


def _put(place: Place) -> Callable[[Any], None]:
    if place.put is None:
        raise TypeError(f"nothing can be put at {place.name}")
    return place.put


def _rebuilt(new: Any, items: list[Any]) -> Any:
    """Return an object like ``new``, which cannot be changed, with other items."""
    if isinstance(new, types.MethodType):
        return types.MethodType(new.__func__, items[0])
    if isinstance(new, tuple):
        items = items[: len(new)]
        return type(new)._make(items) if hasattr(new, "_make") else type(new)(items)
    return getattr(items[0], new.__name__)


def _wraps(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a wrapper subclass: its data is in tensors that it holds."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return True
    return tensor.layout is torch.strided and bool(inner_tensors(tensor))


def _same_kind(old: Any, new: Any) -> bool:
    """Whether both are of one class, or of classes that one class statement made."""
    one, two = type(old), type(new)
    if isinstance(old, Tensor) != isinstance(new, Tensor):
        return False
    return one is two or (one.__module__, one.__qualname__) == (two.__module__, two.__qualname__)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    return "None" if value is None else type(value).__name__


def _equal(one: Any, two: Any) -> bool:
    """Whether two contexts of a tensor subclass are equal; what cannot be compared is not."""
    try:
        return bool(one == two)
    except (RuntimeError, TypeError, ValueError):
        return False
