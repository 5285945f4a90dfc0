"""Finds what has to be processed, and refuses modules that could not be loaded again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from weightload.entries import join
from weightload.errors import UnsupportedError, name_some
from weightload.framework import Framework
from weightload.layer import Hook
from weightload.record import Change, ModuleRecord, made_by_hooks, record_of, slots_of
from weightload.registry import Role

__all__ = ["find_hooks", "order_of", "refuse_wrapped"]

_ORDER = list(Role)


def order_of(hook: Hook) -> tuple[bool, int]:
    """Return what hooks are sorted by: that of the model as a whole comes last."""
    return hook.last, _ORDER.index(hook.rule.role)


def find_hooks(
    modules: Mapping[str, nn.Module], framework: Framework, *, initial: bool
) -> list[Hook]:
    """Return the hooks of modules, in order of processing.

    Args:
        modules: by qualified name.
        framework: what they belong to.
        initial: whether this is the load that makes the model.

    Raises:
        UnsupportedError: a module is a copy of a loaded one, or was not loaded with the others; or
            one was processed, and its rule or a module that its hook took out, is not found.
        UnclassifiedModuleError: a module has a hook and no rule.
    """
    for name, module in modules.items():
        record = record_of(module)
        if record is not None and record.copied:
            raise UnsupportedError(
                f"Module {name!r} is a copy of a loaded module: what its first processing did "
                f"belongs to the original. Load the original, or make the copy before the "
                f"first load.",
                module=name,
            )
    with _classes_of_before(modules):
        hooks = [
            Hook(name=name, module=module, rule=rule)
            for name, module in modules.items()
            for rule in framework.registry.rules_for(module, name)
        ]
        hooks.sort(key=order_of)
        rule = framework.model_rule(modules[""]) if "" in modules else None
    if rule is not None:
        hooks.append(Hook(name="", module=modules[""], rule=rule, last=True))
    if not initial:
        _refuse_unrecorded(hooks)
        _refuse_unruled(modules, hooks)
    _refuse_removed(modules)
    return hooks


def _changes_of(module: nn.Module) -> Iterator[Change]:
    """Yield what the hooks of ``module`` changed at their first run, in their order."""
    record = record_of(module) or ModuleRecord()
    for role in Role:
        yield from record.steps.get(role, ())


@contextmanager
def _classes_of_before(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Give objects whose hooks changed their class the one that rules are registered for."""
    now: dict[int, tuple[Any, type]] = {}
    try:
        for change in (one for module in modules.values() for one in _changes_of(module)):
            if change.kind is not None and id(change.owner) not in now:
                now[id(change.owner)] = change.owner, type(change.owner)
                change.owner.__class__ = change.kind
        yield
    finally:
        for owner, kind in now.values():
            owner.__class__ = kind


def _refuse_unruled(modules: Mapping[str, nn.Module], hooks: list[Hook]) -> None:
    """Refuse modules whose hook ran when they were loaded, and would not be run now."""
    known = {(id(hook.module), hook.rule.role) for hook in hooks}
    lost = [
        (name, module, role)
        for name, module in modules.items()
        for role in (record_of(module) or ModuleRecord()).steps
        if (id(module), role) not in known
    ]
    if lost:
        texts = name_some(
            f"{name} ({type(module).__qualname__}, {r.value})" for name, module, r in lost
        )
        raise UnsupportedError(
            f"Modules that were processed when this model was made have no rule any more: {texts}. "
            f"Without their hooks they would compute with unprocessed weights. A hook, or something "
            f"else since, has given them another type or another strategy object: register that "
            f"type with the same rule, or let the hook leave it as it was.",
            modules=[name for name, _, _ in lost[:10]],
        )


def _refuse_removed(modules: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose hook took modules with weights out of the model: nobody can name them."""
    present = set(map(id, modules.values()))
    gone = []
    for name, module in modules.items():
        changes = [one for one in _changes_of(module) if isinstance(one.owner, nn.Module)]
        for change in changes:
            for key, child in change.entries.get("_modules", {}).items():
                inside = child.modules() if isinstance(child, nn.Module) else ()
                absent = [one for one in inside if id(one) not in present]
                if any(True for one in absent for _ in slots_of(one)):
                    gone.append((name, f"{key} ({type(child).__qualname__}) by {name!r}"))
    if gone:
        texts = name_some(text for _, text in gone)
        raise UnsupportedError(
            f"Hooks took modules that hold weights out of the model: {texts}. A reload cannot bring "
            f"weights to what the model does not hold any more. Let the hook keep the module, under "
            f"its name, and make forward pass it by.",
            modules=[name for name, _ in gone[:10]],
        )


def _refuse_unrecorded(hooks: list[Hook]) -> None:
    strange = [hook for hook in hooks if hook.first]
    if strange:
        names = name_some(f"{hook.name} ({hook.rule.role.value})" for hook in strange)
        raise UnsupportedError(
            f"Modules that have to be processed were not part of the load that made this "
            f"model: {names}. What their hooks did is not known, so it cannot be undone. Load "
            f"them through a session of their own first.",
            modules=[hook.name for hook in strange[:10]],
        )


def refuse_wrapped(modules: Mapping[str, nn.Module]) -> None:
    """Refuse to load into tensor subclasses that hold their data in tensors inside them.

    Raises:
        UnsupportedError: there are such.
    """
    made = {slot for module in modules.values() for slot in made_by_hooks(module)}
    found = []
    for name, module in modules.items():
        record = record_of(module) or ModuleRecord()
        for section, key, tensor in slots_of(module):
            slot = record.staged.get((section, key))
            cls = type(tensor) if slot is None else slot.spec.cls
            brought = key not in module._non_persistent_buffers_set
            brought = brought and (id(module), section, key) not in made
            if brought and hasattr(cls, "__tensor_flatten__"):
                found.append(f"{join(name, key)} ({cls.__qualname__})")
    if found:
        raise UnsupportedError(
            f"Loaders would have to write into tensor subclasses that hold their data in other "
            f"tensors, and such writes cannot be seen: {name_some(found)}. Construct the model "
            f"with plain tensors, and let a hook wrap them.",
            parameters=found[:10],
        )
