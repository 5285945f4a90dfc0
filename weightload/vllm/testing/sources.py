"""Turn a checkpoint into the streams of weights that a loader has to cope with."""

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

Weights = Iterable[tuple[str, torch.Tensor]]
"""Names as the checkpoint has them, with their tensors."""

ALIGNMENT = 64
"""Bytes at whose multiples `through_one_buffer` puts tensors; a multiple of every item size."""


def read_checkpoint(path: str | Path) -> dict[str, torch.Tensor]:
    """Return every tensor of the safetensors files in a directory, in memory of its own, by name.

    A directory without such files is a FileNotFoundError; a name that two files hold is a
    ValueError.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {path}")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                if name in weights:
                    raise ValueError(f"{name!r} is in {file.name} and in a file before it")
                weights[name] = reader.get_tensor(name).clone()
    return weights


def _pairs(weights: Mapping[str, torch.Tensor] | Weights) -> list[tuple[str, torch.Tensor]]:
    return list(weights.items() if isinstance(weights, Mapping) else weights)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders the numbers in a name by value."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _place(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Return a sort key that puts embeddings first, then the layers by number, then the rest."""
    if re.search(r"\.(layers|h)\.\d+\.", name):
        return 1, _natural(name)
    return (0 if "emb" in name and "embed_out" not in name else 2), _natural(name)


def in_order(
    weights: Mapping[str, torch.Tensor] | Weights,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the order in which a forward pass meets the layers."""
    yield from sorted(_pairs(weights), key=lambda pair: _place(pair[0]))


def reversed_order(
    weights: Mapping[str, torch.Tensor] | Weights,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in the opposite of the order that they come in."""
    yield from reversed(_pairs(weights))


def shuffled(
    weights: Mapping[str, torch.Tensor] | Weights, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in an order that depends on the seed, across layers and fused parts."""
    pairs = _pairs(weights)
    random.Random(seed).shuffle(pairs)
    yield from pairs


def chunks(
    weights: Mapping[str, torch.Tensor] | Weights, size: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of `size` weights, the last one perhaps shorter."""
    if size < 1:
        raise ValueError(f"a chunk must hold at least one tensor, not {size}")
    pairs = _pairs(weights)
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def through_one_buffer(
    weights: Mapping[str, torch.Tensor] | Weights, *, bucket: int = 1
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views into one buffer whose memory is overwritten as soon as the reader moves on.

    This is what a transport does that receives every message into the same memory. `bucket` weights
    share the buffer at a time. After the last of them was taken the whole buffer is filled with
    bytes that are NaN as bfloat16, float16 and float32, before the next ones arrive, and likewise
    when the stream ends or is closed early. A reader that kept a view instead of a copy then finds
    garbage in it.
    """
    groups = list(chunks(weights, bucket))
    buffer = torch.empty(max((_span(group) for group in groups), default=0), dtype=torch.uint8)
    for group in groups:
        try:
            yield from list(_fill(buffer, group))
        finally:
            buffer.fill_(0xFF)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _span(group: list[tuple[str, torch.Tensor]]) -> int:
    """Return how many bytes the tensors of a group take up in the buffer."""
    return sum(_aligned(tensor.nbytes) for _, tensor in group)


def _fill(
    buffer: torch.Tensor, group: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Copy the tensors of a group into the buffer, one behind the other, and yield the views."""
    offset = 0
    for name, tensor in group:
        view = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        yield name, view
        offset += _aligned(tensor.nbytes)
