"""Layers of plain torch whose weights are loaded as vLLM's are: stacked, by loaders on parameters.

Loaders do what vLLM's do for one rank, step by step, so that their time is about the same: a
parameter of its own class, a shard that is said on the source tensor, narrow, compare, copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

logger = logging.getLogger(__name__)
Pairs = Iterable[tuple[str, torch.Tensor]]
BLOCK = 128
"""Rows and columns of a block that has a scale of its own."""
E4M3_MAX = 448.0


class Weight(nn.Parameter):
    """A parameter that knows its loader and may hold several projections, one below another.

    Operations on it pass through a method of Python, as they do on those of vLLM.
    """

    def __new__(cls, data: torch.Tensor, **_: Any) -> Weight:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, *, loader: Callable[..., Any]) -> None:
        self._weight_loader = loader

    @property
    def weight_loader(self) -> Callable[..., Any]:
        return self._weight_loader

    @weight_loader.setter
    def weight_loader(self, loader: Callable[..., Any]) -> None:
        self._weight_loader = loader

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})

    def take(self, loaded: torch.Tensor, **place: int) -> None:
        """Copy a projection to its rows."""
        start, size = place["start"], place["size"]
        part = self.data.narrow(0, start, size)
        loaded = loaded.narrow(0, 0, size)
        require_alike(part, loaded)
        part.copy_(loaded)

    def take_whole(self, loaded: torch.Tensor) -> None:
        """Copy the only projection."""
        loaded = loaded.narrow(1, 0, self.data.shape[1])
        require_alike(self.data, loaded)
        self.data.copy_(loaded)


def require_alike(place: torch.Tensor, loaded: torch.Tensor) -> None:
    """Raise if a tensor does not fit its place."""
    if place.shape != loaded.shape:
        raise ValueError(f"{tuple(loaded.shape)} does not fit into {tuple(place.shape)}")


def plain_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Load what is one tensor in the checkpoint too."""
    if param.numel() == 1 and loaded_weight.numel() == 1:
        param.data.copy_(loaded_weight.view(param.shape))
        return
    if param.size() != loaded_weight.size():
        raise ValueError(f"{tuple(loaded_weight.size())} does not fit into {tuple(param.size())}")
    param.data.copy_(loaded_weight)


class Unquantized:
    """What vLLM does with a linear layer on CUDA that is not quantised: nothing."""

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Leave the layer as it was loaded."""

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, layer.weight)


def replace_weight(layer: Linear, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Put quantised weights where the loaded ones were."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = nn.Parameter(scale, requires_grad=False)


def in_fp8(loaded: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a product in FP8, written at once where torch has a kernel for that."""
    weight = torch.empty(loaded.shape, dtype=torch.float8_e4m3fn, device=loaded.device)
    try:
        return torch.mul(loaded, factor, out=weight)
    except (NotImplementedError, RuntimeError):
        return weight.copy_(loaded * factor)


class Fp8Tensor(Unquantized):
    """Quantises to FP8 when the layer is loaded, with one scale for the whole tensor."""

    def process_weights_after_loading(self, layer: Linear) -> None:
        loaded = layer.weight.data
        scale = (loaded.abs().amax().float() / E4M3_MAX).reshape(1)
        replace_weight(layer, in_fp8(loaded, 1 / scale[0]), scale)

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, layer.weight.to(x.dtype) * layer.weight_scale.to(x.dtype))


class Fp8Block(Unquantized):
    """Quantises to FP8 when the layer is loaded, with a scale for each 128 rows and columns."""

    def process_weights_after_loading(self, layer: Linear) -> None:
        rows, columns = layer.weight.shape
        loaded = layer.weight.data.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = loaded.abs().amax((1, 3), keepdim=True).float() / E4M3_MAX
        weight = in_fp8(loaded, (1 / scale).to(loaded.dtype))
        replace_weight(layer, weight.view(rows, columns), scale[:, 0, :, 0].contiguous())

    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        rows, columns = layer.weight.shape
        blocks = layer.weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).to(x.dtype)
        weight = blocks * layer.weight_scale[:, None, :, None].to(x.dtype)
        return functional.linear(x, weight.view(rows, columns))


METHODS = {"none": Unquantized, "fp8-tensor": Fp8Tensor, "fp8-block": Fp8Block}


class Linear(nn.Module):
    """One or several projections of one input.

    Args:
        inputs: columns.
        outputs: rows of each projection, by the name of its shard.
        method: what processes the layer.
    """

    def __init__(self, inputs: int, outputs: dict[Any, int], method: Unquantized) -> None:
        super().__init__()
        self.outputs = outputs
        self.quant_method = method
        rows = sum(outputs.values())
        self.weight = Weight(torch.empty(rows, inputs), loader=self.weight_loader)

    def weight_loader(
        self, param: Weight, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
    ) -> None:
        """Copy one projection to its rows."""
        if loaded_shard_id is None:
            param.take_whole(loaded_weight)
            return
        start = 0
        for shard, size in self.outputs.items():
            if shard == loaded_shard_id:
                param.take(loaded_weight, start=start, size=size)
                return
            start += size
        raise ValueError(f"no projection {loaded_shard_id!r}")

    def load_weights(self, weights: Pairs) -> Iterator[str]:
        """Load what the checkpoint has for this layer."""
        for name, loaded in weights:
            param = getattr(self, name)
            param.weight_loader(param, loaded, getattr(loaded, "shard_id", None))
            logger.debug("%s is loaded, of shape %s", name, loaded.shape)
            yield name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x)


