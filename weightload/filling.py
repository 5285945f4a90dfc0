"""Brings the tensors of a checkpoint to a session: to their places where those are known.

All others are read into memory that is used again and again, and lent to the model's loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightload.bounce import Bounce
from weightload.bundle import Bundle
from weightload.files import File, Header
from weightload.quick import Quick
from weightload.reading import (
    Checkpoint,
    Handle,
    Piece,
    Place,
    dtype_of,
    opened,
    read_pieces,
)
from weightload.sources import FILLED

__all__ = ["Filling", "Reserve"]

Reserve = Callable[[str, tuple[int, ...], torch.dtype], list[Place] | None]
"""Gives the places of a tensor of a name, shape and type, which must be filled at once.

``None`` if they are not known, or something else has to be done; no place if nothing takes it.
"""

STEP = 8 << 20
"""Bytes that are brought to their places before the session processes what is complete."""
_KEPT = 64 << 20
"""Size of the largest scratch memory that is kept for the next load."""

_kept: list[torch.Tensor] = []


class Filling:
    """One pass over a checkpoint.

    Args:
        checkpoint: what is read.
        quick: returns the way that takes all of a file together, as long as there is one.
        reserve: gives the places of a single tensor, if they are known.
        ready: says whether what was reserved is to be processed, so that it is read at once and
            its memory does not wait beside that of the next layer.
        leaves: says which names nobody waits for, so that they are not read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        quick: Callable[[], Quick | None],
        reserve: Reserve,
        ready: Callable[[], bool],
        leaves: Callable[[str], bool],
    ) -> None:
        self._checkpoint = checkpoint
        self._quick = quick
        now = quick()
        self._bundles = [
            None if now is None else _bundle_of(now, file) for file in checkpoint.contents
        ]
        self._reserve = reserve
        self._ready = ready
        self._leaves = leaves
        self._scratch = _kept.pop() if _kept else torch.empty(0, dtype=torch.uint8, device="cpu")
        self._bounce = Bounce()

    def __iter__(self) -> Iterator[Any]:
        """Yield ``(name, tensor)`` for what loaders have to take, ``FILLED`` after all else.

        The memory of a tensor is used again when the next is asked for.
        """
        for file, bundle in zip(self._checkpoint.contents, self._bundles, strict=True):
            if file.headers:
                with opened(file, whole=True) as handle:
                    yield from self._file(handle, file, bundle)
        if self._scratch.numel() <= _KEPT and not _kept:
            _kept.append(self._scratch)  # after a failure somebody might still look at it

    @property
    def expected(self) -> bool:
        """Whether all files are known to hold what a plan expects."""
        return all(bundle is not None for bundle in self._bundles)

    def _file(self, handle: Handle, file: File, bundle: Bundle | None) -> Iterator[Any]:
        if bundle is None:
            yield from self._each(handle, file, file.headers.items())
            return
        tensors = [*file.headers.items()]
        offsets = [header.offset for header in file.headers.values()]
        for portion in bundle.portions:
            quick = self._quick()
            addresses = None if quick is None else quick.begin(portion)
            if quick is None or addresses is None:
                yield from self._each(handle, file, tensors[portion.start : portion.stop])
                continue
            read_pieces(handle, file, portion.pieces(offsets, addresses))
            quick.end(portion)
            yield FILLED

    def _each(
        self, handle: Handle, file: File, tensors: Iterable[tuple[str, Header]]
    ) -> Iterator[Any]:
        places: list[tuple[int, Place]] = []
        waiting = 0
        for name, header in tensors:
            dtype, mine = dtype_of(header), None
            if dtype is not None:
                mine = self._reserve(name, header.shape, dtype)
            if mine is None:
                if self._leaves(name):
                    continue
                if places:
                    yield self._fill(handle, file, places)
                    places, waiting = [], 0
                yield name, self._lent(handle, file, name, header, dtype)
                continue
            places += [(header.offset + place.start, place) for place in mine]
            waiting += header.nbytes
            if waiting >= STEP or self._ready():
                yield self._fill(handle, file, places)
                places, waiting = [], 0
        if places:
            yield self._fill(handle, file, places)

    def _fill(self, handle: Handle, file: File, places: list[tuple[int, Place]]) -> Any:
        host: list[Piece] = []
        device: list[tuple[int, torch.Tensor]] = []
        for offset, place in places:
            if place.tensor is None:
                host.append((offset, place.nbytes, place.address))
            else:
                device.append((offset, place.tensor))
        read_pieces(handle, file, host)
        if device:
            self._bounce.fill(handle, file, device)
        return FILLED

    def _lent(
        self, handle: Handle, file: File, name: str, header: Header, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if dtype is None:
            return self._checkpoint[name]
        if self._scratch.numel() < header.nbytes:
            self._scratch = torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
        place = self._scratch[: header.nbytes].view(dtype).view(header.shape)
        read_pieces(handle, file, [(header.offset, header.nbytes, place.data_ptr())])
        return place


def _bundle_of(quick: Quick, file: File) -> Bundle | None:
    """Return what is known about all tensors of a file, if all is as it was."""
    headers = file.headers.values()
    shapes, dtypes = (header.shape for header in headers), map(dtype_of, headers)
    return quick.bundle([*file.headers], shapes, dtypes)
