"""Row S1: half a million expert tensors, of which this rank owns a 64th.

A toy of plain torch with the loader that such models have: each name is taken apart, a map of experts
says whether this rank owns it, and what it owns is copied into its part of a stacked parameter.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

from benchmarks.speed.bench import Options
from benchmarks.speed.measure import Series, WrongResult, taken
from benchmarks.speed.table import Bound, Row, arm, seconds
from weightload.session import WeightLoadSession

LAYERS, EXPERTS, RANKS = 65, 2560, 64
SIZE = 16
PARTS = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}
MOST_SECONDS = 10


class Experts(nn.Module):
    """The stacked experts of one layer that one rank owns."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(count, 2 * SIZE, SIZE), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(count, SIZE, SIZE), requires_grad=False)


class Model(nn.Module):
    """All layers, as the last rank has them."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        owned = experts // RANKS
        self.layers = nn.ModuleList(Experts(owned) for _ in range(layers))
        self.first = experts - owned

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load what this rank owns."""
        loaded = set()
        for name, tensor in weights:
            _, layer, _, expert, part, _ = name.split(".")
            local = int(expert) - self.first
            if local < 0:
                continue
            stacked, half = PARTS[part]
            parameter = getattr(self.layers[int(layer)], stacked)
            parameter[local].narrow(0, half * SIZE, SIZE).copy_(tensor)
            loaded.add(name)
        return loaded


def s1(options: Options) -> Row:
    """Load all of them."""
    experts = 256 if options.smoke else EXPERTS
    plain, ours = Model(LAYERS, experts), Model(LAYERS, experts)
    names = [
        f"layers.{layer}.experts.{expert}.{part}.weight"
        for layer in range(LAYERS)
        for expert in range(experts)
        for part in PARTS
    ]
    values = torch.randn(len(names), SIZE, SIZE)
    tensors = dict(zip(names, values.unbind(0), strict=True))
    series = Series()
    receipts = []
    gc.collect()
    gc.freeze()  # half a million tensors of the source are not searched for cycles again and again
    for number in range(2 + min(options.rounds, 2)):
        values.add_(1.0)
        with torch.no_grad():
            series.add("native", taken(lambda: plain.load_weights(iter(tensors.items()))))

        def load(number: int = number) -> None:
            with WeightLoadSession(ours, version=number) as session:
                session.load(tensors)
            receipts.append(session.receipt)

        series.add("ours", taken(load))
        for (name, one), (_, other) in zip(
            plain.named_parameters(), ours.named_parameters(), strict=True
        ):
            if not torch.equal(one, other):
                raise WrongResult(f"S1, load {number}: {name}")
    gc.unfreeze()
    first = series.arms["ours"][:2]
    series.arms = {who: taken[2:] for who, taken in series.arms.items()}
    spent = {step: value for step, value in receipts[-1].seconds.items() if value > 1e-3}
    where = ", ".join(f"{step} {seconds(value)}" for step, value in spent.items())
    row = Row(
        name="S1 experts",
        what=f"{len(names)} expert tensors of which the rank owns one of {RANKS}",
        native=f"{arm(series, 'native')} (plain loader)",
        ours=arm(series, "ours"),
        series=series,
        facts={
            "tensors": len(names),
            "bytes": values.nbytes,
            "owned": receipts[-1].consumed.count,
            "us per tensor": series.cpu("ours") / len(names) * 1e6,
        },
    )
    row.goal = [Bound("a reload", series.cpu("ours"), MOST_SECONDS, "s")]
    row.notes = [
        f"first load {seconds(first[0].cpu)}, first reload {seconds(first[1].cpu)}; "
        f"{row.facts['us per tensor']:.2f} us per tensor of the last; where the time goes: {where}",
        "the loader of the toy does less for each tensor than vLLM's, which looks names up in a list",
    ]
    return row
