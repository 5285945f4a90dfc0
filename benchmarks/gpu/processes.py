"""Row G8: a trainer's process fills buckets that this process opens, one handle for each."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as processes

from benchmarks.gpu.case import SEEDS, Case
from benchmarks.gpu.model import Shape, draw
from benchmarks.gpu.row import Row, Run
from weightload import WeightLoadSession

BUCKET = 512 << 20
Rows = list[tuple[str, tuple[int, ...], int]]
"""Of each tensor in a bucket its name, its shape, and the bytes before it."""


def packed(state: dict[str, torch.Tensor], size: int) -> Iterator[tuple[torch.Tensor, Rows]]:
    """Yield buckets, each in memory of its own, with what is in them."""
    group: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in [*state.items(), ("", None)]:
        nbytes = 0 if tensor is None else -(-tensor.nbytes // 64) * 64
        if group and (tensor is None or used + nbytes > size):
            bucket = torch.empty(used, dtype=torch.uint8, device=group[0][1].device)
            rows, place = [], 0
            for one, part in group:
                view = bucket[place : place + part.nbytes].view(part.dtype).view(part.shape)
                view.copy_(part)
                rows.append((one, tuple(part.shape), place))
                place += -(-part.nbytes // 64) * 64
            yield bucket, rows
            group, used = [], 0
        if tensor is not None:
            group.append((name, tensor))
            used += nbytes


def trainer(link: Any, shape: Shape, device: str, size: int) -> None:
    """Send the checkpoint of every seed that is asked for, until there is none."""
    while (seed := link.recv()) is not None:
        buckets = list(packed(draw(shape, seed, device), size))
        if device == "cuda":
            torch.cuda.synchronize()
        link.send(len(buckets))
        for bucket, rows in buckets:
            link.send(rows)
            link.send_bytes(ForkingPickler.dumps(bucket))
        link.recv()  # the other process has let go of them
        del buckets, bucket
    link.close()


def views(bucket: torch.Tensor, rows: Rows) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in a bucket, without a copy."""
    found = []
    for name, shape, place in rows:
        count = torch.Size(shape).numel()
        part = bucket[place : place + count * 2].view(torch.bfloat16)
        found.append((name, part.view(shape)))
    return found


def received(case: Case, link: Any, seed: int, arm: str) -> tuple[float, int]:
    """Ask for a checkpoint and install it; return the seconds and the number of handles.

    The trainer's time to fill buckets does not count: they are full before the clock starts.
    """
    link.send(seed)
    count = link.recv()
    messages = [(link.recv(), link.recv_bytes()) for _ in range(count)]
    case.clock.settle()
    start = time.perf_counter()
    if arm == "weightload":
        with WeightLoadSession(case.model, plans=True) as session:
            for rows, handle in messages:
                bucket = pickle.loads(handle)
                session.load(views(bucket, rows), transport=bucket)
                del bucket
        case.receipt = session.receipt
    else:
        case.native(cloned(messages))
    case.clock.settle()
    took = time.perf_counter() - start
    link.send("done")
    return took, count


def cloned(messages: list[tuple[Rows, bytes]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of what is in buckets, as vLLM's receiver makes them."""
    for rows, handle in messages:
        bucket = pickle.loads(handle)
        for name, view in views(bucket, rows):
            yield name, view.clone()


def g8(run: Run) -> Row:
    """Two processes on one device; on the host, shared memory stands in for it."""
    row = Row.made(run, "G8", "dense, buckets of another process on the same device")
    shape = run.dense(0.5)
    case = Case(shape, run.clock)
    inside = case.compare(run.rounds, native=False)
    size = BUCKET if run.clock.on_device else max(64 << 10, case.nbytes // 4)
    context = processes.get_context("spawn")
    link, other = context.Pipe()
    child = context.Process(target=trainer, args=(other, shape, run.clock.device, size))
    child.start()
    other.close()
    times: dict[str, list[float]] = {"emulation": [], "weightload": []}
    handles = 0
    try:
        for number in range(run.rounds + 1):
            for arm, found in times.items():
                which = (number + (arm == "weightload")) % 2
                took, handles = received(case, link, SEEDS[which], arm)
                case.require(which, arm)
                if number:
                    found.append(took)
        link.send(None)
        child.join(30)
    finally:
        if child.is_alive():
            child.terminate()
        link.close()
    base = statistics.median(inside.ours)
    mine = statistics.median(times["weightload"])
    copied = case.receipt.bytes_copied if case.receipt is not None else -1
    row.figures = {
        "tensors": shape.tensors,
        "bytes": case.nbytes,
        "weightload_s": mine,
        "emulation_s": statistics.median(times["emulation"]),
        "same_bytes_inside_one_process_s": base,
        "times_inside": mine / base,
        "handles": handles,
        "bytes_copied": copied,
    }
    row.judge(run, "must", "no clone of what is in a bucket", lambda: copied == 0)
    row.judge(run, "must", "<= 2 of G1, same bytes", lambda: mine <= 2 * base)
    row.judge(run, "goal", "<= 1.3 of G1, same bytes", lambda: mine <= 1.3 * base)
    return row
