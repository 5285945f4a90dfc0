"""A dry run writes nothing and leaves no trace; a load by what it recorded gives the fresh model.

The damage shown: a model that was put into the form that loaders expect, and not back; loaders that
somebody else had put on parameters, taken for one's own and lost; a plan that names a part of a
source that goes elsewhere, or leaves out what a loader computes; a plan that was damaged on its way, or
is that of another rank, and writes where it must not.
"""

import json
import pickle
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from weightload import (
    CheckpointError,
    IncompleteLoadError,
    ModelBusyError,
    Plan,
    Scope,
    UsageError,
    WeightLoadSession,
    WeightMismatchError,
    bake,
    open_session,
    ownership,
)
from weightload.plan import Form, View, Write
from weightload.replaying import part_of
from weightload.testing import (
    TOYS,
    Bench,
    CollectingModel,
    LoadingModel,
    ToyModel,
    check_equal,
    layers,
    loading,
    make_state,
    toy_framework,
)
from weightload.testing.inventory import Inventory
from weightload.testing.layers import WIDTH, parameter


def forms(state):
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


@pytest.mark.parametrize("name", sorted(TOYS))
def test_a_dry_run_leaves_every_attribute_and_every_tensor_as_it_was(name):
    """Compared by identity, address and bits; also on a model that was never loaded."""
    bench = Bench(TOYS[name])
    for model, framework in ((bench.model, None), (bench.factory(), toy_framework())):
        before = Inventory.of(model)
        bake(model, forms(bench.state(2)), framework=framework)
        assert before.differences(Inventory.of(model)) == []
    bench.check_structure()
    check_equal(bench.model, bench.factory, bench.serves)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("name", sorted(TOYS))
def test_a_load_by_the_recorded_writes_gives_the_fresh_model(name, commit):
    """The plan travels as JSON, and only the parts that it names are there to be read."""
    bench = Bench(TOYS[name])
    plan = Plan.from_plain(
        json.loads(json.dumps(bake(bench.model, forms(bench.state(2))).to_plain()))
    )
    for seed in (2, 1):
        state = bench.state(seed)
        parts = {
            (name, view): part_of(state[name], view).clone() for name, view in plan.all_reads()
        }
        with WeightLoadSession(bench.model, commit=commit, verify="full") as session:
            session.replay(plan, lambda *part, parts=parts: parts.pop(part))
        assert parts == {}, "a part was asked for and not used"
        bench.serves = state
        bench.check_finished(session)


@pytest.mark.parametrize("name", sorted(TOYS))
def test_a_first_load_can_be_done_by_a_plan(name):
    """The plan of a model that was never loaded is that of a loaded one."""
    factory, framework = TOYS[name], toy_framework()
    model, state = factory(), make_state(factory, 1)
    plan = bake(model, forms(state), framework=framework)
    assert plan == bake(Bench(factory).model, forms(state))
    scope = Scope.full(allow_missing=model.may_miss)
    with WeightLoadSession(model, framework=framework, scope=scope) as session:
        session.replay(plan, state)
    check_equal(model, factory, state)


def test_a_plan_is_what_one_works_out_by_hand():
    """A fused weight takes each shard whole into its rows; the expert stack one slice each."""
    model = LoadingModel(loading.FusedLinear(2), loading.ExpertStack())
    state = make_state(lambda: model, 1)
    plan = bake(model, forms(state), framework=toy_framework())
    whole = View(offset=0, shape=(WIDTH, WIDTH), stride=(WIDTH, 1), dtype="float32")
    second = View(offset=WIDTH * WIDTH, shape=(WIDTH, WIDTH), stride=(WIDTH, 1), dtype="float32")
    for name, module, tensor in (
        ("layers.0.weight/1", "layers.0", "weight"),
        ("layers.1.weights/1", "layers.1", "weights"),
    ):
        assert plan.writes[name] == (
            Write(source=whole, module=module, tensor=tensor, target=second),
        )
    assert plan.places["layers.0.weight"] == Form.contiguous((2 * WIDTH, WIDTH), "float32")
    assert not plan.computed
    assert not plan.skipped


