"""A loaded model with everything that a test asks about it after a session has ended."""

from __future__ import annotations

import gc
from typing import Any

import attrs

from weightload.errors import ModelPoisonedError, WeightLoadError
from weightload.ownership import current_session, owner_of, poison_of, require_usable
from weightload.scope import Scope
from weightload.session import WeightLoadSession
from weightload.states import SessionState
from weightload.testing import sharing
from weightload.testing.models import Factory, State, ToyModel, make_state
from weightload.testing.oracle import (
    Kept,
    ToyFramework,
    check_equal,
    outputs,
    require,
    toy_framework,
)

__all__ = ["Bench"]


@attrs.define(eq=False)
class Bench:
    """A toy model that serves checkpoint 1, and the checks that every ended session must pass.

    Attributes:
        factory: makes a model without weights.
        model: the model, loaded once.
        framework: counts hooks and lets them fail.
        serves: the checkpoint that the model serves, ``None`` if it is poisoned.
        kept: where everything was after the first load.
    """

    factory: Factory
    model: ToyModel = attrs.field(init=False)
    framework: ToyFramework = attrs.field(init=False, factory=toy_framework)
    serves: State | None = attrs.field(init=False, default=None)
    kept: Kept = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Build the model and load it for the first time."""
        self.model = self.factory()
        state = self.state(1)
        may_miss = self.model.may_miss
        with WeightLoadSession(
            self.model,
            framework=self.framework,
            version=1,
            scope=Scope.full(allow_missing=may_miss),
        ) as session:
            session.load(state)
        self.serves = state
        self.kept = Kept.of(self.model)

    def state(self, seed: int) -> State:
        """Return the checkpoint of that number."""
        return make_state(self.factory, seed)

    def session(self, **options: Any) -> WeightLoadSession:
        """Return a new session, not prepared yet."""
        return WeightLoadSession(self.model, **options)

    def open(self, **options: Any) -> WeightLoadSession:
        """Return a prepared session."""
        session = WeightLoadSession(self.model, **options)
        session.prepare()
        return session

    def reload(self, state: State, **options: Any) -> WeightLoadSession:
        """Load a complete checkpoint and check the result; return the finished session."""
        with WeightLoadSession(self.model, **options) as session:
            session.load(state)
        self.serves = state
        self.check_finished(session)
        return session

    def check_finished(self, session: WeightLoadSession) -> None:
        """Check that the model is what a fresh load gives, at the old addresses.

        Raises:
            AssertionError: it is not.
        """
        self._free_what_nobody_holds()
        require(session.state is SessionState.FINISHED, f"{session!r} is not finished")
        require(poison_of(self.model) is None, "the model is poisoned")
        if self.serves is not None:
            check_equal(self.model, self.factory, self.serves)
        require(not outputs(self.model).isnan().any(), "NaN equals NaN and proves nothing")
        self.check_structure()

    def check_ended(self, session: WeightLoadSession, error: WeightLoadError | None = None) -> None:
        """Check that what an ended session says about the model is true.

        Args:
            session: one that failed or was aborted.
            error: what it raised, if weightload raised it.

        Raises:
            AssertionError: the model is not as the session says.
        """
        self._free_what_nobody_holds()
        require(session.state.terminal, f"{session!r} has not ended")
        intact = session.state is not SessionState.POISONED
        receipt = session.receipt
        require(receipt is not None, "there is no receipt")
        if receipt is not None:
            require(receipt.model_intact == intact, f"{receipt} contradicts {session!r}")
            require(receipt.outcome == session.state.value, f"{receipt} contradicts {session!r}")
        notes = getattr(error, "__notes__", ())
        require(not any("cleaning up raised" in note for note in notes), f"{notes}")
        if error is not None:
            require(error.model_intact == intact, f"{error!r} contradicts {session!r}")
        self.check_structure()
        if intact and self.serves is not None:
            require(poison_of(self.model) is None, "an intact model is poisoned")
            check_equal(self.model, self.factory, self.serves)
        if not intact:
            self.serves = None
            self.check_poisoned(session)

    def check_poisoned(self, session: WeightLoadSession) -> None:
        """Check that the model is refused, and that the refusal names the session.

        Raises:
            AssertionError: it is not.
        """
        try:
            require_usable(self.model)
        except ModelPoisonedError as error:
            require(error.facts["session"] == session.id, f"{error} names another session")
        else:
            raise AssertionError("a mixture is not refused")

    def check_recovers(self) -> None:
        """Check that a complete load makes the model right, whatever happened before.

        Raises:
            AssertionError: it does not.
        """
        for seed in (3, 1):
            for commit in ("stream", "atomic"):
                self.reload(self.state(seed), commit=commit)

    def _free_what_nobody_holds(self) -> None:
        """Let an address that points to nothing be seen as such."""
        handles = (sharing.HandleLinear, sharing.WeightHandleLinear)
        if any(isinstance(module, handles) for module in self.model.modules()):
            gc.collect(1)

    def check_structure(self) -> None:
        """Check that everything is where it was and that no session left a trace.

        Raises:
            AssertionError: something moved, is on meta, wrapped or claimed.
        """
        self.kept.check(self.model)
        require(current_session() is None, "a session is current")
        for name, module in self.model.named_modules():
            require(owner_of(module) is None, f"{name!r} is still claimed")
            left = {"load_weights", "_weightload_open"} & vars(module).keys()
            require(not left, f"{name!r} still has {left}")
