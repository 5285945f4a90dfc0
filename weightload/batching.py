"""Lets copies on a device wait for each other, so that many small ones need few launches.

A launch costs microseconds of the host, more than the bytes of one expert's tensor cost the device.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Batch"]

_BYTES = 64 << 20
_COPIES = 2048


class Batch:
    """Copies that wait, by device and dtypes, and are then done as one.

    What waits is held: neither memory may be written or given back before :meth:`flush`, and a
    target must not be read, and not be given twice. The caller flushes on the stream that the copies
    belong to. A copy that gains nothing by waiting is put on the stream at once: on the host, between
    devices, and where one of the two is not contiguous, which would make torch copy a whole batch one
    by one. To a device the host does not wait for it: pinned memory may be written again when the
    stream has come so far, other memory at once.

    Args:
        most_bytes: of sources that may wait; then the batch flushes itself.
        most_copies: how many may wait, likewise.
        on_host: whether copies on the host wait too.
    """

    __slots__ = ("_count", "_groups", "_least", "_most_bytes", "_most_copies", "_nbytes")

    def __init__(
        self, *, most_bytes: int = _BYTES, most_copies: int = _COPIES, on_host: bool = False
    ) -> None:
        self._most_bytes = most_bytes
        self._most_copies = most_copies
        self._least = -1 if on_host else 0
        self._groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._nbytes = self._count = 0

    def __len__(self) -> int:
        """Return how many copies wait."""
        return self._count

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` to ``target``, now or at the next flush.

        Args:
            target: any shape and dtype, without a gradient that is recorded.
            source: of the same shape; values are cast as ``copy_`` does.
        """
        device = target.get_device()  # -1 for the host
        if (
            device < self._least
            or device != source.get_device()
            or not (target.is_contiguous() and source.is_contiguous())
            or target.shape != source.shape
        ):
            target.copy_(source, non_blocking=device >= 0)
            return
        key = device, target.dtype, source.dtype
        try:
            targets, sources = self._groups[key]
        except KeyError:
            targets, sources = self._groups[key] = [], []
        targets.append(target)
        sources.append(source)
        self._count += 1
        self._nbytes += source.nbytes
        if self._nbytes >= self._most_bytes or self._count >= self._most_copies:
            self.flush()

    def flush(self) -> None:
        """Do what waits; on a device with streams, put it on the current one.

        Also if this raises, nothing waits any more.
        """
        if not self._count:
            return
        groups, self._groups = self._groups, {}
        self._nbytes = self._count = 0
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)
