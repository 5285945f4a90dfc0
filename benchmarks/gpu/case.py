"""One model that both arms reload, with what it must be after every round."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import attrs
import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.layerwise import Layerwise
from benchmarks.gpu.model import Shape, State, build, draw, framework, fresh
from weightload import WeightLoadSession
from weightload.receipt import Receipt

SEEDS = (1, 2)


class WrongResultError(Exception):
    """A model is not what a freshly built one is; its time counts for nothing."""


@attrs.define
class Figures:
    """Two arms in interleaved pairs, in seconds; the first pair warms up and does not count.

    Attributes:
        ours: wall time of weightload in each round.
        native: of the emulation.
        ours_cpu: thread CPU time of weightload.
        native_cpu: of the emulation.
        device: of weightload between events; empty on the host.
    """

    ours: list[float] = attrs.field(factory=list)
    native: list[float] = attrs.field(factory=list)
    ours_cpu: list[float] = attrs.field(factory=list)
    native_cpu: list[float] = attrs.field(factory=list)
    device: list[float] = attrs.field(factory=list)

    @property
    def ratio(self) -> float:
        """Median over the pairs of weightload's time in the emulation's."""
        pairs = zip(self.ours, self.native, strict=True)
        return statistics.median(one / two for one, two in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return what is written down."""
        found: dict[str, Any] = {"weightload_s": statistics.median(self.ours)}
        found["weightload_min_s"] = min(self.ours)
        found["weightload_cpu_s"] = statistics.median(self.ours_cpu)
        if self.device:
            found["weightload_device_s"] = statistics.median(self.device)
        if self.native:
            found["emulation_s"] = statistics.median(self.native)
            found["emulation_cpu_s"] = statistics.median(self.native_cpu)
            found["ratio_to_emulation"] = self.ratio
        return found


class Case:
    """A live model, two checkpoints on its device, and what each has to make of it.

    Args:
        shape: of the model.
        clock: of its device.

    Attributes:
        states: the checkpoints.
        model: the live model; it serves the first one.
        nbytes: of a checkpoint.
        receipt: of the last session.
    """

    def __init__(self, shape: Shape, clock: Clock) -> None:
        self.shape, self.clock = shape, clock
        self.states: list[State] = [draw(shape, seed, clock.device) for seed in SEEDS]
        self._right = [fresh(shape, state, clock.device) for state in self.states]
        self.model = build(shape, clock.device)
        self._tokens = self.model.example()
        self._layerwise = Layerwise(self.model, clock.device)
        self.nbytes = sum(tensor.nbytes for tensor in self.states[0].values())
        self.receipt: Receipt | None = None
        with WeightLoadSession(self.model, framework=framework(), version=0) as session:
            session.load(self.states[0])
        self._places = self.places()
        self.require(0, "the first load")
        with torch.no_grad():
            one, two = (right(self._tokens) for right in self._right)
        if torch.equal(one, two) or not torch.isfinite(one).all():
            raise WrongResultError("two checkpoints compute the same, so nothing could be found")
        self.ours(self.states[1])  # both arms make ready what they keep from load to load
        self.require(1, "weightload's first reload")

    def places(self) -> dict[str, int]:
        """Return the address of every parameter and buffer."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.data_ptr() for name, tensor in named}

    def output(self) -> torch.Tensor:
        """Return what the live model computes."""
        with torch.no_grad():
            return self.model(self._tokens)

    def expected(self, which: int) -> torch.Tensor:
        """Return what it has to compute with one of the checkpoints."""
        with torch.no_grad():
            return self._right[which](self._tokens)

    def native(self, weights: Any) -> None:
        """Reload by the emulation."""
        pairs = weights.items() if isinstance(weights, dict) else weights
        self._layerwise.reload(iter(pairs))

    def ours(self, weights: Any, **options: Any) -> Receipt:
        """Reload by a session, in one call."""
        with WeightLoadSession(self.model, plans=True) as session:
            session.load(weights, **options)
        if session.receipt is None:
            raise WrongResultError("a session without a receipt")
        self.receipt = session.receipt
        return session.receipt

    def require(self, which: int, what: str) -> None:
        """Raise unless the live model is exactly what that checkpoint makes of a new one.

        Every parameter and buffer, every address, and what it computes.

        Raises:
            WrongResultError: it is not.
        """
        right = self._right[which]
        live = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        want = {**dict(right.named_parameters()), **dict(right.named_buffers())}
        if live.keys() != want.keys():
            raise WrongResultError(
                f"{what}: other tensors: {sorted(live.keys() ^ want.keys())[:5]}"
            )
        wrong = [name for name, one in live.items() if not same(one, want[name])]
        if wrong:
            raise WrongResultError(f"{what}: {len(wrong)} tensors are wrong, such as {wrong[:3]}")
        if self.places() != getattr(self, "_places", self.places()):
            raise WrongResultError(f"{what}: tensors moved")
        if not torch.equal(self.output(), self.expected(which)):
            raise WrongResultError(f"{what}: the model computes something else")

    def compare(
        self,
        rounds: int,
        source: Callable[[int], Any] | None = None,
        *,
        native_source: Callable[[int], Any] | None = None,
        native: bool = True,
        ours: Callable[[Any], Any] | None = None,
    ) -> Figures:
        """Reload in turn by both arms, with the other checkpoint in every round.

        Args:
            rounds: that count.
            source: returns what an arm is given, by the number of the checkpoint.
            native_source: that of the emulation, if it is another one.
            native: whether the emulation runs.
            ours: weightload's reload, if it is not one call of ``load``.

        Raises:
            WrongResultError: a model was wrong after a round of either.
        """
        source = source or self.states.__getitem__
        native_source = native_source or source
        reload = ours or self.ours
        figures = Figures()
        for number in range(rounds + 1):
            which = number % 2
            if native:
                given = native_source(which)
                took = self.clock.time(lambda g=given: self.native(g))
                del given
                self.require(which, "the emulation")
                self._spoil()
                if number:
                    figures.native.append(took.wall)
                    figures.native_cpu.append(took.cpu)
            given = source(which)
            took = self.clock.time(lambda g=given: reload(g))
            del given
            self.require(which, "weightload")
            self._spoil()
            if number:
                figures.ours.append(took.wall)
                figures.ours_cpu.append(took.cpu)
                if took.device is not None:
                    figures.device.append(took.device)
        return figures

    def _spoil(self) -> None:
        """Clear every parameter, so that an arm that does nothing is found."""
        with torch.no_grad():
            for param in self.model.parameters():
                param.view(torch.uint8).fill_(0)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(bits(one), bits(two))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, of any shape."""
    return tensor.detach().reshape(-1).view(torch.uint8)
