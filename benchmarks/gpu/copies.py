"""Rows G1 to G4 and G6: how long a reload takes, by where the weights come from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.gpu.case import Case, Figures
from benchmarks.gpu.layers import METHODS, Linear
from benchmarks.gpu.model import State
from benchmarks.gpu.row import NO_DEVICE, Row, Run

try:
    from weightload.reading import Checkpoint
except ImportError:  # a weightload that does not read files itself
    Checkpoint = None


def noted(row: Row, run: Run, case: Case, figures: Figures, floor: float) -> float:
    """Write figures down and return how many times the floor weightload takes.

    Args:
        row: where.
        run: the run.
        case: what was loaded.
        figures: of both arms.
        floor: seconds that the bytes alone take.
    """
    row.figures |= {
        "tensors": case.shape.tensors,
        "bytes": case.nbytes,
        "floor_s": floor,
        **figures.as_dict(),
    }
    row.figures["times_floor"] = row.figures["weightload_s"] / floor
    if case.receipt is not None:
        row.figures["bytes_written"] = case.receipt.bytes_written
        row.figures["bytes_copied"] = case.receipt.bytes_copied
    return row.figures["times_floor"]


def g1(run: Run) -> Row:
    """Dense, from device to device, in place."""
    row = Row.made(run, "G1", "dense, device to device, in place")
    case = Case(run.dense(), run.clock)
    floor = case.nbytes / run.ceilings["d2d"]
    noted(row, run, case, figures := case.compare(run.rounds), floor)
    took = row.figures["weightload_s"]
    row.figures["launches"] = run.clock.launches(lambda: case.ours(case.states[0]))
    row.judge(run, "must", "<= 2.0 floor + 5 ms", lambda: took <= 2.0 * floor + 5e-3)
    row.judge(run, "goal", "<= 1.25 floor + 2 ms", lambda: took <= 1.25 * floor + 2e-3)
    row.judge(run, "goal", "<= 0.25 emulation", lambda: figures.ratio <= 0.25)
    return row


def g2(run: Run) -> Row:
    """Many experts, from device to device."""
    row = Row.made(run, "G2", "experts, device to device")
    case = Case(run.experts(), run.clock)
    floor = case.nbytes / run.ceilings["d2d"]
    # The emulation takes seconds here, and its time varies little.
    noted(row, run, case, figures := case.compare(min(run.rounds, 3)), floor)
    count = case.shape.tensors
    each = (row.figures["weightload_s"] - floor) / count
    launches = run.clock.launches(lambda: case.ours(case.states[0]))
    row.figures |= {"s_per_tensor": each, "launches": launches}
    total = launches.get("kernels", 0) + launches.get("memory copies", 0)
    row.judge(run, "must", "<= 10 us a tensor", lambda: each <= 10e-6)
    row.judge(run, "goal", "<= 3 us a tensor", lambda: each <= 3e-6)
    row.judge(run, "goal", "launches <= tensors / 32", lambda: total <= count / 32)
    row.judge(run, "goal", "<= 0.05 emulation", lambda: figures.ratio <= 0.05)
    return row


def on_host(state: State, *, pinned: bool) -> State:
    """Return the same tensors in one run of the host's memory."""
    flat = torch.empty(
        sum(-(-tensor.numel() // 64) * 64 for tensor in state.values()),
        dtype=next(iter(state.values())).dtype,
        pin_memory=pinned,
    )
    found, place = {}, 0
    for name, tensor in state.items():
        found[name] = flat[place : place + tensor.numel()].view(tensor.shape)
        found[name].copy_(tensor)
        place += -(-tensor.numel() // 64) * 64
    return found


def g3(run: Run) -> list[Row]:
    """From pinned, and from other memory of the host, to live parameters."""
    case = Case(run.dense(0.5), run.clock)
    rows = []
    for pinned, what in ((True, "pinned"), (False, "pageable")):
        row = Row.made(run, f"G3 {what}", f"dense, {what} memory of the host to the device")
        states = [on_host(state, pinned=pinned and run.clock.on_device) for state in case.states]
        floor = case.nbytes / run.ceilings.get("h2d", run.ceilings["d2d"])
        factor = noted(row, run, case, case.compare(run.rounds, states.__getitem__), floor)
        if pinned:
            row.judge(run, "must", "<= 1.3 floor", lambda f=factor: f <= 1.3)
            row.judge(run, "goal", "<= 1.10 floor", lambda f=factor: f <= 1.1)
        else:
            row.judge(run, "goal", "<= 1.6 floor of pinned", lambda f=factor: f <= 1.6)
        if not run.clock.on_device:
            row.status, row.figures = NO_DEVICE, {}
            row.note = "loads ran on the CPU, from its own memory, and were right"
        rows.append(row)
    return rows


def mapped(file: Path) -> Any:
    """Yield the tensors of a file as vLLM's own reader does."""
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            yield name, opened.get_tensor(name)


def g4(run: Run) -> Row:
    """From files in the page cache to live parameters."""
    row = Row.made(run, "G4", "dense, files in the page cache to the device")
    case = Case(run.dense(0.5), run.clock)
    with tempfile.TemporaryDirectory(prefix="weightload-gpu-") as folder:
        files = [Path(folder) / f"{which}" / "model.safetensors" for which in (0, 1)]
        for file, state in zip(files, case.states, strict=True):
            file.parent.mkdir()
            save_file({name: tensor.cpu() for name, tensor in state.items()}, file)

        def ours(file: Path) -> None:
            if Checkpoint is not None:
                case.ours(Checkpoint(file.parent))
            else:
                case.ours(mapped(file), transport=[])

        read = case.nbytes / run.ceilings["read"]
        floor = max(read, case.nbytes / run.ceilings.get("h2d", run.ceilings["d2d"]))
        figures = case.compare(
            run.rounds,
            files.__getitem__,
            native_source=lambda which: mapped(files[which]),
            ours=ours,
        )
    factor = noted(row, run, case, figures, floor)
    row.note = "weightload's own reader" if Checkpoint is not None else "safe_open for both arms"
    row.judge(run, "must", "<= 1.6 floor", lambda: factor <= 1.6)
    row.judge(run, "goal", "<= 1.25 floor", lambda: factor <= 1.25)
    row.judge(run, "goal", "<= 0.35 emulation", lambda: figures.ratio <= 0.35)
    return row


def g6(run: Run) -> list[Row]:
    """Quantised to FP8 when it is loaded, from device to device."""
    return [
        _g6(run, "fp8-tensor", "one scale a tensor"),
        _g6(run, "fp8-block", "one scale a block of 128"),
    ]


def _g6(run: Run, method: str, what: str) -> Row:
    row = Row.made(run, f"G6 {method}", f"dense, quantised to FP8 at load, {what}")
    case = Case(run.dense(0.5, method), run.clock)
    written = sum(one.nbytes for one in case.model.parameters())
    # A copy reads and writes, so that the device moves twice what the ceiling says.
    floor = (case.nbytes + written) / (2 * run.ceilings["d2d"])
    hooks = run.clock.wall(lambda: quantise_all(case))
    figures = case.compare(run.rounds)
    factor = noted(row, run, case, figures, floor)
    row.figures["hooks_alone_s"] = hooks
    row.judge(run, "must", "<= 3 floor", lambda: factor <= 3)
    row.judge(run, "goal", "<= 1.5 floor", lambda: factor <= 1.5)
    row.judge(run, "goal", "<= 0.5 emulation", lambda: figures.ratio <= 0.5)
    if run.clock.on_device:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.ours(case.states[0])
        peak = torch.cuda.max_memory_allocated() - before
        unit = largest_unit(case)
        row.figures |= {"peak_bytes": peak, "largest_unit_bytes": unit}
        row.goal["peak <= largest unit + 64 MiB"] = peak <= unit + (64 << 20)
    return row


def quantise_all(case: Case) -> None:
    """Run every quantisation on tensors of its size, and drop the result: the hooks' own time."""
    method = METHODS[case.shape.method]()
    with torch.no_grad():
        for module in case.model.modules():
            if isinstance(module, Linear) and module.weight.dtype != torch.bfloat16:
                twin = Linear.__new__(Linear)
                torch.nn.Module.__init__(twin)
                data = torch.empty_like(module.weight, dtype=torch.bfloat16).fill_(1)
                twin.weight = torch.nn.Parameter(data, requires_grad=False)
                method.process_weights_after_loading(twin)


def largest_unit(case: Case) -> int:
    """Return the bytes of the largest layer in the checkpoint's format."""
    sizes = [
        sum(2 * param.numel() for param in module.parameters(recurse=False))
        for module in case.model.modules()
    ]
    return max(sizes)
