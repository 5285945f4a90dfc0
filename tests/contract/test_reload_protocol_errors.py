"""A caller, a model or a transport that breaks the protocol gets the right weights or an error.

Most layers here have three shards of one element, 20, 21 and 22, which a hook negates: a buffer
that was reused, a shard that came twice and one that was not processed each show as one wrong
number.
"""

import functools
import gc

import pytest
import torch
from small import COMMITS, Fused, Live, Negated, Net, Plain, framework_for, number, parameter
from torch import nn

from weightload import (
    DuplicateWeightError,
    Framework,
    IncompleteLoadError,
    InvalidTransitionError,
    ModuleRule,
    ProcessingError,
    Role,
    Scope,
    SessionState,
    StorageChangedError,
    WeightLoadSession,
    WeightMismatchError,
    poison_of,
    weights_version,
)

NAMES = [f"layers.0.weight/{shard}" for shard in range(3)]


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


def shards(first, layer=0):
    return {f"layers.{layer}.weight/{shard}": number(first + shard) for shard in range(3)}


def two_layers(first):
    return {**shards(first), **shards(first + 10, layer=1)}


def held_in(layer):
    return layer.weight.tolist()


# ------------------------------------------------------------------------------ buffers


class Collecting(Net):
    """Reads its whole source before it loads anything."""

    def load_weights(self, weights):
        super().load_weights(list(weights))


class OtherNames(Fused):
    """Its loader calls its arguments otherwise than everybody else."""

    def load_shard(self, destination, checkpoint_value, shard):
        destination.data[shard : shard + 1].copy_(checkpoint_value)


def bucket_by_bucket(session):
    """The bucket is filled again as soon as `load` has returned."""
    buffer = torch.empty(1)
    for shard, name in enumerate(NAMES):
        session.load({name: buffer.fill_(20.0 + shard)})
    buffer.fill_(float("nan"))


def views_of_one_buffer(session):
    """One bucket holds all three; it is overwritten afterwards."""
    buffer = number(20.0, 21.0, 22.0)
    session.load([(name, buffer[shard : shard + 1]) for shard, name in enumerate(NAMES)])
    buffer.fill_(float("nan"))


def generator(session):
    """The buffer is filled again between two tensors of one call."""

    def source():
        buffer = torch.empty(1)
        for shard, name in enumerate(NAMES):
            yield name, buffer.fill_(20.0 + shard)
            buffer.fill_(float("nan"))

    session.load(source())


def wrapped_generator(session):
    """A wrapper detaches each tensor, which is no copy."""

    def source():
        buffer = torch.empty(1)
        for shard, name in enumerate(NAMES):
            yield name, buffer.fill_(20.0 + shard).detach()

    session.load((name, tensor.detach()) for name, tensor in source())


@pytest.mark.parametrize(
    ("deliver", "model", "layer"),
    [
        pytest.param(bucket_by_bucket, Net, Fused, marks=pytest.mark.holds("frameworks-R1", "W23")),
        pytest.param(views_of_one_buffer, Net, Fused, marks=pytest.mark.holds("frameworks-H")),
        pytest.param(generator, Net, Fused, marks=pytest.mark.holds("frameworks-O1")),
        pytest.param(wrapped_generator, Net, Fused, marks=pytest.mark.holds("frameworks-O2")),
        pytest.param(generator, Collecting, Fused, marks=pytest.mark.holds("frameworks-O3")),
        pytest.param(generator, Net, OtherNames, marks=pytest.mark.holds("frameworks-O5", "W16")),
    ],
)
def test_a_buffer_may_be_reused_when_its_tensor_was_taken(deliver, model, layer, commit):
    """Each shard has the value that it had when it was handed over, not the last one."""
    live = Live(lambda: model(layer()), shards(1.0))
    with WeightLoadSession(live.model, commit=commit) as session:
        deliver(session)
    assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0]
    live.equals(shards(20.0))


@pytest.mark.holds("frameworks-O4")
def test_a_sender_that_copies_itself_is_not_copied_again(commit):
    """It says so, and the model that collects its tensors has the sender's own."""

    class Noting(Collecting):
        def store(self, name, tensor):
            self.addresses.append(tensor.data_ptr())
            super().store(name, tensor)

    live = Live(lambda: Net(Fused()), shards(1.0))
    live.model.__class__ = Noting
    live.model.addresses = []
    state = shards(20.0)
    with WeightLoadSession(live.model, commit=commit) as session:
        session.load(iter(state.items()), transport=[])
    assert live.model.addresses == [tensor.data_ptr() for tensor in state.values()]
    assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0]


# ------------------------------------------------------------------------------ broken loads


class Broken(Exception):
    """What a source or a loader raises here."""


def breaking(state, position):
    """Yield so many tensors, then fail."""
    yield from list(state.items())[:position]
    raise Broken(position)


