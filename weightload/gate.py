"""Lets one call at a time into a session, and only calls that its state allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightload.errors import InvalidTransitionError, SessionMisnestedError, UsageError
from weightload.states import Event, SessionState, allowed_calls, next_state

__all__ = ["Gate"]


class Gate:
    """The state of one session, and who is inside.

    Args:
        number: the session's number, for messages.

    Attributes:
        state: what has happened so far.
    """

    def __init__(self, number: int) -> None:
        self.state = SessionState.NEW
        self._number = number
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextmanager
    def call(self, name: str, event: Event | None, *, inside: bool = False) -> Iterator[None]:
        """Allow one public call, or say why not and what is allowed.

        Args:
            name: of the call, for messages.
            event: what it does to the state; ``None`` for calls that only need an open session.
            inside: whether it may be made from inside another call, such as from a loader.

        Raises:
            InvalidTransitionError: the state does not allow it.
            SessionMisnestedError: it was made from inside another call.
            UsageError: another thread is inside.
        """
        mine = threading.get_ident()
        if not self._lock.acquire(blocking=False):
            if self._thread != mine:
                raise UsageError(
                    f"Another thread is inside a call of session {self._number}; a session is "
                    f"used by one thread at a time."
                )
            if not inside:
                raise SessionMisnestedError(
                    f"{name}() was called from inside another call of session {self._number}, "
                    f"such as from its source or a hook. Return from it first."
                )
            self._require(name, event)
            yield
            return
        self._thread = mine
        try:
            self._require(name, event)
            yield
        finally:
            self._thread = None
            self._lock.release()

    def move(self, event: Event) -> None:
        """Move to the state that ``event`` leads to.

        Raises:
            InvalidTransitionError: there is no such move.
        """
        state = next_state(self.state, event)
        if state is None:
            raise InvalidTransitionError(
                f"Session {self._number} is {self.state.value} and has no move for {event.value}."
            )
        self.state = state

    def _require(self, name: str, event: Event | None) -> None:
        allowed = (
            self.state in (SessionState.PREPARED, SessionState.LOADING)
            if event is None
            else next_state(self.state, event) is not None
        )
        if allowed:
            return
        calls = allowed_calls(self.state)
        advice = (
            f"allowed now: {', '.join(calls)}"
            if calls
            else "a session is for single use; open a new one"
        )
        raise InvalidTransitionError(
            f"{name}() is not allowed in session {self._number}, which is {self.state.value}; {advice}.",
            state=self.state.value,
            call=name,
            allowed=calls,
        )