class Choosing(ToyModel):
    """Takes parts of sources in many ways: what ``ways`` says for each name."""

    def __init__(self, **ways):
        super().__init__()
        self.ways = ways
        for name in ways:
            self.register_parameter(name, parameter(WIDTH, WIDTH))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in self.ways:
                self.ways[name](self, getattr(self, name).data, tensor)


def columns(model, place, tensor):
    place.copy_(tensor[3 : 3 + WIDTH].narrow(1, 4, WIDTH))


def turned(model, place, tensor):
    place.copy_(tensor[:WIDTH].t()[:WIDTH])


def turned_and_copied(model, place, tensor):
    place.copy_(tensor[:WIDTH, 2 : 2 + WIDTH].t().contiguous())


def copied_and_cut(model, place, tensor):
    place.copy_(tensor.float().contiguous().chunk(2, 0)[1][:WIDTH, ::3].clone())


def turned_copied_and_cut(model, place, tensor):
    place.copy_(tensor.t().contiguous()[5 : 5 + WIDTH, 1 : 1 + 2 * WIDTH : 2])


def cast(model, place, tensor):
    place.copy_(tensor.to(torch.bfloat16)[3 : 3 + WIDTH, 1 : 1 + WIDTH])


def cast_once(model, place, tensor):
    place.copy_(tensor[1 : 1 + WIDTH].to(place.dtype).t()[2 : 2 + WIDTH])


def flattened(model, place, tensor):
    place.view(-1).copy_(tensor.contiguous().view(-1)[: WIDTH * WIDTH])


def padded(model, place, tensor):
    place.zero_()
    place[:3].copy_(tensor[:3, :WIDTH])
    place[5:].fill_(-7.5)
    place[8:].fill_(1)


def halved(model, place, tensor):
    place.copy_(tensor[:WIDTH, :WIDTH] / 2)


def looked_at(model, place, tensor):
    place.copy_(tensor[:WIDTH, :WIDTH] if tensor.sum().item() > -1e9 else tensor)


def summed(model, place, tensor):
    place.zero_()
    place.add_(tensor[:WIDTH, :WIDTH])


def joined(model, place, tensor):
    place.copy_(torch.cat([tensor[:4, :WIDTH], tensor[16:, :WIDTH]]))


def spread(model, place, tensor):
    place.copy_(tensor[0, :WIDTH])


def kept_aside(model, place, tensor):
    model.aside = tensor[0].clone()
    place.copy_(tensor[:WIDTH, :WIDTH] + 1)


def left(model, place, tensor):
    """Not for this rank."""


COPIED = (
    columns,
    turned,
    turned_and_copied,
    copied_and_cut,
    turned_copied_and_cut,
    cast_once,
    padded,
    flattened,
)
COMPUTED = (cast, halved, looked_at, summed, joined, spread)


@pytest.mark.parametrize("way", [*COPIED, *COMPUTED], ids=lambda way: way.__name__)
def test_parts_of_sources_are_planned_and_everything_else_is_called_computed(way):
    """The oracle is the loader itself, run on real tensors without any session."""
    model, state = Choosing(place=way), {"place": torch.randn(20, 24)}
    plan = bake(model, forms(state), framework=toy_framework())
    assert plan.computed == (("place",) if way in COMPUTED else ())
    want = Choosing(place=way)
    with torch.no_grad():
        want.load_weights(state.items())
    parts = {key: part_of(state[key[0]], key[1]).clone() for key in plan.all_reads()}
    if way in COPIED:
        [part] = parts.values()
        rows = 3 if way is padded else WIDTH
        assert part.numel() == rows * WIDTH, "only what is needed is read"
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.replay(plan, lambda name, view: parts[name, view])
    assert torch.equal(model.place, want.place)


class Filling(ToyModel):
    """Two names share a place; the second puts a number over what the first has brought."""

    def __init__(self):
        super().__init__(layers.Linear())

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "second":
                self.layers[0].weight.data[2:].fill_(1.0)
            rows = slice(4, None) if name == "second" else slice(None)
            self.layers[0].weight.data[rows].copy_(tensor[rows])


