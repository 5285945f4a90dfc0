"""Tells in milliseconds whether a model is still made of what it was made of.

A plan is good for one model as it was: its modules, tensors, rules, and the numbers that loaders may
look at. To look at all of that anew in each session costs more than to copy a small model. So what was
found is remembered, weakly: nothing here keeps a module or a tensor alive that the model lets go.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import attrs
import torch
from torch import nn

from weightload.entries import join
from weightload.ownership import Guards, Mark, mark_of
from weightload.record import SECTIONS, record_of
from weightload.registry import ModuleRegistry
from weightload.settings import Settings
from weightload.storage import inner_tensors, storage_key

if TYPE_CHECKING:
    from weightload.session import WeightLoadSession

__all__ = ["Body", "Skeleton"]

_PARTS = ("_modules", *SECTIONS)
_Weak = Callable[[], Any]
_Tensor = torch.Tensor


def _nothing() -> None:
    """Stand for a weak reference to a place that is empty."""


@attrs.frozen(eq=False, repr=False)
class _Part:
    """One table of every module: its modules, parameters or buffers.

    Attributes:
        table: name of the attribute.
        counts: entries of each module's table.
        filled: positions of the modules whose table is not empty.
        keys: names, those of all modules one after the other.
        values: what was there, weakly.
        present: how many of these are no empty places.
    """

    table: str
    counts: list[int]
    filled: list[int]
    keys: list[str]
    values: list[_Weak]
    present: int

    @classmethod
    def of(cls, table: str, dicts: list[dict[str, Any]]) -> _Part:
        tables = [mine[table] for mine in dicts]
        values = [*chain.from_iterable(map(dict.values, tables))]
        return cls(
            table=table,
            counts=[*map(len, tables)],
            filled=[at for at, one in enumerate(tables) if one],
            keys=[*chain.from_iterable(tables)],
            values=[_nothing if value is None else ref(value) for value in values],
            present=sum(value is not None for value in values),
        )

    def now(self, dicts: list[dict[str, Any]], before: list[Any] | None = None) -> list[Any] | None:
        """Return what is there now if it is the same, without empty places; else ``None``.

        Args:
            dicts: the attributes of all modules.
            before: what was returned before, at the least, if somebody has held it since.
        """
        tables = [*map(itemgetter(self.table), dicts)]
        if [*map(len, tables)] != self.counts:
            return None
        tables = [*map(tables.__getitem__, self.filled)]
        if [*chain.from_iterable(tables)] != self.keys:
            return None
        found = [*chain.from_iterable(map(dict.values, tables))]
        present = [value for value in found if value is not None]
        if before is None:
            same = all(map(is_, found, map(operator.call, self.values)))
        else:
            same = all(map(is_, present, before))
        return present if same and len(present) == self.present else None


@attrs.frozen
class _Forms:
    """Shapes, strides, types and devices of tensors."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    strides: list[tuple[int, ...]] | None
    devices: list[torch.device] | None

    @classmethod
    def of(cls, tensors: list[torch.Tensor], like: _Forms | None = None) -> _Forms:
        """Look at tensors.

        Strides are left out if all are contiguous, and devices if all are on the CPU.

        Args:
            tensors: what to look at.
            like: what was found before; whatever is compared with it differs if they do.
        """
        with torch._C.DisableTorchFunctionSubclass():  # some parameters intercept everything
            dense = like is None or like.strides is None
            dense = dense and all(map(_Tensor.is_contiguous, tensors))
            host = like is None or like.devices is None
            host = host and all(map(attrgetter("is_cpu"), tensors))
            return cls(
                [*map(_Tensor.size, tensors)],
                [*map(attrgetter("dtype"), tensors)],
                None if dense else [*map(_Tensor.stride, tensors)],
                None if host else [*map(attrgetter("device"), tensors)],
            )


_FACTS = ("address", "shape")


