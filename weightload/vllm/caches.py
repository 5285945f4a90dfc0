"""What an engine has computed with the weights it had, and how to drop it.

A cache with a side in the engine and one in the workers is always reset on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightload.errors import UsageError

__all__ = ["ALL", "engine_resets", "reset_in_worker", "selected"]

ALL = ("prefix", "multimodal", "encoder", "lora", "kv")
"""The caches of vLLM.

``prefix``: which blocks of the KV cache hold which tokens. ``multimodal``: processed inputs of
pictures and sound. ``encoder``: outputs of encoders. ``lora``: adapters that were merged with the
weights they had. ``kv``: NaN and infinity in the blocks of the KV cache, as weights that are not
finite leave them: attention multiplies what it masks by zero, and NaN times zero is NaN.
"""

_ENGINE = {
    "prefix": "reset_prefix_cache",
    "multimodal": "reset_mm_cache",
    "encoder": "reset_encoder_cache",
}
_WORKER = {
    "multimodal": "reset_mm_cache",
    "encoder": "reset_encoder_cache",
    "lora": "reset_lora_state",
}
_CHUNK_BYTES = 64 << 20


def selected(names: Iterable[str] | bool) -> tuple[str, ...]:
    """Return the caches that are meant: all of them for ``True``, none for ``False``.

    Raises:
        UsageError: a name is not in :data:`ALL`.
    """
    if isinstance(names, bool):
        return ALL if names else ()
    chosen = (names,) if isinstance(names, str) else tuple(names)
    strange = [name for name in chosen if name not in ALL]
    if strange:
        raise UsageError(
            f"reset_caches names {', '.join(map(repr, strange))}; there are {', '.join(ALL)}."
        )
    return chosen


def engine_resets(front: Any, engine: Any, names: Iterable[str]) -> list[Callable[[], Any]]:
    """Return the calls that reset the engine's sides.

    Args:
        front: an ``LLM`` or ``AsyncLLM``.
        engine: what is behind it.
        names: which caches, of :data:`ALL`.
    """
    owners = {"prefix": front, "multimodal": engine, "encoder": engine}
    found = [getattr(owners[name], _ENGINE[name], None) for name in names if name in _ENGINE]
    return [reset for reset in found if callable(reset)]


def reset_in_worker(worker: Any, names: Iterable[str]) -> None:
    """Reset the sides of the caches that are in a worker."""
    for name in names:
        reset = getattr(worker.model_runner, _WORKER.get(name, ""), None)
        if callable(reset):
            reset()
        if name == "kv":
            config = getattr(getattr(worker, "vllm_config", None), "cache_config", None)
            for cache in _kv_caches(worker):
                clean(cache, getattr(config, "block_size", None))


def _kv_caches(worker: Any) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    queue: list[Any] = list(getattr(worker.model_runner, "kv_caches", ()))
    for cache in queue:
        if isinstance(cache, list | tuple):
            queue += cache
        elif isinstance(cache, torch.Tensor) and cache.data_ptr() not in seen:
            seen.add(cache.data_ptr())
            yield cache


def clean(cache: torch.Tensor, block_size: int | None = None) -> bool:
    """Set what is not finite in ``cache`` to zero, in place; return whether there was any.

    Finite values stay, so that requests that go on keep what they have computed. Caches of a
    type without NaN are left alone; eight bit floats are looked at as such.

    A weight that is not finite spoils every token, so that the first token of each block shows
    it, in the same head and channel as all others: if these are finite, so is the rest. A large
    cache is not read whole at every load.

    Args:
        cache: keys and values, or states, of one layer.
        block_size: tokens in a block, if known; every dimension of that size may be the one that
            counts them.
    """
    if not cache.is_floating_point():
        return False
    tokens = [dim for dim, size in enumerate(cache.shape) if size == block_size and size > 1]
    if tokens and all(_finite(cache.select(dim, 0)) for dim in tokens):
        return False
    found = False
    for part in _parts(cache):
        if not _finite(part):
            found = True
            values = part if part.element_size() > 1 else part.float()
            part.copy_(values.masked_fill(~torch.isfinite(values), 0).to(part.dtype))
    return found


def _finite(part: torch.Tensor) -> bool:
    values = part if part.element_size() > 1 else part.float()
    # NaN is the least and the greatest of whatever it is among: one pass and no copy.
    return not part.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(values))


def _parts(cache: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor along its longest dimension, so that a copy of a part is small."""
    dim = max(range(cache.dim()), key=lambda index: cache.shape[index])
    size = max(1, cache.numel() * cache.element_size())
    rows = max(1, cache.shape[dim] * _CHUNK_BYTES // size)
    yield from cache.split(rows, dim)
