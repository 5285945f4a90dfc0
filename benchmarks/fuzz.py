"""Runs many random loads of random models, and says how many there were and what they covered.

An example is a model and up to five loads of it; after each load the model is compared with a fresh
one. What is drawn, and what must hold, is in ``tests/property``. Each process has a seed of its own.

    python benchmarks/fuzz.py --examples 20000 --jobs 2 --write benchmarks/results
"""

import argparse
import datetime
import os
import random
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from families import cpu_model, versions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "property"))

BATCH = 200
"""Examples that are drawn with one seed; a failure is found again with the seed of its batch."""


def run_batch(seed: int, examples: int, shrink: bool) -> tuple[Counter, str | None]:
    """Run some examples; return what they covered, and how one failed, if one did."""
    import torch
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st
    from random_models import run_example

    torch.set_num_threads(1)
    coverage: Counter = Counter()

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def every_example(data: st.DataObject) -> None:
        run_example(data.draw, coverage)

    try:
        every_example()
    except BaseException as error:
        return coverage, "".join(traceback.format_exception(error))
    return coverage, None


def run_part(seed: int, examples: int, shrink: bool) -> tuple[Counter, int]:
    """Run the examples of one process, batch after batch; return how many batches failed."""
    seeds, total = random.Random(seed), Counter()
    started, failed, left = time.monotonic(), 0, examples
    while left > 0:
        batch = seeds.randrange(2**32)
        coverage, failure = run_batch(batch, min(BATCH, left), shrink)
        total += coverage
        left -= min(BATCH, left) if failure else coverage["examples", "all"]
        done, seconds = total["examples", "all"], time.monotonic() - started
        print(f"seed {seed}: {done} examples, {seconds:.0f} s", file=sys.stderr, flush=True)
        if failure:
            failed += 1
            print(f"In the batch with seed {batch}:\n{failure}", flush=True)
    return total, failed


def table(coverage: Counter, prefix: str, head: str) -> list[str]:
    """Return the lines of a table: what there was, and how many loads ended how."""
    groups = {group for group, _ in coverage if group.startswith(prefix)}
    outcomes = sorted({outcome for group, outcome in coverage if group in groups})
    lines = [[head, *outcomes], ["---", *["---:"] * len(outcomes)]]
    for group in sorted(groups):
        counts = [coverage[group, outcome] for outcome in outcomes]
        lines.append([group.removeprefix(prefix), *(f"{count:,}" for count in counts)])
    return ["| " + " | ".join(line) + " |" for line in lines]


def counts(coverage: Counter, group: str) -> str:
    """Return how often each of a group was there, most often first."""
    found = Counter({name: number for (one, name), number in coverage.items() if one == group})
    return ", ".join(f"{name} {number:,}" for name, number in found.most_common())


def report(coverage: Counter, seconds: float, jobs: int, seed: int) -> str:
    """Return the results as a page."""
    loads = sum(number for (group, _), number in coverage.items() if group == "load")
    return "\n".join(
        [
            "# Random models under random loads",
            "",
            f"{datetime.date.today()}, {cpu_model()}, {os.cpu_count()} cores, {versions()}.",
            "",
            f"**{coverage['examples', 'all']:,} examples with {loads:,} loads in "
            f"{seconds / 60:.1f} minutes, without a violation**, in {jobs} processes; load average "
            f"{os.getloadavg()[0]:.1f}; seeds {seed} to {seed + jobs - 1}.",
            "",
            "An example is a random tree of layers and up to five random loads one after another,",
            "the last of them complete and right. After every load the model is, bit for bit, what a",
            "fresh load gives, or the load was refused for a reason that there was, and the model is",
            "what it was before, or poisoned and refuses to compute. Every tensor that a captured",
            "graph knows has its storage, none is on meta, no module has an owner or a guard that",
            "it should not have. The last load was never refused.",
            "",
            "Left out, because a fresh load is no better: in a first load, loaders that write to",
            "wrong places, hooks that give other shapes, hooks that fail where a weight is tied between",
            "layers, and hooks of layers with something in common in another order than the tree's; in",
            "models that collect before they write, loaders that write to wrong places; loaders that",
            "write by index to the rows of another name of the same tensor; tied names with two values.",
            "Some refusals are allowed and not demanded: of an optional tensor that comes after its",
            "layer was processed, of hooks that were asked for before everything had come, of parts",
            "that split what is processed together, of a tied name that the load before knew by the",
            "other one, and of names that stay away from a model that collects.",
            "",
            *table(coverage, "fault: ", "fault"),
            "",
            "A fault of a hook is without effect if fewer hooks run than were to run before it.",
            "",
            *table(coverage, "scope: ", "scope"),
            "",
            f"* Loads: {counts(coverage, 'load')}.",
            f"* Models: {counts(coverage, 'root')}.",
            f"* Models with a layer of the kind: {counts(coverage, 'kind')}.",
            f"* Calls of `load` with something in it: {counts(coverage, 'source')}.",
            f"* Commit: {counts(coverage, 'commit')}.",
            f"* Verification: {counts(coverage, 'verify')}.",
            "",
        ]
    )


def main() -> None:
    """Run the examples, print what they covered, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--no-shrink", action="store_true", help="show failures as they came")
    parser.add_argument("--write", type=Path, help="a folder for the results")
    options = parser.parse_args()
    jobs = max(options.jobs, 1)
    seeds = range(options.seed, options.seed + jobs)
    shares = [len(range(job, options.examples, jobs)) for job in range(jobs)]
    started = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(run_part, seeds, shares, [not options.no_shrink] * jobs))
    seconds = time.monotonic() - started
    coverage = sum((part for part, _ in parts), Counter())
    failed = sum(failed for _, failed in parts)
    if failed:
        raise SystemExit(f"{failed} batches of {BATCH} examples found a violation")
    page = report(coverage, seconds, jobs, options.seed)
    print(page)
    if options.write:
        (options.write / f"fuzz-{datetime.date.today()}.md").write_text(page)


if __name__ == "__main__":
    main()
