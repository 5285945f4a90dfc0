"""What rows share: the two models of one shape, their weights, and the check of every result."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import attrs

from benchmarks.speed.measure import Limits, Series, in_turn
from benchmarks.speed.models import GEOMETRIES, Built, Source, build, reduced, references

DISTINCT = 3
"""Weights of this many rounds take turns; what is compared with is built anew for each of them."""


@attrs.frozen
class Options:
    """How much is measured."""

    rounds: int = 5
    smoke: bool = False


class Bench:
    """One shape: a model that vLLM loaded, one that weightload loaded, and what both must show."""

    def __init__(self, shape: str, options: Options, *, skip: bool) -> None:
        config = GEOMETRIES[shape]
        if options.smoke:
            config = reduced(config)
        self.shape, self.skip, self.rounds = shape, skip, options.rounds
        self.source = Source.of(config)
        self.nbytes, self.count = self.source.nbytes, len(self.source.tensors)
        self.wanted = references(self.source, DISTINCT, skip=skip)
        self.weights = self.source.turn(DISTINCT)
        self.native = build(self.source, skip=skip, how="native")
        self.ours = build(self.source, skip=skip, how="ours")
        self.modules = sum(1 for _ in self.native.model.modules())
        self.limits = Limits(self.source)
        gc.collect()
        gc.freeze()  # as vLLM's worker does when its model is loaded

    @property
    def plain(self) -> bool:
        """Whether nothing is packed, so that a reload is copies alone."""
        return self.skip and "num_experts" not in self.source.config

    def turn(self, number: int) -> None:
        """Make the weights of round ``number`` those that everybody loads."""
        self.source.turn(self.which(number))

    def which(self, number: int) -> int:
        """Return which of the distinct weights the round has."""
        return number % DISTINCT + 1

    def check(self, number: int, arm: str) -> str | None:
        """Say what of an arm's model is not as in a fresh one, after round ``number``."""
        built = {"native": self.native, "ours": self.ours}.get(arm.partition(" ")[0])
        if built is None:
            return None
        return self.differs(built, number)

    def differs(self, built: Built, number: int) -> str | None:
        """Say what of ``built`` is not as in a model freshly built from the round's weights."""
        if not built.settled():
            return "a tensor has moved"
        found, wanted = built.observe(), self.wanted[self.which(number)]
        wrong = sorted(
            key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)
        )
        return f"{len(wrong)} differ, such as {wrong[0]}" if wrong else None

    def compare(
        self,
        arms: dict[str, Callable[[int], Any]],
        rounds: int | None = None,
        check: Callable[[int, str], str | None] | None = None,
    ) -> Series:
        """Run arms in turn, with other weights in every round, and check what they give."""
        return in_turn(
            arms,
            self.rounds if rounds is None else rounds,
            before=self.turn,
            check=check or self.check,
        )

    def whole(self, **options: Any) -> dict[str, Callable[[int], Any]]:
        """Return the arms of a whole reload from memory."""
        return {
            "native": lambda _: self.native.native(self.source.tensors),
            "ours": lambda _: self.ours.ours(self.source.tensors, **options),
            "L1": self.limits.memmove,
            "L2": self.limits.loop,
        }

    def settle(self) -> None:
        """Load often enough that what is recorded at the first reload is there."""
        for number in range(2):
            self.turn(number)
            self.ours.ours(self.source.tensors)

    def close(self) -> None:
        """Give the memory back."""
        self.__dict__.clear()
        gc.unfreeze()
        gc.collect()
