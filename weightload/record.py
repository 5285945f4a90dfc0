"""What the first processing of a module did to it, so that it can be undone and done again.

A hook leaves things behind: kernel objects, flags, closures, replaced parameters. With them it
takes another branch the second time. Around the first run of each hook this module compares the
attributes of everything that the hook may change, and remembers for each what was there before.
A reload puts back exactly that, and nothing else: what the engine bound later is not the hook's.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.ledger import Region
from weightload.ownership import ForwardGuard
from weightload.registry import Role
from weightload.storage import TensorSpec

__all__ = [
    "CONTAINERS",
    "FLAT",
    "MISSING",
    "Change",
    "Contents",
    "ModuleRecord",
    "ObjectState",
    "Slot",
    "StagedSlot",
    "held_in",
    "read_by",
    "record_of",
    "remove_record",
]

_ATTRIBUTE = "_weightload_record"
SECTIONS = ("_parameters", "_buffers")


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()
"""Marks an attribute that was not there."""

Slot = tuple[nn.Module, str, str]
"""A place for a tensor: the module, ``"_parameters"`` or ``"_buffers"``, and the name."""


CONTAINERS = (dict, list, set, collections.deque)
"""What holds items that can be changed; so do subclasses."""
FLAT = (dict, list, set)
"""Those that the state of an object includes if they are its attributes, and of no subclass."""
ITEMS = "items"


@attrs.define(eq=False, repr=False, slots=False, weakref_slot=False)
class Contents:
    """Stands for a container as an owner of what it holds, where no object's state includes it.

    There is one for each container, while anybody keeps it, so that those who share a container
    find that they do.

    Attributes:
        items: the container, of any subclass, or inside another one.
        where: where it was found first, for messages.
        numbers: the keys that are others now than when a hook was recorded, because torch counts
            them.
    """

    items: Any
    where: str
    numbers: dict[Any, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, items: Any, where: str) -> Contents:
        """Return what stands for a container."""
        found = _contents.get(id(items))
        if found is None:
            found = _contents[id(items)] = cls(items, where)
        return found

    def renumber(self, numbers: Mapping[Any, Any]) -> None:
        """Note that keys have become others."""
        known = {now: recorded for recorded, now in self.numbers.items()}
        for before, now in numbers.items():
            self.numbers[known.get(before, before)] = now


def held_in(owner: Any) -> Any:
    """Return the object that an owner is, or stands for."""
    return owner.items if type(owner) is Contents else owner


_contents: weakref.WeakValueDictionary[int, Contents] = weakref.WeakValueDictionary()


@attrs.frozen(kw_only=True, repr=False)
class ObjectState:
    """The attributes of one object at one moment; plain containers with their contents.

    A container of another type, or one inside a container, has a state of its own as
    :class:`Contents`.
    """

    owner: Any
    values: dict[str, Any]
    contents: dict[str, Any]
    kind: type

    @classmethod
    def of(cls, owner: Any) -> ObjectState:
        """Look at ``owner``."""
        values = {
            name: value for name, value in vars(owner).items() if not _is_sessions(name, value)
        }
        contents = {name: value.copy() for name, value in values.items() if type(value) in FLAT}
        if type(owner) is Contents:
            contents[ITEMS] = copy_items(owner.items)
        return cls(owner=owner, values=values, contents=contents, kind=type(owner))

    def restore(self) -> None:
        """Put the class and every attribute back as they were."""
        if type(self.owner) is not self.kind:
            self.owner.__class__ = self.kind
        mine = vars(self.owner)
        for name, value in list(mine.items()):
            if name not in self.values and not _is_sessions(name, value):
                del mine[name]
        for name, value in self.values.items():
            if not _is_sessions(name, mine.get(name)):
                mine[name] = value
        for name, content in self.contents.items():
            refill(self.values[name], content)

    def restore_one(self, name: str) -> None:
        """Put one attribute back as it was."""
        vars(self.owner)[name] = self.values[name]
        if name in self.contents:
            self.restore_content(name)

    def restore_content(self, name: str) -> None:
        """Let a container hold what it held, in the order of then."""
        refill(self.values[name], self.contents[name])

    def holds_but_for(self, names: Collection[str]) -> bool:
        """Whether everything is what it was, but for some attributes and for tensors in slots.

        Args:
            names: the attributes, which must be of the kind that they were.
        """
        mine = vars(self.owner)
        if type(self.owner) is not self.kind:
            return False
        for name, value in mine.items():
            before = self.values.get(name, MISSING)
            if value is before or _is_sessions(name, value):
                continue
            if name not in names or not _of_one_kind(before, value):
                return False
        if not self.values.keys() <= mine.keys():
            return False
        return all(
            before.keys() == mine[name].keys()
            if name in SECTIONS
            else _same_content(before, mine[name])
            for name, before in self.contents.items()
        )

    def differences(self, later: ObjectState) -> Change | None:
        """Return what changed until ``later``, or ``None``."""
        change = Change(owner=self.owner)
        if later.kind is not self.kind:
            change.kind = self.kind
        for name in self.values.keys() | later.values.keys():
            before = self.values.get(name, MISSING)
            if before is not later.values.get(name, MISSING):
                change.attributes[name] = before
            elif name in self.contents:
                _compare_contents(change, name, self.contents[name], later.contents[name])
        return None if change.empty else change


@attrs.frozen(eq=False, repr=False)
class Renewal:
    """What a hook is known to leave, if that is nothing that has to be copied.

    Attributes:
        names: for each object of its unit, the attributes that it makes anew.
        moves: what cannot keep its storage, as text with the reason: opaque objects.
    """

    names: list[frozenset[str]]
    moves: list[str]


def _is_sessions(name: str, value: Any) -> bool:
    """Whether an attribute is a session's own, and no state of the object."""
    return name == _ATTRIBUTE or type(value) is ForwardGuard


