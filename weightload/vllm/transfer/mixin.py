"""Turns a weight transfer engine of vLLM into one that gives what it receives to a session.

The engine keeps its wire. What vLLM's engines do to the model around it (layerwise reloading, and
nothing at all when something fails) is replaced by one session: opened by ``start_weight_update``, fed
by ``update_weights``, sealed and finished by ``finish_weight_update``, on all ranks or on none.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import attrs
from torch import nn

from weightload.errors import ModelBusyError, UnsupportedError, UsageError
from weightload.lifecycle import start_reload
from weightload.session import WeightLoadSession
from weightload.states import SessionState
from weightload.vllm import compat
from weightload.vllm.agreement import agree
from weightload.vllm.vetoes import vetoes_of
from weightload.vllm.worker import framework_for, poison_model, reset_or_poison

__all__ = ["SessionDriven", "drive", "session_driven"]

NATIVE_CACHES = ("multimodal", "encoder", "lora", "kv")
"""What vLLM's own reload resets in a worker, and values that are not finite."""

CALLS = {
    "init_weight_transfer_engine": None,
    "start_weight_update": False,
    "start_draft_weight_update": False,
    "update_weights": True,
    "finish_weight_update": True,
    "shutdown_weight_transfer_engine": False,
}
"""The worker's methods around an engine, and which state of its flag lets each of them through.

vLLM's worker refuses calls by a flag of its own, on each rank for itself, and leaves the flag set when
a finish failed. Here the engine decides, on all ranks together."""

DEADLINE = 300.0
"""Seconds after which a trainer that was not heard of is given up, by default."""


@attrs.define(kw_only=True, eq=False)
class Update:
    """The update that is under way.

    Attributes:
        session: what it feeds.
        model: what is loaded: the target, or the draft.
        model_config: its configuration.
        heard: when the trainer was last heard of, on the monotonic clock.
        finishing: whether ranks have begun to commit.
    """

    session: WeightLoadSession
    model: nn.Module
    model_config: Any
    heard: float
    finishing: bool = False


