"""Looks at checkpoint files before anything is loaded from them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import attrs

from weightload.errors import CheckpointFileError, DuplicateWeightError

__all__ = ["Header", "checkpoint_folder", "read_headers"]

_LONGEST_HEADER = 100_000_000


@attrs.frozen(kw_only=True)
class Header:
    """One tensor of a safetensors file, without its data.

    Attributes:
        file: where it is.
        dtype: type of the elements, in the file format's words, such as ``"BF16"``.
        shape: sizes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


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
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
            if length is None or length > min(_LONGEST_HEADER, size - 8):
                raise _bad(file, f"it has {size} bytes and cannot hold its own header")
            table = json.loads(stream.read(length))
            data = {name: entry for name, entry in table.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in data.values()), default=0)
            headers = {
                name: Header(file=file, dtype=entry["dtype"], shape=tuple(entry["shape"]))
                for name, entry in data.items()
            }
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