def test_a_number_over_what_another_name_brought_goes_through_the_loaders():
    """A plan is a list for each name, and the order between names may change."""
    shape = ((WIDTH, WIDTH), torch.float32)
    plan = bake(Filling(), {"first": shape, "second": shape}, framework=toy_framework())
    assert plan.computed == ("first", "second")


def test_names_that_nothing_takes_are_named():
    model = Choosing(mine=columns, other=left)
    state = {"mine": torch.randn(11, 12), "other": torch.randn(2), "unknown": torch.randn(2)}
    plan = bake(model, forms(state), framework=toy_framework())
    assert plan.skipped == ("other", "unknown")
    assert [name for name, _ in plan.all_reads()] == ["mine"]


def test_what_a_model_keeps_of_a_source_goes_through_its_loaders():
    """A copy that is kept as an attribute is no write, and would be missing after a replay."""
    model = Choosing(
        place=lambda model, place, tensor: (vars(model).update(aside=tensor), place.copy_(tensor))
    )
    model.aside = None
    plan = bake(model, {"place": ((WIDTH, WIDTH), torch.float32)}, framework=toy_framework())
    assert plan.computed == ("place",)
    assert model.aside is None


class Adding(CollectingModel):
    """Reads everything first, and adds one tensor to another before it writes."""

    def load_weights(self, weights):
        found = dict(weights)
        if "extra" in found:
            found["layers.0.weight"] = found["layers.0.weight"] + found.pop("extra")
        for name, tensor in found.items():
            self.store(name, tensor)


def test_all_names_of_which_a_value_is_made_go_through_the_loaders_together():
    model = Adding(layers.Linear(), layers.Linear())
    shape = ((WIDTH, WIDTH), torch.float32)
    names = ("layers.0.weight", "layers.1.weight", "extra")
    plan = bake(model, dict.fromkeys(names, shape), framework=toy_framework())
    assert set(plan.computed) == {"layers.0.weight", "extra"}
    assert list(plan.writes) == ["layers.1.weight"]


class Whole(CollectingModel):
    """Cannot do with a part of its tensors."""

    def load_weights(self, weights):
        found = dict(weights)
        self.store("layers.0.weight", found["layers.0.weight"] * 2)
        self.store("layers.1.weight", found["layers.1.weight"])


def test_loaders_that_need_everything_get_everything():
    """The computed names alone would make them raise, in the middle of a real load."""
    model = Whole(layers.Linear(), layers.Linear())
    shape = ((WIDTH, WIDTH), torch.float32)
    names = ("layers.0.weight", "layers.1.weight")
    plan = bake(model, dict.fromkeys(names, shape), framework=toy_framework())
    assert plan.computed == names
    assert not plan.writes


def test_loaders_of_others_stay_where_they_are():
    """Another tool wraps loaders; a dry run takes off only what is weightload's own."""
    bench = Bench(TOYS["fused"])
    place = bench.model.layers[0].weight
    own = place.weight_loader

    def stamped(*args):
        place.calls = getattr(place, "calls", 0) + 1
        return own(*args)

    place.weight_loader = stamped
    bake(bench.model, forms(bench.state(2)))
    assert place.weight_loader is stamped
    assert not hasattr(place, "calls"), "what a loader notes on a tensor is undone as well"


class Careless(ToyModel):
    """Its loader writes to a tensor of the model that is no parameter, and rebinds another."""

    def __init__(self):
        super().__init__(layers.Linear())
        self.table = torch.ones(WIDTH)
        self.extra = parameter(WIDTH, fill=3.0)
        self.seen = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.seen.append(name)
            self.table.add_(1)
            self.table.copy_(tensor[0])
            self.extra.data = torch.zeros(WIDTH)
            self.layers[0].weight.data.copy_(tensor)


def test_nothing_that_was_there_before_is_written_or_replaced():
    model = Careless()
    before = Inventory.of(model)
    shape = ((WIDTH, WIDTH), torch.float32)
    plan = bake(model, {"layers.0.weight": shape}, framework=toy_framework())
    assert before.differences(Inventory.of(model)) == []
    assert plan.computed == ("layers.0.weight",)


