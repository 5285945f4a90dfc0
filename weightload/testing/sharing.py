"""Toy layers that share what they compute with: with another layer, an object or an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from weightload.testing.layers import WIDTH, Linear, RepackedLinear, parameter

__all__ = [
    "AddressHandle",
    "ForeignKernel",
    "ForeignLinear",
    "FusedExperts",
    "HandleLinear",
    "LatentAttention",
    "PackedHead",
    "SharedTableMethod",
    "SinkAttention",
    "SummedState",
    "TableLinear",
    "WeightHandleLinear",
]

Tensor = torch.Tensor


class PackedHead(nn.Module):
    """An output layer that may share its weight, and computes with a packed copy in a closure."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = parameter(weight.shape[0])
        self.compute: Callable[[Tensor], Tensor] | None = None

    def process_weights_after_loading(self) -> None:
        """Pack a copy of the weight into a closure; the parameter stays as it is."""
        packed = self.weight.detach().t().contiguous() * 2

        def compute(x: Tensor) -> Tensor:
            return x @ packed

        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``[..., WIDTH]``."""
        product = functional.linear(x, self.weight) if self.compute is None else self.compute(x)
        return product + self.bias


class LatentAttention(nn.Module):
    """Its hook makes tensors from a projection inside it, which must be packed by then."""

    up_keys: Tensor
    up_values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.projection = RepackedLinear(2 * WIDTH)
        self.sinks = parameter(WIDTH)
        self.cache: Tensor | None = None

    def process_weights_after_loading(self) -> None:
        """Unpack the projection and split it in two, as plain attributes."""
        kernel = self.projection.quant_method.kernel
        if kernel is None:
            raise RuntimeError("the projection is not packed yet")
        whole = self.projection.weight.float() * kernel.scale
        self.up_keys, values = whole.split(WIDTH, 1)
        self.up_values = values.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.tanh(x @ self.up_keys) @ self.up_values + self.sinks


class FusedExperts(nn.Module):
    """Its hook packs the weights of layers inside it that have no hook of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = parameter(WIDTH)
        self.experts = nn.ModuleList([Linear(), Linear()])
        self.packed: Tensor | None = None

    def process_weights_after_loading(self) -> None:
        """Pack a copy of the experts' weights; they stay as they are."""
        weights = [torch.as_tensor(expert.weight).detach() for expert in self.experts]
        self.packed = torch.stack([weight.t() for weight in weights])

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.packed is None:
            return x
        both = x @ self.packed[0] - torch.sin(x @ self.packed[1])
        return both * self.gate


class SharedTableMethod:
    """One strategy object for several layers; the first one to be processed makes its table."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the table if there is none, and subtract it from the weight."""
        if self.table is None:
            self.table = layer.weight.detach().mean(0)
        changed = (layer.weight.detach() - self.table).t().contiguous()
        layer.weight = nn.Parameter(changed, requires_grad=False)


class TableLinear(nn.Module):
    """Shares its strategy object, and the table in it, with other layers."""

    def __init__(self, method: SharedTableMethod) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.quant_method = method

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        table = self.quant_method.table
        return x if table is None else x @ self.weight + table


class SinkKernel:
    """Holds a parameter of the layer above, and converts it once."""

    def __init__(self, sinks: Tensor) -> None:
        self.sinks = sinks

    def process_weights_after_loading(self) -> None:
        """Convert to another type, which is skipped if it has that type already."""
        if self.sinks.dtype != torch.float64:
            self.sinks = self.sinks.detach().double() * 2


class SinkAttention(nn.Module):
    """Its kernel is an object that was given one of its parameters when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = parameter(WIDTH)
        self.kernel = SinkKernel(self.sinks)

    def process_weights_after_loading(self) -> None:
        """Let the kernel convert its parameter."""
        self.kernel.process_weights_after_loading()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.tanh(x + self.sinks) + self.kernel.sinks.to(x.dtype)


class SummedState(nn.Module):
    """Its hook sums up the weights of another layer, after everything else was processed."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = (other,)

    def process_weights_after_loading(self) -> None:
        """Sum up."""
        self.total = torch.as_tensor(self.others[0].weight).detach().float().sum()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.tanh(x) + self.total


class AddressHandle:
    """Stands for a foreign object that keeps the raw address of a tensor and owns nothing.

    It reads NaN once the memory was freed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        self._dtype = tensor.dtype

    def __del__(self) -> None:
        """Release the foreign object."""

    def read(self) -> Tensor:
        """Return what is at the address now."""
        offset, shape, stride = self._layout
        storage: Any = None
        if not self._memory.expired():
            storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if storage is None:
            return torch.full(shape, float("nan"), dtype=self._dtype)
        value = torch.empty(0, dtype=self._dtype)
        return value.set_(storage, offset, shape, stride)


class HandleLinear(nn.Module):
    """Its hook gives the address of a scale that it made to a foreign object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.handle: AddressHandle | None = None

    def process_weights_after_loading(self) -> None:
        """Make the scale and the handle that points to it."""
        self.scale = self.weight.detach().abs().amax(1)
        self.handle = AddressHandle(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = functional.linear(x, self.weight)
        return x if self.handle is None else x * self.handle.read() + self.scale


class ForeignKernel:
    """Stands for a foreign object with memory of its own, which nobody can look into."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = weight.detach().t().contiguous() * 3 + 1

    def __del__(self) -> None:
        """Release the foreign object."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x @ self.packed


class ForeignLinear(nn.Module):
    """Its hook packs the weight into a foreign object, and leaves a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.bias = parameter(WIDTH)

    def process_weights_after_loading(self) -> None:
        """Make the object, which a closure holds."""
        kernel = ForeignKernel(self.weight)
        self.compute: Callable[[Tensor, Tensor], Tensor] = lambda x, bias: kernel(x) + bias
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``[..., WIDTH]``."""
        return torch.tanh(self.compute(x, self.bias))


class WeightHandleLinear(nn.Module):
    """Its hook gives the address of the weight itself, as it was loaded, to a foreign object."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.handle: AddressHandle | None = None

    def process_weights_after_loading(self) -> None:
        """Make the handle."""
        self.handle = AddressHandle(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        weight = self.weight if self.handle is None else self.handle.read()
        return functional.linear(x, weight)
