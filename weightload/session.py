"""The session: one load of one model, from ``prepare`` to its end.

This is the only place that orders the phases and moves the state.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from weightload import ownership, preflight
from weightload.board import Board
from weightload.errors import (
    InvalidTransitionError,
    SessionMisnestedError,
    UnexpectedWeightError,
    UsageError,
    WeightLoadError,
)
from weightload.framework import Framework
from weightload.gate import Gate
from weightload.intake import Intake, pairs_of
from weightload.layer import Hook, Unit
from weightload.receipt import Receipt
from weightload.record import make_record, record_of
from weightload.registry import Role
from weightload.states import Event, SessionState

__all__ = ["WeightLoadSession"]

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Commit = Literal["stream", "atomic"]


class WeightLoadSession:
    """One load of one model: ``prepare -> load -> finish``, or ``abort``. For single use.

    As a context manager it prepares on entry, finishes on a clean exit, and aborts on an
    exception::

        with WeightLoadSession(model, version=7) as session:
            session.load(weights)
        session.receipt

    The first session on a model is its *initial load*: tensors are written where they are, the
    hooks run once, and what they did is recorded. Every later session is a *reload*: what the
    hooks did is undone, tensors go to staging or straight to live memory, the hooks run once from
    their first state, and the results go into the tensors that the model had before.

    Args:
        model: the root module.
        framework: what the model belongs to; by default the one of its first load, or plain torch.
        version: what the caller calls these weights; :func:`weights_version` answers it after a
            successful ``finish``.
        commit: ``"stream"`` processes and commits each unit as soon as it is complete, so that
            the extra memory is about one layer. ``"atomic"`` writes nothing live before
            everything has arrived, was processed and fits, at the price of one staged model.
        allow_missing: names or patterns (as in :mod:`fnmatch`) of parameters that an initial load
            may leave at the value that they were constructed with.

    Attributes:
        id: number of the session in this process.
        model: the root module.
        state: what has happened so far.
        receipt: what was done; ``None`` until the session has ended.
        opener: whom it was opened for; free for callers that open sessions for others.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        framework: Framework | None = None,
        version: str | int | None = None,
        commit: Commit = "stream",
        allow_missing: Iterable[str] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"A session loads a torch.nn.Module, found {type(model).__name__}.")
        if commit not in ("stream", "atomic"):
            raise UsageError(f"commit is 'stream' or 'atomic', found {commit!r}.")
        self.id = ownership.new_session_id()
        self.model = model
        self.version = version
        self._gate = Gate(self.id)
        self.receipt: Receipt | None = None
        self.opener: str | None = None
        self._commit: Commit = commit
        self._allow_missing = tuple(allow_missing)
        self._framework = framework
        self._kind = "reload"
        self._board: Board | None = None
        self._intake = Intake(manifest=None)
        self._dirty = False
        self._step = "prepare"
        self._module: str | None = None
        self._seconds: dict[str, float] = {}
        self._scope: Any = None

    def __repr__(self) -> str:
        model = type(self.model).__name__
        return f"<WeightLoadSession {self.id} on {model}, {self.state.value}>"

    @property
    def state(self) -> SessionState:
        """What has happened so far."""
        return self._gate.state

    @property
    def baseline_known(self) -> bool:
        """Whether the source names of the load that made the model are known."""
        return self._intake.manifest is not None

    # ------------------------------------------------------------------ lifecycle

    def prepare(self) -> None:
        """Claim the model and put it into the state that loaders expect.

        Raises:
            InvalidTransitionError: the session was prepared before.
            ModelBusyError, SessionMisnestedError: another session owns a module of the model.
            UnclassifiedModuleError: a module has a hook and no rule.
            UnsupportedError: this model cannot be reloaded right; the message says what to do.
        """
        with self._gate.call("prepare", Event.PREPARE):
            modules = dict(self.model.named_modules())
            ownership.claim(self, modules)
            self._gate.move(Event.PREPARE)
            with self._failing("prepare"):
                self._open(modules)

    def load(self, weights: Weights, *, borrowed: bool | None = None) -> None:
        """Give tensors to the model's own loaders. May be called any number of times.

        Nothing is kept by reference: when ``load`` returns, the tensors may be overwritten.

        Args:
            weights: a mapping, or an iterable of ``(name, tensor)`` pairs.
            borrowed: whether a tensor's memory may be reused as soon as the next one is asked
                for. By default that is assumed of iterators and of everything else that is read
                while it is iterated, and each tensor is copied once. It is not assumed of
                mappings, sequences and other collections: they are checked whole, before anything
                is written.

        Raises:
            InvalidTransitionError: the session is not prepared, or has ended.
            CheckpointError: a tensor does not fit; see its subclasses.
            ProcessingError: a hook of a layer that became complete raised.

        What the source raises reaches the caller as it is. After any exception the session has
        ended; ``state`` says whether the model is intact.
        """
        with self._gate.call("load", Event.LOAD):
            self._gate.move(Event.LOAD)
            if borrowed is None:
                borrowed = not isinstance(weights, Collection)
            with self._failing("load"), self._loading() as board:
                if isinstance(weights, Collection):
                    weights = self._intake.read(weights)
                    preflight.check_pairs(board, self.model, self._intake, weights)
                feed = self._feed(weights, borrowed)
                board.framework.load(self.model, feed)
                self._not_swallowed(board)
                self._drained(feed)
                self._settle()
                self._intake.end_batch()

    def load_through(self, run: Callable[[], Any]) -> None:
        """Let a loader that calls ``model.load_weights`` itself do the load.

        For loaders that own their source, such as a framework's own at the initial load. Writes
        that it makes without ``load_weights`` are seen as well.

        Args:
            run: does the load.
        """
        with self._gate.call("load_through", Event.LOAD):
            self._gate.move(Event.LOAD)
            self._intake.lenient = True
            mine = vars(self.model)
            kept = {name: mine[name] for name in ("load_weights",) if name in mine}
            original = getattr(self.model, "load_weights", None)

            def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> Any:
                feed = self._feed(pairs_of(weights), borrowed=False)
                return original(feed, *args, **kwargs)  # type: ignore[misc]

            if callable(original):
                mine["load_weights"] = load_weights
            try:
                with self._failing("load"), self._loading() as board:
                    run()
                    self._not_swallowed(board)
                    self._settle()
                    self._intake.end_batch()
            finally:
                mine.pop("load_weights", None)
                mine.update(kept)

    def check(
        self, weights: Mapping[str, torch.Tensor | tuple[int, ...]], *, complete: bool
    ) -> None:
        """Check a whole set of names and shapes before any of it is written.

        The data of a tensor is looked at only if the load that made the model did not have its
        name: then the model's loaders are asked to take it, without any write.

        Args:
            weights: every tensor that is going to be loaded, or its shape. A mapping of shapes
                may have a method ``tensor(name)`` that gets the tensor.
            complete: whether nothing else will be loaded in this session.

        Raises:
            CheckpointError: something does not fit, or is missing.
        """
        with self._gate.call("check", None), self._failing("check"), self._loading() as board:
            preflight.check_set(board, self.model, self._intake, weights, complete=complete)

    def finish(self) -> Receipt:
        """Process and commit what is left, and verify the model.

        Returns:
            What was done. The model is then exactly what a fresh load would have given.

        Raises:
            InvalidTransitionError: the session is not prepared, or has ended.
            IncompleteLoadError: something never arrived; all names are in the message.
            ModelError: a hook raised, or a live tensor could not keep its storage.
        """
        with self._gate.call("finish", Event.FINISH):
            self._gate.move(Event.FINISH)
            with self._failing("finish"):
                self._finish()
            self._gate.move(Event.DONE)
            ownership.record_version(self.model, self.version)
            self._close()
            return self._make_receipt(None)

    def abort(self, cause: str = "aborted by the caller") -> Receipt:
        """End the session without finishing it. This is not a rollback.

        The structure is restored: live tensors are back in their places and the model can be
        loaded again. If no live byte was written, the model computes what it did before;
        otherwise it is poisoned until a session with full scope finishes.

        Args:
            cause: why, for the receipt.
        """
        event = Event.ABORT_DIRTY if self._dirty else Event.ABORT_CLEAN
        with self._gate.call("abort", event):
            self._end(cause)
            return self._make_receipt(cause)

    def process_quant(self, module: nn.Module) -> bool:
        """Run the quantisation hook of ``module`` now, if it has not run in this session.

        For loaders that know that a layer is complete. Without this, the hook runs when the
        layer's ledger is complete, or at ``finish``.

        Returns:
            Whether the hook ran; ``False`` if it had run before, or the module has none.

        Raises:
            IncompleteLoadError: weights of its unit have not arrived.
            ProcessingError: the hook raised.
        """
        return self._process_early("process_quant", module, Role.QUANT)

    def finalize_attention_runtime(self, module: nn.Module) -> bool:
        """Run the attention hook of ``module`` now, if it has not run in this session.

        Returns:
            Whether the hook ran; ``False`` if it had run before, or the module has none.

        Raises:
            UsageError: a module inside it has not been quantised yet.
            IncompleteLoadError: weights of it, or of a module inside it, have not arrived.
            ProcessingError: the hook raised.
        """
        return self._process_early("finalize_attention_runtime", module, Role.ATTENTION)

    def __enter__(self) -> WeightLoadSession:
        self.prepare()
        self._scope = ownership.entered(self)
        self._scope.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope, self._scope = self._scope, None
        inner = ownership.current_session()
        misnested = None
        if inner is not None and inner is not self:
            misnested = (
                f"Session {self.id} was closed while session {inner.id}, opened inside it, is "
                f"open. Close the inner one first."
            )
        try:
            if scope is not None:
                scope.__exit__(None, None, None)
        except ValueError:  # a context variable is reset where it was set
            misnested = (
                f"Session {self.id} was closed in another task or context than it was opened in. "
                f"Close it where it was opened, or use prepare() and finish() without a block."
            )
        if not self.state.open:
            return
        if error is not None:
            self._end(f"{type(error).__name__}: {error}")
            self._annotate(error)
        elif misnested is not None:
            self._end("closed in the wrong order")
            raise SessionMisnestedError(misnested)
        else:
            self.finish()

    def __del__(self) -> None:
        if hasattr(self, "_gate") and self.state.open:
            try:
                warnings.warn(
                    f"{self!r} was dropped without finish() or abort(); it is aborted now.",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )
            finally:  # where warnings are errors as well
                self._end("dropped without an end")

    # ------------------------------------------------------------------ opening

    def _open(self, modules: dict[str, nn.Module]) -> None:
        record = record_of(self.model)
        if self._framework is None:
            known = record.framework if record is not None else None
            self._framework = known if known is not None else Framework()
        self._framework.adopt(self.model)
        record = record_of(self.model)
        self._kind = "initial" if record is None or record.framework is None else "reload"
        manifest = record.manifest if record is not None else None
        if self._kind == "reload" and manifest is None:
            # Nobody knows which values no checkpoint brings. Nothing live is written before it
            # is sure that everything came.
            self._commit = "atomic"
        self._intake = Intake(manifest=manifest)
        self._board = Board(
            mark_dirty=self.mark_dirty,
            framework=self._framework,
            modules=modules,
            intake=self._intake,
            initial=self._kind == "initial",
            atomic=self._commit == "atomic",
            allow_missing=self._allow_missing,
        )
        self._board.open()

    def _opened(self) -> Board:
        if self._board is None:
            raise InvalidTransitionError("The session is not prepared; call prepare() first.")
        return self._board

    # ------------------------------------------------------------------ loading

    @contextmanager
    def _loading(self) -> Iterator[Board]:
        board = self._opened()
        with ownership.entered(self), board.framework.ambient(self.model), board.arrivals.observer:
            yield board

    def _feed(self, weights: Iterable[tuple[str, torch.Tensor]], borrowed: bool) -> Iterator[Any]:
        return self._intake.feed(weights, borrowed=borrowed, between=self._settle)

    def _settle(self) -> None:
        """Process the units that became complete, now that no loader is at work on them."""
        for unit in self._opened().arrivals.take_ready():
            self._process(unit, [hook for hook in unit.hooks if hook.rule.role is Role.QUANT])

    def _not_swallowed(self, board: Board) -> None:
        """Raise what interrupted the loaders, if they went on as if nothing had happened."""
        for error in (self._intake.failure, board.arrivals.observer.refusal):
            if error is not None:
                raise error

    def _drained(self, feed: Iterator[Any]) -> None:
        for name, _ in feed:
            raise UnexpectedWeightError(
                f"The model's load_weights returned before it had read {name!r}; it must read the "
                f"whole iterator that it is given.",
                name=name,
            )

    # ------------------------------------------------------------------ processing

    def _process_early(self, call: str, module: nn.Module, role: Role) -> bool:
        with self._gate.call(call, None, inside=True), self._failing("process"):
            board = self._opened()
            if self.state is SessionState.PREPARED:
                self._gate.move(Event.LOAD)
            hook = board.hook_of(module, role)
            if hook is None or hook.attempted:
                return False
            unit = board.unit_of(module)
            waiting = [
                other.name
                for other in board.hooks
                if role is Role.ATTENTION
                and other.rule.role is Role.QUANT
                and not other.attempted
                and any(other.module is inner for inner in module.modules())
            ]
            if waiting:
                raise UsageError(
                    f"Attention module {hook.name!r} contains {', '.join(waiting)}, not yet "
                    f"quantised; call process_quant on it first.",
                    module=hook.name,
                )
            board.completeness.check_complete(unit, hook)
            with ownership.entered(self), board.framework.ambient(self.model):
                self._process(unit, [hook])
            return True

    def _process(self, unit: Unit, hooks: list[Hook]) -> None:
        """Run hooks, and commit the unit when it has no others to wait for."""
        board = self._opened()
        self._step = "process"
        with _disable_current_modes(), self._timed("process"):
            for hook in hooks:
                if not hook.attempted:
                    self._module = hook.name
                    board.learning.run_hook(unit, hook)
            self._module = None
            if self._commit == "stream" and unit.staged and all(h.done for h in unit.hooks):
                board.plan(unit)
                self._commit_unit(unit)
                board.release(unit)
        self._step = "load" if self.state is SessionState.LOADING else "finish"

    def _commit_unit(self, unit: Unit) -> None:
        self._step = "commit"
        self._module = unit.name
        if unit.changes_something:
            self.mark_dirty()
        self._opened().commit(unit)
        self._module = None

    def mark_dirty(self) -> None:
        """Note that a live byte is about to be written: from now on an abort poisons."""
        self._dirty = True

    def _finish(self) -> None:
        board = self._opened()
        lost = board.completeness.missing()
        if lost:
            raise board.completeness.incomplete(lost, len(self._intake.seen))
        board.completeness.check_overlaps()
        board.completeness.check_unclaimed()
        with ownership.entered(self), board.framework.ambient(self.model):
            if self._kind == "initial":
                board.framework.before_processing(self.model)
                board.learning.start_learning()
            for hook in board.hooks:
                if not hook.done:
                    self._process(board.unit_of(hook.module), [hook])
            waiting = [unit for unit in board.units if unit.staged]
            for unit in waiting:
                board.plan(unit)
            with self._timed("commit"):
                for unit in waiting:
                    self._commit_unit(unit)
                for unit in waiting:
                    board.release(unit)
            board.framework.after_processing(self.model)
        with self._timed("verify"):
            board.verify()
            board.learning.learn()
        root = make_record(self.model)
        root.framework = self._framework
        if self._intake.seen:
            root.manifest = self._intake.facts()

    # ------------------------------------------------------------------ ending

    @contextmanager
    def _failing(self, step: str) -> Iterator[None]:
        """End the session if the block raises, and say whether the model is intact."""
        self._step, self._module = step, None
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            raised: BaseException = error
            source = self._intake.source_error
            if (
                step in ("load", "check")
                and isinstance(error, Exception)
                and not isinstance(error, WeightLoadError)
                and error is not source
            ):
                raised = preflight.refused(error, self._intake)
            self._end(f"{type(raised).__name__}: {raised}", raised)
            self._annotate(raised)
            if raised is not error:
                raise raised from error
            raise
        finally:
            self._seconds[step] = self._seconds.get(step, 0.0) + time.perf_counter() - started

    def _annotate(self, error: BaseException) -> None:
        intact = self.state is not SessionState.POISONED
        if isinstance(error, WeightLoadError):
            error.model_intact = intact
        error.add_note(
            f"weightload: session {self.id} was aborted; "
            + (
                "no live weight was written and the model computes what it did before."
                if intact
                else "live weights had been written and the model is poisoned until a complete "
                "load finishes."
            )
        )

    def _end(self, cause: str, error: BaseException | None = None) -> None:
        """Poison if need be, then clean up; what goes wrong there is attached to the error."""
        if self._dirty:
            ownership.record_poison(
                self.model,
                ownership.Poison(
                    session=self.id,
                    version=self.version,
                    step=self._step,
                    module=self._module,
                    cause=cause,
                ),
            )
        try:
            if self._board is not None:
                with _disable_current_modes():
                    self._board.restore()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"weightload: cleaning up raised {type(second).__name__}: {second}")
        finally:
            if self.state is SessionState.NEW or self.state.open:
                self._gate.move(Event.ABORT_DIRTY if self._dirty else Event.ABORT_CLEAN)
            self._close()
            self._make_receipt(cause)

    def _close(self) -> None:
        if vars(self.model).get(ownership.HOLDER) is self:
            del vars(self.model)[ownership.HOLDER]
        if self._board is not None:
            ownership.release(self, self._board.modules.values())
            self._board.close()

    def _make_receipt(self, cause: str | None) -> Receipt:
        if self.receipt is None:
            seen = self._intake.seen.values()
            self.receipt = Receipt(
                session=self.id,
                kind=self._kind,
                outcome=self.state.value,
                version=self.version,
                commit=self._commit,
                model_intact=self.state is not SessionState.POISONED,
                cause=cause,
                names_consumed=sum(fact.consumed for fact in seen),
                names_skipped=sum(not fact.consumed for fact in seen),
                bytes_received=self._intake.nbytes,
                casts=len(self._intake.casts),
                seconds=dict(self._seconds),
                **(self._board.counts() if self._board is not None else {}),
            )
        return self.receipt

    # ------------------------------------------------------------------ helpers

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started
