"""Reads tensors of safetensors files, each straight into memory that is there already.

A file that is cut short while it is read gives an error and no signal that ends the process: it is mapped
only where nobody can do that meanwhile (see :mod:`weightload.mapped`), and read otherwise. Then
neighbours in the file go into their places with one ``preadv`` call, whatever number of places that is. Reads follow the order of the
file, in steps of some MiB: that is what the system's own read-ahead is made for. Reading ahead by
threads, or by advice to the system, was measured and lost, with the file in the page cache and without
(docs/how-to/files.md has the figures).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weightload.errors import CheckpointFileError, UnsupportedError
from weightload.files import (
    File,
    Header,
    checkpoint_folder,
    path_of,
    read_files,
    safetensors_of,
    stamp_of,
)
from weightload.mapped import Mapped
from weightload.moving import carry

__all__ = ["Checkpoint", "Forms", "Handle", "Piece", "Place", "dtype_of", "opened", "read_pieces"]

_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
"""The names of types in safetensors files (https://huggingface.co/docs/safetensors), and torch's."""
_DTYPES = {name: getattr(torch, ours) for name, ours in _TYPES.items() if hasattr(torch, ours)}
_MOST = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 16
"""How many places one call may fill."""
_WORTH_MAPPING = 1 << 20
"""Bytes of a piece, on average, from which on it is quicker to look at a file's pages."""


class Place(NamedTuple):
    """Where a run of bytes of a tensor goes.

    Attributes:
        start: bytes of the tensor before it.
        nbytes: its size.
        address: of the host's memory that takes it.
        tensor: contiguous and of that size, if it goes to a device.
    """

    start: int
    nbytes: int
    address: int
    tensor: torch.Tensor | None = None


Piece = tuple[int, int, int]
"""A run of bytes of a file, and where it goes: bytes before it, its size, address of the memory."""


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files, by name: looked up without their data, read when asked for.

    :meth:`WeightLoadSession.load` reads each tensor straight to the place where it belongs, where it
    knows that place; for everybody else this is a mapping, and each look-up reads its tensor anew.

    Args:
        source: a folder, a file, or several files. Of a folder with an index, the files that it
            names.

    Attributes:
        files: the files.
        contents: what each of them holds.
        nbytes: size of all tensors.

    Raises:
        CheckpointFileError: there is no such file, or one is cut short or no safetensors file.
        DuplicateWeightError: two files hold a tensor of the same name.
        UsageError: what was given is no path.
    """

    def __init__(self, source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        if not isinstance(source, str | bytes | os.PathLike) and isinstance(source, Iterable):
            self.files = [path_of(file) for file in source]
        elif str(path_of(source)).endswith(".safetensors"):
            self.files = [path_of(source)]
        else:
            self.files = safetensors_of(checkpoint_folder(source))
        self.contents = read_files(self.files)
        self._headers: dict[str, Header] = {}
        for file in self.contents:
            self._headers.update(file.headers)
        self.nbytes = sum(header.nbytes for header in self._headers.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        header = self._headers[name]
        file = next(file for file in self.contents if name in file.headers)
        dtype = dtype_of(header)
        if dtype is None:
            return _by_library(name, header, file)
        found = torch.empty(header.shape, dtype=dtype, device="cpu")
        with opened(file) as handle:
            read_pieces(handle, file, [(header.offset, header.nbytes, found.data_ptr())])
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._headers

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def __repr__(self) -> str:
        return f"<Checkpoint of {len(self)} tensors in {len(self.files)} files>"

    @property
    def forms(self) -> Forms:
        """What :meth:`WeightLoadSession.check` asks for: shapes and types, without any data."""
        return Forms(self, self._headers)


class Forms(Mapping[str, Any]):
    """The shape and type of every tensor of a checkpoint, and the tensors if they are asked for."""

    def __init__(self, checkpoint: Checkpoint, headers: dict[str, Header]) -> None:
        self._checkpoint = checkpoint
        self._headers = headers

    def __getitem__(self, name: str) -> Any:
        header = self._headers[name]
        dtype = dtype_of(header)
        return header.shape if dtype is None else (header.shape, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        return self._checkpoint[name]


def dtype_of(header: Header) -> torch.dtype | None:
    """Return torch's type for what a file holds, ``None`` if only the safetensors library knows."""
    return _DTYPES.get(header.dtype)


class Handle:
    """A file that is open to be read.

    Args:
        number: the system's, of the open file.
        nbytes: its size.
        maps: whether it may be mapped.
    """

    def __init__(self, number: int, nbytes: int, *, maps: bool) -> None:
        self.number = number
        self.nbytes = nbytes
        self._mapped: Mapped | None = None
        self._maps = maps

    def mapped(self, begin: int, end: int) -> int | None:
        """Return where the file is in memory, if these bytes of it can be copied from there."""
        if not self._maps:
            return None
        if self._mapped is None:
            self._mapped = Mapped.of(self.number, self.nbytes)
        if self._mapped is None or not self._mapped.holds(begin, end):
            self.close()
            return None
        return self._mapped.address

    def close(self) -> None:
        """Look at the file by reading it from now on."""
        self._maps = False
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


@contextmanager
def opened(file: File, *, whole: bool = False) -> Iterator[Handle]:
    """Open a file to read from it, and see that it stays as it was.

    Args:
        file: what it holds.
        whole: whether so much of it is going to be read that it is worth mapping.

    Raises:
        CheckpointFileError: it cannot be opened, or has changed since its header was read, or while
            the block ran.
    """
    try:
        number = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise _broken(file, f"it cannot be opened ({error})") from error
    handle = Handle(number, file.stamp[1], maps=whole)
    try:
        _check_stamp(number, file)
        yield handle
        _check_stamp(number, file)
    finally:
        handle.close()
        os.close(number)


def read_pieces(handle: Handle, file: File, pieces: Iterable[Piece]) -> None:
    """Read pieces of one file into memory of the host, which is written wherever they say.

    Args:
        handle: the open file.
        file: what it holds.
        pieces: where in the file, and the memory, which the caller keeps alive; in any order, and
            best in that of the file.

    Raises:
        CheckpointFileError: the file ends before a piece does, or cannot be read.
    """
    pieces = [piece for piece in pieces if piece[1]]
    if not pieces:
        return
    first = min(offset for offset, _, _ in pieces)
    last = max(offset + nbytes for offset, nbytes, _ in pieces)
    worth = sum(nbytes for _, nbytes, _ in pieces) >= _WORTH_MAPPING * len(pieces)
    memory = handle.mapped(first, last) if worth and last <= handle.nbytes else None
    if memory is not None:
        for offset, nbytes, address in pieces:
            carry(address, memory + offset, nbytes)
        return
    number = handle.number
    spans: list[tuple[int, int]] = []
    start = end = stop = 0
    for offset, nbytes, address in pieces:
        if offset != end or len(spans) == _MOST:
            _read(number, file, spans, start)
            spans, start = [(address, nbytes)], offset
        elif address == stop:
            spans[-1] = spans[-1][0], spans[-1][1] + nbytes
        else:
            spans.append((address, nbytes))
        end, stop = offset + nbytes, address + nbytes
    _read(number, file, spans, start)


def _read(handle: int, file: File, spans: list[tuple[int, int]], at: int) -> None:
    """Fill places, each given by its address and size, one after another from one run of a file."""
    buffers: list[Any] = [(ctypes.c_char * size).from_address(address) for address, size in spans]
    while buffers:
        try:
            count = os.preadv(handle, buffers, at)
        except OSError as error:
            raise _broken(file, f"{_name_at(file, at)!r} cannot be read ({error})") from error
        if not count:
            _check_stamp(handle, file)
            raise _broken(file, f"it ends at byte {at}, inside of {_name_at(file, at)!r}")
        at += count
        done = 0
        while done < len(buffers) and count >= len(buffers[done]):
            count -= len(buffers[done])
            done += 1
        del buffers[:done]
        if count:  # the system reads 2 GiB at most in one call
            buffers[0] = memoryview(buffers[0]).cast("B")[count:]


def _name_at(file: File, at: int) -> str | None:
    """Return the tensor that a byte of a file belongs to."""
    inside = (name for name, one in file.headers.items() if 0 <= at - one.offset < one.nbytes)
    return next(inside, None)


def _check_stamp(handle: int, file: File) -> None:
    if stamp_of(os.fstat(handle)) != file.stamp:
        raise _broken(file, "it has changed since its header was read")


def _by_library(name: str, header: Header, file: File) -> torch.Tensor:
    """Read a tensor of a type that only the safetensors library knows."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UnsupportedError(
            f"{name!r} in {file.path.name!r} is of type {header.dtype}, which takes the package "
            f"safetensors to read.",
            name=name,
        ) from error
    with opened(file):
        try:
            with safe_open(file.path, framework="pt") as library:
                found: torch.Tensor = library.get_tensor(name).clone()  # of what it has mapped
            now = stamp_of(file.path.stat())  # what it has opened may be another file by then
        except OSError as error:
            raise _broken(file, f"{name!r} cannot be read ({error})") from error
        except SafetensorError as error:
            raise UnsupportedError(
                f"{name!r} in {file.path.name!r} is of type {header.dtype}, which neither torch "
                f"knows nor the package safetensors ({error}).",
                name=name,
            ) from error
        if now != file.stamp:
            raise _broken(file, "it has changed since its header was read")
    return found


def _broken(file: File, why: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"Checkpoint file {str(file.path)!r} cannot be read as it was found: {why}. Write "
        f"checkpoints aside and move them to their place when they are whole.",
        path=str(file.path),
    )
