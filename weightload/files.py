"""Looks at checkpoint files before anything is loaded from them."""

from __future__ import annotations

import json
import math
import operator
import os
import stat
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from weightload.errors import CheckpointFileError, DuplicateWeightError, UsageError

__all__ = [
    "File",
    "Header",
    "absent_of",
    "checkpoint_folder",
    "path_of",
    "read_files",
    "safetensors_of",
    "stamp_of",
]

_INDEX = "model.safetensors.index.json"
_KINDS = (".safetensors", ".bin", ".pt")
"""How the names of files end that could hold weights."""
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What comes up when JSON is read that says something else than it should."""
_LONGEST_HEADER = 100_000_000
_REMEMBERED = 4 << 20
"""Bytes of headers whose meaning is remembered."""
_PACKED = {"F4": 2}
"""How many elements share a byte, for types whose elements do."""
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ", *_PACKED), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one element as torch counts them, by the names of types in safetensors files."""


class Header(NamedTuple):
    """One tensor of a safetensors file, without its data.

    Attributes:
        dtype: type of the elements, in the file format's words, such as ``"BF16"``.
        shape: sizes as torch counts them: elements that share a byte are one, which a file counts
            apart along the last dimension.
        offset: bytes of the file before its data.
        nbytes: size of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """How many elements it has, also where several share a byte."""
        return math.prod(self.shape) * _PACKED.get(self.dtype, 1)


@attrs.frozen(eq=False)
class File:
    """What one safetensors file holds.

    Attributes:
        path: where it is.
        stamp: what the file was when its header was read; see :func:`stamp_of`.
        headers: of all tensors by name, in the order of their data; not to be changed.
    """

    path: Path
    stamp: tuple[int, int, int]
    headers: Mapping[str, Header]


def path_of(path: Any) -> Path:
    """Return what a caller gave as a path.

    Raises:
        UsageError: it is none.
    """
    try:
        return Path(path)
    except TypeError:
        raise UsageError(
            f"A checkpoint is given as a path, or as the paths of its files; found {path!r}."
        ) from None


def checkpoint_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder at ``path``.

    Raises:
        CheckpointFileError: there is no folder, it cannot be looked at, or there is no file in it
            that could hold weights.
        UsageError: it is no path.
    """
    folder = path_of(path)
    if not any(name.endswith(_KINDS) for name in _names_in(folder)):
        raise CheckpointFileError(
            f"Checkpoint folder {str(folder)!r} holds no *.safetensors, *.bin or *.pt file.",
            path=str(folder),
        )
    return folder


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except NotADirectoryError:
        what = "is a file" if folder.exists() else "does not exist"
    except (FileNotFoundError, ValueError):
        what = "does not exist"
    except OSError as error:
        raise CheckpointFileError(
            f"Checkpoint folder {str(folder)!r} cannot be looked at ({error}).", path=str(folder)
        ) from error
    raise CheckpointFileError(
        f"Checkpoint folder {str(folder)!r} {what}; expected a folder with *.safetensors, "
        f"*.bin or *.pt files.",
        path=str(folder),
    )


