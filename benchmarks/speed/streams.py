"""Rows C11 and C13: weights that come in buckets, from this process and from another."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.speed.bench import Bench
from benchmarks.speed.measure import Taken, in_turn, taken
from benchmarks.speed.memory import facts
from benchmarks.speed.models import Source
from benchmarks.speed.table import Bound, Row, arm, seconds
from weightload.arena import Arena
from weightload.packing import BucketWriter
from weightload.session import WeightLoadSession
from weightload.unpacking import BucketReader

MIB = 1 << 20
SIZES = {1: (1.35, 1.20), 8: (1.15, 1.08), 64: (1.08, 1.05)}
"""By MiB of a bucket what must hold and what is wanted, against one call with everything."""


def buckets(source: Source, size: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Divide the tensors, in their order, into lists of at most ``size`` bytes, or of one tensor."""
    found: list[list[tuple[str, torch.Tensor]]] = []
    left = 0
    for name, tensor in source.tensors.items():
        if tensor.nbytes > left:
            found.append([])
            left = size
        found[-1].append((name, tensor))
        left -= tensor.nbytes
    return found


def c11(bench: Bench) -> Row:
    """Buckets of three sizes against one call."""
    bench.settle()
    divided = {size: buckets(bench.source, size * MIB) for size in SIZES}
    whole = list(bench.source.tensors.items())

    def by(parts: list[list[tuple[str, torch.Tensor]]]) -> Callable[[int], None]:
        def run(number: int) -> None:
            with WeightLoadSession(bench.ours.model, version=number) as session:
                for part in parts:
                    session.load(part, transport=bench.source.flat)

        return run

    arms = {"ours": by([whole]), **{f"ours {size} MiB": by(divided[size]) for size in SIZES}}
    series = bench.compare(arms)
    ratios = {size: series.ratio(f"ours {size} MiB", "ours") for size in SIZES}
    calls = _loader_calls(bench, divided[8])
    row = Row(
        name=f"C11 {bench.shape}",
        what="buckets of 1, 8 and 64 MiB beside one call",
        limit=f"one call {arm(series, 'ours')}",
        ours=", ".join(arm(series, f"ours {size} MiB") for size in SIZES),
        series=series,
        facts={**facts(bench), "calls of load_weights": calls},
    )
    row.must = [Bound(f"{size} MiB", ratios[size], must) for size, (must, _) in SIZES.items()]
    row.goal = [Bound(f"{size} MiB", ratios[size], goal) for size, (_, goal) in SIZES.items()]
    row.goal.append(Bound("tensors through load_weights", calls, 0, "tensors", cpu_only=False))
    row.notes.append(
        f"{', '.join(str(len(divided[size])) for size in SIZES)} buckets; a tensor that is larger "
        f"than a bucket comes alone"
    )
    return row


def _loader_calls(bench: Bench, parts: list[list[tuple[str, torch.Tensor]]]) -> int:
    """Return how many tensors reach the model's loaders in one reload by buckets.

    Counted by the framework that hands them over: the model itself is left as it is, since a plan
    would notice.
    """
    session = WeightLoadSession(bench.ours.model, version="counted")
    session.prepare()
    framework = session._framework
    counted = 0
    hand_over = framework.load

    def load(model: Any, weights: Any) -> None:
        nonlocal counted

        def counting() -> Iterator[Any]:
            nonlocal counted
            for pair in weights:
                counted += 1
                yield pair

        hand_over(model, counting())

    framework.load = load
    try:
        for part in parts:
            session.load(part, transport=bench.source.flat)
        session.finish()
    finally:
        del framework.load
    return counted


BUCKET = 64 * MIB