class WithTable(Net):
    """Makes its table of parameters once per call, as loaders do that are written by hand."""

    def load_weights(self, weights):
        table = dict(self.named_parameters())
        for name, tensor in weights:
            name, _, shard = name.partition("/")
            table[name].weight_loader(table[name], tensor, int(shard))


@pytest.mark.holds("frameworks-A", "frameworks-I", "W3")
@pytest.mark.parametrize("model", [Net, WithTable, Collecting])
@pytest.mark.parametrize("position", range(7))
def test_a_load_that_broke_off_leaves_nothing_for_the_next_one(position, model, commit):
    """It breaks after any number of tensors, inside a layer or between two; the whole is sent
    again, or other weights are. No shard of the first attempt counts, none is left unprocessed."""
    live = Live(lambda: model(Fused(), Fused()), two_layers(1.0))
    session = live.open(commit=commit)
    with pytest.raises(Broken):
        session.load(breaking(two_layers(500.0), position))
    assert (session.state is SessionState.ABORTED) == (poison_of(live.model) is None)
    if session.state is SessionState.ABORTED:
        live.unchanged()
    for first in (20.0, 60.0):
        live.reload(iter(two_layers(first).items()), commit=commit)
        assert held_in(live.model.layers[0]) == [-first, -first - 1, -first - 2]
        assert held_in(live.model.layers[1]) == [-first - 10, -first - 11, -first - 12]
        live.equals(two_layers(first))


@pytest.mark.holds("frameworks-I2", "H03", "H12")
def test_layers_that_were_done_are_new_and_that_is_said():
    """In a stream, four shards bring one layer to its end: the model is a mixture and poisoned.
    In an atomic load the same failure leaves the model as it was."""
    live = Live(lambda: Net(Fused(), Fused()), two_layers(1.0))
    session = live.open(commit="atomic")
    with pytest.raises(Broken):
        session.load(breaking(two_layers(20.0), 4))
    live.unchanged()
    assert session.receipt.model_intact

    session = live.open()
    with pytest.raises(Broken):
        session.load(breaking(two_layers(20.0), 4))
    assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0]
    assert held_in(live.model.layers[1]) == [-11.0, -12.0, -13.0]
    assert session.state is SessionState.POISONED
    assert not session.receipt.model_intact
    assert "Broken" in poison_of(live.model).cause
    live.reload(two_layers(20.0))
    live.equals(two_layers(20.0))


class Raising(Fused):
    """Its loader raises at the last shard, if it is told to."""

    fails = False

    def load_shard(self, place, tensor, shard):
        if self.fails and shard == 2:
            raise Broken("the loader")
        super().load_shard(place, tensor, shard)


@pytest.mark.holds("frameworks-F")
def test_a_loader_that_raises_leaves_its_layer_where_it_was(commit):
    """Two of three shards had come. No tensor is on meta, and the model computes as before."""
    live = Live(lambda: Net(Raising()), shards(1.0))
    live.model.layers[0].fails = True
    with live.refuses(WeightMismatchError, NAMES[2], "Broken", commit=commit) as session:
        session.load(iter(shards(20.0).items()))
    live.unchanged()
    live.model.layers[0].fails = False
    live.reload(shards(20.0), commit=commit)
    live.equals(shards(20.0))


@pytest.mark.holds("frameworks-F2")
def test_finishing_in_a_finally_does_not_hide_what_went_wrong(commit):
    """The second error is that of a session that has ended; the first is its context, with a note
    that says whether the model is intact, and the model is."""
    live = Live(lambda: Net(Fused()), shards(1.0))
    session = live.open(commit=commit)
    with pytest.raises(InvalidTransitionError) as caught:
        _finish_anyway(session, breaking(shards(20.0), 2))
    first = caught.value.__context__
    assert isinstance(first, Broken)
    assert "no live weight was written" in first.__notes__[0]
    live.unchanged()
    live.reload(shards(20.0), commit=commit)
    live.equals(shards(20.0))


def _finish_anyway(session, source):
    try:
        session.load(source)
    finally:
        session.finish()


# ------------------------------------------------------------------------------ too much, too little


@pytest.mark.parametrize("second", [20.0, 21.0], ids=["equal", "another value"])
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(2, marks=pytest.mark.holds("frameworks-B")),
        pytest.param(3, marks=pytest.mark.holds("frameworks-C")),
    ],
)
def test_a_shard_that_comes_again_is_refused(before, second, commit):
    """Before its layer is complete, or when it has been processed: raw numbers never get in."""
    live = Live(lambda: Net(Fused()), shards(1.0))
    items = [*list(shards(20.0).items())[:before], (NAMES[0], number(second))]
    with live.refuses(DuplicateWeightError, NAMES[0], commit=commit) as session:
        session.load(iter(items))
    if session.state is SessionState.POISONED:
        assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0], "the complete layer"
    live.reload(shards(20.0), commit=commit)
    live.equals(shards(20.0))


