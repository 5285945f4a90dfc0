"""Which parts of a model a load of some names only has to process, and whether that can be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from weightload.errors import IncompleteLoadError, UnsupportedError, name_some
from weightload.layer import Unit
from weightload.ledger import Region, uncovered
from weightload.record import ModuleRecord, read_by, record_of
from weightload.registry import Role

__all__ = ["gaps_outside", "names_of", "select_units"]


def names_of(record: ModuleRecord, section: str, name: str) -> set[str]:
    """Return the source names that filled one tensor in the last complete load.

    Raises:
        UnsupportedError: the model's loaders collect what they get before they write it, so that
            nobody knows.
    """
    writers = record.sources.get((section, name), {}).values()
    shared = record.shared.get((section, name))
    found = {writer for writer in writers if writer is not None}
    if len(found) < len(set(writers)):
        raise UnsupportedError(
            f"The model's loaders computed what they wrote into {name!r} from tensors that they "
            f"had collected, so nobody knows which names fill it. Load everything."
        )
    return found | (shared.names if shared is not None else set())


def gaps_outside(
    record: ModuleRecord, section: str, name: str, shape: Iterable[int], wanted: frozenset[str]
) -> list[Region]:
    """Return the regions of a tensor that the names in ``wanted`` do not fill."""
    sources = record.sources.get((section, name), {})
    shared = record.shared.get((section, name))
    others = shared.names if shared is not None else set()
    filled = [
        region
        for region, writer in sources.items()
        if writer in wanted or (writer in others and others & wanted)
    ]
    return uncovered(tuple(shape), filled)


def select_units(
    modules: Mapping[str, nn.Module], units: list[Unit], wanted: frozenset[str]
) -> list[Unit]:
    """Return the units that a load of ``wanted`` changes.

    A unit is changed if one of its tensors is filled, or one in a module that its hooks read. What
    hooks of derived state read may be anywhere, so they always run.

    Raises:
        IncompleteLoadError: what is packed together is wanted in part only; nothing has been
            written.
        UnsupportedError: nobody knows which names fill a tensor.
    """
    needed: set[str] = set()
    touched: set[int] = set()
    for module in modules.values():
        record = record_of(module) or ModuleRecord()
        for section, name in record.sources:
            if names_of(record, section, name) & wanted:
                touched.add(id(module))
                shared = record.shared.get((section, name))
                if shared is not None and shared.names & wanted:
                    needed |= shared.names
    chosen: dict[int, Unit] = {}
    while True:
        fresh = [unit for unit in units if id(unit) not in chosen and _reads(unit, touched)]
        if not fresh:
            break
        for unit in fresh:
            chosen[id(unit)] = unit
            packed = [
                *unit.modules.values(),
                *(
                    inner
                    for hook in unit.hooks
                    if hook.rule.role is Role.QUANT
                    for inner in hook.module.modules()
                ),
            ]
            touched |= {id(module) for module in packed}
            for module in packed:
                record = record_of(module) or ModuleRecord()
                for section, name in record.staged:
                    needed |= names_of(record, section, name)
    missing = sorted(needed - wanted)
    if missing:
        raise IncompleteLoadError(
            f"The scope splits what is processed together: it needs {name_some(missing)} as well. "
            f"Name them too, or leave the others of the same layer out.",
            missing=missing[:10],
            missing_count=len(missing),
        )
    return [unit for unit in units if id(unit) in chosen]


def _reads(unit: Unit, touched: set[int]) -> bool:
    if any(hook.rule.role is Role.DERIVED for hook in unit.hooks):
        return True
    read: list[nn.Module] = list(unit.modules.values())
    for hook in unit.hooks:
        read += hook.module.modules()
        read += read_by(hook.module, hook.rule.role)
    return any(id(module) in touched for module in read)