def test_a_dry_run_that_fails_leaves_no_trace():
    bench = Bench(TOYS["everything"])
    before = Inventory.of(bench.model)
    state = forms(bench.state(2))
    with pytest.raises(CheckpointError, match=r"no\.such\.place"):
        bake(bench.model, {**state, "no.such.place": ((3,), torch.float32)})
    name = next(iter(state))
    with pytest.raises(WeightMismatchError):
        bake(bench.model, {**state, name: ((3, 3, 3), torch.float32)})
    with pytest.raises(WeightMismatchError, match="does not fit"):
        bake(Choosing(a=lambda m, place, tensor: place.copy_(tensor)), {"a": ((3,), torch.float32)})
    assert before.differences(Inventory.of(bench.model)) == []
    bench.check_recovers()


def test_a_model_that_is_being_loaded_is_not_baked():
    bench = Bench(TOYS["fused"])
    session = bench.open()
    with pytest.raises(ModelBusyError):
        bake(bench.model, forms(bench.state(2)))
    assert open_session(bench.model) is None or session.state.open
    session.abort()
    bench.check_ended(session)


def test_a_dry_run_that_is_refused_leaves_the_other_session_alone(monkeypatch):
    """Another thread opens a session between the look at the model and the claim, and works."""
    model, framework = LoadingModel(layers.RepackedLinear(), layers.Linear()), toy_framework()
    make = lambda: LoadingModel(layers.RepackedLinear(), layers.Linear())  # noqa: E731
    with WeightLoadSession(model, framework=framework) as session:
        session.load(make_state(make, 1))
    other = WeightLoadSession(model)
    state = list(make_state(make, 2).items())
    claim = ownership.claim

    def first(session, modules, *others):
        monkeypatch.undo()
        other.prepare()
        other.load(state[:1])
        model.note = "of the other session"
        claim(session, modules)

    monkeypatch.setattr(ownership, "claim", first)
    with pytest.raises(ModelBusyError):
        bake(model, forms(dict(state)))
    assert model.note == "of the other session"
    other.load(state[1:])
    other.finish()
    check_equal(model, make, dict(state))


def test_metadata_comes_in_the_forms_that_transports_have():
    bench = Bench(TOYS["fused"])
    state = bench.state(2)
    plan = bake(bench.model, state)
    assert plan == bake(bench.model, forms(state))
    assert plan == bake(bench.model, state.items())
    assert plan == bake(bench.model, list(forms(state).items()))
    assert plan == bake(bench.model, iter(state.items()))
    listed = [
        SimpleNamespace(name=name, shape=list(tensor.shape), dtype="float32")
        for name, tensor in state.items()
    ]
    assert plan == bake(bench.model, listed)
    whole = torch.full((50, 50), 0.125)
    for wrong in (
        {"layers.0.weight/0": (3, 3, 3)},
        [*listed, listed[0]],
        [*state.items(), next(iter(state.items()))],
        {"a": ((1,), "no_type")},
        {"a": ((1,), 5)},
        {"a": (5, torch.float32)},
        {"a": (None, torch.float32)},
        {"a": ("ab", torch.float32)},
        {"a": ((4.7,), torch.float32)},
        {"a": ((-1,), torch.float32)},
        {5: ((1,), torch.float32)},
        {"a": None},
        {"a": [whole]},
        [whole],
        [("a", whole, 5)],
        ["ab"],
        [None],
        None,
        5,
    ):
        with pytest.raises(UsageError) as caught:
            bake(bench.model, wrong)
        assert "0.125" not in str(caught.value), "a whole tensor in a message"
    bench.check_recovers()


def test_a_plan_is_plain_data():
    plan = bake(Bench(TOYS["everything"]).model, forms(make_state(TOYS["everything"], 1)))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert Plan.from_plain(json.loads(json.dumps(plan.to_plain()))) == plan
    with pytest.raises(UsageError, match="format 0"):
        Plan.from_plain({**plan.to_plain(), "format": 0})


def without(data, key):
    return {name: value for name, value in data.items() if name != key}


