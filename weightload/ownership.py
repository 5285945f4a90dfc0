"""Who may change which model: claims, the current session, the served version, poison.

A claim is a record per module, because a module can be seen through several trees: a draft model
shares the embedding of its target. The context variable answers "in which session am I?" and is
no guard: another thread does not see it, and a child task keeps a stale value.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

import attrs

from weightload.errors import (
    ModelBusyError,
    ModelPoisonedError,
    SessionMisnestedError,
    WeightLoadError,
)

if TYPE_CHECKING:
    from weightload.session import WeightLoadSession

__all__ = [
    "ForwardGuard",
    "Guards",
    "Mark",
    "Poison",
    "claim",
    "current_session",
    "entered",
    "guard_open",
    "let_compute",
    "mark_of",
    "open_session",
    "owner_of",
    "poison_of",
    "record_poison",
    "record_version",
    "release",
    "require_usable",
    "weights_version",
]

HOLDER = "_weightload_open"
"""The attribute by which a model keeps the session alive that separate calls opened."""

_current: contextvars.ContextVar[WeightLoadSession | None] = contextvars.ContextVar(
    "weightload_current_session", default=None
)
_lock = threading.Lock()
_ids = itertools.count(1)


@attrs.frozen(kw_only=True)
class Poison:
    """Why a model must not be used: it holds a mixture of old and new weights.

    Attributes:
        session: number of the session that wrote the mixture.
        version: the version that the session was loading, if it had a name.
        step: the step that failed, such as ``"load"`` or ``"process"``.
        module: qualified name of the module at fault, if one is known.
        cause: type and text of the error.
        terminal: whether no load can cure it, only a new process.
    """

    session: int
    version: str | int | None
    step: str
    module: str | None
    cause: str
    terminal: bool = False

    def error(self) -> ModelPoisonedError:
        """Make the error that a poisoned model answers with."""
        where = f" at module {self.module!r}" if self.module else ""
        advice = (
            "No load can cure that; start the process again."
            if self.terminal
            else "Load a complete set of weights before using it."
        )
        return ModelPoisonedError(
            f"The model must not be used: session {self.session} failed in step "
            f"{self.step!r}{where} ({self.cause}) after it had written live weights. {advice}",
            model_intact=False,
            session=self.session,
            step=self.step,
            terminal=self.terminal,
        )


@attrs.define(eq=False, repr=False)
class Mark:
    """What is known about one module: per module, because models share modules.

    Attributes:
        claim: who owns it, weakly.
        version: what it serves.
        poison: why it must not be used.
    """

    claim: ref[WeightLoadSession] | None = None
    version: str | int | None = None
    poison: Poison | None = None


_marks: WeakKeyDictionary[Any, Mark] = WeakKeyDictionary()
_poisoned = 0
"""How many marks hold a poison, or did when their module was freed; if none, nobody has to look."""


def mark_of(module: Any) -> Mark:
    """Return the mark of a module; it stays the same as long as the module lives."""
    mark = _marks.get(module)
    if mark is None:
        mark = _marks[module] = Mark()
    return mark


def new_session_id() -> int:
    """Return a number that no other session of this process has."""
    return next(_ids)


def current_session() -> WeightLoadSession | None:
    """Return the open session that the calling code runs in, or ``None``.

    Model code, loaders and hooks can ask this. A value that a child task or thread inherited from
    a session that has ended meanwhile counts as ``None``.
    """
    session = _current.get()
    return session if session is not None and session.state.open else None


@contextmanager
def entered(session: WeightLoadSession) -> Iterator[None]:
    """Make ``session`` the current one for the calls made inside this block."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)


