"""What an operation on one rank came to, as plain data that any transport takes.

An *outcome* has the number of the rank, and either the value or an error. Operations hand outcomes
over and raise nothing: an executor that gets an exception from one rank stops to listen to the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from weightload.errors import WeightLoadError

__all__ = ["Outcome", "gather", "outcome_of"]

Outcome = dict[str, Any]


def outcome_of(rank: int, action: Callable[[], Any]) -> Outcome:
    """Return what ``action`` returned or raised, as an outcome of ``rank``."""
    try:
        return {"rank": rank, "value": action()}
    except Exception as error:
        known = error if isinstance(error, WeightLoadError) else _foreign(error)
        return {"rank": rank, "error": known.to_plain(), "exception": error}


def _foreign(error: Exception) -> WeightLoadError:
    known = WeightLoadError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        known.add_note(note)
    return known


def gather(outcomes: Iterable[Outcome]) -> list[Any]:
    """Return the value of each rank.

    Raises:
        WeightLoadError: the first rank that failed, with a note for every other.
    """
    outcomes = list(outcomes)
    failed = [outcome for outcome in outcomes if "error" in outcome]
    if not failed:
        return [outcome["value"] for outcome in outcomes]
    first = failed[0]
    error: BaseException = first.get("exception") or WeightLoadError.from_plain(first["error"])
    if isinstance(error, WeightLoadError):
        error.facts.setdefault("rank", first["rank"])
    if len(outcomes) > 1:
        error.add_note(f"weightload: raised on rank {first['rank']} of {len(outcomes)}.")
    for other in failed[1:]:
        error.add_note(f"weightload: rank {other['rank']} too: {other['error']['message']}")
    raise error
