"""One call that brings tensors to a session: by a plan to their places, or to the model's loaders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch

from weightload import preflight, replaying
from weightload.board import Board
from weightload.errors import UnexpectedWeightError, UnsupportedError
from weightload.filling import Filling
from weightload.intake import Intake
from weightload.lanes import Lane
from weightload.plan import Plan
from weightload.processing import Processing
from weightload.reading import Checkpoint
from weightload.replaying import Fetch
from weightload.reporting import LoadProgress, Reporter, size_of
from weightload.sources import Pair, pairs_of, unless_empty
from weightload.storage import look_of, storage_key
from weightload.transport import Buffers, Loans
from weightload.ways import Ways

__all__ = ["Delivery", "Tell", "Weights", "Working"]

Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Tell = Callable[[LoadProgress], object]
Working = Callable[..., AbstractContextManager[None]]
"""Enters the state, and the stream, that a session works in; with ``calls=False`` where code neither
of the model nor of a source may be called."""


@attrs.define(kw_only=True, eq=False, repr=False)
class Delivery:
    """What one call does, from the moment that the session has allowed it. For single use.

    Whatever it raises ends the session, which then cleans up.

    Attributes:
        ways: of the session.
        lane: orders what is done on a device with streams.
        working: enters the state that the session works in.
    """

    ways: Ways
    lane: Lane
    working: Working
    _tell: Callable[..., None] | None = None

    def take(self, weights: Weights, buffers: Buffers | None, progress: Tell | None) -> None:
        """Take tensors, as :meth:`WeightLoadSession.load` says."""
        with self._reporting(progress, weights):
            if isinstance(weights, Checkpoint):
                filling = self._filling(weights)
                if not filling.expected:
                    self._check_files(weights.forms)
                weights, buffers = filling, None
            left = self._take_quickly(weights, lent=buffers != [])
            if left is not None:
                self._take_slowly(left, buffers, each=not isinstance(weights, Collection))

    def through(self, run: Callable[[], Any], buffers: Buffers | None) -> None:
        """Let a loader bring tensors, as :meth:`WeightLoadSession.load_through` says."""
        mine = vars(self.ways.model)
        kept = {name: mine[name] for name in ("load_weights",) if name in mine}
        original = getattr(self.ways.model, "load_weights", None)

        def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> Any:
            loans = self._loans(buffers, each=not isinstance(weights, Collection))
            with self._lending(loans):
                feed = self._feed(pairs_of(weights), loans)
                rest = self._for_loaders(feed)
                if rest is None:
                    return set(self._intake.seen)
                shared = self.ways.framework.also(rest)
                result = original(shared, *args, **kwargs)  # type: ignore[misc]
                self._intake.end_loans(loans)
            return result

        if callable(original):
            mine["load_weights"] = load_weights
        try:
            with self._loading() as board:
                run()
                self._not_swallowed(board)
                self._process().settle()
                self._intake.end_batch()
        finally:
            mine.pop("load_weights", None)
            mine.update(kept)

    def replay(self, plan: Plan, fetch: Fetch | Mapping[str, torch.Tensor]) -> None:
        """Fetch tensors by a plan, as :meth:`WeightLoadSession.replay` says."""
        loans = self._loans(None, each=True)
        with self._loading() as board, self._lending(loans):
            replaying.replay(
                board,
                self._intake,
                plan,
                fetch,
                self._process().settle,
                lambda pairs: board.framework.load(self.ways.model, self._feed(pairs, loans)),
            )
            self._not_swallowed(board)
            self._intake.end_loans(loans)
            self._intake.end_batch()

    def check(self, weights: Mapping[str, Any], *, complete: bool) -> None:
        """Check what is going to come, as :meth:`WeightLoadSession.check` says."""
        quick = self.ways.short
        if quick is not None:
            forms = {name: preflight.form_of(value) for name, value in weights.items()}
            if quick.expects(forms, complete=complete):
                return
        with self._loading() as board:
            preflight.check_set(board, self.ways.model, self._intake, weights, complete=complete)

    # ------------------------------------------------------------------ ways

    def _take_quickly(self, weights: Weights, *, lent: bool) -> Weights | None:
        """Take what needs nothing but copies; return what is left for the long way."""
        quick = self.ways.short
        if quick is None:
            return weights
        with self.working(calls=quick.calls or not isinstance(weights, Collection)):
            if not isinstance(weights, Collection):
                pairs = self._intake.watched(pairs_of(weights))
                return quick.take_each(pairs, self.lane, lent=lent)
            if type(weights) is dict:
                names, tensors = [*weights], [*weights.values()]
            else:
                every = self._intake.read(weights)
                try:
                    names, tensors = [name for name, _ in every], [tensor for _, tensor in every]
                except (TypeError, ValueError):
                    return every
            done = quick.take_all(names, tensors)
            return [*zip(names[done:], tensors[done:], strict=True)] or None

    def _take_slowly(self, weights: Weights, buffers: Buffers | None, *, each: bool) -> None:
        """Give tensors to the model's loaders, or past them by a plan, one by one."""
        loans = self._loans(buffers, each=each)
        with self._loading() as board, self._lending(loans):
            if isinstance(weights, Collection):
                weights = self._intake.read(weights)
                preflight.check_pairs(board, self.ways.model, self._intake, weights)
                feed = self._feed(self._set_aside(weights), loans, checked=True)
            else:
                feed = self._feed(pairs_of(weights), loans, look=self._refuse_live)
            rest = self._for_loaders(feed)
            if rest is not None:
                board.framework.load(self.ways.model, rest)
            self._not_swallowed(board)
            self._drained(feed if rest is None else rest)
            self._process().settle()
            self._intake.end_loans(loans)
            self._intake.end_batch()

    @property
    def _intake(self) -> Intake:
        return self.ways.intake

    def _board(self) -> Board:
        return self.ways.opened(self.working)[0]

    def _process(self) -> Processing:
        return self.ways.opened(self.working)[1]

    @contextmanager
    def _loading(self) -> Iterator[Board]:
        board = self._board()
        with self.working(), board.arrivals.observer:
            yield board

    # ------------------------------------------------------------------ live memory as a source

    def _set_aside(self, pairs: list[Pair]) -> list[Pair]:
        """Copy what lies in the model's own memory, but for what would be written onto itself."""
        return [(n, t.detach().clone() if self._is_live(n, t) else t) for n, t in pairs]

    def _refuse_live(self, name: Any, tensor: Any) -> None:
        if self._is_live(name, tensor):
            raise UnsupportedError(
                f"{name!r} lies in the model's own memory, which this load overwrites. Send a copy, "
                f"or all tensors in one mapping, which is looked through before.",
                name=name,
            )

    def _is_live(self, name: Any, tensor: Any) -> bool:
        """Whether what is sent can change before it has been copied to its place."""
        if not isinstance(tensor, torch.Tensor):
            return False  # what the scope allows to drop
        if self.ways.commit == "atomic" and not self.ways.initial:
            return False
        if not self._board().arrivals.observer.knows(storage_key(tensor) or 0):
            return False
        path, _, key = str(name).rpartition(".")
        tables = vars(self.ways.modules.get(path, self.ways.model))
        place = tables["_parameters"].get(key, tables["_buffers"].get(key))
        itself = place is not None and storage_key(place) == storage_key(tensor)
        return not (itself and look_of(place) == look_of(tensor))

    # ------------------------------------------------------------------ loans

    def _loans(self, buffers: Buffers | None, *, each: bool) -> Loans:
        return Loans(
            buffers=buffers,
            each=each,
            places=self._places,
            guarded=self._board().arrivals.observer.guarded,
        )

    def _places(self) -> list[torch.Tensor]:
        return [*self.ways.model.parameters(), *self.ways.model.buffers()]

    @contextmanager
    def _lending(self, loans: Loans) -> Iterator[None]:
        """Take back what is lent, also if the block raises: the caller's memory is his own then."""
        try:
            yield
        except BaseException as error:
            try:
                self._intake.end_loans(loans)
            except Exception as second:
                error.add_note(f"weightload: {second}")
            raise

    # ------------------------------------------------------------------ loaders

    def _feed(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        loans: Loans,
        *,
        checked: bool = False,
        look: Callable[[Any, Any], None] | None = None,
    ) -> Iterator[Any]:
        express = None if self._intake.lenient else self.ways.express
        return self._intake.feed(
            weights,
            loans=loans,
            between=self._between(),
            lane=self.lane,
            takes=None if express is None else express.takes,
            flush=None if express is None else express.flush,
            checked=checked,
            look=look,
        )

    def _between(self) -> Callable[[], None]:
        """Return what has to be called when loaders have let go of a tensor."""
        settle: Callable[[], None] = self._process().settle
        if self.ways.family is not None:
            settle = functools.partial(self._process().settle, self.ways.family.shared)
        tell = self._tell
        if tell is None:
            return settle

        def both() -> None:
            settle()
            tell()

        return both

    def _for_loaders(self, feed: Iterator[Any]) -> Iterator[Any] | None:
        """Return what the loaders get, ``None`` if a plan has taken everything."""
        return feed if self.ways.express is None else unless_empty(feed)

    def _not_swallowed(self, board: Board) -> None:
        """Raise what interrupted the loaders, if they went on as if nothing had happened."""
        for error in (self._intake.failure, board.arrivals.observer.refusal):
            if error is not None:
                raise error

    def _drained(self, feed: Iterator[Any]) -> None:
        for name, _ in feed:
            raise UnexpectedWeightError(
                f"The model's load_weights returned before it had read {name!r}; it must read the "
                f"whole iterator that it is given.",
                name=name,
            )

    # ------------------------------------------------------------------ files and reports

    def _check_files(self, forms: Mapping[str, Any]) -> None:
        """Check what is going to be read, as far as its headers tell, before anything is written."""
        quick = self.ways.short
        if quick is None or not quick.expects(forms, complete=False):
            with self._loading() as board:
                preflight.check_forms(board, self.ways.model, self._intake, forms)

    def _filling(self, checkpoint: Checkpoint) -> Filling:
        ways = self.ways
        return Filling(
            checkpoint,
            quick=lambda: ways.short,
            reserve=ways.reserve,
            ready=ways.ready,
            leaves=self._intake.leaves,
        )

    @contextmanager
    def _reporting(self, callback: Tell | None, weights: Any) -> Iterator[None]:
        """Report what comes while the block runs."""
        if callback is None:
            yield
            return
        tensors = nbytes = None
        if isinstance(weights, Collection):
            tensors = len(weights)
            nbytes = getattr(weights, "nbytes", None) or size_of(weights)
        intake, reporter = self._intake, Reporter(callback, tensors, nbytes)
        before = len(intake.seen), intake.nbytes

        def tell(*, ended: bool = False) -> None:
            reporter.tell(len(intake.seen) - before[0], intake.nbytes - before[1], ended=ended)

        quick = self.ways.quick
        self._tell = tell
        if quick is not None:
            quick.tell = tell
        try:
            yield
        finally:
            if quick is not None:
                quick.tell = None
            tell(ended=True)
