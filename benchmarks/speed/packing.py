"""Rows C6 and C7: layers whose weights are packed for the kernel, beside staging and packing alone.

The floor does what cannot be left out: every tensor is copied into its part of a buffer that is used
again and again, the kernel's own function packs the buffer, and what is not packed is copied to its
place. What it gives is compared with the fresh model too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.speed.bench import Bench
from benchmarks.speed.measure import Series
from benchmarks.speed.memory import facts
from benchmarks.speed.models import digest_of, linear_probe
from benchmarks.speed.table import Bound, Row, arm
from weightload.files import File

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


class Floor:
    """Staging and packing for one shape."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.model = bench.native.model
        self.packed: dict[str, Any] = {}
        self.plain: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.linear: dict[str, list[torch.Tensor]] = {}
        self.experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
        order = list(FUSED)
        for name, tensor in sorted(
            bench.source.tensors.items(),
            key=lambda one: order.index(part) if (part := one[0].split(".")[-2]) in order else -1,
        ):
            self._sort(name, tensor)
        self.moe = {layer: self._experts(layer, every) for layer, every in self.experts.items()}
        largest = [sum(part.numel() for part in parts) for parts in self.linear.values()]
        sizes = [one.numel() for both in self.moe.values() for one in both.values()]
        self.stage = torch.zeros(max([0, *largest, *sizes]), dtype=torch.bfloat16)

    def _sort(self, name: str, tensor: torch.Tensor) -> None:
        parts = name.split(".")
        if "experts" in parts:
            at = parts.index("experts")
            layer, number = ".".join(parts[: at + 1]), int(parts[at + 1])
            self.experts.setdefault(layer, {}).setdefault(number, {})[parts[at + 2]] = tensor
            return
        home = ".".join([*parts[:-2], FUSED.get(parts[-2], parts[-2])])
        module = self.model.get_submodule(home)
        if hasattr(module, "cpu_linear") and not self.bench.skip:
            self.linear.setdefault(home, []).append(tensor)
        else:
            self.plain.append((name, torch.zeros_like(tensor), tensor))

    def _experts(self, layer: str, every: dict[int, dict[str, torch.Tensor]]) -> Any:
        rows, columns = every[0]["gate_proj"].shape
        return {
            "w13_weight": torch.zeros(len(every), 2 * rows, columns, dtype=torch.bfloat16),
            "w2_weight": torch.zeros(len(every), columns, rows, dtype=torch.bfloat16),
        }

    def run(self, _: int) -> None:
        """Do it."""
        self._run(torch.Tensor.copy_)

    def run_from(self, file: File) -> None:
        """Do the same with a file that holds the tensors: each is read to where it is staged."""
        names = {id(tensor): name for name, tensor in self.bench.source.tensors.items()}
        handle = os.open(file.path, os.O_RDONLY)
        try:

            def read(target: torch.Tensor, tensor: torch.Tensor) -> None:
                header = file.headers[names[id(tensor)]]
                place = (ctypes.c_char * header.nbytes).from_address(target.data_ptr())
                if os.preadv(handle, [place], header.offset) != header.nbytes:
                    raise OSError(f"{file.path} is too short")

            self._run(read)
        finally:
            os.close(handle)

    def _run(self, put: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        for _, target, tensor in self.plain:
            put(target, tensor)
        for home, parts in self.linear.items():
            rows = sum(len(part) for part in parts)
            columns = parts[0].shape[1]
            stage = self.stage[: rows * columns].view(rows, columns)
            row = 0
            for part in parts:
                put(stage[row : row + len(part)], part)
                row += len(part)
            self.packed[home] = _packed(stage)
        for layer, every in self.experts.items():
            targets = self.moe[layer]
            half = every[0]["gate_proj"].shape[0]
            stage = self._staged(targets["w13_weight"])
            for number, one in every.items():
                put(stage[number, :half], one["gate_proj"])
                put(stage[number, half:], one["up_proj"])
            torch.ops._C.prepack_moe_weight(stage, targets["w13_weight"], "vec")
            stage = self._staged(targets["w2_weight"])
            for number, one in every.items():
                put(stage[number], one["down_proj"])
            torch.ops._C.prepack_moe_weight(stage, targets["w2_weight"], "vec")

    def _staged(self, target: torch.Tensor) -> torch.Tensor:
        return self.stage[: target.numel()].view(target.shape)

    def differs(self, wanted: dict[str, str]) -> str | None:
        """Say what the floor has packed otherwise than a fresh model has it."""
        for home, call in self.packed.items():
            given = linear_probe(self.model.get_submodule(home))
            if digest_of(call(given, None, None)) != wanted[f"{home}()"]:
                return home
        for layer, both in self.moe.items():
            for name, packed in both.items():
                found = [key for key in wanted if key.startswith(layer) and key.endswith(name)]
                if [digest_of(packed)] != [wanted[key] for key in found]:
                    return f"{layer}.{name}"
        return None


def _packed(weight: torch.Tensor) -> Any:
    """Pack one matrix as vLLM does, and return the call that multiplies with it."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer.cpu_linear


def beside_floor(bench: Bench, rounds: int | None = None) -> Series:
    """Run both reloads and the floor in turn."""
    bench.settle()
    floor = Floor(bench)
    arms = {**bench.whole(), "floor": floor.run}
    del arms["L1"], arms["L2"]

    def check(number: int, name: str) -> str | None:
        if name == "floor":
            return floor.differs(bench.wanted[bench.which(number)])
        return bench.check(number, name)

    return bench.compare(arms, rounds, check=check)


def c6(bench: Bench) -> Row:
    """Linear layers packed for oneDNN.

    In some rounds each arm gets new pages for the handles of its largest layers, in others none, a
    tenth of its time; so there are three times as many rounds as in other rows.
    """
    rounds = 3 * bench.rounds
    series = beside_floor(bench, rounds)
    row = _row(bench, series, "C6", "whole reload, linear layers packed")
    row.notes.append(f"{rounds} rounds")
    native, floor = series.ratio("ours", "native"), series.ratio("ours", "floor")
    pages = max(one.faults for one in series.arms["ours"]) * 4096 / bench.nbytes
    row.must = [Bound("of vLLM", native, 0.90)]
    row.goal = [
        Bound("of vLLM", native, 0.75),
        Bound("of the floor", floor, 1.08),
        Bound("new pages, of the bytes", pages, 0.01),
    ]
    return row


def c7(bench: Bench) -> Row:
    """Experts packed for the vector kernel, with the right answer."""
    series = beside_floor(bench)
    row = _row(bench, series, "C7", "whole reload, experts packed")
    native, floor = series.ratio("ours", "native"), series.ratio("ours", "floor")
    row.must = [Bound("of the floor", floor, 1.15)]
    row.goal = [Bound("of the floor", floor, 1.08), Bound("of vLLM", native, 0.75)]
    return row


def c3_experts(bench: Bench) -> Row:
    """Time per tensor beyond staging and packing, where experts are packed."""
    series = beside_floor(bench)
    row = _row(bench, series, "C3", "time per tensor beyond staging and packing")
    each = lambda one: (series.cpu(one) - series.cpu("floor")) / bench.count * 1e6  # noqa: E731
    ours, native = each("ours"), each("native")
    wrong = ", wrong result" if "native" in series.wrong else ""
    row.native, row.ours = f"{native:.0f} us{wrong}", f"{ours:.2f} us"
    row.limit = f"0 us (floor itself {series.cpu('floor') / bench.count * 1e6:.2f} us)"
    row.facts.update(ours_us=ours, native_us=native)
    row.must = [Bound("per tensor", ours, 10, "us")]
    row.goal = [Bound("per tensor", ours, 5, "us"), Bound("of vLLM", ours / native, 1 / 40)]
    return row


def _row(bench: Bench, series: Series, name: str, what: str) -> Row:
    return Row(
        name=f"{name} {bench.shape}",
        what=what,
        native=arm(series, "native"),
        limit=f"floor {arm(series, 'floor')}",
        ours=arm(series, "ours"),
        series=series,
        facts=facts(bench),
    )
