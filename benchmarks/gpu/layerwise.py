"""An emulation of vLLM's layerwise reload, for machines without vLLM.

Written from what vLLM 0.32 was seen to do, not from its text. Nine steps: (0) kernel tensors are set
aside and tensors of the checkpoint's format, without data, put in their places, with loaders that
wait; (1) the model finds a tensor's loader by its name; (2) the loader that waits counts the layer's
elements again, looks for loaders to wrap and binds its arguments; (3) the real loader runs on the
tensor without data, under a dispatch mode that counts what it copies; (4) the source is kept; (5) when
a layer is complete, memory for all of it is allocated, (6) the loaders run again, (7) the hook runs,
(8) everything is copied to the kernel tensors, which go back; (9) at the end all modules are walked.

How near its time is to the real one is measured by ``benchmarks.gpu.calibrate``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.layers import plain_loader
from benchmarks.gpu.model import Pairs

Tensors = dict[str, torch.Tensor]
logger = logging.getLogger(__name__)


class CopiedElements(TorchDispatchMode):
    """Counts the elements that ``copy_`` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@attrs.define(eq=False)
class Waiting:
    """What is known about one module.

    Attributes:
        bare: its tensors in the checkpoint's format, without data.
        kernel: its live tensors, while they are set aside.
        calls: calls of loaders that wait until the layer is complete.
        loaded: elements that came.
        total: elements that have to come; ``None`` if the module is done.
    """

    bare: tuple[Tensors, Tensors]
    kernel: tuple[Tensors, Tensors] | None = None
    calls: list[tuple[str, inspect.BoundArguments]] = attrs.field(factory=list)
    loaded: int = 0
    total: int | None = None

    def reset(self) -> None:
        self.kernel, self.calls, self.loaded, self.total = None, [], 0, None


class Layerwise:
    """Reloads one model.

    Args:
        model: built, and not processed yet, so that its tensors have the checkpoint's format.
        device: where it lives.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model = model
        self._device = torch.device(device)
        self._open: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[nn.Module, Waiting] = weakref.WeakKeyDictionary()
        for module in model.modules():
            params, buffers = (
                {name: bare(tensor) for name, tensor in part.items()} for part in parts(module)
            )
            self._known[module] = Waiting((params, buffers))

    def reload(self, weights: Pairs) -> None:
        """Replace all weights."""
        with torch.no_grad():
            for module in self._model.modules():
                known = self._known[module]
                known.kernel = parts(module)
                for tensor in (*known.bare[0].values(), *known.bare[1].values()):
                    owned_by(tensor, module)
                self._place(module, known.bare)
                known.loaded, known.total = 0, size_of(module)
                self._wrap(module)
            self._model.load_weights(weights)
            self._finish()

    def _finish(self) -> None:
        late = []
        for module in self._model.modules():
            known = self._known[module]
            if known.total is not None and getattr(module, "deferred", False):
                late.append(module)
                continue
            if known.total is not None and known.loaded <= 0:
                self._place(module, known.kernel)
            elif known.total is not None:
                self._process(module, known)
            known.reset()
        for module in late:
            self._place(module, self._known[module].kernel)
            module.process_weights_after_loading(torch.bfloat16)
            self._known[module].reset()
        self._open.clear()

    def _place(self, module: nn.Module, tensors: tuple[Tensors, Tensors]) -> None:
        transient = set(module._non_persistent_buffers_set)
        for name in tensors_of(module):
            delattr(module, name)
        for name, param in tensors[0].items():
            module.register_parameter(name, param)
        for name, buffer in tensors[1].items():
            module.register_buffer(name, buffer, persistent=name not in transient)

    def _wrap(self, module: nn.Module) -> None:
        for name, tensor in tensors_of(module).items():
            if loader_of(tensor).__name__ != "waits":
                tensor.weight_loader = self._waiting(module, name, loader_of(tensor))

    def _waiting(self, module: nn.Module, name: str, loader: Any) -> Any:
        known, signature = self._known[module], inspect.signature(loader)

        @functools.wraps(loader, assigned=("__doc__",))
        def waits(*args: Any, **kwargs: Any) -> Any:
            if known.total is None:
                return None
            known.total = size_of(module)
            self._wrap(module)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            known.calls.append((name, bound))
            with CopiedElements() as copied:
                result = loader(*bound.args, **bound.kwargs)
            param = bound.arguments.get("param")
            most = param.numel() if isinstance(param, torch.Tensor) else copied.count
            known.loaded += min(copied.count, most)
            logger.debug("%s: %d of %d", type(module).__name__, known.loaded, known.total)
            if getattr(module, "deferred", False):
                return result
            if module not in self._open and any(
                isinstance(value, torch.Tensor) and value.device.type not in ("meta", "cpu")
                for value in bound.arguments.values()
            ):
                self._open.add(module)
            if known.loaded >= known.total:
                self._process(module, known)
                self._open.discard(module)
            return result

        return waits

    def _process(self, module: nn.Module, known: Waiting) -> None:
        with self._device:
            for name, tensor in tensors_of(module).items():
                if tensor.is_meta:
                    setattr(module, name, with_memory(tensor))
        for tensor in tensors_of(module).values():
            tensor.weight_loader = unwrapped(tensor)
        for name, bound in known.calls:
            param = getattr(module, name)
            bound.arguments["param"] = param
            param.weight_loader(*bound.args, **bound.kwargs)
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
        transient = module._non_persistent_buffers_set
        for name, param in known.kernel[0].items():
            param.data.copy_(getattr(module, name))
        for name, buffer in known.kernel[1].items():
            if name in module._buffers and name not in transient:
                buffer.data.copy_(getattr(module, name))
        self._place(module, known.kernel)
        known.reset()


def parts(module: nn.Module) -> tuple[Tensors, Tensors]:
    """Return parameters and buffers of a module, without those inside it."""
    return (
        {name: param for name, param in module._parameters.items() if param is not None},
        {name: buffer for name, buffer in module._buffers.items() if buffer is not None},
    )


def tensors_of(module: nn.Module) -> Tensors:
    """Return parameters and buffers of a module together."""
    params, buffers = parts(module)
    return params | buffers


def size_of(module: nn.Module) -> int:
    """Return the elements of a module's tensors."""
    return sum(
        getattr(tensor, "weight_loader_numel", tensor.numel())
        for tensor in tensors_of(module).values()
    )


def owned_by(tensor: torch.Tensor, module: nn.Module) -> None:
    """Bind methods among a tensor's attributes to the module, for which they were set aside."""
    for key, value in tensor.__dict__.items():
        if isinstance(value, types.MethodType) and value.__self__ is module:
            tensor.__dict__[key] = value.__func__.__get__(module)


def loader_of(tensor: torch.Tensor) -> Any:
    """Return what loads a tensor."""
    return getattr(tensor, "weight_loader", plain_loader)


def unwrapped(tensor: torch.Tensor) -> Any:
    """Return what loads a tensor, behind loaders that wait."""
    loader = loader_of(tensor)
    while loader.__name__ == "waits":
        loader = loader.__wrapped__
    return loader


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same class and attributes without data."""
    return dressed(tensor.data.to("meta"), tensor)


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form, class and attributes with memory of its own."""
    shape, stride = tuple(tensor.size()), tuple(tensor.stride())
    return dressed(torch.empty_strided(shape, stride, dtype=tensor.dtype), tensor)


def dressed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Give a tensor the class and the attributes of another."""
    tensor.__class__ = like.__class__
    tensor.__dict__ = like.__dict__.copy()
    return tensor
