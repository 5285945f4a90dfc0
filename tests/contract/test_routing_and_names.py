"""A tensor goes to the rank, the expert, the rows and the name that it is for, or it is refused.

Nothing of this shows in shapes: a wrong slice, swapped rows and a skipped name all leave a model
that loads and serves. Values here tell ranks and rows apart.
"""

import pytest
import torch
from small import COMMITS, Fused, Live, Negated, Net, Plain, framework_for, number, parameter
from torch import nn

from weightload import (
    DuplicateWeightError,
    IncompleteLoadError,
    Role,
    UnexpectedWeightError,
    UnsupportedError,
    WeightLoadSession,
    WeightMismatchError,
)


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


# ------------------------------------------------------------------------------ ranks


class Replicated(nn.Module):
    """Takes the first half on every rank; what its hook makes anew carries the global rank."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2, loader=self.load_slice)
        self.weight.rank = 0

    def load_slice(self, place, tensor):
        place.data.copy_(tensor[2 * place.rank :][:2])

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(-self.weight.detach(), requires_grad=False)
        self.weight.weight_loader = self.load_slice
        self.weight.rank = 1

    def forward(self, x):
        return x * self.weight


@pytest.mark.holds("E01")
def test_a_loader_finds_the_rank_that_its_parameter_was_constructed_with(commit):
    """The hook stamps another rank on what it makes; a plain second load takes its slice."""
    live = Live(lambda: Net(Replicated()), {"layers.0.weight": number(1.0, 2.0, 3.0, 4.0)})
    sent = {"layers.0.weight": number(10.0, 20.0, 30.0, 40.0)}
    live.model.load_weights(sent.items())
    assert live.model.layers[0].weight.tolist() == [30.0, 40.0], "this is the defect"
    for factor in (1, 2):
        state = {name: factor * tensor for name, tensor in sent.items()}
        live.reload(state, commit=commit)
        assert live.model.layers[0].weight.tolist() == [-10.0 * factor, -20.0 * factor]
        live.equals(state)


class ByArgument(Net):
    """Passes the shard to the loader on one way, and forgets it on another."""

    forgets = False

    def store(self, name, tensor):
        name, _, shard = name.partition("/")
        place = self.get_parameter(name)
        place.weight_loader(place, tensor, *([] if self.forgets else [int(shard)]))


class DefaultShard(Fused):
    def load_shard(self, place, tensor, shard=0):
        super().load_shard(place, tensor, shard)


def fused(first):
    return {f"layers.0.weight/{shard}": number(first + shard) for shard in range(3)}


@pytest.mark.holds("E02")
def test_three_shards_that_all_go_to_the_first_place_are_refused(commit):
    """The loader has a default for the argument that nobody passes."""
    live = Live(lambda: ByArgument(DefaultShard()), fused(1.0))
    live.model.forgets = True
    names = ("layers.0.weight/0", "layers.0.weight/1")
    with live.refuses(DuplicateWeightError, *names, commit=commit) as session:
        session.load(fused(10.0))
    live.model.forgets = False
    live.reload(fused(10.0), commit=commit)
    live.equals(fused(10.0))


class Sharded(nn.Module):
    """Keeps the two elements of its rank."""

    role = Role.QUANT

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.weight = parameter(2, loader=self.load_slice)

    def load_slice(self, place, tensor):
        place.data.copy_(tensor.narrow(0, 2 * self.rank, 2))

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(-self.weight.detach(), requires_grad=False)

    def forward(self, x):
        return x * self.weight


class CutsAsWell(Net):
    """Cuts what it is sent for its rank, before a loader does so again."""

    twice = False

    def store(self, name, tensor):
        if self.twice:
            tensor = tensor.narrow(0, 2 * self.layers[0].rank, 2)
        super().store(name, tensor)


@pytest.mark.holds("E02", "E05")
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_gets_its_own_part_and_a_second_cut_is_refused(rank, commit):
    """Every element says for which rank it is. Cut twice, the tensor is right on rank 0 by luck,
    and has nothing left for the others."""
    live = Live(
        lambda: CutsAsWell(Sharded(rank)), {"layers.0.weight": number(0.0, 0.5, 1.0, 1.5, 2.0, 2.5)}
    )
    state = {"layers.0.weight": number(10.0, 10.5, 11.0, 11.5, 12.0, 12.5)}
    live.reload(state, commit=commit)
    assert live.model.layers[0].weight.tolist() == [-10.0 - rank, -10.5 - rank]
    live.look()
    live.model.twice = True
    if rank == 0:
        live.reload(state, commit=commit)
    else:
        with live.refuses(WeightMismatchError, "layers.0.weight", commit=commit) as session:
            session.load(state)
    live.equals(state)


class Interleaved(nn.Module):
    """Keeps two projections with alternating elements; its hook reverses them."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(4, loader=self.load_every_second)

    def load_every_second(self, place, tensor, shard):
        place.data[shard::2].copy_(tensor)

    def process_weights_after_loading(self):
        self.weight.data.copy_(self.weight.detach().flip(0))

    def forward(self, x):
        return x * self.weight[:2] + self.weight[2:]


