"""``reload`` for engines: the same steps in process and across worker processes."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from weightload.bucket import BucketWriter
from weightload.errors import EngineLostError, UnsupportedError, WeightLoadError
from weightload.intake import pairs_of
from weightload.receipt import Receipt
from weightload.vllm.liveness import Liveness
from weightload.vllm.worker import gather, run_operation

__all__ = ["areload", "reload"]

Weights = str | Path | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | None
Steps = Generator[tuple[str, dict[str, Any]], list[dict[str, Any]], list[Receipt]]


def reload(
    llm: Any,
    weights: Weights = None,
    *,
    version: str | int | None = None,
    commit: str = "stream",
    reset_caches: bool = True,
) -> list[Receipt]:
    """Replace the weights of a live ``vllm.LLM``.

    Args:
        llm: the engine. No request may be running.
        weights: a checkpoint folder; a mapping or an iterable of ``(name, tensor)`` with the
            names of the checkpoint; ``None`` for the checkpoint that the engine was started on.
            Tensors of an iterator may share one buffer that is overwritten between items.
        version: what the weights are called, such as a step number.
        commit: ``"stream"`` or ``"atomic"``; see :class:`weightload.WeightLoadSession`.
        reset_caches: drop what the engine has cached from the old weights (prefixes, encoder
            outputs, multimodal inputs). Without it, cached prefixes are used under the new ones.

    Returns:
        One receipt per rank.

    Raises:
        WeightLoadError: see its subclasses; ``model_intact`` says whether the engine may go on.
        EngineLostError: a process of the engine ended, before the reload or during it.
        UnsupportedError: the workers cannot be reached the way the engine is set up.

    What an iterable raises reaches the caller as it is, after every rank has been aborted.
    """
    engine = llm.llm_engine
    core = engine.engine_core
    steps = _steps(weights, version, commit, _Reach.of(engine.vllm_config, core))
    alive = Liveness(core)
    turn = _Turn()
    while True:
        try:
            method, kwargs = turn.advance(steps)
        except StopIteration as done:
            receipts: list[Receipt] = done.value
            break
        try:
            ask = functools.partial(llm.collective_rpc, method, kwargs=kwargs)
            turn = _Turn(outcomes=alive.call(ask))
        except BaseException as error:
            turn = _Turn(error=error)
    if reset_caches:
        for reset in _cache_resets(llm, engine):
            alive.call(reset)
    if version is not None and hasattr(engine, "set_weight_version"):
        alive.call(functools.partial(engine.set_weight_version, str(version)))
    return receipts


async def areload(
    engine: Any,
    weights: Weights = None,
    *,
    version: str | int | None = None,
    commit: str = "stream",
    reset_caches: bool = True,
    pause: str | None = "wait",
) -> list[Receipt]:
    """Replace the weights of a live ``AsyncLLM``; see :func:`reload`.

    Args:
        engine: the engine.
        weights: as for :func:`reload`.
        version: as for :func:`reload`.
        commit: as for :func:`reload`.
        reset_caches: as for :func:`reload`.
        pause: how to hold generation while weights change: a mode of ``pause_generation``
            (``"wait"``, ``"abort"``, ``"keep"``), or ``None`` if the caller has paused it. After
            a failure that left a mixture the engine stays paused.
    """
    reach = _Reach.of(engine.vllm_config, engine.engine_core)
    steps = _steps(weights, version, commit, reach)
    alive = Liveness(engine.engine_core)
    mine = pause is not None and not await alive.wait(engine.is_paused())
    if mine:
        await alive.wait(engine.pause_generation(mode=pause, clear_cache=reset_caches))
    try:
        turn = _Turn()
        while True:
            try:
                method, kwargs = turn.advance(steps)
            except StopIteration as done:
                receipts: list[Receipt] = done.value
                break
            try:
                ask = engine.collective_rpc(method, kwargs=kwargs)
                turn = _Turn(outcomes=await alive.wait(ask))
            except BaseException as error:
                turn = _Turn(error=error)
        if reset_caches:
            for reset in _cache_resets(engine, engine):
                await alive.wait(reset())
    except BaseException:
        if mine and reach.intact:
            await alive.wait(engine.resume_generation())
        raise
    if mine:
        await alive.wait(engine.resume_generation())
    return receipts


@attrs.frozen(kw_only=True)
class _Turn:
    """What the last call to the workers gave, to go on with."""

    outcomes: list[dict[str, Any]] | None = None
    error: BaseException | None = None

    def advance(self, steps: Steps) -> tuple[Any, dict[str, Any]]:
        """Return the next call."""
        if self.error is not None:
            return steps.throw(self.error)
        return steps.send(self.outcomes)  # type: ignore[arg-type]


class _Reach:
    """How operations get to the workers of an engine.

    Attributes:
        local: whether the worker is in this process.
        intact: whether, after a failure, all ranks have said that their model is whole.
    """

    def __init__(self, *, local: bool, prefix: str | None) -> None:
        self.local = local
        self.intact = False
        self._prefix = prefix

    @classmethod
    def of(cls, vllm_config: Any, core: Any) -> _Reach:
        """Find out.

        Raises:
            UnsupportedError: workers in other processes take only method names, and there is no
                worker extension that has them.
        """
        parallel = vllm_config.parallel_config
        in_process = hasattr(core, "engine_core")
        if in_process and parallel.world_size == 1:
            return cls(local=True, prefix=None)
        backend = parallel.distributed_executor_backend
        if backend not in ("mp", "uni", None):
            raise UnsupportedError(
                f"reload() hands tensors over within one machine; executor {backend!r} may have "
                f"workers elsewhere. Use weightload.vllm.WorkerExtension with your transport."
            )
        name = getattr(parallel, "worker_extension_cls", "") or ""
        prefix = _prefix_of(name)
        if prefix is not None:
            return cls(local=False, prefix=prefix)
        if not in_process and os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") != "1":
            raise UnsupportedError(
                "The engine's workers are in other processes and have no weightload methods. "
                "Start the engine with worker_extension_cls='weightload.vllm.WorkerExtension'."
            )
        return cls(local=False, prefix=None)

    def call(self, operation: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Return what to pass to ``collective_rpc``."""
        if self._prefix is not None:
            return f"{self._prefix}_{operation}", arguments
        return run_operation, {"operation": operation, "local": self.local, **arguments}


