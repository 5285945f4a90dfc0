"""Tensors whose pieces are processed one by one, as soon as each has come.

A hook that packs a stack of experts does the same to each of them. If its rule says so, and it has shown
it, a reload does not stage the stack: what comes is packed a few experts at a time, while it is still in
the processor's cache. What comes in pieces of pieces, or in any order, waits in the live memory of the
piece itself, so that no order of the source needs more memory than another.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from weightload.errors import ProcessingError
from weightload.pool import Pool
from weightload.registry import Convert, ModuleRule, Role
from weightload.staging import BUCKET
from weightload.storage import storage_key

if TYPE_CHECKING:
    from weightload.recorded import Copy
    from weightload.skeleton import Body

__all__ = [
    "AT_ONCE",
    "MOST",
    "Chunk",
    "Pieced",
    "Pieces",
    "Trial",
    "alone",
    "converts_of",
    "pieces_of",
    "room_for",
    "runs_of",
]

AT_ONCE = 2 << 20
"""Bytes of pieces that are processed together, unless one is larger: little enough to be in a cache."""
MOST = 4 * AT_ONCE
"""Bytes of pieces that may be put beside the live tensors before they are processed."""

_HOST = torch.device("cpu")
_NOTHING = torch.empty(0, dtype=torch.uint8)


@attrs.frozen(eq=False, repr=False)
class Pieced:
    """A tensor of a model whose pieces are processed one by one.

    Attributes:
        module: qualified name of its module.
        name: its name there.
        at: its position in the skeleton.
        count: how many pieces it has.
        numel: elements of each.
        nbytes: size of each.
        address: where the first one was when its hook was looked at. What else the hook made might
            have looked into that memory, and would not follow to another.
    """

    module: str
    name: str
    at: int
    count: int
    numel: int
    nbytes: int
    address: int

    @classmethod
    def of(cls, module: str, name: str, at: int, live: torch.Tensor) -> Pieced:
        """Describe a live tensor."""
        return cls(module, name, at, len(live), live[0].numel(), live[0].nbytes, live.data_ptr())

    @property
    def at_once(self) -> int:
        """How many pieces are processed together."""
        return max(1, AT_ONCE // max(1, self.nbytes))


@attrs.frozen(eq=False, repr=False)
class Chunk:
    """Pieces of one tensor, one behind the other, all of which come in one portion.

    Attributes:
        place: what the runs of the portion that go there name as their place.
        at: position of the tensor in the skeleton.
        first: the first piece.
        stop: the piece behind the last one.
        offset: where the first one is put, in bytes from the beginning of the scratch memory.
        start: where the first one is in the tensor, in bytes.
    """

    place: int
    at: int
    first: int
    stop: int
    offset: int
    start: int


def pieces_of(copy: Copy) -> range:
    """Return which pieces a write fills, or fills in part."""
    return range(*copy.region[0])


class Pieces:
    """What has come of the tensors that are processed in pieces, in one load.

    Args:
        pieced: by qualified name of the tensor.
        converts: likewise, what does it.
        body: what the model consists of.
        pool: gives memory.

    Attributes:
        pieced: as given.
        peak: most bytes that were beside the live tensors at once.
    """

    def __init__(
        self,
        pieced: Mapping[str, Pieced],
        converts: Mapping[str, Convert],
        body: Body,
        pool: Pool,
    ) -> None:
        self.pieced = pieced
        self.peak = 0
        self._by_at = {one.at: one for one in pieced.values()}
        self._converts = {one.at: converts[place] for place, one in pieced.items()}
        self._live = {one.at: body.tensors[one.at].detach() for one in pieced.values()}
        self._pool = pool
        self._left: dict[int, list[int]] = {}
        self._ready: dict[int, list[int]] = {}
        self._waiting = 0
        self._scratch = _NOTHING

    def __contains__(self, place: str) -> bool:
        """Whether this has a tensor of that qualified name."""
        return place in self.pieced

    @property
    def full(self) -> bool:
        """Whether as much waits to be processed as is done at once."""
        return self._waiting >= AT_ONCE

    @property
    def modules(self) -> set[str]:
        """The qualified names of the modules of which something has come."""
        return {one.module for at, one in self._by_at.items() if at in self._left}

    def came(self, copy: Copy) -> None:
        """Note that a write has been done, or will be before the next :meth:`settle`."""
        one = self.pieced.get(copy.place)
        if one is None:
            return
        left, span = self._left_of(one.at), pieces_of(copy)
        each = copy.count // max(1, len(span))
        for piece in span:
            left[piece] -= each
            if not left[piece]:
                self._ready.setdefault(one.at, []).append(piece)
                self._waiting += one.nbytes

    def settle(self) -> None:
        """Process the pieces that are complete, each of which is in its own live memory.

        Raises:
            ProcessingError: what does it raised.
        """
        while self._ready:
            at, ready = self._ready.popitem()
            for first, stop in runs_of(sorted(ready), self._by_at[at].at_once):
                self._convert_where_it_is(at, first, stop)
        self._waiting = 0

    def begin(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """Return for the place of each chunk where its tensor would have its first element."""
        size = max(
            one.offset + (one.stop - one.first) * self._by_at[one.at].nbytes for one in chunks
        )
        base = self._room(size).data_ptr()
        return {one.place: base + one.offset - one.start for one in chunks}

    def end(self, chunks: Sequence[Chunk]) -> None:
        """Process what has been put where :meth:`begin` said.

        Raises:
            ProcessingError: what does it raised.
        """
        for chunk in chunks:
            one, count = self._by_at[chunk.at], chunk.stop - chunk.first
            self._left_of(chunk.at)[chunk.first : chunk.stop] = [0] * count
            loaded = self._scratch[chunk.offset : chunk.offset + count * one.nbytes]
            self._convert(chunk.at, chunk.first, chunk.stop, loaded)

    def finish(self, module: str) -> None:
        """Process the rest of a module's tensors, which others have brought into live memory.

        Raises:
            ProcessingError: as :meth:`settle`.
        """
        for one in self._by_at.values():
            if one.module == module:
                rest = [piece for piece, left in enumerate(self._left_of(one.at)) if left]
                for first, stop in runs_of(rest, one.at_once):
                    self._convert_where_it_is(one.at, first, stop)

    def let_go(self) -> None:
        """Give the scratch memory back."""
        if self._scratch.numel():
            block = self._scratch.untyped_storage()
            self._scratch = _NOTHING
            self._pool.give(block)

    def _left_of(self, at: int) -> list[int]:
        """Return how many elements of each piece have not come this way."""
        left = self._left.get(at)
        if left is None:
            one = self._by_at[at]
            left = self._left[at] = [one.numel] * one.count
        return left

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._scratch.numel() < nbytes:
            self.let_go()
            block = self._pool.take(_room_of(nbytes), _HOST)
            self._scratch = torch.empty(0, dtype=torch.uint8).set_(block)
            self.peak = max(self.peak, block.nbytes())
        return self._scratch

    def _convert_where_it_is(self, at: int, first: int, stop: int) -> None:
        live = self._live[at][first:stop]
        loaded = self._room(live.nbytes)[: live.nbytes]
        loaded.view(live.dtype).view(live.shape).copy_(live)
        self._convert(at, first, stop, loaded)

    def _convert(self, at: int, first: int, stop: int, loaded: torch.Tensor) -> None:
        live = self._live[at][first:stop]
        try:
            self._converts[at](loaded.view(live.dtype).view(live.shape), live)
        except Exception as error:
            one = self._by_at[at]
            raise ProcessingError(
                f"What processes pieces {first} to {stop - 1} of {one.name!r} of module "
                f"{one.module!r} raised {type(error).__name__}: {error}",
                module=one.module,
                role=Role.QUANT.value,
            ) from error


def runs_of(pieces: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield first and stop of what follows each other, at most so many at once."""
    start = 0
    for at in range(1, len(pieces) + 1):
        if at == len(pieces) or pieces[at] != pieces[at - 1] + 1 or at - start == most:
            yield pieces[start], pieces[at - 1] + 1
            start = at


