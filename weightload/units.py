"""Groups the modules of a tree into units that are loaded and processed together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from weightload.layer import Hook, Unit
from weightload.record import ModuleRecord, StagedSlot, record_of
from weightload.registry import Role

__all__ = ["build_units"]


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
        for other_module in record.reads.get(Role.QUANT, ()):
            # Its hook waits for what it reads, and finds it as it was at the first load.
            if id(other_module) in parent:
                parent[find(id(other_module))] = find(id(module))
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