def test_what_is_no_plan_is_refused_in_one_way():
    bench = Bench(TOYS["fused"])
    plan = bake(bench.model, forms(bench.state(2)))
    plain = plan.to_plain()
    name = next(iter(plain["writes"]))
    [row] = plain["writes"][name]
    wrongs = [None, 5, "plan", [], {}, *(without(plain, key) for key in plain)]
    wrongs += [{**plain, key: 5} for key in plain]
    rows = [5, None, [], row[:3], [*row, 1], [None, *row[1:]], ["x", *row[1:]]]
    rows += [[row[0], 5, *row[2:]], [*row[:3], [0, [1.5], [1], "float32"]], [*row[:3], "view"]]
    rows += [[*row[:3], [0, "ab", [1], "float32"]], [*row[:3], [0, [1], [1], 5]]]
    wrongs += [{**plain, "writes": {name: [wrong]}} for wrong in rows]
    wrongs += [{**plain, "sources": {name: wrong}} for wrong in (5, [], [[1], [1]], [1, 1, "x"])]
    wrongs += [{**plain, "owner": wrong} for wrong in ([0], [0, 1, 2], ["a", "b"])]
    wrongs += [{**plain, "computed": "text"}, {**plain, "skipped": [5]}]
    for wrong in wrongs:
        with pytest.raises(UsageError, match="plan"):
            Plan.from_plain(wrong)
    for wrong in ({}, None, plain, bench.state(2)):
        session = bench.open()
        with pytest.raises(UsageError, match="Plan"):
            session.replay(wrong, bench.state(2))
        bench.check_ended(session)
    for fetch in (None, 5, lambda name, view: None):
        session = bench.open()
        with pytest.raises((UsageError, WeightMismatchError), match="fetch"):
            session.replay(plan, fetch)
        bench.check_ended(session)


def test_a_plan_for_another_model_is_refused_before_any_write():
    plan = bake(Bench(TOYS["fused"]).model, forms(make_state(TOYS["fused"], 1)))
    bench = Bench(TOYS["plain"])
    session = bench.open()
    with pytest.raises(UsageError, match="another form") as caught:
        session.replay(plan, make_state(TOYS["fused"], 1))
    bench.check_ended(session, caught.value)


def test_sources_that_do_not_fit_the_plan_are_refused_before_any_write():
    bench = Bench(TOYS["fused"])
    state = bench.state(2)
    plan = bake(bench.model, forms(state))
    name = next(iter(state))
    for weights, error in (
        ({key: value for key, value in state.items() if key != name}, IncompleteLoadError),
        ({**state, name: state[name].double()}, WeightMismatchError),
        ({**state, name: state[name][:-1]}, WeightMismatchError),
        (lambda name, view: torch.zeros(3), WeightMismatchError),
    ):
        session = bench.open()
        with pytest.raises(error) as caught:
            session.replay(plan, weights)
        assert caught.value.model_intact
        bench.check_ended(session, caught.value)
    session = bench.open(check_finite=True)
    with pytest.raises(WeightMismatchError, match="check_finite"):
        session.replay(plan, {**state, name: state[name] * float("nan")})
    bench.check_ended(session)


def test_a_part_of_a_model_can_be_replayed_and_the_rest_is_missed():
    """Completeness is measured against the model, never against the plan."""
    bench = Bench(TOYS["fused"])
    state = bench.state(2)
    name = next(iter(state))
    plan = bake(bench.model, {key: value for key, value in state.items() if key != name})
    session = bench.open(commit="atomic")
    session.replay(plan, state)
    with pytest.raises(IncompleteLoadError, match="layers") as caught:
        session.finish()
    bench.check_ended(session, caught.value)
    session = bench.open()
    session.replay(plan, state)
    session.load({name: state[name]})
    session.finish()
    bench.serves = state
    bench.check_finished(session)