def room_for(pieced: Iterable[Pieced]) -> int:
    """Return how many bytes a load may need beside tensors that are processed in pieces."""
    return max([_room_of(MOST), *(_room_of(one.nbytes) for one in pieced)])


def _room_of(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def alone(body: Body, pieced: Collection[Pieced]) -> bool:
    """Whether tensors are where they were, and no other of the model looks into their memory."""
    keys = [*map(storage_key, body.tensors)]
    mine = {keys[one.at] for one in pieced}
    there = all(body.tensors[one.at].data_ptr() == one.address for one in pieced)
    return there and sum(key in mine for key in keys) == len(mine)


def converts_of(rule: ModuleRule, path: str, module: nn.Module) -> dict[str, Convert] | None:
    """Return what a rule says of a module's pieces, ``None`` if that is nothing, or makes no sense.

    Args:
        rule: the rule.
        path: the module's qualified name, for a warning.
        module: the module, as it computes.
    """
    if rule.pieces is None:
        return None
    try:
        said = rule.pieces(module)
        if said is None:
            return None
        found: dict[str, Any] = dict(said)
        strange = [name for name in found if module._parameters.get(name) is None]
        strange += [name for name, convert in found.items() if not callable(convert)]
    except Exception as error:
        _warn(path, module, f"raised {type(error).__name__}: {error}")
        return None
    if strange:
        _warn(
            path, module, f"names {strange}, which are no parameters, or gives no function for them"
        )
        return None
    return found


def _warn(path: str, module: nn.Module, what: str) -> None:
    warnings.warn(
        f"The rule for {type(module).__qualname__} says how pieces are processed, and for {path!r} "
        f"that {what}. The hook is called in every reload; correct the rule, or leave its pieces out.",
        stacklevel=2,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor ``[pieces, ...]`` as ``[pieces, bytes]``."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8)


def _fits(loaded: torch.Tensor, new: torch.Tensor, some: list[int]) -> bool:
    """Whether pieces of a new value have the form of those that were loaded."""
    return (
        new.dim() > 0
        and len(new) > some[-1]
        and new.dtype is loaded.dtype
        and new.shape[1:] == loaded.shape[1:]
        and new.is_contiguous()
    )


@attrs.frozen(eq=False, repr=False)
class Trial:
    """What a hook was given, to find out whether its rule's functions make the same of it.

    Attributes:
        converts: those functions, by name of the parameter.
        loaded: likewise, some pieces, spread over all, and what they held.
    """

    converts: Mapping[str, Convert]
    loaded: dict[str, tuple[list[int], torch.Tensor]]

    @classmethod
    def of(cls, module: nn.Module, converts: Mapping[str, Convert]) -> Trial:
        """Keep what a hook is about to be given; at most as much as a bucket of each tensor."""
        loaded = {}
        for name in converts:
            tensor = module._parameters.get(name)
            if tensor is not None and tensor.dim() and tensor.numel() and not tensor.is_meta:
                most = max(1, BUCKET * len(tensor) // max(1, tensor.nbytes))
                some = [*range(0, len(tensor), math.ceil(len(tensor) / most))]
                loaded[name] = some, tensor.detach()[some].clone()
        return cls(converts, loaded)

    def holds(self, path: str, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, of which the functions make what the hook has made.

        Args:
            path: the qualified name of the module.
            module: the hook has run.
        """
        found: dict[str, torch.Tensor] = {}
        for name, (some, loaded) in self.loaded.items():
            new = module._parameters.get(name)
            if new is None or not _fits(loaded, new, some):
                continue  # it has another form now
            try:
                same = self._same(name, loaded, new.detach(), some)
            except Exception as error:
                _warn(path, module, f"raises {type(error).__name__} for {name!r}: {error}")
                continue
            if same:
                found[name] = new
            else:
                _warn(path, module, f"gives other values than its hook for {name!r}")
        return found

    def shows(self, name: str, live: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether all pieces that are looked at are others than before.

        If not, nothing can be said of what may depend on them.
        """
        some, _ = self.loaded[name]
        before, now = (_bits(tensor.detach()[some]) for tensor in (live, new))
        return bool((before != now).flatten(1).any(1).all())

    def _same(self, name: str, loaded: torch.Tensor, new: torch.Tensor, some: list[int]) -> bool:
        most = max(1, AT_ONCE // max(1, loaded[0].nbytes))
        first = min(1, len(some) - 1)  # one piece by itself, then as many as there will be
        groups = [*runs_of(range(first), 1), *runs_of(range(first, len(some)), most)]
        for start, stop in groups:
            wanted = new[some[start:stop]]
            # Whatever a function leaves unwritten is not what the hook has made.
            made = _bits(wanted).bitwise_not().view(new.dtype).view(wanted.shape)
            self.converts[name](loaded[start:stop], made)
            if not torch.equal(_bits(made), _bits(wanted)):
                return False
        return True
