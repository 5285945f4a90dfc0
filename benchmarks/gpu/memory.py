"""Row G7: how much memory a reload takes beside the live model, in three orders of the source."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.case import Case
from benchmarks.gpu.copies import on_host
from benchmarks.gpu.model import Shape, State
from benchmarks.gpu.row import NO_DEVICE, Row, Run
from weightload import WeightLoadSession

BUCKET = 64 << 20


def orders(names: list[str]) -> dict[str, list[str]]:
    """Return the names by layer, at random, and one kind of projection after another."""
    shuffled = names[:]
    random.Random(0).shuffle(shuffled)

    def kind(name: str) -> str:
        return ".".join(part for part in name.split(".") if not part.isdecimal())

    return {"layer": names, "shuffled": shuffled, "projection": sorted(names, key=kind)}


class Buckets:
    """Brings tensors of the host to the device through one buffer that is filled again and again.

    Args:
        state: on the host.
        device: where the buffer is.
    """

    def __init__(self, state: State, device: str) -> None:
        self._state = state
        largest = max(tensor.nbytes for tensor in state.values())
        self.memory = torch.empty(max(BUCKET, largest), dtype=torch.uint8, device=device)

    def fill(self, names: list[str]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield bucket by bucket what lies in the buffer."""
        pairs: list[tuple[str, torch.Tensor]] = []
        used = 0
        for name in names:
            tensor = self._state[name]
            if used + tensor.nbytes > self.memory.numel():
                yield pairs
                pairs, used = [], 0
            view = self.memory[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            pairs.append((name, view))
            used += -(-tensor.nbytes // 64) * 64
        yield pairs

    def cloned(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies, as vLLM's receiver makes them because its reload keeps what it gets."""
        for pairs in self.fill(names):
            for name, view in pairs:
                yield name, view.clone()


def by_buckets(case: Case, buckets: Buckets, names: list[str]) -> None:
    """Reload by one session with a call for each bucket."""
    with WeightLoadSession(case.model, plans=True) as session:
        for pairs in buckets.fill(names):
            session.load(pairs, transport=buckets.memory)
    case.receipt = session.receipt


def natively(case: Case, buckets: Buckets, names: list[str]) -> None:
    """Reload by the emulation, from the same buckets."""
    case.native(buckets.cloned(names))


def peak(run: Run, call: Any) -> int | None:
    """Return how much memory of the device a call takes beside what was taken before."""
    if not run.clock.on_device:
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def g7(run: Run) -> list[Row]:
    """Dense and experts, three orders each. The bucket itself counts for neither arm."""
    return [_g7(run, "dense", run.dense(0.5)), _g7(run, "experts", run.experts())]


def _g7(run: Run, kind: str, shape: Shape) -> Row:
    case = Case(shape, run.clock)
    names = list(case.states[0])
    found: dict[str, list[int | None]] = {"weightload": [], "emulation": []}
    row = Row.made(run, f"G7 {kind}", f"peak memory beside the model, {kind}, three orders")
    hosts = [on_host(state, pinned=run.clock.on_device) for state in case.states]
    for which, order in enumerate(orders(names).values()):
        buckets = Buckets(hosts[which % 2], run.clock.device)
        case.require((which + 1) % 2, "before")
        ours = functools.partial(by_buckets, case, buckets, order)
        found["weightload"].append(peak(run, ours))
        case.require(which % 2, "weightload")
        emulation = functools.partial(natively, case, buckets, order)
        found["emulation"].append(peak(run, emulation))
        case.require(which % 2, "the emulation")
    row.figures = {"bytes": case.nbytes, "tensors": shape.tensors, "bucket_bytes": BUCKET}
    if run.clock.on_device:
        sizes = [size for size in found["weightload"] if size is not None]
        row.figures |= {f"{arm}_peak_bytes": peaks for arm, peaks in found.items()}
        row.must["<= 2 buckets"] = max(sizes) <= 2 * BUCKET
        row.goal["<= 64 MiB"] = max(sizes) <= BUCKET
        row.goal["the same in every order (5%, 1 MiB)"] = max(sizes) <= 1.05 * min(sizes) + (
            1 << 20
        )
    else:
        row.status = NO_DEVICE
        row.note = "loads in all orders ran on the CPU and were right; no peak was measured"
    return row
