"""Which new tensor goes into which live one, so that no copy spoils another.

Live tensors can look into the same memory: one tensor at two places, a view and what it is a view
of. Their new values fit if they overlap in the same way, or are equal where the live ones overlap.
"""

from __future__ import annotations

import attrs
import torch

from weightload.storage import describe_change, extent_of, inner_tensors, storage_key

__all__ = ["Pairs", "same_bits", "same_values"]

Tensor = torch.Tensor
_ALIGNMENT = 64
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@attrs.frozen(eq=False, repr=False)
class _Pair:
    """A live tensor, the tensor whose value it is to have, and where this was found out."""

    live: Tensor
    new: Tensor
    where: str
    extent: tuple[int, int]


@attrs.define(eq=False, repr=False)
class Pairs:
    """Pairs of live tensor and new tensor, of which none spoils another.

    Attributes:
        copies: the pairs; the value of the new tensor is to go into the live one.
        paths: where each of them was found.
    """

    copies: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)
    paths: list[str] = attrs.field(factory=list)
    _known: dict[int, list[_Pair]] = attrs.field(factory=dict)
    _added: set[tuple[int, int]] = attrs.field(factory=set)
    _log: list[tuple[int, bool]] = attrs.field(factory=list)

    def hold(self, live: Tensor, where: str) -> str | None:
        """Note that ``live`` keeps the value that it has, so that no copy may change it.

        Returns:
            What is wrong if a pair that was entered before changes it.
        """
        parts = inner_tensors(live)
        problems = [self.hold(part, f"{where}.{name}") for name, part in parts.items()]
        if parts:
            return next((problem for problem in problems if problem is not None), None)
        key = storage_key(live)
        if key is None or not live.numel() or live.is_meta:
            return None
        pair = _Pair(live, live, where, extent_of(live))
        problem = self._conflict(key, pair)
        if problem is None:
            self._enter(key, pair, copied=False)
        return problem

    def _conflict(self, key: int, pair: _Pair) -> str | None:
        for other in self._known.get(key, ()):
            if _meet(pair, other) and not _agree(other, pair):
                return f"it shares memory with {other.where}, whose new value is another"
        return None

    def add(self, live: Tensor, new: Tensor, where: str) -> str | None:
        """Enter a pair, or say why it does not fit the live tensor or those entered before.

        Args:
            live: a tensor with memory of its own, or a sparse one.
            new: what the hook made.
            where: path for messages.
        """
        problem = describe_change(live, new)
        if problem is not None or live is new or (id(live), id(new)) in self._added:
            return problem
        parts, others = inner_tensors(live), inner_tensors(new)
        if parts or others:
            return self._add_parts(live, new, parts, others, where)
        key = storage_key(live)
        if key is not None and live.numel() and not live.is_meta:
            pair = _Pair(live, new, where, extent_of(live))
            problem = self._conflict(key, pair)
            if problem is not None:
                return problem
            moved = not _same_place(live, new)
            self._enter(key, pair, copied=moved)
            if not moved:
                return None
        else:
            self._log.append((0, True))
        self._added.add((id(live), id(new)))
        self.copies.append((live, new))
        self.paths.append(where)
        return None

    def _add_parts(
        self,
        live: Tensor,
        new: Tensor,
        parts: dict[str, Tensor],
        others: dict[str, Tensor],
        where: str,
    ) -> str | None:
        """Enter the tensors that hold the data of two tensors, all of them or none."""
        if type(live) is not type(new) or parts.keys() != others.keys():
            return f"type {type(live).__name__} became {type(new).__name__}"
        if live.layout is torch.sparse_coo and live.is_coalesced() != new.is_coalesced():
            return f"coalesced was {live.is_coalesced()} and is {new.is_coalesced()}"
        mark = self.mark()
        for name, part in parts.items():
            problem = self.add(part, others[name], f"{where}.{name}")
            if problem is not None:
                self.back_to(mark)
                return f"inner tensor {name!r}: {problem}"
        return None

    def mark(self) -> int:
        """Return a point that :meth:`back_to` goes back to."""
        return len(self._log)

    def back_to(self, mark: int) -> None:
        """Forget what was entered since ``mark``."""
        while len(self._log) > mark:
            key, copied = self._log.pop()
            if key:
                self._known[key].pop()
            if copied:
                live, new = self.copies.pop()
                self.paths.pop()
                self._added.discard((id(live), id(new)))

    def _enter(self, key: int, pair: _Pair, *, copied: bool) -> None:
        self._known.setdefault(key, []).append(pair)
        self._log.append((key, copied))

    def copy(self) -> int:
        """Copy every new value into its live tensor; return the number of bytes.

        A value that lies in memory which another copy overwrites is set aside first.
        """
        copies = [(live, new) for live, new in self.copies if live.numel()]
        written = {storage_key(live) for live, _ in copies} - {None}
        nbytes = 0
        with torch.no_grad():
            sources = [
                new.detach().clone() if storage_key(new) in written else new.detach()
                for _, new in copies
            ]
            for (live, _), source in zip(copies, sources, strict=True):
                _write(live.detach(), source)
                nbytes += live.numel() * live.element_size()
        return nbytes


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one device are of one shape and type and hold the same bits.

    Those of layouts whose memory nobody may look into, and those without memory, count as others.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    parts, others = inner_tensors(one), inner_tensors(two)
    if parts or others:
        return parts.keys() == others.keys() and all(
            same_bits(part, others[name]) for name, part in parts.items()
        )
    if not _readable(one) or not _readable(two):
        return False
    # Tensors that are only laid out alike, as a transposed weight and its new value, stay as is.
    order = sorted(range(one.dim()), key=one.stride, reverse=True)
    bits = [_bytes(tensor.detach().permute(order)) for tensor in (one, two)]
    width = next(word for word in _WORDS if all(_holds(octets, word) for octets in bits))
    return torch.equal(bits[0].view(width), bits[1].view(width))