def _prefix_of(qualified: str) -> str | None:
    """Return the prefix of a worker extension that has weightload's methods."""
    if not qualified:
        return None
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for name in dir(resolve_obj_by_qualname(qualified)):
        if name.endswith("_load_bucket"):
            return name.removesuffix("_load_bucket")
    return None


def _steps(weights: Weights, version: str | int | None, commit: str, reach: _Reach) -> Steps:
    """Yield the calls of one reload and take the outcomes of all ranks for each."""
    gather((yield reach.call("status")))
    # A session that another caller has open on the model is not ours to end.
    opener = uuid.uuid4().hex
    finished: list[dict[str, Any]] = []
    try:
        gather((yield reach.call("start", version=version, commit=commit, opener=opener)))
        if weights is None or isinstance(weights, str | Path):
            path = None if weights is None else str(weights)
            gather((yield reach.call("load_path", path=path)))
        elif reach.local:
            gather((yield reach.call("load", weights=weights)))
        else:
            yield from _send(weights, reach)
        finished = yield reach.call("finish")
        receipts = gather(finished)
    except (GeneratorExit, EngineLostError):
        raise
    except BaseException as error:
        try:
            yield from _give_up(error, opener, finished, reach)
        except EngineLostError as lost:
            if isinstance(error, Exception):
                raise lost from error
            error.add_note(f"weightload: {lost}")
        except Exception as second:
            error.add_note(
                f"weightload: the ranks could not be told to abort; {type(second).__name__}: "
                f"{second}"
            )
        raise error
    return [Receipt.from_plain(value) for value in receipts]


def _give_up(
    error: BaseException, opener: str, finished: list[Any], reach: _Reach
) -> Generator[Any, Any, None]:
    """End what was begun on every rank, and find out whether all are intact."""
    cause = f"{type(error).__name__}: {error}"
    if any("value" in one for one in finished):
        # Some ranks have the new weights and others do not; together they are a mixture.
        yield reach.call("poison", cause=f"another rank could not finish: {cause}")
    ended = yield reach.call("abort", cause=cause, opener=opener)
    for outcome in ended:
        if "error" in outcome:
            error.add_note(f"weightload: abort failed: {outcome['error']['message']}")
    states = yield reach.call("status")
    reach.intact = all("value" in one and not one["value"]["poison"] for one in states)
    if isinstance(error, WeightLoadError):
        poisoned = any("value" in one and one["value"]["poison"] for one in states)
        error.model_intact = error.model_intact and not poisoned


def _send(weights: Any, reach: _Reach) -> Generator[Any, Any, None]:
    if isinstance(weights, Mapping):
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        gather((yield reach.call("check", shapes=shapes)))
    writer = BucketWriter()
    try:
        for table in writer.fill(pairs_of(weights)):
            gather((yield reach.call("load_bucket", path=writer.path, table=table)))
    finally:
        writer.close()


def _cache_resets(front: Any, engine: Any) -> list[Any]:
    """Return the calls that drop what was computed with the old weights."""
    found = []
    for owner, name in (
        (front, "reset_prefix_cache"),
        (engine, "reset_mm_cache"),
        (engine, "reset_encoder_cache"),
    ):
        reset = getattr(owner, name, None)
        if callable(reset):
            found.append(reset)
    return found
