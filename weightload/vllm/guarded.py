"""A worker for vLLM that refuses to run a poisoned model, and reloads through sessions only.

``LLM(..., worker_cls="weightload.vllm.GuardedWorker")``, and an engine cannot serve a mixture:
the worker looks before each step, so that replayed graphs are covered, which no guard on a module
sees. vLLM's own ways to replace weights (``reload_weights``, ``start_weight_update``,
``update_weights``, ``finish_weight_update``) run through a session, on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weightload.errors import ModelBusyError, UnsupportedError, UsageError
from weightload.lifecycle import start_reload
from weightload.ownership import open_session, owner_of, require_usable
from weightload.refusals import why_refused
from weightload.vllm import compat
from weightload.vllm.vetoes import vetoes_of
from weightload.vllm.worker import (
    OPERATIONS,
    WorkerExtension,
    framework_for,
    gather,
    outcome_of,
    reset_or_poison,
)

__all__ = ["guarded", "platform_worker"]

NATIVE_CACHES = ("multimodal", "encoder", "lora", "kv")
"""What vLLM's own reload resets in a worker, and values that are not finite."""


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


def agree(worker: Any, action: Callable[[list[Any]], object]) -> bool:
    """Do something that every rank does, and say whether all of them could.

    Every rank must call this. Where one failed, each aborts its session, and the last rank
    raises that one's error: an executor that gets an exception from an earlier rank leaves the
    answers of later ones unread, for the next call to stumble over.

    Args:
        worker: vLLM's worker.
        action: is called with a list, and appends the session that it works on.

    Returns:
        Whether every rank could; ``False`` only on ranks before the last.

    Raises:
        WeightLoadError: what the first rank that failed said, on the last rank.
    """
    sessions: list[Any] = []
    mine = outcome_of(worker.rank, lambda: action(sessions))
    size = worker.vllm_config.parallel_config.world_size
    outcomes = [mine]
    if size > 1:
        mine.pop("exception", None)
        outcomes = compat.gather_from_ranks(mine, size)
    failed = [outcome for outcome in outcomes if "error" in outcome]
    for session in sessions if failed else ():
        if session.state.open:
            session.abort(failed[0]["error"]["message"])
    if worker.rank == size - 1:
        gather(outcomes)
    return not failed


class _Guard:
    """What is put before a worker's own class."""

    get_model: Callable[[], Any]
    weight_transfer_engine: Any
    _check_weight_transfer_engine: Callable[[], None]
    _set_draft_weight_update_target: Callable[[], None]
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

        if agree(self, run):
            self._weightload_finish(self.get_model())

    def start_weight_update(self) -> None:
        """Begin an update that arrives in chunks."""
        self._weightload_start(draft=False)

    def start_draft_weight_update(self) -> None:
        """Begin an update of the draft model."""
        self._weightload_start(draft=True)

    def update_weights(self, update_info: Any) -> None:
        """Receive one chunk with the configured transport, and give it to the session."""

        def receive(sessions: list[Any]) -> None:
            session = open_session(self._weightload_target())
            if session is None:
                raise UsageError("No update is active; call start_weight_update first.")
            sessions.append(session)
            self._weight_update_active = True
            with compat.engine_config(self):
                run = super(_Guard, self).update_weights  # type: ignore[misc]
                session.load_through(lambda: run(update_info), exact=True)

        received = False
        try:
            received = agree(self, receive)
        finally:
            if not received:
                self._weightload_reset()

    def finish_weight_update(self) -> None:
        """Process, commit and verify what the chunks brought, on every rank or on none."""
        target = self._weightload_target()

        def seal(sessions: list[Any]) -> None:
            session = open_session(target)
            if session is None:
                raise UsageError(
                    "No update is active: it was not started, or failed. Nothing is published."
                )
            sessions.append(session)
            self.weight_transfer_engine.drain_pending()
            session.seal()

        try:
            if agree(self, seal):
                self._weightload_finish(target)
        finally:
            self._weightload_reset()

    # ------------------------------------------------------------------ helpers

    def _weightload_start(self, *, draft: bool) -> None:
        def start(sessions: list[Any]) -> None:
            self._check_weight_transfer_engine()
            engine = self.weight_transfer_engine
            reason = compat.why_not_through_sessions(engine)
            if reason is not None:
                raise UnsupportedError(reason)
            target = engine.model, engine.model_config
            if draft:
                self._set_draft_weight_update_target()
            model = engine.model
            try:
                framework = framework_for(self, model, engine.model_config)
                sessions.append(start_reload(model, framework=framework, veto=vetoes_of(self)))
            except BaseException:
                engine.model, engine.model_config = target
                raise

        if agree(self, start):
            self._weight_update_active = True
            self._weight_update_is_draft = draft

    def _weightload_target(self) -> Any:
        engine = getattr(self, "weight_transfer_engine", None)
        return self.get_model() if engine is None else engine.model

    def _weightload_finish(self, model: Any) -> None:
        def finish(sessions: list[Any]) -> None:
            session = open_session(model)
            if session is not None:
                sessions.append(session)
                session.finish()
            reset_or_poison(self, NATIVE_CACHES)

        finished = False
        try:
            finished = agree(self, finish)
        finally:
            if not finished:
                # Some ranks may have the new weights; together they are a mixture.
                OPERATIONS["poison"](self, "a rank could not finish")

    def _weightload_reset(self) -> None:
        self._weight_update_active = False
        engine = getattr(self, "weight_transfer_engine", None)
        if engine is not None:
            engine.reset_weight_update_target()


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
