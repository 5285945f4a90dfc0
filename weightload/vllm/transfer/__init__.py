"""Weight transfer engines for vLLM that give what they receive to a session.

Importing this package imports no vLLM; its parts do when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightload.vllm.transfer.file import FileTrainerInitInfo
    from weightload.vllm.transfer.gloo import GlooTrainerInitInfo
    from weightload.vllm.transfer.mixin import SessionDriven, session_driven
    from weightload.vllm.transfer.native import IpcTrainerInitInfo, NcclTrainerInitInfo
    from weightload.vllm.transfer.shm import ShmTrainerInitInfo
    from weightload.vllm.transfer.trainer import StateSource

__all__ = [
    "FileTrainerInitInfo",
    "GlooTrainerInitInfo",
    "IpcTrainerInitInfo",
    "NcclTrainerInitInfo",
    "SessionDriven",
    "ShmTrainerInitInfo",
    "StateSource",
    "register",
    "session_driven",
]

_HOMES = {
    "FileTrainerInitInfo": "file",
    "GlooTrainerInitInfo": "gloo",
    "IpcTrainerInitInfo": "native",
    "NcclTrainerInitInfo": "native",
    "SessionDriven": "mixin",
    "ShmTrainerInitInfo": "shm",
    "StateSource": "trainer",
    "session_driven": "mixin",
}

_ENGINES = {
    "weightload_file": ("file", "FileEngine", "FileTrainer"),
    "weightload_gloo": ("gloo", "GlooEngine", "GlooTrainer"),
    "weightload_ipc": ("native", "IpcEngine", "IpcTrainer"),
    "weightload_nccl": ("native", "NcclEngine", "NcclTrainer"),
    "weightload_shm": ("shm", "ShmEngine", "ShmTrainer"),
}


def register() -> None:
    """Make the engines known to vLLM, where it has weight transfer engines. Safe to call again."""
    from weightload.vllm import compat

    for backend, (module, engine, trainer) in _ENGINES.items():
        compat.register_transfer(backend, f"{__name__}.{module}", engine, trainer)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
