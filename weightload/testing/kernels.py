"""Toy layers whose hooks build kernels: base classes, tensors in tensors, rebuilt objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from weightload.testing.layers import WIDTH, parameter

__all__ = [
    "Processed",
    "ProcessedAttention",
    "ProcessedState",
    "RebuiltKernelLinear",
    "ScaledTensor",
]

Tensor = torch.Tensor


class Processed(nn.Module):
    """A layer with a weight and a hook that runs as that of a quantised layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)

    def process_weights_after_loading(self) -> None:
        """Process; for subclasses."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return torch.tanh(functional.linear(x, self.weight))


class ProcessedAttention(Processed):
    """Its hook runs as that of an attention layer."""


class ProcessedState(Processed):
    """Its hook runs after those of all layers."""


class ScaledTensor(Tensor):
    """A weight as int8 with a scale for each row: a wrapper around two tensors.

    Args:
        packed: int8 ``[rows, columns]``.
        scale: ``[rows, 1]``.
        rounding: how many steps a unit has; part of the type, as it were, and no tensor.
    """

    @staticmethod
    def __new__(
        cls: type[Tensor], packed: Tensor, scale: Tensor, rounding: int = 127
    ) -> ScaledTensor:
        """Make a tensor without memory of its own."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=scale.dtype, device=packed.device
        )
        whole: ScaledTensor = made
        return whole

    def __init__(self, packed: Tensor, scale: Tensor, rounding: int = 127) -> None:
        self.packed, self.scale, self.rounding = packed, scale, rounding

    @classmethod
    def pack(cls, weight: Tensor, rounding: int = 127) -> ScaledTensor:
        """Quantise ``[rows, columns]``."""
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / rounding
        return cls(torch.round(weight / scale).to(torch.int8), scale, rounding)

    def unpack(self) -> Tensor:
        """Return the value as a plain tensor."""
        return self.packed.to(self.scale.dtype) * self.scale

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Say what it is without a look at the values, which a compiler has none of."""
        return f"ScaledTensor(shape={tuple(self.shape)}, rounding={self.rounding})"

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """Name the tensors inside."""
        return ["packed", "scale"], self.rounding

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], rounding: int, size: Any, stride: Any
    ) -> ScaledTensor:
        """Make it again of the tensors inside."""
        return cls(inner["packed"], inner["scale"], rounding)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute with the plain value; only a look at the whole stays packed."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].packed, args[0].scale, args[0].rounding)
        args, kwargs = tree_map(
            lambda leaf: leaf.unpack() if isinstance(leaf, ScaledTensor) else leaf,
            (args, kwargs or {}),
        )
        return func(*args, **kwargs)


class GroupedConfig:
    """What a grouped kernel was configured with: scales and strides, in attributes."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.strides = torch.full((2,), scale.numel(), dtype=torch.int64, device=scale.device)


class GroupedKernel:
    """Computes with tensors that hang on it in every way that Python knows."""

    def __init__(self, weight: Tensor) -> None:
        self.config = GroupedConfig(weight.abs().amax(1))
        self.by_name: dict[str, Any] = {"alpha": weight.mean(0), "groups": {"beta": weight.std(0)}}
        self.stages: list[Any] = [weight.amin(0), (weight.amax(0), [weight.sum(0)])]
        self.scaled: Callable[[Tensor], Tensor] = functools.partial(torch.mul, weight.median(1)[0])
        self.shifted = self._shift_by(weight.sum(1))
        self.packed = ScaledTensor.pack(weight)

    @staticmethod
    def _shift_by(shift: Tensor) -> Callable[[Tensor], Tensor]:
        def shifted(x: Tensor) -> Tensor:
            return x + shift

        return shifted

    def apply(self, x: Tensor) -> Tensor:
        """Use every tensor once; nothing cancels another."""
        minimum, (maximum, [total]) = self.stages
        x = functional.linear(x, self.packed.unpack()) * self.config.scale
        x = torch.tanh(self.shifted(self.scaled(x)) / self.config.strides[0])
        x = x * self.by_name["alpha"] + self.by_name["groups"]["beta"]
        result: Tensor = torch.tanh((x - minimum) * maximum + total / self.config.strides[1])
        return result

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a captured graph knows."""
        minimum, (maximum, [total]) = self.stages
        shifted: Any = self.shifted
        scaled: Any = self.scaled
        return {
            "config.scale": self.config.scale,
            "config.strides": self.config.strides,
            "dict": self.by_name["alpha"],
            "dict in dict": self.by_name["groups"]["beta"],
            "list": minimum,
            "tuple in list": maximum,
            "list in tuple": total,
            "partial": scaled.args[0],
            "closure": shifted.__closure__[0].cell_contents,
            "packed": self.packed.packed,
            "packed scale": self.packed.scale,
        }


class RebuiltKernelLinear(Processed):
    """Its hook builds everything that it computes with anew, in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: GroupedKernel | None = None

    def process_weights_after_loading(self) -> None:
        """Build the kernel from the weight, and make the weight a wrapper."""
        weight = self.weight.detach().clone()
        self.kernel = GroupedKernel(weight)
        self.weight = nn.Parameter(ScaledTensor.pack(weight.flip(0)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.kernel is None:
            return functional.linear(x, self.weight)
        return self.kernel.apply(functional.linear(x, self.weight.detach()))

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a captured graph knows."""
        weight: Any = self.weight
        own = {"weight.packed": weight.packed, "weight.scale": weight.scale}
        return own | (self.kernel.tensors() if self.kernel is not None else {})
