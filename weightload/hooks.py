"""Finds what has to be processed, and refuses modules that could not be loaded again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weightload.entries import join
from weightload.errors import UnsupportedError, name_some
from weightload.framework import Framework
from weightload.layer import Hook
from weightload.record import ModuleRecord, made_by_hooks, record_of, slots_of
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
        UnsupportedError: a module is a copy of a loaded one, or was not loaded with the others.
        UnclassifiedModuleError: a module has a hook and no rule.
    """
    hooks = []
    for name, module in modules.items():
        record = record_of(module)
        if record is not None and record.copied:
            raise UnsupportedError(
                f"Module {name!r} is a copy of a loaded module: what its first processing did "
                f"belongs to the original. Load the original, or make the copy before the "
                f"first load.",
                module=name,
            )
        hooks += [
            Hook(name=name, module=module, rule=rule)
            for rule in framework.registry.rules_for(module, name)
        ]
    hooks.sort(key=order_of)
    rule = framework.model_rule(modules[""]) if "" in modules else None
    if rule is not None:
        hooks.append(Hook(name="", module=modules[""], rule=rule, last=True))
    if not initial:
        _refuse_unrecorded(hooks)
    return hooks


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