class Aliased(Net):
    """Knows each shard under a second name, too."""

    def store(self, name, tensor):
        super().store(name.replace("alias", "weight"), tensor)


@pytest.mark.holds("frameworks-C")
@pytest.mark.parametrize("before", [1, 2, 3])
def test_a_shard_that_comes_again_under_another_name_is_refused(before, commit):
    """The loader has a place for the name, and the session never heard it before."""
    live = Live(lambda: Aliased(Fused()), shards(1.0))
    alias = "layers.0.alias/0"
    session = live.open(commit=commit)
    items = [*list(shards(20.0).items())[:before], (alias, number(99.0))]
    with pytest.raises(DuplicateWeightError, match=alias) as caught:
        _load_and_finish(session, iter(items))
    assert caught.value.model_intact == (poison_of(live.model) is None)
    if session.state is SessionState.ABORTED:
        live.unchanged()
    else:
        assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0], "not a raw 99"


@pytest.mark.holds("frameworks-G", "frameworks-R3", "W4", "W27")
@pytest.mark.parametrize(
    ("sent", "missing"),
    [
        ([0, 1, 2, 3, 4], "layers.1.weight [2:3]"),
        ([0, 1, 2], "layers.1.weight"),
        ([0, 4], "layers.0.weight [1:3]"),
        ([], "exhausted"),
    ],
    ids=["one shard", "one layer", "only one projection of each", "everything"],
)
def test_what_never_came_is_missing_by_name(sent, missing, commit):
    """Memory that nobody wrote does not become live, and old values do not stay unnoticed."""
    live = Live(lambda: Net(Fused(), Fused()), two_layers(1.0))
    items = list(two_layers(20.0).items())
    with live.refuses(IncompleteLoadError, missing, commit=commit) as session:
        session.load(iter([items[index] for index in sent]))
        session.finish()
    if len(sent) < 3:
        live.unchanged()
    live.reload(two_layers(20.0), commit=commit)
    live.equals(two_layers(20.0))


@pytest.mark.holds("W4")
def test_a_projection_alone_is_refused_where_all_three_are_packed_together(commit):
    """Declared as all that is coming, it does not even begin; the others are named."""
    live = Live(lambda: Net(Fused(), Fused()), two_layers(1.0))
    session = WeightLoadSession(live.model, commit=commit, scope=Scope.only([NAMES[0]]))
    with pytest.raises(IncompleteLoadError, match=f"{NAMES[1]}, {NAMES[2]}") as caught:
        session.prepare()
    assert caught.value.model_intact
    live.unchanged()
    live.reload(shards(20.0), commit=commit, scope=Scope.only(NAMES))
    live.equals({**two_layers(1.0), **shards(20.0)})


@pytest.mark.holds("frameworks-K")
def test_a_session_for_each_chunk_is_refused(commit):
    """Each chunk alone is incomplete, and the rows of the others are not garbage."""
    live = Live(lambda: Net(Fused()), shards(1.0))
    for name, tensor in shards(20.0).items():
        with live.refuses(IncompleteLoadError, "layers.0.weight", commit=commit) as session:
            session.load({name: tensor})
            session.finish()
        live.unchanged()


@pytest.mark.holds("frameworks-D")
def test_finishing_twice_changes_nothing(commit):
    """The second call is refused, with the model as the first one left it."""
    live = Live(lambda: Net(Fused()), shards(1.0))
    session = live.open(commit=commit, version=2)
    session.load(shards(20.0))
    receipt = session.finish()
    with pytest.raises(InvalidTransitionError, match="single use"):
        session.finish()
    assert session.receipt is receipt
    assert weights_version(live.model) == 2
    live.equals(shards(20.0))


@pytest.mark.holds("frameworks-E")
@pytest.mark.parametrize("position", [0, 2, 3, 6])
def test_a_load_that_nobody_finishes_leaves_no_tensor_without_memory(position, commit):
    """The caller forgot it: there is a warning, and the model is as it was or is poisoned."""
    live = Live(lambda: Net(Fused(), Fused()), two_layers(1.0))
    with pytest.warns(ResourceWarning, match="dropped without"):
        _open_and_forget(live, list(two_layers(20.0).items())[:position], commit)
    if commit == "atomic" or position < 3:
        live.unchanged()
        assert poison_of(live.model) is None
    else:
        live.in_place()
        assert "dropped" in poison_of(live.model).cause
    live.reload(two_layers(20.0), commit=commit)
    live.equals(two_layers(20.0))


def _open_and_forget(live, weights, commit):
    session = live.open(commit=commit)
    session.load(weights)
    del session
    gc.collect()


