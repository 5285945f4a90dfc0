"""What a load of a vLLM model must not begin under, asked in the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["vetoes_of"]

Veto = Callable[[nn.Module], str | None]


def vetoes_of(worker: Any) -> list[Veto]:
    """Return the reasons not to begin that a worker can know, as callbacks of a session."""

    def asleep(model: nn.Module) -> str | None:
        if is_asleep(worker):
            return "The engine is asleep and its weights are not mapped; wake it up first."
        return None

    def rearranged(model: nn.Module) -> str | None:
        state = getattr(worker.model_runner, "eplb_state", None)
        if state is not None and was_rearranged(state):
            return (
                "Expert placement has been rearranged by load balancing, so checkpoint names no "
                "longer mean the slots that they meant at the first load; start the engine again, "
                "or switch load balancing off."
            )
        return None

    return [asleep, rearranged]


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
