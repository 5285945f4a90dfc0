"""Looks at checkpoint files before anything is loaded from them."""

from __future__ import annotations

import json
import math
import operator
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from weightload.errors import CheckpointFileError, DuplicateWeightError

__all__ = ["File", "Header", "checkpoint_folder", "read_files", "safetensors_of", "stamp_of"]

_LONGEST_HEADER = 100_000_000
_REMEMBERED = 4 << 20
"""Bytes of headers whose meaning is remembered."""
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one element, by the names of types in safetensors files."""


class Header(NamedTuple):
    """One tensor of a safetensors file, without its data.

    Attributes:
        dtype: type of the elements, in the file format's words, such as ``"BF16"``.
        shape: sizes.
        offset: bytes of the file before its data.
        nbytes: size of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


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


def checkpoint_folder(path: str | Path) -> Path:
    """Return the folder at ``path``.

    Raises:
        CheckpointFileError: there is no folder, or no file in it that could hold weights.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointFileError(
            f"Checkpoint folder {str(folder)!r} {what}; expected a folder with *.safetensors, "
            f"*.bin or *.pt files.",
            path=str(folder),
        )
    if not any(next(folder.glob(kind), None) for kind in ("*.safetensors", "*.bin", "*.pt")):
        raise CheckpointFileError(
            f"Checkpoint folder {str(folder)!r} holds no *.safetensors, *.bin or *.pt file.",
            path=str(folder),
        )
    return folder


def safetensors_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that its index names, if it has one.

    A folder may hold the same tensors a second time, in one consolidated file.

    Raises:
        CheckpointFileError: there is none, or the index cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_bytes())["weight_map"].values())
            return sorted(folder / name for name in named)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _bad(index, f"it is no index of safetensors files ({error})") from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointFileError(f"{str(folder)!r} holds no *.safetensors file.", path=str(folder))
    return files


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells one state of a file from another: inode, size, and time of change in ns."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_files(files: Iterable[str | Path]) -> list[File]:
    """Read the headers of safetensors files and check that their data is all there.

    The format is an 8 byte little-endian length, that many bytes of JSON, and the data
    (https://huggingface.co/docs/safetensors).

    Raises:
        CheckpointFileError: a file is missing, cut short, or no safetensors file.
        DuplicateWeightError: two files hold a tensor of the same name.
    """
    found = [_read(file) for file in map(Path, files)]
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
        shape = tuple(map(operator.index, entry["shape"]))
        header = Header(entry["dtype"], shape, before + begin, finish - begin)
        _check_size(name, header)
        headers.append((name, header))
        end = max(end, before + finish)
    headers.sort(key=_place)
    return dict(headers), end


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
