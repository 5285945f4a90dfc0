"""The load format ``weightload``: vLLM's own loaders, with a session around the initial load."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.utils.torch_utils import set_default_torch_dtype

from weightload.errors import UnsupportedError
from weightload.session import WeightLoadSession
from weightload.vllm import compat
from weightload.vllm.construction import ConstructedValues
from weightload.vllm.framework import VllmFramework

__all__ = ["LOAD_FORMAT", "WeightloadModelLoader"]

LOAD_FORMAT = "weightload"


@register_model_loader(LOAD_FORMAT)
class WeightloadModelLoader(BaseModelLoader):
    """Wraps one of vLLM's loaders: ``model_loader_extra_config={"inner": "auto"}``.

    Source, name mapping and transport stay those of the inner loader; every other key of the
    extra config is handed to it. The initial load goes through a :class:`WeightLoadSession`.

    Raises:
        UnsupportedError: the inner loader does more than to load weights, and cannot be wrapped.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        name = str(extra.pop("inner", "auto")).lower()
        if name == LOAD_FORMAT:
            raise UnsupportedError("The inner loader of 'weightload' cannot be itself.")
        inner_config = _replaced(load_config, load_format=name, model_loader_extra_config=extra)
        self.inner: Any = get_model_loader(inner_config)
        if type(self.inner).load_model is not BaseModelLoader.load_model:
            raise UnsupportedError(
                f"Load format {name!r} ({type(self.inner).__name__}) builds and processes the "
                f"model itself, so a session cannot own its initial load. Use another inner "
                f"format, such as 'auto', or load natively."
            )

    def download_model(self, model_config: Any) -> None:
        """As the inner loader does."""
        self.inner.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """As the inner loader does."""
        self.inner.load_weights(model, model_config)

    def get_all_weights(
        self, model_config: Any, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield every tensor of a checkpoint, as the inner loader does.

        Raises:
            UnsupportedError: the inner loader has no source, such as ``dummy``.
        """
        if not hasattr(self.inner, "get_all_weights"):
            raise UnsupportedError(
                f"{type(self.inner).__name__} has no checkpoint to read from; pass weights or a "
                f"path."
            )
        yield from self.inner.get_all_weights(model_config, model)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """Construct the model, load it through a session, and return it ready for inference.

        The steps and their order are those of vLLM's own loader.
        """
        name = self.load_config.device or vllm_config.device_config.device
        device = torch.device(name)
        with set_default_torch_dtype(model_config.dtype), device:
            # A load without names, such as dummy weights, overwrites what a constructor set, and
            # a later checkpoint may not bring it.
            constructed = ConstructedValues()
            named = hasattr(self.inner, "get_all_weights")
            with nullcontext() if named else constructed.watching():
                model = compat.construct(self.inner, vllm_config, model_config, prefix)
            for layer in compat.layers_on_meta(model):
                compat.take_over_online_layer(layer)
            framework = VllmFramework(vllm_config, model_config, device)
            framework.constructed = constructed.values
            with WeightLoadSession(model, framework=framework) as session:
                session.load_through(lambda: self.load_weights(model, model_config))
                gc.collect()
                torch.accelerator.empty_cache()
            framework.constructed = {}
            gc.collect()
            torch.accelerator.empty_cache()
        return model.eval()


def _replaced(config: LoadConfig, **changes: Any) -> LoadConfig:
    import copy

    other = copy.copy(config)
    for name, value in changes.items():
        setattr(other, name, value)
    return other
