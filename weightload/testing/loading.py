"""Toy layers that are filled by anything but one plain copy for each parameter."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

from weightload.testing.layers import WIDTH, parameter, set_loader

__all__ = [
    "SENTINEL",
    "ComposedLoaderLinear",
    "ExpertStack",
    "FusedLinear",
    "HollowLinear",
    "InterleavedLinear",
    "PackedStack",
    "PaddedLinear",
    "PiecedStack",
    "ScaledLinear",
    "ScatteredLinear",
]

SENTINEL = -7.0
"""What padding holds."""

Tensor = torch.Tensor


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


class HollowLinear(nn.Module):
    """What a checkpoint brings for it has parts without elements; its hook takes one of them away.

    So has a quantised layer whose columns are in order, and a rank that has none of the heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.order = parameter(0, WIDTH)
        self.rest = parameter(0)
        set_loader(self.weight, self.load_rows)

    def load_rows(self, place: Tensor, tensor: Tensor, part: int) -> None:
        """Fill all rows, which are the first part, or none, which are the second."""
        target = place.data.narrow(0, part * WIDTH, (1 - part) * WIDTH)
        if target.shape != tensor.shape:
            raise ValueError(f"rows of shape {tuple(tensor.shape)} for {tuple(target.shape)}")
        target.copy_(tensor)

    def process_weights_after_loading(self) -> None:
        """Bring the rows into their order, and forget it."""
        order = self.order.sum(0) if hasattr(self, "order") else torch.ones(WIDTH)
        packed = (self.weight.detach() + order).t().contiguous()
        self.weight = nn.Parameter(packed, requires_grad=False)
        if hasattr(self, "order"):
            del self.order

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return x @ self.weight + self.rest.sum()


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


class PackedStack(ExpertStack):
    """Two stacks of weights, filled one by one, that a hook writes anew in another order."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__(experts)
        self.gates = parameter(experts, WIDTH, WIDTH)

    def process_weights_after_loading(self) -> None:
        """Turn both stacks round."""
        for name in ("weights", "gates"):
            packed = getattr(self, name).detach().flip(0, 2).contiguous()
            setattr(self, name, nn.Parameter(packed, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all experts one after another."""
        for weight, gate in zip(self.weights.flip(0, 2), self.gates.flip(0, 2), strict=True):
            x = torch.tanh(functional.linear(x, weight)) * torch.sigmoid(functional.linear(x, gate))
        return x


class PiecedStack(nn.Module):
    """Gated experts, each weight filled from two sources, that a hook writes anew one by one."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.both = parameter(experts, 2 * WIDTH, WIDTH)
        self.down = parameter(experts, WIDTH, WIDTH)
        for place in (self.both, self.down):
            set_loader(place, self.load_matrix)

    def load_matrix(self, place: Tensor, tensor: Tensor, number: int) -> None:
        """Fill one weight, or half of one: the first half of each comes before its second."""
        target = place.data.view(-1, WIDTH, WIDTH)[number]
        if target.shape != tensor.shape:
            raise ValueError(f"weight of shape {tuple(tensor.shape)} for {tuple(target.shape)}")
        target.copy_(tensor)

    @staticmethod
    def turn(loaded: Tensor, new: Tensor) -> None:
        """Write weights ``[experts, rows, columns]`` in the order that the kernel wants."""
        new.copy_(loaded.roll(1, 2) + 2 * loaded)

    def process_weights_after_loading(self) -> None:
        """Turn both stacks round."""
        for name in ("both", "down"):
            loaded = getattr(self, name).detach()
            new = torch.empty_like(loaded)
            self.turn(loaded, new)
            setattr(self, name, nn.Parameter(new, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all experts one after another."""
        for both, down in zip(self.both, self.down, strict=True):
            gate, up = functional.linear(x, both).chunk(2, -1)
            x = torch.tanh(functional.linear(torch.sigmoid(gate) * up, down))
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
