"""Every expected write happens once, through a loader that finds the layout it was written for.

Loaders that outlive a change of layout, elements that are counted, layers that are done too early
or never, hooks that run twice or on half of their weights: each of these left an engine that
serves numbers which no checkpoint holds.
"""

import logging
import warnings

import pytest
import torch
from small import (
    COMMITS,
    Fused,
    Live,
    Negated,
    Net,
    Plain,
    X,
    framework_for,
    fresh,
    number,
    parameter,
)
from torch import nn

from weightload import (
    DuplicateWeightError,
    IncompleteLoadError,
    ModelBusyError,
    ModuleRule,
    Role,
    Scope,
    UnexpectedWeightError,
    UnsupportedError,
    WeightLoadSession,
    WeightMismatchError,
    current_session,
    finish_reload,
    open_session,
    start_reload,
)
from weightload.testing import Bench, LoadingModel, layers, loading


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


# ------------------------------------------------------------------------------ layouts


class Swapped(nn.Module):
    """Its hook swaps the halves in place: a loader that runs afterwards finds them swapped."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2, loader=self.load_half)

    def load_half(self, place, tensor, half):
        place.data[half].copy_(tensor[0])

    def process_weights_after_loading(self):
        self.weight.data.copy_(self.weight.detach().flip(0))

    def forward(self, x):
        return x * self.weight[0] + self.weight[1]


class Blocked(Swapped):
    """Its hook gives the weight another number of dimensions, in which a loader finds no half."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(2, 2, loader=self.load_half)

    def load_half(self, place, tensor, half):
        if place.ndim != 2:
            raise RuntimeError(f"half {half} of a tensor with {place.ndim} dimensions")
        place.data[half].copy_(tensor)

    def process_weights_after_loading(self):
        blocked = self.weight.detach().view(2, 1, 2, 1).transpose(0, 2).contiguous()
        self.weight = nn.Parameter(blocked, requires_grad=False)
        self.weight.weight_loader = self.load_half

    def forward(self, x):
        return x * self.weight[0, 0, :, 0] + self.weight[1, 0, :, 0]


@pytest.mark.holds("C01", "frameworks-M")
def test_a_loader_does_not_write_into_the_layout_that_a_hook_made(commit):
    """Both halves come again; whoever runs the loader without the hook has them swapped."""
    first = {"layers.0.weight/0": number(1.0), "layers.0.weight/1": number(2.0)}
    second = {"layers.0.weight/0": number(10.0), "layers.0.weight/1": number(20.0)}
    live = Live(lambda: Net(Swapped()), first)
    assert live.model.layers[0].weight.tolist() == [2.0, 1.0]
    live.model.load_weights(second.items())
    assert live.model.layers[0].weight.tolist() == [10.0, 20.0], "this is the defect"
    live.reload(second, commit=commit)
    assert live.model.layers[0].weight.tolist() == [20.0, 10.0]
    live.equals(second)


@pytest.mark.holds("C02")
def test_a_loader_does_not_see_the_dimensions_that_a_hook_made(commit):
    """Two dimensions became four; without a session the loader cannot find its rows any more."""
    first = {"layers.0.weight/0": number(1.0, 2.0), "layers.0.weight/1": number(3.0, 4.0)}
    second = {"layers.0.weight/0": number(5.0, 6.0), "layers.0.weight/1": number(7.0, 8.0)}
    live = Live(lambda: Net(Blocked()), first)
    with pytest.raises(RuntimeError, match="4 dimensions"):
        live.model.load_weights(second.items())
    live.reload(second, commit=commit)
    assert live.model.layers[0].weight.flatten().tolist() == [5.0, 7.0, 6.0, 8.0]
    live.equals(second)


