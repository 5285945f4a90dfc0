"""``weightload_gloo``: buckets broadcast over sockets, between machines as well, without a GPU.

Trainer and workers form a group of their own beside all others of either process. Each bucket is
broadcast only when every worker has said that it waits for it, so that a refusal on one rank leaves
nobody waiting: the trainer answers in the store whether it sends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo

from weightload.errors import TransportError, UsageError
from weightload.vllm.transfer.buckets import BucketEngine, BucketUpdateInfo
from weightload.vllm.transfer.pending import Pending
from weightload.vllm.transfer.trainer import SessionTrainer, TransferOptions

__all__ = ["GlooEngine", "GlooInitInfo", "GlooTrainer", "GlooTrainerInitInfo"]

dist: Any = torch.distributed  # whose stores and groups have no types

_TICK = 0.002
"""Seconds between two looks at who is ready."""

WAITS, DECLINES, COMES, STOPS = b"waits", b"declines", b"comes", b"stops"


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer's store is.

    Attributes:
        address: of its machine.
        port: of its store.
        world_size: the trainer and all workers.
        bucket_bytes: size of a bucket.
    """

    address: str
    port: int
    world_size: int
    bucket_bytes: int


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TransferOptions, TrainerInitInfo):
    """For the trainer: its ``rank``, and what is agreed on.

    Attributes:
        world_size: the sender and all workers of the engine: 1 + tensor x pipeline x data parallel.
        address: of this machine, as the workers see it.
        port: of the store; 0 takes a free one.
    """

    backend: ClassVar[str] = "weightload_gloo"
    world_size: int = 2
    address: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.world_size) is not int or self.world_size < 2:
            raise UsageError(
                f"world_size counts the trainer and at least one worker, found {self.world_size!r}."
            )


