"""Learns about models that vLLM loaded itself, without a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from weightload.record import record_of

if TYPE_CHECKING:
    from weightload.vllm.framework import VllmFramework

__all__ = ["adopt_native"]


def adopt_native(framework: VllmFramework, model: nn.Module) -> None:
    """Make the records of a model that was loaded natively."""
    if record_of(model) is not None:
        return
