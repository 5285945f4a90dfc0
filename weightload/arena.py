"""A run of memory that several processes of one machine see, and that knows whether its owner lives."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from weightload.errors import TransportError
from weightload.wire import ALIGNMENT

__all__ = ["Arena"]

_TOKEN = 64
"""Bytes behind the memory that say which arena this is."""


class Arena:
    """A file in shared memory; made by one process, which writes, and opened by others, which read.

    The owner holds a lock on it as long as it lives, however it ends. A process that the owner forks
    sees the memory too, and does not own it.

    Attributes:
        path: the file.
        memory: uint8, one dimension: what both sides see.
        token: says which arena this is, since a path means another file on another machine.
    """

    def __init__(self, path: str, handle: int, nbytes: int, token: str) -> None:
        self.path = path
        self.token = token
        try:
            whole = torch.from_file(path, shared=True, size=nbytes + _TOKEN, dtype=torch.uint8)
        except RuntimeError as error:  # torch's word for what the system refuses
            raise OSError(errno.ENOMEM, f"cannot map {nbytes} bytes: {error}", path) from error
        self.memory, self._token = whole[:nbytes], whole[nbytes:]
        self._handle = handle
        self._let_go = weakref.finalize(self, os.close, handle)

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Make one of at least ``nbytes`` bytes, and own it.

        Raises:
            OSError: there is no room for it, or no folder where it could be.
        """
        nbytes = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
        failure = OSError(errno.EACCES, f"none of {', '.join(map(str, folders))} can be written")
        for folder in folders:
            if not os.access(folder, os.W_OK):
                continue
            try:
                return cls._create_in(folder, nbytes)
            except OSError as error:
                failure = error
        raise failure

    @classmethod
    def _create_in(cls, folder: Path, nbytes: int) -> Arena:
        token = secrets.token_hex(_TOKEN // 2)
        handle, path = tempfile.mkstemp(prefix="weightload-", dir=folder)
        try:
            # A page that the file system has no room for would end the process when written.
            os.posix_fallocate(handle, 0, nbytes + _TOKEN)
            fcntl.flock(handle, fcntl.LOCK_EX)
            arena = cls(path, handle, nbytes, token)
        except BaseException:
            os.close(handle)
            Path(path).unlink()
            raise
        arena._token.copy_(torch.frombuffer(bytearray(token.encode()), dtype=torch.uint8))
        _OWNED.add(arena)
        return arena

    @classmethod
    def open(cls, path: Any, nbytes: Any, token: Any) -> Arena:
        """See the one that another process made.

        Args:
            path: its file, as the owner says.
            nbytes: of its memory.
            token: which one it is.

        Raises:
            TransportError: it is not there, is another one, or cannot be one.
        """
        types = isinstance(path, str), type(nbytes) is int, isinstance(token, str)
        if not all(types) or nbytes <= 0:
            raise TransportError(
                f"The sender's memory has a path, a size above 0 and a token; found {path!r}, "
                f"{nbytes!r}, {token!r}."
            )
        arena = None
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(handle).st_size == nbytes + _TOKEN:
                    arena = cls(path, handle, nbytes, token)
            finally:
                if arena is None:
                    os.close(handle)
        except (OSError, ValueError) as error:
            raise TransportError(
                f"The sender's memory {path!r} cannot be opened ({error}). Both sides must be on "
                f"one machine and see the same folder."
            ) from error
        if arena is not None:
            if bytes(arena._token.tolist()).decode("ascii", "replace") == token:
                return arena
            arena.close()
        raise TransportError(
            f"{path!r} is not the sender's memory of {nbytes} bytes: the two processes see "
            f"different files of this name."
        )

    def parts(self, count: int) -> list[torch.Tensor]:
        """Return the memory in so many equal parts.

        Raises:
            TransportError: it cannot be divided like that.
        """
        size, rest = divmod(self.memory.numel(), count) if count > 0 else (0, 1)
        if rest or size % ALIGNMENT:
            raise TransportError(
                f"Memory of {self.memory.numel()} bytes has no {count} equal parts whose size is a "
                f"multiple of {ALIGNMENT}."
            )
        return list(self.memory.split(size))

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
        if not self._let_go.alive:
            return
        _OWNED.discard(self)
        self._let_go()
        self.memory = self._token = torch.empty(0, dtype=torch.uint8)
        if remove:
            self.unlink()


_OWNED: weakref.WeakSet[Arena] = weakref.WeakSet()
"""What this process owns."""


def _disown() -> None:
    """Let go, in a process that was just forked: the lock would be held as long as any has it open."""
    for arena in list(_OWNED):
        arena._let_go()
    _OWNED.clear()


os.register_at_fork(after_in_child=_disown)
