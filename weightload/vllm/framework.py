"""vLLM as a framework: what its modules need, and the state that its hooks run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.utils.torch_utils import set_default_torch_dtype

from weightload.framework import Framework
from weightload.registry import ModuleRegistry, ModuleRule, Role
from weightload.vllm import compat
from weightload.vllm.native import adopt_native

__all__ = ["VllmFramework", "vllm_registry"]

vllm_registry = ModuleRegistry(
    fallback=ModuleRule(
        role=Role.PLAIN,
        reason="vLLM calls a hook of a module only for attention layers and the whole model",
    )
)
"""What vLLM's modules need. Register the rule for a new attention type here."""


def attention_rules(registry: ModuleRegistry, process: Callable[[Any], object]) -> None:
    """Register vLLM's attention layers, which are processed late if they have the hook.

    Args:
        registry: where.
        process: the hook's caller.
    """
    from vllm.model_executor.layers.attention import MMEncoderAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    rule = ModuleRule(
        role=Role.ATTENTION,
        process=process,
        when=compat.is_late_attention,
        reason="vLLM processes attention layers after all others",
    )
    for cls in (AttentionLayerBase, MMEncoderAttention):
        registry.register(cls, rule)


class VllmFramework(Framework):
    """The adapter for one model of one vLLM engine.

    Args:
        vllm_config: the engine's configuration.
        model_config: that of this model; a draft model has its own.
        device: where the model is.
        registry: rules; those of vLLM by default.
        native: whether vLLM has loaded the model already, without a session.
    """

    requires_all = False
    advice = (
        "The model was not loaded through weightload, so values that no checkpoint brings are "
        "unknown. Start the engine with load_format='weightload' to get them known."
    )

    def __init__(
        self,
        vllm_config: Any,
        model_config: Any,
        device: torch.device,
        registry: ModuleRegistry | None = None,
        native: bool = False,
    ) -> None:
        rules = (vllm_registry if registry is None else registry).copy()
        super().__init__(rules)
        self.vllm_config = vllm_config
        self.model_config = model_config
        self.device = device
        self.native = native
        if torch.distributed.is_initialized():
            self.owner = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rules.register(
            QuantizeMethodBase,
            ModuleRule(
                role=Role.QUANT,
                process=self._process_quant,
                reason="vLLM processes every module whose quant_method is one",
                pieces=compat.processed_in_pieces,
            ),
            strategy=True,
            replace=True,
        )
        attention_rules(rules, self._process_attention)

    def _process_quant(self, module: nn.Module) -> None:
        method: Any = module.quant_method
        with compat.device_context(module, self.device, method):
            method.process_weights_after_loading(module)
        compat.update_tensor_parallel_state(module)
        compat.release_memory(self.device)

    def _process_attention(self, module: nn.Module) -> None:
        with compat.device_context(module, self.device, None):
            module.process_weights_after_loading(self.model_config.dtype)  # type: ignore[operator]

    @contextmanager
    def ambient(self, model: nn.Module) -> Iterator[None]:
        """Enter vLLM's configuration, the model's dtype and its device, without gradients."""
        # A device context costs a little at every call of torch; on the CPU it changes nothing.
        place = nullcontext() if self.device.type == "cpu" else self.device
        with (
            set_current_vllm_config(self.vllm_config),
            set_default_torch_dtype(self.model_config.dtype),
            place,
            torch.no_grad(),
        ):
            yield

    def adopt(self, model: nn.Module) -> None:
        """Learn about a model that vLLM loaded itself from what vLLM recorded."""
        adopt_native(self, model)

    def captured(self, model: nn.Module) -> bool:
        """Whether the engine captures graphs."""
        return compat.captures_graphs(self.vllm_config, self.device)

    def before_processing(self, model: nn.Module) -> None:
        """Tie word embeddings again that turned out to be equal."""
        compat.retie_word_embeddings(model, self.model_config)

    def model_rule(self, model: nn.Module) -> ModuleRule | None:
        """Return the rule for the hook that some models have as a whole."""
        hook = getattr(model, "process_weights_after_loading", None)
        if not callable(hook) or not compat.calls_model_hook():
            return None
        return ModuleRule(
            role=Role.DERIVED,
            process=lambda module: module.process_weights_after_loading(),
            reason="vLLM calls it last",
        )

    def after_processing(self, model: nn.Module) -> None:
        """Do what vLLM's own pass does at its end."""
        compat.process_hpc_modules(model)
        compat.set_torchao_attributes(model, self.model_config)
