"""Takes named tensors from a source, checks each before the model sees it, keeps count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from weightload.errors import (
    DuplicateWeightError,
    UnexpectedWeightError,
    WeightMismatchError,
    name_some,
)
from weightload.hands import Hands
from weightload.lanes import Lane
from weightload.record import SourceFact
from weightload.scope import Scope
from weightload.scribe import Scribe
from weightload.sources import FILLED, Pair, pairs_of, unpack
from weightload.storage import storage_key
from weightload.transport import Loan, Loans, has_memory
from weightload.values import finite, refuse_values, wide_floats
from weightload.verifying import Verification

__all__ = ["Intake"]

_END: Any = object()


def _nothing() -> None:
    pass


@attrs.define(kw_only=True, repr=False)
class Intake:
    """Counts and checks what one session receives.

    Attributes:
        manifest: the source names of the load that made the model, if they are known.
        scope: what this session promises to bring.
        wanted: the source names that a partial load brings; ``None`` if it brings all.
        check_finite: whether to refuse NaN and infinity.
        lenient: let a name come again; the last one counts, as in a framework's own first load.
        seen: every name that came, with whether it filled something.
        current: the name whose tensor the model's loaders hold now.
        source_error: the exception that the source raised, if one did.
        failure: what the loaders were interrupted by when they asked for the next tensor; they
            may have swallowed it.
        nbytes: size of all tensors that came.
        waited: seconds that iterators took to give the next tensor.
        copied: size of all that were copied because a model held them, or might.
        casts: names of tensors that were stored in another dtype.
        broadcast: names of tensors that a loader spread over a larger place.
        unclaimed: tensors that filled something in the load that made the model, and nothing now.
        computed: places that got values which a loader made of the tensor in its hands, and perhaps
            of others.
        dropped: names that came, and that the scope allows to drop.
        optional: names that have come before, and that a load may leave out all the same.
        announced: names that are new to the model and will come, of which nobody knows the places.
        verification: what is compared at the end, if that was asked for.
        scribe: is told what the loaders get, if what they do is recorded.
    """

    manifest: Mapping[str, SourceFact] | None
    scope: Scope = attrs.field(factory=Scope)
    wanted: frozenset[str] | None = None
    check_finite: bool = False
    lenient: bool = False
    seen: dict[str, SourceFact] = attrs.field(factory=dict)
    current: str | None = None
    source_error: BaseException | None = None
    failure: Exception | None = None
    nbytes: int = 0
    waited: float = 0.0
    copied: int = 0
    casts: set[str] = attrs.field(factory=set)
    broadcast: set[str] = attrs.field(factory=set)
    unclaimed: dict[str, torch.Tensor] = attrs.field(factory=dict)
    computed: set[str] = attrs.field(factory=set)
    dropped: set[str] = attrs.field(factory=set)
    optional: set[str] = attrs.field(factory=set)
    announced: set[str] = attrs.field(factory=set)
    verification: Verification | None = None
    scribe: Scribe | None = None
    _held: dict[str, torch.Tensor] = attrs.field(factory=dict)
    _found_finite: dict[str, int] = attrs.field(factory=dict)
    _hands: Hands = attrs.field(factory=Hands)
    _batch: list[str] = attrs.field(factory=list)

    def check_pair(self, name: Any, tensor: Any) -> None:
        """Check one pair against what is known, before the model's loaders see it.

        Raises:
            WeightMismatchError: it is no name and strided tensor with data, has another shape or
                type than in the load that made the model, or holds NaN or infinity and must not.
            UnexpectedWeightError: the scope does not name it.
            DuplicateWeightError: the name came before in this session.
        """
        if isinstance(name, str) and self.drops(name):
            return
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            which = f" for {name!r}" if isinstance(name, str) else ""
            raise WeightMismatchError(
                f"A source yields (name, tensor) pairs; found "
                f"({type(name).__name__}, {type(tensor).__name__}){which}."
            )
        if tensor.is_meta:
            raise WeightMismatchError(
                f"{name!r} is on the meta device and has no data. Send real tensors.", name=name
            )
        if tensor.layout is not torch.strided or storage_key(tensor) is None or tensor.is_quantized:
            raise WeightMismatchError(
                f"{name!r} is no plain strided tensor ({type(tensor).__name__}, {tensor.layout}). "
                f"Send plain ones: to_dense() makes one of a sparse tensor, dequantize() of a "
                f"quantized one, full_tensor() of a DTensor.",
                name=name,
            )
        if not has_memory(tensor):
            raise WeightMismatchError(
                f"{name!r} has no memory for its shape {tuple(tensor.shape)}: its storage has "
                f"{tensor.untyped_storage().nbytes()} bytes. FSDP frees parameters like this; "
                f"gather them before they are sent.",
                name=name,
            )
        if name in self.seen and not self.lenient:
            raise DuplicateWeightError(
                f"{name!r} arrived twice in this session. Send each tensor once.", name=name
            )
        self.check_form(name, tuple(tensor.shape), tensor.dtype)
        if self.check_finite and self._found_finite.get(name) != id(tensor):
            if not finite(tensor):
                refuse_values(name, tensor)
            self._found_finite[name] = id(tensor)

    def rehearses(self, name: str) -> bool:
        """Whether nobody waits for ``name``, so that its place has to be found before the load."""
        return self.manifest is not None and (name not in self.manifest or name in self.optional)

    def drops(self, name: str) -> bool:
        """Whether the model has no place for ``name``, and the scope allows that it comes."""
        known = self.manifest is not None and name in self.manifest
        return not known and self.scope.may_come(name)

    def leaves(self, name: str) -> bool:
        """Leave out what the model has no place for, if the scope allows; say whether that is so."""
        drops = self.drops(name)
        if drops:
            self.dropped.add(name)
        return drops

    def check_form(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        """Compare shape and type with those of the load that made the model, if it is known.

        Args:
            name: source name.
            shape: what it brings.
            dtype: what it brings; ``None`` if that is not known yet.

        Raises:
            UnexpectedWeightError: the scope does not name it.
            WeightMismatchError: they differ. Only between floats of 16 bits or more may the type.
        """
        if self.wanted is not None and name not in self.wanted:
            raise UnexpectedWeightError(
                f"{name!r} is not in the scope of this session, which brings "
                f"{name_some(sorted(self.wanted))}.",
                name=name,
            )
        fact = self.manifest.get(name) if self.manifest is not None else None
        if fact is None:
            return
        if fact.shape != shape:
            raise WeightMismatchError(
                f"{name!r} has shape {shape}; the model was made from shape {fact.shape}. "
                f"Tensors are never broadcast or cut.",
                name=name,
                expected=fact.shape,
                found=shape,
            )
        same = None in (dtype, fact.dtype) or dtype == fact.dtype
        if not same and not wide_floats(dtype, fact.dtype):
            raise WeightMismatchError(
                f"{name!r} has type {dtype}; the model was made from {fact.dtype}. Values are "
                f"cast only between floats of 16 bits or more.",
                name=name,
                expected=str(fact.dtype),
                found=str(dtype),
            )

    def read(self, weights: Mapping[str, torch.Tensor] | Iterable[Pair]) -> list[Pair]:
        """Return what a source holds, and remember it if the source itself raises."""
        try:
            return list(pairs_of(weights))
        except BaseException as error:
            self.source_error = error
            raise

    def feed(
        self,
        weights: Iterable[Pair],
        *,
        loans: Loans,
        between: Callable[[], None],
        lane: Lane | None = None,
        takes: Callable[[Any, Any], bool] | None = None,
        flush: Callable[[], None] | None = None,
        checked: bool = False,
        look: Callable[[Any, Any], None] | None = None,
    ) -> Iterator[Pair]:
        """Yield the pairs of ``weights`` to a model's loaders.

        Args:
            weights: the source.
            loans: lends what the source may overwrite. The caller ends them after the load.
            between: called when the loaders have let go of one tensor and ask for the next.
            lane: orders the loaders and the source on a device with streams.
            takes: takes a tensor to its places without the loaders, if it can.
            flush: does what ``takes`` has put off.
            checked: whether :meth:`check_pair` has seen all pairs.
            look: looks at each pair, before anything is done with it.
        """
        lane = Lane() if lane is None else lane
        flush = flush or _nothing
        try:
            for pair in self.watched(weights):
                if pair is FILLED:
                    flush()
                    between()
                    continue
                name, tensor = unpack(pair)
                if look is not None:
                    look(name, tensor)
                ordered = takes is not None and isinstance(tensor, torch.Tensor)
                if takes is not None and ordered:
                    lane.arrived(tensor)
                    if takes(name, tensor):
                        between()
                        if loans.each:
                            flush()
                        lane.asking(tensor)
                        del pair, tensor
                        continue
                if not checked:
                    self.check_pair(name, tensor)
                if self.leaves(name):
                    continue
                if not ordered:
                    lane.arrived(tensor)
                flush()
                loan = loans.lend(name, tensor)
                self._begin(loan)
                yield name, loan.tensor
                if not self.seen[name].consumed and self._known_as_consumed(name):
                    self._held[name] = loan.tensor
                between()
                del loan
                if loans.each:
                    self.end_loans(loans)
                lane.asking(tensor)
                del pair, tensor
        except Exception as error:
            self.failure = error
            raise
        flush()
        self.current = None
        if self.scribe is not None:
            self.scribe.done()

    def take(self, name: str, tensor: torch.Tensor | None, fact: SourceFact, nbytes: int) -> None:
        """Note that a tensor arrived that goes to its places without the loaders."""
        self.current = name
        self.seen[name] = fact
        self.nbytes += nbytes
        if self.verification is not None and tensor is not None:
            self.verification.receive(name, tensor)

    def end_loans(self, loans: Loans) -> None:
        """Take back what is lent: the source may overwrite it from now on.

        Raises:
            UnsupportedError: something is held in a way that cannot be found.
        """
        for loan in loans.take_back():
            key = loan.key
            places = self._hands.places.pop(key, []) if key is not None else []
            if loan.kept and self.scribe is not None:
                self.scribe.kept()
            if loan.kept and places:
                self._hands.enter(loan.name, loan.tensor, loan.kept)
        self.copied += loans.nbytes
        loans.nbytes = 0

    def watched(self, weights: Iterable[Pair]) -> Iterator[Pair]:
        """Yield what a source yields, time it, and remember it if the source itself raises.

        What is at hand as a list takes no time.
        """
        clock = time.perf_counter
        try:
            if isinstance(weights, list):
                yield from weights
                return
            rest = iter(weights)
            while True:
                asked = clock()
                try:
                    pair = next(rest, _END)
                finally:
                    self.waited += clock() - asked
                if pair is _END:
                    return
                yield pair
                del pair  # while the next one is made
        except GeneratorExit:  # who asks does not ask for more
            raise
        except BaseException as error:
            self.source_error = error
            raise

    def _begin(self, loan: Loan) -> None:
        self.current = name = loan.name
        self.seen[name] = SourceFact(shape=tuple(loan.tensor.shape), dtype=loan.tensor.dtype)
        self._batch.append(name)
        if self.verification is not None:
            self.verification.receive(name, loan.tensor)
        self.nbytes += loan.tensor.numel() * loan.tensor.element_size()
        if self.scribe is not None:
            self.scribe.lent(name, loan.tensor)
        self._hands.enter(loan.name, loan.tensor, loan.kept)

    def announce(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Note that a source arrives whose parts are written one by one, by a recorded plan.

        Raises:
            CheckpointError: as for :meth:`check_pair`.
        """
        if name in self.seen:
            raise DuplicateWeightError(
                f"{name!r} arrived twice in this session. Send each tensor once.", name=name
            )
        self.check_form(name, shape, dtype)
        self.current = name
        self.seen[name] = SourceFact(shape=shape, dtype=dtype)
        self._batch.append(name)

    def name_of(self, source: torch.Tensor | None) -> str | None:
        """Return the source name that a write belongs to.

        A model may collect tensors and write them later; what it copies is then recognised by its
        storage. A value that it computed belongs to the tensor that it asked for last.
        """
        if source is not None:
            key = storage_key(source)
            if key is not None and key in self._hands.places:
                return self._hands.name_in(key, source, self.current)
        return self.current

    def consumed(self, name: str | None, place: str, source: torch.Tensor | None) -> None:
        """Note that the tensor of that name filled something in the tensor called ``place``."""
        lent = source is not None and storage_key(source) in self._hands.places
        if name is not None and not lent:
            self.computed.add(place)
        if name is not None and not self.seen[name].consumed:
            self.seen[name] = attrs.evolve(self.seen[name], consumed=True, place=place)
            self._held.pop(name, None)
            self.unclaimed.pop(name, None)

    def _known_as_consumed(self, name: str) -> bool:
        fact = self.manifest.get(name) if self.manifest is not None else None
        return fact is not None and fact.consumed

    def end_batch(self) -> None:
        """Check, after one ``load``, that the model had a place for every new name.

        Raises:
            UnexpectedWeightError: a name that the load which made the model did not have filled
                nothing.
        """
        batch, self._batch = self._batch, []
        own = self._hands.own()
        self._found_finite.clear()
        self.current = None
        for name, tensor in self._held.items():
            self.unclaimed[name] = tensor if storage_key(tensor) in own else tensor.clone()
        self._held.clear()
        self._hands.keep(own)
        if self.manifest is None:
            return
        lost = [
            name for name in batch if not self.seen[name].consumed and name not in self.manifest
        ]
        if lost:
            raise UnexpectedWeightError(
                f"The model's loaders ignored {name_some(lost)}: the model has no place for such "
                f"names, and the load that it was made with did not have them.",
                names=lost[:10],
            )

    def absent(self) -> list[str]:
        """Return the names that a partial load promised and did not bring.

        Names that this rank has no place for need not come.
        """
        known = self.manifest or {}
        promised = (self.wanted or frozenset()) - self.seen.keys()
        return sorted(name for name in promised if known[name].consumed)

    def facts(self) -> dict[str, SourceFact]:
        """Return what is to be known about the names next time.

        A name that filled nothing only because its place was tied to another stays known with the
        place that it had: the two may differ next time.
        """
        known = self.manifest or {}
        return {
            name: known[name]
            if name in self.unclaimed
            else attrs.evolve(fact, broadcast=name in self.broadcast)
            for name, fact in self.seen.items()
        }
