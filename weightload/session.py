"""The session: one load of one model, from ``prepare`` to its end.

This is the only place that orders the phases and moves the state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from weightload import collector, ownership, preflight
from weightload.board import Board
from weightload.closing import make_receipt
from weightload.delivery import Delivery, Weights
from weightload.errors import (
    InvalidTransitionError,
    SessionMisnestedError,
    StorageChangedError,
    UnsupportedError,
    UsageError,
    WeightLoadError,
)
from weightload.family import Draft, Family
from weightload.framework import Framework
from weightload.gate import Gate
from weightload.intake import Intake
from weightload.lanes import Lane
from weightload.plan import Plan
from weightload.planning import uses_plans
from weightload.processing import Processing
from weightload.progress import Progress
from weightload.quick import Quick
from weightload.receipt import Receipt
from weightload.record import record_of
from weightload.recorded import Recorded
from weightload.registry import Role
from weightload.replaying import Fetch
from weightload.reporting import LoadProgress
from weightload.scope import Scope
from weightload.skeleton import Body
from weightload.states import Event, SessionState
from weightload.transport import Transport, buffers_of
from weightload.verifying import Verification, Verify
from weightload.ways import UNPREPARED, Ways

__all__ = ["WeightLoadSession"]

Commit = Literal["stream", "atomic"]
Version = str | int | None
Publish = Callable[[Version, Version], object]
Veto = Callable[[nn.Module], str | None]


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
        scope: what this load promises to bring, everything by default. A promise is kept exactly:
            nothing less may come, and nothing else.
        check_finite: refuse NaN and infinity, at the price of reading every tensor once more.
        strict: refuse to go on when a tensor outside parameters and buffers that kernels may know
            cannot keep its storage, or an opaque object is made anew. By default what the
            framework says: whether graphs were captured.
        verify: compare live tensors with what was sent before ``finish`` returns. ``"full"``
            compares each tensor that was written in place with a digest of its source, and
            processes each staged unit a second time; ``"sampled"`` does that for about one of
            64, others in each version.
        staging_budget: bytes that may be staged at once, beside the model. What a layer cannot wait
            for elsewhere is staged in live memory where that is possible; otherwise the load is
            refused. By default as many as needed.
        publish: called after everything else, as ``callback(old_version, new_version)``: the
            place to drop what was computed with the old weights. If one raises, the others are
            called nevertheless, and the model is poisoned.
        veto: called before anything else, as ``callback(model)``: what returns a reason refuses
            the load.
        plans: record which tensor goes where, and take later ones there without the model's loaders.
            What is not as it was recorded goes through the loaders in any case. By default what
            the variable ``WEIGHTLOAD_PLANS`` says: ``on``, which it is unless set, ``off``, or
            ``random`` for a coin per session.
        drafts: models that are loaded with this one, from the same tensors: all commit, or none.
            They may share modules with it. A :class:`Draft` says more than a module.

    Attributes:
        id: number of the session in this process.
        model: the root module.
        state: what has happened so far.
        receipt: what was done; ``None`` until the session has ended.
        opener: whom it was opened for; free for callers that open sessions for others.
        inbox: what such callers keep while tensors come in several calls.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        framework: Framework | None = None,
        version: Version = None,
        commit: Commit = "stream",
        scope: Scope | None = None,
        check_finite: bool = False,
        strict: bool | None = None,
        verify: Verify | None = None,
        staging_budget: int | None = None,
        publish: Iterable[Publish] = (),
        veto: Iterable[Veto] = (),
        plans: bool | None = None,
        drafts: Iterable[nn.Module | Draft] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"A session loads a torch.nn.Module, found {type(model).__name__}.")
        if commit not in ("stream", "atomic"):
            raise UsageError(f"commit is 'stream' or 'atomic', found {commit!r}.")
        if verify not in (None, "sampled", "full"):
            raise UsageError(f"verify is None, 'sampled' or 'full', found {verify!r}.")
        if staging_budget is not None and (type(staging_budget) is not int or staging_budget < 0):
            raise UsageError(
                f"staging_budget is a number of bytes, at least 0, or None; found "
                f"{staging_budget!r}."
            )
        if not isinstance(framework, Framework | None):
            raise UsageError(
                f"framework is a Framework, or None; found {type(framework).__name__}."
            )
        if not isinstance(scope, Scope | None):
            raise UsageError(
                f"scope is a Scope, such as Scope.full() or Scope.only(names), found "
                f"{type(scope).__name__}."
            )
        self.id = ownership.new_session_id()
        self.model = model
        self.version = version
        self.scope = Scope() if scope is None else scope
        self.receipt: Receipt | None = None
        self.opener: str | None = None
        self.inbox: Any = None
        self._gate = Gate(self.id)
        self._commit: Commit = commit
        self._check_finite = check_finite
        self._strict = strict
        self._verify: Verify | None = verify
        self._staging_budget = staging_budget
        self._publish = tuple(publish)
        self._veto = tuple(veto)
        self._framework = framework
        self._drafts = Draft.all_of(drafts, model)
        self._family: Family | None = None
        self._kind = "reload"
        self._ways: Ways | None = None
        self._intake = Intake(manifest=None)
        self._lane = Lane()
        self._progress = Progress()
        self._sealed = False
        self._transport = False
        self._kept = False
        self._block: Any = None
        self._plans = uses_plans(plans)
        self._modules: dict[str, nn.Module] = {}
        self._recorded: Recorded | None = None
        self._body: Body | None = None
        self._guarded = False

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
            ModelPoisonedError: only a complete load cures the model, or nothing does.
            CheckpointError: the scope names what the model does not have, or splits what is
                processed together.
            UnclassifiedModuleError: a module has a hook and no rule.
            UnsupportedError: a veto, or this model cannot be reloaded right; the message says
                what to do.
        """
        with self._gate.call("prepare", Event.PREPARE), collector.paused():
            for veto in self._veto:
                reason = veto(self.model)
                if reason:
                    raise UnsupportedError(f"The load was refused before it began: {reason}")
            poisons = (ownership.poison_of(root) for root in self._roots)
            poison = next((poison for poison in poisons if poison is not None), None)
            if poison is not None and (poison.terminal or not self.scope.is_full):
                raise poison.error()
            self._modules = self._find_modules()
            ownership.claim(self, self._modules, self._marks)
            self._gate.move(Event.PREPARE)
            with self._failing("prepare"):
                self._open()

    def load(
        self,
        weights: Weights,
        *,
        transport: Transport = None,
        single_stream: bool = False,
        progress: Callable[[LoadProgress], object] | None = None,
    ) -> None:
        """Give tensors to the model's own loaders. May be called any number of times.

        Nothing is kept by reference: when ``load`` returns, the tensors may be overwritten. What
        the model holds on to by then, in whatever form, is copied; nothing else is.

        Args:
            weights: a mapping, or an iterable of ``(name, tensor)`` pairs. A mapping, a sequence
                or another collection is checked whole, before anything is written, and its memory
                may change when ``load`` returns. The memory of what an iterator yields may change
                as soon as the next tensor is asked for. A :class:`Checkpoint` is read as it is
                loaded, straight to where tensors belong where that is known: its names, shapes
                and types are checked before anything is written, its values as they come. What
                lies in the model's own memory, such as layers in another order, is copied first
                out of a mapping, and refused from an iterator.
            transport: the buffers that are going to be reused, a tensor or several; tensors with
                memory elsewhere are taken for the model's own. By default all memory is.
                ``[]`` says that none is: everything is handed over for good.
            single_stream: wait for the device where otherwise an event would do, before each
                tensor is handed over and before the next is asked for. For iterators that answer
                another process in between, which knows nothing of this one's streams.
            progress: called about ten times a second with a :class:`LoadProgress`, and at the end
                of the call. What it raises becomes a warning, and the load goes on.

        Raises:
            InvalidTransitionError: the session is not prepared, or has ended.
            CheckpointError: a tensor does not fit; see its subclasses.
            ProcessingError: a hook of a layer that became complete raised.
            UnsupportedError: the model keeps a tensor in a form that cannot be copied for it, such
                as a numpy array; or an iterator yields the model's own memory.
            UsageError: ``transport`` is no tensor with memory and no list of such tensors. The
                session is as it was then.

        What the source raises reaches the caller as it is. After any other exception of a call
        that is allowed the session has ended; ``state`` says whether the model is intact.
        """
        with self._gate.call("load", Event.LOAD):
            buffers = buffers_of(transport)
            self._gate.move(Event.LOAD)
            self._lane.single_stream = single_stream
            with self._failing("load"):
                self._delivery().take(weights, buffers, progress)

    def load_through(
        self,
        run: Callable[[], Any],
        *,
        exact: bool = False,
        transport: Transport = None,
        single_stream: bool = False,
    ) -> None:
        """Let a loader that calls ``model.load_weights`` itself do the load.

        For loaders that own their source, such as a framework's own at the initial load, or the
        receiver of a transport. Writes that it makes without ``load_weights`` are seen as well.

        Args:
            run: does the load.
            exact: check names as :meth:`load` does, and take what it gives for lent. By default a
                name may come again and the last one counts, as in a framework's own first load,
                and its tensors are handed over for good.
            transport: as for :meth:`load`, for each call of ``load_weights``.
            single_stream: as for :meth:`load`.
        """
        with self._gate.call("load_through", Event.LOAD):
            buffers = buffers_of(transport) if exact else []
            self._gate.move(Event.LOAD)
            self._intake.lenient = not exact
            self._lane.single_stream = single_stream
            self._transport = exact
            with self._failing("load"):
                self._delivery().through(run, buffers)

    def replay(self, plan: Plan, fetch: Fetch | Mapping[str, torch.Tensor]) -> None:
        """Do a load by the writes that :func:`weightload.bake` recorded.

        Only the parts of sources that the plan names are asked for. They are copied without any
        loader; names that the plan calls computed go through the model's loaders as a whole.

        Args:
            plan: made on this model.
            fetch: called as ``fetch(name, view)`` for each part, returns a tensor of the view's
                shape and type, which may be overwritten at the next call; or a mapping of whole
                tensors.

        Raises:
            CheckpointError: as for :meth:`load`.
            UsageError: the plan was made on a model of another form or by another rank, or leaves
                its tensors.
        """
        with self._gate.call("replay", Event.LOAD):
            self._gate.move(Event.LOAD)
            with self._failing("load"):
                self._delivery().replay(plan, fetch)

    def dry_run(self, look: Callable[[Board], Any]) -> Any:
        """Let ``look`` work on the prepared model, in the state that loaders run in; see bake."""
        with self._gate.call("dry_run", None), self._failing("check"):
            board, _ = self._opened()
            with ownership.entered(self), board.framework.ambient(self.model):
                return look(board)

    def check(self, weights: Mapping[str, Any], *, complete: bool) -> None:
        """Check a whole set of names and shapes before any of it is written.

        The data of a tensor is looked at only if the load that made the model did not have its
        name: then the model's loaders are asked to take it, without any write.

        Args:
            weights: for every name that is going to be loaded the tensor, or its shape, or a pair
                of its shape and its dtype. A mapping of those may have a method ``tensor(name)``
                that gets the tensor.
            complete: whether nothing else will be loaded in this session.

        Raises:
            CheckpointError: something does not fit, or is missing.
        """
        with self._gate.call("check", None), self._failing("check"):
            self._delivery().check(weights, complete=complete)

    def seal(self) -> dict[str, Any]:
        """Check that everything has come, and process it; ``finish`` is what commits.

        With ``commit="atomic"`` nothing live has been written then, and nothing of the commit can
        be refused any more: the moment at which several ranks agree to commit, or abort. With
        ``commit="stream"`` most has been committed already. ``finish`` does this itself if it was
        not called.

        Returns:
            What ranks compare before they go on: ``names``, how many came, and ``digest`` of what
            came, with ``verify`` and without :meth:`replay`.

        Raises:
            InvalidTransitionError: the session is not prepared, or has ended.
            IncompleteLoadError: something never arrived; all names are in the message.
            ModelError: a hook raised, or a live tensor could not keep its storage.
        """
        with self._gate.call("seal", Event.SEAL):
            self._gate.move(Event.SEAL)
            with self._failing("seal"):
                self._seal()
            verification = self._intake.verification
            return {
                "names": len(self._intake.seen),
                "digest": None if verification is None else verification.digest,
            }

    def finish(self) -> Receipt:
        """Process and commit what is left, verify the model, and publish it.

        Returns:
            What was done. The model is then exactly what a fresh load would have given.

        Raises:
            InvalidTransitionError: the session is not prepared, or has ended.
            IncompleteLoadError: something never arrived; all names are in the message.
            ModelError: a hook raised, or a live tensor could not keep its storage, or does not
                hold what was sent.

        What a publish callback raises reaches the caller as it is.
        """
        with self._gate.call("finish", Event.FINISH):
            self._gate.move(Event.FINISH)
            with self._failing("finish"):
                self._seal()
                self._finish()
            with self._failing("publish"):
                self._announce()
            self._gate.move(Event.DONE)
            self._close()
            return self._make_receipt(None)

    def abort(self, cause: str = "aborted by the caller", *, terminal: bool = False) -> Receipt:
        """End the session without finishing it. This is not a rollback.

        The structure is restored: live tensors are back in their places and the model can be
        loaded again. If no live byte was written, the model computes what it did before;
        otherwise it is poisoned until a session with full scope finishes.

        Args:
            cause: why, for the receipt.
            terminal: poison the model for good, because of a fault that nothing but a new process
                cures, such as a broken device context.
        """
        if terminal and self.state.open:
            self._progress.mark_dirty()
        event = Event.ABORT_DIRTY if self._progress.dirty else Event.ABORT_CLEAN
        with self._gate.call("abort", event):
            self._end(cause, terminal=terminal)
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
        self._block = ownership.entered(self)
        self._block.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        block, self._block = self._block, None
        inner = ownership.current_session()
        misnested = None
        if inner is not None and inner is not self:
            misnested = (
                f"Session {self.id} was closed while session {inner.id}, opened inside it, is "
                f"open. Close the inner one first."
            )
        try:
            if block is not None:
                block.__exit__(None, None, None)
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

    @property
    def _marks(self) -> Sequence[ownership.Mark] | None:
        """What ownership knows about the modules, if it is at hand."""
        return None if self._body is None else self._body.skeleton.marks

    @property
    def _board(self) -> Board | None:
        return None if self._ways is None else self._ways.board

    @property
    def _roots(self) -> list[nn.Module]:
        return [self.model, *(draft.model for draft in self._drafts)]

    def _find_modules(self) -> dict[str, nn.Module]:
        """Return every module by name, and make a family of several models."""
        record = record_of(self.model)
        known = record.framework if record is not None else None
        if self._framework is None:
            self._framework = known if known is not None else Framework()
        if not self._drafts:
            plan = record.plan if record is not None and self._plans else None
            if plan is not None and self._framework is known:
                self._recorded, self._body = plan, plan.body(self.model)
            if self._body is not None:
                return self._body.modules
            return dict(self.model.named_modules())
        self._family = Family(self.model, self._framework, self._drafts)
        return self._family.modules()

    def _open(self) -> None:
        framework = self._family or self._framework
        if framework is None:
            raise InvalidTransitionError(UNPREPARED)
        framework.adopt(self.model)
        record = record_of(self.model)
        self._kind = "initial" if record is None or record.framework is None else "reload"
        manifest: Mapping[str, Any] | None = record.manifest if record is not None else None
        if self._family is not None:
            manifest = self._family.manifest(manifest)
        if self._kind == "reload" and manifest is None:
            # Nobody knows which values no checkpoint brings. Nothing live is written before it
            # is sure that everything came.
            self._commit = "atomic"
        self._intake = Intake(
            manifest=manifest,
            scope=self.scope,
            wanted=self._wanted(manifest),
            check_finite=self._check_finite,
        )
        if self._verify is not None:
            salt = str(self.version)
            self._intake.verification = Verification(mode=self._verify, salt=salt)
        ways = self._ways = Ways(
            model=self.model,
            modules=self._modules,
            framework=framework,
            family=self._family,
            intake=self._intake,
            progress=self._progress,
            scope=self.scope,
            initial=self._kind == "initial",
            commit=self._commit,
            strict=self._strict,
            staging_budget=self._staging_budget,
            plans=self._plans,
            recorded=self._recorded,
            body=self._body,
        )
        if self._kind == "reload":
            self._guarded = self._body is not None and self._body.guard(self)
            if not self._guarded:
                ownership.guard_open(self, self._modules.values())
        ways.open()

    def _wanted(self, manifest: Mapping[str, Any] | None) -> frozenset[str] | None:
        """Return the names that a partial load brings.

        Raises:
            UnsupportedError: nobody knows what the names mean, before a first complete load.
        """
        if self.scope.is_full:
            return None
        if manifest is None:
            raise UnsupportedError(
                "A load of some names only needs to know which names fill what; load everything "
                "through a session once before."
            )
        return self.scope.resolve(manifest)

    def _prepared(self) -> Ways:
        if self._ways is None:
            raise InvalidTransitionError(UNPREPARED)
        return self._ways

    def _opened(self) -> tuple[Board, Processing]:
        """Return the board of the whole model, with what processes it."""
        return self._prepared().opened(self._working)

    def _delivery(self) -> Delivery:
        return Delivery(ways=self._prepared(), lane=self._lane, working=self._working)

    @contextmanager
    def _working(self, *, calls: bool = True) -> Iterator[None]:
        """Be in the state, and on the stream, that this session works in.

        Args:
            calls: whether code of the model or of a source may be called.
        """
        framework = self._family or self._framework or Framework()
        ambient = framework.ambient(self.model) if calls else torch.no_grad()
        with ownership.entered(self), ambient, self._lane.entered():
            yield

    # ------------------------------------------------------------------ processing

    def _process_early(self, call: str, module: nn.Module, role: Role) -> bool:
        with self._gate.call(call, None, inside=True), self._failing("process"):
            _, processing = self._opened()
            if self.state is SessionState.PREPARED:
                self._gate.move(Event.LOAD)
            with self._working():
                return processing.early(module, role)

    def _seal(self) -> None:
        """Check that everything came, run the hooks that are left, plan the commits."""
        if self._sealed:
            return
        ways = self._prepared()
        quick = ways.short
        if quick is not None and self._seal_quickly(ways, quick):
            self._sealed = True
            return
        board, processing = self._opened()
        missing = board.completeness.missing()
        lost = board.leave_out(missing)
        self._kept = len(lost) < len(missing) and self._kind == "reload"
        advice = ""
        if self._kept and ownership.poison_of(self.model) is not None:
            lost, advice = missing, "The model is poisoned, so that nothing may stay away."
        if lost:
            ways.forget()
            raise board.completeness.incomplete(lost, advice)
        absent = self._intake.absent()
        if absent:
            raise board.completeness.never_came(absent, len(self._intake.seen))
        board.completeness.check_overlaps()
        board.completeness.check_unclaimed()
        with self._working():
            if self._kind == "initial":
                board.framework.before_processing(self.model)
                board.learning.start_learning()
            processing.rest()
            processing.plan_all()
        self._sealed = True

    def _seal_quickly(self, ways: Ways, quick: Quick) -> bool:
        """Run the hooks that are left, if everything came; return whether it did."""
        if not quick.complete or (ways.board and ways.board.completeness.missing()):
            return False
        if ways.processing is not None:
            with self._working():
                ways.processing.rest()
                ways.processing.plan_all()
        return True

    def _finish(self) -> None:
        """Commit what is left, compare, and remember what this load taught."""
        ways = self._prepared()
        quick = ways.short
        if quick is not None:
            self._finish_quickly(ways, quick)
            return
        board, processing = self._opened()
        with self._working():
            processing.commit_all()
            board.framework.after_processing(self.model)
        with self._progress.timed("verify"):
            board.verify()
            board.compare()
        ways.remember(board, self._framework, kept=self._kept)

    def _finish_quickly(self, ways: Ways, quick: Quick) -> None:
        """Check that everything is where it was; nothing else can have changed."""
        with self._working():
            if ways.processing is not None:
                ways.processing.commit_all()
            if self._framework is not None:
                self._framework.after_processing(self.model)
        with self._progress.timed("verify"), collector.paused():
            changes = quick.body.changes()
            if changes:
                raise StorageChangedError.during_load(changes)
            quick.compare()
            if ways.board is not None:
                ways.board.compare()

    def _announce(self) -> None:
        """Record the version and tell it to everybody, whatever one of them raises."""
        before = ownership.weights_version(self.model) if self._publish else None
        cured = self.scope.is_full and not self._kept
        for root in self._roots:
            marks = self._marks if root is self.model else None
            ownership.record_version(root, self.version, cured=cured, marks=marks)
        failed: list[BaseException] = []
        if self._publish:
            ownership.let_compute(self._modules.values(), self._marks)
        for callback in self._publish:
            try:
                callback(before, self.version)
            except BaseException as error:
                failed.append(error)
        if failed:
            # What was computed with the old weights may be served with the new ones.
            self._progress.mark_dirty()
            for other in failed[1:]:
                failed[0].add_note(f"weightload: {type(other).__name__} too: {other}")
            raise failed[0]

    # ------------------------------------------------------------------ ending

    @contextmanager
    def _failing(self, step: str) -> Iterator[None]:
        """End the session if the block raises, and say whether the model is intact."""
        self._progress.step, self._progress.module = step, None
        try:
            with self._progress.called(step):
                yield
        except BaseException as error:
            raised: BaseException = error
            source = self._intake.source_error
            if (
                step in ("load", "check")
                and isinstance(error, Exception)
                and not isinstance(error, WeightLoadError)
                and error is not source
                and not self._outside(error)
            ):
                raised = preflight.refused(error, self._intake)
            self._end(f"{type(raised).__name__}: {raised}", raised, terminal=self._terminal(error))
            self._annotate(raised)
            if raised is not error:
                raise raised from error
            raise

    def _outside(self, error: BaseException) -> bool:
        """Whether no loader of the model raised ``error``, but a device or a transport."""
        transport = self._transport and self._intake.current is None
        return transport or self._terminal(error)

    def _terminal(self, error: BaseException) -> bool:
        """Whether nothing but a new process cures ``error``."""
        return self._framework is not None and self._framework.is_terminal(error)

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

    def _end(
        self, cause: str, error: BaseException | None = None, *, terminal: bool = False
    ) -> None:
        """Poison if need be, then clean up; what goes wrong there is attached to the error."""
        if terminal:
            self._progress.mark_dirty()
        if self._progress.dirty:
            poison = ownership.Poison(
                session=self.id,
                version=self.version,
                step=self._progress.step,
                module=self._progress.module,
                cause=cause,
                terminal=terminal,
            )
            for root in self._roots:
                ownership.record_poison(root, poison)
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
                dirty = self._progress.dirty
                self._gate.move(Event.ABORT_DIRTY if dirty else Event.ABORT_CLEAN)
            self._close()
            self._make_receipt(cause, error)

    def _close(self) -> None:
        if vars(self.model).get(ownership.HOLDER) is self:
            del vars(self.model)[ownership.HOLDER]
        if self._ways is not None:
            self._ways.end()  # a caller may keep the session
        if self._guarded and self._body is not None:
            self._body.let_compute()
        ownership.release(self, self._modules.values(), self._marks, guarded=not self._guarded)
        if self._board is not None:
            self._board.close()
        if self._recorded is not None:
            pool = self._recorded.pool
            pool.trim(1 if self.state is SessionState.FINISHED else 0)
            pool.crowded = self._board is not None and self._board.crowded

    def _make_receipt(self, cause: str | None, error: BaseException | None = None) -> Receipt:
        if self.receipt is None:
            self.receipt = make_receipt(
                session=self.id,
                kind=self._kind,
                state=self.state,
                version=self.version,
                commit=self._commit,
                scope=self.scope,
                intake=self._intake,
                board=self._board,
                quick=None if self._ways is None else self._ways.quick,
                progress=self._progress,
                cause=cause,
                error=error,
            )
            self._modules, self._recorded, self._body = {}, None, None
            if self._ways is not None:
                self._ways.let_go()
        return self.receipt