class PlainAttribute(nn.Module):
    """Its hook puts a plain tensor where the parameter was, under the same name."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)

    def process_weights_after_loading(self):
        packed = self.weight.detach() * 2
        del self.weight
        self.weight = packed

    def forward(self, x):
        return x * self.weight


class Renamed(nn.Module):
    """Its hook renames the weight as it packs it, and does nothing once the new name is there."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)

    def process_weights_after_loading(self):
        if not hasattr(self, "packed"):
            self.packed = nn.Parameter(self.weight.detach() * 2, requires_grad=False)
            del self.weight

    def forward(self, x):
        return x * self.packed


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(PlainAttribute, marks=pytest.mark.holds("C17")),
        pytest.param(Renamed, marks=pytest.mark.holds("C18")),
    ],
)
def test_a_parameter_that_a_hook_took_away_is_there_for_the_next_load(layer, commit):
    """It is gone, or another thing has its name; the checkpoint still brings it."""
    live = Live(lambda: Net(layer()), {"layers.0.weight": number(1.0, 2.0)})
    for value in (3.0, 4.0, 1.0):
        state = {"layers.0.weight": number(value, -value)}
        live.reload(state, commit=commit)
        assert live.model(number(1.0, 1.0)).tolist() == [2 * value, -2 * value]
        live.equals(state)


# ------------------------------------------------------------------------------ counting


class Composed(nn.Module):
    """One loader writes its tensor twice, and the hook sums both tensors of the layer."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.a = parameter(2, loader=self.load_negated)
        self.d = parameter(2)

    def load_negated(self, place, tensor):
        place.data.copy_(tensor)
        place.data.copy_(-place.data)

    def process_weights_after_loading(self):
        self.total = self.a.detach() + self.d.detach()

    def forward(self, x):
        return x * self.total


@pytest.mark.holds("C03", "frameworks-R5")
@pytest.mark.parametrize("order", [list, reversed], ids=["d last", "a last"])
def test_a_loader_that_writes_twice_does_not_end_its_layer_early(order, commit):
    """Four elements were written when half of the layer had come, and it has four."""
    live = Live(
        lambda: Net(Composed()), {"layers.0.a": number(1.0, 2.0), "layers.0.d": number(3.0, 4.0)}
    )
    state = {"layers.0.a": number(5.0, 6.0), "layers.0.d": number(70.0, 80.0)}
    live.reload(iter(list(order(list(state.items())))), commit=commit)
    assert live.model.layers[0].total.tolist() == [65.0, 74.0]
    live.equals(state)


class Mapped(Negated):
    """Owns a map that no checkpoint brings, and that counts among its tensors."""

    def __init__(self):
        super().__init__()
        self.register_buffer("expert_map", torch.arange(128), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.expert_map.sum()


@pytest.mark.holds("C04")
def test_a_layer_does_not_wait_for_a_buffer_that_never_comes():
    """It is done, and its staging given back, before the next layer's weight is asked for."""
    names = [f"layers.{index}.weight" for index in range(3)]
    live = Live(lambda: Net(Mapped(), Mapped(), Mapped()), dict.fromkeys(names, number(1.0, 2.0)))
    seen = []

    def source():
        for index, name in enumerate(names):
            seen.append([layer.weight.tolist() for layer in live.model.layers[:index]])
            yield name, number(index, 10.0)

    receipt = live.reload(source())
    assert seen == [[], [[-0.0, -10.0]], [[-0.0, -10.0], [-1.0, -10.0]]]
    assert receipt.staging_peak_bytes == 2 * 4, "the weights of one layer"
    live.equals({name: number(index, 10.0) for index, name in enumerate(names)})


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = parameter(2)


class SharedBias(Negated):
    """Its gate has a bias that it uses as well; its hook changes both at once."""

    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.correction = self.gate.bias

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.correction.data.mul_(10)

    def forward(self, x):
        return super().forward(x) * self.gate.bias + self.correction


@pytest.mark.holds("C05")
def test_a_bias_that_two_modules_hold_is_waited_for_once(commit):
    """One name brings it, and both places have it, processed once."""
    live = Live(
        lambda: Net(SharedBias()),
        {"layers.0.weight": number(1.0, 2.0), "layers.0.gate.bias": number(3.0, 4.0)},
    )
    state = {"layers.0.gate.bias": number(5.0, 6.0), "layers.0.weight": number(7.0, 8.0)}
    live.reload(iter(state.items()), commit=commit)
    layer = live.model.layers[0]
    assert layer.correction is layer.gate.bias
    assert layer.gate.bias.tolist() == [50.0, 60.0]
    live.equals(state)


