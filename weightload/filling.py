"""Brings the tensors of a checkpoint to a session: to their places where those are known.

All others are read into memory that is used again and again, and lent to the model's loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from weightload.bounce import Bounce
from weightload.files import Header
from weightload.reading import Checkpoint, Piece, Place, dtype_of, opened, read_pieces

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
        reserve: gives the places that are known.
        ready: says whether what was reserved is to be processed, so that it is read at once and
            its memory does not wait beside that of the next layer.
        leaves: says which names nobody waits for, so that they are not read.
        filled: what is yielded when places were filled.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        reserve: Reserve,
        ready: Callable[[], bool],
        leaves: Callable[[str], bool],
        filled: Any,
    ) -> None:
        self._checkpoint = checkpoint
        self._reserve = reserve
        self._ready = ready
        self._leaves = leaves
        self._filled = filled
        self._scratch = _kept.pop() if _kept else torch.empty(0, dtype=torch.uint8)
        self._bounce = Bounce()

    def __iter__(self) -> Iterator[Any]:
        """Yield ``(name, tensor)`` for what loaders have to take, ``filled`` after all else.

        The memory of a tensor is used again when the next is asked for.
        """
        for first, tensors in self._checkpoint.in_order():
            with opened(first) as handle:
                yield from self._file(handle, first, tensors)
        if self._scratch.numel() <= _KEPT and not _kept:
            _kept.append(self._scratch)  # after a failure somebody might still look at it

    def _file(self, handle: int, first: Header, tensors: list[tuple[str, Header]]) -> Iterator[Any]:
        pieces: list[Piece] = []
        waiting = 0
        for name, header in tensors:
            dtype, places = dtype_of(header), None
            if dtype is not None:
                places = self._reserve(name, header.shape, dtype)
            if places is None:
                if self._leaves(name):
                    continue
                if pieces:
                    yield self._fill(handle, first, pieces)
                    pieces, waiting = [], 0
                yield name, self._lent(handle, name, header, dtype)
                continue
            for start, nbytes, address, tensor in places:
                pieces.append(Piece(name, header.offset + start, nbytes, address, tensor))
            waiting += header.nbytes
            if waiting >= STEP or self._ready():
                yield self._fill(handle, first, pieces)
                pieces, waiting = [], 0
        if pieces:
            yield self._fill(handle, first, pieces)

    def _fill(self, handle: int, first: Header, pieces: list[Piece]) -> Any:
        host = [piece for piece in pieces if piece.tensor is None]
        read_pieces(handle, first, host)
        if len(host) < len(pieces):
            self._bounce.fill(handle, first, [one for one in pieces if one.tensor is not None])
        return self._filled

    def _lent(
        self, handle: int, name: str, header: Header, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if dtype is None:
            return self._checkpoint[name]
        if self._scratch.numel() < header.nbytes:
            self._scratch = torch.empty(header.nbytes, dtype=torch.uint8)
        place = self._scratch[: header.nbytes].view(dtype).view(header.shape)
        read_pieces(handle, header, [Piece(name, header.offset, header.nbytes, place.data_ptr())])
        return place
