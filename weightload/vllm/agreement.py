"""Ranks of an engine do something together, or none of them goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightload.vllm import compat
from weightload.vllm.worker import gather, outcome_of

__all__ = ["agree"]


def agree(rank: int, size: int, action: Callable[[list[Any]], object]) -> bool:
    """Do something that every rank does, and say whether all of them could.

    Every rank must call this. Where one failed, each aborts its session, and the last rank
    raises that one's error: an executor that gets an exception from an earlier rank leaves the
    answers of later ones unread, for the next call to stumble over.

    Args:
        rank: of this worker in its engine.
        size: how many ranks the engine has.
        action: is called with a list, and appends the session that it works on.

    Returns:
        Whether every rank could; ``False`` only on ranks before the last.

    Raises:
        WeightLoadError: what the first rank that failed said, on the last rank.
    """
    sessions: list[Any] = []
    mine = outcome_of(rank, lambda: action(sessions))
    outcomes = [mine]
    if size > 1:
        mine.pop("exception", None)
        outcomes = compat.gather_from_ranks(mine)
    failed = [outcome for outcome in outcomes if "error" in outcome]
    for session in sessions if failed else ():
        if session.state.open:
            session.abort(failed[0]["error"]["message"])
    if rank == size - 1:
        gather(outcomes)
    return not failed
