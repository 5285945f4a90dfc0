"""The ways of one load: to the places that a plan knows, or through the loaders with a board."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import attrs
import torch
from torch import nn

from weightload import ownership
from weightload.board import Board
from weightload.errors import InvalidTransitionError
from weightload.express import Express
from weightload.family import Family
from weightload.framework import Framework
from weightload.intake import Intake
from weightload.pieces import alone, converts_of, room_for
from weightload.processing import Processing
from weightload.progress import Progress
from weightload.quick import Quick
from weightload.reading import Place
from weightload.record import make_record
from weightload.recorded import Recorded
from weightload.registry import Convert
from weightload.scope import Scope
from weightload.skeleton import Body
from weightload.staging import Area

__all__ = ["UNPREPARED", "Ways"]

UNPREPARED = "The session is not prepared; call prepare() first."


@attrs.define(kw_only=True, eq=False, repr=False)
class Ways:
    """What can do the work of one open session, and which of it is needed; the session says when.

    Attributes:
        model: the root module.
        modules: every module that is loaded, by name.
        framework: what the model belongs to, with its drafts.
        family: the same if there are drafts.
        intake: counts what comes.
        progress: is told when something live is written.
        scope: what the load promises.
        initial: whether it is the load that makes the model.
        commit: ``"stream"`` or ``"atomic"``.
        strict: as the session was asked.
        staging_budget: as the session was asked.
        plans: whether plans are recorded and used.
        recorded: the plan that may be used, if there is one.
        body: what the model consists of, if it is as it was when the plan was recorded.
        board: the working state of what has to be watched; ``None`` if nothing has so far.
        processing: runs the hooks of the board.
        quick: takes what needs only copies; ``None`` if that was never enough.
        whole: whether the board has the whole model.
        express: takes tensors past the loaders of the whole board, by a plan.
    """

    model: nn.Module
    modules: Mapping[str, nn.Module]
    framework: Framework
    family: Family | None
    intake: Intake
    progress: Progress
    scope: Scope
    initial: bool
    commit: str
    strict: bool | None
    staging_budget: int | None
    plans: bool
    recorded: Recorded | None
    body: Body | None
    board: Board | None = attrs.field(init=False, default=None)
    processing: Processing | None = attrs.field(init=False, default=None)
    quick: Quick | None = attrs.field(init=False, default=None)
    whole: bool = attrs.field(init=False, default=False)
    express: Express | None = attrs.field(init=False, default=None)

    @property
    def short(self) -> Quick | None:
        """The way without a board, as long as it is enough."""
        return None if self.whole else self.quick

    def open(self) -> None:
        """Prepare as much of the model as this load seems to need."""
        quick = self.quick = self._quick_way()
        if quick is None:
            self._open_board(self.modules)
            self.whole = True
        elif quick.part.modules and self.scope.is_full:
            inside = {k: module for k, module in self.modules.items() if k in quick.part.modules}
            board, processing = self._open_board(inside)
            quick.prepared(board.express(quick.recorded, quick.body), processing.settle)

    def _quick_way(self) -> Quick | None:
        """Return the way without a board, if copies are all that this load can need."""
        recorded, body = self.recorded, self.body
        if recorded is None or body is None:
            return None
        converts = self._converts(recorded, body)
        part = recorded.part if converts is None else recorded.in_pieces
        if part is None or part.whole:
            return None
        wanted = self.intake.wanted or frozenset()
        if (
            self.commit != "stream"
            or self.intake.check_finite
            or (ownership.poison_of(self.model) is not None and not self.scope.is_full)
            or any(recorded.routes.get(name) is None for name in wanted)
            or part.sources & wanted
            or not Quick.fits(part, body)
        ):
            return None
        return Quick(recorded, part, body, self.intake, self.progress.mark_dirty, converts)

    def _converts(self, recorded: Recorded, body: Body) -> dict[str, Convert] | None:
        """Return what processes pieces of tensors, by their names; ``None`` if hooks are called.

        Hooks are called where pieces may stay away, where their results are to be checked, and where
        somebody else looks into the memory of one of the tensors.
        """
        part, scope = recorded.in_pieces, self.scope
        if part is None:
            return None
        room = room_for(part.pieced.values())
        if (
            (self.staging_budget is not None and self.staging_budget < room)
            or not body.skeleton.on_host
            or not scope.is_full
            or scope.allow_missing
            or self.intake.verification is not None
            or self.family is not None
            or not alone(body, part.pieced.values())
        ):
            return None
        found: dict[str, Convert] = {}
        for place, one in part.pieced.items():
            module = body.modules[one.module]
            rules = self.framework.registry.rules_for(module, one.module)
            made = converts_of(rules[0], one.module, module) if len(rules) == 1 else None
            if made is None or one.name not in made:
                return None
            found[place] = made[one.name]
        return found

    def _budget(self) -> int | None:
        """Return how many bytes a board may stage: what pieces do not need."""
        if self.initial or self.staging_budget is None:
            return None
        pieces = None if self.quick is None else self.quick.pieces
        room = 0 if pieces is None else room_for(pieces.pieced.values())
        return self.staging_budget - room

    def _open_board(self, modules: Mapping[str, nn.Module]) -> tuple[Board, Processing]:
        framework = self.framework
        strict = framework.captured(self.model) if self.strict is None else self.strict
        board = self.board = Board(
            mark_dirty=self.progress.mark_dirty,
            framework=framework,
            modules=dict(modules),
            intake=self.intake,
            initial=self.initial,
            atomic=self.commit == "atomic",
            scope=self.scope,
            strict=strict,
            area=Area(
                budget=self._budget(),
                dirty=self.progress.is_dirty,
            ),
        )
        processing = self.processing = Processing(
            board=board, progress=self.progress, stream=self.commit == "stream"
        )
        if self.family is not None:
            self.family.again = board.arrivals.again
        plan = self.recorded if self.body is not None and self.scope.is_full else None
        records = self.plans and self.scope.is_full and self.quick is None
        if records and (plan is None or plan.part is None):
            board.judge()
        board.open()
        if self.quick is not None:
            return board, processing
        if plan is not None and self.body is not None:
            self.express = board.express(plan, self.body)
        elif self.plans and self.scope.is_full and self.family is None:
            board.start_recording()
        return board, processing

    def opened(
        self, working: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Board, Processing]:
        """Return the board of the whole model, with what processes it.

        What was not needed so far is prepared now, and the ledgers are told what has come.

        Args:
            working: enters the state that the session works in.
        """
        quick = self.short
        if quick is not None:
            self._open_rest(quick, working)
        if self.board is None or self.processing is None:
            raise InvalidTransitionError(UNPREPARED)
        return self.board, self.processing

    def _open_rest(self, quick: Quick, working: Callable[[], AbstractContextManager[None]]) -> None:
        self.whole = True
        with working():
            quick.flush()
            if self.board is None:
                board, _ = self._open_board(self.modules)
            else:
                board = self.board
                board.extend(self.modules)
        express = board.express(quick.recorded, quick.body)
        if quick.pieces is not None:
            board.go_on(quick.pieces)
        quick.hand_over(express)
        self.express = express if self.scope.is_full else None

    def ready(self) -> bool:
        """Whether a plan has brought all that something needs to be processed."""
        if self.quick is not None and not self.whole:
            return self.quick.ready
        return self.express is not None and self.express.ready

    def reserve(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Place] | None:
        """Return where a tensor has to be put, if a plan knows; see :meth:`Express.reserve`."""
        if self.quick is not None and not self.whole:
            return self.quick.reserve(name, shape, dtype)
        return None if self.express is None else self.express.reserve(name, shape, dtype)

    def remember(self, board: Board, framework: Framework | None, *, kept: bool) -> None:
        """Keep on the model what this load, which has finished, has taught.

        Args:
            board: that of the whole model.
            framework: what the model belongs to, without its drafts.
            kept: whether something stayed away and kept its value.
        """
        board.learning.learn()
        root = make_record(self.model)
        root.framework = framework
        recorded = board.recorded(self.model)
        if recorded is not None:
            root.plan = None if kept else recorded
        elif self.express is not None and self.express.stale:
            root.plan = None  # the next load records another one
        elif root.plan is not None and not all(map(root.plan.knows, self.intake.seen)):
            root.plan = None  # hooks may have found, without a plan, what they did not know then
        if root.plan is not None and not kept:
            board.judged(root.plan)
        if self.intake.seen:
            part = self.intake.wanted is not None or kept
            before = root.manifest if part and root.manifest is not None else {}
            facts = self.intake.facts()
            if self.family is not None:
                facts = self.family.remember(facts)
            root.manifest = {**before, **facts}

    def forget(self) -> None:
        """Let the next load ask the model's loaders, which may fill what no source brings."""
        make_record(self.model).plan = None

    def end(self) -> None:
        """Give scratch memory back, and let go of what knows the tensors of the way by a plan."""
        self.express = None
        if self.quick is not None and self.quick.pieces is not None:
            self.quick.pieces.let_go()

    def let_go(self) -> None:
        """Let go of what knows the tensors of the model; a caller may keep the session."""
        self.modules, self.recorded, self.body, self.quick = {}, None, None, None
