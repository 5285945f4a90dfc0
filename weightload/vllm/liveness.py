"""Notices that a process of an engine has ended, so that nobody waits for its answer.

vLLM watches its workers and takes an engine down when one of them ends. But a client whose core is
in another process waits for every answer without a limit, and a core that goes down leaves the
calls unanswered that it has not begun. So a call is made in a thread of its own, and the caller
looks after the processes while it waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

from weightload.errors import EngineLostError
from weightload.vllm import compat

__all__ = ["Liveness"]

T = TypeVar("T")

_TICK = 0.1
"""Seconds between two looks at the processes."""

_GRACE = 1.0
"""Seconds after a failed call in which the end of a process is still taken for the reason."""


class Liveness:
    """Makes calls to one engine, and gives up when a process that has to answer has ended.

    Args:
        core: the engine's client of its core, such as ``llm.llm_engine.engine_core``.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._alone = not hasattr(core, "resources") and not compat.engine_processes(core)
        self._under_way: _Call[Any] | None = None

    def call(self, make: Callable[[], T]) -> T:
        """Make a blocking call and return its answer.

        What interrupts the wait, such as KeyboardInterrupt, leaves the call under way. The next
        call waits for its end, because answers come in the order of the calls.

        Raises:
            EngineLostError: a process has ended, before the call or since.
        """
        if self._alone:
            return make()
        if self._under_way is not None:
            self._join(self._under_way)
        self._require()
        call = self._under_way = _Call(make)
        call.start()
        self._join(call)
        if isinstance(call.error, Exception):
            for _ in self._looks(call.error):
                time.sleep(_TICK)
        return call.result()

    async def wait(self, answer: Awaitable[T]) -> T:
        """Wait for what an async engine answers.

        Raises:
            EngineLostError: a process has ended, before the call or since.
        """
        task = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait({task}, timeout=_TICK))[0]:
                self._require()
        finally:
            task.cancel()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            for _ in self._looks(error):
                await asyncio.sleep(_TICK)
        return task.result()

    def _join(self, call: _Call[Any]) -> None:
        while call.ident is not None and not call.ended.wait(_TICK):
            self._require()
        self._under_way = None

    def _looks(self, error: Exception) -> Iterator[None]:
        """Look again and again whether a call failed because a process has ended."""
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            self._require(error)
            yield

    def _require(self, error: Exception | None = None) -> None:
        reason = compat.engine_is_down(self._core)
        if reason is None and error is not None and compat.says_engine_is_down(error):
            reason = f"it says {str(error)!r}"
        if reason is not None:
            raise EngineLostError(
                f"The engine is lost: {reason}. No reload can repair it; start a new engine.",
                model_intact=False,
            ) from error


class _Call(threading.Thread, Generic[T]):
    """A call that is waited for elsewhere; it ends with the process at the latest.

    A ``join()`` that is interrupted takes the thread for ended in some versions of Python, so there
    is an event.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        super().__init__(name="weightload-call", daemon=True)
        self._make = make
        self._value: list[T] = []
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Make the call."""
        try:
            self._value.append(self._make())
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def result(self) -> T:
        """Return the answer, or raise what the call raised."""
        if self.error is not None:
            raise self.error
        return self._value[0]
