"""``weightload_ipc`` and ``weightload_nccl``: vLLM's own engines for the wire, a session for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
    IPCWeightTransferEngine,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)

from weightload.vllm.transfer.mixin import DEADLINE, SessionDriven
from weightload.vllm.transfer.trainer import WithOptions

__all__ = [
    "IpcEngine",
    "IpcTrainer",
    "IpcTrainerInitInfo",
    "NcclEngine",
    "NcclTrainer",
    "NcclTrainerInitInfo",
]


@dataclass(kw_only=True)
class IpcTrainerInitInfo(IPCTrainerInitInfo):
    """vLLM's, with the options of the session."""

    backend: ClassVar[str] = "weightload_ipc"
    commit: str = "stream"
    deadline: float = DEADLINE


@dataclass(kw_only=True)
class NcclTrainerInitInfo(NCCLTrainerInitInfo):
    """vLLM's, with the options of the session."""

    backend: ClassVar[str] = "weightload_nccl"
    commit: str = "stream"
    deadline: float = DEADLINE


class IpcEngine(SessionDriven, IPCWeightTransferEngine):
    """Opens the trainer's tensors on the GPU that both use, and gives them to a session."""


class NcclEngine(SessionDriven, NCCLWeightTransferEngine):
    """Receives the trainer's broadcasts, and gives them to a session."""


class _Optioned:
    """Tells the engine the options of the session at the handshake."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """Meet the engine."""
        told = WithOptions(client, {"commit": init_info.commit, "deadline": init_info.deadline})
        return super().trainer_init(init_info, client=told, source=source)  # type: ignore[misc]


class IpcTrainer(_Optioned, IPCTrainerWeightTransferEngine):
    """vLLM's trainer."""

    init_info_cls = IpcTrainerInitInfo


class NcclTrainer(_Optioned, NCCLTrainerWeightTransferEngine):
    """vLLM's trainer."""

    init_info_cls = NcclTrainerInitInfo