class TakesBothForms(Net):
    """Takes the two projections apart, or one after the other in one tensor."""

    def store(self, name, tensor):
        if "/" in name:
            super().store(name, tensor)
        else:
            for shard, part in enumerate(tensor.chunk(2)):
                super().store(f"{name}/{shard}", part)


@pytest.mark.holds("E04")
def test_a_tensor_of_the_right_shape_is_not_copied_past_the_loader(commit):
    """In one tensor the projections have the shape of the parameter, and another order."""
    live = Live(
        lambda: TakesBothForms(Interleaved()),
        {"layers.0.weight/0": number(1.0, 2.0), "layers.0.weight/1": number(3.0, 4.0)},
    )
    assert live.model.layers[0].weight.tolist() == [4.0, 2.0, 3.0, 1.0]
    whole = {"layers.0.weight": number(5.0, 6.0, 7.0, 8.0)}
    live.reload(whole, commit=commit)
    assert live.model.layers[0].weight.tolist() == [8.0, 6.0, 7.0, 5.0]
    live.equals(whole)


# ------------------------------------------------------------------------------ experts


class Experts(nn.Module):
    """Two of four experts, those of this rank."""

    role = Role.QUANT

    def __init__(self, first=2):
        super().__init__()
        self.first = first
        self.weight = parameter(2, 2)

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)

    def forward(self, x):
        return x @ self.weight


class Parallel(Net):
    """Skips the experts of other ranks; may forget to do so when all come in one tensor."""

    narrows = True

    def __init__(self, *layers):
        super().__init__(*layers)
        self.seen = {}

    def store(self, name, tensor):
        self.seen[name] = tensor.data_ptr()
        name, _, expert = name.partition("/")
        place, first = self.get_parameter(name), self.layers[0].first
        if not expert:
            local = tensor[first : first + 2] if self.narrows else tensor
            if local.shape != place.shape:
                raise ValueError(f"{tuple(local.shape)} for {tuple(place.shape)}")
            place.data.copy_(local)
        elif first <= int(expert) < first + 2:
            place.data[int(expert) - first].copy_(tensor)


def packed(first):
    return {"layers.0.weight": torch.arange(first, first + 8).view(4, 2)}


def apart(first):
    return {f"layers.0.weight/{e}": row for e, row in enumerate(packed(first)["layers.0.weight"])}


@pytest.mark.holds("E06")
def test_packed_experts_that_are_not_cut_for_their_rank_are_refused(commit):
    """All four came for a place that has room for two."""
    live = Live(lambda: Parallel(Experts()), packed(1.0))
    assert live.model.layers[0].weight.tolist() == [[5.0, 7.0], [6.0, 8.0]]
    live.model.narrows = False
    with live.refuses(WeightMismatchError, "layers.0.weight", "(4, 2)", commit=commit) as session:
        session.load(packed(10.0))
    live.model.narrows = True
    live.reload(packed(10.0), commit=commit)
    live.equals(packed(10.0))


@pytest.mark.long_way("asks what a loader sees")
@pytest.mark.holds("E06", "E07")
@pytest.mark.parametrize("how", ["mapping", "stream that owns its tensors"])
def test_the_experts_of_other_ranks_are_counted_and_not_copied(how, commit):
    """What is skipped is told apart from what is used, and the loader sees the sender's memory."""
    live = Live(lambda: Parallel(Experts()), apart(1.0))
    state = apart(10.0)
    with WeightLoadSession(live.model, commit=commit) as session:
        if how == "mapping":
            session.load(state)
        else:
            session.load(iter(state.items()), transport=[])
    assert (session.receipt.consumed.count, session.receipt.skipped.count) == (2, 2)
    assert live.model.seen == {name: tensor.data_ptr() for name, tensor in state.items()}
    live.equals(state)


class Placed(Net):
    """Has four experts, and a table that says in which row each of them is."""

    asks = False

    def __init__(self):
        super().__init__(Plain(4))
        self.places = [0, 1, 2, 3]

    def store(self, name, tensor):
        expert = int(name[-1])
        row = self.places[expert] if self.asks else expert
        self.layers[0].weight.data[row : row + 1].copy_(tensor)

    def weights(self):
        return [self.layers[0].weight[row].item() for row in self.places]


