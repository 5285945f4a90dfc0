"""What is remembered with a model: the plan of its loads, made ready, and for which state it is good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.batching import Batch
from weightload.births import Room
from weightload.bundle import Bundle
from weightload.entries import Counts, Entry, Load
from weightload.ledger import Region, locate, volume
from weightload.pieces import Pieced
from weightload.plan import Form, Plan, View, Write
from weightload.pool import Pool
from weightload.reading import Place
from weightload.receipt import Names
from weightload.record import Renewal, SourceFact
from weightload.registry import Role
from weightload.scribe import form_of
from weightload.skeleton import Body, Skeleton
from weightload.storage import Look

__all__ = ["Copy", "Part", "Recorded", "Route", "counts_of", "loader_of"]


_KEPT = 20_000
"""Names of bundles that are kept of any model; of a large one those of two loads."""


@attrs.frozen(eq=False, repr=False)
class Copy:
    """One write of a plan, made ready for a model.

    Attributes:
        write: what the plan says.
        place: qualified name of the tensor that is written.
        region: the part of it that is filled.
        count: its elements.
        nbytes: its size.
        loader: the parameter's own loader when the plan was recorded.
        start: bytes before what is read in the source; ``None`` if it is not one run of bytes that
            goes to one run of bytes as it is.
        to: bytes before what is written, from the first element of the tensor on.
    """

    write: Write
    place: str
    region: Region
    count: int
    nbytes: int
    loader: object
    start: int | None
    to: int

    @classmethod
    def of(cls, write: Write, region: Region, loader: object) -> Copy:
        """Make a write ready."""
        source, target = write.source, write.target
        size = _dtype(target.dtype).itemsize
        run = source is not None and source.dtype == target.dtype
        run = run and source is not None and _is_run(source) and _is_run(target)
        return cls(
            write=write,
            place=write.place,
            region=region,
            count=volume(region),
            nbytes=volume(region) * size,
            loader=loader,
            start=source.offset * size if run and source is not None else None,
            to=target.offset * size,
        )

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that is written."""
        return _part(tensor.detach(), self.write.target)

    def source(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the part of a contiguous source that is read; ``None`` if a number is written."""
        view = self.write.source
        return None if view is None else _part(tensor, view)

    def reserve(self, tensor: torch.Tensor, address: int) -> Place:
        """Return where one run of bytes goes; the tensor is at that address."""
        start = self.start or 0
        if tensor.is_cpu:
            return Place(start, self.nbytes, address + self.to)
        return Place(start, self.nbytes, 0, self.target(tensor))

    def carry_out(self, target: torch.Tensor, source: torch.Tensor, batch: Batch) -> None:
        """Copy from a contiguous source, at once or when the batch is flushed."""
        part = self.source(source)
        if part is None:
            self.target(target).fill_(self.write.value)  # type: ignore[arg-type]
        else:
            batch.add(self.target(target), part)


def _part(tensor: torch.Tensor, view: View) -> torch.Tensor:
    return tensor.as_strided(view.shape, view.stride, int(tensor.storage_offset()) + view.offset)


def _is_run(view: View) -> bool:
    """Whether a view has its elements one behind the other."""
    whole = Form.contiguous(view.shape, view.dtype).stride
    steps = zip(view.shape, view.stride, whole, strict=True)
    return all(size == 1 or step == other for size, step, other in steps) or 0 in view.shape


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


@attrs.frozen(eq=False, repr=False)
class Route:
    """All that has to be done for one name.

    Attributes:
        shape: of the source.
        dtype: of the source.
        nbytes: size of the source.
        fact: what is remembered about the name.
        copies: where it goes.
        casts: whether values are stored in another type.
        written: bytes that are written.
        reads: whether all of it that is needed are runs of bytes that go to runs of bytes.
    """

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    fact: SourceFact
    copies: tuple[Copy, ...]
    casts: bool
    written: int
    reads: bool


@attrs.frozen(eq=False, repr=False)
class Part:
    """The part of a model that needs more than copies in each load.

    Attributes:
        whole: whether that is the whole model.
        modules: their qualified names, otherwise.
        sources: names of tensors that go there.
        runs: for each name that goes elsewhere, and only as bytes that are moved, what that takes:
            position of the tensor in the skeleton, first byte there, first byte in the source,
            number of bytes.
        needed: names of all tensors that fill something, wherever they go.
        counts: what the receipt of a complete load says of what is filled elsewhere.
        places: positions in the skeleton of the tensors that are filled elsewhere.
        loaders: their own loaders.
        spared: how many hooks there are elsewhere, all of which do the same whatever is loaded.
        consumed: what the receipt of a complete load says of the needed names.
        pieced: by qualified name, the tensors elsewhere that are processed in pieces.
        cut: names of what goes there, which are not among those in ``runs``.
    """

    whole: bool
    modules: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    runs: dict[str, tuple[tuple[int, int, int, int], ...]] = attrs.field(factory=dict)
    needed: frozenset[str] = frozenset()
    counts: Counts = attrs.field(factory=Counts)
    places: list[int] = attrs.field(factory=list)
    loaders: list[object] = attrs.field(factory=list)
    spared: int = 0
    consumed: Names = attrs.field(factory=Names)
    pieced: dict[str, Pieced] = attrs.field(factory=dict)
    cut: frozenset[str] = frozenset()


@attrs.define(eq=False, repr=False)
class Recorded:
    """A plan that was recorded on a model, and what has been made ready of it.

    Attributes:
        plan: the plan.
        skeleton: what the model was made of when the load had ended.
        loads: the model's ``load_weights`` at that time.
        loaders: for each tensor that is written its own loader at that time.
        part: which part of the model needs more than copies; ``None`` as long as nobody has looked.
        in_pieces: the same, without what a load may process in pieces; ``None`` if that is nothing.
        hosts: qualified names of the tensors that may be staged in their own live memory, with
            whether processing leaves the new value there, and how they look into their memory.
        landings: for each hook, by the name of its module and its role, which of the tensors that
            it makes to write into become the new values of which live ones: the module, the section
            and the name.
        renewals: by the name of a unit, what its one hook makes anew; see :attr:`Unit.renewal`.
        unsure: how many loads could not tell what hooks do to pieces.
        pool: memory that its loads stage in.
        routes: what has to be done for each name that was asked for so far.
        bundles: what came in one call, or in one file, each of the last loads, by its names.
    """

    plan: Plan
    skeleton: Skeleton
    loads: object
    loaders: dict[str, object]
    part: Part | None = None
    in_pieces: Part | None = None
    hosts: dict[str, tuple[bool, Look]] = attrs.field(factory=dict)
    landings: dict[tuple[str, Role], dict[Room, tuple[str, str, str]]] = attrs.field(factory=dict)
    renewals: dict[str, Renewal] = attrs.field(factory=dict)
    unsure: int = 0
    pool: Pool = attrs.field(factory=Pool)
    routes: dict[str, Route | None] = attrs.field(factory=dict)
    bundles: dict[tuple[str, ...], Bundle] = attrs.field(factory=dict)
    _kept: int = attrs.field(init=False, default=0)
    _skipped: frozenset[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Make what is a list in the plan quick to look up."""
        self._skipped = frozenset(self.plan.skipped)

    @classmethod
    def of(cls, plan: Plan, model: nn.Module, load: Load) -> Recorded:
        """Note which state of a model a plan belongs to; the load has ended."""
        tensors = {name: entry.tensor for entry in load.entries for name in entry.names[:1]}
        return cls(
            plan,
            Skeleton.of(load.modules, load.framework.registry, plan.places),
            loads_of(model),
            {place: loader_of(tensors[place]) for place in plan.places if place in tensors},
        )

    def body(self, model: nn.Module) -> Body | None:
        """Return what the model consists of, ``None`` if its loaders might do something else now."""
        return self.skeleton.body(model) if self.loads == loads_of(model) else None

    def keep(self, bundle: Bundle) -> None:
        """Keep a bundle; all others go if there is more than a few loads can have brought."""
        if bundle.names not in self.bundles:
            self._kept += len(bundle.names)
        if self._kept > max(_KEPT, 2 * len(self.routes)):
            self.bundles.clear()
            self._kept = len(bundle.names)
        self.bundles[bundle.names] = bundle

    def knows(self, name: str) -> bool:
        """Whether the load that was recorded had this name."""
        return name in self.plan.sources

    def route(self, name: str, entries: Mapping[str, Entry]) -> Route | None:
        """Return what has to be done for a name, ``None`` if only its loaders know."""
        try:
            return self.routes[name]
        except KeyError:
            self.routes[name] = found = self._make(name, entries)
            return found

    def _make(self, name: str, entries: Mapping[str, Entry]) -> Route | None:
        plan = self.plan
        writes = plan.writes.get(name)
        if writes is None and name not in self._skipped:
            return None
        form, copies = plan.sources[name], []
        if _dtype(form.dtype).is_complex:
            return None  # its bytes may be those of the conjugate
        for write in writes or ():
            entry = entries.get(write.place)
            planned = plan.places[write.place]
            if entry is None or form_of(entry.tensor) != planned:
                return None
            region = _region(write.target, entry.tensor)
            if region is None:
                return None
            copies.append(Copy.of(write, region, self.loaders.get(write.place)))
        dtype = _dtype(form.dtype)
        size = torch.Size(form.shape)
        return Route(
            shape=size,
            dtype=dtype,
            nbytes=size.numel() * dtype.itemsize,
            fact=SourceFact(
                shape=form.shape,
                dtype=dtype,
                consumed=bool(copies),
                place=copies[0].place if copies else None,
            ),
            copies=tuple(copies),
            written=sum(copy.nbytes for copy in copies),
            casts=any(copy.write.target.dtype != form.dtype for copy in copies),
            reads=all(copy.start is not None for copy in copies),
        )


def counts_of(routes: Iterable[Route | None], pieced: Mapping[str, Pieced]) -> Counts:
    """Return the numbers of what goes to its places without a board.

    Args:
        routes: of what has come.
        pieced: the places that are processed in pieces, by their qualified names.
    """
    known = [route for route in routes if route is not None]
    places = {copy.place for route in known for copy in route.copies}
    split = places & pieced.keys()
    modules = {pieced[place].module for place in split}
    return Counts(
        bytes_written=sum(route.written for route in known),
        tensors_in_place=len(places - split),
        tensors_staged=len(split),
        layers_in_place=len({place.rpartition(".")[0] for place in places - split}),
        layers_staged=len(modules),
        hooks_in_pieces=len(modules),
    )


def loads_of(model: nn.Module) -> object:
    """Return what tells one implementation of a model's loading from another."""
    own = vars(model).get("load_weights")
    return own if own is not None else getattr(type(model), "load_weights", None)


def loader_of(tensor: torch.Tensor) -> object:
    """Return the loader of a tensor; of one that is bound to the tensor, what is bound."""
    loader: Any = getattr(tensor, "weight_loader", None)
    return loader.__func__ if getattr(loader, "__self__", None) is tensor else loader


def _region(view: View, tensor: torch.Tensor) -> Region | None:
    return locate(view.offset, view.shape, view.stride, tuple(tensor.shape), tuple(tensor.stride()))
