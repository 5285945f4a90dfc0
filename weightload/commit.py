"""What a commit does to the objects of one unit: which values are copied, what is put back where."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from weightload.births import Births
from weightload.derived import Reconciliation
from weightload.ownership import ForwardGuard
from weightload.record import (
    ITEMS,
    MISSING,
    SECTIONS,
    Contents,
    ObjectState,
    copy_items,
    held_in,
    refill,
)

__all__ = ["CommitCount", "CommitPlan", "OwnerPlan", "plan_commit"]


@attrs.define
class CommitCount:
    """What a commit did."""

    nbytes: int = 0
    derived: int = 0
    moved: int = 0


_STRUCTURE = frozenset((*SECTIONS, "_modules"))
"""Attributes of a module that are no values of their own."""
_Put = tuple[Any, Any, Any]


@attrs.define(kw_only=True, repr=False)
class OwnerPlan:
    """What a commit does to one object.

    Attributes:
        live: the object, and its attributes while it computed with the old weights.
        name: its name, for messages.
        puts: a mapping, a key in it and the value that is put there.
    """

    live: ObjectState
    name: str
    puts: list[_Put] = attrs.field(factory=list)

    @property
    def is_module(self) -> bool:
        """Whether it holds parameters and buffers."""
        return isinstance(self.live.owner, nn.Module)

    def slots(self, found: Reconciliation, problems: list[str]) -> None:
        """Compare parameters and buffers with what they were while live."""
        for section in SECTIONS if self.is_module else ():
            before, now = self.live.contents[section], vars(self.live.owner)[section]
            for name in dict.fromkeys((*before, *now)):
                where = f"{self.name}.{name}"
                old, new = before.get(name), now.get(name)
                if old is None and new is None:
                    continue
                if old is None or new is None:
                    gone = "the live tensor has no counterpart"
                    problems.append(
                        f"{where}: {gone if new is None else 'it did not exist before'}"
                    )
                    continue
                value, problem = found.match_tensor(old, new, where)
                if problem is not None:
                    problems.append(f"{where}: {problem}")
                elif value is not new:
                    self.puts.append((now, name, value))

    def exact(self, found: Reconciliation, path: str, states: Mapping[int, ObjectState]) -> None:
        """Compare what a rule says is at ``path``, and look at nothing else.

        Args:
            found: collects the copies.
            path: attributes, keys or indices from the module on, with dots between them.
            states: what each object of the unit was while live, by its id.
        """
        old: Any = self.live.owner
        new: Any = self.live.owner
        before, holder, done = MISSING, new, ""
        for step in path.split("."):
            if isinstance(new, tuple):
                break  # nothing can be put into it: it is compared whole, and made again
            state = states.get(id(old))
            before = _step(old, step) if state is None else _in_state(state, step)
            holder, old, new, done = new, before, _step(new, step), step
        kept = found.match(before, new, f"{self.name}.{path}")
        if kept is new:
            return
        if isinstance(holder, dict | list):
            self.puts.append((holder, _key_of(holder, done), kept))
        elif done in getattr(holder, "__dict__", ()):
            self.puts.append((vars(holder), done, kept))
        else:
            found.later(functools.partial(setattr, holder, done, kept))

    def attributes(self, found: Reconciliation, *, inferred: bool) -> None:
        """Compare all other attributes with what they were while live."""
        if type(self.live.owner) is Contents:
            self.items(found)
            return
        mine, values, contents = vars(self.live.owner), self.live.values, self.live.contents
        structure = _STRUCTURE if self.is_module else ()
        for name in {**values, **mine}:
            old, new = values.get(name, MISSING), mine.get(name, MISSING)
            if new is old and name not in contents:
                continue
            if name in structure or _is_ours(name) or type(new) is ForwardGuard:
                continue
            if new is MISSING and inferred:
                # It was taken for the hook's, and the hook did not make it: it is the engine's.
                self.puts.append((mine, name, old))
                continue
            kept = found.match(contents.get(name, old), new, f"{self.name}.{name}")
            if kept is not new:
                self.puts.append((mine, name, kept))

    def items(self, found: Reconciliation) -> None:
        """Compare what a container holds with what it held, whatever its class makes of it."""
        items, patches = self.live.owner.items, found.patches
        old, new = self.live.contents[ITEMS], copy_items(items)
        if isinstance(items, OrderedDict) and (numbers := _renumbered(old, new)):
            found.later(functools.partial(self.live.owner.renumber, numbers))
            old = {numbers.get(key, key): value for key, value in old.items()}
        found.match(old, new, self.name)
        if found.patches > patches:
            found.later(functools.partial(refill, items, new))


@attrs.define(kw_only=True, repr=False)
class CommitPlan:
    """What a commit does to the objects of one unit.

    Attributes:
        owners: the objects.
        found: what is copied, and what could not keep its storage.
        slot_copies: how many of the copies are those of parameters and buffers; they come first.
        hidden: tensors that hooks made and that are held where nothing tracks them, as text.
    """

    owners: list[OwnerPlan]
    found: Reconciliation
    slot_copies: int = 0
    hidden: list[str] = attrs.field(factory=list)

    @property
    def changes_something(self) -> bool:
        """Whether the commit changes anything that computes."""
        return bool(
            self.found.copies
            or any(owner.puts for owner in self.owners)
            or any(
                owner.live.differences(ObjectState.of(owner.live.owner)) is not None
                for owner in self.owners
            )
        )

    @property
    def moves(self) -> list[str]:
        """What does not keep its storage, or its place, as text with the reason."""
        opaque = [f"{path}: an opaque object was made anew" for path in self.found.opaque_paths]
        return [*self.moved, *opaque]

    @property
    def renews(self) -> bool:
        """Whether nothing is copied, and nothing put back but tensors without elements."""
        sections = {
            id(vars(owner.live.owner)[section])
            for owner in self.owners
            if owner.is_module
            for section in SECTIONS
        }
        return self.found.renews and all(
            id(put[0]) in sections for owner in self.owners for put in owner.puts
        )

    @property
    def alike(self) -> bool:
        """Whether everything is what it was, maybe made anew, but for the values of tensors."""
        return (
            self.found.alike
            and not self.moves
            and all(
                owner.live.contents["_modules"] == vars(owner.live.owner)["_modules"]
                for owner in self.owners
                if owner.is_module
            )
        )

    @property
    def moved(self) -> list[str]:
        """The tensors among them."""
        return [*self.found.moved, *self.hidden]

    def name_hidden(self, name: str, births: Births) -> None:
        """Look for tensors that hooks made and that were not found.

        They are new, so captured graphs know others. What an opaque object may hold is left to it.

        Args:
            name: of the unit, for messages.
            births: what its hooks made.
        """
        if not self.found.opaque:
            self.hidden = [
                f"{name}: a tensor of {text} that a hook made is held by what is not tracked"
                for text in births.alive(self.found.found_keys)
            ]

    def named_copies(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield path, live tensor and new tensor of every copy that is going to be made."""
        for where, (live, new) in zip(self.found.pairs.paths, self.found.copies, strict=True):
            yield where, live, new

    def carry_out(self) -> CommitCount:
        """Copy the new values, and put the live tensors back in their places."""
        nbytes = self.found.pairs.copy()
        self.found.apply()
        for owner in self.owners:
            for mapping, name, value in owner.puts:
                mapping[name] = value
            if owner.is_module:
                _reorder(vars(owner.live.owner), owner.live)
        derived = len(self.found.copies) - self.slot_copies
        return CommitCount(nbytes=nbytes, derived=derived, moved=len(self.moved))