def claim(
    session: WeightLoadSession, modules: Mapping[str, Any], marks: Sequence[Mark] | None = None
) -> None:
    """Claim every module for ``session``, or none.

    Args:
        session: who wants to change them.
        modules: every module of the tree by its qualified name.
        marks: theirs, in this order, if they are at hand.

    Raises:
        SessionMisnestedError: the owner is the session that the caller runs in.
        ModelBusyError: another session owns one of them.
    """
    marks = [*map(mark_of, modules.values())] if marks is None else marks
    with _lock:
        for (name, module), mark in zip(modules.items(), marks, strict=True):
            if mark.claim is None:
                continue
            owner = _owner(module)
            if owner is None or owner is session:
                continue
            where = f"module {name!r}" if name else "the model"
            if owner is current_session():
                raise SessionMisnestedError(
                    f"A session cannot be opened inside session {owner.id} on the same model: "
                    f"{where} is owned by it. End that session first, or pass the weights to "
                    f"its load().",
                    module=name,
                    owner=owner.id,
                )
            raise ModelBusyError(
                f"{where} is owned by session {owner.id} ({owner.state.value}). One session at a "
                f"time can change a model; wait until it has ended, or abort it.",
                module=name,
                owner=owner.id,
            )
        mine = ref(session)
        for mark in marks:
            mark.claim = mine


def release(
    session: WeightLoadSession,
    modules: Iterable[Any],
    marks: Sequence[Mark] | None = None,
    *,
    guarded: bool = True,
) -> None:
    """Give up the claims that ``session`` holds on ``modules``; others are left alone.

    Args:
        session: which has ended.
        modules: of the tree.
        marks: theirs, in this order, if they are at hand.
        guarded: whether there may be guards of :func:`guard_open` to take away.
    """
    modules = list(modules)
    marks = [*map(mark_of, modules)] if marks is None else marks
    mine = ref(session)  # the same object for everybody who asks
    with _lock:
        for module, mark in zip(modules, marks, strict=True):
            claim = mark.claim
            if claim is mine or (claim is not None and claim() is None):
                mark.claim = None
                if guarded or mark.poison is not None:
                    _guard(module, mark)


def _owner(module: Any) -> WeightLoadSession | None:
    mark = _marks.get(module)
    owner = mark.claim() if mark is not None and mark.claim is not None else None
    return owner if owner is not None and owner.state.open else None


def owner_of(module: Any) -> WeightLoadSession | None:
    """Return the open session that owns ``module``, or ``None``."""
    with _lock:
        return _owner(module)


def open_session(model: Any) -> WeightLoadSession | None:
    """Return the open session whose root is ``model`` itself, or ``None``."""
    owner = owner_of(model)
    return owner if owner is not None and owner.model is model else None


class ForwardGuard:
    """Stands in the place of a module's ``forward`` while the module must not compute.

    Code that runs inside a session, such as a hook that calls its module, computes as ever.

    Args:
        module: the module; it is known weakly, so that a guard can be kept for later sessions.
        cause: says why not; guards may share it.
    """

    __slots__ = ("_cause", "_module", "_own")

    def __init__(self, module: Any, cause: _Cause) -> None:
        self._cause = cause
        self._module = ref(module)
        self._own: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            WeightLoadError: always, but from inside a session.
        """
        if current_session() is None:
            raise self._cause.error()
        if self._own is not None:
            return self._own(*args, **kwargs)
        module: Any = self._module()
        return type(module).forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a model, pickled or not, are guarded for the same cause."""
        return ForwardGuard, (self._module(), self._cause), self._own

    def __setstate__(self, own: Any) -> None:
        """Take the module's own ``forward``."""
        self._own = own

    @classmethod
    def install(cls, module: Any, cause: _Cause) -> None:
        """Guard ``module``, or change the cause if it is guarded."""
        mine = module.__dict__
        guard = cls(module, cause)
        before = mine.get("forward")
        guard._own = before._own if type(before) is cls else before
        mine["forward"] = guard

    @classmethod
    def remove(cls, module: Any) -> None:
        """Put the module's own ``forward`` back, if it is guarded."""
        mine = module.__dict__
        guard = mine.get("forward")
        if type(guard) is not cls:
            return
        if guard._own is None:
            del mine["forward"]
        else:
            mine["forward"] = guard._own


class _Cause(Protocol):
    """Why a module does not compute."""

    def error(self) -> WeightLoadError:
        """Make the error that the module answers with."""


@attrs.define
class _Open:
    """A model does not compute while a session is open on it.

    Attributes:
        session: number of the session.
    """

    session: int = 0

    def error(self) -> ModelBusyError:
        """Make the error that the model answers with."""
        return ModelBusyError(
            f"Session {self.session} is replacing the weights of this model; it does not compute "
            f"before that session has ended.",
            owner=self.session,
        )