def _facts_of(
    tensors: list[torch.Tensor], shapes: list[torch.Size] | None = None
) -> tuple[list[Any], ...]:
    """Return for each of :data:`_FACTS` what is true of tensors now; their shapes may be known."""
    with torch._C.DisableTorchFunctionSubclass():
        addresses = [*map(_Tensor.data_ptr, tensors)]
        return addresses, [*map(_Tensor.size, tensors)] if shapes is None else shapes


class Body:
    """What a model consists of while a session lasts; the strong half of a skeleton.

    Args:
        skeleton: what it was compared with.
        modules: in the order of the skeleton.
        dicts: their attributes.
        tensors: parameters and buffers, in the order of the skeleton.

    Attributes:
        skeleton: as given.
        modules: every module by its qualified name.
        tensors: as given.
        addresses: where the first element of each tensor is, once :meth:`hold` has noted it.
        live: where their storages begin, likewise.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        modules: list[nn.Module],
        dicts: list[dict[str, Any]],
        tensors: list[torch.Tensor],
    ) -> None:
        self.skeleton = skeleton
        self.modules = dict(zip(skeleton.names, modules, strict=True))
        self.tensors = tensors
        self.addresses: list[int] = []
        self.live: frozenset[int] = frozenset()
        self._dicts = dicts
        self._storages: list[torch.UntypedStorage] = []
        self._facts: tuple[list[Any], ...] = ()

    def guard(self, session: WeightLoadSession) -> bool:
        """Let no module compute while a session is open; return whether that was possible at once."""
        return self.skeleton.guards.put(session, self._dicts)

    def let_compute(self) -> None:
        """End that."""
        self.skeleton.guards.take(self._dicts)

    def hold(self) -> None:
        """Note where the tensors are, for :meth:`changes`; for a plain skeleton only."""
        # That storages are held keeps their addresses from being used for others, so that it is
        # enough to compare addresses at the end, and safe to write to them.
        with torch._C.DisableTorchFunctionSubclass():
            self._storages = [*map(_Tensor.untyped_storage, self.tensors)]
        # Those without elements have no memory that a source could lie in.
        self.live = frozenset(map(torch.UntypedStorage.data_ptr, self._storages)) - {0}
        self._facts = _facts_of(self.tensors, self.skeleton.forms.shapes)
        self.addresses = self._facts[0]

    def changes(self) -> list[str]:
        """Name what is not what it was at :meth:`hold`; only parameters and buffers are looked at."""
        now = self.skeleton.tensors_now(self._dicts, self.tensors)
        problems = self._replaced() if now is None else []
        facts = _facts_of(self.tensors)
        if problems or facts == self._facts:
            return problems
        for what, before, after in zip(_FACTS, self._facts, facts, strict=True):
            for name, one, two in zip(self.skeleton.tensor_names, before, after, strict=True):
                if one != two:
                    problems.append(f"{name}: its {what} was {one} and is {two}")
        return problems

    def _replaced(self) -> list[str]:
        """Name the places that hold another tensor, none, or one that was not there."""
        before = dict(zip(self.skeleton.tensor_names, self.tensors, strict=True))
        now = {
            join(path, key): tensor
            for path, mine in zip(self.modules, self._dicts, strict=True)
            for section in SECTIONS
            for key, tensor in mine[section].items()
            if tensor is not None
        }
        gone = [f"{name}: it is gone" for name in before if name not in now]
        added = [f"{name}: it was not there" for name in now if name not in before]
        other = [
            f"{name}: it is another tensor"
            for name, tensor in before.items()
            if name in now and now[name] is not tensor
        ]
        return other + gone + added


@attrs.frozen(eq=False, repr=False)
class Skeleton:
    """What a model was made of.

    Attributes:
        names: qualified names of the modules.
        tensor_names: those of parameters and buffers that are there.
        places: at which position in them each name of a tensor is.
        plain: whether all of them have data in a storage of their own.
        marks: what is known about the modules, in their order.
        guards: keep them from computing.
        forms: those of parameters and buffers, if it is plain.
    """

    names: list[str]
    tensor_names: list[str]
    places: dict[str, int]
    plain: bool
    marks: list[Mark]
    guards: Guards
    _modules: list[_Weak]
    _types: list[type]
    _parts: list[_Part]
    _settings: Settings
    _registry: ModuleRegistry
    _rules: int
    _strategies: list[list[type]]
    forms: _Forms

    @classmethod
    def of(
        cls, modules: Mapping[str, nn.Module], registry: ModuleRegistry, filled: Iterable[str]
    ) -> Skeleton:
        """Remember a model.

        Args:
            modules: every module by its qualified name.
            registry: what decides which hooks they have.
            filled: qualified names of the tensors that loads fill.
        """
        others: dict[str, set[str]] = {name: set() for name in modules}
        for name in filled:
            path, _, key = name.rpartition(".")
            others.setdefault(path, set()).add(key)
        names = {id(module): name for name, module in modules.items()}
        for owner, keys in _changed_by_hooks(modules.values()):
            if id(owner) in names:
                others[names[id(owner)]] |= keys
        dicts = [vars(module) for module in modules.values()]
        tensors = {
            join(path, key): tensor
            for section in SECTIONS
            for path, mine in zip(modules, dicts, strict=True)
            for key, tensor in mine[section].items()
            if tensor is not None
        }
        plain = not any(
            tensor.is_meta or inner_tensors(tensor) or storage_key(tensor) is None
            for tensor in tensors.values()
        )
        return cls(
            names=[*modules],
            tensor_names=[*tensors],
            places={name: at for at, name in enumerate(tensors)},
            plain=plain,
            marks=[*map(mark_of, modules.values())],
            guards=Guards(modules.values()),
            modules=[ref(module) for module in modules.values()],
            types=[*map(type, modules.values())],
            parts=[_Part.of(table, dicts) for table in _PARTS],
            settings=Settings.of(dicts, [others[name] for name in modules]),
            registry=registry,
            rules=registry.revision,
            strategies=_strategies(dicts, registry),
            forms=_Forms.of([*tensors.values()] if plain else []),
        )

    @property
    def on_host(self) -> bool:
        """Whether all parameters and buffers are on the CPU."""
        return self.plain and self.forms.devices is None

    def body(self, model: nn.Module) -> Body | None:
        """Return what ``model`` consists of, ``None`` if it is not what was remembered."""
        modules = [*map(operator.call, self._modules)]
        if modules[0] is not model or [*map(type, modules)] != self._types:
            return None  # a module that has gone is one of these types no longer
        dicts: list[Any] = [*map(attrgetter("__dict__"), modules)]
        if self._parts[0].now(dicts) is None or not self._settings.hold(dicts):
            return None
        if self._rules != self._registry.revision:
            return None
        if _strategies(dicts, self._registry) != self._strategies:
            return None
        tensors = self.tensors_now(dicts)
        if tensors is None or (self.plain and _Forms.of(tensors, self.forms) != self.forms):
            return None
        return Body(self, modules, dicts, tensors)

    def tensors_now(
        self, dicts: list[dict[str, Any]], before: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor] | None:
        """Return parameters and buffers if they are the same objects, else ``None``.

        Args:
            dicts: the attributes of all modules.
            before: what they were, if somebody has held them since.
        """
        found: list[torch.Tensor] = []
        for part in self._parts[1:]:
            tensors = part.now(dicts, None if before is None else before[len(found) :])
            if tensors is None:
                return None
            found += tensors
        return found


def _changed_by_hooks(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, set[str]]]:
    """Yield what hooks change, with the names of its attributes and buffers that they change."""
    for module in modules:
        record = record_of(module)
        for change in (one for step in record.steps.values() for one in step) if record else ():
            keys = {*change.attributes, *change.contents}
            yield change.owner, keys.union(*change.entries.values())


def _strategies(dicts: list[dict[str, Any]], registry: ModuleRegistry) -> list[list[type]]:
    """Return the types of the strategy objects of all modules; rules go by them.

    Strategy objects that are modules are compared with all other modules.
    """
    return [
        [*map(type, map(dict.get, dicts, repeat(attribute)))] for attribute in registry.strategies
    ]
