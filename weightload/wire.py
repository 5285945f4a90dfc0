"""The format in which tensors travel: flat buckets of bytes, and records that say what is in them.

An update is an *opening*, buckets that are numbered from 0, and a *closing*. A bucket is a run of
bytes that the transport moves, and its record: builtin types only, so that JSON can carry it::

    opening  {"format", "update", "capacity", "version", "forms"}
    bucket   {"format", "update", "index", "nbytes", "rows", "digest"}
    closing  {"format", "update", "buckets", "tensors", "nbytes", "digest"}

A row is ``[name, dtype, shape, offset, begin, length]``: bytes ``begin`` to ``begin + length`` of the
tensor lie at ``offset`` in the bucket. A tensor that is larger than a bucket comes in parts, in order,
each with a row of its own. ``forms`` are the names, shapes and dtypes of everything that will come, if
that is known. A bucket's digest covers its bytes and its record; the closing's digest covers those of
the buckets in their order.

The reader checks a record before it looks at a byte, and every byte before it hands out a tensor.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from weightload.digest import digest
from weightload.errors import UsageError

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "FORMAT",
    "Pair",
    "Record",
    "chained",
    "dtype_name",
    "mark",
    "require_memory",
]

FORMAT = 1
"""The number of this format; a reader knows one."""

ALIGNMENT = 64
"""Offsets in a bucket are multiples of this, so that any dtype may lie there."""

_NAMES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2
"""
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)
}
"""What may travel: types whose values are their bytes, as those of quantized tensors are not."""

Record = dict[str, Any]
Pair = tuple[str, torch.Tensor]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type, as records have it."""
    return str(dtype).removeprefix("torch.")


def require_memory(memory: Any) -> None:
    """Refuse memory that no bucket can lie in.

    Raises:
        UsageError: it is not as it has to be.
    """
    fits = (
        isinstance(memory, torch.Tensor)
        and memory.dtype == torch.uint8
        and memory.dim() == 1
        and memory.is_contiguous()
        and memory.storage_offset() % ALIGNMENT == 0
    )
    if not fits:
        found = type(memory).__name__
        if isinstance(memory, torch.Tensor):
            found = f"shape {list(memory.shape)} of {dtype_name(memory.dtype)}, strides "
            found += f"{memory.stride()}, from element {memory.storage_offset()} on"
        raise UsageError(
            f"The memory of a bucket is a tensor of uint8, in one dimension, without gaps, that "
            f"begins at a multiple of {ALIGNMENT} bytes of its storage; found {found}."
        )


def mark(record: Record, octets: torch.Tensor) -> str:
    """Return a digest of a record without digest, and of the bytes that it is about."""
    text = json.dumps([record, digest(octets)], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def chained(before: str, after: str) -> str:
    """Return a digest of a digest and of the one that comes after it."""
    return hashlib.blake2b((before + after).encode(), digest_size=8).hexdigest()
