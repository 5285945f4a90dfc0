"""Toy layers that loaders fill by plain copies, and whose hooks change what the layer holds.

As those of ``loading``, ``sharing`` and ``kernels``, each has one behaviour that makes a reload go
wrong, maps ``[..., WIDTH]`` to ``[..., WIDTH]`` and computes with everything that it holds, so that
a stale or lost tensor shows in its output. What a hook does is not reversible and not idempotent,
and most hooks leave something behind that a second pass would stumble over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "WIDTH",
    "BufferedLayer",
    "DefaultScaleLinear",
    "FilledScaleLinear",
    "FloatBiasLinear",
    "InPlaceLinear",
    "KeptScaleLinear",
    "KernelLinear",
    "Linear",
    "RepackMethod",
    "RepackedLinear",
    "RoomLinear",
]

WIDTH = 8
"""Size of the last dimension of every layer's input and output."""

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


class KeptScaleLinear(nn.Module):
    """A scale that checkpoints may leave out; its hook multiplies the weight with it, and leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.scale = parameter(1, fill=2.0)

    def process_weights_after_loading(self) -> None:
        """Bring the scale into the weight, which a second time would scale twice."""
        self.weight.data.copy_(self.weight.detach().t() * self.scale.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return x @ self.weight - self.scale


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
