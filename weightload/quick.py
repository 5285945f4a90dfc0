"""Loads a model that only needs its tensors filled: no board, no loaders, no watching.

A plan has shown where everything goes, and a load that was watched has shown that nothing else has to
be done. What a session still has to know is which names have come; what is left to check is their
form. As soon as anything is not as it was recorded, the session opens its board after all, tells it
what has come so far, and goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import add, ge
from typing import Any

import attrs
import torch

from weightload.batching import Batch
from weightload.bundle import PLAIN, Addresses, Bundle, Portion
from weightload.entries import Counts
from weightload.express import Express
from weightload.intake import Intake
from weightload.lanes import Lane
from weightload.moving import LARGE, carry
from weightload.pieces import Pieces
from weightload.reading import Place
from weightload.recorded import Copy, Part, Recorded, Route, counts_of, loader_of
from weightload.registry import Convert
from weightload.skeleton import Body
from weightload.sources import FILLED

__all__ = ["Quick"]


class Quick:
    """The tensors of one load on their shortest way.

    Args:
        recorded: the plan, which holds now.
        part: of the model, which needs more than copies; one of those of the plan.
        body: what the model consists of.
        intake: counts what has come.
        mark_dirty: to be called before a live byte is written.
        converts: process pieces of the tensors that the part says, by their qualified names.

    Attributes:
        body: as given.
        recorded: as given.
        part: as given.
        pieces: what has come of tensors that are processed in pieces; ``None`` if there are none.
        tell: called from time to time, to report how far this has come.
    """

    def __init__(
        self,
        recorded: Recorded,
        part: Part,
        body: Body,
        intake: Intake,
        mark_dirty: Callable[[], None],
        converts: Mapping[str, Convert] | None = None,
    ) -> None:
        body.hold()
        self.body = body
        self.recorded = recorded
        self.part = part
        self.pieces: Pieces | None = None
        if converts:
            self.pieces = Pieces(part.pieced, converts, body, recorded.pool)
        self._express: Express | None = None
        self._between: Callable[[], None] | None = None
        self._intake = intake
        self._mark_dirty = mark_dirty
        self._on_host = body.skeleton.on_host
        verification = intake.verification
        self._compared = set() if verification is None else verification.choose(recorded.routes)
        self._first_to_come = verification is not None
        self._threads = torch.get_num_threads() > 1
        self._runs = self._runs_to_move()
        self._batch = Batch()
        self._sent: list[tuple[Copy, int]] = []
        self._handed_over = False
        self._written = 0
        self.tell: Callable[[], None] | None = None

    def prepared(self, express: Express, between: Callable[[], None]) -> None:
        """Note who takes what goes to the part that needs more, and is called after it has."""
        self._express, self._between = express, between

    @classmethod
    def fits(cls, part: Part, body: Body) -> bool:
        """Whether the loaders of single tensors are those that the plan was recorded with."""
        tensors = [*map(body.tensors.__getitem__, part.places)]
        now = [*map(getattr, tensors, repeat("weight_loader"), repeat(None))]
        return now == part.loaders or all(
            one == two or loader_of(tensor) == two
            for one, two, tensor in zip(now, part.loaders, tensors, strict=True)
        )

    @property
    def calls(self) -> bool:
        """Whether hooks of the model, or what does the same, may have to run while tensors come."""
        return self._express is not None or self.pieces is not None

    @property
    def ready(self) -> bool:
        """Whether something is complete and has to be processed."""
        if self.pieces is not None and self.pieces.full:
            return True
        return self._express is not None and self._express.ready

    @property
    def complete(self) -> bool:
        """Whether every name came that fills something."""
        return self._needed <= self._intake.seen.keys()

    @property
    def _needed(self) -> frozenset[str]:
        """The names that this load has to bring."""
        wanted = self._intake.wanted
        return self.part.needed if wanted is None else self.part.needed & wanted

    def expects(self, forms: Mapping[str, Any], *, complete: bool) -> bool:
        """Whether all names, shapes and types are as they were recorded, and none has come yet.

        Args:
            forms: the shape and type of each name that will come.
            complete: whether nothing else will, so that everything that fills something has to.
        """
        routes, seen, wanted = self.recorded.routes, self._intake.seen, self._intake.wanted
        for name, form in forms.items():
            route = routes.get(name)
            if (
                route is None
                or form != (route.shape, route.dtype)
                or name in seen
                or (wanted is not None and name not in wanted)
            ):
                return False
        return not complete or self._needed <= forms.keys() | seen.keys()

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Place] | None:
        """Note that a tensor has come, and return where its parts have to be put at once.

        As :meth:`Express.reserve`.
        """
        if self._express is not None and name in self.part.sources:
            return self._express.reserve(name, shape, dtype)
        intake, body = self._intake, self.body
        route = self.recorded.routes.get(name)
        if (
            route is None
            or not route.reads
            or self._first_to_come
            or name in self._compared
            or dtype is not route.dtype
            or shape != route.shape
            or name in intake.seen
            or (intake.wanted is not None and name not in intake.wanted)
        ):
            return None
        if route.copies:
            self._mark_dirty()
        intake.take(name, None, route.fact, route.nbytes)
        tensors, addresses = body.tensors, body.addresses
        runs = self.part.runs.get(name) if self._on_host else None
        if self.pieces is not None and name in self.part.cut:
            for copy in route.copies:
                self.pieces.came(copy)
        if runs is not None:
            return [Place(start, nbytes, addresses[at] + to) for at, to, start, nbytes in runs]
        indices = [body.skeleton.places[copy.place] for copy in route.copies]
        pairs = zip(route.copies, indices, strict=True)
        return [copy.reserve(tensors[at], addresses[at]) for copy, at in pairs]

    def bundle(
        self,
        names: Sequence[Any],
        shapes: Iterable[Any] | None = None,
        dtypes: Iterable[torch.dtype | None] = (),
    ) -> Bundle | None:
        """Return what is known about names that come one after the other.

        Args:
            names: what comes next.
            shapes: of what comes, if that is known without it.
            dtypes: their types, in that case.

        Returns:
            ``None`` if they cannot be taken together, or are not what they were.
        """
        intake, recorded, verification = self._intake, self.recorded, self._intake.verification
        if not self._on_host or intake.wanted is not None:
            return None
        if verification is not None and (shapes is not None or verification.mode == "full"):
            return None  # each value is looked at, best just before it is moved
        if not {str}.issuperset(map(type, names)):
            return None
        key = tuple(names)
        found = recorded.bundles.get(key)
        pieced = self.part.pieced
        if found is None or found.threads != self._threads or found.pieced is not pieced:
            owners = {} if self._express is None else self._express.owners
            found = Bundle.of(key, recorded, owners, pieced, threads=self._threads)
            if found is None:
                return None
            recorded.keep(found)
        if not found.helps or not intake.seen.keys().isdisjoint(key):
            return None
        if shapes is not None and (found.shapes != [*shapes] or found.dtypes != [*dtypes]):
            return None
        return found

    def begin(self, portion: Portion) -> Addresses | None:
        """Get ready for a portion, and return the addresses of its places.

        Returns:
            ``None`` if each of its tensors has to be looked at; nothing was done then.
        """
        if portion.single or (portion.fills and self._intake.verification is not None):
            return None  # in layers with hooks it is chosen by place what is compared
        express, addresses = self._express, self.body.addresses
        if portion.fills and (express is None or not express.expects(portion.fills)):
            return None
        if portion.live or portion.chunks:
            self._mark_dirty()
        if not portion.fills and not portion.chunks:
            return addresses
        found = {at: addresses[at] for at in portion.live}
        if express is not None and portion.fills:
            found.update(express.begin(portion.fills))
        if self.pieces is not None and portion.chunks:
            found.update(self.pieces.begin(portion.chunks))
        return found

    def end(self, portion: Portion) -> None:
        """Note that a portion has been moved."""
        intake = self._intake
        intake.seen.update(portion.facts)
        intake.nbytes += portion.nbytes
        intake.current = next(reversed(portion.facts))
        if self._express is not None and portion.fills:
            self._express.end(portion.fills)
        if self.pieces is not None and portion.chunks:
            self.pieces.end(portion.chunks)

    def take_all(self, names: Sequence[Any], tensors: Sequence[Any]) -> int:
        """Take tensors that are all at hand.

        Returns:
            How many were taken, the first ones; none if one of them does not fit.
        """
        bundle = self.bundle(names)
        if bundle is not None and bundle.fits(tensors) and self._apart(tensors, bundle.sizes):
            portions = bundle.portions
        elif self._all_fit(names, tensors):
            portions = [Portion(0, len(names))]
        else:
            return 0
        if self._first_to_come and names:
            self._compare_also(names[0])
        for portion in portions:
            addresses = self.begin(portion)
            if addresses is not None:
                self._note_some(portion, tensors)
                portion.move(tensors, addresses)
                self.end(portion)
                self._settle()
            else:
                done = self._take_singly(portion, names, tensors)
                if done < portion.stop:
                    return done
            if self._handed_over:
                return portion.stop
        self.flush()
        return len(names)

    def _take_singly(self, portion: Portion, names: Sequence[Any], tensors: Sequence[Any]) -> int:
        """Take the tensors of a portion one by one; return the position behind the last."""
        for at in range(portion.start, portion.stop):
            route = self.recorded.routes[names[at]]
            if route is None or self._handed_over or not self._do(names[at], tensors[at], route):
                self.flush()
                return at
            if self.tell is not None:
                self.tell()
        return portion.stop

    def _apart(self, tensors: Sequence[torch.Tensor], sizes: list[int]) -> bool:
        """Whether tensors of these sizes have memory for all that they hold, none of it the model's."""
        storages = [*map(torch.Tensor.untyped_storage, tensors)]
        starts = [*map(torch.UntypedStorage.data_ptr, storages)]
        ends = map(add, starts, map(torch.UntypedStorage.nbytes, storages))
        needed = map(add, map(torch.Tensor.data_ptr, tensors), sizes)
        return self.body.live.isdisjoint(starts) and all(map(ge, ends, needed))

    def _all_fit(self, names: Sequence[Any], tensors: Sequence[Any]) -> bool:
        pairs = zip(names, tensors, strict=True)
        return all(self._route(*pair) is not None for pair in pairs) and len({*names}) == len(names)

    def _note_some(self, portion: Portion, tensors: Sequence[torch.Tensor]) -> None:
        """Remember what is sent of a portion, if some of it is compared at the end."""
        verification = self._intake.verification
        if verification is None or self._compared.isdisjoint(portion.facts):
            return
        for name, tensor in zip(portion.facts, tensors[portion.start : portion.stop], strict=True):
            route = self.recorded.routes[name] if name in self._compared else None
            if route is not None:
                verification.receive(name, tensor)
                self._note(name, tensor, route)

    def _settle(self) -> None:
        """Process what is complete, and tell how far this has come."""
        if self._between is not None and self._express is not None and self._express.ready:
            self._between()
        if self.tell is not None:
            self.tell()

    def take_each(self, pairs: Iterable[Any], lane: Lane, *, lent: bool) -> Iterator[Any] | None:
        """Take tensors one by one, as long as they fit.

        Args:
            pairs: what a source yields.
            lane: orders the copies and the source on a device with streams.
            lent: whether memory may change as soon as the next tensor is asked for.

        Returns:
            What is left, ``None`` if that is nothing.
        """
        rest = iter(pairs)
        for pair in rest:
            if pair is FILLED:
                self.flush()
                if self._between is not None:
                    self._between()
                if self.tell is not None:
                    self.tell()
                continue
            try:
                name, tensor = pair
            except (TypeError, ValueError):
                return _with_first(pair, rest)
            if self._handed_over:
                return _with_first(pair, rest)
            route = self._route(name, tensor)
            on_host = route is not None and self._on_host and tensor.is_cpu
            if route is not None and not on_host:
                lane.arrived(tensor)
            if route is None or not self._do(name, tensor, route):
                self.flush()
                return _with_first(pair, rest)
            if self.tell is not None:
                self.tell()
            if not on_host:
                if lent:
                    self.flush()
                lane.asking(tensor)
            del pair, tensor  # a source that makes the next one may have this one's memory for it
        self.flush()
        return None

    def _runs_to_move(self) -> dict[str, tuple[tuple[int, int, int, int], ...]]:
        """Return for each name that is only moved what that takes."""
        if not self._on_host:
            return {}
        runs = self.part.runs
        if not self._threads:
            return runs
        return {k: mine for k, mine in runs.items() if all(run[3] < LARGE for run in mine)}

    def flush(self) -> None:
        """Do what waits to be copied, and process the pieces that are complete."""
        self._batch.flush()
        if self.pieces is not None:
            self.pieces.settle()
        if self._express is not None:
            self._express.flush()

    def _route(self, name: Any, tensor: Any) -> Route | None:
        """Return what has to be done, ``None`` if anything is not as it was recorded."""
        route = self.recorded.routes.get(name) if type(name) is str else None
        if (
            route is None
            or type(tensor) not in PLAIN
            or tensor.dtype is not route.dtype
            or tensor.shape != route.shape
            or not tensor.is_contiguous()
            or tensor.is_meta
            or tensor.is_neg()
            or name in self._intake.seen
        ):
            return None
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self.body.live or start + storage.nbytes() < tensor.data_ptr() + tensor.nbytes:
            return None
        wanted = self._intake.wanted
        if wanted is not None and name not in wanted:
            return None
        if self._first_to_come:
            self._compare_also(name)
        return route

    def _compare_also(self, name: str) -> None:
        """Let the first one be looked at, whichever it is."""
        self._first_to_come = False
        self._compared.add(name)

    def _do(self, name: str, tensor: torch.Tensor, route: Route) -> bool:
        """Take one tensor to its places; return whether that was done."""
        runs = self._runs.get(name)
        if runs is not None and tensor.is_cpu:
            if runs:
                self._mark_dirty()
            self._intake.take(name, tensor, route.fact, route.nbytes)
            self._note(name, tensor, route)
            address, addresses = tensor.data_ptr(), self.body.addresses
            for at, to, start, nbytes in runs:
                carry(addresses[at] + to, address + start, nbytes)
            return True
        if name in self.part.sources:
            if self._express is None or not self._express.put(name, tensor, route):
                return False
            if self._between is not None and self._express.ready:
                self._between()
            return True
        intake, body = self._intake, self.body
        if route.copies:
            self._mark_dirty()
        intake.take(name, tensor, route.fact, route.nbytes)
        if route.casts:
            intake.casts.add(name)
        self._note(name, tensor, route)
        if self.pieces is not None and name in self.part.cut:
            self._do_pieces(tensor, route, self.pieces)
            return True
        for copy in route.copies:
            target = body.tensors[body.skeleton.places[copy.place]]
            copy.carry_out(target, tensor, self._batch)
        return True

    def _do_pieces(self, tensor: torch.Tensor, route: Route, pieces: Pieces) -> None:
        """Put a tensor where its pieces are processed, and process those that are complete."""
        body = self.body
        for copy in route.copies:
            at = body.skeleton.places[copy.place]
            large = copy.nbytes >= LARGE and self._threads
            if copy.start is not None and tensor.is_cpu and not large:
                carry(body.addresses[at] + copy.to, tensor.data_ptr() + copy.start, copy.nbytes)
            else:
                copy.carry_out(body.tensors[at], tensor, self._batch)
            pieces.came(copy)
        if pieces.full:
            pieces.settle()

    def _note(self, name: str, tensor: torch.Tensor, route: Route) -> None:
        """Remember what is sent, if it is compared at the end."""
        verification, body = self._intake.verification, self.body
        if verification is None or name not in self._compared:
            return
        for copy in route.copies:
            target, source = body.tensors[body.skeleton.places[copy.place]], copy.source(tensor)
            if source is None:
                continue
            shape = copy.write.target.shape
            known = verification.received.get(name)
            whole = source.shape == tensor.shape == shape and source.stride() == tensor.stride()
            if known is None or target.dtype is not tensor.dtype or not whole:
                sent = source.to(target.device, target.dtype).expand(shape)
                known = verification.digest_of(sent)
            self._sent.append((copy, known))

    def compare(self) -> None:
        """Compare what is live with what was sent, if that was asked for; see :meth:`Board.compare`.

        Raises:
            VerificationError: they differ.
        """
        verification = self._intake.verification
        if verification is None:
            return
        places, tensors = self.body.skeleton.places, self.body.tensors
        for copy, sent in self._sent:
            live = copy.target(tensors[places[copy.place]])
            verification.compare_with(f"{copy.place} {list(copy.region)}", live, sent)
        verification.check()

    def hand_over(self, express: Express) -> None:
        """Tell the ledgers of the whole model, now that they are there, what has come so far."""
        self._handed_over = True
        self._written = self._so_far().bytes_written
        express.enter(self._intake.seen, self._sent)

    def counts(self) -> Counts:
        """Return the numbers for the receipt."""
        part = self.part
        checked, spared = len(self.body.tensors), part.spared
        peak = 0 if self.pieces is None else self.pieces.peak
        if self._handed_over:
            return Counts(bytes_written=self._written, staging_peak_bytes=peak)
        whole = self._intake.seen.keys() >= part.needed
        return attrs.evolve(
            part.counts if whole else self._so_far(),
            tensors_checked=checked,
            hooks_spared=spared,
            staging_peak_bytes=peak,
        )

    def _so_far(self) -> Counts:
        """Return the numbers of what has come without a board."""
        elsewhere = self._intake.seen.keys() - self.part.sources
        return counts_of(map(self.recorded.routes.get, elsewhere), self.part.pieced)


def _with_first(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
