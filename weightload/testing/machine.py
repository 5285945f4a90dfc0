"""The lifecycle of sessions as a state machine that hypothesis drives, beside a simple model of it.

Run it as it is, or with another way to open a session by overriding :meth:`SessionMachine.begin`.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

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
    UsageError,
    WeightLoadError,
    WeightMismatchError,
)
from weightload.lifecycle import abort_reload, finish_reload, start_reload
from weightload.ownership import current_session, poison_of, weights_version
from weightload.registry import Role
from weightload.session import WeightLoadSession
from weightload.states import SessionState
from weightload.testing.misfits import FAULTS, fails_after
from weightload.testing.oracle import require
from weightload.testing.world import FACTORIES, Opened, World, role_of

__all__ = ["SessionMachine"]

Tensor = torch.Tensor
Session = WeightLoadSession
Pairs = list[tuple[str, Tensor]]

NAMES = st.sampled_from(sorted(FACTORIES))
SEEDS = st.integers(1, 3)
_HOOKS = (ProcessingError, StorageChangedError)
"""What comes of a hook that raises or makes what does not fit."""


class SessionMachine(RuleBasedStateMachine):
    """Opens, loads, breaks, finishes, aborts and drops sessions in any order.

    After every step: a model without an open session computes exactly what a fresh load of what
    it holds computes, or is poisoned; everything is where it was; only open sessions own modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.models = self.world.models
        self.framework = self.world.framework
        self.versions = iter(range(1, 10_000))

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
        if self.world.rivals(name):
            self._is_refused(name, ModelBusyError)
            return
        version = next(self.versions)
        session = self.begin(name, by_call=by_call, commit=commit, version=version, plans=plans)
        require(session.state is SessionState.PREPARED, f"{session!r}")
        state = self.world.states[name, seed]
        left = list(state)
        if shuffle is not None:
            random.Random(shuffle).shuffle(left)
        calls = len(self.framework.calls)
        self.world.open[name] = Opened(session, by_call, commit, seed, state, left, calls, plans)

    def _is_refused(self, name: str, error: type[WeightLoadError]) -> None:
        try:
            self.begin(name, by_call=False)
        except error as found:
            require(type(found) is error, f"{found!r} is not a {error.__name__}")
            require(found.model_intact, "a refusal changes nothing")
        else:
            raise AssertionError(f"a second session on {name} was not refused")

    @precondition(lambda self: self.world.open)
    @rule(name=NAMES)
    def opens_in_another_thread(self, name: str) -> None:
        """Another thread is refused like this one."""
        if self.world.rivals(name):
            _in_thread(lambda: self._is_refused(name, ModelBusyError))

    # -------------------------------------------------------------------------- loading

    @precondition(lambda self: self.world.open)
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
            opened.session.load(opened.source(names, kind))

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), kind=st.sampled_from(["mapping", "list", "buffer"]))
    def loads_the_rest(self, data: st.DataObject, kind: str) -> None:
        """Load everything that is left."""
        name, opened = self._choose(data)
        with self._may_fail(name, *_HOOKS):
            opened.session.load(opened.source(list(opened.left), kind))

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), count=st.integers(0, 4))
    def loads_while_others_try(self, data: st.DataObject, count: int) -> None:
        """While a source is read: no other session, no other thread, no call from inside."""
        name, opened = self._choose(data)
        session = opened.session
        names = opened.left[:count]
        pairs = opened.source(names, "list")
        rivals = [other for other in self.models if self.world.overlap(name, other)]

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

    # -------------------------------------------------------------------------- failing

    @precondition(lambda self: self.world.open)
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
        pairs = opened.source(names, "list")
        error = FAULTS[fault][0]
        if fault in ("source", "interrupt"):
            source: Any = fails_after(pairs, error())
        elif fault == "again":
            if not sent:
                return
            source = [*pairs, (sent[0], opened.state[sent[0]])]
        else:
            bad = (rest or sent)[0]
            source = [*pairs, FAULTS[fault][1](bad, opened.state[bad])]
        if isinstance(source, list) and not at_once:
            source = iter(source)
        allowed = (error,) if rest else (error, DuplicateWeightError)
        with self._fails(name, *allowed, *_HOOKS):
            opened.session.load(source)
        ended = self.world.ended()
        if isinstance(source, list) and before == 0:
            require(ended.state is SessionState.ABORTED, "a list is checked before it is written")

    @precondition(lambda self: self.world.open)
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
            opened.session.load(opened.source(names, "list"))

    @rule(countdown=st.integers(0, 4), how=st.sampled_from(["before", "half way", "misfit"]))
    def a_hook_is_going_to_fail(self, countdown: int, how: str) -> None:
        """One of the next hooks raises, or makes what does not fit the live tensors."""
        if how == "misfit":
            self.framework.misfit_hook(countdown)
        else:
            self.framework.fail_hook(countdown, half_way=how == "half way")

    @precondition(lambda self: self.world.open)
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

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), complete=st.booleans())
    def a_loader_processes_early(self, data: st.DataObject, complete: bool) -> None:
        """Ask twice for the hook of one module: it runs once, and only when it is complete."""
        name, opened = self._choose(data)
        hooked = [
            (prefix, module)
            for prefix, module in self.models[name].named_modules()
            if role_of(module) in (Role.QUANT, Role.ATTENTION)
        ]
        prefix, chosen = hooked[data.draw(st.integers(0, len(hooked) - 1))]
        session, role = opened.session, role_of(chosen)
        if complete:
            names = [one for one in opened.left if one.startswith(f"{prefix}.")]
            with self._may_fail(name, *_HOOKS):
                session.load(opened.source(names, "list"))
            if name not in self.world.open:
                return
        call: Callable[[Any], bool] = (
            session.process_quant if role is Role.QUANT else session.finalize_attention_runtime
        )
        calls = self.world.calls(name)[role, chosen]
        with self._may_fail(name, IncompleteLoadError, UsageError, *_HOOKS):
            ran = call(chosen)
            require(ran == (calls == 0), f"it said {ran}, and had run {calls} times")
            require(call(chosen) is False, "a hook ran twice in one session")

    # -------------------------------------------------------------------------- ending

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), kind=st.sampled_from(["mapping", "list", "buffer"]))
    def loads_the_rest_and_finishes(self, data: st.DataObject, kind: str) -> None:
        """The shortest way to a finished load."""
        name, opened = self._choose(data)
        with self._may_fail(name, *_HOOKS):
            opened.session.load(opened.source(list(opened.left), kind))
            self._finish(name)

    @precondition(lambda self: self.world.open)
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
        opened = self.world.open[name]
        receipt = finish_reload(self.models[name]) if opened.by_call else opened.session.finish()
        require(not opened.left, f"{opened.left} never came, and nobody missed them")
        require(opened.session.state is SessionState.FINISHED, f"{opened.session!r}")
        require(receipt.outcome == "finished", f"{receipt}")
        self.world.check_hooks(name, complete=True)
        self.world.now_holds(name, (name, opened.seed))
        version = weights_version(self.models[name])
        require(version == opened.session.version, f"the version is {version}")
        self.world.forget(name)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def aborts(self, data: st.DataObject) -> None:
        """Abort; what was not written is as it was."""
        name, opened = self._choose(data)
        receipt = abort_reload(self.models[name]) if opened.by_call else opened.session.abort()
        require(receipt.cause == "aborted by the caller", f"{receipt}")
        self.world.has_ended(name)

    @precondition(lambda self: any(not opened.by_call for opened in self.world.open.values()))
    @rule(data=st.data())
    def is_dropped(self, data: st.DataObject) -> None:
        """Nobody holds the session any more: it says so, and leaves a model that can be loaded."""
        names = sorted(name for name, opened in self.world.open.items() if not opened.by_call)
        name = data.draw(st.sampled_from(names))
        self.world.last = None
        model = self.models[name]
        poison = poison_of(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del self.world.open[name]
            gc.collect()
        kinds = [warning.category for warning in caught]
        require(ResourceWarning in kinds, "a session was dropped silently")
        if poison_of(model) is not poison:
            self.world.now_holds(name, None)

    @precondition(lambda self: self.world.last is not None)
    @rule(call=st.sampled_from(["prepare", "load", "finish", "abort"]))
    def uses_a_session_again(self, call: str) -> None:
        """A session is for single use."""
        session = self.world.ended()
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
        opened = self.world.open[name]
        try:
            yield
        except errors as error:
            notes = getattr(error, "__notes__", ())
            require(not any("cleaning up raised" in note for note in notes), f"{notes}")
            if isinstance(error, WeightLoadError):
                intact = opened.session.state is SessionState.ABORTED
                require(error.model_intact == intact, f"{error!r} contradicts the state")
            self.world.has_ended(name, clean=clean)

    @contextlib.contextmanager
    def _fails(self, name: str, *errors: type[BaseException]) -> Iterator[None]:
        """Demand that the block ends the session with one of these errors."""
        with self._may_fail(name, *errors):
            yield
            raise AssertionError(f"none of {errors} was raised")

    def _choose(self, data: st.DataObject) -> tuple[str, Opened]:
        name = data.draw(st.sampled_from(sorted(self.world.open)))
        return name, self.world.open[name]

    # -------------------------------------------------------------------------- invariants

    @invariant()
    def models_compute_what_they_hold(self) -> None:
        """Exactly what a fresh load of what they hold computes, or they are poisoned."""
        self.world.check_outputs()

    @invariant()
    def everything_is_where_it_was(self) -> None:
        """Parameters, buffers and derived tensors keep their memory."""
        self.world.check_places()

    @invariant()
    def only_open_sessions_own_modules(self) -> None:
        """No claim outlives its session, and each session owns all that it should."""
        self.world.check_owners()

    @invariant()
    def states_are_legal(self) -> None:
        """A session that the machine has open is open, and has a receipt only when it ended."""
        self.world.check_states()

    def teardown(self) -> None:
        """Abort what is open; then a complete load makes every model right."""
        self.framework.disarm()
        for name in [name for name, opened in self.world.open.items() if opened.session.state.open]:
            self.world.open[name].session.abort()
            self.world.has_ended(name)
        if self.world.open:
            return  # a rule has failed, and its error says more than what follows from it
        self.everything_is_where_it_was()
        for name in sorted(self.models):
            with WeightLoadSession(self.models[name]) as session:
                session.load(self.world.states[name, 2])
            self.world.now_holds(name, (name, 2))
        self.everything_is_where_it_was()
        self.models_compute_what_they_hold()
        self.only_open_sessions_own_modules()


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
