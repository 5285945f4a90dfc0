"""The trainer's side: sends a source of weights as one update, and tells the engine when it cannot."""

from __future__ import annotations

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
from weightload.vllm.transfer.mixin import DEADLINE
from weightload.vllm.transfer.pending import Pending
from weightload.wire import ALIGNMENT, BucketWriter

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
    """

    bucket_bytes: int = BUCKET
    commit: str = "stream"
    deadline: float = DEADLINE

    def __post_init__(self) -> None:
        self.bucket_bytes = max(1, -(-self.bucket_bytes // ALIGNMENT)) * ALIGNMENT

    def for_session(self) -> dict[str, Any]:
        """Return what the engine's session is told."""
        return {"commit": self.commit, "deadline": self.deadline}


class SessionTrainer(TrainerWeightTransferEngine):
    """What the trainers of this package have in common.

    ``send_weights`` is one update from start to finish. Where it fails, the engine is told to
    abort, and the error is raised.

    Attributes:
        met: how the engine tells this trainer from others.
    """

    met: str | None = None
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
        """Bring one message, and what is in the bucket that it is about, to the engine."""
        self.ask(label, "update_weights", message)

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
        self.ask("start_weight_update", "start_weight_update")
        try:
            self.send_all(weight_version)
        except BaseException as error:
            self._give_up(error)
            raise
        self.ask("finish_weight_update", "finish_weight_update", weight_version)

    def send_all(self, weight_version: str | None) -> None:
        """Send everything between start and finish."""
        forms = {
            one.name: [list(one.shape), str(one.dtype).removeprefix("torch.")]
            for one in self.source.metadata()
        }
        writer = BucketWriter(self.memory(), forms=forms, version=weight_version)
        self.deliver("the opening", {"opening": writer.opening(), "met": self.met})
        for record in writer.fill(self.source):
            self.deliver(f"bucket {record['index']}", {"bucket": record})
        self.deliver("the closing", {"closing": writer.closing()})

    def memory(self) -> torch.Tensor:
        """Return where buckets are packed: uint8, one dimension."""
        raise NotImplementedError

    def _give_up(self, error: BaseException) -> None:
        cause = f"the trainer gave up: {type(error).__name__}: {error}"
        call = Pending("the abort", lambda: self.client.update_weights({"abort": cause}))
        try:
            call.result(min(self.init_info.deadline, 10.0))
        except Exception as second:
            error.add_note(
                f"weightload: the engine was not told; {type(second).__name__}: {second}"
            )


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
