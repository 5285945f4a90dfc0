"""Lends the memory of a transport to loaders, and makes independent of it what they keep.

A loader is given an *alias*: a tensor over the same bytes with a storage object of its own. How
often that object is used says whether anybody still holds what was lent, whatever view of it, when
the bytes are going to change. Mostly nobody does, and nothing is copied. Otherwise the bytes are
copied once, and every tensor that looks at them is pointed to the copy.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightload.errors import UnsupportedError, UsageError
from weightload.frames import local_values
from weightload.storage import storage_key

__all__ = ["Loan", "Loans", "Transport", "buffers_of", "extent_of"]

Tensor = torch.Tensor
Transport = Tensor | Iterable[Tensor] | None

_FLOOR = ("weightload.session", "weightload.preflight")
"""The modules that call a model's loaders: no frame below holds what was lent."""
_SEARCHES = 4
"""After so many searches of the heap in one load, tensors are copied before they are handed out."""
_DEVICES = ("cpu", "cuda")
_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)
_CAN_LEND = (
    _storage_uses is not None
    and _tensor_uses is not None
    and hasattr(torch._C, "_to_dlpack")
    and hasattr(torch._C, "_from_dlpack")
    and sys.version_info < (3, 14)  # later ones do not count all references
    and getattr(sys, "_is_gil_enabled", lambda: True)()
)
"""Whether torch and Python say how often an object is used. If not, everything is copied."""


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage, and the byte after the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = int(sum((size - 1) * step for size, step in steps)) if tensor.numel() else -1
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def buffers_of(transport: Transport) -> list[tuple[torch.device, int, int]] | None:
    """Return device, first address and end of each buffer; ``None`` if everything is lent.

    Raises:
        UsageError: it is neither a tensor, nor an iterable of tensors, nor ``None``.
    """
    if transport is None:
        return None
    buffers: Any = [transport] if isinstance(transport, Tensor) else transport
    if not isinstance(buffers, Iterable):
        raise UsageError(
            f"transport is a tensor, a list of tensors or None, found {type(transport).__name__}."
        )
    found = []
    for buffer in buffers:
        if not isinstance(buffer, Tensor) or storage_key(buffer) is None or buffer.is_meta:
            raise UsageError(
                f"transport names the tensors whose memory is reused, found "
                f"{type(buffer).__name__}."
            )
        storage = buffer.untyped_storage()
        start = storage.data_ptr()
        found.append((buffer.device, start, start + storage.nbytes()))
    return found


@attrs.define(eq=False, repr=False)
class Loan:
    """One tensor that was handed to the loaders.

    Attributes:
        name: its source name.
        tensor: what the loaders got.
        memory: the storage of the alias; ``None`` if the loaders own what they got.
        kept: whether somebody held it at the end, so that it is a copy now.
    """

    name: str
    tensor: Tensor
    memory: torch.UntypedStorage | None = None
    kept: bool = False

    @property
    def key(self) -> int | None:
        """The storage key of the alias."""
        return None if self.memory is None else int(self.memory._cdata)


