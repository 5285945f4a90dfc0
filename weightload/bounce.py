"""Takes what is read from files to a device, through two pinned buffers.

While one buffer travels, the other is filled. The copies are made on the stream that is current, so that
they are in order with what the session does there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from weightload.files import File
from weightload.lanes import accelerator
from weightload.reading import Handle, Piece, read_pieces

__all__ = ["Bounce"]


class Bounce:
    """Two buffers of the host.

    Args:
        nbytes: size of each.
        api: returns what has ``Event``, as ``torch.cuda`` has; ``None`` where copies are done when
            the call returns.
    """

    def __init__(self, nbytes: int = 16 << 20, api: Callable[[], Any | None] = accelerator) -> None:
        self._nbytes = nbytes
        self._api = api
        self._buffers: list[torch.Tensor] = []
        self._events: list[Any] = [None, None]
        self._turn = 0

    def fill(self, handle: Handle, file: File, pieces: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Read pieces of one file into memory of a device; the copies may still be under way then.

        Args:
            handle: the open file.
            file: what it holds.
            pieces: bytes of the file before each, and the contiguous tensor that takes it.

        Raises:
            CheckpointFileError: as for :func:`weightload.reading.read_pieces`.
        """
        api = self._api()
        if not self._buffers:
            self._buffers = [
                torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=api is not None)
                for _ in self._events
            ]
        for loads in self._split(pieces):
            turn = self._turn
            self._turn = 1 - turn
            if self._events[turn] is not None:
                self._events[turn].synchronize()  # what this buffer held has arrived
            buffer, used = self._buffers[turn], 0
            inside: list[Piece] = []
            sources = []
            for offset, target in loads:
                source = buffer[used : used + target.nbytes]
                inside.append((offset, source.nbytes, source.data_ptr()))
                sources.append(source)
                used += source.nbytes
            read_pieces(handle, file, inside)
            torch._foreach_copy_([target for _, target in loads], sources, non_blocking=True)
            if api is not None:
                self._events[turn] = api.Event()
                self._events[turn].record()

    def _split(
        self, pieces: Iterable[tuple[int, torch.Tensor]]
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Yield offsets and bytes that fit into one buffer together; large ones in parts."""
        loads: list[tuple[int, torch.Tensor]] = []
        room = self._nbytes
        for offset, target in pieces:
            octets = target.detach().view(-1).view(torch.uint8)
            begin = 0
            while begin < octets.numel():
                if not room:
                    yield loads
                    loads, room = [], self._nbytes
                size = min(room, octets.numel() - begin)
                loads.append((offset + begin, octets[begin : begin + size]))
                begin += size
                room -= size
        if loads:
            yield loads
