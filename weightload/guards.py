"""Refuses writes to live tensors while their new values are staged, and reads once they are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightload.entries import Load
from weightload.errors import DuplicateWeightError, UnexpectedWeightError, UnsupportedError
from weightload.observer import Watched, WriteObserver
from weightload.staging import Staging
from weightload.storage import inner_tensors, storage_key

if TYPE_CHECKING:
    from weightload.layer import Unit

__all__ = ["Guards", "too_late"]


class Guards:
    """The live tensors of parked units, which no loader may touch.

    Args:
        load: what the units belong to.
        observer: sees the writes.
    """

    def __init__(self, load: Load, observer: WriteObserver) -> None:
        self._load = load
        self._observer = observer
        self._live: dict[int, tuple[str, Unit, Watched]] = {}
        self._hosting: dict[int, tuple[str, Unit]] = {}

    def guard(self, unit: Unit) -> None:
        """Refuse writes to the live tensors of a parked ``unit``, and reads once it is done.

        A loader reaches them past the model, in a table that it made before the load, or in the
        model itself when they are back in their places. They hold no checkpoint values.
        """
        for name, tensor in unit.live_tensors():
            for part in inner_tensors(tensor).values() or (tensor,):
                key = storage_key(part)
                if key is not None and not self._observer.knows(key):
                    self._guard(part, name, unit)

    def _guard(self, tensor: torch.Tensor, name: str, unit: Unit) -> None:
        watched = self._observer.watch(tensor)
        if watched is not None:
            self._live[watched.storage] = (name, unit, watched)

    def lend(self, staging: Staging, host: torch.Tensor) -> None:
        """Let twins have the memory of a live tensor, which is guarded again by :meth:`take_back`."""
        guard = self._live.pop(storage_key(host) or 0, None)
        if guard is not None:
            name, unit, watched = guard
            self._observer.forget(watched)
            self._hosting[id(staging)] = name, unit

    def take_back(self, staging: Staging) -> None:
        """Guard the live tensor again that lent its memory to twins, if one did."""
        if staging.hosted and staging.host is not None:
            owner = self._hosting.pop(id(staging), None)
            if owner is not None:
                self._guard(staging.host, *owner)

    def refuse(self, storage: int, *, write: bool) -> None:
        """Refuse to touch a live tensor whose new value is, or was, staged.

        Args:
            storage: its key.
            write: whether it is going to be written; otherwise it is read.

        Raises:
            DuplicateWeightError: it is written after its unit was done.
            UnsupportedError: a loader knows the tensor from before this load, or reads it later.
        """
        if storage not in self._live:
            return
        parameter, unit, _ = self._live[storage]
        if write and unit.committed:
            raise too_late(self._load, parameter)
        if write:
            raise UnsupportedError(
                f"A loader writes to the live tensor of {parameter!r}, which it has known since "
                f"before this load. Its new value is staged: a loader must get the tensor from "
                f"the model.",
                parameter=parameter,
            )
        if unit.committed:
            raise UnsupportedError(
                f"A loader computes with {parameter!r} after it was processed. Use "
                f"commit='atomic': nothing is processed then before everything has come.",
                parameter=parameter,
            )


def too_late(load: Load, parameter: str) -> DuplicateWeightError | UnexpectedWeightError:
    """Return the error about something that arrives for a tensor which is done."""
    name, manifest = (load.trial or load.intake).current, load.intake.manifest
    came = any(parameter in entry.names and entry.touched for entry in load.entries)
    if not came and manifest is not None and name is not None and name not in manifest:
        return UnexpectedWeightError(
            f"{name!r} arrived after what reads {parameter!r} was processed: no load before had "
            f"brought that name, so nothing waited for it. Send it before the rest of its layer, send "
            f"everything in one mapping, announce it with check(), or use commit='atomic'.",
            name=name,
            parameter=parameter,
        )
    return DuplicateWeightError(
        f"{name!r} arrived after {parameter!r} was complete and processed: something was sent "
        f"twice.",
        name=name,
        parameter=parameter,
    )