def same_values(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same bits, or equal numbers: 0 and -0 are."""
    if same_bits(one, two):
        return True
    try:
        return torch.equal(one, two)
    except RuntimeError:  # there is no comparison of such numbers, or in such a layout
        return False


def _readable(tensor: Tensor) -> bool:
    """Whether a tensor without inner ones has memory that may be looked into."""
    if tensor.is_meta or tensor.is_quantized:  # a view of one with a scale ends the process
        return False
    return tensor.layout is torch.strided and storage_key(tensor) is not None


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one after the other."""
    tensor = tensor.resolve_conj().resolve_neg()
    # Not every type can be copied on every device; integers can.
    alike = next((word for word in _WORDS if word.itemsize == tensor.element_size()), tensor.dtype)
    tensor = tensor.view(alike)
    # One element counts as contiguous, whatever its stride, and then is no view of bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _holds(octets: Tensor, word: torch.dtype) -> bool:
    """Whether bytes can be looked at in words, which is quicker and takes less room."""
    places = (octets.numel(), octets.storage_offset(), octets.data_ptr())
    return not any(place % word.itemsize for place in places)


def _meet(one: _Pair, two: _Pair) -> bool:
    return one.extent[0] < two.extent[1] and two.extent[0] < one.extent[1]


def _same_place(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one shape, type and strides are the same view of one storage."""
    return storage_key(one) == storage_key(two) and one.storage_offset() == two.storage_offset()


def _agree(one: _Pair, two: _Pair) -> bool:
    """Whether two pairs with overlapping live tensors give every shared byte one value."""
    key = storage_key(one.new)
    if key is not None and key == storage_key(two.new):
        # The new tensors overlap as the live ones do.
        begins = [extent_of(pair.new)[0] - pair.extent[0] for pair in (one, two)]
        if begins[0] == begins[1]:
            return True
    begin = min(one.extent[0], two.extent[0]) // _ALIGNMENT * _ALIGNMENT
    end = max(one.extent[1], two.extent[1])
    room = torch.empty(end - begin, dtype=torch.uint8, device=one.live.device)
    views = [_view_in(room, pair.live, pair.extent[0] - begin) for pair in (one, two)]
    with torch.no_grad():
        for view, pair in zip(views, (one, two), strict=True):
            _write(view, pair.new.detach())
    return same_bits(views[0], one.new)


def _view_in(room: Tensor, like: Tensor, offset: int) -> Tensor:
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    place = offset // like.element_size()
    return view.set_(room.untyped_storage(), place, like.shape, like.stride())


def _write(target: Tensor, source: Tensor) -> None:
    """Copy, also into a tensor that was expanded: many elements, one place in memory."""
    if target.layout is torch.strided and storage_key(target) is not None:
        for dim, (size, step) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if step == 0 and size > 1:
                target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