FUSED = {f"layers.0.weight/{shard}": number(shard + 1.0) for shard in range(3)}


@pytest.mark.holds("C06", "W9")
def test_a_shard_that_came_twice_does_not_stand_in_for_one_that_never_came(commit):
    """As many elements came as the layer has. The duplicate is refused, and so is the gap."""
    live = Live(lambda: Net(Fused()), FUSED)
    left = ("layers.0.weight/0", number(10.0))
    middle = ("layers.0.weight/1", number(20.0))
    with live.refuses(DuplicateWeightError, "layers.0.weight/0", commit=commit) as session:
        session.load(iter([left, middle, left]))
    with live.refuses(IncompleteLoadError, "layers.0.weight [2:3]", commit=commit) as session:
        session.load([left, middle])
        session.finish()
    with live.refuses(DuplicateWeightError, "layers.0.weight/0", commit=commit) as session:
        session.load([left])
        session.load([middle])
        session.load([left])
    live.unchanged()
    live.reload(FUSED, commit=commit)
    live.equals(FUSED)


# ------------------------------------------------------------------------------ hooks


class Doubling(nn.Module):
    """Its hook doubles a scale in place: each further run doubles once more."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)

    def process_weights_after_loading(self):
        self.weight.data.mul_(2)

    def forward(self, x):
        return x * self.weight


class Eager(Net):
    """Asks for the processing of each layer as soon as it has loaded it, as loaders may."""

    def load_weights(self, weights):
        for name, tensor in weights:
            self.store(name, tensor)
            session = current_session()
            if session is not None:
                layer = self.get_submodule(name.rpartition(".")[0])
                for _ in range(2):
                    session.process_quant(layer)


@pytest.mark.holds("C07")
@pytest.mark.parametrize("model", [Net, Eager], ids=["the session alone", "the loader as well"])
def test_a_hook_runs_once_whoever_asks_for_it(model, commit):
    """The loader asks twice, the complete layer and `finish` once each."""
    live = Live(lambda: model(Doubling(), Doubling()), _two(1.0, 2.0))
    assert [layer.weight.tolist() for layer in live.model.layers] == [[2.0, 2.0], [4.0, 4.0]]
    for values in ((5.0, 7.0), (5.0, 7.0), (1.0, 2.0)):
        receipt = live.reload(_two(*values), commit=commit)
        assert receipt.hooks_run == 2
        assert [layer.weight[0].item() for layer in live.model.layers] == [2 * v for v in values]


def _two(first, second):
    return {"layers.0.weight": number(first, first), "layers.1.weight": number(second, second)}


class Latched(nn.Module):
    """Its hook notes on the module, and on its method, that it has run, and never runs again."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.quantised = None
        self.method = Method()

    def process_weights_after_loading(self):
        if getattr(self, "_already_processed", False) or self.method.done:
            return
        self._already_processed = self.method.done = True
        self.quantised = self.weight.detach().round().to(torch.int8)

    def forward(self, x):
        return x * self.quantised


class Method:
    done = False

    def process_weights_after_loading(self):
        raise AssertionError("the module calls it in its own way")


@pytest.mark.holds("C08")
def test_a_flag_that_a_hook_left_does_not_keep_the_old_values(commit):
    """Each load quantises again, and the flag is as a fresh load leaves it."""
    live = Live(lambda: Net(Latched()), {"layers.0.weight": number(1.2, 2.9)})
    for value in (3.0, -4.0):
        live.reload({"layers.0.weight": number(value, 0.1)}, commit=commit)
        layer = live.model.layers[0]
        assert layer.quantised.tolist() == [value, 0]
        assert layer._already_processed
        assert layer.method.done
        assert layer.quantised.dtype == torch.int8