class Embedding(nn.Module):
    """A table of the vocabulary, or the head that multiplies with it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.quant_method = Unquantized()
        self.weight = Weight(torch.empty(rows, columns), loader=self.weight_loader)

    def weight_loader(self, param: Weight, loaded_weight: torch.Tensor) -> None:
        """Copy the rows that this rank has, and clear what is behind them."""
        loaded_weight = loaded_weight.narrow(0, 0, param.shape[0])
        param[: loaded_weight.shape[0]].data.copy_(loaded_weight)
        param[loaded_weight.shape[0] :].data.fill_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return functional.linear(x, self.weight)
        return functional.embedding(x, self.weight)


class Norm(nn.Module):
    """Scales to a root mean square of one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Rotary(nn.Module):
    """Turns queries and keys by their positions; all layers share one."""

    def __init__(self, size: int, length: int = 512) -> None:
        super().__init__()
        rate = 1e4 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * rate
        self.register_buffer("table", torch.stack([angle.cos(), angle.sin()]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.table[:, : x.shape[0], None].to(x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Attention(nn.Module):
    """Attention with scales of its cache, processed after all other layers."""

    deferred = True

    def __init__(self) -> None:
        super().__init__()
        for name in ("_k_scale", "_v_scale", "_q_scale", "_prob_scale"):
            self.register_buffer(name, torch.tensor(1.0, dtype=torch.float32))

    def process_weights_after_loading(self, dtype: torch.dtype = torch.bfloat16) -> None:
        """Take the default scales, since no checkpoint here brings any."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -1e4).softmax(-1), v)


class ExpertsMethod:
    """What vLLM does with experts that are not quantised: it copies each tensor onto itself, twice.

    Once to pad it, although nothing is padded, and once to put it where it already is.
    """

    def process_weights_after_loading(self, layer: Experts) -> None:
        for param in (layer.w13_weight, layer.w2_weight):
            param.data.copy_(param.data)
            param.data.copy_(param.data)


class Experts(nn.Module):
    """The weights of all experts of a layer, in two tensors."""

    def __init__(self, count: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.count = count
        self.quant_method = ExpertsMethod()
        shapes = {"w13_weight": (count, 2 * inner, hidden), "w2_weight": (count, hidden, inner)}
        for name, shape in shapes.items():
            param = nn.Parameter(torch.empty(shape), requires_grad=False)
            param.weight_loader = self.weight_loader
            self.register_parameter(name, param)

    def mapping(self) -> dict[str, list[tuple[str, str, int, str]]]:
        """Return by expert what a name of the checkpoint means."""
        parts = (("w13_", "gate_proj", "w1"), ("w2_", "down_proj", "w2"), ("w13_", "up_proj", "w3"))
        return {
            str(expert): [
                (f"experts.{place}", f"experts.{expert}.{part}.", expert, shard)
                for place, part, shard in parts
            ]
            for expert in range(self.count)
        }

    def load_weights(self, weights: Pairs) -> Iterator[str]:
        """Load single experts."""
        by_expert = self.mapping()
        for name, loaded in weights:
            full = f"experts.{name}"
            key = full.partition("experts.")[2].partition(".")[0]
            for place, part, expert, shard in by_expert[key]:
                if part not in full:
                    continue
                full_place = full.replace(part, place)
                param = getattr(self, full_place.removeprefix("experts."))
                for one, tensor in enumerate(loaded.unsqueeze(0).unbind(), start=expert):
                    param.weight_loader(
                        param=param,
                        loaded_weight=tensor,
                        weight_name=full_place,
                        shard_id=shard,
                        expert_id=one,
                        return_success=True,
                    )
                yield full_place

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copy one projection of one expert."""
        if shard_id not in ("w1", "w2", "w3") or "weight" not in weight_name:
            raise ValueError(f"no projection {shard_id!r} of {weight_name!r}")
        dim = 1 if shard_id == "w2" else 0
        place = param.data[expert_id]
        loaded_weight = loaded_weight.narrow(dim, 0, loaded_weight.shape[dim])
        if shard_id != "w2":
            size = place.shape[0] // 2
            place = place.narrow(0, 0 if shard_id == "w1" else size, size)
        require_alike(place, loaded_weight)
        place.copy_(loaded_weight)
        return True if return_success else None

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        w13, w2 = self.w13_weight[chosen], self.w2_weight[chosen]
        gate, up = torch.einsum("tkoi,ti->tko", w13, x).chunk(2, -1)
        out = torch.einsum("tkoi,tki->tko", w2, functional.silu(gate) * up)
        return (out * part[..., None]).sum(1)
