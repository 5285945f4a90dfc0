"""The comparison around the first run of a hook, entered into the modules' records."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.ledger import Region
from weightload.record import (
    CONTAINERS,
    FLAT,
    ITEMS,
    MISSING,
    SECTIONS,
    Alias,
    Change,
    Contents,
    ObjectState,
    Overwritten,
    Slot,
    StagedSlot,
    held_in,
    make_record,
    slots_of,
)
from weightload.registry import ModuleRegistry, Role
from weightload.storage import Fingerprint, TensorSpec

__all__ = ["HookRecording", "scope_of"]


_ATOMS = frozenset((type(None), bool, int, float, str, bytes, torch.dtype, torch.device))
_DEPTH = 4
"""How deep containers inside containers are looked at."""
_MANY = 1000
"""A container with more items is not searched for containers."""
_HOLDERS = (types.SimpleNamespace, collections.UserDict, collections.UserList)
_HOOKS_OF_TORCH = frozenset(
    name for name, value in vars(nn.Module()).items() if type(value) is collections.OrderedDict
)
"""Where modules keep their forward hooks and the like: a dozen dicts each, which are mostly empty."""


def scope_of(module: nn.Module, registry: ModuleRegistry) -> list[Any]:
    """Return every object that the hook of ``module`` may change.

    That is the module with its submodules, and their strategy objects: what they hold under the
    registry's strategy names, and whatever else they hold that has the hook itself, at any depth.
    What merely holds values is among them: containers whose contents are in no object's state,
    namespaces, and dataclasses that are not in another one; but not the empty ones of torch.
    """
    owners: list[Any] = list(module.modules())
    seen = set(map(id, owners))

    def enter(value: Any, owner: Any, name: str, depth: int) -> None:
        if type(value) in _ATOMS or id(value) in seen:
            return
        if isinstance(value, nn.Module | torch.Tensor | type):
            return
        wanted = name in registry.strategies or hasattr(type(value), registry.hook)
        wanted = (wanted and not depth) or _holds_values(value, owner)
        if wanted and hasattr(value, "__dict__"):
            seen.add(id(value))
            owners.append(value)
        if not isinstance(value, (*CONTAINERS, tuple)):
            return
        seen.add(id(value))
        if isinstance(value, CONTAINERS) and (depth or type(value) not in FLAT):
            owners.append(Contents.of(value, f"{type(owner).__qualname__}.{name}"))
        for item in _items(value) if depth < _DEPTH else ():
            enter(item, owner, name, depth + 1)

    for owner in owners:
        for name, value in () if type(owner) is Contents else tuple(vars(owner).items()):
            if name not in _HOOKS_OF_TORCH or value:
                enter(value, owner, name, 0)
    return owners


def _holds_values(value: Any, owner: Any) -> bool:
    """Whether an object is there for what it holds; nothing else is told of its class."""
    if isinstance(value, CONTAINERS):
        return type(value) not in FLAT and bool(getattr(value, "__dict__", None))
    if isinstance(value, _HOLDERS):
        return True
    # Dataclasses in dataclasses are mostly the configuration of the whole engine.
    return hasattr(type(value), _FIELDS) and not hasattr(type(owner), _FIELDS)


_FIELDS = "__dataclass_fields__"


def _loose_contents(state: ObjectState) -> Iterator[tuple[str, Any]]:
    """Yield the contents of containers, but for parameters, buffers and modules."""
    structure = (*SECTIONS, "_modules") if isinstance(state.owner, nn.Module) else ()
    return ((name, content) for name, content in state.contents.items() if name not in structure)


def _loose_in(state: ObjectState) -> Iterator[torch.Tensor]:
    """Yield the tensors that are attributes, or in containers."""
    values = [*state.values.values()]
    for _, content in _loose_contents(state):
        values += content.values() if isinstance(content, dict) else content
    return (value for value in values if isinstance(value, torch.Tensor))


def _items(value: Any) -> Collection[Any]:
    """Return what a container or a tuple holds, if that may be searched."""
    if not isinstance(value, (*CONTAINERS, tuple)) or not 0 < len(value) <= _MANY:
        return ()
    return tuple(value.values() if isinstance(value, dict) else value)


@attrs.define(kw_only=True, repr=False)
class HookRecording:
    """The comparison around the first run of one hook."""

    states: list[ObjectState]
    specs: dict[tuple[int, str, str], tuple[Slot, TensorSpec, Fingerprint]]
    seeds: dict[tuple[int, str, str], list[tuple[Region, torch.Tensor]]]
    loose: dict[int, torch.Tensor]
    aliases: dict[int, Alias]

    @classmethod
    def start(
        cls,
        scope: Iterable[Any],
        seeds_of: Callable[[Slot], list[tuple[Region, torch.Tensor]]],
        slot_of: Callable[[torch.Tensor], Slot | None],
    ) -> HookRecording:
        """Look at everything in ``scope`` before the hook runs.

        Args:
            scope: what the hook may change.
            seeds_of: gives the values of a slot that no checkpoint brings.
            slot_of: gives the slot, anywhere in the model, whose tensor this is.
        """
        specs: dict[tuple[int, str, str], tuple[Slot, TensorSpec, Fingerprint]] = {}
        seeds: dict[tuple[int, str, str], list[tuple[Region, torch.Tensor]]] = {}
        states = []
        loose: dict[int, torch.Tensor] = {}
        aliases: dict[int, Alias] = {}
        for owner in scope:
            states.append(ObjectState.of(owner))
            for value in _loose_in(states[-1]):
                slot = slot_of(value)
                if slot is not None:
                    aliases[id(value)] = Alias(slot)
                elif not value.is_meta:
                    loose[id(value)] = value
            if not isinstance(owner, nn.Module):
                continue
            for section, name, tensor in slots_of(owner):
                key = (id(owner), section, name)
                slot = (owner, section, name)
                specs[key] = (slot, TensorSpec.of(tensor), Fingerprint.of(tensor))
                seeds[key] = seeds_of(slot)
        return cls(states=states, specs=specs, seeds=seeds, loose=loose, aliases=aliases)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that the hook may write to."""
        for (module, section, name), _, _ in self.specs.values():
            yield vars(module)[section][name]

    def undo(self, overwritten: Mapping[int, torch.Tensor]) -> None:
        """Put everything back after a hook that failed; values that loaders bring are not undone.

        Args:
            overwritten: as for :meth:`finish`.
        """
        for change in self._hooked():
            change.undo({})
        for state in self.states:
            state.restore()
        for slot, spec, mark in self.specs.values():
            tensor = vars(slot[0])[slot[1]][slot[2]]
            if mark.storage is not None and mark.difference(tensor) is not None:
                before = torch.empty(0, dtype=spec.dtype, device=spec.device)
                tensor.data = before.set_(mark.storage, spec.offset, spec.shape, spec.stride)
        for key, value in overwritten.items():
            self.loose[key].detach().copy_(value)
        for (module, section, name), _, _ in self.specs.values():
            for region, value in self.seeds[id(module), section, name]:
                target = vars(module)[section][name].detach()
                target[tuple(slice(*span) for span in region)].copy_(value)

    def finish(
        self,
        module: nn.Module,
        role: Role,
        written: Mapping[int, object],
        overwritten: Mapping[int, torch.Tensor],
    ) -> list[Slot]:
        """Enter into the modules' records what the hook did.

        Args:
            module: the module whose hook it was.
            role: the role it was run in.
            written: keys of the storages that the hook wrote to in place.
            overwritten: by id of a loose tensor that the hook wrote to, its value from before.

        Returns:
            The slots that it changed, in checkpoint format as the records now say.
        """
        special: dict[int, Alias | Overwritten] = dict(self.aliases)
        special.update((key, Overwritten(value)) for key, value in overwritten.items())
        changes = [self._change_of(state, special) for state in self.states]
        changes += self._hooked()
        record = make_record(module)
        record.steps[role] = [change.without_tensors() for change in changes if change is not None]
        record.strategies = self._strategies_of(module)
        touched: list[Slot] = []
        for key, (slot, spec, mark) in self.specs.items():
            owner, section, name = slot
            now = vars(owner)[section].get(name)
            held = mark.storage._cdata if mark.storage is not None else None
            same = now is not None and mark.difference(now) is None
            if same and now is self._before(slot) and held not in written:
                continue
            touched.append(slot)
            make_record(owner).staged.setdefault(
                (section, name),
                StagedSlot(section=section, name=name, spec=spec, seeds=self.seeds[key]),
            )
        return touched

    def _hooked(self) -> Iterator[Change]:
        """Yield what a hook did to dicts of torch that were empty."""
        known = {id(held_in(state.owner)) for state in self.states}
        for state in self.states:
            for name in _HOOKS_OF_TORCH if isinstance(state.owner, nn.Module) else ():
                items = state.values.get(name)
                if items and id(items) not in known:
                    owner = Contents.of(items, f"{type(state.owner).__qualname__}.{name}")
                    yield Change(owner=owner, entries={ITEMS: dict.fromkeys(items, MISSING)})

    def _strategies_of(self, module: nn.Module) -> list[Any]:
        """Return the strategy objects in scope that are the module's own, not its children's."""
        rest: dict[int, list[Any]] = {}
        for owner in (state.owner for state in self.states):
            if not isinstance(owner, nn.Module):
                rest.setdefault(id(held_in(owner)), []).append(owner)
        found: list[Any] = [module]
        seen: set[int] = set()
        for owner in found:
            skipped = _HOOKS_OF_TORCH if isinstance(owner, nn.Module) else ()
            values = [value for name, value in vars(owner).items() if name not in skipped]
            for value in values:
                if type(value) in _ATOMS or id(value) in seen:
                    continue
                seen.add(id(value))
                found += rest.pop(id(value), ())
                values += _items(value)
        return found[1:]

    @staticmethod
    def _change_of(state: ObjectState, special: Mapping[int, Alias | Overwritten]) -> Change | None:
        change = state.differences(ObjectState.of(state.owner))
        change = change or Change(owner=state.owner)
        for name, value in state.values.items():
            if id(value) in special:
                change.attributes[name] = special[id(value)]
        for name, content in _loose_contents(state) if special else ():
            if isinstance(content, dict):
                found = {key: special[id(v)] for key, v in content.items() if id(v) in special}
                if found:
                    change.entries.setdefault(name, {}).update(found)
            elif any(id(value) in special for value in content):
                change.contents[name] = [special.get(id(value), value) for value in content]
        return None if change.empty else change

    def _before(self, slot: Slot) -> torch.Tensor | None:
        owner, section, name = slot
        for state in self.states:
            if state.owner is owner:
                before: torch.Tensor | None = state.contents[section].get(name)
                return before
        return None