class EncoderAttention(nn.Module):
    """An attention layer of a class that no list has; it reads a layer inside it."""

    def __init__(self):
        super().__init__()
        self.up = Negated()

    def build_runtime(self):
        self.table = self.up.weight.detach() + 1

    def forward(self, x):
        return x * self.table


class WindowedAttention(EncoderAttention):
    """A subclass has its rule by inheritance."""


def attention_live(layer, **options):
    """Load a model with an attention layer whose role is registered, in one line."""
    framework = framework_for(Net(layer()), hook="build_runtime")
    framework.registry.register(
        EncoderAttention,
        ModuleRule(role=Role.ATTENTION, process=lambda module: module.build_runtime()),
    )
    state = {"layers.0.up.weight": number(1.0, 2.0)}
    return Live(lambda: Net(layer()), state, framework=framework, **options)


@pytest.mark.holds("C15")
@pytest.mark.parametrize("layer", [EncoderAttention, WindowedAttention])
def test_an_attention_layer_needs_a_rule_and_no_place_on_a_list(layer, commit):
    """What it derives is new after each load, in the tensor that graphs know."""
    live = attention_live(layer)
    table = live.model.layers[0].table
    assert table.tolist() == [0.0, -1.0]
    live.reload({"layers.0.up.weight": number(5.0, 6.0)}, commit=commit)
    assert live.model.layers[0].table is table
    assert table.tolist() == [-4.0, -5.0]


@pytest.mark.holds("C16")
def test_attention_is_processed_after_the_linear_layers_that_it_reads(commit):
    """The attention layer comes first in the tree; its projection is negated before it is read."""
    live = attention_live(EncoderAttention)
    live.framework.registry.register(
        Net, ModuleRule(role=Role.DERIVED, process=lambda net: setattr(net, "seen", order(net)))
    )

    def order(net):
        return [net.layers[0].up.weight.tolist(), net.layers[0].table.tolist()]

    live = Live(
        lambda: Net(EncoderAttention()),
        {"layers.0.up.weight": number(1.0, 2.0)},
        framework=live.framework,
    )
    assert live.model.seen == [[-1.0, -2.0], [0.0, -1.0]]
    live.reload(iter([("layers.0.up.weight", number(7.0, 8.0))]), commit=commit)
    assert live.model.seen == [[-7.0, -8.0], [-6.0, -7.0]]


class SelfProcessing(Net):
    """Has its layers processed at the end of its own loader, which may run once per bucket."""

    def load_weights(self, weights):
        super().load_weights(weights)
        session = current_session()
        if session is not None:
            for layer in self.layers:
                session.process_quant(layer)


@pytest.mark.long_way("the loader finalises")
@pytest.mark.holds("C22")
def test_a_model_cannot_have_half_of_its_weights_processed(commit):
    """Its loader finalises at the end of each call. In one call all is well; a bucket is refused,
    because one layer has not come."""
    live = Live(lambda: SelfProcessing(Negated(), Doubling()), _two(1.0, 2.0))
    live.reload(_two(3.0, 4.0), commit=commit)
    assert [layer.weight.tolist() for layer in live.model.layers] == [[-3.0, -3.0], [8.0, 8.0]]
    live.look()
    with live.refuses(IncompleteLoadError, "layers.1.weight", commit=commit) as session:
        session.load(list(_two(5.0, 6.0).items())[:1])
    live.reload(_two(5.0, 6.0), commit=commit)
    assert [layer.weight.tolist() for layer in live.model.layers] == [[-5.0, -5.0], [12.0, 12.0]]


# ------------------------------------------------------------------------------ past the loaders


class Sinks(nn.Module):
    """The model fills a part of it by a bare copy; the rest is -inf, and the hook converts it."""

    role = Role.ATTENTION

    def __init__(self):
        super().__init__()
        self.sinks = parameter(4, fill=float("-inf"))
        self.runtime = None

    def process_weights_after_loading(self):
        self.sinks.data.mul_(2)
        self.runtime = self.sinks.detach().double()

    def forward(self, x):
        return x + self.runtime.exp().sum()


