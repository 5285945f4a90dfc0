"""Lends the memory of a transport to loaders, and makes independent of it what they keep.

A loader is given an *alias*: a tensor over the same bytes with a storage object of its own. How
often that object is used says whether anybody still holds what was lent, whatever view of it, when
the bytes are going to change. Mostly nobody does, and nothing is copied. Otherwise the bytes are
copied once, and every tensor that looks at them is pointed to the copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes

from weightload.errors import UnsupportedError, UsageError
from weightload.frames import local_values
from weightload.holders import CAN_COUNT, find_views, is_held, uses_inside
from weightload.storage import extent_of, storage_key

__all__ = ["Buffers", "Loan", "Loans", "Transport", "buffers_of", "has_memory"]

Tensor = torch.Tensor
Transport = Tensor | Iterable[Tensor] | None
Buffers = list[tuple[torch.device, int, int]]
"""Device, first address and end of each buffer."""

_FLOOR = ("weightload.delivery", "weightload.preflight")
"""The modules that call a model's loaders: no frame below holds what was lent."""
_SEARCHES = 4
"""After so many searches of the heap in one load, tensors are copied before they are handed out."""
_DEVICES = ("cpu", "cuda")
_CAN_LEND = CAN_COUNT and hasattr(torch._C, "_to_dlpack") and hasattr(torch._C, "_from_dlpack")
"""Whether it can be told who holds what was lent. If not, everything is copied."""


def buffers_of(transport: Transport) -> Buffers | None:
    """Return where each buffer lies; ``None`` if everything is lent.

    Raises:
        UsageError: it is neither a tensor with memory, nor an iterable of them, nor ``None``.
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
        if not storage.nbytes():
            raise UsageError(
                "transport names the tensors whose memory is reused, found one without memory; "
                "pass [] if nothing is reused."
            )
        start = storage.data_ptr()
        found.append((buffer.device, start, start + storage.nbytes()))
    return found


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor has memory for all of its elements.

    One whose storage was freed has not, such as a parameter that FSDP has put away.
    """
    stop = extent_of(tensor)[1]
    return not tensor.numel() or bool(0 < stop <= tensor.untyped_storage().nbytes())


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

    buffers: Buffers | None
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
        kept = [loan for loan in loans if is_held(loan.tensor, loan.memory, dead)]
        if not kept:
            return loans
        with _disable_current_modes():
            for loan in kept:
                self._copy(loan)
            rest = [
                loan
                for loan in kept
                if is_held(loan.tensor, loan.memory, dead) or uses_inside(loan.tensor, dead)
            ]
            del dead
            if rest:
                found = self._find(rest)
                _check(loan for loan in rest if uses_inside(loan.tensor, found))
                del found
                _check(loan for loan in rest if is_held(loan.tensor, loan.memory, []))
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
            if is_held(loan.tensor, loan.memory, []):
                self._find([loan])
                _check(loan for loan in [loan] if is_held(loan.tensor, loan.memory, []))

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
        found, hidden = find_views({key for key in by_key if key is not None}, self.places)
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
