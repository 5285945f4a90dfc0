"""Toy models: layers in a row, and the loaders that turn checkpoint names into places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weightload.testing.kernels import BlockExperts
from weightload.testing.layers import (
    WIDTH,
    BufferedLayer,
    DefaultScaleLinear,
    FilledScaleLinear,
    FloatBiasLinear,
    InPlaceLinear,
    KeptScaleLinear,
    KernelLinear,
    Linear,
    RepackedLinear,
    RoomLinear,
)
from weightload.testing.loading import (
    ComposedLoaderLinear,
    ExpertStack,
    FusedLinear,
    HollowLinear,
    InterleavedLinear,
    PackedStack,
    PaddedLinear,
    PiecedStack,
    ScaledLinear,
    ScatteredLinear,
)
from weightload.testing.sharing import (
    ForeignLinear,
    FusedExperts,
    HandleLinear,
    LatentAttention,
    PackedHead,
    SharedTableMethod,
    SinkAttention,
    SummedState,
    TableLinear,
    WeightHandleLinear,
)

__all__ = [
    "TOYS",
    "BareModel",
    "CollectingModel",
    "LoadingModel",
    "TiedModel",
    "ToyModel",
    "everything",
    "make_state",
]

Tensor = torch.Tensor
State = dict[str, Tensor]
Factory = Callable[[], "ToyModel"]


class ToyModel(nn.Module):
    """Layers in a row. It has no ``load_weights``: checkpoint names are its own names.

    Args:
        layers: what it computes with, in order.
    """

    may_miss: tuple[str, ...] = ("*.scale",)
    """Patterns of parameters that a checkpoint may leave out."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers to ``[..., WIDTH]``."""
        for layer in self.layers:
            x = layer(x)
        return x

    def example(self) -> Tensor:
        """Return an input of shape ``[3, WIDTH]``."""
        return torch.linspace(-1.0, 1.0, 3 * WIDTH).view(3, WIDTH)

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of what a checkpoint of this model brings, as constructed."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, place in (*self.named_parameters(), *_persistent_buffers(self)):
            if not name.endswith((".scale", ".temperature")):
                shapes.update(self.sources(name, place))
        return shapes

    def sources(self, name: str, place: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each checkpoint tensor that goes to one place."""
        yield name, tuple(_rows_without_padding(self, name, place))


class LoadingModel(ToyModel):
    """Maps checkpoint names to fused and stacked places in ``load_weights``."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors one by one."""
        for name, tensor in weights:
            self.store(name, tensor)

    def store(self, name: str, tensor: Tensor) -> None:
        """Load one tensor; raises ``KeyError`` if no place has that name."""
        places: dict[str, Any] = dict(self.named_parameters(remove_duplicate=False))
        places.update(_persistent_buffers(self))
        head, _, part = name.rpartition("/")
        place = places[head or name]
        if head and not hasattr(place, "weight_loader"):
            place.data[int(part)].copy_(tensor)
        elif head:
            place.weight_loader(place, tensor, int(part))
        else:
            getattr(place, "weight_loader", copy_whole)(place, tensor)

    def sources(self, name: str, place: Tensor) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each checkpoint tensor that goes to one place."""
        owner = self.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, FusedLinear):
            for shard in range(owner.shards):
                yield f"{name}/{shard}", (WIDTH, *place.shape[1:])
        elif isinstance(owner, HollowLinear) and name.endswith(".weight"):
            yield f"{name}/0", (WIDTH, WIDTH)
            yield f"{name}/1", (0, WIDTH)
        elif isinstance(owner, InterleavedLinear | ScatteredLinear) and place.ndim == 2:
            for shard in range(2):
                yield f"{name}/{shard}", (WIDTH, WIDTH)
        elif isinstance(owner, ScaledLinear) and not name.endswith(".weight"):
            for shard in range(2):
                yield f"{name}/{shard}", ()
        elif isinstance(owner, ExpertStack):
            for expert in range(len(place)):
                yield f"{name}/{expert}", (WIDTH, WIDTH)
        elif isinstance(owner, PiecedStack) and place.ndim == 3:
            for number in range(place.numel() // WIDTH**2):
                yield f"{name}/{number}", (WIDTH, WIDTH)
        elif isinstance(owner, BlockExperts):
            count, shape = owner.parts()[name.rpartition(".")[2]]
            for part in range(count):
                yield f"{name}/{part}", shape
        else:
            yield from super().sources(name, place)


def copy_whole(place: Tensor, tensor: Tensor) -> None:
    """Fill a place whose shape must be the tensor's."""
    if place.shape != tensor.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} for {tuple(place.shape)}")
    place.data.copy_(tensor)


class CollectingModel(LoadingModel):
    """Reads its whole source into a list before it loads, last name first."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Collect, sort, load."""
        for name, tensor in sorted(weights, key=lambda pair: pair[0], reverse=True):
            self.store(name, tensor)


class BareModel(LoadingModel):
    """Copies into its parameters past every loader, and checks nothing."""

    def store(self, name: str, tensor: Tensor) -> None:
        """Load one tensor by a bare copy, which broadcasts."""
        head, _, part = name.rpartition("/")
        place = self.get_parameter(head or name).data
        (place[int(part)] if head else place).copy_(tensor)


