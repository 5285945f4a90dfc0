"""Loads by a plan: fetches the parts that it names and copies each to its place, without loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from weightload.board import Board
from weightload.bounds import check_bounds
from weightload.errors import IncompleteLoadError, UsageError, WeightMismatchError, name_some
from weightload.intake import Intake
from weightload.plan import Form, Plan, View, Write
from weightload.values import finite

__all__ = ["Fetch", "fetch_from", "part_of", "replay"]

Fetch = Callable[[str, View], torch.Tensor]


def part_of(tensor: torch.Tensor, view: View) -> torch.Tensor:
    """Return the part of a source tensor that ``view`` names, without a copy if it is contiguous."""
    flat = tensor.detach().contiguous().view(-1).view(_dtype(view.dtype))
    return flat.as_strided(view.shape, view.stride, int(flat.storage_offset()) + view.offset)


def fetch_from(weights: Mapping[str, torch.Tensor], plan: Plan) -> Fetch:
    """Return a ``fetch`` for whole tensors.

    Raises:
        IncompleteLoadError: the plan needs a tensor that is not there.
        WeightMismatchError: one has another shape or type than the plan was made for.
    """
    needed = [*plan.writes, *plan.computed]
    missing = [name for name in needed if name not in weights]
    if missing:
        raise IncompleteLoadError(
            f"The plan needs {name_some(missing)}, which did not come.", names=missing[:10]
        )
    for name in needed:
        form, tensor = plan.sources[name], weights[name]
        if tuple(tensor.shape) != form.shape or tensor.dtype != _dtype(form.dtype):
            raise WeightMismatchError(
                f"{name!r} has shape {tuple(tensor.shape)} and type {tensor.dtype}; the plan was "
                f"made for shape {form.shape} and type {form.dtype}.",
                name=name,
                expected=form.shape,
                found=tuple(tensor.shape),
            )
    return lambda name, view: part_of(weights[name], view)


def replay(
    board: Board,
    intake: Intake,
    plan: Plan,
    fetch: Fetch | Mapping[str, torch.Tensor],
    settle: Callable[[], None],
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
) -> None:
    """Do one load by a plan; see :meth:`WeightLoadSession.replay`.

    Args:
        board: the open session's.
        intake: counts and checks.
        plan: what is written where.
        fetch: gets parts of sources.
        settle: called after each name, to process what has become complete.
        load: gives whole tensors to the model's loaders.
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"A replay needs a Plan, made by bake(), found {type(plan).__name__}.")
    if not isinstance(fetch, Mapping) and not callable(fetch):
        raise UsageError(
            f"fetch is a function of a name and a view, or a mapping of tensors, found "
            f"{type(fetch).__name__}."
        )
    _check_owner(plan, board.framework.owner)
    places = _places(board, plan)
    check_bounds(plan)
    if isinstance(fetch, Mapping):
        fetch = fetch_from(fetch, plan)
    if intake.verification is not None:
        intake.verification.in_parts = True
    for name in (*plan.writes, *plan.computed):
        form = plan.sources[name]
        intake.check_form(name, form.shape, _dtype(form.dtype))
    for name, writes in plan.writes.items():
        intake.announce(name, plan.sources[name].shape, _dtype(plan.sources[name].dtype))
        part, shown = None, None
        for write in writes:
            if write.source is None:
                _target(places, write).fill_(write.value)  # type: ignore[arg-type]
                continue
            if part is None or write.source != shown:
                part, shown = _fetched(intake, fetch, name, write.source), write.source
            _target(places, write).copy_(part)
        settle()
    if plan.computed:
        load(_whole(plan, fetch))
    settle()
    intake.current = None


def _check_owner(plan: Plan, owner: tuple[int, int] | None) -> None:
    """Refuse the plan of another rank, whose tensors may have the same shapes."""
    if plan.owner is None or owner is None or plan.owner == owner:
        return
    raise UsageError(
        f"The plan was made on rank {plan.owner[0]} of {plan.owner[1]}, and this is rank {owner[0]} "
        f"of {owner[1]}, which takes other parts. Bake it on this rank.",
        expected=plan.owner,
        found=owner,
    )


def _places(board: Board, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the tensors that are written, by name.

    Raises:
        UsageError: one is not there, or has another form than the plan was made for.
    """
    found = {name: entry.tensor for entry in board.entries for name in entry.names}
    strange = []
    for name, form in plan.places.items():
        tensor = found.get(name)
        if tensor is None:
            strange.append(f"{name} (missing)")
            continue
        now = Form(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        if now != form:
            strange.append(f"{name} ({now.shape} {now.dtype}, planned {form.shape} {form.dtype})")
    if strange:
        raise UsageError(
            f"The plan was made on a model of another form: {name_some(strange)}. Bake it on this "
            f"model.",
            places=strange[:10],
        )
    return found


def _target(places: dict[str, torch.Tensor], write: Write) -> torch.Tensor:
    tensor = places[write.place].detach()
    dtype, view = _dtype(write.target.dtype), write.target
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    return tensor.as_strided(view.shape, view.stride, int(tensor.storage_offset()) + view.offset)


def _fetched(intake: Intake, fetch: Fetch, name: str, view: View) -> torch.Tensor:
    try:
        part = fetch(name, view)
    except BaseException as error:
        intake.source_error = error
        raise
    if not isinstance(part, torch.Tensor):
        raise WeightMismatchError(
            f"The part of {name!r} that was fetched is no tensor but {type(part).__name__}.",
            name=name,
        )
    if tuple(part.shape) != view.shape or part.dtype != _dtype(view.dtype):
        raise WeightMismatchError(
            f"The part of {name!r} that was fetched has shape {tuple(part.shape)} and type "
            f"{part.dtype}; shape {view.shape} and type {view.dtype} were asked for.",
            name=name,
            expected=view.shape,
            found=tuple(part.shape),
        )
    if intake.check_finite and not finite(part):
        raise WeightMismatchError(
            f"{name!r} holds NaN or infinity, and this session was opened with check_finite=True.",
            name=name,
        )
    intake.nbytes += part.numel() * part.element_size()
    return part


def _whole(plan: Plan, fetch: Fetch) -> Iterator[tuple[str, torch.Tensor]]:
    for name in plan.computed:
        yield name, fetch(name, plan.sources[name].whole)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"The plan has a type {name!r}, which this version of torch does not.")
    return found
