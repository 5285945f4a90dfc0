"""A worker for vLLM that refuses to run a poisoned model, and reloads through sessions only.

``LLM(..., worker_cls="weightload.vllm.GuardedWorker")``, and an engine cannot serve a mixture:
the worker looks before each step, so that replayed graphs are covered, which no guard on a module
sees. vLLM's own ways to replace weights (``reload_weights``, ``start_weight_update``,
``update_weights``, ``finish_weight_update``) run through a session, on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weightload.errors import ModelBusyError, UnsupportedError
from weightload.ownership import open_session, owner_of, require_usable
from weightload.refusals import why_refused
from weightload.vllm.agreement import agree
from weightload.vllm.transfer.mixin import NATIVE_CACHES, drive
from weightload.vllm.worker import OPERATIONS, WorkerExtension, poison_model, reset_or_poison

__all__ = ["guarded", "platform_worker"]


def require_ready(worker: Any) -> None:
    """Return if every model of ``worker`` may run.

    Raises:
        ModelPoisonedError: one holds a mixture.
        ModelBusyError: a session is open on one.
    """
    draft = getattr(worker, "get_draft_model", lambda: None)()
    for model in (worker.get_model(), draft):
        if model is None:
            continue
        require_usable(model)
        owner = owner_of(model)
        if owner is not None:
            raise ModelBusyError(
                f"Session {owner.id} is replacing the weights of this engine; it does not run "
                f"before that session has ended. Pause generation during an update.",
                owner=owner.id,
            )


class _Guard:
    """What is put before a worker's own class."""

    get_model: Callable[[], Any]
    rank: int
    vllm_config: Any
    _weightload_asleep = False

    # ------------------------------------------------------------------ running

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, unless a model must not be used."""
        require_ready(self)
        return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def execute_dummy_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Run an empty step, unless a model must not be used."""
        require_ready(self)
        return super().execute_dummy_batch(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Compile and capture, unless a model must not be used."""
        require_ready(self)
        return super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------ sleeping

    def sleep(self, level: int = 1) -> Any:
        """Go to sleep, and remember it: no load may begin before the weights are awake."""
        result = super().sleep(level)  # type: ignore[misc]
        self._weightload_asleep = True
        return result

    def wake_up(self, tags: list[str] | None = None) -> Any:
        """Wake up, and remember whether the weights are."""
        result = super().wake_up(tags)  # type: ignore[misc]
        if tags is None or "weights" in tags:
            self._weightload_asleep = False
        return result

    # ------------------------------------------------------------------ vLLM's own reloads

    def reload_weights(
        self,
        weights_iterator: Iterable[Any] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Replace all weights, as vLLM's method of this name, through one session.

        Args:
            weights_iterator: named tensors in checkpoint format; a buffer may be used for all.
            weights_path: a checkpoint folder, if there are no tensors; by default the one that
                the engine was started on.
            is_checkpoint_format: must be true: tensors that a hook has processed already cannot
                be checked.
        """

        def run(sessions: list[Any]) -> None:
            if not is_checkpoint_format:
                raise UnsupportedError(why_refused("kernel format"))
            OPERATIONS["start"](self)
            sessions.append(open_session(self.get_model()))
            if weights_iterator is not None:
                OPERATIONS["load"](self, weights_iterator)
            else:
                OPERATIONS["load_path"](self, weights_path)
            OPERATIONS["seal"](self)

        def finish(sessions: list[Any]) -> None:
            sessions.append(open_session(model))
            sessions[0].finish()
            reset_or_poison(self, NATIVE_CACHES)

        model = self.get_model()
        size = self.vllm_config.parallel_config.world_size
        finished = False
        if agree(self.rank, size, run):
            try:
                finished = agree(self.rank, size, finish)
            finally:
                if not finished:
                    # Some ranks may have the new weights; together they are a mixture.
                    poison_model(model, "a rank could not finish")

    # ------------------------------------------------------------------ vLLM's transfer engines

    @property
    def weight_transfer_engine(self) -> Any:
        """The transfer engine. Whichever is set is driven by sessions from then on."""
        return self.__dict__.get("weight_transfer_engine")

    @weight_transfer_engine.setter
    def weight_transfer_engine(self, engine: Any) -> None:
        self.__dict__["weight_transfer_engine"] = engine
        drive(engine, self)


def guarded(base: type) -> type:
    """Return a subclass of a worker class that is guarded.

    vLLM finds worker classes by name, so give it one in a module of your own:
    ``MyGuardedWorker = guarded(MyWorker)``.
    """
    return type("GuardedWorker", (_Guard, base, WorkerExtension), {"__doc__": _Guard.__doc__})


def platform_worker() -> type:
    """Return the worker class that vLLM takes by itself on this platform.

    Raises:
        UnsupportedError: nobody knows which that is; use :func:`guarded` on it.
    """
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    names = {
        "cpu": "vllm.v1.worker.cpu_worker.CPUWorker",
        "cuda": "vllm.v1.worker.gpu_worker.Worker",
        "xpu": "vllm.v1.worker.xpu_worker.XPUWorker",
    }
    name = names.get(current_platform.device_type)
    if name is None:
        raise UnsupportedError(
            f"The worker class of platform {current_platform.device_type!r} is not known. Make "
            f"the guarded one with weightload.vllm.guarded.guarded(its class)."
        )
    worker: type = resolve_obj_by_qualname(name)
    return worker


GuardedWorker = guarded(platform_worker())
