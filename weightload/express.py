"""Takes tensors to their places by a recorded plan, past the model's loaders.

Whatever is not exactly as it was recorded is left to the loaders, and to the checks that watch them:
a name takes the short way only if nothing can be wrong with it. What arrives is entered into the same
ledgers on both ways, so that completeness is measured against the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

from weightload.arrivals import Arrivals
from weightload.entries import Entry, Load
from weightload.ledger import Region, full_region, locate, meet, volume
from weightload.plan import Plan, View, Write
from weightload.record import SourceFact
from weightload.scribe import form_of
from weightload.storage import extent_of, storage_key

__all__ = ["Express", "Recorded", "settings_of"]

_without_modes: Callable[[], object] = getattr(torch._C, "_DisableTorchDispatch", object)
"""Makes an object during whose life no dispatch mode is asked."""
_PLAIN = (torch.Tensor, nn.Parameter)
_SMALL = 1 << 16
"""Elements of a tensor that is compared by its values."""
_NUMBERS = frozenset((int, float, bool, str, bytes, type(None), torch.dtype))


@attrs.define(eq=False, repr=False)
class _Copy:
    """One write of a plan, made ready for a model.

    Attributes:
        write: what the plan says.
        region: the part of the tensor that is filled.
        count: its elements.
        loader: the parameter's own loader when the plan was recorded.
        whole: whether the whole source goes there as it is.
        live: a tensor that is written where it is, with the view of its part.
    """

    write: Write
    region: Region
    count: int
    loader: object
    whole: bool
    live: tuple[torch.Tensor, torch.Tensor] | None = None

    def target(self, entry: Entry) -> torch.Tensor:
        """Return the part of a tensor that is written."""
        tensor = entry.tensor
        if entry.staging is None and self.live is not None and self.live[0] is tensor:
            return self.live[1]
        view = self.write.target
        base = tensor.detach()
        part = base.as_strided(view.shape, view.stride, int(base.storage_offset()) + view.offset)
        if entry.staging is None:
            self.live = tensor, part
        return part

    def source(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the part of a contiguous source that is read; ``None`` if a number is written."""
        view = self.write.source
        if self.whole or view is None:
            return tensor if self.whole else None
        return tensor.as_strided(
            view.shape, view.stride, int(tensor.storage_offset()) + view.offset
        )


@attrs.define(eq=False, repr=False)
class _Route:
    """All that has to be done for one name."""

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    fact: SourceFact
    copies: list[_Copy]
    casts: bool


@attrs.define(eq=False, repr=False)
class Recorded:
    """A plan that was recorded on a model, and what has been made ready of it.

    Attributes:
        plan: the plan.
        loads: the model's ``load_weights`` at that time.
        loaders: for each tensor that is written its own loader at that time.
        settings: what :func:`settings_of` said of the modules at that time.
    """

    plan: Plan
    loads: object
    loaders: dict[str, object]
    settings: list[Any]
    _routes: dict[str, _Route | None] = attrs.field(factory=dict)

    @classmethod
    def of(cls, plan: Plan, model: nn.Module, load: Load, settings: list[Any]) -> Recorded:
        """Note which loaders a plan belongs to."""
        tensors = {name: entry.tensor for entry in load.entries for name in entry.names[:1]}
        loaders = {place: _loader_of(tensors[place]) for place in plan.places if place in tensors}
        return cls(plan, loads_of(model), loaders, settings)

    def holds(self, model: nn.Module, load: Load) -> bool:
        """Whether the loaders would do the same, as far as can be told without running them."""
        return self.loads == loads_of(model) and self.settings == settings_of(load)

    def knows(self, name: str) -> bool:
        """Whether the load that was recorded had this name."""
        return name in self.plan.sources

    def route(self, name: str, entries: dict[str, Entry]) -> _Route | None:
        """Return what has to be done for a name, ``None`` if only its loaders know."""
        try:
            return self._routes[name]
        except KeyError:
            self._routes[name] = found = self._make(name, entries)
            return found

    def _make(self, name: str, entries: dict[str, Entry]) -> _Route | None:
        plan = self.plan
        writes = plan.writes.get(name)
        if writes is None and name not in plan.skipped:
            return None
        form, copies = plan.sources[name], []
        for write in writes or ():
            entry = entries.get(write.place)
            planned = plan.places[write.place]
            if entry is None or form_of(entry.tensor) != planned:
                return None
            region = _region(write.target, entry)
            if region is None:
                return None
            loader = self.loaders.get(write.place)
            copies.append(_Copy(write, region, volume(region), loader, write.source == form.whole))
        dtype = getattr(torch, form.dtype)
        fact = SourceFact(
            shape=form.shape,
            dtype=dtype,
            consumed=bool(copies),
            place=copies[0].write.place if copies else None,
        )
        size = torch.Size(form.shape)
        casts = any(copy.write.target.dtype != form.dtype for copy in copies)
        return _Route(size, dtype, size.numel() * dtype.itemsize, fact, copies, casts)