class Bare(Net):
    """Writes past every loader."""

    def store(self, name, tensor):
        self.get_parameter(name).data[:2].copy_(tensor)


@pytest.mark.holds("C09", "frameworks-J")
def test_a_bare_copy_lands_and_its_padding_stays(commit):
    """The sinks arrive though no loader was called, and the tail is still -inf."""
    live = Live(lambda: Bare(Sinks()), {"layers.0.sinks": number(1.0, 2.0)})
    runtime = live.model.layers[0].runtime
    for value in (3.0, 4.0):
        live.reload({"layers.0.sinks": number(value, -value)}, commit=commit)
        assert live.model.layers[0].runtime is runtime
        assert runtime.tolist() == [2 * value, -2 * value, float("-inf"), float("-inf")]
    live.equals({"layers.0.sinks": number(4.0, -4.0)})


class Looked(Net):
    """Looked up the loader of each parameter once, when it was constructed."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.loaders = {name: place.weight_loader for name, place in self.named_parameters()}

    def store(self, name, tensor):
        name, _, shard = name.partition("/")
        self.loaders[name](self.get_parameter(name), tensor, int(shard))


@pytest.mark.holds("C10")
def test_a_loader_that_was_looked_up_once_is_as_good_as_any(commit):
    """Nothing is wrapped, so that nothing can be bypassed."""
    live = Live(lambda: Looked(Fused()), FUSED)
    state = {f"layers.0.weight/{shard}": number(shard + 10.0) for shard in range(3)}
    live.reload(state, commit=commit)
    assert live.model.layers[0].weight.tolist() == [-10.0, -11.0, -12.0]
    live.equals(state)


class Table(Net):
    """Made its table of parameters once, when it was constructed."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.table = {name: [place] for name, place in self.named_parameters()}

    def store(self, name, tensor):
        self.table[name][0].data.copy_(tensor)


@pytest.mark.long_way("a loader writes past the model; by a plan the load is right")
@pytest.mark.holds("C10")
@pytest.mark.parametrize("layer", [Negated, Doubling])
def test_a_loader_does_not_write_past_the_staged_tensor_into_the_live_one(layer, commit):
    """The parameter that the model remembers is live, or is none any more; nothing of the sort may
    be overwritten by a load that says that the model is intact."""
    live = Live(lambda: Table(layer()), {"layers.0.weight": number(1.0, 2.0)})
    error = UnsupportedError if layer is Doubling else IncompleteLoadError
    with live.refuses(error, "layers.0.weight", commit=commit) as session:
        session.load({"layers.0.weight": number(5.0, 6.0)})
        session.finish()
    live.unchanged()


class Summing(Net):
    """Computes something from a layer's weight when its loader has read everything."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.total = self.layers[0].weight.detach() * 10


@pytest.mark.holds("C22")
def test_a_loader_does_not_compute_with_what_was_processed_already():
    """In a first load it finds the weight as it came, and negated in a stream. The same holds for
    an atomic load, in which nothing is processed before the end."""
    live = Live(lambda: Summing(Negated()), {"layers.0.weight": number(1.0, 2.0)})
    assert live.model.total.tolist() == [10.0, 20.0]
    with live.refuses(UnsupportedError, "layers.0.weight", "atomic") as session:
        session.load({"layers.0.weight": number(5.0, 6.0)})
    with WeightLoadSession(live.model, commit="atomic") as session:
        session.load({"layers.0.weight": number(5.0, 6.0)})
    assert live.model.total.tolist() == [50.0, 60.0]


class Hoarding(Net):
    """Keeps what it is given, over several calls, until a layer is whole."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.kept = []

    def load_weights(self, weights):
        self.kept += list(weights)
        if len(self.kept) == 3:
            for name, tensor in self.kept:
                self.store(name, tensor)
            self.kept = []


