"""Rows C12, C14, C16 and C17: what a plan costs, verification, an abort, and many reloads."""

from __future__ import annotations

import ctypes
import gc
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import torch

from benchmarks.speed.bench import Bench
from benchmarks.speed.measure import Series, Taken, WrongResult, taken
from benchmarks.speed.memory import facts
from benchmarks.speed.models import build
from benchmarks.speed.table import Bound, Row, arm, seconds
from weightload.errors import ModelPoisonedError
from weightload.ownership import require_usable, weights_version
from weightload.session import WeightLoadSession


def c12(bench: Bench) -> Row:
    """The first two reloads of a new model."""
    series = Series()
    for number in range(1, min(bench.rounds, 3) + 1):
        bench.turn(0)
        native = build(bench.source, skip=bench.skip, how="native")
        ours = build(bench.source, skip=bench.skip, how="ours")
        for name in ("first", "second"):
            bench.turn(number + (name == "second"))
            series.add(f"native {name}", taken(lambda n=native: n.native(bench.source.tensors)))
            series.add(f"ours {name}", taken(lambda o=ours: o.ours(bench.source.tensors)))
            wrong = bench.differs(ours, number + (name == "second"))
            if wrong:
                raise WrongResult(f"C12, {name} reload: {wrong}")
        with native.ambient():
            given = bench.source.tensors.items()
            series.add("plain", taken(lambda n=native, g=given: n.model.load_weights(iter(g))))
        del native, ours
    both = {
        who: statistics.median(
            a.cpu + b.cpu
            for a, b in zip(series.arms[f"{who} first"], series.arms[f"{who} second"], strict=True)
        )
        for who in ("native", "ours")
    }
    ratio = series.ratio("ours first", "plain")
    row = Row(
        name=f"C12 {bench.shape}",
        what="first and second reload of a new model",
        native=f"{arm(series, 'native first')}, {arm(series, 'native second')}",
        limit=f"plain load_weights {arm(series, 'plain')}",
        ours=f"{arm(series, 'ours first')}, {arm(series, 'ours second')}",
        series=series,
        facts=facts(bench),
    )
    row.must = [Bound("first, of a plain load", ratio, 4)]
    row.goal = [
        Bound("first, of a plain load", ratio, 3),
        Bound("first and second, of vLLM's", both["ours"] / both["native"], 1),
    ]
    return row


def c14(bench: Bench) -> Row:
    """What it costs to compare with what was sent."""
    bench.settle()
    flat = memoryview(bench.source.flat.numpy())
    arms: dict[str, Callable[[int], Any]] = {
        "ours": lambda _: bench.ours.ours(bench.source.tensors),
        "ours sampled": lambda _: bench.ours.ours(bench.source.tensors, verify="sampled"),
        "ours full": lambda _: bench.ours.ours(bench.source.tensors, verify="full"),
        "L2": bench.limits.loop,
        "blake3": lambda _: blake3.blake3(flat).digest(),
    }
    series = bench.compare(arms)
    sampled = series.ratio("ours sampled", "ours") - 1
    full = (series.cpu("ours full") - series.cpu("ours")) / series.cpu("L2")
    row = Row(
        name=f"C14 {bench.shape}",
        what="verification: off, sampled, full",
        limit=f"L2 {arm(series, 'L2')}, blake3 of all {arm(series, 'blake3')}",
        ours=", ".join(arm(series, f"ours{mode}") for mode in ("", " sampled", " full")),
        series=series,
        facts=facts(bench),
    )
    row.must = [Bound("sampled, extra", sampled, 0.03)]
    row.goal = [Bound("full, extra, of L2", full, 0.70)]
    row.notes.append(
        "full verification reads what was sent and what is live, with a digest of weightload's own "
        "and not with blake3, whose time for one reading stands beside it"
    )
    return row