class _Group:
    """One end of the group.

    Args:
        store: both ends' store.
        rank: 0 is the trainer.
        size: how many there are.
        nbytes: of a bucket.
        deadline: seconds that this end waits for others.
    """

    def __init__(self, store: Any, rank: int, size: int, nbytes: int, deadline: float) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.deadline = timedelta(seconds=deadline)
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("group", store), rank, size, self.deadline
        )

    def broadcast(self, nbytes: int) -> None:
        """Have the first bytes of the trainer's memory in that of all others."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([self.memory[:nbytes]], options).wait(self.deadline)


def _open_store(address: str, port: int, deadline: float, *, mine: bool) -> Any:
    return dist.TCPStore(
        address,
        port,
        is_master=mine,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline),
    )


@contextmanager
def _naming(who: str) -> Iterator[None]:
    """Say who was waited for when a socket fails, or nothing comes in time."""
    try:
        yield
    except RuntimeError as error:  # torch's errors of stores and groups are of this class
        first = str(error).partition("\n")[0]
        raise TransportError(
            f"{who} has ended or did not answer in time ({type(error).__name__}: {first})."
        ) from error


class GlooEngine(BucketEngine):
    """Takes part in the trainer's broadcasts."""

    init_info_cls = GlooInitInfo
    _end: _Group | None = None
    _trainer = "The trainer"

    def weightload_meet(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group.

        Raises:
            TransportError: it has no place for this worker, or the trainer does not answer.
        """
        self._end = None
        self._trainer = f"The trainer at {init_info.address}:{init_info.port}"
        parallel = self.vllm_config.parallel_config
        replica = getattr(parallel, "data_parallel_index", 0)
        rank = 1 + replica * parallel.world_size + parallel.rank
        if rank >= init_info.world_size:
            raise TransportError(
                f"The trainer counted {init_info.world_size - 1} workers, and this is worker "
                f"{rank}. Its world_size has to be 1 + tensor x pipeline x data parallel."
            )
        deadline = self.weightload_deadline
        with _naming(self._trainer):
            store = _open_store(init_info.address, init_info.port, deadline, mine=False)
            store.set(f"here/{rank}", b"1")
            store.wait(["all here"], timedelta(seconds=deadline))
            size, nbytes = init_info.world_size, init_info.bucket_bytes
            self._end = _Group(store, rank, size, nbytes, deadline)
        self.met = f"{init_info.address}:{init_info.port}"

    def weightload_part(self) -> None:
        """Leave the group."""
        self._end = None

    def weightload_abandoned(self) -> str | None:
        """Return why the trainer is taken for gone: its store does not answer, or it is silent."""
        try:
            if self._end is not None:
                self._end.store.check(["all here"])
        except RuntimeError:
            return "its store does not answer"
        return super().weightload_abandoned()

    def memory(self, index: int = 0) -> torch.Tensor:
        """Return where broadcasts are received: the same for every bucket."""
        return self._joined().memory

    def decline(self, message: BucketUpdateInfo) -> None:
        """Tell the trainer not to broadcast."""
        if self._end is not None:
            with _naming(self._trainer):
                self._end.store.set(f"{message.turn}/{self._end.rank}", DECLINES)

    def fetch(self, message: BucketUpdateInfo) -> None:
        """Receive a bucket, if every other rank waits for it too.

        Raises:
            TransportError: another rank declined, or the trainer ended or hangs.
        """
        end = self._joined()
        try:
            with _naming(self._trainer):
                end.store.set(f"{message.turn}/{end.rank}", WAITS)
                end.store.wait([f"{message.turn}/answer"], end.deadline)
                comes = end.store.get(f"{message.turn}/answer") == COMES
                if comes:
                    end.broadcast(message.bucket["nbytes"])
        except TransportError:
            self._end = None  # what of a broadcast is still on its way is not known
            raise
        if not comes:
            raise TransportError("The trainer does not send this bucket: another rank declined it.")

    def _joined(self) -> _Group:
        if self._end is None:
            raise TransportError(
                "No trainer has been met, or it was lost; call init_weight_transfer_engine first."
            )
        return self._end


class GlooTrainer(SessionTrainer):
    """Broadcasts buckets to the workers."""

    init_info_cls = GlooTrainerInitInfo
    _end: _Group | None = None
    _turn = 0

    def meet(self) -> None:
        """Open the store, and wait until all workers have joined.

        Raises:
            TransportError: some did not, or the engine did not answer.
        """
        info = self.init_info
        store = _open_store(info.address, info.port, info.deadline, mine=True)
        told = {
            "address": info.address,
            "port": store.port,
            "world_size": info.world_size,
            "bucket_bytes": info.bucket_bytes,
            **info.for_session(),
        }
        call = Pending(
            "init_weight_transfer_engine", lambda: self.client.init_weight_transfer_engine(told)
        )
        self._gather(store, "here/{}", call)
        store.set("all here", b"1")
        with _naming("A worker"):
            self._end = _Group(store, 0, info.world_size, info.bucket_bytes, info.deadline)
        call.result(info.deadline)
        self.met = f"{info.address}:{store.port}"

    def memory(self) -> list[torch.Tensor]:
        """Return where buckets are packed: one is enough, which is free once it was broadcast."""
        if self._end is None:
            raise TransportError("The group was lost or shut down; make another trainer.")
        return [self._end.memory]

    def post(self, label: str, message: dict[str, Any]) -> Pending:
        """Announce a bucket, and broadcast it when all wait for it."""
        end = self._end
        if end is None:
            raise TransportError("The group was lost or shut down; make another trainer.")
        if self._turn:  # all have answered, and nobody looks there any more
            for key in ("answer", *range(1, self.init_info.world_size)):
                end.store.delete_key(f"{self._turn}/{key}")
        self._turn += 1
        told = {**message, "turn": self._turn}
        call = Pending(label, lambda: self.client.update_weights(told))
        try:
            waits = self._gather(end.store, f"{self._turn}/{{}}", call)
            comes = all(one == WAITS for one in waits)
        except BaseException:
            end.store.set(f"{self._turn}/answer", STOPS)
            raise
        end.store.set(f"{self._turn}/answer", COMES if comes else STOPS)
        if comes:
            try:
                with _naming("A worker"):
                    end.broadcast(message["bucket"]["nbytes"])
            except TransportError:
                self._end = None
                raise
        return call

    def _gather(self, store: Any, key: str, call: Pending) -> list[bytes]:
        """Return what every worker has put into the store.

        Raises:
            TransportError: one did not in time; the message says which.

        What the call raises in the meantime reaches the caller as it is.
        """
        missing = list(range(1, self.init_info.world_size))
        said = {}
        until = time.monotonic() + self.init_info.deadline
        while missing:
            for rank in [one for one in missing if store.check([key.format(one)])]:
                said[rank] = store.get(key.format(rank))
                missing.remove(rank)
            if missing and call.done:
                with self._noting(f"workers {missing} did not say that they wait"):
                    call.result(0)
                raise TransportError(f"The engine answered before workers {missing} did.")
            if missing and time.monotonic() > until:
                raise TransportError(
                    f"Workers {missing} of {self.init_info.world_size - 1} did not answer within "
                    f"{self.init_info.deadline:g} s."
                )
            if missing:
                time.sleep(_TICK)
        return list(said.values())

    @staticmethod
    @contextmanager
    def _noting(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"weightload: {what}.")
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        self._end = None
