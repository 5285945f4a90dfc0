"""Looks at a file as at memory, as long as nobody can cut it short.

What the system copies out of its cache for a reader it copies half as fast again where the bytes lie as
they do in their place, to 64 bytes, and those of a tensor hardly ever do; from a mapping of the file a
processor copies at full speed, however they lie. But to look at a page that is not there any more ends
the process. So a file is mapped only under a lease, by which the system lets everybody wait who wants to
write to it or to cut it, for some seconds at most and telling the holder; and only what is in the
system's cache is looked at. Where that cannot be had, files are read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from pathlib import Path

__all__ = ["Mapped"]

try:
    import fcntl

    _SET_LEASE, _GET_LEASE = fcntl.F_SETLEASE, fcntl.F_GETLEASE
    _SET_SIGNAL = 10  # F_SETSIG, which the module has no name for
    _READ, _NONE = fcntl.F_RDLCK, fcntl.F_UNLCK
    _syscall = ctypes.CDLL(None).syscall
    _syscall.restype = ctypes.c_long
    _supported = True
except (ImportError, AttributeError):  # not Linux
    _supported = False

_LOCAL = frozenset(("btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"))
"""File systems of which no other machine can cut a file short."""
_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")
_LONG_ENOUGH = 5
"""Seconds that writers must at least wait for the holder of a lease; 45 by default."""
_MOUNTS = Path("/proc/self/mountinfo")
_CACHESTAT = 451
"""Number of the system's call, on every kind of processor, since Linux 6.5."""
_PAGE = mmap.PAGESIZE


class Mapped:
    """A file that is open for reading, mapped.

    Attributes:
        address: of its first byte.
    """

    def __init__(self, handle: int, nbytes: int) -> None:
        self._handle = handle
        self._memory = mmap.mmap(handle, nbytes, access=mmap.ACCESS_COPY)
        first = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(first)

    @classmethod
    def of(cls, handle: int, nbytes: int) -> Mapped | None:
        """Map an open file, if that is safe.

        Args:
            handle: the file, open for reading only.
            nbytes: its size.
        """
        if not (_supported and nbytes and _is_local(handle) and _is_patient()):
            return None
        try:
            # The signal that tells of a writer; unlike the usual one, it is ignored by default.
            fcntl.fcntl(handle, _SET_SIGNAL, signal.SIGURG)
            fcntl.fcntl(handle, _SET_LEASE, _READ)
        except OSError:  # somebody has it open for writing, or it is another user's
            return None
        try:
            return cls(handle, nbytes)
        except (OSError, ValueError):
            fcntl.fcntl(handle, _SET_LEASE, _NONE)
            return None

    def holds(self, begin: int, end: int) -> bool:
        """Whether these bytes may be looked at now: they are in memory, and nobody waits to write."""
        if fcntl.fcntl(self._handle, _GET_LEASE) != _READ:
            return False
        return _cached(self._handle, begin, end) == (end - 1) // _PAGE - begin // _PAGE + 1

    def close(self) -> None:
        """Let go of the file, and let those write who waited for that."""
        if self._memory.closed:
            return
        self._memory.close()
        fcntl.fcntl(self._handle, _SET_LEASE, _NONE)


def _cached(handle: int, begin: int, end: int) -> int:
    """Return how many of the pages that hold these bytes are in the system's cache."""
    span, found = (ctypes.c_uint64 * 2)(begin, end - begin), (ctypes.c_uint64 * 5)()
    number, none = ctypes.c_long(_CACHESTAT), ctypes.c_uint(0)
    failed = _syscall(number, ctypes.c_uint(handle), ctypes.byref(span), ctypes.byref(found), none)
    return 0 if failed else found[0]


def _is_local(handle: int) -> bool:
    """Whether a file is on a file system that is this machine's alone."""
    device = os.fstat(handle).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False
    kinds = {
        fields[fields.index("-") + 1]
        for fields in map(str.split, lines)
        if fields[2] == number and "-" in fields
    }
    return bool(kinds) and kinds <= _LOCAL


def _is_patient() -> bool:
    """Whether the system lets writers wait long enough."""
    try:
        return int(_BREAK_TIME.read_text()) >= _LONG_ENOUGH
    except (OSError, ValueError):
        return False
