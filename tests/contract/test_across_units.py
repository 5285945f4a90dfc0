"""What one module's processing leaves behind may name a parameter that belongs to another."""

import pytest
import torch
from torch import nn

from weightload import (
    Framework,
    ModuleRegistry,
    ModuleRule,
    ProcessingError,
    Role,
    WeightLoadSession,
)
from weightload.storage import Fingerprint
from weightload.testing.layers import WIDTH, parameter


class Kernel:
    """Reads a parameter of the block around the attention layer that it belongs to."""

    def __init__(self, sinks):
        self.sinks = sinks

    def process_weights_after_loading(self):
        """Prepare what the layer needs; the parameter stays what it is."""
        self.total = self.sinks.detach().sum()


class Attention(nn.Module):
    """Has no parameter of its own, and a hook."""

    def __init__(self, sinks):
        super().__init__()
        self.kernel = Kernel(sinks)

    def process_weights_after_loading(self):
        self.kernel.process_weights_after_loading()

    def forward(self, x):
        return torch.tanh(x) * self.kernel.total + self.kernel.sinks


class Block(nn.Module):
    """Owns the parameter."""

    def __init__(self):
        super().__init__()
        self.sinks = parameter(WIDTH)
        self.attention = Attention(self.sinks)

    def forward(self, x):
        return self.attention(x)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def framework():
    registry = ModuleRegistry(
        fallback=ModuleRule(role=Role.PLAIN, reason="nothing else here has a hook")
    )
    rule = ModuleRule(
        role=Role.ATTENTION,
        process=lambda module: module.process_weights_after_loading(),
        reason="it reads a parameter of the block",
    )
    registry.register(Attention, rule)
    return Framework(registry)


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"blocks.{i}.sinks": torch.randn(WIDTH, generator=generator) for i in range(2)}


def loaded(seed):
    model = Blocks()
    with WeightLoadSession(model, framework=framework()) as session:
        session.load(state(seed))
    return model


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("order", [list, reversed])
def test_a_borrowed_parameter_is_read_before_its_staging_ends(commit, order):
    """The block is committed before the layer inside it, which has still to copy from it."""
    x = torch.linspace(-1.0, 1.0, WIDTH)
    model = loaded(1)
    before = Fingerprint.of(model.blocks[0].sinks)
    for seed in (2, 3, 1):
        with WeightLoadSession(model, commit=commit) as session:
            session.load(list(order(list(state(seed).items()))))
        assert torch.equal(model(x), loaded(seed)(x))
        assert model.blocks[0].attention.kernel.sinks is model.blocks[0].sinks
        assert before.difference(model.blocks[0].sinks) is None


class Hidden:
    """Holds a parameter, and nothing says that it does."""

    def __init__(self, sinks):
        self.sinks = sinks


class Blind(nn.Module):
    """Its hook reads a parameter through an object that nobody tracks."""

    def __init__(self):
        super().__init__()
        self.sinks = parameter(WIDTH)
        self.hidden = Hidden(self.sinks)

    def process_weights_after_loading(self):
        self.total = self.hidden.sinks.detach().sum()

    def forward(self, x):
        return x * self.total + self.sinks


def blind(seed, *, strategies=()):
    registry = ModuleRegistry(strategies=strategies)
    rule = ModuleRule(
        role=Role.QUANT, process=lambda module: module.process_weights_after_loading()
    )
    registry.register(Blind, rule)
    model = Blind()
    with WeightLoadSession(model, framework=Framework(registry)) as session:
        session.load({"sinks": torch.full((WIDTH,), float(seed))})
    return model


def test_a_hook_that_would_read_old_weights_is_refused():
    """Nothing live has been written when it is found out, and the tensor is named."""
    x = torch.linspace(-1.0, 1.0, WIDTH)
    model = blind(1)
    with (
        pytest.raises(ProcessingError, match="'sinks' was reached") as caught,
        WeightLoadSession(model, commit="atomic") as session,
    ):
        session.load({"sinks": torch.full((WIDTH,), 2.0)})
    assert caught.value.model_intact
    assert torch.equal(model(x), blind(1)(x))
    with WeightLoadSession(model, commit="stream") as session:
        session.load({"sinks": torch.full((WIDTH,), 2.0)})
    assert torch.equal(model(x), blind(2)(x))


def test_a_hook_whose_helper_is_named_reads_the_new_weights():
    """What the message advises helps."""
    x = torch.linspace(-1.0, 1.0, WIDTH)
    model = blind(1, strategies=("hidden",))
    with WeightLoadSession(model, commit="atomic") as session:
        session.load({"sinks": torch.full((WIDTH,), 2.0)})
    assert torch.equal(model(x), blind(2)(x))
