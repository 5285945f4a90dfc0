"""What the state machine drives: models, and beside them a simple model of what they hold.

Three toy models: a target, a draft that shares one layer with it, and one that shares nothing.
The model of them is a dictionary: which checkpoint each part holds, or that it is a mixture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import torch

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
from weightload.testing.loading import FusedLinear, PaddedLinear, PiecedStack
from weightload.testing.models import Factory, LoadingModel, State, TiedModel, ToyModel, make_state
from weightload.testing.oracle import (
    Kept,
    ToyFramework,
    expected,
    identical,
    outputs,
    require,
    toy_framework,
)
from weightload.testing.sharing import (
    ForeignLinear,
    FusedExperts,
    HandleLinear,
    LatentAttention,
)

__all__ = ["FACTORIES", "Opened", "World", "role_of"]

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
    return LoadingModel(
        InPlaceLinear(), RoomLinear(), HandleLinear(), Linear(), PiecedStack(2), ForeignLinear()
    )


FACTORIES: dict[str, Factory] = {"target": _target, "draft": _draft, "other": _other}


@attrs.define
class Opened:
    """One open session and what the machine knows of it.

    Attributes:
        session: the session.
        by_call: whether :func:`weightload.start_reload` opened it.
        commit: how it commits.
        seed: which checkpoint it loads.
        state: the tensors of that checkpoint.
        left: their names, without those that were sent.
        first_call: how many hooks had run before.
        plans: whether it may go past the loaders.
        sent: how many tensors were sent.
    """

    session: Session
    by_call: bool
    commit: str
    seed: int
    state: State
    left: list[str]
    first_call: int
    plans: bool
    sent: int = 0

    def source(self, names: list[str], kind: str) -> Any:
        """Take tensors out of what is left, as a source of that kind."""
        pairs = [(name, self.state[name].clone()) for name in names]
        self.left = [name for name in self.left if name not in names]
        self.sent += len(names)
        if kind == "mapping":
            return dict(pairs)
        return pairs if kind == "list" else _one_buffer(pairs)


def _states() -> dict[tuple[str, int], State]:
    return {
        (name, seed): make_state(factory, seed)
        for name, factory in FACTORIES.items()
        for seed in (1, 2, 3)
    }


class World:
    """Three models, the sessions that are open on them, and which checkpoint each part holds.

    Attributes:
        framework: counts hooks and lets them fail.
        models: by name; target and draft share one layer.
        holds: number of the checkpoint by part, ``None`` if that holds a mixture.
        open: the open sessions, by the name of the model.
        last: the session that ended last.
        kept: where everything of a model was after its first load.
    """

    states: ClassVar[dict[tuple[str, int], State]] = _states()
    computed: ClassVar[dict[Any, Tensor]] = {}

    def __init__(self) -> None:
        self.framework: ToyFramework = toy_framework()
        self.models = {name: factory() for name, factory in FACTORIES.items()}
        self.models["draft"].layers[0] = self.models["target"].layers[0]
        self.holds: dict[str, tuple[str, int] | None] = {}
        self.open: dict[str, Opened] = {}
        self.last: Session | None = None
        for name, model in self.models.items():
            with WeightLoadSession(
                model, framework=self.framework, scope=Scope.full(allow_missing=model.may_miss)
            ) as session:
                session.load(self.states[name, 1])
            self.now_holds(name, (name, 1))
        self.kept = {name: Kept.of(model) for name, model in self.models.items()}

    def parts(self, name: str) -> list[str]:
        """Return the parts that the model of that name consists of."""
        return [name] if name == "other" else [name, "shared"]

    def now_holds(self, name: str, what: tuple[str, int] | None) -> None:
        """Enter that the model holds a checkpoint, or a mixture."""
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

    def overlap(self, name: str, other: str) -> bool:
        """Whether two models have a part in common."""
        return bool(set(self.parts(name)) & set(self.parts(other)))

    def has_ended(self, name: str, *, clean: bool = True) -> None:
        """Check how a session ended that did not finish, and enter what the model holds."""
        opened = self.open[name]
        session = opened.session
        states = (SessionState.ABORTED, SessionState.POISONED)
        require(session.state in states, f"{session!r} should have ended")
        if session.state is SessionState.POISONED:
            require(opened.sent > 0, "poisoned by a session that was sent nothing")
            require(not (clean and opened.commit == "atomic"), "an atomic load wrote early")
            self.now_holds(name, None)
        self.check_hooks(name, complete=False)
        self.forget(name)

    def forget(self, name: str) -> None:
        """Let go of a session that has ended."""
        self.last = self.open.pop(name).session

    def check_hooks(self, name: str, *, complete: bool) -> None:
        """Check that no hook ran twice in the open session, and all of them if it is complete."""
        inside = {id(module): module for module in self.models[name].modules()}
        counts = self.calls(name)
        twice = [call for call, count in counts.items() if count > 1]
        require(not twice, f"ran twice in one session: {twice}")
        hooked = sum(role_of(module) is not None for module in inside.values())
        receipt = self.open[name].session.receipt
        ran = len(counts) + (receipt.hooks_in_pieces if receipt is not None else 0)
        require(not complete or ran == hooked, f"{ran} of {hooked} hooks ran")

    def calls(self, name: str) -> Counter[tuple[Role | None, Any]]:
        """Count the hooks that ran on modules of the model since its session was opened."""
        inside = {id(module) for module in self.models[name].modules()}
        calls = self.framework.calls[self.open[name].first_call :]
        return Counter(call for call in calls if id(call[1]) in inside)

    def ended(self) -> Session:
        """Return the session that ended last."""
        require(self.last is not None, "no session has ended")
        return self.last  # type: ignore[return-value]

    def check_outputs(self) -> None:
        """Check that models compute what a fresh load of what they hold does, or are poisoned."""
        for name, model in self.models.items():
            poisoned = poison_of(model) is not None
            require(poisoned != self.usable(name), f"{name}: {poison_of(model)} {self.holds}")
            if poisoned:
                require(weights_version(model) is None, "a mixture has a version")
            elif not self.rivals(name):
                wanted, got = self.wanted(name), outputs(model)
                require(identical(got, wanted), f"{name} computes {got}, not {wanted}")

    def check_places(self) -> None:
        """Check that parameters, buffers and derived tensors keep their memory."""
        for name, model in self.models.items():
            if not self.rivals(name):
                self.kept[name].check(model)

    def check_owners(self) -> None:
        """Check that no claim outlives its session, and each session owns all that it should."""
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

    def check_states(self) -> None:
        """Check that sessions that should be open are, and have no receipt yet."""
        for opened in self.open.values():
            session = opened.session
            legal = {SessionState.PREPARED, SessionState.LOADING}
            require(session.state in legal, f"{session!r}")
            require(session.receipt is None, "an open session has a receipt")
            if opened.sent:
                require(session.state is SessionState.LOADING, f"{session!r}")

    def _tree(self, name: str) -> list[Any]:
        return list(self.models[name].modules())


def role_of(module: Any) -> Role | None:
    """Return the role in which a module of the machine is processed."""
    if hasattr(module, "quant_method"):
        return Role.QUANT
    if isinstance(module, LatentAttention):
        return Role.ATTENTION
    hooked = hasattr(type(module), "process_weights_after_loading")
    return Role.QUANT if hooked else None


def _one_buffer(pairs: Pairs) -> Iterator[tuple[str, Tensor]]:
    """Yield views of one buffer, each of which the next one overwrites."""
    buffer = torch.empty(max((tensor.numel() for _, tensor in pairs), default=0))
    for name, tensor in pairs:
        yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
        buffer.fill_(float("nan"))
