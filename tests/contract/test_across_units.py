"""What one module's processing leaves behind may name a parameter that belongs to another."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from weightload import (
    Framework,
    IncompleteLoadError,
    ModuleRegistry,
    ModuleRule,
    ProcessingError,
    Role,
    Scope,
    SessionState,
    WeightLoadSession,
)
from weightload.storage import Fingerprint
from weightload.testing import (
    TOYS,
    Bench,
    ToyModel,
    expected,
    identical,
    outputs,
    toy_framework,
)
from weightload.testing.kernels import Processed, ProcessedState
from weightload.testing.layers import WIDTH, InPlaceLinear, Linear, parameter


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


class Extra(nn.Module):
    """Has a parameter that no checkpoint brings."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(WIDTH)
        self.extra = parameter(WIDTH, fill=3.0)

    def forward(self, x):
        return torch.tanh(x * self.weight) + self.extra


class Sum(nn.Module):
    """Its hook reads what another module holds, and writes to it; neither contains the other."""

    def __init__(self, other, *, writes):
        super().__init__()
        self.others, self.writes = (other,), writes

    def process_weights_after_loading(self):
        [other] = self.others
        self.total = other.weight.detach() + other.extra.detach()
        if self.writes:
            other.extra.data.add_(other.weight.detach())

    def forward(self, x):
        return x + self.total


class Sums(nn.Module):
    """A hook of the model as a whole lets the sum be made."""

    def __init__(self, *, writes):
        super().__init__()
        self.extra = Extra()
        self.sum = Sum(self.extra, writes=writes)

    def process_weights_after_loading(self):
        self.sum.process_weights_after_loading()

    def forward(self, x):
        return self.sum(self.extra(x))


class Whole(Framework):
    def model_rule(self, model):
        process = lambda module: module.process_weights_after_loading()  # noqa: E731
        return ModuleRule(role=Role.DERIVED, process=process)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("writes", [False, True])
def test_a_hook_of_the_whole_model_finds_data_in_every_tensor(commit, writes):
    """Also in one that nothing was loaded into, and that is staged on its own."""
    plain = ModuleRegistry(fallback=ModuleRule(role=Role.PLAIN, reason="the model does it all"))
    model = Sums(writes=writes)
    allowed = Scope.full(allow_missing=("*.extra",))
    with WeightLoadSession(model, framework=Whole(plain), scope=allowed) as session:
        session.load({"extra.weight": torch.full((WIDTH,), 1.0)})
    marks = {name: Fingerprint.of(tensor) for name, tensor in model.named_parameters()}
    total = model.sum.total
    for number in (2.0, 5.0, 1.0):
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load({"extra.weight": torch.full((WIDTH,), number)})
        assert model.sum.total is total
        assert total.tolist() == [number + 3] * WIDTH
        assert model.extra.extra.tolist() == [3 + number * writes] * WIDTH
        assert all(marks[n].difference(t) is None for n, t in model.named_parameters())


class Sibling(Processed):
    """Its hook reads a layer that is beside it, and packs its own weight."""

    def __init__(self, other):
        super().__init__()
        self.others = (other,)

    def process_weights_after_loading(self):
        self.total = torch.as_tensor(self.others[0].weight).detach().sum()
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x @ self.weight) + self.total


class Around(Sibling):
    """The same, and the layer is inside it."""

    def __init__(self, other):
        super().__init__(other)
        self.inner = other

    def forward(self, x):
        return self.inner(super().forward(x))


def beside(layer, *, first):
    def make():
        other = layer()
        sibling = Sibling(other)
        return ToyModel(*((sibling, other) if first else (other, sibling)))

    return make


READERS = {
    "plain, after": beside(Linear, first=True),
    "plain, before": beside(Linear, first=False),
    "packed, after": beside(InPlaceLinear, first=True),
    "packed, before": beside(InPlaceLinear, first=False),
    "plain, inside": lambda: ToyModel(Around(Linear())),
    "packed, inside": lambda: ToyModel(Around(InPlaceLinear())),
}


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("order", [list, reversed])
@pytest.mark.parametrize("reader", READERS)
def test_a_hook_waits_for_what_it_reads_in_other_layers(reader, order, commit):
    """And finds it as it was at the first load: processed already, or not yet."""
    bench = Bench(READERS[reader])
    for number in (2, 3, 1):
        state = bench.state(number)
        with bench.session(commit=commit) as session:
            for name in order(list(state)):
                session.load({name: state[name]})
        bench.serves = state
        bench.check_finished(session)


class Table(Processed):
    """Its hook makes a table, as a plain attribute."""

    def process_weights_after_loading(self):
        self.table = self.weight.detach().sum(0)

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) * self.table


class TableReader(ProcessedState):
    """Its hook reads what the hook of another layer made, and none of its weights."""

    def __init__(self, other):
        super().__init__()
        self.others = (other,)

    def process_weights_after_loading(self):
        self.total = self.others[0].table.sum()

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) + self.total


def with_table():
    table = Table()
    return ToyModel(TableReader(table), table)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("toy", [TOYS["derived"], with_table, *READERS.values()])
def test_a_load_of_some_names_runs_the_hooks_that_read_them(toy, commit):
    """Also those of layers that nothing was brought for; or it says what has to come as well."""
    bench = Bench(toy)
    for number, part in itertools.product((2, 3), bench.state(1)):
        new = bench.state(number)[part]
        session = bench.session(commit=commit, scope=Scope.only([part]))
        try:
            with session:
                session.load({part: new})
        except IncompleteLoadError as error:
            bench.check_ended(session, error)
        else:
            bench.serves = {**bench.serves, part: new}
            bench.check_finished(session)
        assert session.state is not SessionState.POISONED


class Moody(Sibling):
    """Its hook reads the other layer for some values of its own weight only."""

    def process_weights_after_loading(self):
        self.total = torch.zeros(())
        if self.weight.detach().sum() > 0:
            self.total = torch.as_tensor(self.others[0].weight).detach().sum()
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)


def test_a_hook_that_reads_what_has_not_arrived_is_refused():
    """Nothing could be known of it at the first load; the old value would be silently wrong."""

    def make():
        other = Linear()
        return ToyModel(Moody(other), other)

    weight = torch.eye(WIDTH) * 0.1
    states = [
        {"layers.0.weight": weight * sign, "layers.1.weight": weight * number}
        for number, sign in ((1, -1), (2, +1), (3, +1))
    ]
    model = make()
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load(states[0])
    with (
        pytest.raises(ProcessingError, match=r"reads 'layers\.1\.weight', which has not arrived"),
        WeightLoadSession(model) as session,
    ):
        session.load(states[1])
    with WeightLoadSession(model, commit="atomic") as session:
        session.load(states[1])
    assert identical(outputs(model), expected(make, states[1]))