class Balancer:
    """Moves experts, some of them later in the background; it alone knows when that is over."""

    def __init__(self, model):
        self.model = model
        self.pending = None

    def move(self, places):
        rows = self.model.layers[0].weight
        rows.data.copy_(number(*(self.model.weights()[places.index(row)] for row in range(4))))
        self.model.places = places

    def veto(self, model):
        if self.pending is not None:
            return "experts are being moved; wait for it"
        if model.places != [0, 1, 2, 3]:
            return "experts are not where the checkpoint's names are for; move them back"
        return None


def experts(*values):
    return {f"expert.{index}": number(value) for index, value in enumerate(values)}


@pytest.mark.holds("E03")
def test_whoever_moves_experts_can_refuse_a_load(commit):
    """The loader writes to the rows of the first load, where other experts are by now. The owner
    of the table refuses until they are back, and until nothing is moved in the background."""
    live = Live(Placed, experts(10.0, 20.0, 30.0, 40.0))
    balancer = Balancer(live.model)
    balancer.move([0, 2, 1, 3])
    assert live.model.weights() == [10.0, 20.0, 30.0, 40.0]
    live.reload(experts(110.0, 120.0, 130.0, 140.0), commit=commit)
    assert live.model.weights() == [110.0, 130.0, 120.0, 140.0], "this is the defect"

    live.look()
    for pending in (None, "a copy"):
        balancer.pending = pending
        with pytest.raises(UnsupportedError, match="experts are"):
            live.open(commit=commit, veto=[balancer.veto])
        live.unchanged()
    balancer.pending = None
    balancer.move([0, 1, 2, 3])
    live.reload(experts(110.0, 120.0, 130.0, 140.0), commit=commit, veto=[balancer.veto])
    assert live.model.weights() == [110.0, 120.0, 130.0, 140.0]


@pytest.mark.holds("E03")
def test_a_loader_that_asks_where_an_expert_is_finds_the_present_place(commit):
    """Nothing of where the first load wrote is taken for granted."""
    live = Live(Placed, experts(10.0, 20.0, 30.0, 40.0))
    live.model.asks = True
    Balancer(live.model).move([3, 0, 1, 2])
    live.reload(iter(experts(110.0, 120.0, 130.0, 140.0).items()), commit=commit)
    assert live.model.weights() == [110.0, 120.0, 130.0, 140.0]


# ------------------------------------------------------------------------------ names


class Renaming(Net):
    """Gives names to its layers by a mapper that can be broken in one of several ways."""

    broken = None

    def store(self, name, tensor):
        if self.broken == "skips the head" and not name.startswith("layers."):
            return
        if self.broken == "skips before it maps" and name.endswith("_inv"):
            return
        name = name.removesuffix("_inv")
        name = name.replace("head.", "layers.1.")
        if self.broken == "maps a substring":
            name = name.replace("w", "qkw").replace("kw", "kqkw")
        if self.broken == "goes on" and "extra" in name:
            return  # with a warning, in a model that means well
        super().store(name, tensor)


def named(first):
    return {"layers.0.weight_inv": number(first, 2.0), "head.weight": number(first, 4.0)}


BROKEN = [
    pytest.param(
        "skips the head", IncompleteLoadError, "layers.1.weight", marks=pytest.mark.holds("F01")
    ),
    pytest.param(
        "skips before it maps",
        IncompleteLoadError,
        "layers.0.weight",
        marks=pytest.mark.holds("F02"),
    ),
    pytest.param(
        "maps a substring",
        WeightMismatchError,
        "layers.0.weight_inv",
        marks=pytest.mark.holds("F03"),
    ),
]


@pytest.mark.parametrize(("how", "error", "name"), BROKEN)
def test_a_name_that_a_mapper_loses_is_missed(how, error, name, commit):
    """The model itself says nothing, or that it has no such parameter: the load fails by name."""
    live = Live(lambda: Renaming(Negated(), Plain()), named(1.0))
    live.model.broken = how
    with live.refuses(error, name, commit=commit) as session:
        session.load(iter(named(10.0).items()))
        session.finish()
    live.model.broken = None
    live.reload(named(10.0), commit=commit)
    live.equals(named(10.0))


@pytest.mark.parametrize(("how", "error", "name"), BROKEN)
def test_a_name_that_a_mapper_loses_at_the_first_load_is_missed_as_well(how, error, name):
    """Nothing is known of the names then; that a parameter got nothing is known."""
    model = Renaming(Negated(), Plain())
    model.broken = how
    session = WeightLoadSession(model, framework=framework_for(model))
    session.prepare()
    with pytest.raises(error, match=name):
        _load_and_finish(session, named(1.0))


def _load_and_finish(session, state):
    session.load(state)
    session.finish()


