"""Toy layers, each with one behaviour that makes a reload go wrong.

Every layer maps ``[..., WIDTH]`` to ``[..., WIDTH]`` and computes with everything that it holds,
so that a stale or lost tensor shows in its output. What a hook does is not reversible and not
idempotent, and most hooks leave something behind that a second pass would stumble over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

__all__ = [
    "SENTINEL",
    "WIDTH",
    "AddressHandle",
    "BufferedLayer",
    "ComposedLoaderLinear",
    "DefaultScaleLinear",
    "ExpertStack",
    "FilledScaleLinear",
    "FloatBiasLinear",
    "FusedExperts",
    "FusedLinear",
    "HandleLinear",
    "InPlaceLinear",
    "InterleavedLinear",
    "KernelLinear",
    "LatentAttention",
    "Linear",
    "PackedHead",
    "PaddedLinear",
    "RepackMethod",
    "RepackedLinear",
    "RoomLinear",
    "ScaledLinear",
    "ScatteredLinear",
    "SharedTableMethod",
    "SinkAttention",
    "SummedState",
    "TableLinear",
    "WeightHandleLinear",
]

WIDTH = 8
"""Size of the last dimension of every layer's input and output."""

SENTINEL = -7.0
"""What padding holds."""

Tensor = torch.Tensor