def c13(bench: Bench) -> Row:
    """A bucket in memory that two processes see: what the engine's side takes."""
    bench.settle()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    producer = spawn.Process(target=_produce, args=(there, bench.source.config), daemon=True)
    producer.start()
    there.close()
    path, nbytes, token = here.recv()
    arena = Arena.open(path, nbytes, token)
    memories = arena.memory.split(BUCKET)
    walls: dict[int, list[float]] = {1: [], len(memories): []}
    parts: dict[str, list[float]] = {"digest": [], "install": []}
    opened = 0

    def ask(number: int, ahead: int = 1) -> Taken:
        nonlocal opened
        here.send((bench.which(number), ahead))
        reader = BucketReader(here.recv(), BUCKET)
        begin = time.perf_counter()
        session = WeightLoadSession(bench.ours.model, version=number)
        every = [taken(session.prepare)]
        checked = 0.0
        opened = 0
        while (record := here.recv()) is not None and "buckets" not in record:
            pairs: list[Any] = []
            memory = memories[opened % ahead]
            one = taken(
                lambda record=record, pairs=pairs, memory=memory: pairs.extend(
                    reader.take(record, memory)
                )
            )
            checked += one.cpu
            every.append(one)
            every.append(
                taken(lambda pairs=pairs, memory=memory: session.load(pairs, transport=memory))
            )
            opened += 1
            here.send("next")
        reader.close(record)
        every.append(taken(session.finish))
        if number:
            walls[ahead].append(time.perf_counter() - begin)
        total = Taken(
            sum(one.cpu for one in every),
            sum(one.wall for one in every),
            sum(one.faults for one in every),
        )
        if number and ahead == 1:
            parts["digest"].append(checked)
            parts["install"].append(total.cpu - checked)
        return total

    try:
        series = in_turn(
            {
                "ours": ask,
                "L2": bench.limits.loop,
                "ours ahead": lambda number: ask(number, len(memories)),
            },
            bench.rounds,
            before=bench.turn,
            check=bench.check,
        )
    finally:
        here.send(None)
        producer.join(10)
        arena.close()
    series.arms["install"] = [Taken(value, value, 0) for value in parts["install"]]
    extra = (series.cpu("install") - 1.15 * series.cpu("L2")) / bench.count * 1e6
    total = (series.cpu("ours") - 1.15 * series.cpu("L2")) / bench.count * 1e6
    alone, ahead = (statistics.median(mine) for mine in walls.values())
    blocked = series.wall("ours ahead")
    row = Row(
        name=f"C13 {bench.shape}",
        what="buckets of 64 MiB in memory shared with another process, the engine's side",
        limit=f"L2 {arm(series, 'L2')}",
        ours=f"{arm(series, 'ours')}, {seconds(series.cpu('install'))} without digests",
        series=series,
        facts={
            **facts(bench),
            "buckets": opened,
            "with digests, us": total,
            "update, one bucket, wall s": alone,
            "update, two buckets, wall s": ahead,
        },
    )
    row.goal = [
        Bound("per tensor beyond 1.15 L2, digests not counted", extra, 5, "us"),
        Bound("the same with digests", total, 5, "us"),
    ]
    row.notes += [
        f"the memory is opened once for all {opened} buckets; every bucket's bytes are compared "
        f"with a digest before any of it is used",
        f"a whole update, packing included, takes {seconds(alone)} of the wall with memory for one "
        f"bucket and {seconds(ahead)} with memory for two, where the next is packed while one is "
        f"installed; of that the engine's side works {seconds(blocked)}",
    ]
    return row


def _produce(pipe: Any, config: dict[str, Any]) -> None:
    """Fill buckets with the weights of the rounds that are asked for, until ``None`` is.

    A round comes with the number of buckets that may be filled before the first is given back.
    """
    torch.set_num_threads(1)
    source = Source.of(config)
    arena = Arena.create(2 * BUCKET)
    memories = arena.memory.split(BUCKET)
    pipe.send((arena.path, arena.memory.numel(), arena.token))
    while (asked := pipe.recv()) is not None:
        number, ahead = asked
        tensors = source.turn(number)
        writer = BucketWriter(memories[0], spare=memories[1:ahead], version=number)
        pipe.send(writer.opening())
        waiting = 0
        for record in writer.fill(tensors.items()):
            pipe.send(record)
            waiting += 1
            if waiting == ahead:
                pipe.recv()
                waiting -= 1
        for _ in range(waiting):
            pipe.recv()
        pipe.send(writer.closing())
    arena.close(remove=True)
