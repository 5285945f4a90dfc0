"""Makes the receipt of a session that has ended."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

import attrs

from weightload.board import Board
from weightload.entries import Counts
from weightload.errors import (
    DuplicateWeightError,
    IncompleteLoadError,
    UnexpectedWeightError,
    WeightLoadError,
)
from weightload.intake import Intake
from weightload.progress import Progress
from weightload.quick import Quick
from weightload.receipt import Names, Receipt
from weightload.scope import Scope
from weightload.states import SessionState

__all__ = ["make_receipt"]

_SHOWN = 10


def make_receipt(
    *,
    session: int,
    kind: str,
    state: SessionState,
    version: str | int | None,
    commit: str,
    scope: Scope,
    intake: Intake,
    board: Board | None,
    quick: Quick | None,
    progress: Progress,
    cause: str | None,
    error: BaseException | None,
) -> Receipt:
    """Gather what the parts of a session know into plain data."""
    seen = intake.seen.items()
    verification = intake.verification
    verified = None
    if verification is not None:
        verified = {
            "mode": verification.mode,
            "tensors": verification.tensors,
            "units": verification.units,
            "nbytes": verification.nbytes,
            "digest": verification.digest,
        }
    kept = board.kept if board is not None else []
    counts = Counts() if board is None else board.counts()
    consumed = None
    skipped: Collection[str] = ()
    if quick is not None:
        counts += quick.counts()
        others = intake.seen.keys() - quick.part.needed
        new = any(map(attrgetter("consumed"), map(intake.seen.__getitem__, others)))
        if quick.complete and scope.is_full and not new:
            consumed, skipped = quick.part.consumed, others
    if consumed is None:
        skipped = [name for name, fact in seen if not fact.consumed]
    return Receipt(
        session=session,
        kind=kind,
        outcome=state.value,
        version=version,
        commit=commit,
        model_intact=state is not SessionState.POISONED,
        cause=cause,
        verdict=_verdict(state, version, scope, kept),
        scope=scope.to_plain(),
        consumed=consumed or Names.of([name for name, fact in seen if fact.consumed]),
        skipped=Names.of(skipped),
        missing=_named(error, IncompleteLoadError, kept),
        unexpected=_named(error, UnexpectedWeightError, sorted(intake.dropped)),
        duplicate=_named(error, DuplicateWeightError, []),
        bytes_received=intake.nbytes,
        bytes_copied=intake.copied,
        casts=len(intake.casts),
        moved=board.moved[:_SHOWN] if board is not None else [],
        verified=verified,
        seconds={**progress.seconds, **({"source": intake.waited} if intake.waited else {})},
        blocked_seconds=progress.dirty_seconds,
        layer_seconds=dict(progress.layer_seconds),
        **attrs.asdict(counts),
    )


def _named(error: BaseException | None, kind: type[WeightLoadError], otherwise: list[str]) -> Names:
    """Return the names that an error is about, if it is of that kind."""
    if not isinstance(error, kind):
        return Names.of(otherwise)
    facts = error.facts
    names = facts.get("missing") or facts.get("names") or [facts.get("name")]
    known = [str(name) for name in names if name is not None]
    return Names.of(known, facts.get("missing_count"))


def _verdict(state: SessionState, version: str | int | None, scope: Scope, kept: list[str]) -> str:
    if state is SessionState.FINISHED:
        what = "what a fresh load of the sent weights gives"
        if not scope.is_full or kept:
            what = "what it was, with the sent weights in their places"
        return f"The model serves version {version!r}: it is {what}."
    if state is SessionState.ABORTED:
        return "The model computes what it computed before; no live byte was written."
    return "The model is poisoned and must not be used."