def parameter(
    *shape: int, fill: float | None = None, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Make a parameter without gradients; NaN where nothing says what is in it."""
    value = float("nan") if fill is None else fill
    return nn.Parameter(torch.full(shape, value, dtype=dtype), requires_grad=False)


def set_loader(place: nn.Parameter, loader: Callable[..., None]) -> None:
    """Give a parameter its loader, the way frameworks do."""
    place.weight_loader = loader  # type: ignore[attr-defined]


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``[rows, columns]`` to int8 ``[columns, rows]`` and a scale ``[1, rows]``."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
    return torch.round(weight / scale).to(torch.int8).t().contiguous(), scale.t().contiguous()


class Linear(nn.Module):
    """Computes with its weight as it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return functional.linear(x, self.weight)


class PackedKernel:
    """What a quantised layer computes with; holds a scale of its own."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def apply(self, x: Tensor, packed: Tensor) -> Tensor:
        """Multiply ``[..., columns]`` with int8 ``[columns, rows]``."""
        return (x @ packed.float()) * self.scale


class RepackMethod:
    """Packs a weight to int8; once a kernel exists, it takes the weight to be packed already."""

    def __init__(self) -> None:
        self.kernel: PackedKernel | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the weight by its packed form, in another shape and type."""
        if self.kernel is None:
            packed, scale = pack(layer.weight.detach())
            self.kernel = PackedKernel(scale)
        else:
            packed = layer.weight.detach().to(torch.int8).reshape(WIDTH, -1)
        layer.weight = nn.Parameter(packed, requires_grad=False)

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        """Compute with the kernel."""
        if self.kernel is None:
            return functional.linear(x, layer.weight)
        return self.kernel.apply(x, layer.weight)


class RepackedLinear(nn.Module):
    """Its strategy object replaces the weight and skips that when it finds its own kernel."""

    def __init__(self, rows: int = WIDTH) -> None:
        super().__init__()
        self.weight = parameter(rows, WIDTH)
        self.quant_method = RepackMethod()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.quant_method.apply(self, x)


class InPlaceLinear(nn.Module):
    """Its hook packs into the parameter that it reads: same object, same shape, other values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.passes = 0

    def process_weights_after_loading(self) -> None:
        """Pack in place."""
        self.passes += 1
        self.weight.data.copy_(self.weight.detach().flip(1).cumsum(1) * self.passes)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return functional.linear(x, self.weight)


class RoomLinear(nn.Module):
    """Its hook makes tensors, writes the new weight and its gain into them, and keeps those.

    So do the wrappers of most kernels that pack: the shape, the type and the size stay as they were.
    What it makes first is scratch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.gain = parameter(WIDTH, 1)
        self.passes = 0

    def process_weights_after_loading(self) -> None:
        """Reverse the columns, each divided by the rows' gain, and double the gain."""
        self.passes += 1
        scratch = torch.empty_like(self.weight)
        torch.div(self.weight.detach(), self.gain.detach() + 2, out=scratch)
        weight, gain = torch.empty_like(self.weight), torch.empty_like(self.gain)
        weight.copy_(scratch.flip(1))
        torch.mul(self.gain.detach(), 2 * self.passes, out=gain)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.gain = nn.Parameter(gain, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return functional.linear(x, self.weight) * self.gain.t()


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


class FusedLinear(nn.Module):
    """Several projections in one weight; its loader takes one shard at a time."""

    def __init__(self, shards: int = 3) -> None:
        super().__init__()
        self.shards = shards
        self.weight = parameter(shards * WIDTH, WIDTH)
        self.bias = parameter(shards * WIDTH)
        for place in (self.weight, self.bias):
            set_loader(place, self.load_shard)

    def load_shard(self, place: Tensor, tensor: Tensor, shard: int) -> None:
        """Fill the rows of one projection."""
        target = place.data.narrow(0, shard * WIDTH, WIDTH)
        if target.shape != tensor.shape:
            raise ValueError(f"shard of shape {tuple(tensor.shape)} for {tuple(target.shape)}")
        target.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer; the projections are multiplied with one another."""
        parts = functional.linear(x, self.weight, self.bias).split(WIDTH, -1)
        return functools.reduce(torch.mul, [torch.tanh(part) for part in parts])


class PaddedLinear(nn.Module):
    """A weight with rows that no checkpoint brings; its hook packs them with the others.

    Args:
        packed: whether the hook replaces the parameter, or leaves the layer as it was loaded.
    """

    def __init__(self, *, packed: bool = True) -> None:
        super().__init__()
        self.packed = packed
        self.weight = parameter(WIDTH, WIDTH)
        self.weight.data[WIDTH - 2 :] = SENTINEL
        set_loader(self.weight, self.load_rows)

    def load_rows(self, place: Tensor, tensor: Tensor) -> None:
        """Fill all rows but the padding."""
        if tensor.shape != (WIDTH - 2, WIDTH):
            raise ValueError(f"{tuple(tensor.shape)} rows do not fit")
        place.data[: WIDTH - 2].copy_(tensor)

    def process_weights_after_loading(self) -> None:
        """Transpose, if the layer packs at all."""
        if self.packed:
            turned = self.weight.detach().t().contiguous() + self.weight.detach().sum()
            self.weight = nn.Parameter(turned, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return x @ self.weight if self.packed else functional.linear(x, self.weight)


class DefaultScaleLinear(nn.Module):
    """A scale that checkpoints may leave out, -1 until one comes; the hook takes it away."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.scale = parameter(1, fill=-1.0)
        self.factor: float | None = None

    def process_weights_after_loading(self) -> None:
        """Turn the scale into a number and delete the parameter."""
        value = float(self.scale)
        self.factor = 1.5 if value < 0 else value
        del self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        factor = 1.0 if self.factor is None else self.factor
        return functional.linear(x, self.weight) * factor


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


class SlottedConfig:
    """Holds a tensor in a slot, without an instance dictionary."""

    __slots__ = ("shift",)

    def __init__(self, shift: Tensor) -> None:
        self.shift = shift


class KernelLinear(nn.Module):
    """Its hook builds a kernel anew, with tensors nested in containers, a partial, a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.kernel: dict[str, Any] = {}

    def process_weights_after_loading(self) -> None:
        """Build the kernel from the weight."""
        weight = self.weight.detach()
        offset = weight.mean(0)

        def add_offset(x: Tensor) -> Tensor:
            return x + offset

        self.kernel = {
            "scales": [weight.abs().amax(1), (weight.amin(0),)],
            "scaled": functools.partial(torch.mul, other=weight.std(0)),
            "add_offset": add_offset,
            "config": SlottedConfig(weight.sum(0)),
        }

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = functional.linear(x, self.weight)
        if not self.kernel:
            return x
        first, (second,) = self.kernel["scales"]
        x = self.kernel["scaled"](self.kernel["add_offset"](x))
        result: Tensor = x * first + second + self.kernel["config"].shift
        return result

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a captured graph would know."""
        first, (second,) = self.kernel["scales"]
        cell = self.kernel["add_offset"].__closure__[0].cell_contents
        partial = self.kernel["scaled"].keywords["other"]
        return [first, second, cell, partial, self.kernel["config"].shift]


class FloatBiasLinear(nn.Module):
    """Its hook gives the bias another type by rebinding ``.data`` of the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.bias = parameter(WIDTH, dtype=torch.bfloat16)

    def process_weights_after_loading(self) -> None:
        """Rebind the bias to float32."""
        self.bias.data = self.bias.data.float() + 0.001

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return functional.linear(x, self.weight) + self.bias


class BufferedLayer(nn.Module):
    """Buffers of each kind: in checkpoints, not in checkpoints, and a view of a parameter.

    ``temperature`` may be left out by a checkpoint and is 1 then.
    """

    mean: Tensor
    temperature: Tensor
    frequencies: Tensor
    first_row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("frequencies", torch.arange(1.0, WIDTH + 1), persistent=False)
        self.register_buffer("first_row", self.inner.weight.detach()[0], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = self.inner(x - self.mean) * self.first_row
        return torch.sin(x * self.frequencies) / self.temperature


class ExpertStack(nn.Module):
    """Several weights in one parameter, which the model fills by bare copies, one by one."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.weights = parameter(experts, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all experts one after another."""
        for weight in self.weights:
            x = torch.tanh(functional.linear(x, weight))
        return x


class ComposedLoaderLinear(nn.Module):
    """Its loader copies, and transforms what it has copied in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        set_loader(self.weight, self.load_negated)

    def load_negated(self, place: Tensor, tensor: Tensor) -> None:
        """Write twice: the value, then its negative exponential."""
        if place.shape != tensor.shape:
            raise ValueError(f"shape {tuple(tensor.shape)}")
        place.data.copy_(tensor)
        place.data.exp_().neg_()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.tanh(functional.linear(x, self.weight))


class ScaledLinear(nn.Module):
    """Scales whose loader looks at what they hold before it writes.

    Args:
        packed: whether a hook folds the scales into the weight and removes them.
    """

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.weight = parameter(WIDTH, WIDTH)
        self.checked = parameter(2, fill=1.0)
        self.largest = parameter(1, fill=0.0)
        set_loader(self.checked, self.load_checked)
        set_loader(self.largest, self.load_largest)

    def load_checked(self, place: Tensor, tensor: Tensor, shard: int) -> None:
        """Fill one scale, which may not have been filled with another value before."""
        if place.data[shard] != 1.0 and (place.data[shard] - tensor).abs() > 1e-5:
            raise ValueError("two different scales for one place")
        place.data[shard].copy_(tensor)

    def load_largest(self, place: Tensor, tensor: Tensor, shard: int) -> None:
        """Keep the largest of the scales that come."""
        place.data.copy_(torch.maximum(place.data, tensor.abs().reshape(1)))

    def process_weights_after_loading(self) -> None:
        """Fold the scales into the weight, if the layer packs at all."""
        if self.packed:
            factor = self.checked.detach().sum() * self.largest.detach()
            self.weight = nn.Parameter(self.weight.detach() * factor, requires_grad=False)
            del self.checked, self.largest

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        x = functional.linear(x, self.weight)
        return x if self.packed else x * self.checked.sum() * self.largest


class ShardParameter(nn.Parameter):
    """A parameter that brings its own loader, a method bound to it."""

    def load_interleaved(self, place: Tensor, tensor: Tensor, shard: int) -> None:
        """Fill every second row of the parameter that the method is bound to."""
        target = self.data[shard::2]
        if target.shape != tensor.shape:
            raise ValueError(f"shape {tuple(tensor.shape)}")
        target.copy_(tensor)


class InterleavedLinear(nn.Module):
    """Two projections with alternating rows; the loader is a method of the parameter itself.

    Args:
        packed: whether a hook packs the weight in place.
    """

    def __init__(self, *, packed: bool = False) -> None:
        super().__init__()
        self.packed = packed
        self.weight = ShardParameter(
            torch.full((2 * WIDTH, WIDTH), float("nan")), requires_grad=False
        )
        set_loader(self.weight, self.weight.load_interleaved)

    def process_weights_after_loading(self) -> None:
        """Reverse the rows in place, if the layer packs at all."""
        if self.packed:
            self.weight.data.copy_(self.weight.detach().flip(0) * 3)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        both = functional.linear(x, self.weight)
        return torch.tanh(both[..., 0::2]) * both[..., 1::2]


class ScatteredLinear(nn.Module):
    """Its loader writes by lists of row numbers, and the bias as bytes: no plain region.

    Args:
        packed: whether a hook packs weight and bias.
    """

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.weight = parameter(2 * WIDTH, WIDTH)
        self.bias = parameter(2 * WIDTH)
        set_loader(self.weight, self.load_rows)
        set_loader(self.bias, self.load_bytes)
        self.kernel: tuple[Tensor, Tensor] | None = None

    def load_rows(self, place: Tensor, tensor: Tensor, shard: int) -> None:
        """Fill the rows that belong to one of two projections."""
        if tensor.shape != (WIDTH, WIDTH):
            raise ValueError(f"shape {tuple(tensor.shape)}")
        rows = torch.arange(2 * WIDTH)
        place.data[rows[rows % 2 == shard]] = tensor

    def load_bytes(self, place: Tensor, tensor: Tensor) -> None:
        """Fill the bias, seen as bytes."""
        if place.shape != tensor.shape:
            raise ValueError(f"shape {tuple(tensor.shape)}")
        place.data.view(torch.uint8).copy_(tensor.view(torch.uint8))

    def process_weights_after_loading(self) -> None:
        """Pack copies, if the layer packs at all."""
        if self.packed:
            self.kernel = self.weight.detach().t().contiguous() * 2, self.bias.detach() + 1

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        weight, bias = self.kernel or (self.weight.t(), self.bias)
        both = x @ weight + bias
        return torch.tanh(both[..., :WIDTH]) * both[..., WIDTH:]


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


class FilledScaleLinear(nn.Module):
    """Its hook fills a tensor that is no parameter or buffer and was there before, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.scale = torch.ones(WIDTH)

    def process_weights_after_loading(self) -> None:
        """Multiply the scale in place; a second time would multiply twice."""
        self.scale.mul_(self.weight.detach().abs().amax(1))
        changed = self.weight.detach().t().contiguous()
        self.weight = nn.Parameter(changed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return (x @ self.weight) * self.scale


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
