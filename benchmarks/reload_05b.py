"""Time of a whole reload beside vLLM's own, on the 0.5B-parameter shape (28 layers, hidden 1024).

Both engines live in this process and are updated in turn to weights that differ in every round. A
round counts only if both engines then compute exactly what a fresh engine on those weights does.
Times are seconds of this thread's CPU and of the wall, with one torch thread.

    python benchmarks/reload_05b.py --rounds 5 --write benchmarks/results/
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from weightload.vllm.engine import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.families import geometry_05b
from weightload.vllm.testing.probe import observe, start_engine, stop_engine
from weightload.vllm.testing.sources import in_order, read_checkpoint, shuffled


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "?")


def timed(call: Any) -> tuple[float, float]:
    """Return CPU seconds of this thread and wall seconds of one call."""
    cpu, wall = time.thread_time(), time.perf_counter()
    call()
    return time.thread_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Run the comparison and print or write its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="folder for the result")
    options = parser.parse_args()
    register()
    import vllm

    with tempfile.TemporaryDirectory(prefix="weightload-bench-") as name:
        folders = [geometry_05b(Path(name) / str(seed), seed=seed) for seed in (1, 2)]
        fresh = []
        for folder in folders:
            llm = start_engine(folder)
            fresh.append(observe(llm))
            stop_engine(llm)
            del llm
        native = start_engine(folders[0])
        ours = start_engine(folders[0], load_format="weightload")
        states = [read_checkpoint(folder) for folder in folders]

        def by_vllm(weights: Any) -> None:
            given = (
                {"weights_path": str(weights)}
                if isinstance(weights, Path)
                else {"weights_iterator": iter(weights)}
            )
            native.collective_rpc("reload_weights", kwargs=given)

        def by_weightload(weights: Any) -> None:
            reload(ours, weights)

        sources = {
            "checkpoint folder": lambda which, _: folders[which],
            "list in memory, layer order": lambda which, _: list(in_order(states[which])),
            "list in memory, shuffled": lambda which, r: list(shuffled(states[which], seed=r)),
        }
        rows = []
        for label, source in sources.items():
            pairs = []
            for round_ in range(options.rounds + 1):
                which = (round_ + 1) % 2
                weights = source(which, round_)
                one = timed(lambda w=weights: by_vllm(w))
                two = timed(lambda w=weights: by_weightload(w))
                if observe(native) != fresh[which] or observe(ours) != fresh[which]:
                    raise SystemExit(f"round {round_} of {label!r}: outputs are not those of B")
                if round_:  # the first round warms both up
                    pairs.append((*one, *two))
            rows.append(
                {
                    "source": label,
                    "native_cpu_s": statistics.median(p[0] for p in pairs),
                    "weightload_cpu_s": statistics.median(p[2] for p in pairs),
                    "cpu_ratio": statistics.median(p[2] / p[0] for p in pairs),
                    "native_wall_s": statistics.median(p[1] for p in pairs),
                    "weightload_wall_s": statistics.median(p[3] for p in pairs),
                    "wall_ratio": statistics.median(p[3] / p[1] for p in pairs),
                }
            )
        for llm in (native, ours):
            stop_engine(llm)
    text = _report(rows, options.rounds, vllm.__version__)
    print(text)
    if options.write:
        day = datetime.date.today().isoformat()
        (options.write / f"reload-05b-{day}.md").write_text(text)
        (options.write / f"reload-05b-{day}.json").write_text(json.dumps(rows, indent=1) + "\n")


def _report(rows: list[dict[str, Any]], rounds: int, vllm_version: str) -> str:
    load = os.getloadavg()[0]
    lines = [
        "# A whole reload beside vLLM's own, 0.5B-parameter shape",
        "",
        f"{datetime.date.today().isoformat()}; {cpu_model()}, {os.cpu_count()} cores, "
        f"{platform.system()}; torch {torch.__version__}, vLLM {vllm_version}; one torch thread; "
        f"load average {load:.1f}. Median of {rounds} interleaved pairs after one warm-up, other "
        f"weights in every round, and in every round both engines compute exactly what a fresh "
        f"engine on those weights does.",
        "",
        "| source | vLLM CPU s | weightload CPU s | ratio | vLLM wall s | weightload wall s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['source']} | {row['native_cpu_s']:.3f} | {row['weightload_cpu_s']:.3f} | "
            f"**{row['cpu_ratio']:.2f}** | {row['native_wall_s']:.3f} | "
            f"{row['weightload_wall_s']:.3f} | **{row['wall_ratio']:.2f}** |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
