"""The trainer's side: sends a source of weights as one update, and tells the engine when it cannot."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    materialize_full_tensor,
)

from weightload.errors import UsageError
from weightload.packing import BucketWriter
from weightload.vllm.transfer.mixin import DEADLINE, check_options
from weightload.vllm.transfer.pending import Pending
from weightload.wire import ALIGNMENT

__all__ = ["SessionTrainer", "StateSource", "TransferOptions", "WithOptions"]

BUCKET = 64 << 20
"""Bytes of a bucket, by default."""


class StateSource(ModuleSource):
    """vLLM's source of a module's weights, with the buffers that a checkpoint holds as well.

    Args:
        module: the trainer's model; sharded parameters are gathered as they are sent.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._whole = module

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor once, under the first of its names, as ``named_parameters`` does."""
        persistent = self._whole.state_dict(keep_vars=True).keys()
        yield from self._whole.named_parameters()
        yield from (pair for pair in self._whole.named_buffers() if pair[0] in persistent)

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and full shape of everything that is sent."""
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self._tensors()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors():
            yield name, materialize_full_tensor(tensor)


@dataclass(kw_only=True)
class TransferOptions:
    """What both sides agree on at the handshake.

    Attributes:
        bucket_bytes: size of a bucket; a larger tensor travels in parts.
        commit: ``"stream"`` or ``"atomic"``, as of a session.
        deadline: seconds that either side waits for the other before it gives up.

    Raises:
        UsageError: an option cannot be that.
    """

    bucket_bytes: int = BUCKET
    commit: str = "stream"
    deadline: float = DEADLINE

    def __post_init__(self) -> None:
        check_options(self.commit, self.deadline)
        if type(self.bucket_bytes) is not int or self.bucket_bytes <= 0:
            raise UsageError(f"bucket_bytes is a size above 0, found {self.bucket_bytes!r}.")
        self.bucket_bytes = -(-self.bucket_bytes // ALIGNMENT) * ALIGNMENT

    def for_session(self) -> dict[str, Any]:
        """Return what the engine's session is told."""
        return {"commit": self.commit, "deadline": self.deadline}


class SessionTrainer(TrainerWeightTransferEngine):
    """What the trainers of this package have in common.

    ``send_weights`` is one update from start to finish. Where it fails, or an answer is lost, the
    engine is told to abort this update and no other, and the error is raised. Where it could not be
    told, it is told before the next update.

    Attributes:
        met: how the engine tells this trainer from others.
    """

    met: str | None = None
    _open: str | None = None
    init_info_cls = TrainerInitInfo

    def __init__(self, *, client: Any, source: Any, init_info: Any) -> None:
        if source is None:
            raise UsageError(f"{type(self).__name__} needs a WeightSource.")
        # Not vLLM's constructor, whose arguments differ from version to version.
        self.client, self.source, self.init_info = client, source, init_info
        self.is_sender = init_info.is_sender

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """Meet the engine; called on every rank of the trainer, and rank 0 is the one that sends."""
        trainer = cls(client=client, source=source, init_info=init_info)
        if trainer.is_sender:
            try:
                trainer.meet()
            except BaseException:
                trainer.shutdown()
                raise
        return trainer

    def meet(self) -> None:
        """Agree with the engine on where and how tensors travel."""
        raise NotImplementedError

    def deliver(self, label: str, message: dict[str, Any]) -> None:
        """Bring one message to the engine, and wait for its answer."""
        self.ask(label, "update_weights", message)

    def post(self, label: str, message: dict[str, Any]) -> Pending:
        """Bring a bucket to the engine, and return the call that it answers when it has loaded it.

        When this returns, the memory that the next bucket is packed in is free.
        """
        return Pending(label, lambda: self.client.update_weights(message))

    def ask(self, label: str, method: str, *args: Any) -> Any:
        """Call the engine, and wait for its answer until the deadline.

        Raises:
            TransportError: it did not answer.
        """
        call = getattr(self.client, method)
        return Pending(label, lambda: call(*args)).result(self.init_info.deadline)

    def send_weights(self, weight_version: str | None = None) -> None:
        """Send all weights as one update.

        Args:
            weight_version: what the engine calls these weights once it has them.

        Raises:
            TransportError: the engine did not answer in time.

        What the engine refuses reaches the caller as its client raises it.
        """
        if not self.is_sender:
            for _ in self.source:
                pass  # gathering a sharded tensor takes every rank
            return
        if self._open is not None:
            self._abort("the trainer gave up, and could not say so")
        self._open = uuid.uuid4().hex
        try:
            self.ask("start_weight_update", "start_weight_update")
            self.send_all(self._open, weight_version)
            self.ask("finish_weight_update", "finish_weight_update", weight_version)
        except BaseException as error:
            self._give_up(error)
            raise
        self._open = None

    def send_all(self, update: str, weight_version: str | None) -> None:
        """Send everything between start and finish.

        Args:
            update: the name of this update.
            weight_version: what the engine calls these weights.
        """
        forms = {
            one.name: [list(one.shape), str(one.dtype).removeprefix("torch.")]
            for one in self.source.metadata()
        }
        first, *spare = self.memory()
        writer = BucketWriter(
            first, spare=spare, forms=forms, version=weight_version, update=update
        )
        self.deliver("the opening", {"opening": writer.opening(), "met": self.met})
        under_way: Pending | None = None
        try:
            for record in writer.fill(self.source):  # while the engine loads the one before it
                answered, under_way = under_way, None
                if answered is not None:
                    answered.result(self.init_info.deadline)
                told = {"bucket": record, "met": self.met}
                under_way = self.post(f"bucket {record['index']}", told)
            answered, under_way = under_way, None
            if answered is not None:
                answered.result(self.init_info.deadline)
        except BaseException:
            if under_way is not None:
                under_way.wait(self.init_info.deadline)  # or the abort would come in between
            raise
        self.deliver("the closing", {"closing": writer.closing(), "met": self.met})

    def memory(self) -> list[torch.Tensor]:
        """Return where buckets are packed in turn: each uint8, one dimension, and of one size."""
        raise NotImplementedError

    def _give_up(self, error: BaseException) -> None:
        try:
            self._abort(f"the trainer gave up: {type(error).__name__}: {error}")
        except Exception as second:
            error.add_note(
                f"weightload: the engine was not told; {type(second).__name__}: {second}"
            )

    def _abort(self, cause: str) -> None:
        """Have the engine end this trainer's update, if that is under way."""
        told = {"abort": cause, "met": self.met, "update": self._open}
        call = Pending("the abort", lambda: self.client.update_weights(told))
        call.result(min(self.init_info.deadline, 10.0))
        self._open = None


class WithOptions:
    """A client that tells the engine what its session is to do, besides what is told anyway."""

    def __init__(self, client: Any, options: dict[str, Any]) -> None:
        self._client = client
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Pass on the call with the options."""
        self._client.init_weight_transfer_engine({**init_info, **self._options})
