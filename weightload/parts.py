"""Finds, after a load that was watched, the part of a model that needs more than copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weightload.entries import Entry, Load, join
from weightload.layer import Unit
from weightload.ledger import meet
from weightload.pieces import Pieced
from weightload.receipt import Names
from weightload.record import Renewal, read_by
from weightload.recorded import Copy, Part, Recorded, counts_of
from weightload.storage import look_of

__all__ = ["find_part", "find_renewals"]


def find_part(
    units: Sequence[Unit],
    members: Mapping[int, Unit],
    load: Load,
    recorded: Recorded,
    entries: Mapping[str, Entry],
    *,
    in_pieces: bool = False,
) -> Part:
    """Return the part of a model that has to be prepared for every load.

    A unit is left out if its hooks have shown, first when the model was made and again in this load,
    that they have nothing to do with what is loaded: they used no tensor that
    anything arrived in and none that another hook made, and all that they put back, renewed or
    overwrote was the same as before, value for value.

    Args:
        units: of the whole model, as this load leaves them.
        members: the unit of each module, by id.
        load: what the load shared; it has finished.
        recorded: the plan of this load.
        entries: by qualified name of the tensor.
        in_pieces: leave out as well what is processed in pieces, and say how.
    """
    if load.intake.optional or load.intake.unclaimed or not recorded.skeleton.plain:
        return Part(whole=True)
    if not all(_routed(recorded, name, entries) for name in recorded.plan.sources):
        return Part(whole=True)
    names = {id(module): name for name, module in load.modules.items()}
    split, pieced = set(), {}
    for unit in units if in_pieces else ():
        found = _pieced(unit, recorded, entries, names)
        pieced.update(found)
        split |= {id(unit)} if found else set()
    busy = [unit for unit in units if id(unit) not in split and not _idle(unit)]
    inside = _around(busy, members, names)
    if inside is None:
        return Part(whole=True)
    inner = {names[key] for key in inside if key in names}
    pieced = {place: one for place, one in pieced.items() if one.module not in inner}
    for entry in load.entries:
        if any(id(module) in inside for module, _, _ in entry.slots):
            if not all(id(module) in inside for module, _, _ in entry.slots):
                return Part(whole=True)
        elif entry.touched and entry.names[0] not in pieced and not _only_copied(entry):
            return Part(whole=True)
    copies = {name: _copies(recorded, name) for name in recorded.plan.writes}
    sources = {
        name
        for name, mine in copies.items()
        for copy in mine
        if any(id(module) in inside for module, _, _ in entries[copy.place].slots)
    }
    if any(copy.place in pieced for name in sources for copy in copies[name]):
        return Part(whole=True)
    straight = copies.keys() - sources
    cut = {name for name in straight if any(copy.place in pieced for copy in copies[name])}
    elsewhere = {
        copy.place: copy.loader
        for name in straight
        for copy in copies[name]
        if copy.place not in pieced
    }
    return Part(
        whole=False,
        modules=frozenset(names[key] for key in inside),
        sources=frozenset(sources),
        runs=dict(_runs(recorded, {name: copies[name] for name in straight - cut})),
        needed=frozenset(copies),
        counts=counts_of([recorded.routes.get(name) for name in straight], pieced),
        places=[recorded.skeleton.places[place] for place in elsewhere],
        loaders=[*elsewhere.values()],
        spared=sum(
            id(hook.module) not in inside and id(unit) not in split
            for unit in units
            for hook in unit.hooks
        ),
        consumed=Names.of(copies.keys()),
        pieced=pieced,
        cut=frozenset(cut),
    )


def find_renewals(units: Sequence[Unit]) -> Iterator[tuple[str, Renewal]]:
    """Yield name and :attr:`Unit.renews` of the units whose hooks have used only what was theirs."""
    for unit in units:
        used = [entry for hook in unit.hooks for entry in hook.used.values()]
        own = all(any(entry is one for one in unit.entries) for entry in used)
        if unit.renews is not None and own and not unit.hooks[0].changed:
            yield unit.name, unit.renews


def _runs(
    recorded: Recorded, copies: Mapping[str, Sequence[Copy]]
) -> Iterator[tuple[str, tuple[tuple[int, int, int, int], ...]]]:
    places = recorded.skeleton.places
    for name, mine in copies.items():
        runs = [(places[c.place], c.to, c.start, c.nbytes) for c in mine if c.start is not None]
        if len(runs) == len(mine):
            yield name, tuple(runs)


def _idle(unit: Unit) -> bool:
    if any(entry.touched and entry.staging is not None for entry in unit.entries):
        return False
    used = [entry for hook in unit.hooks for entry in hook.used.values()]
    return unit.unchanged and not any(entry is None or entry.touched for entry in used)


def _pieced(
    unit: Unit,
    recorded: Recorded,
    entries: Mapping[str, Entry],
    names: Mapping[int, str],
) -> dict[str, Pieced]:
    """Return, by qualified name, the tensors of a unit if all that it needs is done in pieces."""
    slots = {join(names[id(slot[0])], slot[2]): slot for slot in unit.pieced}
    if not slots or not {slot for slot, _ in unit.hosts}.issuperset(unit.pieced):
        return {}
    mine = {id(entries[place]) for place in slots}
    used = [entry for hook in unit.hooks for entry in hook.used.values()]
    if any(entry is None or (entry.touched and id(entry) not in mine) for entry in used):
        return {}
    specs = {(module, slot.section, slot.name): slot.spec for module, slot in unit.slots}
    found = {}
    for place, (module, section, name) in slots.items():
        live = vars(module)[section][name]
        same = specs[module, section, name].look == look_of(live)[1:]
        if not (same and live.is_contiguous() and live.numel()) or live.is_inference():
            return {}
        if not _only_filled(entries[place]):
            return {}
        at = recorded.skeleton.places[place]
        found[place] = Pieced.of(names[id(module)], name, at, live)
    return found


def _only_filled(entry: Entry) -> bool:
    """Whether each element of a tensor came once, under its own name, and from one source."""
    shared = entry.shared
    return (
        entry.complete
        and len(entry.names) == 1
        and not (entry.gaps or entry.kept)
        and not (shared.names or shared.overlaps or shared.ordered)
    )


def _around(
    busy: Sequence[Unit], members: Mapping[int, Unit], names: Mapping[int, str]
) -> set[int] | None:
    """Return by id the modules of units, with all that their hooks may read; ``None`` for all."""
    inside: set[int] = set()
    queue = list(busy)
    while queue:
        unit = queue.pop()
        near = list(unit.modules.values())
        for hook in unit.hooks:
            near += [*hook.module.modules(), *read_by(hook.module, hook.rule.role)]
        for module in near:
            if names.get(id(module), "") == "":
                return None  # the root, or what is not in the tree
            if id(module) not in inside:
                inside.add(id(module))
                other = members.get(id(module))
                if other is not None:
                    queue.append(other)
    return inside


def _only_copied(entry: Entry) -> bool:
    """Whether a tensor is filled where it is, by copies of whole parts and by nothing else."""
    shared = entry.shared
    return (
        entry.staging is None
        and not entry.kept
        and not (shared.names or shared.overlaps or shared.ordered)
    )


def _copies(recorded: Recorded, name: str) -> Sequence[Copy]:
    route = recorded.routes.get(name)
    return route.copies if route is not None else ()


def _routed(recorded: Recorded, name: str, entries: Mapping[str, Entry]) -> bool:
    """Whether a name goes to its places by copies, wherever it goes."""
    route = recorded.route(name, entries)
    if route is None:
        return False
    places = [(copy, entries[copy.place]) for copy in route.copies]
    return not any(
        entry.expected or any(meet(copy.region, gap) for gap in entry.gaps or ())
        for copy, entry in places
    )
