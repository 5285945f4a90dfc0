"""The states of a session, and the one table of moves between them."""

from __future__ import annotations

import enum

__all__ = ["TRANSITIONS", "Event", "SessionState", "allowed_calls", "next_state"]


class SessionState(enum.Enum):
    """What has happened to a session so far."""

    NEW = "new"
    """Made; the model is untouched and unclaimed."""
    PREPARED = "prepared"
    """The model is claimed and takes weights in checkpoint format."""
    LOADING = "loading"
    """At least one ``load`` was called."""
    SEALED = "sealed"
    """``seal`` was called: everything has arrived, and waits for ``finish``."""
    FINISHING = "finishing"
    """``finish`` is checking, processing and committing."""
    FINISHED = "finished"
    """The model is exactly what a fresh load of the sent weights would have given."""
    ABORTED = "aborted"
    """Ended early; no live byte was written and the model computes what it did before."""
    POISONED = "poisoned"
    """Ended early after a live byte was written: the model holds a mixture."""

    @property
    def terminal(self) -> bool:
        """Whether the session has ended; a session is for single use."""
        return self in _TERMINAL

    @property
    def open(self) -> bool:
        """Whether the session owns its model now."""
        return self in _OPEN


class Event(enum.Enum):
    """What moves a session from one state to the next."""

    PREPARE = "prepare"
    LOAD = "load"
    SEAL = "seal"
    FINISH = "finish"
    DONE = "done"
    ABORT_CLEAN = "abort (no live byte written)"
    ABORT_DIRTY = "abort (a live byte was written)"


_S, _E = SessionState, Event

TRANSITIONS: dict[tuple[SessionState, Event], SessionState] = {
    (_S.NEW, _E.PREPARE): _S.PREPARED,
    (_S.NEW, _E.ABORT_CLEAN): _S.ABORTED,
    (_S.PREPARED, _E.LOAD): _S.LOADING,
    (_S.PREPARED, _E.SEAL): _S.SEALED,
    (_S.PREPARED, _E.FINISH): _S.FINISHING,
    (_S.PREPARED, _E.ABORT_CLEAN): _S.ABORTED,
    (_S.PREPARED, _E.ABORT_DIRTY): _S.POISONED,
    (_S.LOADING, _E.LOAD): _S.LOADING,
    (_S.LOADING, _E.SEAL): _S.SEALED,
    (_S.LOADING, _E.FINISH): _S.FINISHING,
    (_S.LOADING, _E.ABORT_CLEAN): _S.ABORTED,
    (_S.LOADING, _E.ABORT_DIRTY): _S.POISONED,
    (_S.SEALED, _E.FINISH): _S.FINISHING,
    (_S.SEALED, _E.ABORT_CLEAN): _S.ABORTED,
    (_S.SEALED, _E.ABORT_DIRTY): _S.POISONED,
    (_S.FINISHING, _E.DONE): _S.FINISHED,
    (_S.FINISHING, _E.ABORT_CLEAN): _S.ABORTED,
    (_S.FINISHING, _E.ABORT_DIRTY): _S.POISONED,
}
"""Every move there is; a pair that is missing is refused."""

_TERMINAL = frozenset({_S.FINISHED, _S.ABORTED, _S.POISONED})
_OPEN = frozenset({_S.PREPARED, _S.LOADING, _S.SEALED, _S.FINISHING})
_CALLS = {
    _E.PREPARE: "prepare",
    _E.LOAD: "load",
    _E.SEAL: "seal",
    _E.FINISH: "finish",
    _E.ABORT_CLEAN: "abort",
}


def next_state(state: SessionState, event: Event) -> SessionState | None:
    """Return the state that ``event`` leads to, or ``None`` if it is not allowed in ``state``."""
    return TRANSITIONS.get((state, event))


def allowed_calls(state: SessionState) -> list[str]:
    """Return the names of the session's methods that are allowed in ``state``."""
    if state is _S.FINISHING:
        return []
    return [name for event, name in _CALLS.items() if (state, event) in TRANSITIONS]


def transitions_table() -> str:
    """Return the table of moves in Markdown, as it stands in the reference."""
    rows = ["| state | what happens | next state |", "|---|---|---|"]
    rows += [
        f"| {state.name} | {event.value} | {after.name} |"
        for (state, event), after in TRANSITIONS.items()
    ]
    return "\n".join(rows)
