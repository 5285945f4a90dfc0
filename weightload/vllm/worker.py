"""What runs in a worker: a session on its model, through methods that can be called by RPC.

Every method returns plain data, one *outcome* per rank, and raises nothing: an executor that gets
an exception from one rank stops to listen to the others. :func:`gather` turns the outcomes of all
ranks into their values, or raises what went wrong.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weightload.arena import Arena
from weightload.baking import bake
from weightload.errors import ModelBusyError, UnsupportedError, UsageError
from weightload.family import Draft
from weightload.files import checkpoint_folder
from weightload.lifecycle import abort_reload, finish_reload, start_reload
from weightload.outcomes import Outcome, gather, outcome_of
from weightload.ownership import (
    Poison,
    open_session,
    poison_of,
    record_poison,
    weights_version,
)
from weightload.reading import Checkpoint
from weightload.record import record_of
from weightload.reporting import ProgressBar
from weightload.scope import Scope
from weightload.unpacking import BucketReader
from weightload.vllm import caches, compat
from weightload.vllm.vetoes import draft_of, vetoes_of

if TYPE_CHECKING:
    from weightload.vllm.framework import VllmFramework

__all__ = [
    "OPERATIONS",
    "WorkerExtension",
    "framework_for",
    "gather",
    "outcome_of",
    "poison_model",
    "reset_or_poison",
    "run_operation",
    "worker_extension",
]


def _start(
    worker: Any,
    version: str | int | None = None,
    commit: Any = "stream",
    opener: str | None = None,
    scope: dict[str, Any] | None = None,
    check_finite: bool = False,
    strict: bool | None = None,
    verify: Any = None,
    staging_budget: int | None = None,
    plans: bool | None = None,
    draft: str | None = None,
) -> Any:
    model = worker.get_model()
    session = start_reload(
        model,
        framework=framework_for(worker, model, worker.model_config),
        version=version,
        commit=commit,
        scope=None if scope is None else Scope.from_plain(scope),
        check_finite=check_finite,
        strict=strict,
        verify=verify,
        staging_budget=staging_budget,
        plans=plans,
        veto=vetoes_of(worker),
        drafts=[] if draft is None else [_draft(worker, draft)],
    )
    session.opener = opener
    return _status(worker)


def _draft(worker: Any, prefix: str) -> Draft:
    """Return the draft model of a worker, to be loaded with its target.

    Raises:
        UnsupportedError: the worker has none.
    """
    model = draft_of(worker)
    if model is None:
        raise UnsupportedError("The engine has no draft model; start it with a speculative_config.")
    framework = None
    if record_of(model) is None:
        from weightload.vllm.framework import VllmFramework

        config = compat.draft_config(worker)
        framework = VllmFramework(
            config, worker.speculative_config.draft_model_config, worker.device, native=True
        )
    return Draft(model=model, prefix=prefix, framework=framework)


def framework_for(worker: Any, model: nn.Module, model_config: Any) -> VllmFramework | None:
    """Return the framework for a model that vLLM loaded itself, ``None`` if it is known."""
    if record_of(model) is not None:
        return None
    from weightload.vllm.framework import VllmFramework

    return VllmFramework(worker.vllm_config, model_config, worker.device, native=True)


def _check(worker: Any, shapes: Mapping[str, Any], opener: str | None = None) -> Any:
    """Check names, shapes and types; a value is a shape, or a pair of a shape and a type's name."""
    session = _session(worker, opener)
    session.check({name: _form(value) for name, value in shapes.items()}, complete=True)
    return None


def _form(value: Any) -> Any:
    if len(value) == 2 and isinstance(value[1], str):
        return tuple(value[0]), getattr(torch, value[1])
    return tuple(value)


def _bake(worker: Any, shapes: Mapping[str, Any]) -> Any:
    """Make the plan of a load of these names; a value is a pair of a shape and a type's name."""
    model = worker.get_model()
    framework = framework_for(worker, model, worker.model_config)
    return bake(model, shapes, framework=framework).to_plain()


def _load(worker: Any, weights: Any, opener: str | None = None, progress: Any = None) -> Any:
    session = _session(worker, opener)
    if isinstance(weights, Mapping):
        session.check(weights, complete=True)
    session.load(weights, progress=progress)
    return None