# ------------------------------------------------------------------------------ what hooks make


class Kernel:
    """Holds what the layer computes with; is made anew by each run of the hook."""

    def __init__(self, weight):
        self.scale = weight.abs()
        self.strides = torch.full((2,), weight.numel())


class WithKernel(nn.Module):
    """Its hook makes a kernel and a workspace, and negates the weight."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.kernel = None

    def process_weights_after_loading(self):
        self.kernel = Kernel(self.weight.detach())
        self.workspace = torch.zeros(4)
        self.weight.data.neg_()

    def forward(self, x):
        return x * self.weight + self.kernel.scale


@pytest.mark.holds("frameworks-L", "frameworks-R6", "W26")
def test_a_kernel_that_is_made_anew_has_the_tensors_that_graphs_know(commit):
    """The kernel is another object; scale, strides and workspace are the old tensors with new
    values, and the weight was negated once."""
    live = Live(lambda: Net(WithKernel()), {"layers.0.weight": number(1.0, -2.0)})
    layer = live.model.layers[0]
    scale, strides, workspace = layer.kernel.scale, layer.kernel.strides, layer.workspace
    for value in (5.0, 6.0):
        live.reload({"layers.0.weight": number(value, -value)}, commit=commit)
        assert layer.kernel.scale is scale
        assert layer.kernel.strides is strides
        assert layer.workspace is workspace
        assert scale.tolist() == [value, value]
        assert layer.weight.tolist() == [-value, value]


class WithViews(nn.Module):
    """Its hook keeps a view of the weight that it made, and a view of a copy."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(-self.weight.detach(), requires_grad=False)
        self.first = self.weight.detach()[:1]
        self.turned = (self.weight.detach() * 10).flip(0)[1:]

    def forward(self, x):
        return x * self.first + self.turned


@pytest.mark.holds("W26")
def test_a_view_that_a_hook_took_looks_into_the_live_weight(commit):
    """It is not left with the memory that was staged."""
    live = Live(lambda: Net(WithViews()), {"layers.0.weight": number(1.0, 2.0)})
    layer = live.model.layers[0]
    live.reload({"layers.0.weight": number(5.0, 6.0)}, commit=commit)
    assert layer.first.data_ptr() == layer.weight.data_ptr()
    assert (layer.first.tolist(), layer.turned.tolist()) == ([-5.0], [-50.0])
    live.equals({"layers.0.weight": number(5.0, 6.0)})


class Bound(nn.Parameter):
    """Brings its own loader, which writes into the parameter that it is bound to."""

    def load(self, place, tensor, shard):
        self.data[shard : shard + 1].copy_(tensor)


class WithBound(Fused):
    def __init__(self):
        super().__init__()
        self.weight = Bound(torch.full((3,), float("nan")), requires_grad=False)
        self.weight.weight_loader = self.weight.load


@pytest.mark.holds("frameworks-N")
def test_a_loader_that_is_bound_to_its_parameter_writes_into_the_staged_one(commit):
    """The hook packs in place, so that the live weight must not be written before it."""
    live = Live(lambda: Net(WithBound()), shards(1.0))
    live.reload(iter(shards(20.0).items()), commit=commit)
    assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0]
    live.look()
    with live.refuses(IncompleteLoadError, "[2:3]", commit=commit) as session:
        session.load(list(shards(60.0).items())[:2])
        session.finish()
    live.unchanged()


