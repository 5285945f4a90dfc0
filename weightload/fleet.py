"""Several engines are updated as one: all go to the new weights, or it is known who has which.

Two phases. Every rank of every engine stages the new weights and *seals*: from then on nothing
that can be foreseen stands in the way. When all have said so, and have received the same, the
decision is taken: commit. A failure before it takes all back, and everybody serves what it served.
After it there is no way back: who can go on does, and who cannot must not serve. So an engine
serves the old weights, or the new ones, or refuses, and none goes on with old weights beside
others with new ones.

The decision lives in the fleet object. If its process dies before it has told the engines, they
stay sealed, and refuse; :meth:`Fleet.abort` of the next one lets them go back.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import attrs

from weightload.calling import Lane, ask_all
from weightload.errors import (
    FleetError,
    UsageError,
    VerificationError,
    WeightLoadError,
)
from weightload.receipt import Receipt
from weightload.replica import (
    FleetReceipt,
    Replica,
    Standing,
    Standings,
    Version,
    go_on,
    replicas_of,
    same_version,
    standings_of,
    values_of,
)
from weightload.scope import Scope
from weightload.sending import Weights, is_folder, operations

__all__ = ["Fleet"]


class Fleet:
    """Engines that are updated together.

    Args:
        replicas: the engines. One that was started anew takes the place of the lost one in a new
            fleet; whatever weights it has, an update of all weights brings it to those of the
            others.
        deadline: seconds within which all engines must have done one step of an update.
        bucket_bytes: how much of the weights is handed over at once, to engines of this machine.

    Attributes:
        version: what all of them were last brought to; ``None`` before, and after an update that
            did not reach all.
    """

    def __init__(
        self,
        replicas: Iterable[Replica],
        *,
        deadline: float = 600.0,
        bucket_bytes: int | None = None,
    ) -> None:
        every = replicas_of(replicas)
        self._replicas = {replica.name: replica for replica in every}
        if not every or len(self._replicas) != len(every):
            raise UsageError(
                f"A fleet has engines with different names, found "
                f"{[replica.name for replica in every]}."
            )
        self.version: Version | None = None
        self.deadline = deadline
        if bucket_bytes is not None and (type(bucket_bytes) is not int or bucket_bytes <= 0):
            raise UsageError(f"bucket_bytes is a number of bytes, found {bucket_bytes!r}.")
        self._bucket_bytes = bucket_bytes
        self._lanes = {name: Lane(name) for name in self._replicas}
        self._turn = threading.Lock()
        self._unsettled: dict[str, _Unsettled] = {}
        self._id = uuid.uuid4().hex
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------ for users

    @property
    def deadline(self) -> float:
        """As above; may be changed between updates."""
        return self._deadline

    @deadline.setter
    def deadline(self, seconds: float) -> None:
        if type(seconds) not in (int, float) or not seconds > 0:
            raise UsageError(f"deadline is a number of seconds, found {seconds!r}.")
        self._deadline = seconds

    def update(
        self,
        weights: Weights,
        *,
        version: Version,
        commit: str = "atomic",
        scope: Scope | None = None,
        check_finite: bool = False,
        strict: bool | None = None,
        verify: str | None = None,
        staging_budget: int | None = None,
        plans: bool | None = None,
        draft: str | None = None,
    ) -> FleetReceipt:
        """Bring every engine to these weights, or none.

        Engines do not compute meanwhile, and go on afterwards if their weights are complete.

        Args:
            weights: a checkpoint folder that every engine can read; or, for engines on this
                machine, named tensors, as for :func:`weightload.vllm.reload`.
            version: what the weights are called, such as a step number.
            commit: ``"atomic"`` lets every engine go back until all have agreed. ``"stream"``
                needs less memory, and leaves engines that refuse when something goes wrong.
            scope: as for :class:`weightload.WeightLoadSession`, also the options after it. If not
                everything is brought, all engines must have the same version before.
            check_finite: see there.
            strict: see there.
            verify: see there; then engines also compare digests of what they received.
            staging_budget: see there.
            plans: see there.
            draft: as for :func:`weightload.vllm.reload`.

        Raises:
            FleetError: an engine could not follow. If that came before the decision, the others
                serve what they served; if after it, they serve the new weights; the error says
                which, for each.
            UsageError: another update of this fleet is under way, or an argument is no such.

        What an iterable raises reaches the caller as it is, with the same effect.
        """
        _check(version, scope, draft)
        options = {
            "version": version,
            "commit": commit,
            "scope": None if scope is None else scope.to_plain(),
            "check_finite": check_finite,
            "strict": strict,
            "verify": verify,
            "staging_budget": staging_budget,
            "plans": plans,
            "draft": draft,
        }
        began = time.monotonic()
        with self._alone():
            opener = f"{self._id}/{next(self._numbers)}"
            before = self._before(whole=scope is None or scope.is_full)
            try:
                self._all("pause", lambda replica: replica.pause())
                self._operate("start", opener=opener, **options)
                self._load(weights, check_finite, opener)
                sealed = self._operate("seal", opener=opener)
                _compare(sealed, everywhere=not is_folder(weights))
            except BaseException as error:
                self._take_back(error, opener, version, before)
                raise
            self.version = None
            try:
                receipts = self._bring_forward(opener, version)
            except BaseException as error:
                if not isinstance(error, FleetError):
                    error.add_note(
                        f"weightload: version {version!r} had been agreed upon; ask status() who "
                        f"has it."
                    )
                raise
            self.version = version
        return FleetReceipt(
            version=version,
            before={name: standing.version for name, standing in before.items()},
            replicas=receipts,
            seconds=time.monotonic() - began,
        )

    def status(self) -> Standings:
        """Ask every engine what it serves."""
        with self._alone():
            return self._survey()

    def abort(self, cause: str = "aborted by the caller") -> Standings:
        """End what an earlier fleet has left open on any engine; return what each has then.

        Engines whose weights are complete are paused, drop what they had computed, and compute
        again, if all of these have the same version. Otherwise the earlier fleet may have been
        lost while they committed: they stay paused, and an update of all weights makes them one
        again. An engine that refuses to pause is left as it is.
        """
        with self._alone():
            self._insist("abort", lambda replica: replica.call("abort", cause=cause))
            standings = self._survey()
            same = same_version(standings)
            found = self._insist(
                "resume", lambda replica: go_on(replica, standings[replica.name], same)
            )
            for name, each in found.items():
                if isinstance(each, Standing):
                    standings[name] = each
                elif standings[name].state == "serves":
                    why = f"it may have stayed paused: {each}"
                    standings[name] = attrs.evolve(standings[name], why=why)
            return standings

    # ------------------------------------------------------------------ before the decision

    def _before(self, *, whole: bool) -> Standings:
        """Find out whether all can take part.

        Raises:
            FleetError: one cannot, and nothing was done.
        """
        standings = self._survey()
        for name, standing in standings.items():
            if standing.state in ("lost", "busy"):
                raise _error(
                    f"{name!r} cannot take part, and nothing was begun. Leave it out, or start "
                    f"it anew; Fleet.abort() ends a session that was left behind",
                    standings,
                )
        if not whole and len({(each.state, each.version) for each in standings.values()}) > 1:
            raise _error(
                "Only some of the weights were to be brought to engines that do not all have the "
                "same now, and nothing was begun. Bring everything",
                standings,
            )
        return standings

    def _survey(self) -> Standings:
        """Ask every engine what it serves, after telling it what it could not be told before.

        One that missed a decision is marked, so that nobody sets it going beside the others.
        """
        unsettled = dict(self._unsettled)

        def look(replica: Replica) -> Standing:
            left = unsettled.get(replica.name)
            if left is not None:
                values_of(replica.call("abort", cause=left.cause, opener=left.opener))
                if left.missed:
                    values_of(replica.call("poison", cause=left.cause))
            return Standing.of(replica.call("status"))

        standings = standings_of(self._insist("status", look))
        for name, standing in standings.items():
            if standing.state != "lost":
                self._unsettled.pop(name, None)
        return standings

    def _load(self, weights: Weights, check_finite: bool, opener: str) -> None:
        sent = operations(weights, check_finite=check_finite, bucket_bytes=self._bucket_bytes)
        with closing(sent):
            for operation, arguments in sent:
                self._operate(operation, opener=opener, **arguments)

    def _take_back(
        self, error: BaseException, opener: str, version: Version, before: Standings
    ) -> None:
        """Take every engine back to what it served.

        Raises:
            FleetError: from the error of an engine. Any other error gets a note instead.
        """
        of_engine = isinstance(error, _ReplicaFailed)
        cause = error.__cause__ if of_engine else error
        standings = self._let_go(f"{type(cause).__name__}: {cause}", opener, before)
        if any(each.state != "serves" for each in standings.values()):
            self.version = None
        if of_engine:
            raise _error(f"Version {version!r} was taken back: {cause}", standings) from cause
        error.add_note(f"weightload: version {version!r} was taken back. {_listed(standings)}.")

    def _let_go(self, cause: str, opener: str, before: Standings) -> Standings:
        """End the open session of each engine, and let those go on that served the same before.

        One that is still at something does that when it is done, whenever that is: nothing new
        can begin without it.
        """
        same = same_version(before)

        def settle(replica: Replica) -> Standing:
            replica.call("abort", cause=cause, opener=opener)
            return go_on(replica, Standing.of(replica.call("status")), same)

        standings = standings_of(self._insist("abort", settle))
        for name, standing in standings.items():
            if standing.state in ("lost", "busy"):
                self._unsettled[name] = _Unsettled(opener, cause, missed=False)
        return standings

    # ------------------------------------------------------------------ after the decision

    def _bring_forward(self, opener: str, version: Version) -> dict[str, list[Receipt]]:
        """Let every engine commit, and those that did compute again.

        Raises:
            FleetError: not all of them could.
        """
        failed: dict[str, BaseException] = {}

        def ask(what: str, make: Callable[[Replica], Any], only: Iterable[str]) -> dict[str, Any]:
            found = self._insist(what, make, only)
            wrong = {name: each for name, each in found.items() if isinstance(each, BaseException)}
            failed.update(wrong)
            return {name: each for name, each in found.items() if name not in wrong}

        def finish(replica: Replica) -> list[Receipt]:
            outcomes = replica.call("finish", opener=opener)
            return [Receipt.from_plain(plain) for plain in values_of(outcomes)]

        receipts = ask("finish", finish, self._replicas)
        published = ask("publish", lambda replica: replica.publish(version), receipts)
        for name, error in failed.items():
            cause = f"version {version!r} was missed: {error}"
            self._unsettled[name] = _Unsettled(opener, cause, missed=True)
        ask("resume", lambda replica: replica.resume(), published)
        if not failed:
            return {name: receipts[name] for name in self._replicas}
        standings = self._survey()
        for name, standing in standings.items():
            if standing.state == "serves":
                why = f"it may have stayed paused: {failed[name]}" if name in failed else None
                standings[name] = attrs.evolve(standing, new=True, why=why)
        names = ", ".join(map(repr, failed))
        first = next(iter(failed.values()))
        raise _error(
            f"Version {version!r} was agreed upon, and missed by {names}: {first}", standings
        ) from first

    # ------------------------------------------------------------------ asking

    def _ask(
        self, what: str, make: Callable[[Replica], Any], only: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Return, for each engine, what the call gave or raised."""
        lanes = [self._lanes[name] for name in (self._replicas if only is None else only)]
        return ask_all(
            lanes, lambda name: make(self._replicas[name]), what=what, seconds=self.deadline
        )

    def _insist(
        self, what: str, make: Callable[[Replica], Any], only: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Ask for what may be done twice, and once more if the call or its answer got lost."""
        found = self._ask(what, make, only)
        again = [
            name
            for name, each in found.items()
            if isinstance(each, Exception)
            and not isinstance(each, WeightLoadError)
            and not self._lanes[name].busy
        ]
        for name, each in self._ask(what, make, again).items():
            if not isinstance(each, BaseException):
                found[name] = each
        return found

    def _all(self, what: str, make: Callable[[Replica], Any]) -> dict[str, Any]:
        """Return, for each engine, what the call gave.

        Raises:
            _ReplicaFailed: from the error of the first that failed, with notes on the others.
        """
        found = self._ask(what, make)
        failed = {name: each for name, each in found.items() if isinstance(each, BaseException)}
        if not failed:
            return found
        (name, first), *others = failed.items()
        if isinstance(first, WeightLoadError):
            first.facts.setdefault("replica", name)
        first.add_note(f"weightload: raised by {name!r} in step {what!r}.")
        for other, error in others:
            first.add_note(f"weightload: {other!r} too: {type(error).__name__}: {error}")
        raise _ReplicaFailed from first

    def _operate(self, operation: str, **arguments: Any) -> dict[str, list[Any]]:
        return self._all(operation, lambda replica: values_of(replica.call(operation, **arguments)))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._turn.acquire(blocking=False):
            raise UsageError("Another update of this fleet is under way; wait for its end.")
        try:
            yield
        finally:
            self._turn.release()


class _ReplicaFailed(Exception):
    """An engine could not do what it was asked for; its error is the cause."""


@attrs.frozen
class _Unsettled:
    """What is to be said to an engine that could not be asked when an update ended.

    Attributes:
        opener: of the session that may be open on it.
        cause: why that has to end.
        missed: whether others have the weights that it was to get.
    """

    opener: str
    cause: str
    missed: bool = attrs.field(kw_only=True)


def _check(version: Any, scope: Any, draft: Any) -> None:
    if not isinstance(version, str | int) or isinstance(version, bool):
        raise UsageError(f"version is a string or a number, found {version!r}.")
    if not isinstance(scope, Scope | None):
        raise UsageError(f"scope is a weightload.Scope, found {type(scope).__name__}.")
    if not isinstance(draft, str | None):
        raise UsageError(f"draft is the beginning of names, found {draft!r}.")


def _compare(sealed: dict[str, list[Any]], *, everywhere: bool) -> None:
    """Compare what was received: by all ranks if all were sent the same, else rank by rank."""
    if everywhere:
        columns = [list(itertools.chain(*sealed.values()))]
    elif len({len(ranks) for ranks in sealed.values()}) == 1:
        columns = [list(column) for column in zip(*sealed.values(), strict=True)]
    else:
        return
    if any(one != column[0] for column in columns for one in column):
        raise _ReplicaFailed from VerificationError(
            f"Engines received different tensors: {sealed}."
        )


def _listed(standings: Standings) -> str:
    return "; ".join(f"{name!r} {standing}" for name, standing in standings.items())


def _error(what: str, standings: Standings) -> FleetError:
    return FleetError(
        f"{what.rstrip('.')}. {_listed(standings)}.",
        model_intact=all(each.state == "serves" and not each.new for each in standings.values()),
        replicas={name: attrs.asdict(each) for name, each in standings.items()},
    )
