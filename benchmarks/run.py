"""Every figure of weightload's speed on a CPU, beside vLLM's own reload and beside the memory.

python -m benchmarks.run                         all rows, under ten minutes on two cores
python -m benchmarks.run --only C1 C3            some of them
python -m benchmarks.run --smoke                 small shapes, and only what must hold
python -m benchmarks.run --write benchmarks/results
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from benchmarks.speed import disk, lives, memory, packing, peak, plain, streams, stretch
from benchmarks.speed.bench import Bench, Options
from benchmarks.speed.report import environment, page, write
from benchmarks.speed.table import Bound, Row


@attrs.frozen
class Plan:
    """One row to measure: on which shape, and by what.

    Attributes:
        row: such as "C1".
        shape: the model, ``None`` if the row makes its own.
        skip: whether its linear layers keep the checkpoint's layout.
        measure: does it; gets the shape's bench, or the options.
        smoke: whether it is a part of the quick check.
    """

    row: str
    shape: str | None
    skip: bool
    measure: Callable[[Any], Row]
    smoke: bool = True


PLANS = [
    Plan("C1", "dense06", True, memory.c1),
    Plan("C11", "dense06", True, streams.c11),
    Plan("C12", "dense06", True, lives.c12, smoke=False),
    Plan("C13", "dense06", True, streams.c13, smoke=False),
    Plan("C14", "dense06", True, lives.c14, smoke=False),
    Plan("C16", "dense06", True, lives.c16, smoke=False),
    Plan("C17", "dense06", True, lives.c17, smoke=False),
    Plan("C8", "dense06", True, disk.c8, smoke=False),
    Plan("C9", "dense06", True, disk.c9, smoke=False),
    Plan("C2", "wide", True, memory.c2),
    Plan("C3", "tiny200", True, memory.c3),
    Plan("C4", "deep", True, memory.c4),
    Plan("C5", "deep", True, memory.c5),
    Plan("C8", "deep", True, disk.c8, smoke=False),
    Plan("C3", "moetiny", True, packing.c3_experts),
    Plan("C7", "moe", True, packing.c7, smoke=False),
    Plan("C8", "moe", True, disk.c8, smoke=False),
    Plan("C6", "dense06", False, packing.c6, smoke=False),
    Plan("C15", None, True, plain.c15),
    Plan("S1", None, True, stretch.s1, smoke=False),
    # Last, because it changes how this process gets its memory.
    Plan("C10", "moe", True, peak.c10, smoke=False),
    Plan("C10", "dense06", True, peak.c10, smoke=False),
]
"""Grouped by shape, so that each is built once."""


def measure(plans: list[Plan], options: Options) -> list[Row]:
    """Measure rows, one shape after the other."""
    rows: list[Row] = []
    bench: Bench | None = None
    held = None
    for plan in plans:
        began = time.perf_counter()
        try:
            if plan.shape is not None and held != (plan.shape, plan.skip):
                if bench is not None:
                    bench.close()
                gc.collect()
                bench, held = Bench(plan.shape, options, skip=plan.skip), (plan.shape, plan.skip)
            row = plan.measure(options if plan.shape is None else bench)
        except Exception as error:
            traceback.print_exc()
            row, held = failed(plan, error), None
        rows.append(row)
        spent = time.perf_counter() - began
        print(f"{row.name}: {row.ours} ({spent:.0f} s)", file=sys.stderr, flush=True)
    if bench is not None:
        bench.close()
    return sorted(rows, key=lambda row: (row.name[0], int(row.name.split()[0][1:])))


def failed(plan: Plan, error: Exception) -> Row:
    """Return the row of what could not be measured, or whose result was wrong."""
    name, said = f"{plan.row} {plan.shape or ''}".strip(), f"{type(error).__name__}: {error}"
    nothing = [Bound("a right result", None, 0)]
    ours = f"**failed** {said[:200].splitlines()[0]}"
    return Row(name=name, what="failed", ours=ours, must=nothing, goal=nothing)


def main() -> None:
    """Measure what was asked for, and print and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=None, metavar="ROW")
    parser.add_argument("--rounds", type=int, default=5, help="pairs that count, 5 by default")
    parser.add_argument("--smoke", action="store_true", help="small shapes; fails if a must does")
    parser.add_argument("--write", type=Path, help="folder for the results")
    given = parser.parse_args()
    plans = [plan for plan in PLANS if given.only is None or plan.row in given.only]
    if given.smoke:
        plans = [plan for plan in plans if plan.smoke]
    options = Options(rounds=given.rounds, smoke=given.smoke)
    began = time.perf_counter()
    rows = measure(plans, options)
    around = environment(options, time.perf_counter() - began)
    print(page(rows, around))
    if given.write:
        write(rows, around, given.write)
    if given.smoke:
        broken = [
            f"{row.name}: {one}" for row in rows for one in row.must if one.broken(smoke=True)
        ]
        if broken:
            raise SystemExit("What must hold does not:\n" + "\n".join(broken))


if __name__ == "__main__":
    main()
