"""Row G5: a graph that was captured once replays the weights of every later reload."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.case import Case, WrongResultError, same
from benchmarks.gpu.model import draw, fresh
from benchmarks.gpu.row import NO_DEVICE, Row, Run

LATER = (11, 12, 13)
"""Seeds of the checkpoints that are loaded after the capture."""


class Captured:
    """The forward pass of a model as a graph; its input and output have fixed addresses."""

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor) -> None:
        self._tokens = tokens.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(3):
                model(self._tokens)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._output = model(self._tokens)

    def __call__(self) -> torch.Tensor:
        """Replay; return the output, which the next replay overwrites."""
        self._graph.replay()
        return self._output


def poisoned() -> list[torch.Tensor]:
    """Fill all memory with NaN that the allocator holds and nobody uses; return what holds it."""
    torch.cuda.synchronize()
    sizes = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    held = []
    for size in sorted(sizes, reverse=True):
        before = torch.cuda.memory_reserved()
        block = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xFF)
        if torch.cuda.memory_reserved() == before:  # it is old memory, not new
            held.append(block)
    return held


def g5(run: Run) -> Row:
    """Three reloads under one captured graph."""
    row = Row(id="G5", what="graph replay after reloads with other weights")
    if not run.clock.on_device:
        row.status = NO_DEVICE
        return row
    shape = run.dense(0.25)
    case = Case(shape, run.clock)
    graph = Captured(case.model, case.model.example())
    if not same(graph(), case.expected(1)):
        raise WrongResultError("the graph is not what the model computes before any reload")
    places = case.places()
    firsts, steady, whole, reloads = [], [], [], []
    for seed in LATER:
        state = draw(shape, seed, run.clock.device)
        right = fresh(shape, state, run.clock.device)
        with torch.no_grad():
            want = right(case.model.example())
        torch.cuda.synchronize()
        start = time.perf_counter()
        case.ours(state)
        torch.cuda.synchronize()
        finished = time.perf_counter()
        first = run.clock.time(graph)
        whole.append(finished - start + first.wall)
        reloads.append(finished - start)
        firsts.append(first.device)
        if not same(graph(), want):
            raise WrongResultError(f"the first replay on checkpoint {seed}")
        del state, right
        held = poisoned()
        if not held:
            raise WrongResultError("no memory was freed, so that nothing could be poisoned")
        if not same(graph(), want) or not same(case.output(), want):
            raise WrongResultError(f"replay or eager on checkpoint {seed}, freed memory poisoned")
        del held
        steady += [run.clock.time(graph).device for _ in range(20)]
    moved = sum(places[name] != place for name, place in case.places().items())
    often = statistics.median(steady)
    row.figures = {
        "tensors": shape.tensors,
        "bytes": case.nbytes,
        "pointers_changed": moved,
        "recaptures": 0,
        "first_replay_s": max(firsts),
        "steady_replay_s": often,
        "weightload_s": statistics.median(reloads),
        "start_to_first_replay_s": statistics.median(whole),
    }
    row.must = {"no pointer changed, replay = eager = fresh model, bit for bit": moved == 0}
    row.goal = {
        "first replay <= 1.05 steady": max(firsts) <= 1.05 * often,
        "start to first replay <= reload + 2 ms": max_of(whole, reloads) <= 2e-3,
    }
    return row


def max_of(whole: list[float], part: list[float]) -> Any:
    """Return the largest difference of two lists."""
    return max(one - two for one, two in zip(whole, part, strict=True))