@attrs.define(eq=False, repr=False)
class _Values:
    """What a small tensor held."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Values) or other.tensor.dtype != self.tensor.dtype:
            return False
        return torch.equal(self.tensor, other.tensor)

    __hash__ = None  # type: ignore[assignment]


def settings_of(load: Load) -> list[Any]:
    """Return what loaders may look at in prepared modules.

    That is numbers, texts and small containers of them, tensors that are plain attributes, and
    buffers of integers, such as maps of experts.
    """
    found = []
    for name, module in load.modules.items():
        mine = [
            (key, setting) for key, value in vars(module).items() for setting in _setting(value)
        ]
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_floating_point():
                mine += [(key, setting) for setting in _setting(_to_be_read(buffer, load))]
        found.append((name, type(module), mine))
    return found


def _to_be_read(buffer: torch.Tensor, load: Load) -> torch.Tensor | None:
    """Return what loaders would read in a buffer, ``None`` if that is still to come.

    The twin of a staged one has no memory before it is touched, and gets its seeds then.
    """
    staging = load.stagings.get(storage_key(buffer) or 0)
    if staging is None or staging.allocated:
        return buffer
    whole = full_region(buffer.shape)
    for twin, region, value in staging.seeds:
        if twin is buffer and region == whole:
            return value
    return None


def _setting(value: Any) -> tuple[Any, ...]:
    """Return a value if it is a setting, or nothing."""
    kind = type(value)
    if kind in _NUMBERS:
        return (value,)
    if kind in (list, tuple) and all(type(one) in _NUMBERS for one in value):
        return (tuple(value),)
    if kind is dict and all(type(one) in _NUMBERS for one in value.values()):
        return (tuple(value.items()),)
    if isinstance(value, torch.Tensor) and value.numel() <= _SMALL and _has_values(value):
        return (_Values(value.detach().clone()),)
    return ()


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read: it may be on meta, or a view of a twin without memory."""
    if storage_key(tensor) is None:
        return False
    return tensor.untyped_storage().nbytes() >= extent_of(tensor)[1]


def loads_of(model: nn.Module) -> object:
    """Return what tells one implementation of a model's loading from another."""
    own = vars(model).get("load_weights")
    return own if own is not None else getattr(type(model), "load_weights", None)


def _loader_of(tensor: torch.Tensor) -> object:
    """Return the loader of a tensor; of one that is bound to the tensor, what is bound."""
    loader: Any = getattr(tensor, "weight_loader", None)
    return loader.__func__ if getattr(loader, "__self__", None) is tensor else loader


def _region(view: View, entry: Entry) -> Region | None:
    tensor = entry.tensor
    return locate(view.offset, view.shape, view.stride, tuple(tensor.shape), tuple(tensor.stride()))


class Express:
    """The short way of one session.

    Args:
        load: what the parts of the session share.
        arrivals: is told what has arrived.
        recorded: the plan, which holds now.

    Attributes:
        stale: whether something came that the plan does not know, or a loader is another one, so
            that the next load has to record anew.
    """

    def __init__(self, load: Load, arrivals: Arrivals, recorded: Recorded) -> None:
        self.stale = False
        self._load = load
        self._arrivals = arrivals
        self._recorded = recorded
        self._entries = {name: entry for entry in load.entries for name in entry.names}

    def takes(self, name: Any, tensor: Any) -> bool:
        """Take one tensor to its places; return whether that was done.

        If not, nothing was done, and the tensor has to go through the loaders.
        """
        intake = self._load.intake
        route = self._recorded.route(name, self._entries) if type(name) is str else None
        if route is None:
            self.stale = self.stale or not self._recorded.knows(name)
            return False
        if (
            type(tensor) not in _PLAIN
            or name in intake.seen
            or tensor.dtype is not route.dtype
            or tensor.shape != route.shape
            or not tensor.is_contiguous()
            or tensor.is_meta
            or (route.casts and intake.check_finite)
        ):
            return False
        if intake.check_finite:
            intake.check_pair(name, tensor)
        found = []
        for copy in route.copies:
            entry = self._entries[copy.write.place]
            if not self._fits(copy, entry):
                return False
            found.append((copy, entry))
        intake.take(name, tensor, route.fact, route.nbytes)
        if route.casts:
            intake.casts.add(name)
        for copy, entry in found:
            self._do(name, copy, entry, tensor)
        return True

    def _fits(self, copy: _Copy, entry: Entry) -> bool:
        """Whether a write can be done, and means what it meant when it was recorded."""
        if entry.closed or entry.watched is None or entry.ledger.has(copy.region):
            return False
        if entry.shared.names or any(meet(copy.region, gap) for gap in entry.gaps or ()):
            return False
        if _loader_of(entry.tensor) != copy.loader:
            self.stale = True
            return False
        return True

    def _do(self, name: str, copy: _Copy, entry: Entry, tensor: torch.Tensor) -> None:
        load, guard = self._load, _without_modes()  # nobody has to watch what is known
        if entry.staging is None:
            load.mark_dirty()
        elif not entry.staging.allocated and entry.watched is not None:
            load.allocate(entry.watched.storage)
        target, source = copy.target(entry), copy.source(tensor)
        verification = load.intake.verification
        if verification is not None and not entry.packed:
            verification.note(entry, copy.region, target, source)
        if source is None:
            target.fill_(copy.write.value)  # type: ignore[arg-type]
        else:
            target.copy_(source)
        del guard
        load.counts.bytes_written += copy.count * target.element_size()
        entry.ledger.fill(copy.region, name, copy.count)
        if entry.readers:
            self._arrivals.note_ready(entry)