def copy_items(container: Any) -> Any:
    """Return a plain dict, list or set of what a container holds."""
    if isinstance(container, dict):
        # What a subclass makes of its items when it is asked for them is its own affair.
        kind = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
        return dict(kind.items(container))
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, content: Any) -> None:
    """Let a container hold ``content``, and nothing else, past the methods of a subclass."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    elif isinstance(container, collections.deque):
        collections.deque.clear(container)
        collections.deque.extend(container, content)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    elif isinstance(container, collections.OrderedDict):
        collections.OrderedDict.clear(container)
        for key, value in content.items():
            collections.OrderedDict.__setitem__(container, key, value)
    else:
        dict.clear(container)
        dict.update(container, content)


def _same_content(before: Any, after: Any) -> bool:
    if isinstance(before, set):
        return bool(before == after)
    if len(before) != len(after):
        return False
    if isinstance(before, dict):
        return all(after.get(name, MISSING) is value for name, value in before.items())
    return all(one is two for one, two in zip(before, after, strict=True))


def _of_one_kind(one: Any, two: Any) -> bool:
    """Whether two objects are of one type; functions, of one piece of code."""
    return type(one) is type(two) and getattr(one, "__code__", 0) is getattr(two, "__code__", 0)


def _compare_contents(change: Change, name: str, before: Any, after: Any) -> None:
    if not isinstance(before, dict):
        if len(before) != len(after) or (
            before != after
            if isinstance(before, set)
            else any(one is not two for one, two in zip(before, after, strict=True))
        ):
            change.contents[name] = before
        return
    for key in before.keys() | after.keys():
        value = before.get(key, MISSING)
        if value is not after.get(key, MISSING):
            change.entries.setdefault(name, {})[key] = value


@attrs.frozen(eq=False, repr=False)
class Overwritten:
    """Stands for a tensor that is no parameter or buffer and that a hook wrote to in place.

    Attributes:
        value: what it held before. Each undo makes a copy, for the hook to write to again.
    """

    value: torch.Tensor


@attrs.frozen(eq=False, repr=False)
class Alias:
    """Stands for a value that was, before the hook ran, the very tensor of a slot."""

    slot: Slot

    @property
    def now(self) -> Any:
        """What is in the slot."""
        module, section, key = self.slot
        return vars(module)[section].get(key, MISSING)


@attrs.define(kw_only=True, repr=False)
class Change:
    """What a hook changed on one object, with the values from before.

    Attributes:
        owner: the object, a module or a strategy object.
        attributes: attribute name to its value from before, or ``MISSING``.
        entries: the same for entries of dicts that are attributes.
        contents: whole contents of lists and sets that are attributes.
        kind: the class from before, if the hook gave the object another one.
    """

    owner: Any
    attributes: dict[str, Any] = attrs.field(factory=dict)
    entries: dict[str, dict[Any, Any]] = attrs.field(factory=dict)
    contents: dict[str, Any] = attrs.field(factory=dict)
    kind: type | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing changed."""
        return not (self.attributes or self.entries or self.contents or self.kind)

    def undo(self, copies: dict[int, torch.Tensor]) -> None:
        """Put the values from before back.

        Tensors in parameters and buffers are left out: their places are emptied, and filled by
        the twins that stage them.

        Args:
            copies: by id, the copies of :class:`Overwritten` tensors that this undo has made.
        """
        if self.kind is not None:
            self.owner.__class__ = self.kind
        mine = vars(self.owner)
        numbers = self.owner.numbers if type(self.owner) is Contents else {}
        for name, value in self.attributes.items():
            if not isinstance(value, Alias):
                _put(mine, name, _copied_back(value, copies))
        for name, entries in self.entries.items():
            items = mine[name]
            content = items if type(items) is dict else copy_items(items)
            for key, value in entries.items():
                if not isinstance(value, Alias):
                    value = _without_tensor(self.owner, name, _copied_back(value, copies))
                    _put(content, numbers.get(key, key), value)
            if content is not items:
                refill(items, content)
        for name, content in self.contents.items():
            refill(mine[name], [_copied_back(value, copies) for value in content])

    def undo_aliases(self) -> None:
        """Let what was the tensor of a slot be what is in that slot now."""
        mine = vars(self.owner)
        for name, value in self.attributes.items():
            if isinstance(value, Alias):
                _put(mine, name, value.now)
        for name, entries in self.entries.items():
            aliases = {key: one for key, one in entries.items() if isinstance(one, Alias)}
            if aliases:
                items = copy_items(mine[name])
                for key, value in aliases.items():
                    _put(items, key, value.now)
                refill(mine[name], items)
        for name, content in self.contents.items():
            if any(isinstance(value, Alias) for value in content):
                items = [
                    one.now if isinstance(one, Alias) else one for one in copy_items(mine[name])
                ]
                refill(mine[name], [one for one in items if one is not MISSING])

    def without_tensors(self) -> Change:
        """Return the change without the old tensors of parameters and buffers, to free them."""
        entries = {
            name: {key: _without_tensor(self.owner, name, value) for key, value in inner.items()}
            for name, inner in self.entries.items()
        }
        return attrs.evolve(self, entries=entries)