def c16(bench: Bench) -> Row:
    """A stream that ends half way, and the reload that restores the model."""
    bench.settle()
    half = _first_half(bench)
    series = Series()
    served = 0
    for number in range(bench.rounds + 1):
        bench.turn(number)
        usual = taken(lambda: bench.ours.ours(bench.source.tensors))
        session = WeightLoadSession(bench.ours.model, version="broken")
        session.prepare()
        session.load(half)
        abort = taken(session.abort)
        try:
            require_usable(bench.ours.model)
            served += 1
        except ModelPoisonedError:
            served += weights_version(bench.ours.model) is not None
        bench.turn(number + 1)
        again = taken(lambda: bench.ours.ours(bench.source.tensors))
        wrong = bench.differs(bench.ours, number + 1)
        if wrong:
            raise WrongResult(f"C16, restored: {wrong}")
        require_usable(bench.ours.model)
        if number:
            for name, one in (("ours", usual), ("abort", abort), ("restore", again)):
                series.add(name, one)
    ratio = series.ratio("restore", "ours")
    row = Row(
        name=f"C16 {bench.shape}",
        what="abort after half of the stream, then a full reload",
        limit=f"a reload without it {arm(series, 'ours')}",
        ours=f"abort {arm(series, 'abort')}, reload {arm(series, 'restore')}",
        series=series,
        facts=facts(bench),
    )
    row.must = [Bound("half loaded models that would be served", served, 0, "models")]
    row.goal = [
        Bound("abort", series.cpu("abort") * 1e3, 10, "ms"),
        Bound("reload, of one without an abort", ratio, 1.1),
    ]
    return row


def _first_half(bench: Bench) -> list[tuple[str, torch.Tensor]]:
    found, left = [], bench.nbytes // 2
    for pair in bench.source.tensors.items():
        left -= pair[1].nbytes
        if left < 0:
            return found
        found.append(pair)
    return found


RELOADS = 50


def c17(bench: Bench) -> Row:
    """Fifty reloads."""
    bench.settle()
    series = Series()
    resident = objects = 0  # numbers, so that nothing is kept that counts as an object itself
    times = [0.0] * RELOADS
    for number in range(RELOADS):
        bench.turn(number)
        one = taken(lambda: bench.ours.ours(bench.source.tensors))
        times[number] = one.cpu
        if number % 10 == 9:
            wrong = bench.differs(bench.ours, number)
            if wrong:
                raise WrongResult(f"C17, reload {number}: {wrong}")
        if number == 9:
            resident, objects = _standing()
    resident_after, objects_after = _standing()
    series.arms["ours"] = [Taken(one, one, 0) for one in times]
    slope = _slope(times) / statistics.median(times)
    grown, more = (resident_after - resident) / 1e6, objects_after - objects
    row = Row(
        name=f"C17 {bench.shape}",
        what=f"{RELOADS} reloads, other weights each time",
        limit=f"reload 2: {seconds(times[1])}",
        ours=f"median {arm(series, 'ours')}, last {seconds(times[-1])}",
        series=series,
        facts={**facts(bench), "grown_mb": grown, "objects": more},
    )
    row.must = [
        Bound("memory, reload 10 to 50,", grown, 1, "MB", cpu_only=False),
        Bound("live objects, reload 10 to 50,", more, 0, "objects", cpu_only=False),
    ]
    row.goal = [Bound("slope per reload", abs(slope) * 100, 0.2, "%", cpu_only=False)]
    return row


def _standing() -> tuple[int, int]:
    """Return what there is in this process, when everything that can go has gone.

    Returns:
        Bytes of memory that belong to no file, and how many objects the garbage collector knows.
    """
    gc.collect()
    trim()
    return anonymous(), sum(1 for _ in _objects())


def _objects() -> Iterator[Any]:
    yield from gc.get_objects()


def trim() -> None:
    """Give memory that is free back to the system, as far as the C library can."""
    ctypes.CDLL(None).malloc_trim(0)


def anonymous() -> int:
    """Return the bytes of this process's memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _slope(values: list[float]) -> float:
    """Return how much values grow from one to the next, by the median of all pairs' slopes."""
    pairs = [
        (values[j] - values[i]) / (j - i)
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return statistics.median(pairs)
