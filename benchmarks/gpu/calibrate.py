"""The emulation of vLLM's reload beside vLLM itself, on the CPU.

For each geometry two models are built from one checkpoint, one by vLLM and one of plain torch, and
are reloaded in turn: interleaved pairs of thread CPU time after one warm-up of each, other weights in
every round, every live tensor compared with the source. Linear layers of vLLM keep the layout of the
checkpoint by vLLM's own switch, as they do on CUDA. Where the emulation takes 0.8 to 1.2 of vLLM's
time, its figures on a GPU may stand for vLLM's.

    python -m benchmarks.gpu.calibrate --pairs 5 --write benchmarks/results
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import undisturbed
from benchmarks.gpu.layerwise import Layerwise
from benchmarks.gpu.model import Shape, build, process
from benchmarks.gpu.report import environment

NAMES = ("dense06", "deep", "moe")
LEAST, MOST = 0.8, 1.2


def spent(call: Any) -> float:
    """Return the CPU seconds of this thread that a call takes."""
    with undisturbed():
        start = time.thread_time()
        call()
        return time.thread_time() - start


def differences(real: torch.nn.Module, emulated: torch.nn.Module) -> list[str]:
    """Return the names of parameters that are not the same in both."""
    mine = dict(emulated.named_parameters())
    theirs = dict(real.named_parameters())
    lost = sorted(mine.keys() ^ theirs.keys())
    return lost or [name for name, one in theirs.items() if not torch.equal(one, mine[name])]


def calibrate(name: str, pairs: int, *, small: bool = False) -> dict[str, Any]:
    """Measure one geometry."""
    from benchmarks.speed.models import GEOMETRIES, Source, reduced
    from benchmarks.speed.models import build as build_real

    config = GEOMETRIES[name]
    config = reduced(config) if small else config
    source = Source.of(config)
    real = build_real(source, skip=True, how="native")
    emulated = build(Shape.of(config), "cpu")
    layerwise = Layerwise(emulated, "cpu")
    with torch.no_grad():
        emulated.load_weights(iter(source.tensors.items()))
        process(emulated)
    modules = [sum(1 for _ in one.modules()) for one in (real.model, emulated)]
    plain = {
        "plain load vLLM": lambda weights: real.model.load_weights(iter(weights.items())),
        "plain load torch": lambda weights: emulated.load_weights(iter(weights.items())),
    }
    times: list[tuple[float, float]] = []
    loads: list[tuple[float, float]] = []
    wrong: list[str] = []
    for number in range(1, pairs + 2):
        weights = source.turn(number)
        first = spent(lambda w=weights: real.native(w))
        second = spent(lambda w=weights: layerwise.reload(iter(w.items())))
        wrong += differences(real.model, emulated)
        if number > 1:
            times.append((first, second))
        with torch.no_grad(), real.ambient():
            both = [spent(lambda w=weights, load=load: load(w)) for load in plain.values()]
        if number > 1:
            loads.append((both[0], both[1]))
        if number > 1 and wrong:
            break
    ratio = statistics.median(two / one for one, two in times)
    return {
        "geometry": name,
        "tensors": len(source.tensors),
        "MB": round(source.nbytes / 1e6),
        "modules": modules,
        "vllm_s": statistics.median(one for one, _ in times),
        "emulation_s": statistics.median(two for _, two in times),
        "ratio": ratio,
        "ratios": [two / one for one, two in times],
        "plain_load_ratio": statistics.median(two / one for one, two in loads),
        "wrong": sorted(set(wrong)),
        "holds": not wrong and LEAST <= ratio <= MOST,
    }


def table(rows: list[dict[str, Any]], where: dict[str, Any], pairs: int) -> str:
    """Return the result as Markdown."""
    lines = [
        "# The emulation of vLLM's layerwise reload beside vLLM, on the CPU",
        "",
        f"{where['date']}; {where['cpu']}, {where['cores']} cores; torch {where['torch']}, vLLM "
        f"{where['vllm']}; one torch thread; load average {where['load']:.1f}. Thread CPU seconds, "
        f"medians of {pairs} interleaved pairs, other weights in every round, all parameters of both "
        f"models equal after every round. The emulation stands for vLLM if the ratio is "
        f"{LEAST} to {MOST}.",
        "",
        "| geometry | tensors / MB | modules (vLLM, torch) | vLLM s | emulation s | ratio | range | "
        "plain load, ratio | stands |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        wrong = f"WRONG: {row['wrong'][:3]}" if row["wrong"] else ""
        lines.append(
            f"| {row['geometry']} | {row['tensors']} / {row['MB']} | {row['modules'][0]}, "
            f"{row['modules'][1]} | {row['vllm_s']:.3f} | {row['emulation_s']:.3f} | "
            f"**{row['ratio']:.2f}** | {min(row['ratios']):.2f} to {max(row['ratios']):.2f} | "
            f"{row['plain_load_ratio']:.2f} | {wrong or ('yes' if row['holds'] else 'NO')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the calibration, print its table, and return whether the emulation stands for vLLM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--geometries", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--small", action="store_true", help="reduced sizes, to see that it runs")
    parser.add_argument("--write", type=Path, help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.geometries:
        rows.append(calibrate(name, options.pairs, small=options.small))
        gc.collect()
    where = environment()
    text = table(rows, where, options.pairs)
    print(text)
    if options.write:
        stem = options.write / f"gpu-calibration-{where['date']}"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(
            json.dumps({"environment": where, "rows": rows}, indent=1) + "\n"
        )
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