@pytest.mark.holds("C11")
def test_a_model_may_write_in_a_later_call_what_it_was_given_in_an_earlier_one(commit):
    """The model keeps what it gets from call to call, and the transport's buffer is filled again
    after each. All three shards have their own values when the model writes them at last, and
    their own names: a shard that came twice is found."""
    live = Live(lambda: Hoarding(Fused()), FUSED)
    buffer = torch.empty(1)
    with WeightLoadSession(live.model, commit=commit) as session:
        for shard in range(3):
            session.load({f"layers.0.weight/{shard}": buffer.fill_(shard + 20.0)})
            buffer.fill_(float("nan"))
    assert live.model.layers[0].weight.tolist() == [-20.0, -21.0, -22.0]
    live.reload(FUSED, commit=commit)
    live.equals(FUSED)
    live.look()
    with live.refuses(DuplicateWeightError, "layers.0.weight/1", commit=commit) as session:
        for shard in (0, 1, 1):
            session.load({f"layers.0.weight/{shard}": buffer.fill_(shard + 20.0)})


def test_a_loader_that_writes_by_index_into_a_tensor_of_other_names_is_refused(commit):
    """The rows that it fills cannot be told, but that its name never filled any of them can."""

    class Net(LoadingModel):
        errs = False

        def store(self, name, tensor):
            super().store(name, tensor)
            if self.errs and name == "layers.0.weight":
                super().store("layers.1.weight/0", tensor)

    bench = Bench(lambda: Net(layers.Linear(), loading.ScatteredLinear(packed=False)))
    bench.model.errs = True
    session = bench.open(commit=commit)
    with pytest.raises(UnexpectedWeightError, match=r"layers\.0\.weight.*layers\.1\.weight"):
        session.load(bench.state(2))
    bench.check_ended(session)


@pytest.mark.holds("C20")
@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read and thrown away"])
def test_a_model_that_loads_from_somewhere_else_is_refused(reads, commit):
    """It takes its own copy from disk, whatever it is sent."""
    disk = {"layers.0.weight": number(1.0, 2.0)}

    class Deaf(Net):
        deaf = False

        def load_weights(self, weights):
            if self.deaf:
                if reads:
                    list(weights)
                weights = disk.items()
            super().load_weights(weights)

    live = Live(lambda: Deaf(Plain()), disk)
    live.model.deaf = True
    error = WeightMismatchError if reads else UnexpectedWeightError
    with live.refuses(error, "layers.0.weight", commit=commit) as session:
        session.load({"layers.0.weight": number(3.0, 4.0)})
        session.finish()
    live.model.deaf = False
    live.reload({"layers.0.weight": number(3.0, 4.0)}, commit=commit)
    live.equals({"layers.0.weight": number(3.0, 4.0)})


# ------------------------------------------------------------------------------ buckets


class Checking(Net):
    """Checks at the end of each call that everything came, as some drafters do."""

    def load_weights(self, weights):
        names = set()
        for name, tensor in weights:
            self.store(name, tensor)
            names.add(name)
        lost = {name for name, _ in self.named_parameters()} - names
        if lost:
            raise ValueError(f"missing {sorted(lost)}")


@pytest.mark.long_way("the loader asks what came")
@pytest.mark.holds("C12")
def test_completeness_is_asked_once_over_all_buckets(commit):
    """A model that asks for it in every call is refused as long as it gets buckets, with what it
    said; as one stream of the same buckets its load is complete."""
    first, second = _two(1.0, 2.0), _two(3.0, 4.0)
    live = Live(lambda: Net(Negated(), Plain()), first)
    with WeightLoadSession(live.model, commit=commit) as session:
        for pair in second.items():
            session.load([pair])
    live.equals(second)
    live = Live(lambda: Checking(Negated(), Plain()), first)
    with live.refuses(WeightMismatchError, "missing ['layers.1.weight']", commit=commit) as session:
        session.load(list(second.items())[:1])
    live.reload(
        (pair for bucket in ([p] for p in second.items()) for pair in bucket), commit=commit
    )
    live.equals(second)


