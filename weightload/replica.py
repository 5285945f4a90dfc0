"""One engine of a fleet as the fleet sees it: what it can be asked for, and what it then serves."""

from __future__ import annotations

from typing import Any, Protocol

import attrs

from weightload.outcomes import Outcome, gather
from weightload.receipt import Receipt

__all__ = ["FleetReceipt", "Replica", "Standing"]

Version = str | int


class Replica(Protocol):
    """One engine of a fleet, however it is reached.

    Methods are called from threads, one call at a time. An exception says that the engine could
    not be reached, :class:`weightload.EngineLostError` that it never will be.

    Attributes:
        name: tells it from the others.
    """

    name: str

    def call(self, operation: str, **arguments: Any) -> list[Outcome]:
        """Do one of the worker's operations on every rank, and return the outcome of each."""

    def pause(self) -> None:
        """Compute nothing from now on; raise to refuse the update."""

    def publish(self, version: Version) -> None:
        """Drop what was computed with the old weights, and say from now on that it has these."""

    def resume(self) -> None:
        """Compute again. Who is not told so has no complete weights, and must not."""


@attrs.frozen(kw_only=True)
class Standing:
    """What one engine does after an update, or between two.

    Attributes:
        state: ``"serves"`` complete weights; ``"busy"``, so that it refuses, because a session is
            open on it; ``"refuses"``, because it has a mixture, or missed an update; ``"lost"``
            if it does not answer, so that it is not known.
        version: of the weights that it serves.
        new: whether these are the weights of this update.
        why: why it does not serve, or may not.
    """

    state: str
    version: Version | None = None
    new: bool = False
    why: str | None = None

    def __str__(self) -> str:
        which = "the new weights" if self.new else "the weights that it had"
        text = {
            "serves": f"serves {which} (version {self.version!r})",
            "busy": "refuses, because a session is open on it",
            "refuses": "refuses to serve",
            "lost": "is lost",
        }[self.state]
        return f"{text}: {self.why}" if self.why else text

    @classmethod
    def of(cls, outcomes: list[Outcome] | BaseException) -> Standing:
        """Read it from what an engine's ranks answered to ``status``, if they did."""
        try:
            if isinstance(outcomes, BaseException):
                raise outcomes
            ranks = gather(outcomes)
        except Exception as error:
            return cls(state="lost", why=f"{type(error).__name__}: {error}")
        poison = next((rank["poison"] for rank in ranks if rank["poison"]), None)
        if poison is not None:
            return cls(state="refuses", why=poison)
        if any(rank["session"] is not None for rank in ranks):
            return cls(state="busy")
        versions = {rank["version"] for rank in ranks}
        if len(versions) > 1:
            return cls(state="refuses", why=f"its ranks have different versions, {versions}")
        return cls(state="serves", version=versions.pop())


@attrs.frozen(kw_only=True)
class FleetReceipt:
    """The result of an update that every engine has finished.

    Attributes:
        version: what all of them serve.
        before: the version that each had before, by its name.
        replicas: the receipts of the ranks of each, by its name.
        seconds: from the first call to the last.
    """

    version: Version
    before: dict[str, Version | None]
    replicas: dict[str, list[Receipt]]
    seconds: float
