"""How the time of a reload grows with the number of tensors, of modules and of bytes.

Models of Qwen3's form with more and fewer layers, and wider and narrower ones, are reloaded by vLLM
and by weightload in turn. To the medians of CPU time is fitted, for each of both,

    t = fixed + tensors * a + bytes / rate

by least squares of relative errors; modules grow with tensors in these models, so that a holds what
both cost. The fit, its largest error and the points are printed, and drawn for the documentation.

    python -m benchmarks.growth --write docs/explanation
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.speed.bench import Bench, Options
from benchmarks.speed.models import GEOMETRIES

LAYERS = (10, 25, 50, 100, 200)
WIDTHS = (64, 128, 256, 512)
MOST = 500e6
"""No model of more bytes than this; two of each are in memory at a time, and the source."""


def shapes() -> dict[str, dict[str, Any]]:
    """Return the models to measure, by a name."""
    found = {}
    for layers in LAYERS:
        for width in WIDTHS:
            config = {
                **GEOMETRIES["deep"],
                "vocab_size": 512,
                "hidden_size": width,
                "intermediate_size": 2 * width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 32,
                "num_key_value_heads": max(1, width // 64),
                "head_dim": 32,
            }
            if 18 * width * width * layers < MOST:
                found[f"{layers} x {width}"] = config
    return found


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return a point for each model."""
    points = []
    for name, config in shapes().items():
        GEOMETRIES[name] = config
        bench = Bench(name, Options(rounds=rounds), skip=True)
        bench.settle()
        series = bench.compare(bench.whole())
        points.append(
            {
                "model": name,
                "tensors": bench.count,
                "modules": bench.modules,
                "bytes": bench.nbytes,
                "native": series.cpu("native"),
                "weightload": series.cpu("ours"),
                "L2": series.cpu("L2"),
                "wrong": dict(series.wrong),
            }
        )
        print(json.dumps(points[-1]), flush=True)
        bench.close()
    return points


def fit(points: list[dict[str, Any]], arm: str) -> dict[str, float]:
    """Return fixed seconds, seconds per tensor and bytes per second, and the largest error.

    Each point counts by its relative error, or else the largest model decides alone.
    """
    import numpy

    rows = [[1.0 / p[arm], p["tensors"] / p[arm], p["bytes"] / p[arm]] for p in points]
    (fixed, each, byte), *_ = numpy.linalg.lstsq(
        numpy.array(rows), numpy.ones(len(rows)), rcond=None
    )
    errors = [
        abs(fixed + each * p["tensors"] + byte * p["bytes"] - p[arm]) / p[arm] for p in points
    ]
    return {
        "fixed_ms": fixed * 1e3,
        "us_per_tensor": each * 1e6,
        "gb_per_s": 1e-9 / byte if byte > 0 else math.inf,
        "largest_error": max(errors),
        "median_error": sorted(errors)[len(errors) // 2],
    }


# ------------------------------------------------------------------ drawing

COLOURS = {"native": "#b2452b", "weightload": "#2660a4", "L2": "#6b6b6b"}
NAMES = {"native": "vLLM", "weightload": "weightload", "L2": "copies alone (L2)"}
WIDTH, HEIGHT, EDGE = 640, 400, 70


def draw(points: list[dict[str, Any]], over: str, title: str, unit: str) -> str:
    """Return a drawing of time over one size, both on logarithmic scales."""
    xs = [p[over] for p in points]
    ys = [p[arm] * 1e3 for p in points for arm in COLOURS]
    x_range, y_range = _decades(min(xs), max(xs)), _decades(min(ys), max(ys))

    def x_of(value: float) -> float:
        return _along(value, x_range, EDGE, WIDTH - 20)

    def y_of(value: float) -> float:
        return _along(value, y_range, HEIGHT - 50, 40)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{EDGE}" y="22" font-size="14">{title}</text>',
    ]
    for value in _marks(x_range):
        x = x_of(value)
        parts.append(f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{HEIGHT - 50}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 34}" text-anchor="middle">{_short(value)}</text>'
        )
    for value in _marks(y_range):
        y = y_of(value)
        parts.append(
            f'<line x1="{EDGE}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{EDGE - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g} ms</text>')
    middle = (EDGE + WIDTH - 20) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{unit}</text>')
    for number, (arm, colour) in enumerate(COLOURS.items()):
        for p in points:
            parts.append(
                f'<circle cx="{x_of(p[over]):.1f}" cy="{y_of(p[arm] * 1e3):.1f}" r="4" '
                f'fill="{colour}" fill-opacity="0.75"><title>{NAMES[arm]}, {p["model"]}: '
                f"{p[arm] * 1e3:.2f} ms</title></circle>"
            )
        y = 54 + 18 * number
        parts.append(f'<circle cx="{EDGE + 12}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{EDGE + 22}" y="{y + 4}">{NAMES[arm]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(low: float, high: float) -> tuple[float, float]:
    return math.floor(math.log10(low)), math.ceil(math.log10(high))


def _along(value: float, limits: tuple[float, float], start: float, end: float) -> float:
    return start + (math.log10(value) - limits[0]) / (limits[1] - limits[0]) * (end - start)


def _marks(limits: tuple[float, float]) -> list[float]:
    return [10.0**power for power in range(int(limits[0]), int(limits[1]) + 1)]


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {letter}"
    return f"{value:g}"


def main() -> None:
    """Measure, fit, and print or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="folder for the drawings and the points")
    given = parser.parse_args()
    points = measure(given.rounds)
    fits = {arm: fit(points, arm) for arm in COLOURS}
    print(json.dumps(fits, indent=1))
    if given.write:
        given.write.mkdir(parents=True, exist_ok=True)
        tensors = draw(
            points, "tensors", "CPU time of a reload over the number of tensors", "tensors"
        )
        sizes = draw(points, "bytes", "CPU time of a reload over its bytes", "bytes")
        (given.write / "growth-tensors.svg").write_text(tensors)
        (given.write / "growth-bytes.svg").write_text(sizes)
        result = {"fits": fits, "points": points}
        (given.write / "growth.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