class Rotary(nn.Module):
    """Has a buffer that no checkpoint brings, one that a checkpoint may bring, and a weight."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.register_buffer("cache", number(3.0, 5.0), persistent=False)
        self.register_buffer("beta", number(0.5))

    def process_weights_after_loading(self):
        self.weight.data.neg_()

    def forward(self, x):
        return x * self.weight * self.cache + self.beta


@pytest.mark.holds("frameworks-R4", "W5")
def test_a_buffer_that_is_not_sent_keeps_its_value(commit):
    """Neither kind is filled from memory that nobody wrote."""
    live = Live(lambda: Net(Rotary()), {"layers.0.weight": number(1.0, 2.0)})
    live.reload({"layers.0.weight": number(5.0, 6.0)}, commit=commit)
    layer = live.model.layers[0]
    assert (layer.cache.tolist(), layer.beta.tolist()) == ([3.0, 5.0], [0.5])
    live.equals({"layers.0.weight": number(5.0, 6.0)})


@pytest.mark.holds("W5")
def test_a_buffer_that_the_first_load_brought_is_missed(commit):
    """To keep the old value would be a mixture of two checkpoints."""
    weight = {"layers.0.weight": number(1.0, 2.0)}
    live = Live(lambda: Net(Rotary()), {**weight, "layers.0.beta": number(0.25)})
    with live.refuses(IncompleteLoadError, "layers.0.beta", commit=commit) as session:
        session.load(weight)
        session.finish()


class Head(nn.Module):
    """Shares the weight of an embedding, and computes with a packed copy of its own."""

    role = Role.QUANT

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def process_weights_after_loading(self):
        self.packed = self.weight.detach() * 2

    def forward(self, x):
        return x * self.packed


class Tied(Net):
    """An embedding and a head that shares its weight, or has one of its own that may be equal."""

    def __init__(self, *, shared=True):
        embedding = Plain()
        super().__init__(embedding, Head(embedding.weight if shared else parameter(2)))


@pytest.mark.holds("frameworks-R7", "W2")
def test_both_of_two_tied_modules_have_the_new_weight(commit):
    """The head's packed copy is made again though only the embedding's name was sent."""
    live = Live(Tied, {"layers.0.weight": number(1.0, 2.0)})
    packed = live.model.layers[1].packed
    for value in (5.0, 6.0):
        live.reload({"layers.0.weight": number(value, -value)}, commit=commit)
        embedding, head = live.model.layers
        assert head.weight is embedding.weight
        assert embedding.weight.tolist() == [value, -value]
        assert head.packed is packed
        assert packed.tolist() == [2 * value, -2 * value]


class ByIdentity(Tied):
    """Skips names whose tensor it knows under another name already, as vLLM's loaders do."""

    def load_weights(self, weights):
        names = {}
        for name, place in self.named_parameters(remove_duplicate=False):
            names.setdefault(id(place), name)
        super().load_weights((name, tensor) for name, tensor in weights if name in names.values())


@pytest.mark.holds("W8")
def test_a_loader_that_tells_tied_tensors_by_identity_still_can(commit):
    """The name of the head is skipped during a load as it is outside of one."""
    live = Live(ByIdentity, {"layers.0.weight": number(1.0, 2.0)})
    value = number(5.0, 6.0)
    with WeightLoadSession(live.model, commit=commit) as session:
        session.load(iter([("layers.0.weight", value)]))
    live.equals({"layers.0.weight": value})
    with WeightLoadSession(live.model, commit=commit) as session:
        assert len({id(layer.weight) for layer in live.model.layers}) == 1
        session.load([("layers.0.weight", value * 2)])
    live.equals({"layers.0.weight": value * 2})


class TiesEqual(Framework):
    """Ties the head to the embedding if both arrived equal, when the first load is done."""

    def before_processing(self, model):
        embedding, head = model.layers
        if torch.equal(embedding.weight, head.weight):
            head.weight = embedding.weight


@pytest.mark.holds("W2b")
@pytest.mark.parametrize("order", [list, reversed], ids=["head last", "head first"])
@pytest.mark.parametrize("model", [Tied, ByIdentity])
def test_weights_that_would_have_to_be_untied_are_refused(model, order, commit):
    """Both were equal once and were tied. As long as they are equal all is well; when they are
    not, the model cannot hold both, whichever comes last."""
    both = {"layers.0.weight": number(1.0, 2.0), "layers.1.weight": number(1.0, 2.0)}
    plain = framework_for(model(shared=False))
    live = Live(lambda: model(shared=False), both, framework=TiesEqual(plain.registry))
    assert live.model.layers[1].weight is live.model.layers[0].weight
    equal = dict.fromkeys(both, number(5.0, 6.0))
    with WeightLoadSession(live.model, commit=commit) as session:
        session.load(iter(list(order(list(equal.items())))))
    assert live.model.layers[0].weight.tolist() == [5.0, 6.0]
    assert live.model.layers[1].packed.tolist() == [10.0, 12.0]
    live.look()
    differ = {"layers.0.weight": number(7.0, 8.0), "layers.1.weight": number(9.0, 9.0)}
    session = live.open(commit=commit)
    with pytest.raises((DuplicateWeightError, WeightMismatchError), match=r"layers\.1\.weight"):
        _load_and_finish(session, iter(list(order(list(differ.items())))))
    assert session.state.terminal
    if session.state is SessionState.ABORTED:
        live.unchanged()
    else:
        assert poison_of(live.model) is not None
        assert commit == "stream"


def _load_and_finish(session, weights):
    session.load(weights)
    session.finish()


class Guarded(nn.Module):
    """Packs once, and takes the weight for packed when it finds its kernel."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.kernel = None

    def process_weights_after_loading(self):
        if self.kernel is None:
            self.weight.data.copy_(self.weight.detach().flip(0) * 10)
            self.kernel = object()

    def forward(self, x):
        return x * self.weight


@pytest.mark.holds("W1")
def test_a_layer_that_packs_only_without_a_kernel_packs_again(commit):
    """The shape is the same, so that unpacked weights in its place would not show."""
    live = Live(lambda: Net(Guarded()), {"layers.0.weight": number(1.0, 2.0)})
    for value in (5.0, 6.0, 1.0):
        live.reload({"layers.0.weight": number(value, 2.0)}, commit=commit)
        assert held_in(live.model.layers[0]) == [20.0, 10 * value]


class Emptied(nn.Module):
    """Packs into a handle of its own and leaves an empty parameter behind."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)

    def process_weights_after_loading(self):
        self.packed = self.weight.detach() * 10
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x):
        return x * self.packed


