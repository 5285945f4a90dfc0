"""``reload`` for engines: the same steps in process and across worker processes."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from inspect import isawaitable, iscoroutinefunction
from typing import Any

import attrs

from weightload.errors import (
    EngineLostError,
    ModelBusyError,
    ModelPoisonedError,
    UnsupportedError,
    UsageError,
    VerificationError,
    WeightLoadError,
)
from weightload.outcomes import gather
from weightload.receipt import Receipt
from weightload.reporting import LoadProgress
from weightload.scope import Scope
from weightload.sending import Sent, Weights, is_folder, operations
from weightload.vllm import caches, compat
from weightload.vllm.liveness import Liveness
from weightload.vllm.worker import run_operation

__all__ = ["areload", "reload"]

Version = str | int | None
Publish = Callable[[Version, Version], object]
Veto = Callable[[Any], str | None]
Progress = Callable[[LoadProgress], object]
Steps = Generator[Callable[[], Any], Any, Any]


def reload(
    llm: Any,
    weights: Weights | None = None,
    *,
    version: Version = None,
    commit: str = "stream",
    scope: Scope | None = None,
    check_finite: bool = False,
    strict: bool | None = None,
    verify: str | None = None,
    staging_budget: int | None = None,
    plans: bool | None = None,
    reset_caches: Iterable[str] | bool = caches.ALL,
    publish: Iterable[Publish] = (),
    veto: Iterable[Veto] = (),
    pause: str | None = "require",
    draft: str | None = None,
    progress: Progress | None = None,
) -> list[Receipt]:
    """Replace the weights of a live ``vllm.LLM``, on all ranks or on none.

    Every rank receives, stages and reports; then all commit, or all abort. After a failure that
    left a mixture the engine takes no requests, until a complete reload has finished.

    Args:
        llm: the engine.
        weights: a checkpoint folder or a :class:`weightload.Checkpoint`, which workers read; a
            mapping or an iterable of ``(name, tensor)`` with the names of the checkpoint; ``None``
            for the checkpoint that the engine was started on.
            Tensors of an iterator may share one buffer that is overwritten between items.
        version: what the weights are called, such as a step number.
        commit: ``"stream"`` or ``"atomic"``; see :class:`weightload.WeightLoadSession`, also for
            ``scope``, ``check_finite``, ``strict``, ``verify``, ``staging_budget`` and ``plans``.
        scope: what is brought, everything by default.
        check_finite: refuse NaN and infinity.
        strict: whether storage outside parameters and buffers must not move.
        verify: ``"sampled"`` or ``"full"``. Then ranks also compare what they received.
        staging_budget: bytes that a rank may stage at once, beside the model.
        plans: whether to take tensors past the model's loaders where it is known how.
        reset_caches: which of the engine's caches to reset, by the names in
            :data:`weightload.vllm.caches.ALL`: all of them by default. A cache that is left
            alone serves results of the old weights.
        publish: called with the old and the new version when all ranks have finished and the
            caches are reset. If one raises, the engine is poisoned.
        veto: called with ``llm`` before anything else: what returns a reason refuses the load.
        pause: ``"require"`` refuses while requests are unfinished; ``None`` does not ask.
        draft: load the draft model of speculative decoding too: names that begin with this are for
            it alone, as ``"draft."``; with ``""`` every tensor is offered to both models.
        progress: called with a :class:`weightload.LoadProgress` while tensors are loaded, such as
            a :class:`weightload.ProgressBar`. Where workers in other processes read a folder
            nobody calls it; the first of them draws a bar if vLLM's ``use_tqdm_on_load`` is set
            and it has a terminal.

    Returns:
        One receipt per rank.

    Raises:
        WeightLoadError: see its subclasses; ``model_intact`` says whether the engine may go on.
        UsageError: requests are running.
        EngineLostError: a process of the engine ended, before the reload or during it.
        UnsupportedError: a veto, or the workers cannot be reached the way the engine is set up.

    What an iterable raises reaches the caller as it is, after every rank has been aborted.
    """
    engine = llm.llm_engine
    if pause not in ("require", None):
        raise UsageError(f"pause is 'require' or None, found {pause!r}.")
    if pause == "require" and engine.has_unfinished_requests():
        raise UsageError(_RUNNING)
    job = _Job.of(
        llm, engine, weights, version, commit, scope, check_finite, strict, verify,
        staging_budget, plans, reset_caches, publish, veto, draft, progress,
    )  # fmt: skip
    alive = Liveness(engine.engine_core)
    turn = _Turn()
    while True:
        try:
            call = turn.advance(job.steps)
        except StopIteration as done:
            receipts: list[Receipt] = done.value
            return receipts
        try:
            turn = _Turn(value=alive.call(call))
        except BaseException as error:
            turn = _Turn(error=error)


async def areload(
    engine: Any,
    weights: Weights | None = None,
    *,
    version: Version = None,
    commit: str = "stream",
    scope: Scope | None = None,
    check_finite: bool = False,
    strict: bool | None = None,
    verify: str | None = None,
    staging_budget: int | None = None,
    plans: bool | None = None,
    reset_caches: Iterable[str] | bool = caches.ALL,
    publish: Iterable[Publish] = (),
    veto: Iterable[Veto] = (),
    pause: str | None = "wait",
    draft: str | None = None,
    progress: Progress | None = None,
) -> list[Receipt]:
    """Replace the weights of a live ``AsyncLLM``; see :func:`reload` for what is not said here.

    Args:
        engine: the engine.
        weights: as for :func:`reload`.
        version: as for :func:`reload`.
        commit: as for :func:`reload`.
        scope: as for :func:`reload`.
        check_finite: as for :func:`reload`.
        strict: as for :func:`reload`.
        verify: as for :func:`reload`.
        staging_budget: as for :func:`reload`.
        plans: as for :func:`reload`.
        reset_caches: as for :func:`reload`.
        publish: as for :func:`reload`.
        veto: as for :func:`reload`.
        pause: how to hold generation while weights change: a mode of ``pause_generation``
            (``"wait"``, ``"abort"``, ``"keep"``); ``"require"`` to refuse unless the caller has
            paused it; ``None`` not to ask. After a failure that left a mixture the engine stays
            paused, and takes no requests.
        draft: as for :func:`reload`.
        progress: as for :func:`reload`.
    """
    alive = Liveness(engine.engine_core)
    if pause not in ("wait", "abort", "keep", "require", None):
        raise UsageError(f"pause is 'wait', 'abort', 'keep', 'require' or None, found {pause!r}.")
    paused = pause is None or await alive.wait(engine.is_paused())
    if pause == "require" and not paused:
        raise UsageError(_RUNNING)
    job = _Job.of(
        engine, engine, weights, version, commit, scope, check_finite, strict, verify,
        staging_budget, plans, reset_caches, publish, veto, draft, progress,
    )  # fmt: skip
    if not paused:
        clear = "prefix" in job.caches
        await alive.wait(engine.pause_generation(mode=pause, clear_cache=clear))
    try:
        turn = _Turn()
        while True:
            try:
                call = turn.advance(job.steps)
            except StopIteration as done:
                receipts: list[Receipt] = done.value
                break
            try:
                found = call()
                turn = _Turn(value=await alive.wait(found) if isawaitable(found) else found)
            except BaseException as error:
                turn = _Turn(error=error)
    except BaseException:
        if not paused and job.reach.intact:
            await alive.wait(engine.resume_generation())
        raise
    if not paused:
        await alive.wait(engine.resume_generation())
    return receipts


_RUNNING = (
    "Requests are running, and they would go on under other weights than they began with. Wait "
    "for them, abort them, or pause the engine; pause=None goes on nevertheless."
)


@attrs.frozen(kw_only=True)
class _Turn:
    """What the last call gave, to go on with."""

    value: Any = None
    error: BaseException | None = None

    def advance(self, steps: Steps) -> Callable[[], Any]:
        """Return the next call."""
        if self.error is not None:
            return steps.throw(self.error)
        return steps.send(self.value)


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


@attrs.define(kw_only=True, eq=False, repr=False)
class _Job:
    """One reload of one engine, as steps that are made one after another.

    Attributes:
        front: an ``LLM`` or ``AsyncLLM``.
        engine: what is behind it.
        reach: how operations get to the workers.
        weights: what is sent.
        options: of the session that each worker opens.
        caches: which caches are reset.
        publish: who is told about it.
        progress: who is told how far it has come.
        steps: yields calls, is sent what they gave, returns receipts.
    """

    front: Any
    engine: Any
    reach: Reach
    weights: Weights | None
    options: dict[str, Any]
    caches: tuple[str, ...]
    publish: tuple[Publish, ...]
    progress: Progress | None
    steps: Steps = attrs.field(init=False)

    @classmethod
    def of(
        cls, front: Any, engine: Any, weights: Weights | None, version: Version, commit: str,
        scope: Scope | None, check_finite: bool, strict: bool | None, verify: str | None,
        staging_budget: int | None, plans: bool | None, reset_caches: Iterable[str] | bool, publish: Iterable[Publish], veto: Iterable[Veto],
        draft: str | None = None, progress: Progress | None = None,
    ) -> _Job:  # fmt: skip
        """Check the arguments, and ask the vetoes."""
        if not isinstance(scope, Scope | None):
            raise UsageError(f"scope is a weightload.Scope, found {type(scope).__name__}.")
        job = cls(
            front=front,
            engine=engine,
            reach=Reach.of(front, engine.vllm_config, engine.engine_core),
            weights=weights,
            options={
                "version": version,
                "commit": commit,
                "scope": None if scope is None else scope.to_plain(),
                "check_finite": check_finite,
                "strict": strict,
                "verify": verify,
                "staging_budget": staging_budget,
                "plans": plans,
                "draft": draft,
            },
            caches=caches.selected(reset_caches),
            publish=tuple(publish),
            progress=progress,
        )
        for ask in veto:
            reason = ask(front)
            if reason:
                raise UnsupportedError(f"The reload was refused before it began: {reason}")
        job.steps = job._run()
        return job

    def _run(self) -> Steps:
        reach = self.reach
        opener = uuid.uuid4().hex
        finished: list[dict[str, Any]] = []
        try:
            before = gather((yield reach.call("status")))
            gather((yield reach.call("start", opener=opener, **self.options)))
            yield from self._load()
            agreed = gather((yield reach.call("seal")))
            self._compare(agreed)
            finished = yield reach.call("finish", reset=list(self.caches))
            receipts = [Receipt.from_plain(value) for value in gather(finished)]
            yield from self._announce(before[0]["version"])
        except (GeneratorExit, EngineLostError):
            raise
        except BaseException as error:
            try:
                yield from self._give_up(error, opener, finished)
            except EngineLostError as lost:
                if isinstance(error, Exception):
                    raise lost from error
                error.add_note(f"weightload: {lost}")
            except Exception as second:
                error.add_note(
                    f"weightload: the ranks could not be told to abort; {type(second).__name__}: "
                    f"{second}"
                )
            if not reach.intact:
                Door.close(self.engine, error)
            raise error
        Door.open(self.engine)
        return receipts

    def _load(self) -> Steps:
        here = {"progress": self.progress} if self.reach.local else {}
        if self.reach.local and not is_folder(self.weights):
            gather((yield self.reach.call("load", weights=self.weights, **here)))
            return
        sent = operations(self.weights, check_finite=self.options["check_finite"])
        count = Sent(None if here else self.progress, self.weights)
        with closing(sent), closing(count):
            for operation, arguments in sent:
                more = here if operation in ("load_path", "load_files") else {}
                gather((yield self.reach.call(operation, **arguments, **more)))
                count.add(arguments.get("record"))

    def _compare(self, agreed: list[dict[str, Any]]) -> None:
        """Compare what ranks received, where all of them were sent the same."""
        if not is_folder(self.weights) and any(one != agreed[0] for one in agreed):
            raise VerificationError(
                f"Ranks received different tensors: {agreed}. Nothing is published.",
                agreed=[str(one) for one in agreed],
            )

    def _announce(self, before: Version) -> Steps:
        """Drop what was computed with the old weights, and tell everybody the new version."""
        version = self.options["version"]
        yield from dropping(self.front, self.engine, self.caches)
        for callback in self.publish:
            callback(before, version)
        if version is not None:
            yield from naming(self.engine, version)

    def _give_up(self, error: BaseException, opener: str, finished: list[Any]) -> Steps:
        """End what was begun on every rank, and find out whether all are intact."""
        reach = self.reach
        cause = f"{type(error).__name__}: {error}"
        if any("value" in one for one in finished):
            # Some ranks have the new weights and others do not, or caches hold results of the old.
            yield reach.call("poison", cause=f"the engine could not finish on all ranks: {cause}")
        ended = yield reach.call("abort", cause=cause, opener=opener)
        for outcome in ended:
            if "error" in outcome:
                error.add_note(f"weightload: abort failed: {outcome['error']['message']}")
        states = yield reach.call("status")
        poisoned = [one for one in states if "value" not in one or one["value"]["poison"]]
        reach.intact = not poisoned
        if isinstance(error, WeightLoadError):
            error.model_intact = error.model_intact and not poisoned


def dropping(front: Any, engine: Any, names: Iterable[str]) -> Steps:
    """Drop what the engine's own side has computed with the old weights.

    Args:
        front: an ``LLM`` or ``AsyncLLM``.
        engine: what is behind it.
        names: which caches, of :data:`weightload.vllm.caches.ALL`.

    Raises:
        UsageError: requests hold what is to be dropped.
    """
    for reset in caches.engine_resets(front, engine, names):
        done = yield reset
        if done is False:
            # Requests hold blocks; they are computed again under the new weights.
            again: Any = reset
            done = yield functools.partial(again, reset_running_requests=True)
        if done is False:
            raise UsageError(
                f"{reset.__name__}() could not drop what was computed with the old weights, "
                f"because requests hold it. Abort them, and reload again."
            )


def naming(engine: Any, version: str | int) -> Steps:
    """Let the engine say that it has this version, if it has a place for that."""
    if hasattr(engine, "set_weight_version"):
        yield functools.partial(engine.set_weight_version, str(version))


class Door:
    """Stands in the place of an engine's ``add_request`` while the engine must not serve.

    A request is refused where it comes in, and the engine stays as it is; a worker that refuses
    to run, the last line of defence, takes the engine down.
    """

    def __init__(self, engine: Any) -> None:
        self._own = vars(engine).get("add_request")
        self._asynchronous = iscoroutinefunction(engine.add_request)
        self._refusal: Callable[[], WeightLoadError] = _busy
        vars(engine)["add_request"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            WeightLoadError: always.
        """
        return self._refuse_later() if self._asynchronous else self._refuse()

    def _refuse(self) -> Any:
        raise self._refusal()

    async def _refuse_later(self) -> Any:
        self._refuse()

    @classmethod
    def hold(cls, engine: Any) -> None:
        """Let ``engine`` take no request while its weights are replaced."""
        if not isinstance(vars(engine).get("add_request"), cls):
            cls(engine)

    @classmethod
    def close(cls, engine: Any, error: BaseException) -> None:
        """Let ``engine`` take no request after ``error`` has left it with a mixture."""
        cause = f"{type(error).__name__}: {error}"
        cls.hold(engine)
        vars(engine)["add_request"]._refusal = lambda: ModelPoisonedError(
            f"The engine must not serve: a reload failed ({cause}) after it had written live "
            f"weights. Reload a complete set of weights first.",
            model_intact=False,
        )

    @classmethod
    def open(cls, engine: Any) -> None:
        """Let ``engine`` take requests again."""
        door = vars(engine).get("add_request")
        if not isinstance(door, cls):
            return
        if door._own is None:
            del vars(engine)["add_request"]
        else:
            vars(engine)["add_request"] = door._own


def _busy() -> WeightLoadError:
    return ModelBusyError(
        "The engine takes no requests: an update of its weights is under way, or was left "
        "without an end. Update it again."
    )
