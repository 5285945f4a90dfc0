"""The vLLM adapter: load format, worker extension, and ``reload`` for engines.

Importing this package imports no vLLM; its parts do when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightload.vllm.engine import areload, reload
    from weightload.vllm.worker import WorkerExtension, worker_extension

__all__ = ["WorkerExtension", "areload", "reload", "worker_extension"]

_HOMES = {
    "WorkerExtension": "weightload.vllm.worker",
    "worker_extension": "weightload.vllm.worker",
    "areload": "weightload.vllm.engine",
    "reload": "weightload.vllm.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
