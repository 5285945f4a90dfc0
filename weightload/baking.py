"""``bake``: records what a load writes, without any data, and leaves the model as it was."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.board import Board
from weightload.errors import StorageChangedError, UsageError, WeightLoadError
from weightload.framework import Framework
from weightload.intake import Intake
from weightload.plan import Form, Plan
from weightload.preflight import refused
from weightload.record import ObjectState, record_of, remove_record, slots_of
from weightload.recording import scope_of
from weightload.scribe import form_of, type_name
from weightload.session import WeightLoadSession
from weightload.states import SessionState
from weightload.storage import Fingerprint, storage_key
from weightload.tracing import Recorder

__all__ = ["bake"]

Sources = dict[str, tuple[tuple[int, ...], torch.dtype]]


def bake(
    model: nn.Module,
    metadata: Mapping[str, Any] | Iterable[Any],
    *,
    framework: Framework | None = None,
) -> Plan:
    """Record the writes of a complete load, as a plan that sessions can replay.

    The model's own loaders run on source tensors that have no data, and nothing is written. At the
    end every module has the attributes, and every tensor the storage and the attributes, that it
    had before. The model must not be used meanwhile.

    Args:
        model: the root module, loaded or not.
        metadata: what the load is going to bring, in its order: a mapping of names to pairs of a
            shape and a type, or to tensors; the items of such a mapping; or objects with ``name``,
            ``shape`` and ``dtype``, such as vLLM's ``ParamMeta``. A type may be given by its name.
        framework: as for :class:`WeightLoadSession`.

    Returns:
        The plan.

    Raises:
        UsageError: the metadata cannot be read.
        CheckpointError: the model's loaders refuse a name or a shape.
        ModelBusyError: a session is open on the model.
        UnsupportedError: as for :meth:`WeightLoadSession.prepare`; or a loader cannot do without
            values.
    """
    sources = _sources(metadata)
    session = WeightLoadSession(model, framework=framework, plans=False)
    before = _Before.of(model)
    try:
        session.prepare()
        plan: Plan = session.dry_run(lambda board: _Bake(board, model).plan(sources))
        session.abort("a dry run")
    finally:
        if session.state is not SessionState.NEW:  # otherwise somebody else has the model
            before.restore()
    return plan


def _sources(metadata: Mapping[str, Any] | Iterable[Any]) -> Sources:
    if not isinstance(metadata, Iterable):
        raise UsageError(
            f"A load is planned for a mapping of names, or an iterable of what has names, found "
            f"{type(metadata).__name__}."
        )
    found: Sources = {}
    items = metadata.items() if isinstance(metadata, Mapping) else map(_named, metadata)
    for name, value in items:
        if isinstance(value, tuple | list) and len(value) == 2:
            shape, dtype = value
        else:
            shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise UsageError(
                f"{_short(name)} cannot be planned for: a name is text, and comes with a shape and "
                f"a type of torch; found {type(value).__name__}."
            )
        if name in found:
            raise UsageError(f"{name!r} cannot be planned for twice.")
        found[name] = _shape(name, shape), dtype
    return found


def _named(one: Any) -> tuple[Any, Any]:
    """Return the name of one item of a list, and what has its shape and type."""
    if isinstance(one, tuple | list) and len(one) == 2:
        return one[0], one[1]
    return getattr(one, "name", None), one


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if min(sizes, default=0) < 0:
        raise UsageError(f"{name!r} cannot be planned for: {_short(shape)} is no shape.")
    return sizes


def _short(value: Any) -> str:
    return (
        reprlib.repr(value)
        if isinstance(value, str | int | float | tuple | list)
        else (f"a {type(value).__name__}")
    )


@attrs.define(kw_only=True, eq=False, repr=False)
class _Before:
    """What a model was, down to the attributes of its tensors."""

    states: list[ObjectState]
    tensors: list[tuple[str, torch.Tensor, dict[str, Any], torch.Tensor, Fingerprint]]
    unknown: list[nn.Module]

    @classmethod
    def of(cls, model: nn.Module) -> _Before:
        """Look at ``model``."""
        tensors = {
            id(tensor): (f"{prefix}.{name}", tensor)
            for prefix, module in model.named_modules()
            for _, name, tensor in slots_of(module)
        }
        return cls(
            states=[ObjectState.of(module) for module in model.modules()],
            tensors=[
                (name, tensor, dict(vars(tensor)), tensor.detach(), Fingerprint.of(tensor))
                for name, tensor in tensors.values()
            ],
            unknown=[module for module in model.modules() if record_of(module) is None],
        )

    def restore(self) -> None:
        """Put everything back.

        Raises:
            StorageChangedError: a tensor of the model is no longer where it was.
        """
        for state in self.states:
            state.restore()
        for module in self.unknown:
            remove_record(module)
        for name, tensor, attributes, data, mark in self.tensors:
            mine = vars(tensor)
            mine.clear()
            mine.update(attributes)
            if storage_key(tensor) != storage_key(data):
                tensor.data = data
            problem = mark.difference(tensor)
            if problem is not None:
                raise StorageChangedError(f"A dry run changed {name!r}: {problem}.")


class _Bake:
    """One dry run on an open board."""

    def __init__(self, board: Board, model: nn.Module) -> None:
        self._board = board
        self._model = model
        self._owners = _owners(board, model)
        self._states = [ObjectState.of(owner) for owner in self._owners]

    def plan(self, sources: Sources) -> Plan:
        """Run the loaders and make the plan."""
        recorder = self._run(sources)
        computed = recorder.computed()
        if computed and not self._alone(sources, computed, recorder):
            computed = set(recorder.taken) | computed
        writes: dict[str, list[Any]] = {}
        for name, write in recorder.writes(computed):
            writes.setdefault(name, []).append(write)
        forms = {name: form_of(e.tensor) for e in self._board.entries for name in e.names[:1]}
        used = {write.place: None for each in writes.values() for write in each}
        return Plan(
            sources={
                name: Form.contiguous(shape, type_name(dtype))
                for name, (shape, dtype) in sources.items()
            },
            writes={name: tuple(each) for name, each in writes.items()},
            computed=tuple(name for name in sources if name in computed),
            skipped=tuple(n for n in sources if n not in computed and n not in writes),
            places={name: forms[name] for name in used},
            owner=self._board.framework.owner,
        )

    def _alone(self, sources: Sources, computed: set[str], first: Recorder) -> bool:
        """Whether the loaders do the same with these names if the others do not come."""
        try:
            again = self._run({name: sources[name] for name in sources if name in computed})
        except WeightLoadError:
            return False
        known = {name: places for name, places in first.taken.items() if name in computed}
        return again.taken == known and again.computed() <= computed

    def _run(self, sources: Sources) -> Recorder:
        board = self._board
        live = [pair for unit in board.units for pair in unit.live_tensors()]
        recorder = Recorder(board.entries, live, board.framework.device)
        trial = Intake(manifest=board.manifest)
        try:
            with recorder.observer, recorder.sources:
                board.framework.load(self._model, _feed(sources, recorder, trial))
        except WeightLoadError:
            raise
        except Exception as error:
            raise refused(error, trial) from error
        finally:
            recorder.let_go()
            self._put_back(recorder)
        return recorder

    def _put_back(self, recorder: Recorder) -> None:
        """Undo what loaders did to objects, and note that they do such things."""
        for state in self._states:
            if state.differences(ObjectState.of(state.owner)) is not None:
                state.restore()
                for entry in self._board.entries:
                    if any(module is state.owner for module, _, _ in entry.slots):
                        recorder.look(entry.names)


def _owners(board: Board, model: nn.Module) -> list[Any]:
    owners = {id(one): one for one in scope_of(model, board.framework.registry)}
    return list(owners.values())


def _feed(
    sources: Sources, recorder: Recorder, trial: Intake
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (shape, dtype) in sources.items():
        trial.announce(name, shape, dtype)
        recorder.sources.current = name
        yield name, recorder.sources.make(name, shape, dtype)
        recorder.let_go()
    recorder.sources.current = None  # a model that collected its sources goes on