@pytest.mark.holds("W6")
def test_a_weight_that_a_hook_emptied_can_be_loaded(commit):
    """A plain load has no room for it. In a session it has, and it is empty again afterwards."""
    live = Live(lambda: Net(Emptied()), {"layers.0.weight": number(1.0, 2.0)})
    state = {"layers.0.weight": number(5.0, 6.0)}
    with pytest.raises(ValueError, match=r"\(2,\) for \(0,\)"):
        live.model.load_weights(state.items())
    live.reload(state, commit=commit)
    assert live.model.layers[0].packed.tolist() == [50.0, 60.0]
    live.equals(state)


class Defaults(nn.Module):
    """A scale of -1 until one comes, and padding of zeros that the loader leaves alone."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(4, fill=0.0, loader=self.load_front)
        self.scale = parameter(1, fill=-1.0)

    def load_front(self, place, tensor):
        place.data[:2].copy_(tensor)

    def process_weights_after_loading(self):
        factor = 7.0 if self.scale.item() == -1.0 else self.scale.item()
        self.weight.data.copy_((self.weight.detach() + 1).flip(0) * factor)
        del self.scale

    def forward(self, x):
        return x * self.weight[2:] + self.weight[:2]


@pytest.mark.holds("W10")
def test_defaults_and_padding_are_what_they_were_constructed_with(commit):
    """Both are gone from the live model: the padding was packed and the scale deleted."""
    state = {"layers.0.weight": number(1.0, 2.0)}
    live = Live(lambda: Net(Defaults()), state, scope=Scope.full(allow_missing=["*.scale"]))
    for value in (5.0, 6.0):
        live.reload({"layers.0.weight": number(value, -1.0)}, commit=commit)
        assert held_in(live.model.layers[0]) == [7.0, 7.0, 0.0, 7 * (value + 1)]


class Biased(nn.Module):
    """Its hook packs weight and bias; the bias by rebinding `.data`, so that it moves."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.bias = parameter(2)

    def process_weights_after_loading(self):
        self.weight.data.neg_()
        self.bias.data = self.bias.data.flip(0).clone()

    def forward(self, x):
        return x * self.weight + self.bias


@pytest.mark.holds("W11", "W12")
def test_a_bias_is_staged_like_everything_that_a_hook_changes(commit):
    """The weight did not come. The bias had, and the live one was not written; it is flipped once
    in the load that is complete, and never moves."""
    live = Live(
        lambda: Net(Biased()),
        {"layers.0.weight": number(1.0, 2.0), "layers.0.bias": number(3.0, 4.0)},
    )
    weight, bias = {"layers.0.weight": number(5.0, 6.0)}, {"layers.0.bias": number(7.0, 8.0)}
    for sent, missing in ((bias, "layers.0.weight"), (weight, "layers.0.bias")):
        with live.refuses(IncompleteLoadError, missing, commit=commit) as session:
            session.load(iter(sent.items()))
            session.finish()
        live.unchanged()
    for _ in range(2):
        live.reload({**bias, **weight}, commit=commit)
        assert live.model.layers[0].bias.tolist() == [8.0, 7.0]
        live.equals({**weight, **bias})


# ------------------------------------------------------------------------------ loaders


@pytest.mark.holds("W13")
@pytest.mark.parametrize("ends", ["finish", "abort"])
def test_no_loader_is_left_changed(ends, commit):
    """Afterwards a plain load outside of any session writes where it always did."""
    live = Live(lambda: Net(Fused(), Plain()), {**shards(1.0), "layers.1.weight": number(1.0, 2.0)})
    loader = live.model.layers[0].weight.weight_loader
    session = live.open(commit=commit)
    if ends == "finish":
        session.load({**shards(20.0), "layers.1.weight": number(3.0, 4.0)})
    getattr(session, ends)()
    assert live.model.layers[0].weight.weight_loader == loader
    assert vars(live.model.layers[1].weight) == {}
    live.model.load_weights([(NAMES[1], number(99.0)), ("layers.1.weight", number(8.0, 9.0))])
    assert live.model.layers[0].weight[1].item() == 99.0
    assert held_in(live.model.layers[1]) == [8.0, 9.0]


class CallableLoader:
    """A loader that is an object without a name."""

    def __call__(self, place, tensor, shard):
        place.data[shard : shard + 1].copy_(tensor)


