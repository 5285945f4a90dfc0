"""The vLLM adapter: load format, worker extension, guarded worker, and ``reload`` for engines.

Importing this package imports no vLLM; its parts do when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightload.vllm.engine import areload, reload
    from weightload.vllm.fleet import FleetMember, HTTPReplica, LocalReplica, Member, RayReplica
    from weightload.vllm.guarded import GuardedWorker, guarded
    from weightload.vllm.worker import WorkerExtension, worker_extension

__all__ = [
    "FleetMember",
    "GuardedWorker",
    "HTTPReplica",
    "LocalReplica",
    "Member",
    "RayReplica",
    "WorkerExtension",
    "areload",
    "guarded",
    "reload",
    "worker_extension",
]

_HOMES = {
    "FleetMember": "weightload.vllm.fleet",
    "HTTPReplica": "weightload.vllm.fleet",
    "LocalReplica": "weightload.vllm.fleet",
    "Member": "weightload.vllm.fleet",
    "RayReplica": "weightload.vllm.fleet",
    "GuardedWorker": "weightload.vllm.guarded",
    "WorkerExtension": "weightload.vllm.worker",
    "guarded": "weightload.vllm.guarded",
    "worker_extension": "weightload.vllm.worker",
    "areload": "weightload.vllm.engine",
    "reload": "weightload.vllm.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