@attrs.define(kw_only=True, eq=False, repr=False)
class Loans:
    """What one call has lent and not got back.

    Attributes:
        buffers: the memory that is only lent, see :func:`buffers_of`; ``None`` for all of it.
        each: whether a tensor is lent until the next is asked for, or else until the end.
        places: returns tensors that may have been made to look at what was lent.
        guarded: what to call before a write to lent memory, with the tensor that is written, by
            storage key.
        nbytes: size of what was copied.
    """

    buffers: list[tuple[torch.device, int, int]] | None
    each: bool
    places: Callable[[], Iterable[Tensor]] = tuple
    guarded: dict[int, Callable[[Tensor], None]] = attrs.field(factory=dict)
    nbytes: int = 0
    _open: list[Loan] = attrs.field(factory=list)
    _searches: int = 0

    def lend(self, name: str, tensor: Tensor) -> Loan:
        """Return what is to be handed to the loaders; it stays open until it is taken back."""
        if not self._is_lent(tensor):
            return Loan(name, tensor)
        with _disable_current_modes():
            if self._searches >= _SEARCHES or not _can_alias(tensor):
                self.nbytes += tensor.numel() * tensor.element_size()
                return Loan(name, tensor.detach().clone(), kept=True)
            loan = Loan(name, *_alias(tensor))
        self._open.append(loan)
        self.guarded[_memory_of(loan)._cdata] = functools.partial(self._own, loan)
        return loan

    def _is_lent(self, tensor: Tensor) -> bool:
        if self.buffers is None:
            return True
        if not self.buffers or storage_key(tensor) is None:
            return False
        start = tensor.untyped_storage().data_ptr() + extent_of(tensor)[0]
        return any(
            device == tensor.device and first <= start < end for device, first, end in self.buffers
        )

    def take_back(self) -> list[Loan]:
        """Make independent what is still held of everything that is lent; return all of it.

        To be called when the loaders have let go of what they do not keep, before the memory may
        change.

        Raises:
            UnsupportedError: something is held in a way that cannot be found.
        """
        loans, self._open = self._open, []
        for loan in loans:
            self.guarded.pop(_memory_of(loan)._cdata, None)
        dead = local_values(sys._getframe(1), _FLOOR, dead=True) if self.each and loans else []
        kept = [loan for loan in loans if _is_held(loan, dead)]
        if not kept:
            return loans
        with _disable_current_modes():
            for loan in kept:
                self._copy(loan)
            rest = [
                loan for loan in kept if _is_held(loan, dead) or _uses_inside(loan.tensor, dead)
            ]
            del dead
            if rest:
                found = self._find(rest)
                _check(loan for loan in rest if _uses_inside(loan.tensor, found))
                del found
                _check(loan for loan in rest if _is_held(loan, []))
        return loans

    def _own(self, loan: Loan, target: Tensor) -> None:
        """Copy what a loader is about to write to, so that the sender's memory stays as it is.

        Raises:
            UnsupportedError: something else looks at it that cannot be found.
        """
        with _disable_current_modes():
            self.guarded.pop(_memory_of(loan)._cdata, None)
            self._copy(loan)
            if storage_key(target) == loan.key:
                _repoint(target, _flat_of(loan.tensor))
            if _is_held(loan, []):
                self._find([loan])
                _check(loan for loan in [loan] if _is_held(loan, []))

    def _copy(self, loan: Loan) -> None:
        """Copy the bytes, and point the tensor that was handed out to the copy."""
        memory = _memory_of(loan)
        flat = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
        own = flat.clone()
        self.nbytes += own.numel()
        _repoint(loan.tensor, own)
        loan.kept = True

    def _find(self, loans: list[Loan]) -> list[Tensor]:
        """Search the heap for other tensors that look at what was lent, and repoint them.

        Returns:
            Those that were found.
        """
        self._searches += 1
        by_key = {loan.key: loan for loan in loans}
        frozen = gc.get_freeze_count() > 0
        if frozen:  # an engine may have hidden its heap from the collector
            gc.unfreeze()
        try:
            found = _unique(
                value
                for value in itertools.chain(self.places(), gc.get_objects())
                if issubclass(type(value), Tensor) and storage_key(value) in by_key
            )
            hidden = _hidden(found)
        finally:
            if frozen:
                gc.freeze()
        for value in found:
            loan = by_key.get(storage_key(value))
            if loan is not None and id(value) not in hidden:
                _repoint(value, _flat_of(loan.tensor))
        return found


def _check(lost: Iterable[Loan]) -> None:
    """Refuse what could not be made independent.

    Raises:
        UnsupportedError: there is such a thing.
    """
    for loan in lost:
        raise UnsupportedError(
            f"{loan.name!r} was lent to the model's loaders, and something still looks at its "
            f"memory that cannot be given a copy: a numpy array, a storage, or an object of an "
            f"extension. Copy the tensor in the loader, or send tensors that are not reused, with "
            f"transport=[].",
            name=loan.name,
        )


def _can_alias(tensor: Tensor) -> bool:
    return (
        _CAN_LEND
        and tensor.layout is torch.strided
        and tensor.device.type in _DEVICES
        and tensor.numel() > 0
        and storage_key(tensor) is not None
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )


