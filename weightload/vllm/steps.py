"""What is done to an engine as steps: calls that the caller makes, and whose results come back.

So the same steps are done with an engine in this process and with one that is awaited.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from typing import Any

import attrs

from weightload.errors import UsageError
from weightload.vllm import caches

__all__ = ["Steps", "Turn", "dropping", "naming"]

Steps = Generator[Callable[[], Any], Any, Any]
"""Yields calls and is sent what they gave."""


@attrs.frozen(kw_only=True)
class Turn:
    """What the last call gave, to go on with."""

    value: Any = None
    error: BaseException | None = None

    def advance(self, steps: Steps) -> Callable[[], Any]:
        """Return the next call."""
        if self.error is not None:
            return steps.throw(self.error)
        return steps.send(self.value)


def dropping(front: Any, engine: Any, names: Iterable[str]) -> Steps:
    """Drop what the engine's own side has computed with the old weights.

    Args:
        front: an ``LLM`` or ``AsyncLLM``.
        engine: what is behind it.
        names: which caches, of :data:`weightload.vllm.caches.ALL`.

    Raises:
        UsageError: requests hold what is to be dropped.
    """
    for reset in caches.engine_resets(front, engine, names):
        done = yield reset
        if done is False:
            # Requests hold blocks; they are computed again under the new weights.
            again: Any = reset
            done = yield functools.partial(again, reset_running_requests=True)
        if done is False:
            raise UsageError(
                f"{reset.__name__}() could not drop what was computed with the old weights, "
                f"because requests hold it. Abort them, and reload again."
            )


def naming(engine: Any, version: str | int) -> Steps:
    """Let the engine say that it has this version, if it has a place for that."""
    if hasattr(engine, "set_weight_version"):
        yield functools.partial(engine.set_weight_version, str(version))