def load_with(scale, place, tensor, shard):
    place.data[shard : shard + 1].copy_(tensor * scale)


@pytest.mark.holds("W15")
@pytest.mark.parametrize(
    "loader", [functools.partial(load_with, 1.0), CallableLoader(), CallableLoader().__call__]
)
def test_any_callable_may_be_a_loader(loader, commit):
    """A partial has no name and an object has no code."""

    def factory():
        model = Net(Fused())
        model.layers[0].weight.weight_loader = loader
        return model

    live = Live(factory, shards(1.0))
    live.reload(shards(20.0), commit=commit)
    assert held_in(live.model.layers[0]) == [-20.0, -21.0, -22.0]
    live.equals(shards(20.0))


class Looking(Fused):
    """Its loader counts, looks at what is there, and spreads one number over a place of two."""

    def __init__(self):
        super().__init__()
        self.scale = parameter(2, fill=1.0, loader=self.load_scale)
        self.calls = []

    def load_shard(self, place, tensor, shard):
        self.calls.append((shard, str(place.device)))
        super().load_shard(place, tensor, shard)

    def load_scale(self, place, tensor):
        self.calls.append(("scale", str(place.device)))
        if place.data[0] != 1.0:
            raise ValueError("there is a scale already")
        place.data[:] = tensor

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.scale.data.mul_(10)

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.long_way("counts calls of loaders")
@pytest.mark.holds("W17")
def test_each_loader_runs_once_on_real_memory(commit):
    """One that looks at values finds those of construction; one that counts counts to one."""
    live = Live(lambda: Net(Looking()), {**shards(1.0), "layers.0.scale": number(2.0)})
    layer = live.model.layers[0]
    layer.calls.clear()
    live.reload({**shards(20.0), "layers.0.scale": number(3.0)}, commit=commit)
    assert layer.calls == [(0, "cpu"), (1, "cpu"), (2, "cpu"), ("scale", "cpu")]
    assert layer.scale.tolist() == [30.0, 30.0]
    live.equals({**shards(20.0), "layers.0.scale": number(3.0)})


class Rebinding(Plain):
    """Its loader rebinds `.data` in place of a copy, if it is told to."""

    rebinds = False

    def __init__(self):
        super().__init__()
        self.weight.weight_loader = self.load

    def load(self, place, tensor):
        if self.rebinds:
            place.data = tensor.clone()
        else:
            place.data.copy_(tensor)


@pytest.mark.holds("W17")
def test_a_loader_that_rebinds_its_parameter_does_not_finish(commit):
    """Graphs know the old memory."""
    live = Live(lambda: Net(Rebinding()), {"layers.0.weight": number(1.0, 2.0)})
    live.model.layers[0].rebinds = True
    session = live.open(commit=commit)
    with pytest.raises((StorageChangedError, IncompleteLoadError), match=r"layers\.0\.weight"):
        _load_and_finish(session, {"layers.0.weight": number(5.0, 6.0)})
    assert session.state.terminal


# ------------------------------------------------------------------------------ what does not fit


class Sized(nn.Module):
    """What its hook makes has another shape or dtype when a value is large."""

    role = Role.QUANT

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = parameter(2)

    def process_weights_after_loading(self):
        weight = self.weight.detach()
        large = weight.max() > 65504
        if self.kind == "dtype":
            weight = weight if large else weight.half()
        elif large:
            weight = weight[:1]
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x):
        return x * self.weight.float()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param(
            "dtype", "dtype torch.float16 became torch.float32", marks=pytest.mark.holds("W19")
        ),
        pytest.param("shape", "shape (2,) became (1,)", marks=pytest.mark.holds("W18")),
    ],
)
def test_what_a_hook_makes_must_fit_the_live_tensor(kind, said, commit):
    """It is neither broadcast nor cast, in which 1e6 would become infinite."""
    live = Live(lambda: Net(Sized(kind)), {"layers.0.weight": number(1.0, 2.0)})
    with live.refuses(StorageChangedError, "layers.0.weight", said, commit=commit) as session:
        session.load({"layers.0.weight": number(1e6, 2.0)})
        session.finish()
    live.unchanged()
    live.reload({"layers.0.weight": number(5.0, 6.0)}, commit=commit)
    live.equals({"layers.0.weight": number(5.0, 6.0)})


class Failing(Fused):
    fails = False

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        if self.fails:
            raise Broken("the hook")


@pytest.mark.holds("W14")
def test_a_hook_that_raises_fails_the_load(commit):
    """Finishing afterwards does not succeed, and the layer has its old values in its old place."""
    live = Live(lambda: Net(Failing()), shards(1.0))
    live.model.layers[0].fails = True
    with live.refuses(ProcessingError, "'layers.0'", "Broken", commit=commit) as session:
        session.load(iter(shards(20.0).items()))
        session.finish()
    live.unchanged()
    with pytest.raises(InvalidTransitionError):
        session.finish()
    live.model.layers[0].fails = False
    live.reload(shards(20.0), commit=commit)
    live.equals(shards(20.0))


