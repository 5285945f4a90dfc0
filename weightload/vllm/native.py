"""Learns about models that vLLM loaded itself, without a session.

What the hooks of such a model did was not recorded. It is worked out afterwards by comparison
with a second model of the same construction, built on the meta device, whose hooks never ran:
what only the live model has was added by hooks, and flags and empty places go back to what they
are in the second model. vLLM's own record of the construction gives the checkpoint format.

Values that no checkpoint brings cannot be worked out unless the constructor fills a whole tensor
with one number, which is observed while the second model is built.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from weightload.errors import UnsupportedError
from weightload.ledger import full_region
from weightload.record import (
    MISSING,
    SECTIONS,
    Change,
    StagedSlot,
    make_record,
    record_of,
    slots_of,
)
from weightload.recording import scope_of
from weightload.registry import Role
from weightload.storage import TensorSpec, new_group, storage_key
from weightload.vllm import compat
from weightload.vllm.construction import ConstructedValues

if TYPE_CHECKING:
    from weightload.vllm.framework import VllmFramework

__all__ = ["adopt_native"]

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def adopt_native(framework: VllmFramework, model: nn.Module) -> None:
    """Make the records of a model that was loaded natively.

    Raises:
        UnsupportedError: the model is not what its configuration constructs, so nothing can be
            worked out; start the engine with ``load_format='weightload'``.
    """
    if record_of(model) is not None or not framework.native:
        return
    twin, fills = _construct(framework, model)
    partners = dict(twin.named_modules())
    found: list[_Inference] = []
    for name, module in model.named_modules():
        if record_of(module) is not None:
            continue  # a draft's, known from its target
        rules = framework.registry.rules_for(module, name)
        partner = partners.get(name)
        if partner is None or type(partner) is not type(module):
            if not rules:
                continue
            raise UnsupportedError(
                f"Module {name!r} is {type(module).__qualname__} in the live model and "
                f"{type(partner).__qualname__ if partner is not None else 'missing'} in a newly "
                f"constructed one. {framework.advice}",
                module=name,
            )
        if rules:
            roles = [rule.role for rule in rules]
            found.append(_Inference(module=module, twin=partner, roles=roles, fills=fills))
    if framework.model_rule(model) is not None:
        raise UnsupportedError(
            f"{type(model).__qualname__} has a hook of the model as a whole, and what it changed "
            f"is not known. {framework.advice}"
        )
    for inference in found:
        inference.enter(framework)
    _unite_views(framework, model, twin)
    _unite_shared(model)
    root = make_record(model)
    root.framework = framework
    root.inferred = True


def _construct(
    framework: VllmFramework, model: nn.Module
) -> tuple[nn.Module, dict[int, float | int]]:
    """Build the model once more on meta, apart from the engine's own registers."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(framework.vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.quant_config = copy.copy(config.quant_config)  # a model class maps the names in it
    empties: dict[str, Any] = {
        "static_forward_context": {},
        "static_all_moe_layers": [],
        "enabled_custom_ops": Counter(),
        "disabled_custom_ops": Counter(),
    }
    for name, empty in empties.items():
        if hasattr(config.compilation_config, name):
            setattr(config.compilation_config, name, empty)
    observer = ConstructedValues()
    try:
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(framework.model_config.dtype),
            torch.device("meta"),
            observer.watching(),
        ):
            twin: nn.Module = initialize_model(
                vllm_config=config, model_config=framework.model_config
            )
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__qualname__} cannot be constructed on the meta device "
            f"({type(error).__name__}: {error}). {framework.advice}"
        ) from error
    return twin, observer.values


