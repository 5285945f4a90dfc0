"""Runs rows G1 to G9 and prints their table; see benchmarks/gpu/README.md."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # eager and replay use one algorithm

import torch

from benchmarks.gpu.case import WrongResultError
from benchmarks.gpu.clock import Clock, ceilings
from benchmarks.gpu.copies import g1, g2, g3, g4, g6
from benchmarks.gpu.graphs import g5
from benchmarks.gpu.memory import g7
from benchmarks.gpu.pause import g9
from benchmarks.gpu.processes import g8
from benchmarks.gpu.report import environment, table
from benchmarks.gpu.row import Row, Run

ROWS: dict[str, Callable[[Run], Row | list[Row]]] = {
    "G1": g1,
    "G2": g2,
    "G5": g5,
    "G7": g7,
    "G3": g3,
    "G8": g8,
    "G6": g6,
    "G9": g9,
    "G4": g4,
}
"""In this order, so that what matters most is there if time runs out."""


def measured(name: str, run: Run) -> list[Row]:
    """Run one row; what goes wrong is written down and does not end the run."""
    start = time.perf_counter()
    try:
        found = ROWS[name](run)
        rows = found if isinstance(found, list) else [found]
    except WrongResultError as error:
        rows = [Row(id=name, what="", status=f"WRONG: {error}")]
    except Exception as error:
        traceback.print_exc()
        rows = [Row(id=name, what="", status=f"WRONG: {type(error).__name__}: {error}")]
    gc.collect()
    if run.clock.on_device:
        torch.cuda.empty_cache()
    for row in rows:
        row.figures["row_took_s"] = time.perf_counter() - start
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; return 1 if a result was wrong or a limit not held."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").strip())
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5, help="pairs that count (default 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the layers (default 1)")
    parser.add_argument("--small", action="store_true", help="the smallest sizes, as on the CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="by default cuda if there is one")
    parser.add_argument("--seconds", type=float, help="start no row after this time")
    parser.add_argument("--write", type=Path, help="folder for the result")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    clock, start = Clock(device), time.perf_counter()
    small = options.small or device == "cpu"
    best = ceilings(clock, (16 << 20) if small else int((2 << 30) * options.scale))
    run = Run(clock=clock, ceilings=best, rounds=options.rounds, scale=options.scale, small=small)
    where = environment()
    rows: list[Row] = []
    for name in options.rows:
        if options.seconds and time.perf_counter() - start > options.seconds:
            rows.append(Row(id=name, what="", status="not run: no time was left"))
            continue
        rows += measured(name, run)
        print(f"{name}: {', '.join(row.status for row in rows if row.id.startswith(name))}")
        _write(options.write, where, run, rows, options)  # what is there stays if the rest fails
    print(table(where, run, rows))
    return int(any(row.failed for row in rows))


def _write(folder: Path | None, where: Any, run: Run, rows: list[Row], options: Any) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"gpu-{run.clock.device}-{where['date']}"
    stem.with_suffix(".md").write_text(table(where, run, rows))
    data = {
        "environment": where,
        "ceilings_bytes_per_s": run.ceilings,
        "rounds": run.rounds,
        "scale": run.scale,
        "small": run.small,
        "rows": [
            {
                "id": row.id,
                "what": row.what,
                "status": row.status,
                "figures": row.figures,
                "must": row.must,
                "goal": row.goal,
                "note": row.note,
            }
            for row in rows
        ],
    }
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
