"""The engine's side of transports that bring buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from weightload.errors import ModelBusyError, TransportError
from weightload.session import WeightLoadSession
from weightload.unpacking import BucketReader
from weightload.vllm.transfer.own import OwnEngine

__all__ = ["BucketEngine", "BucketUpdateInfo"]


@dataclass(kw_only=True)
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One message of a trainer: exactly one of the records of :mod:`weightload.wire`, or an abort.

    Attributes:
        met: which trainer it is that speaks, as it said at the handshake.
        update: with an abort: the update that it ends; a record names its own.
        turn: counts the buckets that this trainer sent, for transports that have to keep in step.
    """

    opening: Any = None
    bucket: Any = None
    closing: Any = None
    abort: str | None = None
    met: str | None = None
    update: str | None = None
    turn: int | None = None

    def __post_init__(self) -> None:
        said = [self.opening, self.bucket, self.closing, self.abort]
        if sum(one is not None for one in said) != 1:
            raise ValueError("a message is one of opening, bucket, closing and abort")


class BucketEngine(OwnEngine):
    """What the engines that receive buckets have in common."""

    update_info_cls = BucketUpdateInfo

    _reader: BucketReader | None = None
    _closed = False

    def memory(self, index: int = 0) -> torch.Tensor:
        """Return where a bucket comes: uint8, one dimension, of the size that was agreed.

        Args:
            index: which bucket of the update.

        Raises:
            TransportError: no trainer has been met yet, or it is lost.
        """
        raise NotImplementedError

    def fetch(self, message: BucketUpdateInfo) -> None:
        """Wait until the bytes of a bucket have come."""

    def decline(self, message: BucketUpdateInfo) -> None:
        """Tell the sender that its bucket is not waited for."""

    # ------------------------------------------------------------------ what the mixin asks

    def start_weight_update(self) -> None:
        """Open a session; what an earlier trainer had begun to say is forgotten."""
        super().start_weight_update()
        self._reader, self._closed = None, False

    def weightload_known(self) -> str | None:
        """Return the name of the update under way, ``None`` until it is opened."""
        return None if self._reader is None else self._reader.update

    def weightload_admit(self, message: BucketUpdateInfo) -> None:
        """Let only the trainer speak that opened the update, or is about to."""
        record = message.bucket or message.closing or message.opening
        known = self.weightload_known()
        found = record.get("update") if isinstance(record, dict) else None
        given_up = message.opening is None and message.met not in (None, self.met)
        if given_up or (known is not None and found != known):
            raise ModelBusyError(
                f"A message of update {found!r} came while "
                f"{'another update' if known is None else f'update {known!r}'} is under way; one "
                f"trainer at a time. The update that is under way goes on.",
                owner=known,
            )

    def weightload_receive(self, session: WeightLoadSession, message: BucketUpdateInfo) -> None:
        """Check a message, and load the tensors that it makes complete."""
        if message.opening is not None:
            self._begin(session, message)
            return
        reader = self._reader
        if reader is None:
            raise TransportError("A bucket or closing came before the opening of the update.")
        if message.closing is not None:
            reader.close(message.closing)
            self._closed = True
            return
        try:
            reader.check(message.bucket)
            memory = self.memory(message.bucket["index"])
        except BaseException:
            self.decline(message)
            raise
        self.fetch(message)
        pairs = reader.take(message.bucket, memory)
        if pairs:
            session.load(pairs, transport=memory)

    def weightload_require_all(self) -> None:
        """Raise if the trainer has not closed the update."""
        if not self._closed:
            raise TransportError(
                "The trainer finished without the closing record, so it is not known whether "
                "everything came. Nothing is published."
            )

    def _begin(self, session: WeightLoadSession, message: BucketUpdateInfo) -> None:
        if self._reader is not None:
            raise TransportError("The opening of this update came again.")
        capacity = self.memory().numel()
        if message.met != self.met:
            raise TransportError(
                f"The trainer {message.met} speaks, and {self.met} has met the engine since. Make a "
                f"new trainer to meet it again."
            )
        reader = BucketReader(message.opening, capacity)
        if reader.forms is not None:
            session.check(reader.forms, complete=True)
        session.version = reader.version
        self._reader = reader
