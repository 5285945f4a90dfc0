"""The lifecycle of sessions as a state machine that hypothesis drives, beside a simple model of it.

Three toy models: a target, a draft that shares one layer with it, and one that shares nothing.
The model of them is a dictionary: which checkpoint each part holds, or that it is a mixture. Run
it as it is, or with another way to open a session by overriding :meth:`SessionMachine.begin`.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weightload.errors import (
    DuplicateWeightError,
    IncompleteLoadError,
    InvalidTransitionError,
    ModelBusyError,
    ProcessingError,
    SessionMisnestedError,
    StorageChangedError,
    UnexpectedWeightError,
    UsageError,
    WeightLoadError,
    WeightMismatchError,
)
from weightload.lifecycle import abort_reload, finish_reload, start_reload
from weightload.ownership import current_session, owner_of, poison_of, weights_version
from weightload.registry import Role
from weightload.scope import Scope
from weightload.session import WeightLoadSession
from weightload.states import SessionState
from weightload.testing.layers import (
    DefaultScaleLinear,
    InPlaceLinear,
    KernelLinear,
    Linear,
    RepackedLinear,
    RoomLinear,
)
from weightload.testing.loading import FusedLinear, PaddedLinear
from weightload.testing.models import (
    Factory,
    LoadingModel,
    State,
    TiedModel,
    ToyModel,
    make_state,
)
from weightload.testing.oracle import (
    Kept,
    ToyFramework,
    expected,
    identical,
    outputs,
    require,
    toy_framework,
)
from weightload.testing.sharing import FusedExperts, HandleLinear, LatentAttention

__all__ = ["SessionMachine"]

Tensor = torch.Tensor
Session = WeightLoadSession
Pairs = list[tuple[str, Tensor]]

SHARED = "layers.0."
"""What target and draft share, by the prefix of its names in both."""


def _target() -> ToyModel:
    return TiedModel(
        RepackedLinear(),
        FusedLinear(),
        LatentAttention(),
        PaddedLinear(),
        DefaultScaleLinear(),
        FusedExperts(),
    )


def _draft() -> ToyModel:
    return LoadingModel(RepackedLinear(), KernelLinear(), Linear())


def _other() -> ToyModel:
    return LoadingModel(InPlaceLinear(), RoomLinear(), HandleLinear(), Linear())


FACTORIES: dict[str, Factory] = {"target": _target, "draft": _draft, "other": _other}
NAMES = st.sampled_from(sorted(FACTORIES))
SEEDS = st.integers(1, 3)
_HOOKS = (ProcessingError, StorageChangedError)
"""What comes of a hook that raises or makes what does not fit."""


class SourceFault(Exception):
    """What a source raises."""


@attrs.define
class Opened:
    """One open session and what the machine knows of it."""

    session: Session
    by_call: bool
    commit: str
    seed: int
    state: State
    left: list[str]
    first_call: int
    plans: bool
    sent: int = 0


def _states() -> dict[tuple[str, int], State]:
    return {
        (name, seed): make_state(factory, seed)
        for name, factory in FACTORIES.items()
        for seed in (1, 2, 3)
    }


class SessionMachine(RuleBasedStateMachine):
    """Opens, loads, breaks, finishes, aborts and drops sessions in any order.

    After every step: a model without an open session computes exactly what a fresh load of what
    it holds computes, or is poisoned; everything is where it was; only open sessions own modules.
    """

    states: ClassVar[dict[tuple[str, int], State]] = _states()
    computed: ClassVar[dict[Any, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.framework: ToyFramework = toy_framework()
        self.models = {name: factory() for name, factory in FACTORIES.items()}
        self.models["draft"].layers[0] = self.models["target"].layers[0]
        self.holds: dict[str, tuple[str, int] | None] = {}
        self.open: dict[str, Opened] = {}
        self.last: Session | None = None
        self.versions = iter(range(1, 10_000))
        for name, model in self.models.items():
            with WeightLoadSession(
                model, framework=self.framework, scope=Scope.full(allow_missing=model.may_miss)
            ) as session:
                session.load(self.states[name, 1])
            self._now_holds(name, (name, 1))
        self.kept = {name: Kept.of(model) for name, model in self.models.items()}

    # -------------------------------------------------------------------------- the simple model

    def parts(self, name: str) -> list[str]:
        """Return the parts that the model of that name consists of."""
        return [name] if name == "other" else [name, "shared"]

    def _now_holds(self, name: str, what: tuple[str, int] | None) -> None:
        for part in self.parts(name):
            self.holds[part] = what

    def usable(self, name: str) -> bool:
        """Whether no part of the model holds a mixture."""
        return all(self.holds[part] is not None for part in self.parts(name))

    def rivals(self, name: str) -> list[str]:
        """Return the models with an open session that owns a module of the model."""
        mine = set(self.parts(name))
        return [other for other in self.open if mine & set(self.parts(other))]

    def wanted(self, name: str) -> Tensor:
        """Return what a fresh model computes that holds what this one should."""
        holds = tuple(self.holds[part] for part in self.parts(name))
        key = (name, holds)
        if key not in self.computed:
            own, *shared = (self.states[part] for part in holds if part is not None)
            state = dict(own)
            for other in shared:
                state.update((n, t) for n, t in other.items() if n.startswith(SHARED))
            self.computed[key] = expected(FACTORIES[name], state)
        return self.computed[key]

    # -------------------------------------------------------------------------- opening

    def begin(self, name: str, *, by_call: bool, **options: Any) -> Session:
        """Open a session; override this to test another way to do it."""
        if by_call:
            return start_reload(self.models[name], **options)
        session = WeightLoadSession(self.models[name], **options)
        session.prepare()
        return session

    @rule(
        name=NAMES,
        seed=SEEDS,
        commit=st.sampled_from(["stream", "atomic"]),
        by_call=st.booleans(),
        shuffle=st.none() | st.integers(0, 5),
        plans=st.booleans(),
    )
    def opens(
        self, name: str, seed: int, commit: Any, by_call: bool, shuffle: int | None, plans: bool
    ) -> None:
        """Open a session, or be refused because a rival is open."""
        if self.rivals(name):
            self._is_refused(name, ModelBusyError)
            return
        version = next(self.versions)
        session = self.begin(name, by_call=by_call, commit=commit, version=version, plans=plans)
        require(session.state is SessionState.PREPARED, f"{session!r}")
        state = self.states[name, seed]
        left = list(state)
        if shuffle is not None:
            random.Random(shuffle).shuffle(left)
        calls = len(self.framework.calls)
        self.open[name] = Opened(session, by_call, commit, seed, state, left, calls, plans)

    def _is_refused(self, name: str, error: type[WeightLoadError]) -> None:
        try:
            self.begin(name, by_call=False)
        except error as found:
            require(type(found) is error, f"{found!r} is not a {error.__name__}")
            require(found.model_intact, "a refusal changes nothing")
        else:
            raise AssertionError(f"a second session on {name} was not refused")

    @precondition(lambda self: self.open)
    @rule(name=NAMES)
    def opens_in_another_thread(self, name: str) -> None:
        """Another thread is refused like this one."""
        if self.rivals(name):
            _in_thread(lambda: self._is_refused(name, ModelBusyError))

    # -------------------------------------------------------------------------- loading

    def _source(self, opened: Opened, names: list[str], kind: str) -> Any:
        pairs = [(name, opened.state[name].clone()) for name in names]
        opened.left = [name for name in opened.left if name not in names]
        opened.sent += len(names)
        if kind == "mapping":
            return dict(pairs)
        return pairs if kind == "list" else _one_buffer(pairs)

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        count=st.integers(0, 6),
        kind=st.sampled_from(["mapping", "list", "buffer"]),
    )
    def loads(self, data: st.DataObject, count: int, kind: str) -> None:
        """Load the next tensors of the checkpoint."""
        name, opened = self._choose(data)
        names = opened.left[:count]
        with self._may_fail(name, *_HOOKS):
            opened.session.load(self._source(opened, names, kind))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["mapping", "list", "buffer"]))
    def loads_the_rest(self, data: st.DataObject, kind: str) -> None:
        """Load everything that is left."""
        name, opened = self._choose(data)
        with self._may_fail(name, *_HOOKS):
            opened.session.load(self._source(opened, list(opened.left), kind))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(0, 4))
    def loads_while_others_try(self, data: st.DataObject, count: int) -> None:
        """While a source is read: no other session, no other thread, no call from inside."""
        name, opened = self._choose(data)
        session = opened.session
        names = opened.left[:count]
        pairs = self._source(opened, names, "list")
        rivals = [other for other in self.models if self._overlap(name, other)]

        def source() -> Iterator[tuple[str, Tensor]]:
            for other in rivals:
                self._is_refused(other, SessionMisnestedError)
                _in_thread(lambda: self._is_refused(rivals[0], ModelBusyError))
            for call in (session.finish, session.abort, lambda: session.load({})):
                _raises(SessionMisnestedError, call)
                _in_thread(lambda call=call: _raises(UsageError, call))  # type: ignore[misc]
            require(current_session() is session, "the source runs inside its session")
            yield from pairs

        with self._may_fail(name, *_HOOKS):
            session.load(source())

    def _overlap(self, name: str, other: str) -> bool:
        return bool(set(self.parts(name)) & set(self.parts(other)))

    # -------------------------------------------------------------------------- failing

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        count=st.integers(0, 6),
        fault=st.sampled_from(
            ["source", "interrupt", "unknown", "shape", "broadcast", "meta", "again", "no pair"]
        ),
        at_once=st.booleans(),
    )
    def loads_what_does_not_fit(
        self, data: st.DataObject, count: int, fault: str, at_once: bool
    ) -> None:
        """Some tensors that fit and then something wrong; the session ends with the right error."""
        name, opened = self._choose(data)
        names, rest = opened.left[:count], opened.left[count:]
        sent = [one for one in opened.state if one not in rest]
        before = opened.sent
        pairs = self._source(opened, names, "list")
        error = _FAULTS[fault][0]
        if fault in ("source", "interrupt"):
            source: Any = _fails_after(pairs, error())
        elif fault == "again":
            if not sent:
                return
            source = [*pairs, (sent[0], opened.state[sent[0]])]
        else:
            bad = (rest or sent)[0]
            source = [*pairs, _FAULTS[fault][1](bad, opened.state[bad])]
        if isinstance(source, list) and not at_once:
            source = iter(source)
        allowed = (error,) if rest else (error, DuplicateWeightError)
        with self._fails(name, *allowed, *_HOOKS):
            opened.session.load(source)
        ended = self._last()
        if isinstance(source, list) and before == 0:
            require(ended.state is SessionState.ABORTED, "a list is checked before it is written")

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 6), half_way=st.booleans())
    def a_loader_fails(self, data: st.DataObject, count: int, half_way: bool) -> None:
        """The model's own loader raises, before or after it wrote."""
        name, opened = self._choose(data)
        names = opened.left[:count]
        if not names or opened.plans:
            return  # a plan may go past the loader
        model, store = self.models[name], type(self.models[name]).store  # type: ignore[attr-defined]

        def failing(self: Any, current: str, tensor: Tensor) -> None:
            if half_way or current != names[-1]:
                store(self, current, tensor)
            if current == names[-1]:
                raise ZeroDivisionError("the loader failed")

        patch = unittest.mock.patch.object(type(model), "store", failing)
        with self._fails(name, WeightMismatchError, *_HOOKS), patch:
            opened.session.load(self._source(opened, names, "list"))

    @rule(countdown=st.integers(0, 4), how=st.sampled_from(["before", "half way", "misfit"]))
    def a_hook_is_going_to_fail(self, countdown: int, how: str) -> None:
        """One of the next hooks raises, or makes what does not fit the live tensors."""
        if how == "misfit":
            self.framework.misfit_hook(countdown)
        else:
            self.framework.fail_hook(countdown, half_way=how == "half way")

    @precondition(lambda self: self.open)
    @rule(data=st.data(), countdown=st.integers(0, 12))
    def a_copy_fails_at_the_end(self, data: st.DataObject, countdown: int) -> None:
        """Finish is interrupted at one of its copies, in a hook or in the commit."""
        name, _ = self._choose(data)
        copies = iter(range(countdown, -1, -1))
        copy_ = Tensor.copy_

        def failing(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if next(copies, None) == 0:
                raise MemoryError("the copy failed")
            return copy_(self, *args, **kwargs)

        patch = unittest.mock.patch.object(Tensor, "copy_", failing)
        with self._may_fail(name, WeightLoadError, MemoryError, clean=False), patch:
            self._finish(name)

    # -------------------------------------------------------------------------- processing

    @precondition(lambda self: self.open)
    @rule(data=st.data(), complete=st.booleans())
    def a_loader_processes_early(self, data: st.DataObject, complete: bool) -> None:
        """Ask twice for the hook of one module: it runs once, and only when it is complete."""
        name, opened = self._choose(data)
        hooked = [
            (prefix, module)
            for prefix, module in self.models[name].named_modules()
            if _role(module) in (Role.QUANT, Role.ATTENTION)
        ]
        prefix, chosen = hooked[data.draw(st.integers(0, len(hooked) - 1))]
        session, role = opened.session, _role(chosen)
        if complete:
            names = [one for one in opened.left if one.startswith(f"{prefix}.")]
            with self._may_fail(name, *_HOOKS):
                session.load(self._source(opened, names, "list"))
            if name not in self.open:
                return
        call: Callable[[Any], bool] = (
            session.process_quant if role is Role.QUANT else session.finalize_attention_runtime
        )
        calls = self._calls(name)[role, chosen]
        with self._may_fail(name, IncompleteLoadError, UsageError, *_HOOKS):
            ran = call(chosen)
            require(ran == (calls == 0), f"it said {ran}, and had run {calls} times")
            require(call(chosen) is False, "a hook ran twice in one session")

    # -------------------------------------------------------------------------- ending

    @precondition(lambda self: self.open)
    @rule(data=st.data(), kind=st.sampled_from(["mapping", "list", "buffer"]))
    def loads_the_rest_and_finishes(self, data: st.DataObject, kind: str) -> None:
        """The shortest way to a finished load."""
        name, opened = self._choose(data)
        with self._may_fail(name, *_HOOKS):
            opened.session.load(self._source(opened, list(opened.left), kind))
            self._finish(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finishes(self, data: st.DataObject) -> None:
        """Finish: everything came and the model is fresh, or it is refused."""
        name, opened = self._choose(data)
        if opened.left:
            with self._fails(name, IncompleteLoadError):
                self._finish(name)
            return
        with self._may_fail(name, *_HOOKS):
            self._finish(name)

    def _finish(self, name: str) -> None:
        opened = self.open[name]
        receipt = finish_reload(self.models[name]) if opened.by_call else opened.session.finish()
        require(not opened.left, f"{opened.left} never came, and nobody missed them")
        require(opened.session.state is SessionState.FINISHED, f"{opened.session!r}")
        require(receipt.outcome == "finished", f"{receipt}")
        self._check_hooks(name, complete=True)
        self._now_holds(name, (name, opened.seed))
        version = weights_version(self.models[name])
        require(version == opened.session.version, f"the version is {version}")
        self._forget(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        """Abort; what was not written is as it was."""
        name, opened = self._choose(data)
        receipt = abort_reload(self.models[name]) if opened.by_call else opened.session.abort()
        require(receipt.cause == "aborted by the caller", f"{receipt}")
        self._has_ended(name)

    @precondition(lambda self: any(not opened.by_call for opened in self.open.values()))
    @rule(data=st.data())
    def is_dropped(self, data: st.DataObject) -> None:
        """Nobody holds the session any more: it says so, and leaves a model that can be loaded."""
        names = sorted(name for name, opened in self.open.items() if not opened.by_call)
        name = data.draw(st.sampled_from(names))
        self.last = None
        model = self.models[name]
        poison = poison_of(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del self.open[name]
            gc.collect()
        kinds = [warning.category for warning in caught]
        require(ResourceWarning in kinds, "a session was dropped silently")
        if poison_of(model) is not poison:
            self._now_holds(name, None)

    @precondition(lambda self: self.last is not None)
    @rule(call=st.sampled_from(["prepare", "load", "finish", "abort"]))
    def uses_a_session_again(self, call: str) -> None:
        """A session is for single use."""
        session = self._last()
        state = session.state
        arguments: list[Any] = [{}] if call == "load" else []
        _raises(InvalidTransitionError, lambda: getattr(session, call)(*arguments))
        require(session.state is state, "a refused call changed the state")

    # -------------------------------------------------------------------------- after a failure

    @contextlib.contextmanager
    def _may_fail(
        self, name: str, *errors: type[BaseException], clean: bool = True
    ) -> Iterator[None]:
        """Allow the block to end the session with one of these errors."""
        opened = self.open[name]
        try:
            yield
        except errors as error:
            notes = getattr(error, "__notes__", ())
            require(not any("cleaning up raised" in note for note in notes), f"{notes}")
            if isinstance(error, WeightLoadError):
                intact = opened.session.state is SessionState.ABORTED
                require(error.model_intact == intact, f"{error!r} contradicts the state")
            self._has_ended(name, clean=clean)

    @contextlib.contextmanager
    def _fails(self, name: str, *errors: type[BaseException]) -> Iterator[None]:
        """Demand that the block ends the session with one of these errors."""
        with self._may_fail(name, *errors):
            yield
            raise AssertionError(f"none of {errors} was raised")

    def _has_ended(self, name: str, *, clean: bool = True) -> None:
        opened = self.open[name]
        session = opened.session
        states = (SessionState.ABORTED, SessionState.POISONED)
        require(session.state in states, f"{session!r} should have ended")
        if session.state is SessionState.POISONED:
            require(opened.sent > 0, "poisoned by a session that was sent nothing")
            require(not (clean and opened.commit == "atomic"), "an atomic load wrote early")
            self._now_holds(name, None)
        self._check_hooks(name, complete=False)
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.last = self.open.pop(name).session

    def _check_hooks(self, name: str, *, complete: bool) -> None:
        inside = {id(module): module for module in self.models[name].modules()}
        counts = self._calls(name)
        twice = [call for call, count in counts.items() if count > 1]
        require(not twice, f"ran twice in one session: {twice}")
        hooked = sum(_role(module) is not None for module in inside.values())
        require(not complete or len(counts) == hooked, f"{len(counts)} of {hooked} hooks ran")

    def _calls(self, name: str) -> Counter[tuple[Role | None, Any]]:
        """Count the hooks that ran on modules of the model since its session was opened."""
        inside = {id(module) for module in self.models[name].modules()}
        calls = self.framework.calls[self.open[name].first_call :]
        return Counter(call for call in calls if id(call[1]) in inside)

    def _choose(self, data: st.DataObject) -> tuple[str, Opened]:
        name = data.draw(st.sampled_from(sorted(self.open)))
        return name, self.open[name]

    def _last(self) -> Session:
        require(self.last is not None, "no session has ended")
        return self.last  # type: ignore[return-value]

    # -------------------------------------------------------------------------- invariants

    @invariant()
    def models_compute_what_they_hold(self) -> None:
        """Exactly what a fresh load of what they hold computes, or they are poisoned."""
        for name, model in self.models.items():
            poisoned = poison_of(model) is not None
            require(poisoned != self.usable(name), f"{name}: {poison_of(model)} {self.holds}")
            if poisoned:
                require(weights_version(model) is None, "a mixture has a version")
            elif not self.rivals(name):
                wanted, got = self.wanted(name), outputs(model)
                require(identical(got, wanted), f"{name} computes {got}, not {wanted}")

    @invariant()
    def everything_is_where_it_was(self) -> None:
        """Parameters, buffers and derived tensors keep their memory."""
        for name, model in self.models.items():
            if not self.rivals(name):
                self.kept[name].check(model)

    @invariant()
    def only_open_sessions_own_modules(self) -> None:
        """No claim outlives its session, and each session owns all that it should."""
        for name, model in self.models.items():
            rivals = self.rivals(name)
            for module in model.modules():
                owners = [
                    opened.session
                    for other, opened in self.open.items()
                    if other in rivals and any(module is one for one in self._tree(other))
                ]
                owner = owner_of(module)
                require(
                    owner in owners or (owner is None and not owners),
                    f"a module of {name} is owned by {owner!r}, not by {owners}",
                )
                if not rivals:
                    left = {"_weightload_open"} & vars(module).keys()
                    require(not left, f"{name} still has {left}")
        require(current_session() is None, "a session is current outside of any call")

    @invariant()
    def states_are_legal(self) -> None:
        """A session that the machine has open is open, and has a receipt only when it ended."""
        for opened in self.open.values():
            session = opened.session
            legal = {SessionState.PREPARED, SessionState.LOADING}
            require(session.state in legal, f"{session!r}")
            require(session.receipt is None, "an open session has a receipt")
            if opened.sent:
                require(session.state is SessionState.LOADING, f"{session!r}")

    def _tree(self, name: str) -> list[Any]:
        return list(self.models[name].modules())

    def teardown(self) -> None:
        """Abort what is open; then a complete load makes every model right."""
        self.framework.disarm()
        for name in [name for name, opened in self.open.items() if opened.session.state.open]:
            self.open[name].session.abort()
            self._has_ended(name)
        if self.open:
            return  # a rule has failed, and its error says more than what follows from it
        self.everything_is_where_it_was()
        for name in sorted(self.models):
            with WeightLoadSession(self.models[name]) as session:
                session.load(self.states[name, 2])
            self._now_holds(name, (name, 2))
        self.everything_is_where_it_was()
        self.models_compute_what_they_hold()
        self.only_open_sessions_own_modules()


def _role(module: Any) -> Role | None:
    if hasattr(module, "quant_method"):
        return Role.QUANT
    if isinstance(module, LatentAttention):
        return Role.ATTENTION
    hooked = hasattr(type(module), "process_weights_after_loading")
    return Role.QUANT if hooked else None


def _wrong_shape(name: str, tensor: Tensor) -> Any:
    return name, torch.cat([tensor, tensor])


_FAULTS: dict[str, tuple[type[BaseException], Callable[[str, Tensor], Any]]] = {
    "source": (SourceFault, lambda name, tensor: None),
    "interrupt": (KeyboardInterrupt, lambda name, tensor: None),
    "again": (DuplicateWeightError, lambda name, tensor: None),
    "unknown": (UnexpectedWeightError, lambda name, tensor: ("nowhere.weight", tensor)),
    "shape": (WeightMismatchError, _wrong_shape),
    "broadcast": (WeightMismatchError, lambda name, tensor: (name, tensor[:1])),
    "meta": (WeightMismatchError, lambda name, tensor: (name, tensor.to("meta"))),
    "no pair": (WeightMismatchError, lambda name, tensor: name),
}


def _fails_after(pairs: Pairs, error: BaseException) -> Iterator[tuple[str, Tensor]]:
    yield from pairs
    raise error


def _one_buffer(pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
    """Yield views of one buffer, each of which the next one overwrites."""
    buffer = torch.empty(max((tensor.numel() for _, tensor in pairs), default=0))
    for name, tensor in pairs:
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(float("nan"))


def _in_thread(function: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _raises(error: type[BaseException], call: Callable[[], Any]) -> None:
    try:
        call()
    except error as found:
        require(type(found) is error, f"{found!r} is not a {error.__name__}")
    else:
        raise AssertionError(f"{error.__name__} was not raised")
