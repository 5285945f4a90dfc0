"""Packs named tensors into buckets, and writes the records of :mod:`weightload.wire` about them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weightload.errors import UsageError
from weightload.sources import unpack
from weightload.storage import inner_tensors, storage_key
from weightload.wire import (
    ALIGNMENT,
    DTYPES,
    FORMAT,
    Pair,
    Record,
    chained,
    dtype_name,
    mark,
    require_memory,
)

__all__ = ["BucketWriter", "forms_of", "size_of"]


def forms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what an opening says about tensors: ``{name: [shape, dtype]}``.

    Raises:
        UsageError: one is no tensor, or of a type that cannot be sent.
    """
    for name, one in tensors.items():
        _require_tensor(name, one)
    return {name: [list(one.shape), dtype_name(one.dtype)] for name, one in tensors.items()}


def size_of(name: Any, tensor: Any) -> int:
    """Return how many bytes of a tensor are sent.

    Raises:
        UsageError: it is no tensor, or has no plain bytes to send.
    """
    _require_tensor(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UsageError(f"{name!r} is {what}, so it has no run of bytes to send.")
    if storage_key(tensor) is None or inner_tensors(tensor):
        raise UsageError(
            f"{name!r} is a {type(tensor).__name__}, which keeps its values in other tensors, so it "
            f"has no run of bytes to send. Send a plain tensor of the same values; of a DTensor "
            f"that is tensor.full_tensor()."
        )
    nbytes: int = tensor.nbytes
    return nbytes


class BucketWriter:
    """Packs named tensors into runs of bytes that are filled again and again.

    Args:
        memory: uint8, one dimension: where buckets are packed. Its size is the capacity, and a
            multiple of :data:`ALIGNMENT`.
        spare: more of the same size, for transports that send one bucket while the next is packed:
            bucket 0 goes to ``memory``, bucket 1 to the first of these, and so on in turn.
        forms: what will be sent, as :func:`forms_of` gives it, if that is known.
        version: what the sender calls these weights.
        update: a name for this update that no other one has; by default one is drawn.

    Attributes:
        update: names this update.

    Raises:
        UsageError: the memory is not as it has to be.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        *,
        spare: Sequence[torch.Tensor] = (),
        forms: Mapping[str, Any] | None = None,
        version: str | int | None = None,
        update: str | None = None,
    ) -> None:
        self._memories = [memory, *spare]
        for each in self._memories:
            require_memory(each)
        if not memory.numel() or memory.numel() % ALIGNMENT:
            raise UsageError(
                f"A bucket holds a multiple of {ALIGNMENT} bytes, found {memory.numel()}."
            )
        sizes = [each.numel() for each in self._memories]
        if len(set(sizes)) > 1:
            raise UsageError(f"All memory of a writer has one size, found {sizes} bytes.")
        self.update = uuid.uuid4().hex if update is None else update
        self._forms = None if forms is None else dict(forms)
        self._version = version
        self._rows: list[list[Any]] = []
        self._used = 0
        self._buckets = self._tensors = self._nbytes = 0
        self._chain = ""

    @property
    def _memory(self) -> torch.Tensor:
        return self._memories[self._buckets % len(self._memories)]

    def opening(self) -> Record:
        """Return the record that comes first."""
        return {
            "format": FORMAT,
            "update": self.update,
            "capacity": self._memory.numel(),
            "version": self._version,
            "forms": self._forms,
        }

    def fill(self, weights: Iterable[Pair]) -> Iterator[Record]:
        """Yield the record of each bucket.

        The memory holds it until the next one that goes there is asked for.

        Raises:
            UsageError: what comes under a name is no tensor, or has no plain bytes to send.
            WeightMismatchError: something comes that is no pair.
        """
        capacity = self._memories[0].numel()
        for name, tensor in map(unpack, weights):
            octets = _octets(name, tensor)
            size = octets.numel()
            if self._rows and self._used + size > capacity:
                yield self._flush()
            begin = 0
            while True:
                length = min(size - begin, capacity - self._used)
                self._put(name, tensor, begin, octets[begin : begin + length])
                begin += length
                if begin == size:
                    break
                yield self._flush()
            self._tensors += 1
        if self._rows:
            yield self._flush()

    def closing(self) -> Record:
        """Return the record that comes last."""
        return {
            "format": FORMAT,
            "update": self.update,
            "buckets": self._buckets,
            "tensors": self._tensors,
            "nbytes": self._nbytes,
            "digest": self._chain,
        }

    def _put(self, name: str, tensor: torch.Tensor, begin: int, octets: torch.Tensor) -> None:
        length = octets.numel()
        self._memory[self._used : self._used + length].copy_(octets)
        shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
        self._rows.append([name, dtype, shape, self._used, begin, length])
        self._used = -(-(self._used + length) // ALIGNMENT) * ALIGNMENT
        self._nbytes += length

    def _flush(self) -> Record:
        record: Record = {
            "format": FORMAT,
            "update": self.update,
            "index": self._buckets,
            "nbytes": self._used,
            "rows": self._rows,
        }
        record["digest"] = mark(record, self._memory[: self._used])
        self._chain = chained(self._chain, record["digest"])
        self._rows, self._used = [], 0
        self._buckets += 1
        return record


def _require_tensor(name: Any, one: Any) -> None:
    """Raise if a tensor cannot be sent, whatever its bytes are."""
    if not isinstance(name, str):
        raise UsageError(f"The name of a tensor is text, found {name!r}.")
    if not isinstance(one, torch.Tensor):
        raise UsageError(f"{name!r} is a {type(one).__name__}; only tensors can be sent.")
    if dtype_name(one.dtype) not in DTYPES:
        raise UsageError(
            f"{name!r} is of {dtype_name(one.dtype)}, which cannot be sent: its values are more "
            f"than its bytes. Send what it is made of."
        )


def _octets(name: Any, tensor: Any) -> torch.Tensor:
    """Return the bytes of a tensor, in order."""
    size_of(name, tensor)
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg()
    # One element counts as contiguous, whatever its stride, and then is no view of bytes.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)
