"""Sleeping engines, the memory that a load needs, and what a transport may do.

Memory is that of staging, as the receipt has it: three layers of three shards are 12 bytes each.
"""

import threading

import pytest
import torch
from small import COMMITS, Fused, Live, Negated, Net, framework_for, number, parameter
from torch import nn

from weightload import (
    IncompleteLoadError,
    Role,
    Scope,
    SessionState,
    UnsupportedError,
    WeightLoadSession,
    WeightMismatchError,
    weights_version,
)
from weightload.ownership import owner_of


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


def shards(first, layers=1):
    return {
        f"layers.{layer}.weight/{shard}": number(first + 10 * layer + shard)
        for layer in range(layers)
        for shard in range(3)
    }


# ------------------------------------------------------------------------------ sleep


class Engine:
    """Takes the memory of its weights away when it sleeps; to write to them then is a crash."""

    def __init__(self, live):
        self.live = live
        self.sizes = None

    def sleep(self):
        self.sizes = [t.untyped_storage().nbytes() for t in self.live.model.parameters()]
        for tensor in self.live.model.parameters():
            tensor.untyped_storage().resize_(0)

    def wake(self):
        for tensor, size in zip(self.live.model.parameters(), self.sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        self.sizes = None
        self.live.look()

    def veto(self, model):
        return None if self.sizes is None else "the engine is asleep; wake its weights first"


@pytest.mark.holds("I01")
def test_a_load_into_a_sleeping_engine_is_refused_before_anything_is_touched(commit):
    """Whoever knows that the weights are not there says so; awake, they are loaded."""
    live = Live(lambda: Net(Fused()), shards(1.0), version="A")
    engine = Engine(live)
    engine.sleep()
    session = WeightLoadSession(live.model, commit=commit, veto=[engine.veto])
    with pytest.raises(UnsupportedError, match="asleep; wake its weights first") as caught:
        session.prepare()
    assert caught.value.model_intact
    assert session.state is SessionState.NEW
    assert owner_of(live.model) is None
    assert weights_version(live.model) == "A"
    engine.wake()
    live.reload(shards(20.0), commit=commit, veto=[engine.veto])
    live.equals(shards(20.0))


class WithPlainTensors(nn.Module):
    """Its hook makes one plain tensor and fills another, which was there before, in place."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.table = None
        self.scale = torch.ones(2)

    def process_weights_after_loading(self):
        if self.table is None:
            self.table = self.weight.detach() * 10
        self.scale.mul_(self.weight.detach())
        self.weight.data.neg_()

    def forward(self, x):
        return x * self.table + self.scale * self.weight


@pytest.mark.holds("I02")
def test_plain_tensors_are_right_again_after_a_deep_sleep(commit):
    """Weights and plain attributes were given up and hold garbage. The guard that makes the table
    only once would leave it so; both are made again, in the memory that graphs know."""
    live = Live(lambda: Net(WithPlainTensors()), {"layers.0.weight": number(1.0, 2.0)})
    layer = live.model.layers[0]
    for tensor in (layer.weight, layer.table, layer.scale):
        tensor.data.fill_(float("nan"))
    state = {"layers.0.weight": number(5.0, 6.0)}
    live.reload(state, commit=commit)
    assert layer.table.tolist() == [50.0, 60.0]
    assert layer.scale.tolist() == [5.0, 6.0]
    assert layer.weight.tolist() == [-5.0, -6.0]
    live.equals(state)


class Attention(nn.Module):
    """Has a scale of 1 that an engine calibrates, and one of -1 that a checkpoint may bring."""

    role = Role.ATTENTION

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.register_buffer("calibrated", number(1.0), persistent=False)
        self.k_scale = parameter(1, fill=-1.0)

    def process_weights_after_loading(self):
        self.k_factor = 1.0 if self.k_scale.item() < 0 else self.k_scale.item()
        del self.k_scale

    def forward(self, x):
        return x * self.weight * self.calibrated * self.k_factor


def test_a_load_without_plans_of_what_a_plan_does_not_know_ends_the_plan():
    """The hook was spared because it did the same in two loads; in this one it does something else."""
    weight = {"layers.0.weight": number(1.0, 2.0)}
    optional = Scope.full(allow_missing=["*.k_scale"])
    live = Live(lambda: Net(Attention()), weight, scope=optional)
    layer = live.model.layers[0]
    both = {**weight, "layers.0.k_scale": number(0.5)}
    for sent, plans, factor in ((weight, True, 1.0), (both, False, 0.5), (weight, True, 1.0)):
        live.reload(sent, plans=plans)
        assert layer.k_factor == factor


@pytest.mark.holds("I03")
def test_a_calibrated_scale_is_kept_and_a_default_one_comes_back(commit):
    """The engine calibrated one after the first load: no checkpoint brings it, so it stays. The
    other was in the checkpoint once, or never, and each time it is what a fresh load makes of it."""
    weight = {"layers.0.weight": number(1.0, 2.0)}
    optional = Scope.full(allow_missing=["*.k_scale"])
    live = Live(lambda: Net(Attention()), weight, scope=optional)
    layer = live.model.layers[0]
    layer.calibrated.fill_(0.37)
    scale = {"layers.0.k_scale": number(0.5)}
    for sent, factor in ((weight, 1.0), ({**weight, **scale}, 0.5), (weight, 1.0)):
        live.reload(sent, commit=commit)
        assert layer.calibrated.item() == pytest.approx(0.37)
        assert layer.k_factor == factor


# ------------------------------------------------------------------------------ memory


def ordered(weights):
    return list(weights.items())


def by_shard(weights):
    """The first shard of every layer, then the second of every layer."""
    return sorted(weights.items(), key=lambda pair: pair[0][-1])


@pytest.mark.parametrize(
    ("order", "commit", "peak"),
    [
        pytest.param(ordered, "stream", 12, marks=pytest.mark.holds("I04", "I05")),
        pytest.param(by_shard, "stream", 36, marks=pytest.mark.holds("I04")),
        pytest.param(ordered, "atomic", 36, marks=pytest.mark.holds("I05")),
    ],
)
def test_the_extra_memory_is_that_of_the_layers_that_are_not_done(order, commit, peak):
    """One layer, when tensors come in order; the receipt says how much it was if they do not."""
    live = Live(lambda: Net(Fused(), Fused(), Fused()), shards(1.0, layers=3))
    receipt = live.reload(iter(order(shards(20.0, layers=3))), commit=commit)
    assert receipt.staging_peak_bytes == peak
    live.equals(shards(20.0, layers=3))


class Quantised(nn.Module):
    """Takes floats and keeps bytes."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(64)

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(self.weight.detach().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x * self.weight.sum()


@pytest.mark.holds("I06")
def test_a_model_that_is_quantised_as_it_loads_never_holds_all_its_floats():
    """It was constructed on meta. Before each layer comes, those before it are bytes, and those
    after it have no memory."""
    with torch.device("meta"):
        model = Net(*(Quantised() for _ in range(4)))
    weights = {f"layers.{i}.weight": torch.full((64,), float(i)) for i in range(4)}
    held = []

    def source():
        for pair in weights.items():
            held.append([layer.weight.untyped_storage().nbytes() for layer in model.layers])
            yield pair

    with WeightLoadSession(model, framework=framework_for(model)) as session:
        session.load(source())
    assert held == [[64] * done + [0] * (4 - done) for done in range(4)]
    assert [layer.weight.dtype for layer in model.layers] == [torch.int8] * 4
    assert [layer.weight[0].item() for layer in model.layers] == [0, 1, 2, 3]
    assert session.receipt.staging_peak_bytes <= 2 * 4 * 64


# ------------------------------------------------------------------------------ transport


class Scaled(Negated):
    """Has scales of one byte each, four of them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)


@pytest.mark.holds("I08")
@pytest.mark.parametrize(
    ("packed", "said"),
    [
        (torch.tensor([0x04030201], dtype=torch.int32), "shape (1,)"),
        (torch.tensor([1, 2, 3, 4], dtype=torch.int32), "torch.int32"),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), "torch.float32"),
    ],
)
def test_scales_in_the_form_of_another_engine_are_refused(packed, said, commit):
    """Four bytes in one number, or four numbers of another type: neither is cast or reshaped."""
    scale = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    weight = {"layers.0.weight": number(1.0, 2.0)}
    live = Live(lambda: Net(Scaled()), {**weight, "layers.0.scale": scale})
    sent = {**weight, "layers.0.scale": packed}
    for source in (sent, iter([*reversed(sent.items())])):
        with live.refuses(WeightMismatchError, "layers.0.scale", said, commit=commit) as session:
            session.load(source)
        live.unchanged()
    live.reload({**weight, "layers.0.scale": scale + 1}, commit=commit)
    live.equals({**weight, "layers.0.scale": scale + 1})


@pytest.mark.holds("I09", "W27", "H10")
def test_a_source_that_was_read_before_is_refused(commit):
    """The same iterator is given to a second load, which gets nothing from it."""
    live = Live(lambda: Net(Fused()), shards(1.0))
    once = iter(shards(20.0).items())
    live.reload(once, commit=commit)
    live.look()
    with live.refuses(IncompleteLoadError, "empty or exhausted", commit=commit) as session:
        session.load(once)
        session.finish()
    live.unchanged()


class Deferring(Fused):
    """Leaves all shards but the first to a thread."""

    waits = True
    defers = False

    def load_shard(self, place, tensor, shard):
        if not self.defers or shard == 0:
            super().load_shard(place, tensor, shard)
            return
        thread = threading.Thread(target=super().load_shard, args=(place, tensor.clone(), shard))
        thread.start()
        if self.waits:
            thread.join()
        self.threads = [*getattr(self, "threads", ()), thread]


@pytest.mark.holds("I10")
@pytest.mark.parametrize("waits", [True, False], ids=["joined", "still running"])
def test_what_a_thread_writes_does_not_count_as_arrived(waits, commit):
    """A load cannot know when somebody else is done, so it does not finish on his word."""
    live = Live(lambda: Net(Deferring()), shards(1.0))
    layer = live.model.layers[0]
    layer.defers, layer.waits = True, waits
    with live.refuses(IncompleteLoadError, "layers.0.weight", commit=commit) as session:
        session.load(shards(20.0))
        for thread in layer.threads:
            thread.join()
        session.finish()
    live.unchanged()
    layer.defers = False
    live.reload(shards(20.0), commit=commit)
    live.equals(shards(20.0))
