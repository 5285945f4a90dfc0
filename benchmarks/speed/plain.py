"""Row C15: a model of plain torch, without any framework."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.speed.bench import Options
from benchmarks.speed.measure import in_turn
from benchmarks.speed.table import Bound, Row, arm
from weightload.session import WeightLoadSession

BLOCKS, WIDTH = 1000, 32


class Block(nn.Module):
    """Four parameters in four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.after = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.down(self.up(self.before(x)).relu()))


def c15(options: Options) -> Row:
    """Against ``load_state_dict``."""
    blocks = BLOCKS // 10 if options.smoke else BLOCKS

    def make() -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(blocks))).requires_grad_(False)

    native, ours, fresh = make(), make(), make()
    generator = torch.Generator().manual_seed(5)
    states = []
    for _ in range(3):
        values = {
            name: torch.randn(tensor.shape, generator=generator)
            for name, tensor in fresh.state_dict().items()
        }
        fresh.load_state_dict(values)
        states.append((values, fresh(torch.ones(2, WIDTH))))
    with WeightLoadSession(ours, version="first") as session:
        session.load(states[0][0])
    targets = {name: torch.zeros_like(tensor) for name, tensor in states[0][0].items()}
    places = {
        name: {key: tensor.data_ptr() for key, tensor in model.named_parameters()}
        for name, model in (("native", native), ("ours", ours))
    }

    def by_session(number: int) -> None:
        with WeightLoadSession(ours, version=number) as session:
            session.load(states[number % 3][0])

    def by_loop(number: int) -> None:
        for name, tensor in states[number % 3][0].items():
            targets[name].copy_(tensor)

    def check(number: int, arm: str) -> str | None:
        if arm == "L2":
            return None
        model = native if arm == "native" else ours
        wanted, output = states[number % 3]
        for name, tensor in model.named_parameters():
            if not torch.equal(tensor, wanted[name]) or tensor.data_ptr() != places[arm][name]:
                return name
        return None if torch.equal(model(torch.ones(2, WIDTH)), output) else "its output"

    for number in range(1, 3):
        by_session(number)
    series = in_turn(
        {
            "native": lambda number: native.load_state_dict(states[number % 3][0]),
            "ours": by_session,
            "L2": by_loop,
        },
        options.rounds,
        check=check,
        may_be_wrong=(),
    )
    count = len(targets)
    each = (series.cpu("ours") - series.cpu("L2")) / count * 1e6
    ratio = series.ratio("ours", "native")
    row = Row(
        name="C15 plain torch",
        what=f"{blocks} blocks of plain torch, vLLM's column is load_state_dict",
        native=arm(series, "native"),
        limit=f"L2 {arm(series, 'L2')}",
        ours=arm(series, "ours"),
        series=series,
        facts={"tensors": count, "bytes": sum(t.nbytes for t in targets.values())},
    )
    row.must = [Bound("of load_state_dict", ratio, 1 / 10)]
    row.goal = [
        Bound("of load_state_dict", ratio, 1 / 30),
        Bound("per tensor beyond L2", each, 5, "us"),
    ]
    return row