def plan_commit(
    lives: Sequence[ObjectState],
    names: Mapping[int, str],
    dressed: Mapping[int, Mapping[str, Any]],
    problems: list[str],
    exact: Mapping[int, Sequence[str]] | None = None,
    *,
    inferred: bool,
) -> CommitPlan:
    """Compare the objects of a unit with what they were while live; changes nothing.

    Parameters and buffers come first: where a derived tensor shares memory with one and has
    another value now, it is the derived one that cannot stay.

    Args:
        lives: what the objects were.
        names: their names by id, for messages.
        dressed: by id of a tensor that the hooks found, the attributes that it had then.
        problems: is extended by what does not fit.
        exact: by id of a module, where rules say that its derived tensors are; without it, all
            attributes are walked.
        inferred: whether what the hooks did was worked out, so that an attribute that a hook did
            not make again is taken for the engine's.
    """
    owners = [OwnerPlan(live=live, name=_name_of(live.owner, names)) for live in lives]
    found = Reconciliation(dressed=dressed)
    for owner in owners:
        owner.slots(found, problems)
    slot_copies = len(found.copies)
    states = {id(held_in(live.owner)): live for live in lives}
    for owner in owners:
        if exact is None:
            owner.attributes(found, inferred=inferred)
        for path in (exact or {}).get(id(owner.live.owner), ()):
            owner.exact(found, path, states)
    problems += found.conflicts
    return CommitPlan(owners=owners, found=found, slot_copies=slot_copies)


def _renumbered(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the new key of each item that torch counts, as it does forward hooks."""
    gone, added = ([*one.keys() - two.keys()] for one, two in ((old, new), (new, old)))
    if len(gone) != len(added) or any(type(key) is not int for key in (*gone, *added)):
        return {}
    return dict(zip(sorted(gone), sorted(added), strict=True))


def _name_of(owner: Any, names: Mapping[int, str]) -> str:
    if type(owner) is Contents:
        return owner.where
    return names.get(id(owner), type(owner).__qualname__)


def _in_state(state: ObjectState, step: str) -> Any:
    """Return an attribute as it was while live."""
    if type(state.owner) is Contents:
        return _step(state.contents[ITEMS], step)
    for section in SECTIONS:
        if step in state.contents.get(section, ()):
            return state.contents[section][step]
    return state.contents.get(step, state.values.get(step, MISSING))


def _step(value: Any, step: str) -> Any:
    """Return the attribute, the item of a mapping or the item of a sequence called ``step``."""
    if value is MISSING:
        return MISSING
    if isinstance(value, Mapping | list | tuple):
        key = _key_of(value, step)
        try:
            return value[key]
        except (KeyError, IndexError):
            return MISSING
    return getattr(value, step, MISSING)


def _key_of(container: Any, step: str) -> Any:
    return int(step) if isinstance(container, list | tuple) else step


def _is_ours(name: str) -> bool:
    """Whether an attribute belongs to an open session, which may stand in for a loader."""
    return name.startswith("_weightload") or name == "load_weights"


def _reorder(mine: dict[str, Any], live: ObjectState) -> None:
    """Give parameters and buffers their old order, which name-based code may rely on."""
    for section in SECTIONS:
        now = mine[section]
        order = {name: now[name] for name in live.contents[section] if name in now}
        order.update(now)
        now.clear()
        now.update(order)
