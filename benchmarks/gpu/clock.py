"""Times, ceilings and launches of one device."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch


@attrs.frozen
class Time:
    """What one call took, in seconds.

    Attributes:
        wall: until the device was done.
        cpu: of this thread.
        device: between events on the current stream; ``None`` on the host.
    """

    wall: float
    cpu: float
    device: float | None = None


@attrs.frozen
class Clock:
    """Measures calls on one device, which is idle before and after each.

    Attributes:
        device: "cuda" or "cpu".
    """

    device: str

    @property
    def on_device(self) -> bool:
        """Whether there is a device apart from the host."""
        return self.device == "cuda"

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.on_device:
            torch.cuda.synchronize()

    def time(self, call: Callable[[], Any]) -> Time:
        """Return what a call takes."""
        with undisturbed():
            self.settle()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self.on_device)]
            wall, cpu = time.perf_counter(), time.thread_time()
            if events:
                events[0].record()
            call()
            if events:
                events[1].record()
            self.settle()
            took = time.perf_counter() - wall, time.thread_time() - cpu
            return Time(*took, events[0].elapsed_time(events[1]) / 1e3 if events else None)

    def wall(self, call: Callable[[], Any], rounds: int = 5) -> float:
        """Return the median wall time of a call after one that warms up."""
        call()
        return statistics.median(self.time(call).wall for _ in range(rounds))

    def launches(self, call: Callable[[], Any]) -> dict[str, int]:
        """Return how many kernels and memory copies a call puts on the device, and calls of torch."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.on_device:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.settle()
        found = {"kernels": 0, "memory copies": 0, "copy_": 0, "_foreach_copy_": 0}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                copies = event.name.startswith(("Memcpy", "Memset"))
                found["memory copies" if copies else "kernels"] += 1
            elif event.name in ("aten::copy_", "aten::_foreach_copy_"):
                found[event.name.removeprefix("aten::")] += 1
        if not self.on_device:
            del found["kernels"], found["memory copies"]
        return found


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Collect garbage before, and not meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def ceilings(clock: Clock, nbytes: int) -> dict[str, float]:
    """Return in bytes per second what the machine can do at best, by the name of the way.

    ``d2d`` is one large copy on the device (on the host, if there is no device), ``d2d foreach`` the
    same bytes in 64 parts by one call, ``h2d`` one copy from pinned memory, ``h2d pageable`` from
    other memory, ``read`` a read of a file from the page cache.
    """
    count = max(nbytes // 64, 1) * 64
    found = _on_device(clock, count)
    host = torch.zeros(count, dtype=torch.uint8, pin_memory=clock.on_device)
    if clock.on_device:
        target = torch.zeros(count, dtype=torch.uint8, device=clock.device)
        pageable = torch.zeros(count, dtype=torch.uint8)
        found["h2d"] = count / clock.wall(lambda: target.copy_(host, non_blocking=True))
        found["h2d pageable"] = count / clock.wall(lambda: target.copy_(pageable))
    with tempfile.TemporaryDirectory(prefix="weightload-gpu-") as folder:
        file = Path(folder) / "bytes"
        file.write_bytes(memoryview(host.numpy()))
        found["read"] = count / clock.wall(lambda: read_into(file, host))
    return found


def _on_device(clock: Clock, count: int) -> dict[str, float]:
    """Return how fast bytes move inside the device."""
    source = torch.zeros(count, dtype=torch.uint8, device=clock.device)
    target = torch.zeros_like(source)
    many = list(target.chunk(64)), list(source.chunk(64))
    return {
        "d2d": count / clock.wall(lambda: target.copy_(source)),
        "d2d foreach": count / clock.wall(lambda: torch._foreach_copy_(*many)),
    }


def read_into(file: Path, buffer: torch.Tensor) -> None:
    """Read a file of a buffer's size into it.

    Args:
        file: it.
        buffer: uint8, one dimension, on the host.
    """
    view = memoryview(buffer.numpy())
    handle = os.open(file, os.O_RDONLY)
    try:
        place = 0
        while place < len(view):
            place += os.preadv(handle, [view[place:]], place)
    finally:
        os.close(handle)