def _open_buckets(
    worker: Any, where: dict[str, Any], opening: dict[str, Any], opener: str | None = None
) -> Any:
    """Get ready for what comes in shared memory; what is announced is checked before any write."""
    session = _session(worker, opener)
    arena = Arena.open(**where)
    reader = BucketReader(opening, arena.memory.numel())
    if reader.forms is not None:
        session.check(reader.forms, complete=True)
    session.inbox = arena, reader
    return None


def _load_bucket(worker: Any, record: dict[str, Any], opener: str | None = None) -> Any:
    session = _session(worker, opener)
    arena, reader = _inbox(session)
    pairs = reader.take(record, arena.memory)
    if pairs:
        session.load(pairs, transport=arena.memory)
    return None


def _close_buckets(worker: Any, record: dict[str, Any], opener: str | None = None) -> Any:
    session = _session(worker, opener)
    arena, reader = _inbox(session)
    reader.close(record)
    arena.close()
    session.inbox = None
    return None


def _inbox(session: Any) -> tuple[Arena, BucketReader]:
    if session.inbox is None:
        raise UsageError("No buckets are expected; call open_buckets first.")
    inbox: tuple[Arena, BucketReader] = session.inbox
    return inbox


def _load_files(
    worker: Any, files: Iterable[str], opener: str | None = None, progress: Any = None
) -> Any:
    """Load safetensors files, which are all of a checkpoint."""
    session = _session(worker, opener)
    checkpoint = Checkpoint(files)
    session.check(checkpoint.forms, complete=True)
    session.load(checkpoint, progress=progress or _bar(worker))
    return None


def _load_path(
    worker: Any, path: str | None = None, opener: str | None = None, progress: Any = None
) -> Any:
    session = _session(worker, opener)
    model = worker.get_model()
    loader = _loader(worker)
    model_config = worker.model_config
    if path is not None:
        folder = checkpoint_folder(path)
        model_config = copy.copy(model_config)
        model_config.model = str(folder)
        model_config.model_weights = ""
        model_config.revision = None
    checkpoint = _checkpoint(loader, model_config, model)
    if checkpoint is not None:
        session.check(checkpoint.forms, complete=True)
    if session.baseline_known and checkpoint is not None and compat.reads_plainly(loader, model):
        session.load(checkpoint, progress=progress or _bar(worker))
    elif session.baseline_known:
        weights = loader.get_all_weights(model_config, model)  # draws a bar of its own
        session.load(weights, transport=[], progress=progress)
    else:
        # Files come in the order of a fresh load, in which the last of several names counts.
        weights = loader.get_all_weights(model_config, model)
        session.load_through(lambda: model.load_weights(weights))
    return None


def _seal(worker: Any, opener: str | None = None) -> Any:
    return _session(worker, opener).seal()


def _finish(worker: Any, reset: Iterable[str] = caches.ALL, opener: str | None = None) -> Any:
    """Finish; asked again by the same opener, who may not have had the answer, give it again."""
    last, receipt = getattr(worker, "_weightload_finished", (None, None))
    if opener is not None and opener == last:
        return receipt
    _session(worker, opener)
    receipt = {**finish_reload(worker.get_model()).to_plain(), "rank": worker.rank}
    reset_or_poison(worker, reset)
    worker._weightload_finished = opener, receipt
    return receipt


def reset_or_poison(worker: Any, names: Iterable[str]) -> None:
    """Reset a worker's sides of caches after a load; poison if one cannot be reset.

    What it holds was computed with the old weights, and would be served with the new ones.
    """
    try:
        caches.reset_in_worker(worker, names)
    except Exception as error:
        _poison(worker, f"a cache could not be reset ({type(error).__name__}: {error})")
        raise


def _abort(worker: Any, cause: str = "aborted by the caller", opener: str | None = None) -> Any:
    """Abort the open session, or only if it was opened for ``opener``."""
    model = worker.get_model()
    session = open_session(model)
    if session is None or opener not in (None, session.opener):
        return None
    return {**abort_reload(model, cause).to_plain(), "rank": worker.rank}


def _poison(worker: Any, cause: str) -> Any:
    """Mark a model that is whole itself, and does not go with those of the other ranks."""
    poison_model(worker.get_model(), cause)
    return None


def poison_model(model: nn.Module, cause: str) -> None:
    """Mark a model that does not go with those of other ranks, unless it is marked already."""
    if poison_of(model) is None:
        poison = Poison(session=0, version=None, step="agree", module=None, cause=cause)
        record_poison(model, poison)


