"""Records the writes of a load that goes through a model's loaders, as a plan for later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightload.observer import tensors_of
from weightload.plan import Form, Plan, View, Write
from weightload.storage import storage_key

if TYPE_CHECKING:
    from weightload.entries import Entry, Load
    from weightload.ledger import Region
    from weightload.observer import Watched

__all__ = ["Scribe", "form_of", "type_name"]


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type as plans have it."""
    return str(dtype).removeprefix("torch.")


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor."""
    return Form(
        shape=tuple(tensor.shape), stride=tuple(tensor.stride()), dtype=type_name(tensor.dtype)
    )


@attrs.define
class _Lent:
    """The tensor that loaders have asked for last; nothing here keeps it alive."""

    name: str
    dtype: torch.dtype
    offset: int
    count: int
    key: int | None
    form: Form | None


class Scribe:
    """Watches what loaders do with the tensors that they get.

    A name is *planned* if all that was done with its tensor is to copy parts of it to places that
    are known, while the loaders had it. What a loader looks at or computes with, and everything
    else that fills the same tensor of the model, is left to the loaders. If they kept a tensor
    beyond its turn, everything is: nobody knows what else they need then.
    """

    def __init__(self) -> None:
        self.useless = False
        self._lent: _Lent | None = None
        self._number: float | int | None = None
        self._keys: dict[int, StorageWeakRef] = {}
        self._forms: dict[str, Form] = {}
        self._writes: dict[str, list[tuple[Entry, Write]]] = {}
        self._owners: dict[tuple[int, Region], str] = {}
        self._names: dict[int, set[str]] = {}
        self._unplanned: set[str] = set()
        self._places: set[int] = set()
        self._place_forms: dict[str, Form] = {}

    # ------------------------------------------------------------------ what happens

    def lent(self, name: str, tensor: torch.Tensor) -> None:
        """Note which tensor loaders get next."""
        form = None
        if tensor.is_contiguous() and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            form = Form.contiguous(tuple(tensor.shape), type_name(tensor.dtype))
        if form is None or name in self._forms:
            self._unplanned.add(name)
        else:
            self._forms[name] = form
        key = storage_key(tensor)
        if key is not None:
            self._keys.setdefault(key, StorageWeakRef(tensor.untyped_storage()))
        offset = int(tensor.storage_offset()) if form is not None else 0
        self._lent = _Lent(name, tensor.dtype, offset, tensor.numel(), key, form)

    def done(self) -> None:
        """Note that loaders have got everything that one call brings."""
        self._lent = None

    def kept(self) -> None:
        """Note that loaders hold a tensor beyond its turn."""
        self.useless = True

    def used(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operation that makes no view and does not only copy to the model."""
        self._number = None
        if name in ("fill_", "zero_"):
            number = args[1] if len(args) > 1 else 0
            self._number = number if isinstance(number, int | float) else None
        for tensor in tensors_of(args, kwargs):
            key = storage_key(tensor)
            if self._lent is not None and key == self._lent.key:
                self._unplanned.add(self._lent.name)
            elif key in self._keys:
                self.useless = True

    def computed(self, entry: Entry) -> None:
        """Note that the value of a tensor of the model is read, or made of more than one source."""
        self._places.add(id(entry))

    def wrote(
        self,
        entry: Entry,
        watched: Watched,
        region: Region | None,
        target: torch.Tensor,
        source: torch.Tensor | None,
    ) -> None:
        """Note a write to a tensor of the model."""
        lent = self._lent
        if target.numel() == 0:
            return
        if lent is None:
            self.useless = True
            return
        self._names.setdefault(id(entry), set()).add(lent.name)
        view = None if source is None else self._view(lent, source, target)
        number = self._number if source is None else None
        known = view is not None or number is not None
        if not known:
            self._unplanned.add(lent.name)
        other = None if region is None else self._owners.setdefault((id(entry), region), lent.name)
        whole = target.dtype == entry.tensor.dtype
        if not known or other is None or other != lent.name or not whole:
            self._places.add(id(entry))
            return
        to = View(
            offset=int(target.storage_offset()) - watched.base_offset,
            shape=tuple(target.shape),
            stride=tuple(target.stride()),
            dtype=type_name(target.dtype),
        )
        mine = self._writes.setdefault(lent.name, [])
        if any(known is entry and one.target == to for known, one in mine):
            self._places.add(id(entry))
            return
        module, _, tensor = entry.names[0].rpartition(".")
        write = Write(source=view, module=module, tensor=tensor, target=to, value=number)
        mine.append((entry, write))
        self._place_forms.setdefault(entry.names[0], form_of(entry.tensor))

    def _view(self, lent: _Lent, source: torch.Tensor, target: torch.Tensor) -> View | None:
        """Return which part of what was lent is copied, ``None`` if it is something else."""
        key = storage_key(source)
        if key in self._keys and key != lent.key:
            self.useless = True
        same = key == lent.key and source.dtype == lent.dtype
        if not same or source.shape != target.shape or lent.form is None:
            return None
        first = int(source.storage_offset()) - lent.offset
        steps = zip(source.shape, source.stride(), strict=True)
        last = first + sum((size - 1) * step for size, step in steps)
        if first < 0 or last >= max(lent.count, 1):
            return None
        return View(
            offset=first,
            shape=tuple(source.shape),
            stride=tuple(source.stride()),
            dtype=lent.form.dtype,
        )

    # ------------------------------------------------------------------ what comes of it

    def plan(self, load: Load) -> Plan:
        """Return the plan of a load that has finished."""
        intake = load.intake
        bad = {
            id(entry)
            for entry in load.entries
            if id(entry) in self._places or entry.shared.names or entry.shared.overlaps
        }
        unplanned = set(self._forms) if self.useless else set(self._unplanned)
        for place in bad:
            unplanned |= self._names.get(place, set())
        writes: dict[str, tuple[Write, ...]] = {}
        places: dict[str, Form] = {}
        computed, skipped = [], []
        for name, fact in intake.seen.items():
            mine = self._writes.get(name, [])
            nothing = not mine and not fact.consumed and name not in intake.unclaimed
            if name in unplanned or name not in self._forms or not (mine or nothing):
                computed.append(name)
            elif nothing:
                skipped.append(name)
            else:
                writes[name] = tuple(write for _, write in mine)
                places.update((write.place, self._place_forms[write.place]) for _, write in mine)
        return Plan(
            sources={name: form for name, form in self._forms.items() if name in intake.seen},
            writes=writes,
            computed=tuple(computed),
            skipped=tuple(skipped),
            places=places,
        )
