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
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from weightload.digest import digest
from weightload.errors import TransportError, UsageError

__all__ = ["ALIGNMENT", "BucketReader", "BucketWriter", "forms_of"]

FORMAT = 1
ALIGNMENT = 64
"""Offsets in a bucket are multiples of this, so that any dtype may lie there."""

_LARGEST = (1 << 63) - 1
"""The largest size that torch can speak of."""

_NAMES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2
"""
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)
}
"""What may travel: types whose values are their bytes, as those of quantized tensors are not."""

Record = dict[str, Any]
Pair = tuple[str, torch.Tensor]

_RECORDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "opening": {
        "format": int,
        "update": str,
        "capacity": int,
        "version": (str, int, type(None)),
        "forms": (dict, type(None)),
    },
    "bucket": {
        "format": int,
        "update": str,
        "index": int,
        "nbytes": int,
        "rows": list,
        "digest": str,
    },
    "closing": {
        "format": int,
        "update": str,
        "buckets": int,
        "tensors": int,
        "nbytes": int,
        "digest": str,
    },
}


def forms_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what an opening says about tensors: ``{name: [shape, dtype]}``.

    Raises:
        UsageError: one is no tensor, or of a type that cannot be sent.
    """
    for name, one in tensors.items():
        _require_tensor(name, one)
    return {name: [list(one.shape), _dtype_name(one.dtype)] for name, one in tensors.items()}


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
            _require_memory(each)
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
        """
        capacity = self._memories[0].numel()
        for name, tensor in weights:
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
        shape, dtype = list(tensor.shape), _dtype_name(tensor.dtype)
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
        record["digest"] = _mark(record, self._memory[: self._used])
        self._chain = _chained(self._chain, record["digest"])
        self._rows, self._used = [], 0
        self._buckets += 1
        return record


@attrs.frozen
class _Row:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    begin: int
    length: int

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def takes(self) -> str:
        return (
            f"shape {list(self.shape)} of {_dtype_name(self.dtype)} takes {self.size} bytes; the "
            f"row brings bytes {self.begin} to {self.begin + self.length}"
        )

    @property
    def is_last(self) -> bool:
        return self.begin + self.length == self.size


class BucketReader:
    """Checks what comes, and gives tensors back. One reader reads one update.

    Args:
        opening: the record that came first.
        capacity: size of the memory that buckets come in, in bytes, as agreed before.

    Attributes:
        update: names the update.
        version: what the sender calls these weights.
        forms: shape and dtype of every tensor that will come, or ``None`` if that is not known.

    Raises:
        TransportError: the record is no opening, or speaks of another capacity.
    """

    def __init__(self, opening: Any, capacity: int) -> None:
        _check_fields("opening", opening)
        self.update: str = opening["update"]
        self.version: str | int | None = opening["version"]
        self.forms = None if opening["forms"] is None else _forms(opening["forms"])
        self._capacity = capacity
        _require(
            opening["capacity"] == capacity,
            f"The sender's buckets hold {opening['capacity']} bytes, and {capacity} were agreed "
            f"at the handshake.",
        )
        self._index = self._nbytes = 0
        self._chain = ""
        self._closed = False
        self._seen: set[str] = set()
        self._part: torch.Tensor | None = None
        self._row: _Row | None = None

    def check(self, record: Any) -> list[_Row]:
        """Check a bucket's record against itself and what came before, without its bytes.

        Raises:
            TransportError: a field is missing or of the wrong type, the bucket is of another
                update, came before, out of order or after the closing, or a row cannot be true.
        """
        _check_fields("bucket", record)
        self._same_update(record)
        index, nbytes = record["index"], record["nbytes"]
        _require(not self._closed, f"Bucket {index} came after the closing of its update.")
        what = "came again" if index < self._index else "came, and those before it were left out"
        _require(index == self._index, f"Bucket {index} {what}; bucket {self._index} was expected.")
        _require(
            nbytes <= self._capacity,
            f"Bucket {index} has {nbytes} bytes; it may have {self._capacity}.",
        )
        rows = [self._row_of(index, row) for row in record["rows"]]
        end, new, open_row = 0, set(), self._row
        for row in rows:
            where = f"Bucket {index}, {row.name!r}:"
            _require(
                end <= row.offset and row.offset + row.length <= nbytes,
                f"{where} it lies at bytes {row.offset} to {row.offset + row.length}; "
                f"expected within {end} to {nbytes}.",
            )
            end = row.offset + row.length
            _require(row.is_last or row is rows[-1], f"{where} {row.takes}, and others follow.")
            self._in_turn(where, row, open_row)
            _require(
                row.name not in self._seen and row.name not in new,
                f"{where} it came twice in this update.",
            )
            if row.is_last:
                new.add(row.name)
            open_row = None if row.is_last else row
        return rows

    def take(self, record: Any, memory: torch.Tensor) -> list[Pair]:
        """Return the tensors that a bucket makes complete.

        Args:
            record: the bucket's record.
            memory: uint8, one dimension: where the bucket's bytes are. What came whole is
                returned as views of it.

        Raises:
            TransportError: the record does not hold, the bytes are not those that it is about, or
                there is no room for a tensor that comes in parts. The bucket may be sent again.
            UsageError: the memory is not as it has to be.
        """
        _require_memory(memory)
        rows = self.check(record)
        body = {key: value for key, value in record.items() if key != "digest"}
        found = _mark(body, memory[: record["nbytes"]])
        _require(
            found == record["digest"],
            f"Bucket {self._index} has the digest {found}; expected {record['digest']}. Its bytes "
            f"or its record were changed on the way. Nothing of it was loaded.",
        )
        whole: list[Pair] = []
        part, open_row = self._part, self._row
        for row in rows:
            octets = memory[row.offset : row.offset + row.length]
            if row.length != row.size:
                if part is None:
                    where = f"Bucket {self._index}, {row.name!r}:"
                    part = _space(where, row, memory.device)
                part[row.begin : row.begin + row.length].copy_(octets)
                if not row.is_last:
                    open_row = row
                    continue
                octets, part, open_row = part, None, None
            whole.append((row.name, octets.view(row.dtype).view(row.shape)))
        # Only now that nothing can fail: a bucket that was refused may be sent again.
        self._part, self._row = part, open_row
        self._seen.update(name for name, _ in whole)
        self._nbytes += sum(row.length for row in rows)
        self._chain = _chained(self._chain, found)
        self._index += 1
        return whole

    def close(self, record: Any) -> None:
        """Check that everything came.

        Raises:
            TransportError: a bucket or tensor is missing, the buckets are not those sent, or the
                update was closed before.
        """
        _check_fields("closing", record)
        self._same_update(record)
        _require(not self._closed, "The update was closed already.")
        _require(self._row is None, f"{self._row.name if self._row else ''!r} never came whole.")
        for what, count in (
            ("buckets", self._index),
            ("tensors", len(self._seen)),
            ("nbytes", self._nbytes),
            ("digest", self._chain),
        ):
            _require(
                record[what] == count,
                f"The sender closed the update with {what} {record[what]}; received {count}.",
            )
        if self.forms is not None:
            missing = sorted(self.forms.keys() - self._seen)
            _require(
                not missing,
                f"{len(missing)} of {len(self.forms)} announced tensors never came, "
                f"{missing[0] if missing else ''!r} among them.",
            )
        self._closed = True

    def _same_update(self, record: Record) -> None:
        _require(
            record["update"] == self.update,
            f"A record of update {record['update']} came into update {self.update}.",
        )

    def _row_of(self, index: int, row: Any) -> _Row:
        where = f"Bucket {index}"
        _require(
            isinstance(row, list | tuple) and len(row) == 6,
            f"{where}: a row is [name, dtype, shape, offset, begin, length]; found {row!r}.",
        )
        name, dtype_name, shape, offset, begin, length = row
        _require(isinstance(name, str), f"{where}: a name is text; found {name!r}.")
        where = f"{where}, {name!r}:"
        dtype, sizes = _form(where, [shape, dtype_name])
        _require(
            all(_is_count(number) for number in (offset, begin, length)) and not offset % ALIGNMENT,
            f"{where} offset, begin and length are whole numbers from 0, the offset a multiple of "
            f"{ALIGNMENT}; found {offset!r}, {begin!r}, {length!r}.",
        )
        found = _Row(name, dtype, sizes, offset, begin, length)
        _require(
            begin + length <= found.size and (length > 0 or found.size == 0),
            f"{where} {found.takes}.",
        )
        if self.forms is not None:
            _require(name in self.forms, f"{where} it was not announced at the opening.")
            announced = self.forms[name]
            _require(
                (sizes, dtype) == announced,
                f"{where} shape {list(sizes)} of {dtype_name} came; announced was "
                f"{list(announced[0])} of {_dtype_name(announced[1])}.",
            )
        return found

    @staticmethod
    def _in_turn(where: str, row: _Row, before: _Row | None) -> None:
        """Check that the parts of a tensor come one after another, and nothing between them."""
        if before is None:
            _require(row.begin == 0, f"{where} bytes 0 to {row.begin} never came.")
            return
        _require(
            (row.name, row.shape, row.dtype) == (before.name, before.shape, before.dtype)
            and row.begin == before.begin + before.length,
            f"{where} it came from byte {row.begin} on; expected was {before.name!r} from byte "
            f"{before.begin + before.length} on.",
        )


def _space(where: str, row: _Row, device: torch.device) -> torch.Tensor:
    """Make room for a tensor that comes in parts."""
    try:
        return torch.empty(row.size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise TransportError(f"{where} there is no room for its {row.size} bytes.") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TransportError(otherwise)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_fields(kind: str, record: Any) -> None:
    fields = _RECORDS[kind]
    _require(
        isinstance(record, dict) and record.keys() == fields.keys(),
        f"The record of {kind} has the fields {', '.join(fields)}; found "
        f"{', '.join(map(str, record)) if isinstance(record, dict) else type(record).__name__}.",
    )
    for name, expected in fields.items():
        value = record[name]
        _require(
            _is_count(value) if expected is int else isinstance(value, expected),
            f"Field {name!r} of {kind} is {value!r}, which it cannot be.",
        )
    _require(record["format"] == FORMAT, f"The format is {record['format']}; known is {FORMAT}.")


def _forms(forms: dict[Any, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    found = {}
    for name, form in forms.items():
        _require(isinstance(name, str), f"The opening: a name is text; found {name!r}.")
        dtype, shape = _form(f"The opening, {name!r}:", form)
        found[name] = shape, dtype
    return found


def _form(where: str, form: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    _require(
        isinstance(form, list | tuple) and len(form) == 2,
        f"{where} a form is [shape, dtype]; found {form!r}.",
    )
    shape, name = form
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise TransportError(f"{where} {name!r} is no dtype that can be sent.")
    _require(
        isinstance(shape, list | tuple) and all(_is_count(size) for size in shape),
        f"{where} a shape is a list of whole numbers from 0; found {shape!r}.",
    )
    # A size of 0 makes the others no smaller: torch computes with them.
    _require(
        math.prod(max(size, 1) for size in shape) * dtype.itemsize <= _LARGEST,
        f"{where} no tensor can have the shape {shape!r}.",
    )
    return dtype, tuple(shape)


def _require_tensor(name: Any, one: Any) -> None:
    """Raise if a tensor cannot be sent, whatever its bytes are."""
    if not isinstance(name, str):
        raise UsageError(f"The name of a tensor is text, found {name!r}.")
    if not isinstance(one, torch.Tensor):
        raise UsageError(f"{name!r} is a {type(one).__name__}; only tensors can be sent.")
    if _dtype_name(one.dtype) not in _DTYPES:
        raise UsageError(
            f"{name!r} is of {_dtype_name(one.dtype)}, which cannot be sent: its values are more "
            f"than its bytes. Send what it is made of."
        )


def _require_memory(memory: Any) -> None:
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
            found = f"shape {list(memory.shape)} of {_dtype_name(memory.dtype)}, strides "
            found += f"{memory.stride()}, from element {memory.storage_offset()} on"
        raise UsageError(
            f"The memory of a bucket is a tensor of uint8, in one dimension, without gaps, that "
            f"begins at a multiple of {ALIGNMENT} bytes of its storage; found {found}."
        )


def _octets(name: Any, tensor: Any) -> torch.Tensor:
    """Return the bytes of a tensor, in order."""
    _require_tensor(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise UsageError(f"{name!r} is {what}, so it has no run of bytes to send.")
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg()
    # One element counts as contiguous, whatever its stride, and then is no view of bytes.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mark(record: Record, octets: torch.Tensor) -> str:
    """Return a digest of a record without digest, and of the bytes that it is about."""
    text = json.dumps([record, digest(octets)], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _chained(before: str, mark: str) -> str:
    return hashlib.blake2b((before + mark).encode(), digest_size=8).hexdigest()
