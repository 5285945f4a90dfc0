"""``reload`` for engines: the same steps in process and across worker processes."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import isawaitable
from typing import Any

from weightload.errors import UsageError
from weightload.receipt import Receipt
from weightload.scope import Scope
from weightload.sending import Weights
from weightload.vllm import caches
from weightload.vllm.job import Job, Progress, Publish, Version, Veto
from weightload.vllm.liveness import Liveness
from weightload.vllm.steps import Turn

__all__ = ["areload", "reload"]


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
    job = Job.of(
        llm, engine, weights, version, commit, scope, check_finite, strict, verify,
        staging_budget, plans, reset_caches, publish, veto, draft, progress,
    )  # fmt: skip
    alive = Liveness(engine.engine_core)
    turn = Turn()
    while True:
        try:
            call = turn.advance(job.steps)
        except StopIteration as done:
            receipts: list[Receipt] = done.value
            return receipts
        try:
            turn = Turn(value=alive.call(call))
        except BaseException as error:
            turn = Turn(error=error)


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
    job = Job.of(
        engine, engine, weights, version, commit, scope, check_finite, strict, verify,
        staging_budget, plans, reset_caches, publish, veto, draft, progress,
    )  # fmt: skip
    if not paused:
        clear = "prefix" in job.caches
        await alive.wait(engine.pause_generation(mode=pause, clear_cache=clear))
    try:
        turn = Turn()
        while True:
            try:
                call = turn.advance(job.steps)
            except StopIteration as done:
                receipts: list[Receipt] = done.value
                break
            try:
                found = call()
                turn = Turn(value=await alive.wait(found) if isawaitable(found) else found)
            except BaseException as error:
                turn = Turn(error=error)
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
