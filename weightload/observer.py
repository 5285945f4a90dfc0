"""Sees every write into the tensors of a load, whoever makes it.

Weight loaders are arbitrary code: they narrow, view, transpose, call other loaders, or copy bare
tensors past every loader. All of it ends in tensor operations, and a dispatch mode sees those.
For each operation that writes to a watched storage the observer works out the region and asks its
listener before the write, and tells it after.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightload.errors import UnsupportedError, WeightLoadError
from weightload.ledger import Region, full_region, locate
from weightload.storage import inner_tensors, storage_key

__all__ = [
    "StaleReads",
    "Watched",
    "WriteListener",
    "WriteObserver",
    "tensors_of",
    "written_by",
]

_aten = torch.ops.aten
_PARTIAL_WRITES = frozenset(
    name
    for name in (
        "index_put_", "_index_put_impl_", "index_copy_", "index_add_", "index_fill_",
        "masked_fill_", "masked_scatter_", "scatter_", "scatter_add_", "scatter_reduce_", "put_",
    )
)  # fmt: skip
"""Operations that may write only a part of their destination."""
_OVERWRITES = frozenset(
    name
    for name in (
        "copy_", "fill_", "zero_", "set_", "resize_", "normal_", "uniform_", "random_",
        "_foreach_copy_", "_foreach_zero_", "_foreach_fill_", "index_put_", "_index_put_impl_",
        "index_copy_", "index_fill_", "masked_fill_", "masked_scatter_", "scatter_", "put_",
        "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros",
        "new_ones", "new_full", "new_empty_strided", "_has_compatible_shallow_copy_type",
    )
)  # fmt: skip
"""Operations whose result does not depend on what their first argument held."""


@attrs.define(eq=False, repr=False)
class Watched:
    """One tensor that writes are watched for.

    Attributes:
        tensor: the tensor that loaders see.
        storage: key of its storage.
        base_offset: elements before its first one in the storage.
        hold: the storage, so that its key cannot be used again.
    """

    tensor: torch.Tensor
    storage: int
    base_offset: int
    hold: torch.UntypedStorage

    def region_of(self, view: torch.Tensor) -> Region | None:
        """Return the region of this tensor that ``view`` covers, ``None`` if it is none."""
        if view.dtype.itemsize != self.tensor.dtype.itemsize:
            return None
        if view is self.tensor:
            return full_region(self.tensor.shape)
        return locate(
            int(view.storage_offset()) - self.base_offset,
            view.shape,
            view.stride(),
            self.tensor.shape,
            self.tensor.stride(),
        )


class WriteListener(Protocol):
    """What the observer talks to."""

    def before_touch(self, storage: int) -> None:
        """An operation is about to read or write a watched storage."""

    def before_write(
        self,
        watched: Watched,
        region: Region | None,
        target: torch.Tensor,
        source: torch.Tensor | None,
    ) -> bool:
        """A write is about to happen; return whether it is to be executed.

        ``source`` is what a plain copy copies, ``None`` for every other operation.
        """

    def writing(self) -> None:
        """All writes of an operation were asked about, none was refused, and they happen now."""

    def after_write(self, watched: Watched, region: Region | None) -> None:
        """The write has happened."""

    def before_read(self, watched: Watched, region: Region | None) -> None:
        """An operation is about to use the values of a watched tensor, or of a part of it."""


_COPIES = (_aten.copy_.default, _aten._foreach_copy_.default)


class WriteObserver(TorchDispatchMode):
    """The dispatch mode. Enter it once around a load, not once per tensor.

    Attributes:
        refusal: the first error that the listener raised; a loader may have swallowed it.
        uses: is told name and arguments of every operation that makes no view and does not only
            copy to a watched tensor.
        guarded: what to call before a write to a storage that is not to be written, with the tensor
            that is written, by storage key; it gives the tensor another storage.
    """

    def __init__(self, listener: WriteListener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: WeightLoadError | None = None
        self.uses: Callable[[str, tuple[Any, ...], dict[str, Any]], None] | None = None
        self.guarded: dict[int, Callable[[torch.Tensor], None]] = {}
        self._listener = listener
        self._by_storage: dict[int, list[Watched]] = {}

    def watch(self, tensor: torch.Tensor) -> Watched | None:
        """Watch writes to ``tensor``; return ``None`` if it has no storage to watch."""
        key = storage_key(tensor)
        if key is None:
            return None
        watched = Watched(tensor, key, int(tensor.storage_offset()), tensor.untyped_storage())
        self._by_storage.setdefault(key, []).append(watched)
        return watched

    def knows(self, storage: int) -> bool:
        """Whether a tensor is watched that looks into this storage."""
        return storage in self._by_storage

    def forget(self, watched: Watched) -> None:
        """Stop watching."""
        group = self._by_storage.get(watched.storage, [])
        if watched in group:
            group.remove(watched)
        if not group:
            self._by_storage.pop(watched.storage, None)

    def shares(self, watched: Watched) -> bool:
        """Whether another watched tensor looks into the same storage."""
        return len(self._by_storage.get(watched.storage, ())) > 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, with the listener asked before and told after."""
        try:
            return self._run(func, types, args, kwargs or {})
        except WeightLoadError as error:
            self.refusal = self.refusal or error
            raise

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for target in written_by(func, args, kwargs) if self.guarded else ():
            guard = self.guarded.get(storage_key(target) or 0)
            if guard is not None:
                guard(target)
        touched = [
            tensor for tensor in tensors_of(args, kwargs) if storage_key(tensor) in self._by_storage
        ]
        if self.uses is not None and not (func.is_view or (touched and func in _COPIES)):
            self.uses(_name_of(func), args, kwargs)
        if not touched:
            self._tell_wrapped(func, args, kwargs)
            return func(*args, **kwargs)
        for tensor in touched:
            key = storage_key(tensor)
            if key is not None:
                self._listener.before_touch(key)
        written = [
            (target, watched)
            for target in written_by(func, args, kwargs)
            for watched in self._by_storage.get(storage_key(target) or 0, ())
        ]
        name = _name_of(func)
        if func is _aten._foreach_copy_.default:
            for target, source in zip(*args[:2], strict=True):
                self._run(_aten.copy_.default, types, (target, source), {})
            return None
        if not func.is_view:
            self._tell_reads(name, touched, args)
        if not written:
            return func(*args, **kwargs)
        source = args[1] if name == "copy_" and isinstance(args[1], torch.Tensor) else None
        marks = []
        refused = {}
        for target, watched in written:
            region = _region(name, target, watched, args)
            if not self._listener.before_write(watched, region, target, source):
                refused[id(target)] = target
            marks.append((watched, region))
        if refused:
            if any(id(target) not in refused for target, _ in written):
                raise UnsupportedError(
                    f"{name} writes several tensors of the model at once, and one of them is not "
                    f"to be written. Write them one by one."
                )
            return written[0][0] if func._schema.returns else None
        self._listener.writing()
        result = func(*args, **kwargs)
        for watched, region in marks:
            self._listener.after_write(watched, region)
        return result

    def _tell_wrapped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of writes to tensors that hold their data in others, which are watched."""
        for target in written_by(func, args, kwargs):
            if storage_key(target) is not None:
                continue
            for part in inner_tensors(target).values():
                for watched in self._by_storage.get(storage_key(part) or 0, ()):
                    self._listener.before_write(watched, None, part, None)
        self._listener.writing()

    def _tell_reads(self, op: str, touched: list[torch.Tensor], args: tuple[Any, ...]) -> None:
        for tensor in touched:
            if op in _OVERWRITES and args and (tensor is args[0] or isinstance(args[0], list)):
                continue
            for watched in self._by_storage.get(storage_key(tensor) or 0, ()):
                self._listener.before_read(watched, watched.region_of(tensor))


class StaleReads:
    """Refuses operations on live tensors that still hold the old weights.

    A hook finds what it needs through its module and what is tracked with it, where the new
    weights are staged. If it knows a live tensor through something else, it would compute with
    the old ones.

    Args:
        stale: the name of each live tensor that is staged and not committed, by storage key.
        touch: called with the storage key of every tensor that an operation is about to use, to
            give it its memory if it is staged and nothing has touched it before.
        staged: keys among them where the new weights are staged, for those who may use these.
    """

    def __init__(
        self,
        stale: Mapping[int, str],
        touch: Callable[[int], None],
        staged: Collection[int] = (),
    ) -> None:
        self._stale = stale
        self._staged = staged
        self._touch = touch

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what an operation is about to use.

        Raises:
            UnsupportedError: it has to do with a stale tensor.
        """
        for tensor in tensors_of(args, kwargs):
            key = storage_key(tensor) or 0
            self._touch(key)
            name = self._stale.get(key)
            if name is not None and key not in self._staged:
                raise UnsupportedError(
                    f"the live tensor {name!r} was reached through an object that is not tracked, "
                    f"while its new weights are staged. Name the attribute that holds that object "
                    f"in the registry's strategies",
                    parameter=name,
                )


def _name_of(func: Any) -> str:
    """Return the name of an operation, without its package and overload."""
    return str(func._schema.name).rpartition(":")[2]


def _region(
    op: str, target: torch.Tensor, watched: Watched, args: tuple[Any, ...]
) -> Region | None:
    if op in _PARTIAL_WRITES:
        return None
    return watched.region_of(target)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of an operation, also those in lists."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


_WRITES: dict[Any, tuple[tuple[int | str, ...], ...]] = {}


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes to."""
    places = _WRITES.get(func)
    if places is None:
        places = _WRITES[func] = tuple(
            (index, argument.name)
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    for index, name in places:
        value = kwargs.get(str(name))
        if value is None and isinstance(index, int) and index < len(args):
            value = args[index]
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))
