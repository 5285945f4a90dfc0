"""A call that nobody waits for without a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weightload.errors import TransportError

__all__ = ["Pending"]


class Pending:
    """A call that is made in a thread of its own, so that nobody waits for it for ever.

    Args:
        what: what is called, for messages.
        call: the call.
    """

    def __init__(self, what: str, call: Callable[[], Any]) -> None:
        self._what = what
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="weightload-trainer", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether it has returned or raised."""
        return self._done.is_set()

    def wait(self, deadline: float) -> bool:
        """Wait until it is done, whatever it came to; return whether it is, after the deadline."""
        return self._done.wait(deadline)

    def result(self, deadline: float) -> Any:
        """Return what the call returned, or raise what it raised.

        Raises:
            TransportError: it is not done after ``deadline`` seconds.
        """
        if not self.wait(deadline):
            raise TransportError(
                f"The engine did not answer {self._what} within {deadline:g} s; it, or a rank of "
                f"it, hangs or has ended.",
                model_intact=False,
            )
        if self._error is not None:
            raise self._error
        return self._value
