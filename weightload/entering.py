"""Enters the tensors of modules into a load: what stages them, what has to come, what reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs
import torch
from torch import nn

from weightload.arrivals import Arrivals
from weightload.entries import Entry, Load, join
from weightload.layer import Unit
from weightload.ledger import Region, RegionLedger, full_region, meet, without
from weightload.partial import gaps_outside, names_of
from weightload.record import (
    ModuleRecord,
    SharedRegions,
    StagedSlot,
    made_by_hooks,
    read_by,
    record_of,
    slots_of,
)
from weightload.registry import Role
from weightload.staging import Staging
from weightload.storage import TensorSpec, new_group, select, storage_key

__all__ = ["also_staged", "enter"]


def also_staged(load: Load, members: Mapping[int, Unit]) -> dict[int, list[StagedSlot]]:
    """Return the tensors that are staged only because nothing live may be written yet.

    Args:
        load: what is about to begin.
        members: the unit of each module, by id.
    """
    if load.initial:
        return _without_data(load)
    if not load.atomic:
        return {}
    shared: dict[int, int] = {}
    found: dict[int, list[StagedSlot]] = {}
    made = {slot for module in load.modules.values() for slot in made_by_hooks(module)}
    for module in load.modules.values():
        record = record_of(module)
        for section, name, tensor in slots_of(module):
            key = storage_key(tensor)
            if key is None or (id(module), section, name) in made:
                continue
            if record is not None and (section, name) in record.staged:
                continue
            gaps = _gaps_of(load, members, module, section, name, tensor)
            whole = [full_region(tensor.shape)]
            wanted = load.intake.wanted
            if wanted is not None and not wanted & names_of(
                record or ModuleRecord(), section, name
            ):
                continue
            spec = TensorSpec.of(tensor, shared.setdefault(key, new_group()))
            seeds = [
                (region, select(tensor, region)) for region in (whole if gaps is None else gaps)
            ]
            slot = StagedSlot(section=section, name=name, spec=spec, seeds=seeds)
            found.setdefault(id(module), []).append(slot)
    return found


def _without_data(load: Load) -> dict[int, list[StagedSlot]]:
    """Return the tensors that were constructed on meta: their memory comes as they load."""
    device = load.framework.device
    shared: dict[int | None, int] = {}
    found: dict[int, list[StagedSlot]] = {}
    for module in load.modules.values():
        for section, name, tensor in slots_of(module):
            if tensor.is_meta:
                group = shared.setdefault(storage_key(tensor), new_group())
                spec = attrs.evolve(TensorSpec.of(tensor, group), device=device)
                slot = StagedSlot(section=section, name=name, spec=spec, seeds=[])
                found.setdefault(id(module), []).append(slot)
    return found


def enter(
    load: Load,
    arrivals: Arrivals,
    members: Mapping[int, Unit],
    modules: Mapping[str, nn.Module],
    units: list[Unit],
    placed: dict[tuple[int, str, str], tuple[torch.Tensor, Staging]],
) -> None:
    """Enter the tensors of modules among those of a load, and watch them.

    Args:
        load: gets an entry for each.
        arrivals: watches them.
        members: the unit of each module, by id.
        modules: by qualified name.
        units: those of the modules.
        placed: the twin of what is staged, and its staging, by slot.
    """
    for name, module in modules.items():
        record = record_of(module)
        unit = members.get(id(module))
        for section, key, tensor in slots_of(module):
            gaps = _gaps_of(load, members, module, section, key, tensor)
            entry = load.by_tensor.get(id(tensor))
            if entry is not None:
                entry.names.append(join(name, key))
                entry.slots.append((module, section, key))
                continue
            _, staging = placed.get((id(module), section, key), (None, None))
            entry = Entry(
                names=[join(name, key)],
                slots=[(module, section, key)],
                tensor=tensor,
                ledger=RegionLedger(shape=tuple(tensor.shape)),
                gaps=gaps,
                required=isinstance(tensor, nn.Parameter)
                and not load.partial
                and not _seeded_whole(record, section, key),
                shared=_shared_of(load, record, section, key),
                staging=staging,
                sources={} if record is None else record.sources.get((section, key), {}),
            )
            arrivals.watch(entry)
            _note_optional(load, entry)
            load.entries.append(entry)
            load.by_tensor[id(tensor)] = entry
            if unit is not None:
                unit.entries.append(entry)
    ids = {id(module) for module in load.modules.values()}
    for unit in units:
        _find_reads(load, unit, ids)
        arrivals.guards.guard(unit)


def _gaps_of(
    load: Load,
    members: Mapping[int, Unit],
    module: nn.Module,
    section: str,
    name: str,
    tensor: torch.Tensor,
) -> list[Region] | None:
    """Return the regions that no checkpoint brings, ``None`` if nobody knows."""
    record = record_of(module)
    if load.initial:
        return None
    wanted = load.intake.wanted
    if wanted is not None:
        known = record or ModuleRecord()
        if id(module) not in members or (section, name) not in known.staged:
            return gaps_outside(known, section, name, tensor.shape, wanted)
    gaps = None if record is None else record.gaps.get((section, name))
    if gaps is None and load.intake.manifest is not None:
        if record is None and isinstance(tensor, nn.Parameter) and _was_added(load, module):
            return None
        gaps = [full_region(tensor.shape)]
    if wanted is None or record is None or not gaps:
        return gaps
    sources = record.sources.get((section, name), {})
    promised = [region for region, source in sources.items() if source in wanted]
    return without(tensor.shape, gaps, promised)


def _was_added(load: Load, module: nn.Module) -> bool:
    """Whether a module that no load knows is part of the model, and not what a hook made of it.

    What hooks have made is out of its place now, with all that is inside.
    """
    if not load.framework.requires_all:
        return False
    path = next(name for name, other in load.modules.items() if other is module)
    here = ""
    for part in path.split(".") if path else ():
        parent, here = load.modules.get(here), join(here, part)
        if parent is not None and parent._modules.get(part) is not load.modules.get(here):
            return False
    return True


def _shared_of(load: Load, record: ModuleRecord | None, section: str, name: str) -> SharedRegions:
    known = record.shared.get((section, name)) if record is not None else None
    return known if known is not None and not load.initial else SharedRegions()


def _seeded_whole(record: ModuleRecord | None, section: str, name: str) -> bool:
    """Whether the value that the tensor was constructed with is known."""
    slot = record.staged.get((section, name)) if record is not None else None
    return slot is not None and any(
        region == full_region(slot.spec.shape) for region, _ in slot.seeds
    )


def _note_optional(load: Load, entry: Entry) -> None:
    """Note the names that have come, and that a load may leave out all the same."""
    if load.partial:
        return  # what is left alone is in kernel format, and nothing of it is optional
    for region, name in entry.sources.items() if entry.gaps else ():
        if name is not None and any(meet(region, gap) for gap in entry.gaps or ()):
            load.intake.optional.add(name)


def _find_reads(load: Load, unit: Unit, ids: Collection[int]) -> None:
    """Enter what must be complete before the hooks of ``unit`` may run."""
    found = load.entries_of(unit.modules.values())
    for hook in unit.hooks:
        other = read_by(hook.module, hook.rule.role)
        known = [module for module in other if id(module) in ids]
        inside = load.entries_of((*hook.module.modules(), *known))
        hook.reads = list(inside.values())
        if hook.rule.role is Role.QUANT:
            found |= inside
    unit.reads = list(found.values())
    for entry in unit.reads:
        entry.readers.append(unit)
