"""Hands tensors to other processes of one machine through a shared-memory file."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["BucketWriter", "read_bucket"]

_ALIGNMENT = 64
_DEFAULT_BYTES = 64 << 20


class BucketWriter:
    """Packs named tensors into one file that is filled again and again.

    Args:
        nbytes: capacity; a tensor that is larger makes the file grow.
    """

    def __init__(self, nbytes: int = _DEFAULT_BYTES) -> None:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="weightload-", dir=folder)
        os.close(handle)
        self.path = name
        self._capacity = 0
        self._memory: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self._capacity = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.truncate(self.path, self._capacity)
        self._memory = torch.from_file(
            self.path, shared=True, size=self._capacity, dtype=torch.uint8
        )

    def fill(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[Any]]:
        """Yield one table for each bucket; the file may be read until the next is asked for.

        A table has a row ``[name, dtype, shape, offset]`` for each tensor: builtin types only.
        """
        table: list[Any] = []
        used = 0
        for name, tensor in weights:
            size = tensor.numel() * tensor.element_size()
            if table and used + size > self._capacity:
                yield table
                table, used = [], 0
            if size > self._capacity:
                self._grow(size)
            place = self._memory[used : used + size].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            table.append([name, dtype, list(tensor.shape), used])
            used = -(-(used + size) // _ALIGNMENT) * _ALIGNMENT
            used = min(used, self._capacity)
        if table:
            yield table

    def close(self) -> None:
        """Remove the file; processes that have mapped it keep their mapping."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        Path(self.path).unlink(missing_ok=True)


def read_bucket(path: str, table: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket as views of the file; they are the writer's memory."""
    memory = torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)
    for name, dtype_name, shape, offset in table:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[offset : offset + size].view(dtype).view(shape)
