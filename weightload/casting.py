"""Checks what a loader copies against its place: neither broadcast, nor cast to what loses values."""

from __future__ import annotations

import torch

from weightload.entries import Entry
from weightload.errors import UnsupportedError, WeightMismatchError
from weightload.intake import Intake
from weightload.storage import NOT_QUANTIZED, QUANTIZED
from weightload.values import finite, wide_floats

__all__ = ["check_copy"]


def check_copy(
    intake: Intake,
    name: str | None,
    entry: Entry,
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    initial: bool,
) -> None:
    """Refuse a copy that the load which made the model did not do, and count casts.

    Args:
        intake: what it is part of.
        name: source name, if it is known.
        entry: what is filled.
        target: the part of it that is written.
        source: what is copied there.
        initial: whether this is the load that makes the model.

    Raises:
        WeightMismatchError: the value would be broadcast, or cast where it must not.
        UnsupportedError: what is copied, or what it is copied to, is a quantized tensor of torch.
    """
    if source.is_quantized or target.is_quantized:
        brought = "A tensor" if name is None else repr(name)
        raise UnsupportedError(
            f"{brought} brings {source.dtype} for {entry.names[0]!r}, which holds {target.dtype}: "
            f"{QUANTIZED}. {NOT_QUANTIZED}",
            name=name,
            parameter=entry.names[0],
        )
    if source.dtype != target.dtype:
        _check_cast(intake, name, entry, target, source, initial=initial)
    if source.numel() == target.numel():
        return
    fact = intake.manifest.get(name) if intake.manifest is not None and name else None
    if initial or (fact is not None and fact.broadcast):
        if name is not None:
            intake.broadcast.add(name)
        return
    raise WeightMismatchError(
        f"{name!r} brings shape {tuple(source.shape)} for a place of shape "
        f"{tuple(target.shape)} in {entry.names[0]!r}. Tensors are never broadcast.",
        name=name,
        expected=tuple(target.shape),
        found=tuple(source.shape),
    )


def _check_cast(
    intake: Intake,
    name: str | None,
    entry: Entry,
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    initial: bool,
) -> None:
    """Count a cast, and refuse one that the load which made the model did not do."""
    if name is not None:
        intake.casts.add(name)
    if wide_floats(source.dtype, target.dtype):
        if intake.check_finite and not finite(source.to(target.dtype)):
            raise WeightMismatchError(
                f"{name!r} holds values that are infinite as {target.dtype}, the type of "
                f"{entry.names[0]!r}, and this session was opened with check_finite=True.",
                name=name,
                parameter=entry.names[0],
            )
        return
    known = intake.manifest is not None and name in intake.manifest
    if initial or known or _wider_integer(source.dtype, target.dtype):
        return
    raise WeightMismatchError(
        f"{name!r} brings {source.dtype} for {entry.names[0]!r}, which holds {target.dtype}. "
        f"Values are cast only between floats of 16 bits or more, and to wider integers.",
        name=name,
        expected=str(target.dtype),
        found=str(source.dtype),
    )


def _wider_integer(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether both are integers, or bool, and ``wanted`` holds all values of ``found``."""
    if any(one.is_floating_point or one.is_complex for one in (found, wanted)):
        return False
    return torch.promote_types(found, wanted) == wanted