class Neighbours(ToyModel):
    """Two parameters that are columns of one storage, so that each lies in the gaps of the other."""

    def __init__(self):
        super().__init__()
        whole = torch.zeros(4, 6)
        self.left = nn.Parameter(whole[:, :2], requires_grad=False)
        self.right = nn.Parameter(whole[:, 2:], requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


DAMAGE = {
    "target, moved up": ("target", {"offset": 16}),
    "target, moved into a gap": ("target", {"offset": 2}),
    "target, other strides": ("target", {"stride": (6, 2)}),
    "target, larger": ("target", {"shape": (4, 3)}),
    "target, before the first": ("target", {"offset": -1}),
    "target, backwards": ("target", {"stride": (-6, 1)}),
    "target, of wider elements": ("target", {"dtype": "float64"}),
    "target, of narrower elements": ("target", {"dtype": "uint8", "offset": 8}),
    "target, of no type": ("target", {"dtype": "no_type"}),
    "target, of another kind of type": ("target", {"dtype": "manual_seed"}),
    "target, of less dimensions": ("target", {"shape": (4,), "stride": (6,)}),
    "source, moved up": ("source", {"offset": 1}),
    "source, other strides": ("source", {"stride": (3, 1)}),
    "source, before the first": ("source", {"offset": -1}),
    "source, larger": ("source", {"shape": (5, 2)}),
    "source, smaller": ("source", {"shape": (1, 2)}),
    "source, of wider elements": ("source", {"dtype": "float64"}),
}


@pytest.mark.parametrize("source", ["mapping", "fetch"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_plan_that_leaves_its_tensors_is_refused_before_any_write(damage, source):
    """Past a source lies memory of its neighbour, past a target the next parameter."""
    model = Neighbours()
    sent = torch.arange(100.0)
    state = {"left": sent[8:16].view(4, 2), "right": sent[16:32].view(4, 4)}
    plan = bake(model, forms(state), framework=toy_framework())
    side, change = DAMAGE[damage]
    [write] = plan.writes["left"]
    wrong = attrs.evolve(write, **{side: attrs.evolve(getattr(write, side), **change)})
    wrong = attrs.evolve(plan, writes={"right": plan.writes["right"], "left": (wrong,)})
    session = WeightLoadSession(model, framework=toy_framework())
    session.prepare()
    fetched = []

    def fetch(name, view):
        fetched.append(name)
        return part_of(state[name], view)

    with pytest.raises(UsageError, match="left") as caught:
        session.replay(wrong, state if source == "mapping" else fetch)
    assert caught.value.model_intact
    assert not fetched
    assert not model.left.any()
    assert not model.right.any()
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.replay(plan, state)
    assert torch.equal(model.left, state["left"])
    assert torch.equal(model.right, state["right"])


def test_a_plan_whose_parts_do_not_belong_together_is_refused_before_any_write():
    bench = Bench(TOYS["plain"])
    plan = bake(bench.model, forms(bench.state(2)))
    name = next(reversed(plan.writes))
    rest = {key: form for key, form in plan.sources.items() if key != name}
    others = {key: form for key, form in plan.places.items() if key != name}
    for wrong in (
        attrs.evolve(plan, sources=rest),
        attrs.evolve(plan, places=others),
        attrs.evolve(plan, computed=("stranger",)),
    ):
        session = bench.open()
        with pytest.raises(UsageError, match=f"{name}|stranger") as caught:
            session.replay(wrong, bench.state(2))
        assert caught.value.model_intact
        bench.check_ended(session, caught.value)


class Half(ToyModel):
    """One rank's rows of a weight."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.weight = parameter(2, 3)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.weight.data.copy_(tensor[2 * self.rank :][:2])


def on_rank(rank, size=2):
    framework = toy_framework()
    framework.owner = None if rank is None else (rank, size)
    return framework


def test_a_plan_of_another_rank_is_refused_before_any_write():
    """The shapes of both ranks are the same; only the rows that they take are not."""
    state = {"weight": torch.arange(12.0).view(4, 3)}
    plan = bake(Half(0), forms(state), framework=on_rank(0))
    plan = Plan.from_plain(json.loads(json.dumps(plan.to_plain())))
    assert plan.owner == (0, 2)
    for framework in (on_rank(1), on_rank(0, 4)):
        model = Half(framework.owner[0])
        session = WeightLoadSession(model, framework=framework)
        with pytest.raises(UsageError, match="rank 0 of 2") as caught, session:
            session.replay(plan, state)
        assert caught.value.model_intact
    for framework, made in ((on_rank(0), plan), (on_rank(None), attrs.evolve(plan, owner=None))):
        model = Half(0)
        with WeightLoadSession(model, framework=framework) as session:
            session.replay(made, state)
        assert torch.equal(model.weight, state["weight"][:2])
