"""What a load of a vLLM model must not begin under, asked in the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weightload.record import record_of, slots_of
from weightload.refusals import why_refused

__all__ = ["vetoes_of"]

Veto = Callable[[nn.Module], str | None]


def vetoes_of(worker: Any) -> list[Veto]:
    """Return the reasons not to begin that a worker can know, as callbacks of a session."""

    def asleep(model: nn.Module) -> str | None:
        if is_asleep(worker):
            return why_refused("asleep")
        return None

    def rearranged(model: nn.Module) -> str | None:
        state = getattr(worker.model_runner, "eplb_state", None)
        if state is not None and was_rearranged(state):
            return why_refused("rearranged")
        return None

    def draft_alone(model: nn.Module) -> str | None:
        target = worker.get_model() if model is draft_of(worker) else None
        if target is not None and any(map(is_repacked, shared_modules(target, model))):
            return why_refused("draft alone")
        return None

    return [asleep, rearranged, draft_alone]


def draft_of(worker: Any) -> nn.Module | None:
    """Return the draft model of a worker, if it has one."""
    find = getattr(worker, "get_draft_model", None)
    draft: nn.Module | None = find() if find is not None else None
    return draft


def shared_modules(one: nn.Module, other: nn.Module) -> list[nn.Module]:
    """Return the modules of ``one`` that are in ``other`` too, or have a tensor that is."""
    modules = {id(module) for module in other.modules()}
    tensors = {id(tensor) for module in other.modules() for *_, tensor in slots_of(module)}
    return [
        module
        for module in one.modules()
        if id(module) in modules or any(id(tensor) in tensors for *_, tensor in slots_of(module))
    ]


def is_repacked(module: nn.Module) -> bool:
    """Whether a hook changes tensors of ``module``, or nobody knows that it does not."""
    record = record_of(module)
    return hasattr(module, "quant_method") if record is None else bool(record.staged)


def is_asleep(worker: Any) -> bool:
    """Whether the weights of a worker are not in memory.

    vLLM keeps no flag for that on the worker: what it saved when it went to sleep is the sign,
    and the allocator's own state where there is one.
    """
    if getattr(worker, "_sleep_saved_buffers", None):
        return True
    return bool(getattr(worker, "_weightload_asleep", False))


def was_rearranged(state: Any) -> bool:
    """Whether load balancing has moved an expert since the model was loaded."""
    for model in getattr(state, "model_states", {}).values():
        placement = getattr(model, "physical_to_logical_map", None)
        if placement is None:
            continue
        count = int(placement.max()) + 1
        first = placement.new_tensor([slot % count for slot in range(placement.shape[-1])])
        if bool((placement != first).any()):
            return True
    return False