def _status(worker: Any) -> Any:
    model = worker.get_model()
    session = open_session(model)
    poison = poison_of(model)
    return {
        "rank": worker.rank,
        "session": None if session is None else session.id,
        "opener": None if session is None else session.opener,
        "state": None if session is None else session.state.value,
        "version": weights_version(model),
        "poison": None if poison is None else poison.cause,
    }


OPERATIONS: dict[str, Callable[..., Any]] = {
    "start": _start,
    "bake": _bake,
    "check": _check,
    "load": _load,
    "open_buckets": _open_buckets,
    "load_bucket": _load_bucket,
    "close_buckets": _close_buckets,
    "load_files": _load_files,
    "load_path": _load_path,
    "seal": _seal,
    "finish": _finish,
    "abort": _abort,
    "poison": _poison,
    "status": _status,
}
"""What a worker can be asked to do; each is called as ``operation(worker, **arguments)``."""


def run_operation(worker: Any, operation: str, local: bool = False, **arguments: Any) -> Outcome:
    """Run one operation in a worker and return its outcome.

    Args:
        worker: vLLM's worker.
        operation: a key of :data:`OPERATIONS`.
        local: whether the caller is in this process, so that exceptions can travel as they are.
        arguments: for the operation.
    """
    outcome = outcome_of(worker.rank, lambda: OPERATIONS[operation](worker, **arguments))
    if not local:
        outcome.pop("exception", None)
    return outcome


def worker_extension(prefix: str) -> type:
    """Make a class for vLLM's ``worker_extension_cls`` whose methods start with ``prefix_``.

    Methods: ``start(version=None, commit="stream", ...)`` with the options of a session,
    ``check(shapes)``, ``load(weights)``, ``load_path(path=None)``,
    ``load_files(files)``, ``open_buckets(where, opening)``,
    ``load_bucket(record)`` and ``close_buckets(record)`` for what :mod:`weightload.wire` packs into
    a :class:`weightload.arena.Arena`,
    ``seal()`` (when all ranks have sealed, all may finish), ``finish(reset=...)``,
    ``abort(cause=...)``, ``poison(cause)`` (some ranks finished and others could not) and
    ``status()``. Each returns an outcome; see :func:`gather`. To choose a prefix, give the class
    a name in a module of your own: ``MyExtension = worker_extension("my")``.
    """

    def method(operation: str) -> Callable[..., Outcome]:
        @functools.wraps(OPERATIONS[operation])
        def call(self: Any, *args: Any, **kwargs: Any) -> Outcome:
            return run_operation(self, operation, **_named(operation, args), **kwargs)

        return call

    methods = {f"{prefix}_{operation}": method(operation) for operation in OPERATIONS}
    return type("WorkerExtension", (), {"__doc__": worker_extension.__doc__, **methods})


def _named(operation: str, args: tuple[Any, ...]) -> dict[str, Any]:
    code = OPERATIONS[operation].__code__
    names = code.co_varnames[1 : code.co_argcount]
    return dict(zip(names, args, strict=False))


WorkerExtension = worker_extension("weightload")


def _session(worker: Any, opener: str | None = None) -> Any:
    session = open_session(worker.get_model())
    if session is None:
        raise UsageError("No session is open on this rank; call start first.")
    if opener not in (None, session.opener):
        raise ModelBusyError(
            f"Session {session.id} on this rank was opened for somebody else, after the one of "
            f"this caller had ended.",
            owner=session.id,
        )
    return session


def _loader(worker: Any) -> Any:
    from vllm.model_executor.model_loader import get_model_loader

    config = worker.vllm_config.load_config
    loader = get_model_loader(config)
    inner = getattr(loader, "inner", loader)
    if hasattr(inner, "get_all_weights"):
        return inner
    # An engine that started on dummy weights still reads real checkpoints.
    config = copy.copy(config)
    config.load_format = "auto"
    config.model_loader_extra_config = {}
    return get_model_loader(config)


def _bar(worker: Any) -> ProgressBar | None:
    """Return a bar where vLLM would draw one while it reads files, and where it can be seen."""
    asked = getattr(worker.vllm_config.load_config, "use_tqdm_on_load", False)
    return ProgressBar("Reloading weights") if asked and worker.rank == 0 else None


def _checkpoint(loader: Any, model_config: Any, model: nn.Module) -> Checkpoint | None:
    """Return the files that will be read, ``None`` if they cannot be foretold."""
    files = compat.safetensors_files(loader, model_config, model)
    return None if files is None else Checkpoint(files)