def safetensors_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that its index names, if it has one.

    A folder may hold the same tensors a second time, in one consolidated file.

    Raises:
        CheckpointFileError: there is none, or the folder or the index cannot be read.
    """
    named = _index_of(folder)
    if named is not None:
        return sorted(folder / name for name in set(named.values()))
    files = sorted(folder / name for name in _names_in(folder) if name.endswith(_KINDS[0]))
    if not files:
        raise CheckpointFileError(f"{str(folder)!r} holds no *.safetensors file.", path=str(folder))
    return files


def absent_of(folder: Path, files: Iterable[File]) -> list[str]:
    """Return the tensors that a checkpoint's index names and that none of its files holds.

    Raises:
        CheckpointFileError: the index cannot be read.
    """
    named = _index_of(folder) or {}
    return sorted(named.keys() - {name for file in files for name in file.headers})


def _index_of(folder: Path) -> dict[str, str] | None:
    """Return which file each tensor is in, ``None`` if there is no index."""
    index = folder / _INDEX
    try:
        if not index.is_file():
            return None
        named = json.loads(index.read_bytes())["weight_map"]
        return {name: os.fspath(file) for name, file in named.items()}
    except OSError as error:
        raise _bad(index, str(error)) from error
    except _NONSENSE as error:
        raise _bad(index, f"it is no index of safetensors files ({error})") from error


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells one state of a file from another: inode, size, and time of change in ns."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_files(files: Iterable[str | os.PathLike[str]]) -> list[File]:
    """Read the headers of safetensors files and check that their data is all there.

    The format is an 8 byte little-endian length, that many bytes of JSON, and the data
    (https://huggingface.co/docs/safetensors).

    Raises:
        CheckpointFileError: a file is missing, cut short, or no safetensors file.
        DuplicateWeightError: two files hold a tensor of the same name.
        UsageError: one is no path.
    """
    found = [_read(file) for file in map(path_of, files)]
    owners: dict[str, File] = {}
    for file in found:
        for name in owners.keys() & file.headers.keys():
            raise DuplicateWeightError(
                f"{name!r} stands in {owners[name].path.name!r} and in {file.path.name!r}.",
                name=name,
            )
        owners.update(dict.fromkeys(file.headers, file))
    return found


def _read(path: Path) -> File:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for somebody who writes
            raise _bad(path, "it is no regular file")
        with path.open("rb") as stream:
            stamp = stamp_of(os.fstat(stream.fileno()))
            size = stamp[1]
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            if length is None or length > min(_LONGEST_HEADER, size - 8):
                raise _bad(path, f"it has {size} bytes and cannot hold its own header")
            headers, end = _meaning(stream.read(length))
    except OSError as error:
        raise _bad(path, str(error)) from error
    except _NONSENSE as error:
        raise _bad(path, f"its header is no safetensors header ({error})") from error
    if size < end:
        raise _bad(path, f"it has {size} bytes and its header promises {end}")
    return File(path, stamp, headers)


def _meaning(text: bytes) -> tuple[Mapping[str, Header], int]:
    """Return what a header says: of each tensor, in the order of the data, and where that ends.

    One training run writes the same header to each of its checkpoints, so it is remembered.
    """
    with _lock:
        known = _remembered.pop(text, None)
    if known is None:
        known = _parsed(text)
    with _lock:
        _remembered[text] = known
        while sum(map(len, _remembered)) > _REMEMBERED:
            del _remembered[next(iter(_remembered))]
    return known


_lock = threading.Lock()
_remembered: dict[bytes, tuple[Mapping[str, Header], int]] = {}
"""What headers mean, the one that was asked for last at the end."""


def _parsed(text: bytes) -> tuple[Mapping[str, Header], int]:
    headers: list[tuple[str, Header]] = []
    before = end = 8 + len(text)
    for name, entry in json.loads(text).items():
        if name == "__metadata__":
            continue
        begin, finish = map(operator.index, entry["data_offsets"])
        if not 0 <= begin <= finish:
            raise ValueError(f"{name!r} lies at bytes {begin} to {finish}")
        shape = _as_torch_counts(entry["dtype"], tuple(map(operator.index, entry["shape"])))
        header = Header(entry["dtype"], shape, before + begin, finish - begin)
        _check_size(name, header)
        headers.append((name, header))
        end = max(end, before + finish)
    headers.sort(key=_place)
    return dict(headers), end


def _as_torch_counts(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    each = _PACKED.get(dtype)
    if each is None:
        return shape
    if not shape or shape[-1] % each:
        raise ValueError(f"shape {shape} of {dtype} has no whole bytes in its last dimension")
    return (*shape[:-1], shape[-1] // each)


def _place(pair: tuple[str, Header]) -> Any:
    return pair[1].offset


def _check_size(name: str, header: Header) -> None:
    each = _SIZES.get(header.dtype)
    if each is None:
        return  # a type that only the safetensors library knows
    size = each * math.prod(header.shape)
    if size != header.nbytes or any(length < 0 for length in header.shape):
        raise ValueError(
            f"{name!r} has {header.nbytes} bytes, and shape {header.shape} of {header.dtype} takes "
            f"{size}"
        )


def _bad(file: Path, why: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"Checkpoint file {str(file)!r} is not whole: {why}.", path=str(file)
    )
