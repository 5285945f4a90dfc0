"""One unit of a model: park, stage, process once, validate, commit, restore.

A unit is the smallest set of modules that must be loaded and processed together: mostly one
layer; two modules that share a tensor which processing changes; a module and another that its
hook changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.derived import Reconciliation
from weightload.entries import Entry, Staging
from weightload.errors import ProcessingError, StorageChangedError, name_some
from weightload.record import (
    MISSING,
    SECTIONS,
    Change,
    ModuleRecord,
    ObjectState,
    StagedSlot,
    make_record,
    record_of,
    slots_of,
)
from weightload.registry import ModuleRule, Role
from weightload.storage import describe_change, make_twins

__all__ = ["Hook", "Unit", "build_units"]


@attrs.define(kw_only=True, eq=False, repr=False)
class Hook:
    """One hook of one module, to be run at most once in a session.

    Attributes:
        name: qualified name of the module.
        module: the module.
        rule: what is called.
        reads: the tensors of the module and of the modules inside it.
        attempted: whether it was called.
        done: whether it returned.
    """

    name: str
    module: nn.Module
    rule: ModuleRule
    reads: list[Entry] = attrs.field(factory=list)
    attempted: bool = False
    done: bool = False

    @property
    def first(self) -> bool:
        """Whether it never ran under a session before, so that it is to be recorded."""
        record = record_of(self.module)
        return record is None or self.rule.role not in record.steps

    def run(self) -> None:
        """Run the hook.

        Raises:
            ProcessingError: the hook raised.
        """
        self.attempted = True
        try:
            self.rule.run(self.module)
        except Exception as error:
            raise ProcessingError(
                f"The {self.rule.role.value} hook of module {self.name!r} "
                f"({type(self.module).__qualname__}) raised {type(error).__name__}: {error}",
                module=self.name,
                role=self.rule.role.value,
            ) from error
        self.done = True


@attrs.define(kw_only=True, eq=False, repr=False)
class Unit:
    """Modules that are loaded, processed and committed together.

    Attributes:
        modules: the modules by qualified name.
        hooks: their hooks, in order of processing.
        changes: what their hooks changed the first time, in order of processing.
        slots: the tensors that need staging, by module.
        entries: what a load fills.
        reads: what its quantisation hooks may read: its entries, those of modules inside, and
            tensors that it shares with other modules.
        fresh: its tensors had no data before this load, so what the hooks make becomes live.
        inferred: what the hooks did was worked out afterwards, not recorded.
        committed: whether it is done.
    """

    modules: dict[str, nn.Module]
    hooks: list[Hook] = attrs.field(factory=list)
    changes: list[Change] = attrs.field(factory=list)
    slots: list[tuple[nn.Module, StagedSlot]] = attrs.field(factory=list)
    entries: list[Entry] = attrs.field(factory=list)
    reads: list[Entry] = attrs.field(factory=list)
    fresh: bool = False
    inferred: bool = False
    committed: bool = False
    _live: list[ObjectState] = attrs.field(factory=list)
    _stagings: dict[int, Staging] = attrs.field(factory=dict)
    _plan: list[_OwnerPlan] = attrs.field(factory=list)

    @property
    def name(self) -> str:
        """The qualified name of its first module, for messages."""
        return next(iter(self.modules))

    @property
    def staged(self) -> bool:
        """Whether it is parked: loaders see twins, and a commit is needed."""
        return bool(self._live)

    @property
    def complete(self) -> bool:
        """Whether everything arrived that a checkpoint brings."""
        return all(entry.complete for entry in self.reads)

    def park(self) -> dict[tuple[int, str, str], tuple[torch.Tensor, Staging]]:
        """Remember the live state and put the state from before the first processing in place.

        Returns:
            The twin and its staging for each slot, by module id, section and name.
        """
        owners: dict[int, Any] = {id(module): module for module in self.modules.values()}
        owners.update((id(change.owner), change.owner) for change in self.changes)
        self._live = [ObjectState.of(owner) for owner in owners.values()]
        copies: dict[int, torch.Tensor] = {}
        for change in reversed(self.changes):
            change.undo(copies)
        twins = make_twins([slot.spec for _, slot in self.slots])
        placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]] = {}
        for (module, slot), twin in zip(self.slots, twins, strict=True):
            staging = self._stagings.setdefault(
                slot.spec.group,
                Staging(storage=twin.untyped_storage(), nbytes=slot.spec.nbytes),
            )
            if not any(twin is other for other in staging.twins):
                staging.twins.append(twin)
            staging.seeds += [(twin, region, value) for region, value in slot.seeds]
            vars(module)[slot.section][slot.name] = twin
            placed[id(module), slot.section, slot.name] = (twin, staging)
        return placed

    def point_aliases(self) -> None:
        """Let attributes that name a tensor of the model name its twin, once all are in place."""
        for change in reversed(self.changes):
            change.undo_aliases()

    def allocate(self) -> int:
        """Give every twin its memory, so that hooks find real tensors."""
        return sum(staging.allocate() for staging in self._stagings.values())

    def plan_commit(self) -> None:
        """Work out what is to be copied into live storage; changes nothing.

        Raises:
            StorageChangedError: a live parameter or buffer could not keep its storage.
        """
        problems: list[str] = []
        names = {id(module): name for name, module in self.modules.items()}
        self._plan = [
            _plan_owner(
                live,
                names.get(id(live.owner), type(live.owner).__qualname__),
                problems,
                inferred=self.inferred,
            )
            for live in self._live
        ]
        if problems:
            raise StorageChangedError(
                f"Processing module {self.name!r} again gave tensors that do not fit the live "
                f"ones: {name_some(problems)}. Captured graphs and kernels know the live tensors, "
                f"so the new weights cannot take their place. Start the engine again on the new "
                f"weights.",
                module=self.name,
            )

    @property
    def changes_something(self) -> bool:
        """Whether the planned commit changes anything that computes."""
        return any(plan.changes_something for plan in self._plan)

    def commit(self) -> CommitCount:
        """Copy new values into live storage and put the live tensors back in their places."""
        count = CommitCount()
        copies = {
            (id(old), id(new)): (old, new)
            for plan in self._plan
            for old, new in (*plan.slot_copies, *plan.found.copies)
        }
        with torch.no_grad():
            for old, new in copies.values():
                old.detach().copy_(new.detach())
                count.nbytes += old.numel() * old.element_size()
        for plan in self._plan:
            plan.attach()
            count.derived += len(plan.found.copies)
            count.moved += len(plan.found.moved)
        # An opaque object may know the address of a tensor that the hook made: those tensors
        # live as long as the object does, that is until the next processing. A twin is emptied
        # when its staging ends, and a view of it keeps the memory.
        opaque = any(plan.found.opaque for plan in self._plan)
        keeper = next(iter(self.modules.values()))
        made = [new.detach() for _, new in copies.values()] if opaque else []
        make_record(keeper).keepalive = made
        del copies, made
        self.committed = True
        return count

    def release(self) -> int:
        """End the staging after a commit; return how many staged bytes were freed.

        This is a step of its own because another unit may still have to copy from these twins: an
        attention layer's attribute can name a parameter that belongs to the module around it.
        """
        return self._end()

    def restore(self) -> int:
        """Put the live state back as it was parked; return how many staged bytes were freed."""
        for live in reversed(self._live):
            live.restore()
        return self._end()

    def _end(self) -> int:
        live = {
            id(tensor)
            for module in self.modules.values()
            for _, _, tensor in slots_of(module)
            if self.fresh
        }
        released = sum(staging.release(live) for staging in self._stagings.values())
        for entry in self.entries:
            entry.closed = entry.closed or self.staged
        self._live, self._plan, self._stagings = [], [], {}
        return released


@attrs.define
class CommitCount:
    """What a commit did."""

    nbytes: int = 0
    derived: int = 0
    moved: int = 0


_Put = tuple[dict[Any, Any], Any, Any]


@attrs.define(kw_only=True, repr=False)
class _OwnerPlan:
    """What a commit does to one object."""

    live: ObjectState
    found: Reconciliation
    slot_copies: list[tuple[torch.Tensor, torch.Tensor]]
    puts: list[_Put]

    @property
    def changes_something(self) -> bool:
        return bool(
            self.puts
            or self.found.copies
            or self.live.differences(ObjectState.of(self.live.owner)) is not None
        )

    def attach(self) -> None:
        self.found.apply()
        for mapping, name, value in self.puts:
            mapping[name] = value
        if isinstance(self.live.owner, nn.Module):
            _reorder(vars(self.live.owner), self.live)


def _plan_owner(
    live: ObjectState, owner: str, problems: list[str], *, inferred: bool
) -> _OwnerPlan:
    mine = vars(live.owner)
    plan = _OwnerPlan(live=live, found=Reconciliation(), slot_copies=[], puts=[])
    is_module = isinstance(live.owner, nn.Module)
    for section in SECTIONS if is_module else ():
        before, now = live.contents[section], mine[section]
        for name in before.keys() | now.keys():
            old, new = before.get(name), now.get(name)
            if old is new:
                continue
            problem = _slot_problem(old, new)
            if problem is not None:
                problems.append(f"{owner}.{name}: {problem}")
                continue
            plan.slot_copies.append((old, new))
            plan.puts.append((now, name, old))
    for name, old in live.values.items():
        new = mine.get(name, MISSING)
        if is_module and name in (*SECTIONS, "_modules"):
            continue
        if new is MISSING:
            if inferred:
                # It was taken for the hook's, and the hook did not make it: it is the engine's.
                plan.puts.append((mine, name, old))
            continue
        if name in live.contents and type(new) is type(old):
            old = live.contents[name]
        kept = plan.found.match(old, new, f"{owner}.{name}")
        if kept is not new:
            plan.puts.append((mine, name, kept))
    return plan


def _reorder(mine: dict[str, Any], live: ObjectState) -> None:
    """Give parameters and buffers their old order, which name-based code may rely on."""
    for section in SECTIONS:
        now = mine[section]
        order = {name: now[name] for name in live.contents[section] if name in now}
        order.update(now)
        now.clear()
        now.update(order)


def _slot_problem(old: Any, new: Any) -> str | None:
    if new is None:
        return "the live tensor has no counterpart"
    if old is None:
        return "it did not exist before"
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return f"{type(old).__name__} became {type(new).__name__}"
    return describe_change(old, new)


def build_units(
    modules: Mapping[str, nn.Module],
    hooks: Iterable[Hook],
    also_staged: Mapping[int, list[StagedSlot]],
) -> tuple[list[Unit], dict[int, Unit]]:
    """Group the modules that need processing or staging into units.

    Args:
        modules: every module of the tree by qualified name, each once.
        hooks: the hooks of all modules.
        also_staged: by id of the module, tensors to be staged that no hook changes.

    Returns:
        The units in the order of the tree, and the unit of each module by id.
    """
    parent: dict[int, int] = {id(module): id(module) for module in modules.values()}

    def find(key: int) -> int:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    groups: dict[int, int] = {}
    sharing: dict[int, int] = {}
    wanted: set[int] = set()
    slots: dict[int, list[StagedSlot]] = {}
    records = [record_of(module) or ModuleRecord() for module in modules.values()]
    steps = (step for record in records for step in record.steps.values())
    changed = {id(change.owner) for step in steps for change in step}
    for module, record in zip(modules.values(), records, strict=True):
        for change in (change for step in record.steps.values() for change in step):
            if id(change.owner) in parent:
                parent[find(id(change.owner))] = find(id(module))
        for strategy in record.strategies:
            # What one hook left in a strategy object, the hooks of others that share it find.
            if id(strategy) in changed:
                other = sharing.setdefault(id(strategy), id(module))
                parent[find(other)] = find(id(module))
        slots[id(module)] = [*record.staged.values(), *also_staged.get(id(module), ())]
        for slot in slots[id(module)]:
            wanted.add(id(module))
            other = groups.setdefault(slot.spec.group, id(module))
            parent[find(other)] = find(id(module))
    by_module: dict[int, list[Hook]] = {}
    for hook in hooks:
        by_module.setdefault(id(hook.module), []).append(hook)
    wanted |= by_module.keys()
    wanted_roots = {find(key) for key in wanted}
    roots: dict[int, Unit] = {}
    members: dict[int, Unit] = {}
    for name, module in modules.items():
        root = find(id(module))
        if root not in wanted_roots:
            continue
        unit = roots.setdefault(root, Unit(modules={}))
        unit.modules[name] = module
        members[id(module)] = unit
        unit.hooks += by_module.get(id(module), [])
        unit.slots += [(module, slot) for slot in slots[id(module)]]
    for unit in roots.values():
        known = [record_of(module) for module in unit.modules.values()]
        unit.changes = [
            change
            for role in Role
            for record in known
            if record is not None
            for change in record.steps.get(role, ())
        ]
        unit.inferred = any(record is not None and record.inferred for record in known)
        order = list(Role)
        unit.hooks.sort(key=lambda hook: order.index(hook.rule.role))
    return list(roots.values()), members
