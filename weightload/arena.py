"""A run of memory that several processes of one machine see, and that knows whether its owner lives."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from pathlib import Path

import torch

from weightload.errors import TransportError
from weightload.wire import ALIGNMENT

__all__ = ["Arena"]

_TOKEN = 64
"""Bytes behind the memory that say which arena this is."""


class Arena:
    """A file in shared memory; made by one process, which writes, and opened by others, which read.

    The owner holds a lock on it as long as it lives, however it ends.

    Attributes:
        path: the file.
        memory: uint8, one dimension: what both sides see.
        token: says which arena this is, since a path means another file on another machine.
    """

    def __init__(self, path: str, handle: int, nbytes: int, token: str) -> None:
        self.path = path
        self.token = token
        self._handle = handle
        whole = torch.from_file(path, shared=True, size=nbytes + _TOKEN, dtype=torch.uint8)
        self.memory, self._token = whole[:nbytes], whole[nbytes:]

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Make one of at least ``nbytes`` bytes, and own it.

        Raises:
            OSError: there is no room for it.
        """
        nbytes = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        token = secrets.token_hex(_TOKEN // 2)
        for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
            if not os.access(folder, os.W_OK):
                continue
            handle, path = tempfile.mkstemp(prefix="weightload-", dir=folder)
            try:
                # A page that the file system has no room for would end the process when written.
                os.posix_fallocate(handle, 0, nbytes + _TOKEN)
                fcntl.flock(handle, fcntl.LOCK_EX)
                arena = cls(path, handle, nbytes, token)
            except OSError as error:
                failure = error
                os.close(handle)
                Path(path).unlink()
                continue
            arena._token.copy_(torch.frombuffer(bytearray(token.encode()), dtype=torch.uint8))
            return arena
        raise failure

    @classmethod
    def open(cls, path: str, nbytes: int, token: str) -> Arena:
        """See the one that another process made.

        Raises:
            TransportError: it is not there, or is another one.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(
                f"The sender's memory {path!r} cannot be opened ({error}). Both sides must be on "
                f"one machine and see the same folder."
            ) from error
        if os.fstat(handle).st_size == nbytes + _TOKEN:
            arena = cls(path, handle, nbytes, token)
            if bytes(arena._token.tolist()) == token.encode():
                return arena
            arena.close()
        else:
            os.close(handle)
        raise TransportError(
            f"{path!r} is not the sender's memory of {nbytes} bytes: the two processes see "
            f"different files of this name."
        )

    def owner_lives(self) -> bool:
        """Whether the process that made it still runs; asked by those that opened it."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._handle, fcntl.LOCK_UN)
        return False

    def unlink(self) -> None:
        """Take its name away, once all have opened it: an owner that is killed leaves nothing then."""
        Path(self.path).unlink(missing_ok=True)

    def close(self, *, remove: bool = False) -> None:
        """Let go of it; the owner also removes it. Others that have opened it keep what they see."""
        if self._handle < 0:
            return
        os.close(self._handle)
        self._handle = -1
        self.memory = self._token = torch.empty(0, dtype=torch.uint8)
        if remove:
            self.unlink()

    def __del__(self) -> None:
        if getattr(self, "_handle", -1) >= 0:
            os.close(self._handle)
            self._handle = -1