@pytest.mark.holds("C13")
def test_beginning_again_for_each_bucket_does_not_reset_what_was_done(commit):
    """The caller begins before each bucket. The second beginning is refused and the load goes on:
    the first layer is still done when the second has come."""
    live = Live(lambda: Net(Negated(), Plain()), _two(1.0, 2.0))
    refusals = []
    for pair in _two(3.0, 4.0).items():
        try:
            start_reload(live.model, commit=commit)
        except ModelBusyError as error:
            refusals.append(error.model_intact)
        open_session(live.model).load([pair])
    finish_reload(live.model)
    assert refusals == [True]
    live.equals(_two(3.0, 4.0))


@pytest.mark.holds("C14")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_processing_is_once_per_load_however_it_is_cut(size, commit):
    """A hook that ran for each chunk would have negated twice, or three shards out of six."""
    state = {
        f"layers.{i}.weight/{shard}": number(10.0 * i + shard) for i in (0, 1) for shard in range(3)
    }
    live = Live(lambda: Net(Fused(), Fused()), {name: t + 1 for name, t in state.items()})
    items = list(state.items())
    with WeightLoadSession(live.model, commit=commit) as session:
        for start in range(0, 6, size):
            session.load(items[start : start + size])
    assert session.receipt.hooks_run == 2
    assert live.model.layers[1].weight.tolist() == [-10.0, -11.0, -12.0]
    live.equals(state)


class Scaled(nn.Module):
    """A weight with its scale, which the hook folds into one tensor."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.scale = parameter(1)

    def process_weights_after_loading(self):
        folded = self.weight.detach() * self.scale.detach()
        self.weight = nn.Parameter(folded, requires_grad=False)
        del self.scale

    def forward(self, x):
        return x * self.weight


@pytest.mark.holds("C19")
@pytest.mark.parametrize("part", ["weight", "scale"])
def test_a_weight_without_its_scale_is_refused_and_both_alone_are_loaded(part, commit):
    """To fold new weights with old scales would give what no checkpoint holds. Declared as a part,
    the load does not begin; sent as everything, it does not finish."""
    both = {"layers.0.weight": number(1.0, 2.0), "layers.0.scale": number(10.0)}
    rest = {"layers.1.weight": number(3.0, 4.0)}
    live = Live(lambda: Net(Scaled(), Plain()), {**both, **rest})
    name, other = f"layers.0.{part}", f"layers.0.{'scale' if part == 'weight' else 'weight'}"
    session = WeightLoadSession(live.model, commit=commit, scope=Scope.only([name]))
    with pytest.raises(IncompleteLoadError, match=other) as caught:
        session.prepare()
    assert caught.value.model_intact
    live.unchanged()
    new = {"layers.0.weight": number(5.0, 6.0), "layers.0.scale": number(100.0)}
    with live.refuses(IncompleteLoadError, other, commit=commit) as session:
        session.load(iter([(name, new[name])]))
        session.finish()
    live.unchanged()
    live.reload(new, commit=commit, scope=Scope.only(list(new)))
    assert live.model.layers[0].weight.tolist() == [500.0, 600.0]
    live.equals({**new, **rest})


class Rotary(nn.Module):
    """Has nothing that a checkpoint could bring."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.arange(2.0), persistent=False)

    def forward(self, x):
        return x + self.cache


@pytest.mark.holds("C21")
def test_a_module_without_weights_is_no_news(commit, caplog):
    """No warning and no log in any load, and it is not missed."""
    live = Live(lambda: Net(Rotary(), Plain()), {"layers.1.weight": number(1.0, 2.0)})
    state = {"layers.1.weight": number(3.0, 4.0)}
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
        warnings.simplefilter("error")
        receipt = live.reload(state, commit=commit)
    assert caplog.records == []
    assert receipt.consumed.count == 1
    live.equals(state)


def test_these_defects_would_show():
    """The oracle is no copy of weightload: it gives what stands in the tests, and differs for
    each checkpoint."""
    one = fresh(lambda: Net(Fused()), FUSED)
    assert one.layers[0].weight.tolist() == [-1.0, -2.0, -3.0]
    other = fresh(lambda: Net(Fused()), dict.fromkeys(FUSED, number(3.0)))
    assert not torch.equal(one(X), other(X))
