"""Checks buckets against the records of :mod:`weightload.wire`, and gives their tensors back."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from weightload.errors import TransportError
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

__all__ = ["BucketReader"]

_LARGEST = (1 << 63) - 1
"""The largest size that torch can speak of."""

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
            f"shape {list(self.shape)} of {dtype_name(self.dtype)} takes {self.size} bytes; the "
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
        require_memory(memory)
        rows = self.check(record)
        body = {key: value for key, value in record.items() if key != "digest"}
        found = mark(body, memory[: record["nbytes"]])
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
        self._chain = chained(self._chain, found)
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
        name, type_name, shape, offset, begin, length = row
        _require(isinstance(name, str), f"{where}: a name is text; found {name!r}.")
        where = f"{where}, {name!r}:"
        dtype, sizes = _form(where, [shape, type_name])
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
                f"{where} shape {list(sizes)} of {type_name} came; announced was "
                f"{list(announced[0])} of {dtype_name(announced[1])}.",
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
    dtype = DTYPES.get(name) if isinstance(name, str) else None
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
