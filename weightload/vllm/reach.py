"""How operations get to the workers of an engine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from weightload.errors import UnsupportedError
from weightload.vllm import compat
from weightload.vllm.worker import run_operation

__all__ = ["Reach"]


class Reach:
    """How operations get to the workers of an engine.

    Attributes:
        local: whether the worker is in this process.
        intact: whether, after a failure, all ranks have said that their model is whole.
    """

    def __init__(self, rpc: Callable[..., Any], *, local: bool, prefix: str | None) -> None:
        self.local = local
        self.intact = False
        self._rpc = rpc
        self._prefix = prefix

    @classmethod
    def of(cls, front: Any, vllm_config: Any, core: Any) -> Reach:
        """Find out.

        Raises:
            UnsupportedError: workers in other processes take only method names, and there is no
                worker extension that has them.
        """
        parallel = vllm_config.parallel_config
        in_process = hasattr(core, "engine_core")
        rpc = front.collective_rpc
        if in_process and not compat.engine_processes(core) and parallel.world_size == 1:
            return cls(rpc, local=True, prefix=None)
        if compat.data_parallel_cores(core) > 1:
            # The engine's own method returns what the first of its cores says, and no other.
            rpc = compat.rpc_to_all_cores(core)
        backend = parallel.distributed_executor_backend
        if backend not in ("mp", "uni", None):
            raise UnsupportedError(
                f"reload() hands tensors over within one machine; executor {backend!r} may have "
                f"workers elsewhere. Use weightload.vllm.WorkerExtension with your transport."
            )
        for name in (parallel.worker_extension_cls, parallel.worker_cls):
            prefix = _prefix_of(name)
            if prefix is not None:
                return cls(rpc, local=False, prefix=prefix)
        if not in_process and os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") != "1":
            raise UnsupportedError(
                "The engine's workers are in other processes and have no weightload methods. "
                "Start the engine with worker_extension_cls='weightload.vllm.WorkerExtension'."
            )
        return cls(rpc, local=False, prefix=None)

    def call(self, operation: str, **arguments: Any) -> Callable[[], Any]:
        """Return the call that asks every worker for an operation."""
        method: Any = run_operation
        if self._prefix is not None:
            method = f"{self._prefix}_{operation}"
        else:
            arguments = {"operation": operation, "local": self.local, **arguments}
        return functools.partial(self._rpc, method, kwargs=arguments)


def _prefix_of(qualified: str | None) -> str | None:
    """Return the prefix of weightload's methods in a worker extension or a worker class."""
    if not qualified or qualified == "auto":
        return None
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for name in dir(resolve_obj_by_qualname(qualified)):
        if name.endswith("_load_bucket"):
            return name.removesuffix("_load_bucket")
    return None
