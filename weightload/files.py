"""Looks at checkpoint files before anything is loaded from them."""

from __future__ import annotations

import json
import operator
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from weightload.errors import CheckpointFileError, DuplicateWeightError

__all__ = ["Header", "checkpoint_folder", "read_headers", "safetensors_of", "stamp_of"]

_LONGEST_HEADER = 100_000_000


class Header(NamedTuple):
    """One tensor of a safetensors file, without its data.

    Attributes:
        file: where it is.
        dtype: type of the elements, in the file format's words, such as ``"BF16"``.
        shape: sizes.
        offset: bytes of the file before its data.
        nbytes: size of its data.
        stamp: what the file was when its header was read; see :func:`stamp_of`.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stamp: tuple[int, int, int]


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


def read_headers(files: Iterable[str | Path]) -> dict[str, Header]:
    """Read the headers of safetensors files and check that their data is all there.

    The format is an 8 byte little-endian length, that many bytes of JSON, and the data
    (https://huggingface.co/docs/safetensors).

    Raises:
        CheckpointFileError: a file is missing, cut short, or no safetensors file.
        DuplicateWeightError: two files hold a tensor of the same name.
    """
    found: dict[str, Header] = {}
    for file in map(Path, files):
        for name, header in _read_header(file).items():
            if name in found:
                raise DuplicateWeightError(
                    f"{name!r} stands in {found[name].file.name!r} and in {file.name!r}.",
                    name=name,
                )
            found[name] = header
    return found


def _read_header(file: Path) -> dict[str, Header]:
    try:
        with file.open("rb") as stream:
            stamp = stamp_of(os.fstat(stream.fileno()))
            size = stamp[1]
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            if length is None or length > min(_LONGEST_HEADER, size - 8):
                raise _bad(file, f"it has {size} bytes and cannot hold its own header")
            table = json.loads(stream.read(length))
            data = {name: entry for name, entry in table.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in data.values()), default=0)
            headers = {}
            for name, entry in data.items():
                begin, finish = map(operator.index, entry["data_offsets"])
                if not 0 <= begin <= finish:
                    raise ValueError(f"{name!r} lies at bytes {begin} to {finish}")
                headers[name] = Header(
                    file=file,
                    dtype=entry["dtype"],
                    shape=tuple(map(operator.index, entry["shape"])),
                    offset=8 + length + begin,
                    nbytes=finish - begin,
                    stamp=stamp,
                )
    except OSError as error:
        raise _bad(file, str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _bad(file, f"its header is no safetensors header ({error})") from error
    if size < 8 + length + end:
        raise _bad(file, f"it has {size} bytes and its header promises {8 + length + end}")
    return headers


def _bad(file: Path, why: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"Checkpoint file {str(file)!r} is not whole: {why}.", path=str(file)
    )
