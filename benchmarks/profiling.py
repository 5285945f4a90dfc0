"""Which functions a reload spends its time in, for one shape.

Own time of each function, over several reloads with other weights in every one, as milliseconds of
one reload. The profiler itself makes small functions look dearer than they are; the first line says
what the reload takes without it.

    python -m benchmarks.profiling deep
    python -m benchmarks.profiling deep --plans off
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
from pathlib import Path

from benchmarks.speed.measure import taken
from benchmarks.speed.models import GEOMETRIES, Source, build

RELOADS = 5


def main() -> None:
    """Profile and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=list(GEOMETRIES))
    parser.add_argument("--plans", choices=["on", "off"], default="on")
    parser.add_argument("--packed", action="store_true", help="linear layers packed")
    parser.add_argument("--lines", type=int, default=14)
    given = parser.parse_args()
    source = Source.of(GEOMETRIES[given.shape])
    built = build(source, skip=not given.packed, how="ours")
    gc.collect()
    gc.freeze()  # as vLLM's worker does when its model is loaded
    times, profile = [], cProfile.Profile()
    for number in range(1, 3 + 2 * RELOADS):
        source.turn(number)
        if number < 3:
            built.ours(source.tensors, plans=given.plans == "on")
        elif number % 2:
            times.append(taken(lambda: built.ours(source.tensors, plans=given.plans == "on")).cpu)
        else:
            profile.enable()
            built.ours(source.tensors, plans=given.plans == "on")
            profile.disable()
    gc.unfreeze()
    print(f"{given.shape}, plans {given.plans}: {statistics.median(times) * 1e3:.1f} ms\n")
    stats = pstats.Stats(profile)
    stats.sort_stats("tottime")
    print("| function | calls of one reload | own ms of one reload |\n|---|---|---|")
    runs = len(range(4, 3 + 2 * RELOADS, 2))
    for key in stats.fcn_list[: given.lines]:
        _, calls, own, _, _ = stats.stats[key]
        print(f"| {_name(key)} | {calls / runs:.0f} | {own / runs * 1e3:.2f} |")


def _name(key: tuple[str, int, str]) -> str:
    file, line, name = key
    if file == "~":
        return f"`{name.strip('<>')}`"
    path = Path(file)
    home = path.relative_to(path.parents[1]) if len(path.parts) > 2 else path
    return f"`{home}:{line}` `{name}`"


if __name__ == "__main__":
    main()