@attrs.frozen(kw_only=True)
class _Inference:
    """What the hooks of one module must have done, seen from its newly constructed twin."""

    module: nn.Module
    twin: nn.Module
    roles: list[Role]
    fills: dict[int, float | int]

    def enter(self, framework: VllmFramework) -> None:
        """Write it into the module's record."""
        changes = [
            change
            for live, pristine in self._owners(framework)
            if (change := self._change(live, pristine)) is not None
        ]
        record = make_record(self.module)
        record.inferred = True
        for role in self.roles:
            record.steps[role] = []
        record.steps[self.roles[0]] = changes
        recorded = compat.recorded_format(self.module) or {}
        for section in SECTIONS:
            for name, pristine in vars(self.twin)[section].items():
                if pristine is not None:
                    self._stage(framework, section, name, pristine, recorded)

    def _owners(self, framework: VllmFramework) -> Iterator[tuple[Any, Any]]:
        """Yield the module, and its strategy objects, each with its partner."""
        queue: list[tuple[Any, Any]] = [(self.module, self.twin)]
        strategies = framework.registry.strategies
        mine = {id(one) for one in scope_of(self.module, framework.registry)}
        seen: set[int] = set()
        while queue:
            live, pristine = queue.pop()
            if id(live) in seen:
                continue
            seen.add(id(live))
            yield live, pristine
            for name, value in tuple(vars(live).items()):
                partner = vars(pristine).get(name)
                if id(value) in mine and type(partner) is type(value):
                    queue.append((value, partner))
            for name in strategies:
                value = vars(live).get("_modules", {}).get(name)
                partner = vars(pristine).get("_modules", {}).get(name)
                if value is not None and type(partner) is type(value):
                    queue.append((value, partner))

    def _change(self, live: Any, pristine: Any) -> Change | None:
        change = Change(owner=live)
        late = Role.ATTENTION in self.roles
        for name, value in vars(live).items():
            if name.startswith("_weightload") or name in (*SECTIONS, "_modules", "training"):
                continue
            before = vars(pristine).get(name, MISSING)
            if before is MISSING:
                change.attributes[name] = MISSING
            elif isinstance(before, _PLAIN) and not late and _differs(before, value):
                change.attributes[name] = before
        for name, before in vars(pristine).items():
            if name not in vars(live) and isinstance(before, _PLAIN):
                change.attributes[name] = before
        if isinstance(live, nn.Module):
            for section in SECTIONS:
                before = vars(pristine)[section]
                for name, tensor in vars(live)[section].items():
                    if tensor is not None and before.get(name) is None:
                        was = before.get(name, MISSING)
                        change.entries.setdefault(section, {})[name] = was
        return change if change.attributes or change.entries else None

    def _stage(
        self,
        framework: VllmFramework,
        section: str,
        name: str,
        pristine: torch.Tensor,
        recorded: dict[tuple[str, str], torch.Tensor],
    ) -> None:
        live = vars(self.module)[section].get(name)
        if section == "_buffers" and live is not None and _same_form(live, pristine):
            return  # not loaded into by default, and the live value is the constructor's
        source = recorded.get((section, name), pristine)
        spec = attrs.evolve(TensorSpec.of(source), device=framework.device, group=new_group())
        attributes = {
            key: _of_live(value, self.twin, self.module) for key, value in spec.attributes.items()
        }
        seeds = []
        key = storage_key(pristine)
        if key in self.fills:
            value = torch.tensor(self.fills[key], dtype=spec.dtype, device=spec.device)
            seeds = [(full_region(spec.shape), value.expand(spec.shape))]
        make_record(self.module).staged[section, name] = StagedSlot(
            section=section,
            name=name,
            spec=attrs.evolve(spec, attributes=attributes),
            seeds=seeds,
        )


def _differs(before: Any, now: Any) -> bool:
    return type(before) is not type(now) or before != now


def _same_form(live: torch.Tensor, pristine: torch.Tensor) -> bool:
    return live.shape == pristine.shape and live.dtype == pristine.dtype


def _of_live(value: Any, twin: nn.Module, live: nn.Module) -> Any:
    """Bind the methods of the twin, such as weight loaders, to the live module."""
    if isinstance(value, types.MethodType) and value.__self__ is twin:
        return types.MethodType(value.__func__, live)
    if isinstance(value, functools.partial):
        return functools.partial(_of_live(value.func, twin, live), *value.args, **value.keywords)
    return value


def _unite_views(framework: VllmFramework, model: nn.Module, twin: nn.Module) -> None:
    """Stage every slot whose tensor was constructed as a view of a staged one, together.

    A hook that replaces a parameter cuts it off from the buffers that were views of it.
    """
    partners = dict(model.named_modules())
    views: dict[int, list[tuple[nn.Module, nn.Module, str, str, torch.Tensor]]] = {}
    for path, pristine in twin.named_modules():
        live = partners.get(path)
        for section, name, tensor in slots_of(pristine):
            key = storage_key(tensor)
            if live is not None and key is not None:
                views.setdefault(key, []).append((live, pristine, section, name, tensor))
    for members in views.values():
        records = [record_of(live) for live, *_ in members]
        if len(members) == 1 or not any(
            record is not None and (section, name) in record.staged
            for record, (_, _, section, name, _) in zip(records, members, strict=True)
        ):
            continue
        group = new_group()
        for live, pristine, section, name, tensor in members:
            spec = attrs.evolve(TensorSpec.of(tensor, group), device=framework.device)
            attributes = {
                key: _of_live(value, pristine, live) for key, value in spec.attributes.items()
            }
            record = make_record(live)
            known = record.staged.get((section, name))
            record.staged[section, name] = StagedSlot(
                section=section,
                name=name,
                spec=attrs.evolve(spec, attributes=attributes),
                seeds=[] if known is None else known.seeds,
            )


def _unite_shared(model: nn.Module) -> None:
    """Let slots that hold one live tensor share one twin."""
    groups: dict[int, int] = {}
    for module in model.modules():
        record = record_of(module)
        for (section, name), slot in dict(record.staged if record is not None else {}).items():
            live = vars(module)[section].get(name)
            if record is None or live is None or live.numel() == 0:
                continue
            group = groups.setdefault(id(live), slot.spec.group)
            record.staged[section, name] = attrs.evolve(
                slot, spec=attrs.evolve(slot.spec, group=group)
            )
