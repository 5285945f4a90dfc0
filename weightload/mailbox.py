"""Reaches an engine of another process through a store of ``torch.distributed``.

Programs under ``torchrun`` have a store (``TCPStore``, ``FileStore``) that all of their processes
see. One of them holds the fleet, the others serve their engines, on whatever machine they are.
No collective is used, since one lost process would hold up all others in it.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import uuid
from typing import Any

from weightload.errors import WeightLoadError
from weightload.outcomes import Outcome
from weightload.replica import Replica, Version

__all__ = ["StoreReplica", "serve_replica"]

_TICK = 0.005
"""Seconds between two looks into the store; it is polled, because a wait would hold its lock."""

_PATIENCE = 5.0
"""Seconds between the number of a question and the question, before it is held to never come."""

_ending = threading.Event()
"""Set when the interpreter is about to end."""
_waiting: set[int] = set()
"""The threads that look into a store."""


@atexit.register
def _end_waits() -> None:
    """Let threads leave the store: one that is in its C++ code then takes the process down."""
    _ending.set()
    deadline = time.monotonic() + 1.0
    while _waiting and time.monotonic() < deadline:
        time.sleep(_TICK)


class StoreReplica:
    """An engine whose process runs :func:`serve_replica` under the same name.

    Args:
        name: tells it from the others of the fleet.
        store: a ``torch.distributed.Store`` that both processes see.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, name: str, store: Any, *, timeout: float = 3600.0) -> None:
        self.name = name
        self._store = store
        self._timeout = timeout

    def call(self, operation: str, **arguments: Any) -> list[Outcome]:
        """See :class:`weightload.Replica`, also for the other methods."""
        outcomes: list[Outcome] = self._ask("call", operation=operation, **arguments)
        return outcomes

    def pause(self) -> None:
        """Compute nothing from now on."""
        self._ask("pause")

    def publish(self, version: Version | None) -> None:
        """Drop what was computed with the old weights, and take the version over."""
        self._ask("publish", version=version)

    def resume(self) -> None:
        """Compute again."""
        self._ask("resume")

    def _ask(self, step: str, **arguments: Any) -> Any:
        deadline = time.monotonic() + self._timeout
        self._wait(_key(self.name, "serves"), deadline, f"{self.name!r} is not there for {step!r}")
        text = json.dumps([step, arguments])
        number = self._store.add(_key(self.name, "asked"), 1)
        self._store.set(_key(self.name, "ask", number), text)
        answer = _key(self.name, "answer", number)
        self._wait(answer, deadline, f"{self.name!r} has not answered {step!r}")
        found = json.loads(self._store.get(answer))
        self._store.delete_key(answer)
        if "raised" in found:
            raise WeightLoadError.from_plain(found["raised"])
        return found["value"]

    def _wait(self, key: str, deadline: float, what: str) -> None:
        _waiting.add(threading.get_ident())
        try:
            while not self._store.check([key]):
                if time.monotonic() > deadline or _ending.wait(_TICK):
                    raise TimeoutError(what)
        finally:
            _waiting.discard(threading.get_ident())


def serve_replica(replica: Replica, store: Any, *, stop: threading.Event | None = None) -> None:
    """Do what a :class:`StoreReplica` of this name asks for, until ``stop`` is set.

    What was asked before is left alone: it was meant for a process that is gone. A question that
    is announced and does not come is left out after some seconds: who asked has ended.

    Args:
        replica: the engine of this process, such as a :class:`weightload.vllm.LocalReplica`.
        store: what both processes see.
        stop: ends it; without it, it goes on for ever.
    """
    number = store.add(_key(replica.name, "asked"), 0) + 1
    serves, mine = _key(replica.name, "serves"), uuid.uuid4().hex
    store.set(serves, mine)
    _waiting.add(threading.get_ident())
    announced_at = None
    try:
        while not _ending.is_set() and (stop is None or not stop.is_set()):
            ask = _key(replica.name, "ask", number)
            if store.check([ask]):
                text = store.get(ask)
                store.delete_key(ask)
                store.set(_key(replica.name, "answer", number), _answer(replica, text))
                number, announced_at = number + 1, None
                continue
            announced = store.add(_key(replica.name, "asked"), 0) >= number
            announced_at = (announced_at or time.monotonic()) if announced else None
            if announced_at and time.monotonic() - announced_at > _PATIENCE:
                number, announced_at = number + 1, None
            time.sleep(_TICK)
    finally:
        # Another one may have taken its place.
        if store.check([serves]) and store.get(serves).decode() == mine:
            store.delete_key(serves)
        _waiting.discard(threading.get_ident())


def _answer(replica: Replica, asked: bytes) -> str:
    try:
        step, arguments = json.loads(asked)
        return json.dumps({"value": _plain(getattr(replica, step)(**arguments))})
    except Exception as error:
        known = error if isinstance(error, WeightLoadError) else None
        text = f"{type(error).__name__}: {error}"
        return json.dumps({"raised": (known or WeightLoadError(text)).to_plain()}, default=repr)


def _plain(value: Any) -> Any:
    """Leave the exception objects of outcomes out; they are there as plain data too."""
    if not isinstance(value, list):
        return value
    return [{key: what for key, what in one.items() if key != "exception"} for one in value]


def _key(name: str, *parts: Any) -> str:
    return "/".join(map(str, ("weightload", name, *parts)))