def _alias(tensor: Tensor) -> tuple[Tensor, torch.UntypedStorage]:
    """Return a tensor over the bytes of ``tensor``, and its storage, which is another one."""
    start, stop = extent_of(tensor)
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    source.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
    memory = torch._C._from_dlpack(torch._C._to_dlpack(source)).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory, 0, tensor.shape, tensor.stride()), memory


def _memory_of(loan: Loan) -> torch.UntypedStorage:
    if loan.memory is None:
        raise RuntimeError(f"{loan.name!r} was not lent")
    return loan.memory


def _flat_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of ``tensor`` as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _repoint(view: Tensor, own: Tensor) -> None:
    """Let ``view`` look at the same place in ``own`` as it does in its present storage."""
    moved = torch.empty(0, dtype=view.dtype, device=view.device)
    moved.set_(own.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    view.data = moved


def _references(value: object) -> int:
    """Return how many references there are to ``value``, but for those of this call."""
    return sys.getrefcount(value) - _CALL


_CALL = 0
_probe = torch.empty(0)
_CALL = _references(_probe) - 1
_inside = _probe[:]
_COUNTED = _references(_probe) > 1
"""Whether a use of a tensor inside torch counts as a reference to its Python object."""
del _probe, _inside


def _is_held(loan: Loan, dead: list[object]) -> bool:
    """Whether anything holds memory that was lent, other than dead variables.

    Args:
        loan: what was lent.
        dead: what dead variables hold.
    """
    memory = _memory_of(loan)
    if _storage_uses is None or _tensor_uses is None:
        return True
    uses = _storage_uses(memory._cdata) - 1
    if _references(memory) > 2 + (_COUNTED and uses > 0):  # the loan's, and the variable here
        return True
    views: dict[int, Tensor] = {}
    found: Counter[int] = Counter()
    pairs: dict[int, Any] = {}
    key = loan.key
    if storage_key(loan.tensor) == key:
        views[id(loan.tensor)] = loan.tensor
        found[id(loan.tensor)] = 1
    for value in dead:
        if isinstance(value, tuple):
            pairs[id(value)] = value
            found[id(value)] += 2  # in the variable, and in the list
        elif isinstance(value, Tensor) and storage_key(value) == key:
            views[id(value)] = value
            found[id(value)] += 2
    for pair in pairs:
        if _references(pairs[pair]) == found[pair] + 1:
            for value in pairs[pair]:
                if isinstance(value, Tensor) and storage_key(value) == key:
                    views[id(value)] = value
                    found[id(value)] += 1
    value = None
    if uses > len(views):
        return True
    bases = Counter(id(view._base) for view in views.values() if view._base is not None)
    for each in views:
        inside = _tensor_uses(views[each]) - 1  # held by other tensors, or by an extension
        counted = _COUNTED and inside > 0
        if inside > bases[each] or _references(views[each]) > found[each] + 1 + counted:
            return True
    return False


def _uses_inside(tensor: Tensor, views: list[Any]) -> int:
    """Return how often torch or an extension holds ``tensor``, other than as the base of views."""
    if _tensor_uses is None:
        return 1
    bases = sum(isinstance(view, Tensor) and view._base is tensor for view in _unique(views))
    return max(0, _tensor_uses(tensor) - 1 - bases)


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _hidden(found: list[Tensor]) -> Collection[int]:
    """Return the ids of the tensors that something holds which the collector does not see.

    A numpy array is such a thing: it has the address of its base, and would not follow it.
    """
    ids = {id(value) for value in found}
    seen: Counter[int] = Counter()
    for holder in gc.get_referrers(*found) if found else ():
        if holder is not found:
            seen.update(id(value) for value in gc.get_referents(holder) if id(value) in ids)
    local = local_values(sys._getframe(2), dead=False)
    seen.update(2 * [id(value) for value in local if id(value) in ids])  # here and in that list
    holder = None
    hidden = set()
    for index in range(len(found)):
        counted = seen[id(found[index])] + 1
        if _uses_inside(found[index], found):
            hidden.add(id(found[index]))
        elif _tensor_uses is not None and _COUNTED:
            counted += _tensor_uses(found[index]) > 1
        if _references(found[index]) > counted:
            hidden.add(id(found[index]))
    return hidden