def _copied_back(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a value from before; a tensor that a hook wrote to, as a copy for it to write to."""
    if isinstance(value, Overwritten):
        return copies.setdefault(id(value), value.value.clone())
    return value


def _put(mapping: dict[Any, Any], key: Any, value: Any) -> None:
    if value is MISSING:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def _without_tensor(owner: Any, name: str, value: Any) -> Any:
    """Return what is put back: a slot's tensor is not, its twin comes in its place."""
    slot = name in SECTIONS and isinstance(owner, nn.Module)
    return MISSING if slot and isinstance(value, torch.Tensor) else value


@attrs.frozen(kw_only=True, repr=False)
class StagedSlot:
    """A tensor that a hook changes, or that has a default, so that loads must go through staging.

    Attributes:
        section: ``"_parameters"`` or ``"_buffers"``.
        name: its name in the module.
        spec: what it was in checkpoint format.
        seeds: values of the regions that no checkpoint brings.
        packed: whether a hook changes it, so that its live form is another one.
    """

    section: str
    name: str
    spec: TensorSpec
    seeds: list[tuple[Region, torch.Tensor]]
    packed: bool = True


@attrs.define(kw_only=True, repr=False)
class ModuleRecord:
    """What is known about one module; it lives on the module and is freed with it.

    Attributes:
        steps: for each role that was processed, what its hook changed.
        strategies: its strategy objects, which a hook could have changed.
        reads: for each role that was processed, the other modules whose tensors its hook read.
        staged: the tensors that a hook changed, by section and name.
        gaps: for each tensor, the regions that the load which made the model did not bring.
        shared: for each tensor, the regions that several source tensors fill.
        sources: for each tensor, the regions that the last complete load filled, and the source
            name of each.
        tainted: the tensors that a first load filled before it failed, so that nobody knows what
            they were constructed with.
        keepalive: what the last hook made and an opaque object may point at.
        manifest: on the root of a model: the source names of the load that made it.
        framework: on the root of a model: the framework that loads it.
        plan: on the root of a model: how tensors get to their places without loaders.
        inferred: the steps were worked out afterwards, from a model of the same construction.
        copied: the module is a copy of one that has a record, made by deepcopy or pickle.
    """

    steps: dict[Role, list[Change]] = attrs.field(factory=dict)
    strategies: list[Any] = attrs.field(factory=list)
    reads: dict[Role, list[nn.Module]] = attrs.field(factory=dict)
    staged: dict[tuple[str, str], StagedSlot] = attrs.field(factory=dict)
    gaps: dict[tuple[str, str], list[Region]] = attrs.field(factory=dict)
    shared: dict[tuple[str, str], SharedRegions] = attrs.field(factory=dict)
    sources: dict[tuple[str, str], dict[Region, str | None]] = attrs.field(factory=dict)
    tainted: set[tuple[str, str]] = attrs.field(factory=set)
    keepalive: list[torch.Tensor] = attrs.field(factory=list)
    manifest: dict[str, SourceFact] | None = None
    framework: Any = None
    plan: Any = None
    inferred: bool = False
    copied: bool = False

    def __deepcopy__(self, memo: Any) -> ModuleRecord:
        """A copied module has the processed state, but not the objects of this record."""
        return ModuleRecord(copied=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """As for a copy."""
        return _copied, ()


def _copied() -> ModuleRecord:
    return ModuleRecord(copied=True)


@attrs.define(kw_only=True)
class SharedRegions:
    """Regions of one tensor that several source tensors fill.

    Some checkpoints repeat a value under several names (a scale for q, k and v of a fused layer),
    and the loaders let the last one win. In every later load the same one wins, in any order.

    Attributes:
        winner: the name whose value counts, by region.
        names: every name that fills such a region.
        ordered: a loader computes with what another name brought, as when the largest of several
            scales counts, or writes where no region can be told. Then all names are needed, and
            none is skipped.
        overlaps: parts that overlap without being equal were brought by different names.
    """

    winner: dict[Region, str | None] = attrs.field(factory=dict)
    names: set[str] = attrs.field(factory=set)
    ordered: bool = False
    overlaps: bool = False


@attrs.frozen(kw_only=True)
class SourceFact:
    """What is known about one source name since the load that made the model.

    Attributes:
        shape: shape of the tensor that came under it.
        dtype: its type of elements.
        consumed: whether it filled anything.
        broadcast: whether the model's loader spread it over a larger place.
        place: qualified name of the first tensor that it filled.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    consumed: bool = False
    broadcast: bool = False
    place: str | None = None


def record_of(module: nn.Module) -> ModuleRecord | None:
    """Return the record of ``module``, or ``None`` if it was never loaded by a session."""
    return vars(module).get(_ATTRIBUTE)


def read_by(module: nn.Module, role: Role) -> list[nn.Module]:
    """Return the other modules whose tensors the hook of ``module`` in ``role`` reads."""
    record = record_of(module)
    return [] if record is None else record.reads.get(role, [])


def make_record(module: nn.Module) -> ModuleRecord:
    """Return the record of ``module``, made if there is none."""
    record = record_of(module)
    if record is None:
        record = ModuleRecord()
        vars(module)[_ATTRIBUTE] = record
    return record


def remove_record(module: nn.Module) -> None:
    """Forget what is known about ``module``."""
    vars(module).pop(_ATTRIBUTE, None)


def made_by_hooks(module: nn.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the slots that the hooks of ``module`` made: id of the owner, section and name."""
    record = record_of(module) or ModuleRecord()
    for change in (change for step in record.steps.values() for change in step):
        if not isinstance(change.owner, nn.Module):
            continue
        known = (record_of(change.owner) or ModuleRecord()).staged
        for section in SECTIONS:
            for name in change.entries.get(section, ()):
                if (section, name) not in known:
                    yield id(change.owner), section, name


def slots_of(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield section, name and tensor of the parameters and buffers that ``module`` holds itself."""
    for section in SECTIONS:
        for name, tensor in vars(module)[section].items():
            if tensor is not None:
                yield section, name, tensor
