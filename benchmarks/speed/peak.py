"""Row C10: the most memory that a reload needs beside the model and the source.

The source's tensors are made one by one, in memory of their own, and handed over for good. The
system keeps the highest count of pages that the process had; it is set back before a reload and read
after it, so nothing that comes and goes in between is missed. What weightload keeps from one reload to
the next to stage in is counted as well.
"""

from __future__ import annotations

import ctypes
import gc
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.speed.bench import Bench
from benchmarks.speed.lives import trim
from benchmarks.speed.measure import Series, WrongResult, taken
from benchmarks.speed.memory import facts
from benchmarks.speed.table import Bound, Row

BUCKET = 64 << 20
_MMAP_THRESHOLD = -3


def _orders(names: list[str]) -> dict[str, list[str]]:
    mixed = list(names)
    random.Random(3).shuffle(mixed)
    return {
        "by layer": names,
        "shuffled": mixed,
        "by projection": sorted(names, key=lambda name: (name.split(".")[-2:], name)),
    }


def c10(bench: Bench) -> Row:
    """Peak memory of a reload, in three orders of its source."""
    bench.settle()
    # Memory of this size goes back to the system as soon as it is free, whatever was before.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 64 << 10)
    largest = max(tensor.nbytes for tensor in bench.source.tensors.values())
    peaks: dict[str, dict[str, int]] = {"native": {}, "ours": {}}
    series = Series()
    number = 0
    for order, names in _orders(list(bench.source.tensors)).items():
        for _ in range(2):  # the first one warms up
            number += 1
            bench.turn(number)
            for who in ("native", "ours"):
                run = _load(bench, who, names)
                kept = bench.ours.kept_bytes if who == "ours" else 0
                peaks[who][order] = kept + _peak(run, series, f"{who} {order}")
                wrong = bench.check(number, who)
                if wrong and who == "ours":
                    raise WrongResult(f"C10, {order}: {wrong}")
                if wrong:
                    series.wrong.setdefault(f"native {order}", wrong)
    mb = {who: {order: size / 1e6 for order, size in of.items()} for who, of in peaks.items()}
    said = {who: ", ".join(f"{size:.0f}" for size in of.values()) for who, of in mb.items()}
    worst, least = max(mb["ours"].values()), min(mb["ours"].values())
    wrong = ", wrong result" if series.wrong else ""
    row = Row(
        name=f"C10 {bench.shape}",
        what="peak extra memory by layer, shuffled, by projection",
        native=f"{said['native']} MB{wrong}",
        limit=f"{(BUCKET + largest) / 1e6:.0f} MB: a bucket and the largest tensor",
        ours=f"{said['ours']} MB",
        series=series,
        facts={**facts(bench), "peaks_mb": mb, "largest_mb": largest / 1e6},
    )
    row.must = [Bound("worst order", worst, (BUCKET + largest) / 1e6, "MB", cpu_only=False)]
    row.goal = [
        Bound("worst order", worst, (BUCKET + largest) / 1e6, "MB", cpu_only=False),
        Bound("worst over best order", worst / max(least, 1.0), 1.10, cpu_only=False),
    ]
    return row


def _load(bench: Bench, who: str, names: list[str]) -> Callable[[], object]:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, bench.source.tensors[name].clone()

    if who == "native":
        return lambda: bench.native.native(source())
    return lambda: bench.ours.ours(source(), transport=[])


def _peak(run: Callable[[], object], series: Series, name: str) -> int:
    gc.collect()
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    series.add(name, taken(run))
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