class SessionDriven:
    """Put before a transfer engine: ``class Mine(SessionDriven, IPCWeightTransferEngine)``.

    For engines that hand tensors in checkpoint format to ``self.model.load_weights``; others are
    refused when an update starts. Two options may stand in ``init_info``, beside the engine's own:
    ``commit``, as of a session, and ``deadline``, the seconds after which a trainer that was not
    heard of is given up, so that another one may start.

    Errors reach the caller from the last rank only, with the text of the rank that failed.
    """

    model: Any
    model_config: Any
    device: Any
    vllm_config: Any

    weightload_commit: Any = "stream"
    weightload_deadline: float = DEADLINE
    _weightload_worker: Any = None
    _weightload_update: Update | None = None
    _weightload_sessions: list[Any] | None = None
    _weightload_options: tuple[Any, float] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        worker = compat.worker_in_construction()
        if worker is not None:
            self.weightload_attach(worker)

    # ------------------------------------------------------------------ for subclasses

    def weightload_meet(self, init_info: Any) -> None:
        """Meet the trainer."""
        super().init_transfer_engine(init_info)  # type: ignore[misc]

    def weightload_part(self) -> None:
        """Let go of the trainer."""
        super().shutdown()  # type: ignore[misc]

    def weightload_admit(self, update_info: Any) -> None:
        """Raise if a chunk is not of the update that is under way, which goes on then."""

    def weightload_receive(self, session: WeightLoadSession, update_info: Any) -> None:
        """Receive one chunk and give it to the session."""
        run = super().update_weights  # type: ignore[misc]
        session.load_through(lambda: run(update_info), exact=True)

    def weightload_require_all(self) -> None:
        """Raise if the trainer has not said that everything was sent."""

    def weightload_abandoned(self) -> str | None:
        """Return why the trainer of the update under way is taken for gone, ``None`` if it is not."""
        update = self._weightload_update
        silent = 0.0 if update is None else time.monotonic() - update.heard
        if silent > self.weightload_deadline:
            return f"nothing came for {silent:.0f} s"
        return None

    # ------------------------------------------------------------------ what vLLM calls

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Take out what is meant for the session, and parse the rest as the engine does."""
        rest = dict(init_dict)
        commit = rest.pop("commit", "stream")
        deadline = rest.pop("deadline", DEADLINE)
        if commit not in ("stream", "atomic"):
            raise UsageError(f"commit is 'stream' or 'atomic', found {commit!r}.")
        if not isinstance(deadline, int | float) or not deadline > 0:
            raise UsageError(f"deadline is a number of seconds, found {deadline!r}.")
        self._weightload_options = commit, float(deadline)
        return super().parse_init_info(rest)  # type: ignore[misc]

    def init_transfer_engine(self, init_info: Any) -> None:
        """Meet the trainer, unless an update of another one is under way."""

        def init(sessions: list[Any]) -> None:
            self._weightload_free()
            if self._weightload_options is not None:
                self.weightload_commit, self.weightload_deadline = self._weightload_options
            self.weightload_meet(init_info)

        self.weightload_together(init)

    def start_weight_update(self) -> None:
        """Open a session on the model that vLLM has set as the target.

        Raises:
            ModelBusyError: another update is under way, and its trainer is not given up yet.
            UnsupportedError: the engine writes past the model's loaders, or a veto.
        """

        def start(sessions: list[Any]) -> None:
            reason = compat.why_not_through_sessions(type(self), SessionDriven)
            if reason is not None:
                raise UnsupportedError(reason)
            self._weightload_free()
            worker = self._weightload_worker
            session = start_reload(
                self.model,
                framework=framework_for(self, self.model, self.model_config),
                commit=self.weightload_commit,
                veto=() if worker is None else vetoes_of(worker),
            )
            sessions.append(session)
            self._weightload_update = Update(
                session=session,
                model=self.model,
                model_config=self.model_config,
                heard=time.monotonic(),
            )

        self.weightload_together(start)

    def update_weights(self, update_info: Any) -> None:
        """Receive one chunk, and give it to the session.

        Raises:
            UsageError: no update is active.
            WeightLoadError: what went wrong on any rank. The session has been aborted on all.
        """

        def receive(sessions: list[Any]) -> None:
            update = self._weightload_open("call start_weight_update first.")
            self.weightload_admit(update_info)
            sessions.append(update.session)
            self._weightload_aim(update)
            with compat.engine_config(self):
                self.weightload_receive(update.session, update_info)
            update.heard = time.monotonic()

        self.weightload_together(receive)

    def finish_weight_update(self) -> None:
        """Process, commit and verify what the chunks brought, on every rank or on none.

        Raises:
            UsageError: no update is active: it was not started, or failed.
            WeightLoadError: what went wrong on any rank.
        """

        def finish(sessions: list[Any]) -> None:
            update = self._weightload_open("it was not started, or failed. Nothing is published.")
            sessions.append(update.session)
            update.finishing = True
            update.session.finish()
            compat.release_received(self)
            if self._weightload_worker is not None:
                reset_or_poison(self._weightload_worker, NATIVE_CACHES)

        if self.weightload_seal() and self.weightload_together(finish):
            self._weightload_update = None
            self._weightload_aim(None)

    def shutdown(self) -> None:
        """Abort what is under way on this rank, and let go of the trainer."""
        self.weightload_abort("the transfer was shut down")
        self.weightload_part()

    def weightload_abort(self, cause: str) -> None:
        """End the update that is under way, if one is, because its trainer gives up."""
        update = self._weightload_update
        if update is not None and update.session.state.open:
            update.session.abort(cause)
            self._weightload_failed()

    # ------------------------------------------------------------------ together

    def weightload_seal(self) -> bool:
        """Check on all ranks that everything has come. Once this is so, all may commit."""

        def seal(sessions: list[Any]) -> None:
            update = self._weightload_open("it was not started, or failed. Nothing is published.")
            if update.session.state is SessionState.SEALED:
                return
            sessions.append(update.session)
            self._weightload_aim(update)
            compat.drain_pending(self)
            self.weightload_require_all()
            update.session.seal()

        return self.weightload_together(seal)

    def weightload_together(self, action: Callable[[list[Any]], object]) -> bool:
        """Do something on all ranks; see :func:`weightload.vllm.agreement.agree`.

        Inside of itself it just does it.
        """
        if self._weightload_sessions is not None:
            action(self._weightload_sessions)
            return True

        def run(sessions: list[Any]) -> None:
            self._weightload_sessions = sessions
            try:
                action(sessions)
            finally:
                self._weightload_sessions = None

        parallel = self.vllm_config.parallel_config
        done = False
        try:
            done = agree(parallel.rank, parallel.world_size, run)
        finally:
            if not done:
                self._weightload_failed()
        return done

    def _weightload_failed(self) -> None:
        update = self._weightload_update
        if update is not None and update.finishing:
            # Some ranks may have the new weights; together they are a mixture.
            poison_model(update.model, "a rank could not finish")
        if update is None or not update.session.state.open:
            self._weightload_update = None
            self._weightload_aim(None)

    def _weightload_open(self, advice: str) -> Update:
        update = self._weightload_update
        if update is None or not update.session.state.open:
            raise UsageError(f"No update is active: {advice}")
        return update

    def _weightload_aim(self, update: Update | None) -> None:
        """Point the engine at the model of an update; vLLM resets it when a second start fails."""
        target = None if update is None else (update.model, update.model_config)
        compat.set_update_target(self, target)

    def _weightload_free(self) -> None:
        """End an update whose trainer is gone.

        Raises:
            ModelBusyError: an update is under way, and its trainer is not.
        """
        update = self._weightload_update
        if update is None or not update.session.state.open:
            return
        reason = self.weightload_abandoned()
        if reason is None:
            session = update.session
            raise ModelBusyError(
                f"Another update is under way in session {session.id}, {session.state.value}. One "
                f"at a time: wait for its end, or end it with shutdown_weight_transfer_engine(). "
                f"It is given up when nothing came for {self.weightload_deadline:.0f} s.",
                owner=session.id,
            )
        update.session.abort(f"the trainer was given up: {reason}")
        self._weightload_update = None

    # ------------------------------------------------------------------ the worker

    def weightload_attach(self, worker: Any) -> None:
        """Let the calls of ``worker`` around this engine come through."""
        self._weightload_worker = worker
        for name, flag in CALLS.items():
            own = getattr(worker, name, None)
            if callable(own) and name not in vars(worker):
                vars(worker)[name] = functools.partial(_call, worker, name, own, flag)


def _call(
    worker: Any, name: str, own: Callable[..., Any], flag: bool | None, *args: Any, **kwargs: Any
) -> Any:
    """Call a worker's own method on all ranks, whatever vLLM's flag says."""
    engine = worker.weight_transfer_engine
    if not isinstance(engine, SessionDriven):
        return own(*args, **kwargs)

    def run(sessions: list[Any]) -> None:
        if flag is not None:
            compat.set_update_active(worker, flag)
        own(*args, **kwargs)

    if name == "shutdown_weight_transfer_engine":
        run([])
    elif name != "finish_weight_update" or engine.weightload_seal():
        engine.weightload_together(run)
    return None


@functools.cache
def session_driven(cls: type) -> type:
    """Return a transfer engine class that is driven by sessions."""
    if issubclass(cls, SessionDriven):
        return cls
    return type(cls.__name__, (SessionDriven, cls), {"__doc__": cls.__doc__})


def drive(engine: Any, worker: Any) -> None:
    """Turn the transfer engine that a worker has into one that is driven by sessions."""
    if engine is not None:
        cls: Any = type(engine)
        engine.__class__ = session_driven(cls)
        engine.weightload_attach(worker)
