"""One engine of a fleet as the fleet sees it: what it can be asked for, and what it then serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import attrs

from weightload.errors import EngineLostError, UsageError, WeightLoadError
from weightload.outcomes import Outcome, gather
from weightload.receipt import Receipt

__all__ = [
    "FleetReceipt",
    "Replica",
    "Standing",
    "Standings",
    "go_on",
    "replicas_of",
    "same_version",
    "standings_of",
    "values_of",
]

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

    def publish(self, version: Version | None) -> None:
        """Drop what was computed with the old weights, and say from now on that it has these.

        Weights without a version (``None``) leave what is said as it is.
        """

    def resume(self) -> None:
        """Compute again. Who is not told so has no complete weights, and must not."""


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """Return the value of each rank of an engine.

    Raises:
        WeightLoadError: a rank failed.
        ConnectionError: this is no answer of ranks.
    """
    found: Any = outcomes
    said = isinstance(found, list) and all(
        isinstance(one, dict) and ("value" in one or "error" in one) for one in found
    )
    if not found or not said:
        raise ConnectionError(f"An answer has an outcome for each rank, found {found!r}.")
    return gather(outcomes)


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
            ranks = values_of(outcomes)
            poison = next((rank["poison"] for rank in ranks if rank["poison"]), None)
            busy = any(rank["session"] is not None for rank in ranks)
            versions = {rank["version"] for rank in ranks}
        except Exception as error:
            return cls(state="lost", why=f"{type(error).__name__}: {error}")
        if poison is not None:
            return cls(state="refuses", why=poison)
        if busy:
            return cls(state="busy")
        if len(versions) > 1:
            return cls(state="refuses", why=f"its ranks have different versions, {versions}")
        return cls(state="serves", version=versions.pop())


Standings = dict[str, Standing]
"""Of the engines of a fleet, by their names."""


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


def replicas_of(replicas: Any) -> list[Replica]:
    """Return engines in a list.

    Raises:
        UsageError: these are something else.
    """
    every = list(replicas) if isinstance(replicas, Iterable) else [replicas]
    steps = ("call", "pause", "publish", "resume")
    for one in every:
        named = isinstance(getattr(one, "name", None), str)
        if not named or not all(callable(getattr(one, step, None)) for step in steps):
            raise UsageError(f"A fleet is made of engines (weightload.Replica), found {one!r}.")
    if not isinstance(replicas, Iterable):
        raise UsageError(f"A fleet is made of engines; put {replicas!r} into a list.")
    return every


def standings_of(found: dict[str, Any]) -> Standings:
    """Put what was raised into standings as well."""
    return {
        name: each if isinstance(each, Standing) else Standing.of(each)
        for name, each in found.items()
    }


def same_version(standings: Standings) -> list[Version | None]:
    """Return the one version of all that serve, in a list that is empty if there is no such."""
    versions = {each.version for each in standings.values() if each.state == "serves"}
    return list(versions) if len(versions) == 1 else []


def go_on(replica: Replica, standing: Standing, same: list[Version | None]) -> Standing:
    """Let an engine with complete weights compute again if they are the same as everybody's.

    It may have committed in an update that nobody brought to its end, and hold caches of the
    weights before: it drops them. Others stay paused.
    """
    if standing.state != "serves":
        return standing
    try:
        replica.pause()
    except EngineLostError:
        raise
    except WeightLoadError as error:
        return attrs.evolve(standing, why=f"it was left as it is, and not paused: {error}")
    if standing.version not in same:
        why = "it stays paused, because others have another version"
        return attrs.evolve(standing, state="refuses", why=why)
    replica.publish(standing.version)
    replica.resume()
    return standing
