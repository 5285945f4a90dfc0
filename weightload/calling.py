"""Makes calls to many others at once, to each in order, and waits no longer than it was told to."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

__all__ = ["Lane", "ask_all"]

_MOMENT = 0.1
"""Seconds that a call which is about to end gets to do so."""


class Lane:
    """Calls to one of them, one after another, in a thread that lives while there are any.

    A call that is not waited for any longer goes on, and what is asked for meanwhile is done after
    it: nothing overtakes. The thread does not keep the process alive.

    Args:
        name: what the other is called.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = False

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._running

    def ask(self, call: Callable[[], Any]) -> Future[Any]:
        """Make ``call`` after all those that were asked for before."""
        answer: Future[Any] = Future()
        with self._lock:
            self._calls.append((answer, call))
            if not self._running:
                self._running = True
                threading.Thread(
                    target=self._work, name=f"weightload-{self.name}", daemon=True
                ).start()
        return answer

    def _work(self) -> None:
        last = False
        while not last:
            with self._lock:
                answer, call = self._calls.popleft()
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:
                error = raised
            # Who waits for the last answer must find the lane free.
            with self._lock:
                last = not self._calls
                self._running = not last
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)


def ask_all(
    lanes: Iterable[Lane], make: Callable[[str], Any], *, what: str, seconds: float
) -> dict[str, Any]:
    """Call ``make(name)`` on every lane at once; return what each gave, or the exception.

    A lane on which an earlier call is still under way is asked too, and waited for a moment only.

    Args:
        lanes: whom to ask.
        make: what to do for one of them.
        what: what that is, for the message.
        seconds: how long to wait for all of them together.

    Returns:
        By name. Who did not answer in time has a ``TimeoutError``.
    """
    late: dict[str, bool] = {}
    answers: dict[str, Future[Any]] = {}
    for lane in lanes:
        late[lane.name] = lane.busy
        answers[lane.name] = lane.ask(lambda name=lane.name: make(name))  # type: ignore[misc]
    began = time.monotonic()
    wait([answer for name, answer in answers.items() if not late[name]], timeout=seconds)
    wait([answer for name, answer in answers.items() if late[name]], timeout=min(seconds, _MOMENT))
    found: dict[str, Any] = {}
    for name, answer in answers.items():
        if answer.done():
            found[name] = answer.exception() or answer.result()
        elif late[name]:
            found[name] = TimeoutError(f"{what} waits for an earlier call, which has no answer yet")
        else:
            waited = time.monotonic() - began
            found[name] = TimeoutError(f"{what} had no answer within {waited:.1f} s")
    return found
