"""Checks that a plan stays inside of its tensors, before any of it is carried out.

A view past a source reads its neighbour in the same memory; one past a target, or in the gaps between
its rows, writes into another parameter. Neither is an error of torch.
"""

from __future__ import annotations

import math

import torch

from weightload.errors import UsageError, name_some
from weightload.plan import Form, Plan, View, Write

__all__ = ["check_bounds"]


def check_bounds(plan: Plan) -> None:
    """Check that every part that a plan names lies in a tensor that it knows.

    Raises:
        UsageError: one does not; the first ten are named.
    """
    unknown = [name for name in (*plan.writes, *plan.computed) if name not in plan.sources]
    problems = [f"{name} (no source)" for name in unknown]
    for name, form in plan.sources.items():
        if not _known(form.dtype) or form != Form.contiguous(form.shape, form.dtype):
            problems.append(f"{name} (the form of the source)")
    inside = _Inside()
    for name, writes in plan.writes.items():
        if not problems:
            problems += [
                f"{name} into {write.place} ({problem})"
                for write in writes
                if (problem := _problem(plan, name, write, inside))
            ]
    if problems:
        raise UsageError(
            f"The plan is damaged: {name_some(problems)}. Make it again with bake().",
            problems=problems[:10],
        )


def _problem(plan: Plan, name: str, write: Write, inside: _Inside) -> str | None:
    place = plan.places.get(write.place)
    if place is None:
        return "no such place"
    if not inside(write.target, place):
        return "what is written is outside"
    if write.source is None:
        return None
    if not inside(write.source, plan.sources[name]):
        return "what is read is outside"
    return None if write.source.shape == write.target.shape else "the shapes differ"


class _Inside:
    """Says whether a view lies in a tensor; remembers which bytes belong to one that has gaps."""

    def __init__(self) -> None:
        self._bytes: dict[Form, torch.Tensor] = {}

    def __call__(self, view: View, form: Form) -> bool:
        numbers = (view.offset, *view.shape, *view.stride)
        if not _known(view.dtype) or len(view.shape) != len(view.stride) or min(numbers) < 0:
            return False
        end = _end(form.whole)
        if 0 in view.shape or _end(view) > end:
            return 0 in view.shape
        if math.prod(form.shape) * _size(form.dtype) == end:
            return True
        if form not in self._bytes:
            mask = torch.zeros(end, dtype=torch.bool, device="cpu")
            _bytes_of(mask, form.whole).fill_(True)
            self._bytes[form] = mask
        return bool(_bytes_of(self._bytes[form], view).all())


def _known(dtype: str) -> bool:
    return isinstance(getattr(torch, dtype, None), torch.dtype)


def _size(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _end(view: View) -> int:
    """Return the byte after the last one; 0 for a view of nothing."""
    if 0 in view.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    return (view.offset + last + 1) * _size(view.dtype)


def _bytes_of(mask: torch.Tensor, view: View) -> torch.Tensor:
    """Return the part of ``mask``, which has an element for each byte, that ``view`` names."""
    size = _size(view.dtype)
    steps = (*(step * size for step in view.stride), 1)
    return mask.as_strided((*view.shape, size), steps, view.offset * size)
