"""``weightload_shm``: trainer and engine on one machine, buckets in memory that both see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo

from weightload.arena import Arena
from weightload.errors import TransportError
from weightload.vllm.transfer.buckets import BucketEngine
from weightload.vllm.transfer.trainer import SessionTrainer, TransferOptions

__all__ = ["ShmEngine", "ShmInitInfo", "ShmTrainer", "ShmTrainerInitInfo"]

_BUCKETS = 2
"""One is loaded while the other is filled; a third would wait for one of them."""


@dataclass(kw_only=True)
class ShmInitInfo(WeightTransferInitInfo):
    """Where the trainer's memory is.

    Attributes:
        path: its file.
        nbytes: its size.
        token: which one it is.
        buckets: how many buckets have room in it, in equal parts, that are used in turn.
    """

    path: str
    nbytes: int
    token: str
    buckets: int = 1


@dataclass(kw_only=True)
class ShmTrainerInitInfo(TransferOptions, TrainerInitInfo):
    """For the trainer: its ``rank``, and what is agreed on."""

    backend: ClassVar[str] = "weightload_shm"


class ShmEngine(BucketEngine):
    """Reads buckets where the trainer wrote them. They stay as they are until it is answered.

    The trainer has room for two, and writes the next while the one before it is loaded.
    """

    init_info_cls = ShmInitInfo
    _arena: Arena | None = None
    _buckets = 1

    def weightload_meet(self, init_info: ShmInitInfo) -> None:
        """Open the trainer's memory.

        Raises:
            TransportError: it is not there, is another one, or has no such parts.
        """
        before, count = self._arena, init_info.buckets
        if type(count) is not int or count < 1:
            raise TransportError(f"The sender's memory has parts of one bucket, found {count!r}.")
        self._arena = Arena.open(init_info.path, init_info.nbytes, init_info.token)
        self._buckets = count
        self.met = init_info.path
        if before is not None:
            before.close()

    def memory(self, index: int = 0) -> torch.Tensor:
        """Return the part of the memory that both see where a bucket lies."""
        if self._arena is None:
            raise TransportError("No trainer has been met; call init_weight_transfer_engine first.")
        return self._arena.parts(self._buckets)[index % self._buckets]

    def weightload_abandoned(self) -> str | None:
        """Return why the trainer is taken for gone: its process has ended, or it is silent."""
        if self._arena is not None and not self._arena.owner_lives():
            return "its process has ended"
        return super().weightload_abandoned()

    def weightload_part(self) -> None:
        """Let go of the memory."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


class ShmTrainer(SessionTrainer):
    """Writes buckets into memory that the engine sees."""

    init_info_cls = ShmTrainerInitInfo
    _arena: Arena | None = None

    def meet(self) -> None:
        """Make the memory, of two buckets, and tell the engine where it is."""
        self._arena = Arena.create(_BUCKETS * self.init_info.bucket_bytes)
        self.met = self._arena.path
        where = {
            "path": self._arena.path,
            "nbytes": self._arena.memory.numel(),
            "token": self._arena.token,
            "buckets": _BUCKETS,
        }
        told = {**where, **self.init_info.for_session()}
        self.ask("init_weight_transfer_engine", "init_weight_transfer_engine", told)
        self._arena.unlink()

    def memory(self) -> list[torch.Tensor]:
        """Return the parts of the memory that both see."""
        if self._arena is None:
            raise TransportError("The trainer was shut down; make another one.")
        return self._arena.parts(_BUCKETS)

    def shutdown(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close(remove=True)
            self._arena = None