class TiedModel(LoadingModel):
    """An embedding, layers, and an output layer that shares the embedding's weight.

    Args:
        layers: what comes between.
        twice: whether checkpoints bring the shared weight under both names.
    """

    def __init__(self, *layers: nn.Module, twice: bool = False) -> None:
        super().__init__(*layers)
        self.twice = twice
        self.embedding = Linear()
        self.head = PackedHead(self.embedding.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Apply embedding, layers and head to ``[..., WIDTH]``."""
        return torch.as_tensor(self.head(super().forward(torch.tanh(self.embedding(x)))))

    def checkpoint(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of what a checkpoint brings."""
        shapes = super().checkpoint()
        if self.twice:
            shapes["head.weight"] = shapes["embedding.weight"]
        return shapes


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _rows_without_padding(model: nn.Module, name: str, place: Tensor) -> tuple[int, ...]:
    owner = model.get_submodule(name.rpartition(".")[0])
    shape = tuple(place.shape)
    return (shape[0] - 2, *shape[1:]) if isinstance(owner, PaddedLinear) else shape


def make_state(factory: Factory, seed: int) -> State:
    """Return a checkpoint for the models that ``factory`` makes.

    Args:
        factory: makes a model without weights.
        seed: equal seeds give equal checkpoints.
    """
    generator = torch.Generator().manual_seed(seed)
    model = factory()
    state = {
        name: torch.randn(shape, generator=generator) * 0.5
        for name, shape in model.checkpoint().items()
    }
    if isinstance(model, TiedModel) and model.twice:
        state["head.weight"] = state["embedding.weight"].clone()
    return state


def everything() -> ToyModel:
    """Return a model with a layer of nearly every kind."""
    method = SharedTableMethod()
    return TiedModel(
        RepackedLinear(),
        FusedLinear(),
        PaddedLinear(),
        DefaultScaleLinear(),
        LatentAttention(),
        KernelLinear(),
        BufferedLayer(),
        ExpertStack(),
        InterleavedLinear(packed=True),
        HandleLinear(),
        TableLinear(method),
        TableLinear(method),
        FilledScaleLinear(),
        FusedExperts(),
        ScaledLinear(packed=True),
        ScatteredLinear(packed=True),
        SinkAttention(),
        InPlaceLinear(),
        RoomLinear(),
    )


def _shared_table() -> ToyModel:
    method = SharedTableMethod()
    return LoadingModel(TableLinear(method), Linear(), TableLinear(method))


def _summed() -> ToyModel:
    attention = LatentAttention()
    return ToyModel(SummedState(attention.projection), attention)


TOYS: dict[str, Factory] = {
    "plain": lambda: ToyModel(Linear(), Linear()),
    "repacked": lambda: ToyModel(RepackedLinear(), Linear(), RepackedLinear()),
    "in place": lambda: ToyModel(InPlaceLinear(), InPlaceLinear()),
    "rooms": lambda: ToyModel(RoomLinear(), Linear(), RoomLinear()),
    "tied": lambda: TiedModel(Linear()),
    "tied, both names": lambda: TiedModel(RepackedLinear(), twice=True),
    "fused": lambda: LoadingModel(FusedLinear(), Linear()),
    "hollow": lambda: LoadingModel(HollowLinear(), Linear(), HollowLinear()),
    "padded": lambda: LoadingModel(PaddedLinear(), PaddedLinear(packed=False)),
    "default scale": lambda: ToyModel(DefaultScaleLinear(), Linear()),
    "kept scale": lambda: ToyModel(KeptScaleLinear(), Linear(), KeptScaleLinear()),
    "attention": lambda: ToyModel(LatentAttention(), LatentAttention()),
    "derived": _summed,
    "kernel": lambda: ToyModel(KernelLinear(), Linear()),
    "rebound bias": lambda: ToyModel(FloatBiasLinear(), Linear()),
    "buffers": lambda: ToyModel(BufferedLayer(), Linear()),
    "collecting": lambda: CollectingModel(FusedLinear(), RepackedLinear(), ExpertStack()),
    "bare copies": lambda: BareModel(ExpertStack(), Linear(), RepackedLinear()),
    "packed experts": lambda: LoadingModel(PackedStack(), FusedLinear(), PackedStack(2)),
    "pieced experts": lambda: LoadingModel(PiecedStack(), FusedLinear(), PiecedStack(2)),
    "composed loader": lambda: LoadingModel(ComposedLoaderLinear(), RepackedLinear()),
    "interleaved": lambda: LoadingModel(InterleavedLinear(), InterleavedLinear(packed=True)),
    "loaders that look": lambda: LoadingModel(
        ScaledLinear(packed=True), ScaledLinear(packed=False)
    ),
    "scattered": lambda: LoadingModel(ScatteredLinear(packed=True), ScatteredLinear(packed=False)),
    "collecting, composed": lambda: CollectingModel(ComposedLoaderLinear(), PaddedLinear()),
    "handle": lambda: ToyModel(HandleLinear(), Linear()),
    "foreign kernel": lambda: LoadingModel(ForeignLinear(), Linear(), ForeignLinear()),
    "weight handle": lambda: ToyModel(WeightHandleLinear(), Linear()),
    "shared strategy": _shared_table,
    "sinks": lambda: ToyModel(SinkAttention(), Linear()),
    "filled attribute": lambda: ToyModel(FilledScaleLinear(), Linear()),
    "hook over children": lambda: ToyModel(FusedExperts(), Linear()),
    "everything": everything,
}
"""A factory for each behaviour, by name; call it for a model without weights."""
