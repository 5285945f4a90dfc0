"""What the engines of this package have in common, whatever their wire."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightload.vllm.transfer.mixin import SessionDriven

__all__ = ["OwnEngine"]


class OwnEngine(SessionDriven, WeightTransferEngine):
    """An engine without a wire; subclasses say how to meet a trainer and how to receive.

    A message with an ``abort`` ends the update that is under way, if one is.
    """

    weightload_checkpoint_format = True

    def weightload_part(self) -> None:
        """Let go of the trainer; by default nothing is held."""

    def update_weights(self, update_info: Any) -> None:
        """Take one message."""
        message = self.parse_update_info(update_info)
        if message.abort is None:
            super().update_weights(message)
        else:
            self.weightload_abort(message.abort)

    def receive_weights(self, update_info: Any) -> None:
        """Refuse: messages are taken by ``update_weights`` and need a session."""
        raise NotImplementedError("call update_weights")

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: versions of vLLM in which the engine's class sends want to see this method."""
        raise NotImplementedError("use the trainer's class")
