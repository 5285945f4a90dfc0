"""What a commit does to one object: which values are copied, what is put back where."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from weightload.derived import Reconciliation
from weightload.record import MISSING, SECTIONS, ObjectState
from weightload.storage import describe_change

__all__ = ["CommitCount", "OwnerPlan", "plan_owner"]


@attrs.define
class CommitCount:
    """What a commit did."""

    nbytes: int = 0
    derived: int = 0
    moved: int = 0


_STRUCTURE = frozenset((*SECTIONS, "_modules"))
"""Attributes of a module that are no values of their own."""
_Put = tuple[dict[Any, Any], Any, Any]


@attrs.define(kw_only=True, repr=False)
class OwnerPlan:
    """What a commit does to one object.

    Attributes:
        live: the object, and its attributes while it computed with the old weights.
        found: tensors outside parameters and buffers.
        slot_copies: live tensor and new tensor of each parameter or buffer that changed.
        puts: a mapping, a key in it and the value that is put there.
    """

    live: ObjectState
    found: Reconciliation
    slot_copies: list[tuple[torch.Tensor, torch.Tensor]]
    puts: list[_Put]

    @property
    def changes_something(self) -> bool:
        """Whether the commit changes anything that computes."""
        return bool(
            self.puts
            or self.found.copies
            or self.live.differences(ObjectState.of(self.live.owner)) is not None
        )

    def attach(self) -> None:
        """Put the live tensors back; their new values must have been copied."""
        self.found.apply()
        for mapping, name, value in self.puts:
            mapping[name] = value
        if isinstance(self.live.owner, nn.Module):
            _reorder(vars(self.live.owner), self.live)


def plan_owner(live: ObjectState, owner: str, problems: list[str], *, inferred: bool) -> OwnerPlan:
    """Compare an object with what it was while live, and work out its commit.

    Args:
        live: what it was.
        owner: its name, for messages.
        problems: is extended by what does not fit.
        inferred: whether what the hook did was worked out, so that an attribute that the hook did
            not make again is taken for the engine's.
    """
    mine = vars(live.owner)
    plan = OwnerPlan(live=live, found=Reconciliation(), slot_copies=[], puts=[])
    is_module = isinstance(live.owner, nn.Module)
    for section in SECTIONS if is_module else ():
        before, now = live.contents[section], mine[section]
        for name in before.keys() | now.keys():
            old, new = before.get(name), now.get(name)
            if old is new:
                continue
            problem = _slot_problem(old, new)
            if problem is not None:
                problems.append(f"{owner}.{name}: {problem}")
                continue
            plan.slot_copies.append((old, new))
            plan.puts.append((now, name, old))
    for name, old in live.values.items():
        new = mine.get(name, MISSING)
        if is_module and name in _STRUCTURE:
            continue
        if new is old and name not in live.contents:
            continue
        if new is MISSING:
            if inferred:
                # It was taken for the hook's, and the hook did not make it: it is the engine's.
                plan.puts.append((mine, name, old))
            continue
        if name in live.contents and type(new) is type(old):
            old = live.contents[name]
        kept = plan.found.match(old, new, f"{owner}.{name}")
        if kept is not new:
            plan.puts.append((mine, name, kept))
    return plan


def _reorder(mine: dict[str, Any], live: ObjectState) -> None:
    """Give parameters and buffers their old order, which name-based code may rely on."""
    for section in SECTIONS:
        now = mine[section]
        order = {name: now[name] for name in live.contents[section] if name in now}
        order.update(now)
        now.clear()
        now.update(order)


def _slot_problem(old: Any, new: Any) -> str | None:
    if new is None:
        return "the live tensor has no counterpart"
    if old is None:
        return "it did not exist before"
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return f"{type(old).__name__} became {type(new).__name__}"
    return describe_change(old, new)