@pytest.mark.holds("F05")
def test_a_name_that_is_only_warned_about_is_refused(commit):
    """The mapped name has no destination; the model goes on. Nothing was written by then."""
    live = Live(lambda: Renaming(Negated(), Plain()), named(1.0))
    live.model.broken = "goes on"
    sent = {**named(10.0), "layers.0.extra": number(1.0)}
    with live.refuses(UnexpectedWeightError, "layers.0.extra", commit=commit) as session:
        session.load(sent)
    live.unchanged()
    live.reload(named(10.0), commit=commit)
    live.equals(named(10.0))


class Prefixed(Net):
    """The same layers under other names, as a model that wraps another one has them."""

    def store(self, name, tensor):
        prefix, _, rest = name.partition(".")
        if prefix != "model":
            raise KeyError(name)
        super().store(rest, tensor)


@pytest.mark.holds("F04")
def test_names_of_another_model_are_refused_before_any_write(commit):
    """A trainer bypassed the mapper: every name has a prefix that this model does not know."""
    live = Live(lambda: Net(Negated(), Plain()), _plain(1.0))
    wrapped = {f"model.{name}": tensor for name, tensor in _plain(10.0).items()}
    with live.refuses(UnexpectedWeightError, "model.layers.0.weight", commit=commit) as session:
        session.load(wrapped)
    live.unchanged()


@pytest.mark.holds("F04", "H16")
def test_one_list_is_received_once_and_feeds_two_models_with_mappers_of_their_own(commit):
    """A target and a draft map names in opposite directions; neither changes the list."""
    received = [(f"model.{name}", tensor) for name, tensor in _plain(1.0).items()]
    target, draft = Prefixed(Negated(), Plain()), Unprefixing(Negated(), Plain())
    framework = framework_for(target, draft)
    for value in (1.0, 10.0):
        received = [(f"model.{name}", tensor) for name, tensor in _plain(value).items()]
        names = [name for name, _ in received]
        for model in (target, draft):
            with WeightLoadSession(model, framework=framework, commit=commit) as session:
                session.load(received)
            assert model.layers[0].weight.tolist() == [-value, -2.0]
            assert model.layers[1].weight.tolist() == [value, 4.0]
        assert [name for name, _ in received] == names


class Unprefixing(Net):
    def load_weights(self, weights):
        super().load_weights((name.removeprefix("model."), tensor) for name, tensor in weights)


def _plain(first):
    return {"layers.0.weight": number(first, 2.0), "layers.1.weight": number(first, 4.0)}


class Adapter(nn.Module):
    """Wraps a layer, and puts a segment into its names."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x) + 1


@pytest.mark.holds("F06")
def test_names_that_miss_a_wrapped_layer_are_refused_and_those_that_hit_it_are_right(commit):
    """An adapter was put around a layer after the first load."""
    live = Live(lambda: Net(Negated(), Plain()), _plain(1.0))
    inner = live.model.layers[0]
    live.model.layers[0] = Adapter(inner)
    live.look()
    with live.refuses(WeightMismatchError, "layers.0.weight", commit=commit) as session:
        session.load(_plain(10.0))
    live.unchanged()
    sent = {name.replace("0.w", "0.base_layer.w"): tensor for name, tensor in _plain(10.0).items()}
    live.reload(sent, commit=commit)
    assert inner.weight.tolist() == [-10.0, -2.0]
    live.model.layers[0] = inner
    live.look()
    live.reload(_plain(20.0), commit=commit)
    live.equals(_plain(20.0))


class Gathering(torch.nn.Module):
    """Writes one tensor once all of its three parts have come."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(6, 2), requires_grad=False)
        self.rest = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.parts = {}

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "rest":
                self.rest.data.copy_(tensor)
                continue
            self.parts[name] = tensor
            if len(self.parts) == 3:
                self.qkv.data.copy_(torch.cat([self.parts.pop(part) for part in "qkv"]))


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_parts_that_a_loader_gathers_may_come_in_any_order(commit, each, plans):
    """What was computed counts for the name that came last, which is another one each time."""
    model = Gathering()
    orders = (
        ["q", "k", "v", "rest"],
        ["q", "k", "v", "rest"],
        ["v", "rest", "k", "q"],
        [*"kvq", "rest"],
    )
    for order in orders:
        state = {name: torch.randn(2, 2) if name != "rest" else torch.randn(2) for name in order}
        with WeightLoadSession(model, commit=commit, plans=plans) as session:
            for pairs in [[pair] for pair in state.items()] if each else [state]:
                session.load(pairs)
        assert torch.equal(model.qkv, torch.cat([state[part] for part in "qkv"]))
        assert torch.equal(model.rest, state["rest"])