# ------------------------------------------------------------------------------ surroundings


class Ambient(nn.Module):
    """Its hook makes a tensor of the default dtype, on the default device."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2, dtype=torch.float32)

    def process_weights_after_loading(self):
        self.scale = torch.ones(2) * 3
        self.weight.data.neg_()

    def forward(self, x):
        return x * self.weight * self.scale


@pytest.mark.holds("W7")
def test_a_hook_finds_the_default_dtype_of_the_first_load(commit):
    """It was bfloat16 then, and is float32 where the reload is called."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        live = Live(lambda: Net(Ambient()), {"layers.0.weight": number(1.0, 2.0)})
    finally:
        torch.set_default_dtype(torch.float32)
    scale = live.model.layers[0].scale
    assert scale.dtype is torch.bfloat16
    live.reload({"layers.0.weight": number(5.0, 6.0)}, commit=commit)
    assert live.model.layers[0].scale is scale
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.holds("W20")
def test_a_default_device_around_a_reload_does_not_matter(commit):
    """It is called where everything new goes to meta; the hook's tensors are as at first."""
    live = Live(lambda: Net(Ambient()), {"layers.0.weight": number(1.0, 2.0)})
    state = {"layers.0.weight": number(5.0, 6.0)}
    with torch.device("meta"):
        live.reload(state, commit=commit)
        assert torch.empty(1).is_meta, "and it is as it was afterwards"
    assert live.model.layers[0].scale.tolist() == [3.0, 3.0]
    live.equals(state)


@pytest.mark.holds("W21")
@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
def test_a_tensor_that_was_added_after_the_first_load_stays(kind, commit):
    """No hook makes it again and no checkpoint brings it."""
    live = Live(lambda: Net(WithViews()), {"layers.0.weight": number(1.0, 2.0)})
    layer, added = live.model.layers[0], number(8.0, 9.0)
    if kind == "parameter":
        layer.register_parameter("added", nn.Parameter(added, requires_grad=False))
    elif kind == "buffer":
        layer.register_buffer("added", added)
    else:
        layer.added = added
    live.look()
    live.reload({"layers.0.weight": number(5.0, 6.0)}, commit=commit)
    assert layer.added.tolist() == [8.0, 9.0]
    assert layer.weight.tolist() == [-5.0, -6.0]


class WithModelHook(Net):
    """Has a hook of its own, which reads what the hooks of its layers made."""

    def process_weights_after_loading(self):
        self.total = self.layers[0].weight.detach().clone()
        self.runs = getattr(self, "runs", 0) + 1


class ModelHooks(Framework):
    def model_rule(self, model):
        return ModuleRule(
            role=Role.DERIVED, process=lambda model: model.process_weights_after_loading()
        )


@pytest.mark.holds("W25")
def test_the_hook_of_the_model_as_a_whole_runs_after_all_others(commit):
    """It runs in each load once, and what it makes stays where it is."""
    factory = lambda: WithModelHook(Negated())  # noqa: E731
    registry = framework_for(factory()).registry
    registry.register(WithModelHook, ModuleRule(role=Role.IGNORED, reason="see model_rule"))
    live = Live(factory, {"layers.0.weight": number(1.0, 2.0)}, framework=ModelHooks(registry))
    total = live.model.total
    for value in (5.0, 6.0):
        live.reload({"layers.0.weight": number(value, 2.0)}, commit=commit)
        assert live.model.total is total
        assert total.tolist() == [-value, -2.0]
        assert live.model.runs == 1, "it counts from where it was before the first run"


@pytest.mark.holds("W28")
def test_what_a_load_in_progress_shows():
    """Nothing is ever on meta. In an atomic load, every layer has its old values to the end."""
    live = Live(lambda: Net(Fused(), Plain()), {**shards(1.0), "layers.1.weight": number(1.0, 2.0)})
    held = live.held["layers.0.weight"], live.held["layers.1.weight"]
    seen = []

    def source():
        for pair in {**shards(20.0), "layers.1.weight": number(8.0, 9.0)}.items():
            yield pair
            assert not any(place.is_meta for place in live.model.parameters())
        seen.extend(tensor.tolist() for tensor in held)

    live.reload(source(), commit="atomic")
    assert seen == [[-1.0, -2.0, -3.0], [1.0, 2.0]]
    assert [tensor.tolist() for tensor in held] == [[-20.0, -21.0, -22.0], [8.0, 9.0]]
    live.reload(source())
    assert seen[2:] == [[-20.0, -21.0, -22.0], [8.0, 9.0]], "a stream goes layer by layer"
