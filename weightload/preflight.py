"""Checks what is going to be loaded before any of it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weightload.board import Board
from weightload.errors import (
    DuplicateWeightError,
    UnexpectedWeightError,
    WeightLoadError,
    WeightMismatchError,
)
from weightload.intake import Intake
from weightload.sources import unpack
from weightload.transport import Loans

__all__ = ["check_forms", "check_pairs", "check_set", "form_of", "refused"]

Pair = tuple[str, torch.Tensor]


def check_pairs(board: Board, model: nn.Module, intake: Intake, pairs: list[Any]) -> None:
    """Check pairs that are all at hand.

    Names that the load which made the model did not have are rehearsed.

    Raises:
        CheckpointError: one does not fit, or stands twice.
    """
    names: set[str] = set()
    unknown: list[Pair] = []
    for pair in pairs:
        name, tensor = unpack(pair)
        intake.check_pair(name, tensor)
        if intake.drops(name):
            continue
        if name in names:
            raise DuplicateWeightError(
                f"{name!r} stands twice in one source. Send each tensor once.", name=name
            )
        names.add(name)
        if intake.rehearses(name):
            unknown.append(pair)
    _rehearse(board, model, intake, unknown)


def check_forms(board: Board, model: nn.Module, intake: Intake, forms: Mapping[str, Any]) -> None:
    """Check names, shapes and types that are at hand without their data, as for a load of them.

    Raises:
        CheckpointError: one does not fit, or came before.
    """
    for name in forms.keys() & intake.seen.keys():
        if not intake.drops(name):
            raise DuplicateWeightError(
                f"{name!r} arrived twice in this session. Send each tensor once.", name=name
            )
    check_set(board, model, intake, forms, complete=False)


def check_set(
    board: Board,
    model: nn.Module,
    intake: Intake,
    weights: Mapping[str, Any],
    *,
    complete: bool,
) -> None:
    """Check a whole set of names and shapes; see :meth:`WeightLoadSession.check`.

    Raises:
        CheckpointError: something does not fit, or is missing.
    """
    manifest = intake.manifest
    if manifest is None:
        return
    unknown: list[Pair] = []
    known = 0
    getter = getattr(weights, "tensor", None)
    for name, value in weights.items():
        if intake.drops(name):
            known += 1
            continue
        shape, dtype = form_of(value)
        intake.check_form(name, shape, dtype)
        if intake.check_finite and isinstance(value, torch.Tensor):
            intake.check_pair(name, value)
        known += name in manifest
        if not intake.rehearses(name):
            continue
        if isinstance(value, torch.Tensor):
            unknown.append((name, value))
        elif getter is not None:
            unknown.append((name, getter(name)))
        else:
            intake.announced.add(name)
    _rehearse(board, model, intake, unknown)
    absent = [
        name
        for name, fact in manifest.items()
        if fact.consumed
        and name not in weights
        and name not in intake.seen
        and name not in intake.optional
        and (intake.wanted is None or name in intake.wanted)
        and not intake.scope.may_miss(name, fact.place or name)
    ]
    # With names of its own a source may bring the same things; only the regions can tell then.
    if complete and absent and known == len(weights):
        raise board.completeness.never_came(absent, len(weights))


def form_of(value: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Return shape and type of a tensor, of a shape, or of a pair of a shape and a type."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if len(value) == 2 and isinstance(value[1], torch.dtype):
        return tuple(value[0]), value[1]
    return tuple(value), None


def _rehearse(board: Board, model: nn.Module, intake: Intake, pairs: list[Pair]) -> None:
    """Let the loaders take names that are new to the model, without any write."""
    if not pairs:
        return
    trial = Intake(manifest=intake.manifest)
    guarded = board.arrivals.observer.guarded
    loans = Loans(buffers=None, each=False, places=model.parameters, guarded=guarded)
    with board.arrivals.rehearsal(trial):
        try:
            board.framework.load(model, trial.feed(pairs, loans=loans, between=lambda: None))
            trial.end_loans(loans)
        except WeightLoadError:
            raise
        except Exception as error:
            raise refused(error, trial) from error
        trial.end_batch()


def refused(error: Exception, intake: Intake) -> WeightLoadError:
    """Make the right error from what a model's loader raised."""
    name = intake.current
    found = intake.seen.get(name) if name is not None else None
    said = f"{type(error).__name__}: {error}"
    if name is None or found is None:
        return WeightMismatchError(f"The model's loaders refused the weights ({said}).")
    if intake.manifest is not None and name not in intake.manifest:
        return UnexpectedWeightError(
            f"The model has no place for {name!r} of shape {found.shape} ({said}).", name=name
        )
    return WeightMismatchError(
        f"The model's loader refused {name!r} of shape {found.shape} ({said}).",
        name=name,
        found=found.shape,
    )
