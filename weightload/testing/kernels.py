"""Toy layers whose hooks build kernels: base classes, tensors in tensors, rebuilt objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from weightload.testing.layers import WIDTH, parameter, set_loader

__all__ = [
    "BLOCK",
    "BlockExperts",
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


BLOCK = 4
"""Rows and columns of a block of the kernel format."""


class ScaleChain:
    """What a kernel multiplies with, worked out from scales of weights and inputs together.

    Per expert: ``in1`` and ``in2`` scale what goes into the two products, ``out1`` and ``out2``
    what comes out. ``out1`` is weight scale times input scale, so that no scale stands alone.
    """

    def __init__(self, layer: Any) -> None:
        first, second = layer.input_scale.detach().abs().amax(0) + 0.5
        self.in1 = torch.full_like(layer.w13_scale.detach(), 1.0) / first
        self.in2 = torch.full_like(layer.w2_scale.detach(), 1.0) / second
        self.out1 = _positive(layer.w13_scale) * first
        self.out2 = _positive(layer.w2_scale) * second


def _positive(scale: Tensor) -> Tensor:
    return scale.detach().abs() + 0.5


class ExpertKernel:
    """Computes experts; its weights are in the format of its backend.

    Attributes:
        backend: ``"plain"``: as loaded. ``"swapped"``: gate and up projection have changed their
            places. ``"blocks"``: that, rounded to int8, in blocks ``[experts, blocks, 4, 4]``.
        chain: the scales.
    """

    def __init__(self, backend: str, chain: ScaleChain) -> None:
        self.backend = backend
        self.chain = chain

    def pack(self, weight: Tensor, *, halves: bool) -> Tensor:
        """Bring ``[experts, rows, columns]`` into the kernel's format.

        Args:
            weight: already divided by its scale.
            halves: whether its rows are gate and up projection.
        """
        if self.backend == "plain":
            return weight
        if halves:
            gate, up = weight.chunk(2, 1)
            weight = torch.cat([up, gate], 1)
        if self.backend == "swapped":
            return weight
        experts, rows, columns = weight.shape
        blocks = torch.round(weight * 64).clamp(-127, 127).to(torch.int8)
        blocks = blocks.view(experts, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        return blocks.transpose(2, 3).reshape(experts, -1, BLOCK, BLOCK).contiguous()

    def unpack(self, weight: Tensor, columns: int) -> Tensor:
        """Return ``[experts, rows, columns]``, with the halves where the kernel has them."""
        if self.backend != "blocks":
            return weight
        blocks = weight.view(len(weight), -1, columns // BLOCK, BLOCK, BLOCK)
        return blocks.transpose(2, 3).reshape(len(weight), -1, columns).float() / 64

    def apply(self, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """Add up what the experts compute."""
        total = torch.zeros_like(x)
        inner = w2.numel() // w2.shape[0] // WIDTH
        w13, w2 = self.unpack(w13, WIDTH), self.unpack(w2, inner)
        for e in range(len(w13)):
            first, second = functional.linear(x * self.chain.in1[e], w13[e]).chunk(2, -1)
            gate, up = (first, second) if self.backend == "plain" else (second, first)
            y = torch.tanh(gate * self.chain.out1[e]) * up * self.chain.out1[e]
            y = functional.linear(y * self.chain.in2[e], w2[e]) * self.chain.out2[e]
            total = total + y
        return torch.tanh(total)


class BlockExperts(nn.Module):
    """Experts whose backend is picked when they are processed, by what the layer looks like.

    A layer whose inner size is no multiple of a block gets ``"plain"``, a large one ``"blocks"``,
    the others ``"swapped"``. The kernel format of blocks has another rank and another type, and
    nothing leads back from it. The scales that come from a checkpoint end in a chain of products
    that are plain attributes; no kernel reads the parameters that they came in.

    Args:
        inner: size between the two products.
        experts: how many there are.
    """

    large = 8
    """Inner size from which blocks are used; as a framework sets it for a machine."""

    def __init__(self, inner: int, experts: int = 2) -> None:
        super().__init__()
        self.inner = inner
        self.backend = "auto"
        self.kernel: ExpertKernel | None = None
        self.w13 = parameter(experts, 2 * inner, WIDTH)
        self.w2 = parameter(experts, WIDTH, inner)
        self.w13_scale = parameter(experts)
        self.w2_scale = parameter(experts)
        self.input_scale = parameter(experts, 2)
        set_loader(self.w13, self.load_half)
        for place in (self.w2, self.w13_scale, self.w2_scale, self.input_scale):
            set_loader(place, self.load_expert)

    def load_half(self, place: Tensor, tensor: Tensor, part: int) -> None:
        """Fill the gate (even) or the up projection (odd) of one expert."""
        expert, half = divmod(part, 2)
        place.data[expert].narrow(0, half * self.inner, self.inner).copy_(tensor)

    def load_expert(self, place: Tensor, tensor: Tensor, expert: int) -> None:
        """Fill what belongs to one expert."""
        place.data[expert].copy_(tensor)

    def parts(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return, by parameter, how many tensors a checkpoint has for it, and their shape."""
        experts = len(self.w13)
        return {
            "w13": (2 * experts, (self.inner, WIDTH)),
            "w2": (experts, (WIDTH, self.inner)),
            "w13_scale": (experts, ()),
            "w2_scale": (experts, ()),
            "input_scale": (experts, (2,)),
        }

    def pick(self) -> str:
        """Say which backend suits this layer."""
        if self.inner % BLOCK:
            return "plain"
        return "blocks" if self.inner >= self.large else "swapped"

    def process_weights_after_loading(self) -> None:
        """Pick a backend, build its kernel, bring the weights into its format."""
        if self.backend == "auto":
            self.backend = self.pick()
        if self.kernel is None:
            self.kernel = ExpertKernel(self.backend, ScaleChain(self))
            w13 = self.w13.detach() / _positive(self.w13_scale)[:, None, None]
            w2 = self.w2.detach() / _positive(self.w2_scale)[:, None, None]
            self.w13 = nn.Parameter(self.kernel.pack(w13, halves=True), requires_grad=False)
            self.w2 = nn.Parameter(self.kernel.pack(w2, halves=False), requires_grad=False)
            # The loaders survive, though what they write is not what the kernel reads.
            set_loader(self.w13, self.load_half)
            set_loader(self.w2, self.load_expert)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.kernel is None:
            return x
        return self.kernel.apply(x, self.w13, self.w2)
