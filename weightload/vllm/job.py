"""One reload of one engine: all ranks receive, and then all commit, or all abort."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import attrs

from weightload.errors import (
    EngineLostError,
    UnsupportedError,
    UsageError,
    VerificationError,
    WeightLoadError,
)
from weightload.outcomes import gather
from weightload.receipt import Receipt
from weightload.reporting import LoadProgress
from weightload.scope import Scope
from weightload.sending import Sent, Weights, is_folder, operations
from weightload.vllm import caches
from weightload.vllm.door import Door
from weightload.vllm.reach import Reach
from weightload.vllm.steps import Steps, dropping, naming

__all__ = ["Job", "Progress", "Publish", "Version", "Veto"]

Version = str | int | None
Publish = Callable[[Version, Version], object]
Veto = Callable[[Any], str | None]
Progress = Callable[[LoadProgress], object]


@attrs.define(kw_only=True, eq=False, repr=False)
class Job:
    """One reload of one engine, as steps that are made one after another.

    Attributes:
        front: an ``LLM`` or ``AsyncLLM``.
        engine: what is behind it.
        reach: how operations get to the workers.
        weights: what is sent.
        options: of the session that each worker opens.
        caches: which caches are reset.
        publish: who is told about it.
        progress: who is told how far it has come.
        steps: yields calls, is sent what they gave, returns receipts.
    """

    front: Any
    engine: Any
    reach: Reach
    weights: Weights | None
    options: dict[str, Any]
    caches: tuple[str, ...]
    publish: tuple[Publish, ...]
    progress: Progress | None
    steps: Steps = attrs.field(init=False)

    @classmethod
    def of(
        cls, front: Any, engine: Any, weights: Weights | None, version: Version, commit: str,
        scope: Scope | None, check_finite: bool, strict: bool | None, verify: str | None,
        staging_budget: int | None, plans: bool | None, reset_caches: Iterable[str] | bool, publish: Iterable[Publish], veto: Iterable[Veto],
        draft: str | None = None, progress: Progress | None = None,
    ) -> Job:  # fmt: skip
        """Check the arguments, and ask the vetoes."""
        if not isinstance(scope, Scope | None):
            raise UsageError(f"scope is a weightload.Scope, found {type(scope).__name__}.")
        job = cls(
            front=front,
            engine=engine,
            reach=Reach.of(front, engine.vllm_config, engine.engine_core),
            weights=weights,
            options={
                "version": version,
                "commit": commit,
                "scope": None if scope is None else scope.to_plain(),
                "check_finite": check_finite,
                "strict": strict,
                "verify": verify,
                "staging_budget": staging_budget,
                "plans": plans,
                "draft": draft,
            },
            caches=caches.selected(reset_caches),
            publish=tuple(publish),
            progress=progress,
        )
        for ask in veto:
            reason = ask(front)
            if reason:
                raise UnsupportedError(f"The reload was refused before it began: {reason}")
        job.steps = job._run()
        return job

    def _run(self) -> Steps:
        reach = self.reach
        opener = uuid.uuid4().hex
        finished: list[dict[str, Any]] = []
        try:
            before = gather((yield reach.call("status")))
            gather((yield reach.call("start", opener=opener, **self.options)))
            yield from self._load()
            agreed = gather((yield reach.call("seal")))
            self._compare(agreed)
            finished = yield reach.call("finish", reset=list(self.caches))
            receipts = [Receipt.from_plain(value) for value in gather(finished)]
            yield from self._announce(before[0]["version"])
        except (GeneratorExit, EngineLostError):
            raise
        except BaseException as error:
            try:
                yield from self._give_up(error, opener, finished)
            except EngineLostError as lost:
                if isinstance(error, Exception):
                    raise lost from error
                error.add_note(f"weightload: {lost}")
            except Exception as second:
                error.add_note(
                    f"weightload: the ranks could not be told to abort; {type(second).__name__}: "
                    f"{second}"
                )
            if not reach.intact:
                Door.close(self.engine, error)
            raise error
        Door.open(self.engine)
        return receipts

    def _load(self) -> Steps:
        here = {"progress": self.progress} if self.reach.local else {}
        if self.reach.local and not is_folder(self.weights):
            gather((yield self.reach.call("load", weights=self.weights, **here)))
            return
        sent = operations(self.weights, check_finite=self.options["check_finite"])
        count = Sent(None if here else self.progress, self.weights)
        with closing(sent), closing(count):
            for operation, arguments in sent:
                more = here if operation in ("load_path", "load_files") else {}
                gather((yield self.reach.call(operation, **arguments, **more)))
                count.add(arguments.get("record"))

    def _compare(self, agreed: list[dict[str, Any]]) -> None:
        """Compare what ranks received, where all of them were sent the same."""
        if not is_folder(self.weights) and any(one != agreed[0] for one in agreed):
            raise VerificationError(
                f"Ranks received different tensors: {agreed}. Nothing is published.",
                agreed=[str(one) for one in agreed],
            )

    def _announce(self, before: Version) -> Steps:
        """Drop what was computed with the old weights, and tell everybody the new version."""
        version = self.options["version"]
        yield from dropping(self.front, self.engine, self.caches)
        for callback in self.publish:
            callback(before, version)
        if version is not None:
            yield from naming(self.engine, version)

    def _give_up(self, error: BaseException, opener: str, finished: list[Any]) -> Steps:
        """End what was begun on every rank, and find out whether all are intact."""
        reach = self.reach
        cause = f"{type(error).__name__}: {error}"
        if any("value" in one for one in finished):
            # Some ranks have the new weights and others do not, or caches hold results of the old.
            yield reach.call("poison", cause=f"the engine could not finish on all ranks: {cause}")
        ended = yield reach.call("abort", cause=cause, opener=opener)
        for outcome in ended:
            if "error" in outcome:
                error.add_note(f"weightload: abort failed: {outcome['error']['message']}")
        states = yield reach.call("status")
        poisoned = [one for one in states if "value" not in one or one["value"]["poison"]]
        reach.intact = not poisoned
        if isinstance(error, WeightLoadError):
            error.model_intact = error.model_intact and not poisoned