class Guards:
    """The guards of all modules of a model, kept from one session to the next.

    Args:
        modules: which are not kept alive by it.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self._open = _Open()
        self._guards = [ForwardGuard(module, self._open) for module in modules]

    def put(self, session: WeightLoadSession, dicts: Sequence[dict[str, Any]]) -> bool:
        """Let no module compute while ``session`` is open, if they have nothing in the guards' place.

        Args:
            session: which is going to be open.
            dicts: the attributes of the modules.

        Returns:
            Whether that was done.
        """
        if [*map(dict.get, dicts, repeat("forward"))].count(None) < len(dicts):
            return False
        self._open.session = session.id
        deque(map(dict.__setitem__, dicts, repeat("forward"), self._guards), maxlen=0)
        return True

    def take(self, dicts: Sequence[dict[str, Any]]) -> None:
        """Take away what :meth:`put` has put there, and nothing else."""
        found = [*map(dict.pop, dicts, repeat("forward"), repeat(None))]
        if found == self._guards:
            return
        for mine, guard, other in zip(dicts, self._guards, found, strict=True):
            if other is not None and other is not guard:
                mine["forward"] = other


def guard_open(session: WeightLoadSession, modules: Iterable[Any]) -> None:
    """Let no module compute while ``session`` is open; :func:`release` ends that."""
    cause = _Open(session.id)
    for module in modules:
        ForwardGuard.install(module, cause)


def record_version(
    model: Any,
    version: str | int | None,
    *,
    cured: bool = True,
    marks: Sequence[Mark] | None = None,
) -> None:
    """Note that ``model`` now serves ``version``.

    Args:
        model: the root module.
        version: what the weights are called.
        cured: whether everything was loaded, which clears poison.
        marks: those of all modules, if they are at hand.
    """
    global _poisoned
    marks = [*map(mark_of, model.modules())] if marks is None else marks
    for mark in marks:
        mark.version = version
    if cured and any(mark.poison is not None for mark in marks):
        for module in model.modules():
            mark = mark_of(module)
            _poisoned -= mark.poison is not None
            mark.poison = None
            _guard(module, mark)


def record_poison(model: Any, poison: Poison) -> None:
    """Mark ``model`` as holding a mixture, until a session with full scope finishes.

    Models that share a module with it are marked as well, through that module. From then on the
    ``forward`` of every module refuses. A terminal poison is not replaced by another one.
    """
    global _poisoned
    for module in model.modules():
        mark = mark_of(module)
        mark.version = None
        _poisoned += mark.poison is None
        if mark.poison is None or not mark.poison.terminal:
            mark.poison = poison
        _guard(module, mark)


def let_compute(modules: Iterable[Any], marks: Sequence[Mark] | None = None) -> None:
    """Let modules compute again that :func:`guard_open` has stopped, but not what is poisoned."""
    modules = list(modules)
    marks = [*map(mark_of, modules)] if marks is None else marks
    for module, mark in zip(modules, marks, strict=True):
        _guard(module, mark)


def _guard(module: Any, mark: Mark) -> None:
    """Guard a module that is poisoned, and no other one."""
    if mark.poison is None:
        ForwardGuard.remove(module)
    else:
        ForwardGuard.install(module, mark.poison)


def weights_version(model: Any) -> str | int | None:
    """Return the version that ``model`` serves.

    ``None`` before the first load, if the model is poisoned, and if a module of it was loaded
    through another model since, in another version.
    """
    version = mark_of(model).version
    for module in model.modules():
        mark = _marks.get(module)
        if mark is not None and mark.version != version:
            return None
    return version


def poison_of(model: Any) -> Poison | None:
    """Return why ``model`` must not be used, or ``None`` if it may."""
    if not _poisoned:
        return None
    marks = (_marks.get(module) for module in model.modules())
    return next((mark.poison for mark in marks if mark is not None and mark.poison), None)


def require_usable(model: Any) -> None:
    """Return if ``model`` may be used.

    Raises:
        ModelPoisonedError: a load failed after it had written live weights.
    """
    poison = poison_of(model)
    if poison is not None:
        raise poison.error()
