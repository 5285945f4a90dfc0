"""Finds, and uses, the live memory in which new values may be staged and made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from weightload.births import Room
from weightload.entries import Load, join
from weightload.layer import Hook, Unit
from weightload.recorded import Recorded
from weightload.registry import Role
from weightload.skeleton import Body
from weightload.storage import Look, look_of, storage_key

__all__ = ["find_memory", "use_memory"]


def find_memory(
    units: Sequence[Unit], load: Load
) -> tuple[dict[str, tuple[bool, Look]], dict[tuple[str, Role], dict[Room, tuple[str, str, str]]]]:
    """Return :attr:`Recorded.hosts` and :attr:`Recorded.landings`.

    Hooks have shown, in the load that has just finished, that they leave the new value in the memory
    that loaders wrote to, because they change it there or only wrap it anew; or that they write it
    into a tensor that they make. Its form was that of the live tensor.

    Args:
        units: of the whole model, as this load leaves them.
        load: what the load shared; it has finished.
    """
    names = {id(module): name for name, module in load.modules.items()}

    hosts = {
        join(names[id(slot[0])], slot[2]): (settles, look_of(vars(slot[0])[slot[1]][slot[2]]))
        for unit in units
        for slot, settles in unit.hosts
    }
    landings = {
        (hook.name, hook.rule.role): {
            at: (names[id(slot[0])], *slot[1:]) for at, slot in hook.landings.items()
        }
        for unit in units
        for hook in unit.hooks
        if hook.landings
    }
    return hosts, landings


def use_memory(
    load: Load,
    hooks: Sequence[Hook],
    members: Mapping[int, Unit],
    recorded: Recorded,
    body: Body,
) -> None:
    """Stage and process in live memory what is known to end there.

    What was found out holds as long as a live tensor looks into its memory as it did, and is
    alone there: somebody may have given it other memory since.

    Args:
        load: what is about to begin.
        hooks: of its units.
        members: the unit of each module, by id.
        recorded: a plan of the model that holds now.
        body: what the whole model consists of.
    """
    if not recorded.hosts and not recorded.landings:
        return
    looking = Counter(map(storage_key, body.tensors))
    for entry in load.entries:
        staging, (module, section, name) = entry.staging, entry.slots[0]
        known = recorded.hosts.get(entry.names[0])
        if staging is None or staging.allocated or known is None:
            continue
        if not members[id(module)].staged:
            continue  # it is done
        live = members[id(module)].live_tensor(module, section, name)
        settles, look = known
        if looking[storage_key(live)] == 1 and look_of(live) == look:
            staging.host, staging.settles = live, settles
    for hook in hooks:
        landings = recorded.landings.get((hook.name, hook.rule.role), {})
        for at, (path, section, name) in landings.items():
            unit = members.get(id(hook.module))
            if unit is None or not unit.staged or path not in load.modules:
                continue
            live = unit.live_tensor(load.modules[path], section, name)
            if looking[storage_key(live)] == 1:
                hook.landings[at] = load.modules[path], section, name
