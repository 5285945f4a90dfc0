"""What bad input does to a live engine, by vLLM itself and through weightload, as a table.

An engine serves checkpoint A and is given checkpoint B with one fault, in a process of its own for
every fault and every way. What it serves then is held against new engines on A and on B, bit for
bit; after that it is given all of B, by the same means.

    python benchmarks/faults.py --write benchmarks/results
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from families import CASES, cpu_model, versions

FAMILIES = ("llama", "mixtral", "w4a16")
WAYS = {"native": "vLLM", "stream": "weightload, stream", "atomic": "weightload, atomic"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
}
INTRODUCTION = """\
An engine that serves A is given B with one fault, in a process of its own. *raised* is what the
caller gets. *serves* is what the engine computes then: **A** or **B** if tokens and
log-probabilities are, bit for bit, those of a new engine on A or on B; *neither* if they are finite
and those of neither; *NaN*; or what a request raises. *then* is what the engine computes after one
faultless reload of B by the same means, or what that reload raises; where a request had raised
before, that is another engine, in which nothing was asked in between. vLLM's own reload is
`reload_weights` with an iterator. The engines of weightload have
`worker_cls="weightload.vllm.GuardedWorker"`."""


def run_family(family: str, faults: list[str], timeout: float) -> list[list[str]]:
    """Return a row for every fault: its name, and three cells for each way."""
    trials = [(way, fault) for fault in faults for way in WAYS]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        arguments = {"family": family, "folder": folder, "trials": trials, "timeout": timeout}
        with tempfile.TemporaryFile("w+") as log:
            subprocess.run(
                [sys.executable, str(CASES / "each_fault.py"), json.dumps(arguments), str(out)],
                env={**ENVIRONMENT, **os.environ},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
            log.seek(0)
            said = log.read()
        if not out.exists():
            raise SystemExit(f"{family} could not be measured:\n{said[-4000:]}")
        found = json.loads(out.read_text())
    cells = [cell for one in found for cell in cells_of(one)]
    width = 3 * len(WAYS)
    return [
        [fault, *cells[width * index : width * (index + 1)]] for index, fault in enumerate(faults)
    ]


def cells_of(found: dict) -> list[str]:
    """Return what was raised, what is served, and what a reload after that gives."""
    after = found.get("reload") or found.get("then") or "-"
    return [found.get("raised") or "nothing", found.get("serves", "-"), after]


def summary(rows: list[list[str]]) -> list[list[str]]:
    """Count what comes of the faults; the row without a fault is none."""
    faulty = [row[1:] for row in rows if row[0] != "none"]
    head = ["with a fault", "faults", "serves A or B", "a request raises"]
    lines = [[*head, "serves other numbers", "right after a reload of B"]]
    for index, name in enumerate(WAYS.values()):
        served = [row[3 * index + 1] for row in faulty]
        whole = sum(one in ("A", "B") for one in served)
        other = sum(one in ("neither", "NaN") for one in served)
        again = sum(row[3 * index + 2] == "B" for row in faulty)
        counts = (len(faulty), whole, len(served) - whole - other, other, again)
        lines.append([name, *map(str, counts)])
    return lines


def drawn(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table whose first row is its head."""
    head, *others = rows
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *others)]


def main() -> None:
    """Run every family and print the tables, or write them."""
    sys.path.insert(0, str(CASES))
    from each_fault import FAULTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one engine")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    today = datetime.date.today()
    what = ("raised", "serves", "then")
    head = ["given B, but", *(f"{name}: {column}" for name in WAYS.values() for column in what)]
    lines = [f"# Faults\n\n{today}, {cpu_model()}, {versions()}.\n\n{INTRODUCTION}"]
    for family in options.families:
        rows = run_family(family, options.faults, options.timeout)
        lines += [f"\n## {family}\n", *drawn(summary(rows)), "", *drawn([head, *rows])]
    text = "\n".join([*lines, ""])
    if options.write:
        (options.write / f"faults-{today}.md").write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
