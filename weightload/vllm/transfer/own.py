"""What the engines of this package have in common, whatever their wire."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from weightload.vllm.transfer.mixin import SessionDriven

__all__ = ["OwnEngine"]


class OwnEngine(SessionDriven, WeightTransferEngine):
    """An engine without a wire; subclasses say how to meet a trainer and how to receive.

    A message with an ``abort`` ends the update that it names, if that one is under way. Any other
    update is of another trainer, or a later one of the same.

    Attributes:
        met: which trainer was met last, as it said at the handshake.
    """

    weightload_checkpoint_format = True

    met: str | None = None

    def weightload_known(self) -> str | None:
        """Return the name of the update under way, ``None`` until its trainer has said it."""
        raise NotImplementedError

    def weightload_part(self) -> None:
        """Let go of the trainer; by default nothing is held."""

    def update_weights(self, update_info: Any) -> None:
        """Take one message."""
        message = self.parse_update_info(update_info)
        if message.abort is None:
            super().update_weights(message)
        elif message.met == self.met and self.weightload_known() in (None, message.update):
            self.weightload_abort(message.abort)

    def receive_weights(self, update_info: Any) -> None:
        """Refuse: messages are taken by ``update_weights`` and need a session."""
        raise NotImplementedError(
            f"{type(self).__name__} takes messages in update_weights, where a session is open for "
            f"them; receive_weights was called by itself. Call update_weights."
        )

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: versions of vLLM in which the engine's class sends want to see this method."""
        raise NotImplementedError(
            "A worker's engine does not send. Make the trainer's side with "
            "WeightTransferTrainerFactory.trainer_init."
        )
