"""Follows source tensors without data through a model's loaders, and records where copies land.

Sources are meta tensors, so that views of them have true offsets and strides and cost nothing. What
a loader does with one is a view of it, a plain copy (``clone``, ``contiguous``, ``to``), the copy
into a tensor of the model, which is recorded and not done, or something that needs values. For the
last it gets zeros, and every name that went in counts as computed. Nothing that was there before is
written.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weightload.entries import Entry
from weightload.errors import UnsupportedError, WeightMismatchError
from weightload.ledger import Region, meet
from weightload.observer import Watched, WriteObserver, tensors_of, written_by
from weightload.plan import View, Write
from weightload.scribe import type_name
from weightload.storage import storage_key

__all__ = ["Recorder", "Sources"]

_COPIES = frozenset(("clone", "_to_copy"))
_NUMBERS = frozenset(("fill_", "zero_"))
_STORES = frozenset(("copy_", "_foreach_copy_"))


@attrs.frozen(kw_only=True)
class _Dim:
    """Steps along one dimension: how many, how far in the copy, how far in the source."""

    size: int
    mine: int
    source: int


@attrs.frozen(kw_only=True)
class _Origin:
    """Where the values of one storage come from.

    Attributes:
        names: source names.
        hold: keeps the key of the storage from being used again; holds no memory.
        start: elements before the first one, in the source and in this storage; ``None`` if the
            values are no copy of a view of one source.
        dims: the layout, from the longest step in this storage to the shortest.
        dtype: type that the source's elements were seen as.
        cast: type of this storage's elements.
    """

    names: frozenset[str]
    hold: StorageWeakRef
    start: tuple[int, int] | None = None
    dims: tuple[_Dim, ...] = ()
    dtype: torch.dtype | None = None
    cast: torch.dtype | None = None

    def view_of(self, tensor: torch.Tensor) -> View | None:
        """Return which part of the source ``tensor`` shows, ``None`` if it is no plain view."""
        if self.start is None or self.dtype is None:
            return None
        if not self.dims and self.cast == self.dtype:  # the source itself
            return View(
                offset=int(tensor.storage_offset()),
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                dtype=type_name(tensor.dtype),
            )
        if tensor.dtype != self.cast:
            return None
        offset, rest = self.start[0], int(tensor.storage_offset()) - self.start[1]
        last = []
        for dim in self.dims:
            index, rest = divmod(rest, dim.mine)
            offset += index * dim.source
            last.append(index)
        stride = []
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            if size < 2 or step == 0:
                stride.append(0)
                continue
            for number, dim in enumerate(self.dims):
                jump, over = divmod(step, dim.mine)
                if jump and not over and last[number] + (size - 1) * jump < dim.size:
                    last[number] += (size - 1) * jump
                    stride.append(jump * dim.source)
                    break
            else:
                return None
        inside = all(index < dim.size for index, dim in zip(last, self.dims, strict=True))
        if rest or not inside:
            return None
        return View(
            offset=offset,
            shape=tuple(tensor.shape),
            stride=tuple(stride),
            dtype=type_name(self.dtype),
        )


def _dims(copy: torch.Tensor, source: View) -> tuple[_Dim, ...]:
    """Return the layout of a copy of a view, with dimensions joined that step alike in both."""
    dims = sorted(
        (
            _Dim(size=size, mine=mine, source=theirs)
            for size, mine, theirs in zip(copy.shape, copy.stride(), source.stride, strict=True)
            if size > 1
        ),
        key=lambda dim: -dim.mine,
    )
    joined: list[_Dim] = []
    for dim in dims:
        outer = joined[-1] if joined else None
        if outer and (outer.mine, outer.source) == (dim.mine * dim.size, dim.source * dim.size):
            joined[-1] = attrs.evolve(dim, size=outer.size * dim.size)
        else:
            joined.append(dim)
    return tuple(joined) or (_Dim(size=1, mine=1, source=1),)


class Sources(TorchDispatchMode):
    """Follows what becomes of source tensors. Enter it inside the observer of the model's tensors.

    Args:
        device: where values that loaders ask for are made.
        observer: knows the tensors of the model.

    Attributes:
        used: names whose values a loader asked for.
        current: the name that the loaders hold now.
        number: what the operation that is running fills its target with, if that is a number.
    """

    def __init__(self, device: torch.device, observer: WriteObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[str] = set()
        self.current: str | None = None
        self.number: float | int | None = None
        self._device = device
        self._observer = observer
        self._origins: dict[int, _Origin] = {}
        self._born: dict[int, StorageWeakRef] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a source tensor that has no data."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._enter(
            tensor,
            names=frozenset((name,)),
            start=(0, 0),
            dtype=dtype,
            cast=dtype,
        )
        return tensor

    def _enter(self, tensor: torch.Tensor, **facts: Any) -> None:
        key = storage_key(tensor)
        if key is not None:
            hold = StorageWeakRef(tensor.untyped_storage())
            self._origins[key] = _Origin(hold=hold, **facts)

    def names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Return the names whose values are in ``tensor``."""
        origin = self._origin(tensor)
        return frozenset() if origin is None else origin.names

    def _origin(self, tensor: torch.Tensor) -> _Origin | None:
        return self._origins.get(storage_key(tensor) or 0)

    def view_of(self, source: torch.Tensor, target: torch.Tensor) -> View | None:
        """Return the part of a source that a copy into ``target`` takes, ``None`` if it is none.

        None it is also if values would be spread over a larger place, or cast twice.
        """
        origin = self._origin(source)
        if origin is None or source.numel() != target.numel():
            return None
        if origin.cast != origin.dtype and origin.cast != target.dtype:
            return None
        return origin.view_of(source.expand(target.shape))

    def kept(self) -> set[str]:
        """Return the names of which something is still alive that was made of them."""
        alive = [origin for origin in self._origins.values() if not origin.hold.expired()]
        if alive:  # what nobody can reach may only wait to be freed
            gc.collect()
        return {name for one in alive if not one.hold.expired() for name in one.names}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation on what has data, and follow it where sources go in."""
        kwargs = kwargs or {}
        given = list(tensors_of(args, kwargs))
        if func.is_view:
            return self._note_born(func(*args, **kwargs), given)
        written = list(written_by(func, args, kwargs))
        name = func._schema.name.rpartition(":")[2]
        if name in _STORES and written and all(map(self._watched, written)):
            return func(*args, **kwargs)
        if name in _NUMBERS and all(map(self._watched, written)):
            number = args[1] if len(args) > 1 else 0
            self.number = number if isinstance(number, int | float) else None
            try:
                return func(*args, **kwargs)
            finally:
                self.number = None
        names = frozenset().union(*(self.names_of(tensor) for tensor in given))
        if name in _COPIES and len(given) == 1 and given[0].is_meta and names:
            return self._copy(func, given[0], kwargs)
        self.used |= names
        if not all(self._watched(target) or self._is_new(target) for target in written):
            if self.current is not None:
                self.used.add(self.current)
            return written[0] if func._schema.returns else None
        if not names:
            return self._note_born(func(*args, **kwargs), given)
        if any(target.is_meta for target in written):
            return written[0] if func._schema.returns else None
        result = func(*self._real(args), **self._real(kwargs))
        for tensor in (*written, *tensors_of((result,), {})):
            if not self._watched(tensor):
                self._enter(tensor, names=names | self.names_of(tensor))
        return self._note_born(result, given)

    def _copy(self, func: Any, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Copy something without data, and remember what it is a copy of."""
        kept = {key: kwargs[key] for key in ("dtype", "memory_format") if key in kwargs}
        result: torch.Tensor = func(tensor, **kept)
        origin = self._origins[storage_key(tensor) or 0]
        view = origin.view_of(tensor)
        once = origin.cast == origin.dtype or result.dtype == origin.cast
        if view is None or not once:
            self._enter(result, names=origin.names)
            return result
        self._enter(
            result,
            names=origin.names,
            start=(view.offset, int(result.storage_offset())),
            dims=_dims(result, view),
            dtype=getattr(torch, view.dtype),
            cast=result.dtype,
        )
        return result

    def _watched(self, tensor: torch.Tensor) -> bool:
        return self._observer.knows(storage_key(tensor) or 0)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        key = storage_key(tensor) or 0
        return key in self._born or key in self._origins

    def _note_born(self, result: Any, given: list[torch.Tensor]) -> Any:
        """Remember what did not exist before: only that may be written."""
        known = {storage_key(tensor) for tensor in given}
        for tensor in tensors_of((result,), {}):
            key = storage_key(tensor)
            if key is not None and key not in known and not self._observer.knows(key):
                self._born[key] = StorageWeakRef(tensor.untyped_storage())
        return result

    def _real(self, value: Any) -> Any:
        """Return arguments with zeros for what has no data."""
        if isinstance(value, torch.Tensor):
            if not value.is_meta or self._origin(value) is None:
                return value
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device)
        if isinstance(value, dict):
            return {key: self._real(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._real(item) for item in value)
        return value


def _check_fit(entry: Entry, target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise what the copy would raise, if it were done."""
    pairs = zip(reversed(source.shape), reversed(target.shape), strict=False)
    if source.dim() > target.dim() or any(mine not in (1, room) for mine, room in pairs):
        raise WeightMismatchError(
            f"A source of shape {tuple(source.shape)} does not fit a place of shape "
            f"{tuple(target.shape)} in {entry.names[0]!r}.",
            parameter=entry.names[0],
            expected=tuple(target.shape),
            found=tuple(source.shape),
        )


class Recorder:
    """Records the copies into the tensors of a load, and does none of them.

    Args:
        entries: the tensors.
        live: name and tensor of what is live while something else is in its place.
        device: where the model is.

    Attributes:
        observer: sees the writes while it is entered.
        sources: follows the sources while it is entered, inside the observer.
        taken: for each name the places that it reached, by whatever way.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        live: Iterable[tuple[str, torch.Tensor]],
        device: torch.device,
    ) -> None:
        self.observer = WriteObserver(self)
        self.sources = Sources(device, self.observer)
        self.taken: dict[str, set[str]] = {}
        self._writes: list[tuple[str, Write]] = []
        self._entries: dict[int, Entry] = {}
        self._by_storage: dict[int, list[Entry]] = {}
        self._names: dict[str, set[str]] = {}
        self._looked: set[str] = set()
        self._regions: dict[str, list[tuple[Region, str, bool]]] = {}
        self._live: dict[int, str] = {}
        self._target: torch.Tensor | None = None
        self._placed = True
        for entry in entries:
            watched = self.observer.watch(entry.tensor)
            if watched is not None:
                self._entries[id(watched)] = entry
                self._by_storage.setdefault(watched.storage, []).append(entry)
        for name, tensor in live:
            key = storage_key(tensor)
            if key is not None and not self.observer.knows(key):
                self.observer.watch(tensor)
                self._live[key] = name

    def before_touch(self, storage: int) -> None:
        """Give a twin room, without the values that it starts with."""
        for entry in self._by_storage.get(storage, ()):
            if entry.staging is not None and entry.staging.storage.nbytes() == 0:
                entry.staging.storage.resize_(entry.staging.nbytes)

    def before_write(
        self,
        watched: Watched,
        region: Region | None,
        target: torch.Tensor,
        source: torch.Tensor | None,
    ) -> bool:
        """Record one write, which is not done."""
        entry = self._entries.get(id(watched))
        if entry is None:
            raise UnsupportedError(
                f"A loader writes to the live tensor of {self._live[watched.storage]!r}, which it "
                f"has known since before. A loader must get the tensor from the model.",
                parameter=self._live[watched.storage],
            )
        if source is not None:
            _check_fit(entry, target, source)
        if target.numel() == 0:
            return False
        names = self.sources.names_of(source) if source is not None else frozenset[str]()
        if not names and self.sources.current is not None:
            names = frozenset((self.sources.current,))
        if target is not self._target:
            self._end_target()
            self._target, self._placed = target, False
        place = entry.names[0]
        for name in names:
            self.taken.setdefault(name, set()).add(place)
        self._names.setdefault(place, set()).update(names)
        if region is None and self.observer.shares(watched):
            return False  # another tensor on the same storage may know the place
        view = None if source is None else self.sources.view_of(source, target)
        number = self.sources.number if source is None else None
        plain = view is not None or number is not None
        if not plain or region is None or len(names) != 1 or self._mixes(place, region, names):
            self._looked.add(place)
        elif not self._placed:
            module, _, tensor = place.rpartition(".")
            to = View(
                offset=int(target.storage_offset()) - watched.base_offset,
                shape=tuple(target.shape),
                stride=tuple(target.stride()),
                dtype=type_name(target.dtype),
            )
            [name] = names
            write = Write(source=view, module=module, tensor=tensor, target=to, value=number)
            self._writes.append((name, write))
            self._regions.setdefault(place, []).append((region, name, number is not None))
        self._placed = True
        return False

    def _mixes(self, place: str, region: Region, names: frozenset[str]) -> bool:
        """Whether a number and what another name brings come to one place: their order counts."""
        number = self.sources.number is not None
        return any(
            (number or other_is_number) and name not in names and meet(region, other)
            for other, name, other_is_number in self._regions.get(place, ())
        )

    def _end_target(self) -> None:
        """Let all names go through the loaders that reach a storage where no place was found."""
        if self._target is not None and not self._placed:
            for entry in self._by_storage.get(storage_key(self._target) or 0, ()):
                self._looked.add(entry.names[0])
        self._target = None

    def writing(self) -> None:
        """Nothing to do."""

    def after_write(self, watched: Watched, region: Region | None) -> None:
        """Nothing was written."""

    def before_read(self, watched: Watched, region: Region | None) -> None:
        """Note that a loader computes with what its tensor holds, and let it have the values."""
        entry = self._entries.get(id(watched))
        if entry is None:
            return
        self._looked.add(entry.names[0])
        if entry.staging is not None and not entry.staging.allocated:
            entry.staging.storage.resize_(0)
            entry.staging.allocate()

    def let_go(self) -> None:
        """Take the room of twins away again."""
        for group in self._by_storage.values():
            for entry in group:
                if entry.staging is not None:
                    entry.staging.storage.resize_(0)
                    entry.staging.allocated = False

    def look(self, places: Iterable[str]) -> None:
        """Let all names that reach these places go through the loaders."""
        self._looked.update(places)

    def computed(self) -> set[str]:
        """Return the names that have to go through the loaders."""
        self._end_target()
        through = {name for place in self._looked for name in self._names.get(place, ())}
        return through | self.sources.used | self.sources.kept()

    def writes(self, computed: set[str]) -> Iterator[tuple[str, Write]]:
        """Yield name and write of everything else, in the order of the load."""
        return ((name, write) for name, write in self._writes if name not in computed)
