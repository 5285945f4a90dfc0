"""A load brings exactly what it promised: everything, or these names, and nothing is left half new."""

import itertools

import pytest
import torch
from torch import nn

from weightload import (
    IncompleteLoadError,
    ModelPoisonedError,
    Scope,
    SessionState,
    UnexpectedWeightError,
    UnsupportedError,
    UsageError,
    WeightLoadError,
    WeightLoadSession,
    WeightMismatchError,
    planning,
    poison_of,
    weights_version,
)
from weightload.testing import (
    TOYS,
    Bench,
    CollectingModel,
    LoadingModel,
    ToyModel,
    layers,
    loading,
    make_state,
    sharing,
)
from weightload.testing.oracle import check_equal, expected, identical, outputs, toy_framework

COMMITS = ["stream", "atomic"]


def mixed():
    """One layer of each kind: as loaded, fused, packed, attention over a packed projection."""
    return LoadingModel(
        layers.Linear(), loading.FusedLinear(), layers.RepackedLinear(), sharing.LatentAttention()
    )


def packed():
    """A plain layer, and one whose weight and scales are packed together."""
    return LoadingModel(layers.Linear(), loading.ScaledLinear(packed=True))


@pytest.fixture
def bench():
    return Bench(mixed)


def load_only(bench, names, state, **options):
    session = bench.open(scope=Scope.only(names), **options)
    session.load({name: state[name] for name in names})
    return session


def together(old, new, names):
    return {**old, **{name: new[name] for name in names}}


PARTS = {
    "a plain weight": ["layers.0.weight"],
    "one shard of a fused layer that is not packed": ["layers.1.weight/1"],
    "a packed layer": ["layers.2.weight"],
    "the sinks of an attention layer": ["layers.3.sinks"],
    "an attention layer with the projection that it reads": [
        "layers.3.projection.weight",
        "layers.3.sinks",
    ],
}


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_what_a_fresh_load_of_the_mixture_gives(bench, part, commit):
    """Everything that was not sent keeps its value, and what is made from what was sent is new."""
    old, new = bench.state(1), bench.state(2)
    names = [name for name in old if any(name.startswith(one) for one in PARTS[part])]
    assert names, list(old)
    session = load_only(bench, names, new, commit=commit, version="part")
    receipt = session.finish()
    state = together(old, new, names)
    check_equal(bench.model, mixed, state)
    bench.kept.check(bench.model)
    assert not identical(outputs(bench.model), expected(mixed, old)), "or else nothing changed"
    assert receipt.consumed.count == len(names)
    assert receipt.scope["names"] == names
    assert weights_version(bench.model) == "part"


@pytest.mark.parametrize("commit", COMMITS)
def test_a_layer_whose_loaders_write_no_plain_region_is_loaded_as_a_part(commit):
    """Nobody knows which rows a name fills, and that does not matter when all of them come."""
    factory = lambda: LoadingModel(loading.ScatteredLinear(packed=False), layers.Linear())  # noqa: E731
    bench = Bench(factory)
    old, new = bench.state(1), bench.state(2)
    names = [name for name in old if name.startswith("layers.0.weight")]
    assert len(names) == 2
    load_only(bench, names, new, commit=commit).finish()
    check_equal(bench.model, factory, together(old, new, names))
    with pytest.raises(IncompleteLoadError, match=names[1]):
        bench.session(scope=Scope.only(names[:1]), commit=commit).prepare()
    check_equal(bench.model, factory, together(old, new, names))


@pytest.mark.parametrize("commit", COMMITS)
def test_a_layer_with_a_buffer_that_looks_into_its_weight_is_loaded_as_a_part(commit):
    """What fills the weight fills a part of the buffer too; the buffer alone has no name."""
    factory = lambda: LoadingModel(layers.BufferedLayer(), layers.Linear())  # noqa: E731
    bench = Bench(factory)
    old, new = bench.state(1), bench.state(2)
    names = [name for name in old if name.startswith("layers.0.")]
    load_only(bench, names, new, commit=commit).finish()
    check_equal(bench.model, factory, together(old, new, names))


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("kind", [layers.Linear, layers.RepackedLinear])
def test_what_is_derived_from_another_layer_is_new_when_a_part_brought_that_layer(kind, commit):
    """The hook of a derived state runs after all others, and reads what is elsewhere."""

    def factory():
        layer = kind()
        return LoadingModel(sharing.SummedState(layer), layer, layers.Linear())

    bench = Bench(factory)
    old, new = bench.state(1), bench.state(2)
    load_only(bench, ["layers.1.weight"], new, commit=commit).finish()
    check_equal(bench.model, factory, together(old, new, ["layers.1.weight"]))
    bench.kept.check(bench.model)


def test_parts_one_after_another_are_a_complete_load(bench):
    old, new = bench.state(1), bench.state(2)
    state = old
    for name in list(new):
        group = [name]
        if name.startswith("layers.3"):
            group = [one for one in new if one.startswith("layers.3")]
        load_only(bench, group, new).finish()
        state = together(state, new, group)
        check_equal(bench.model, mixed, state)
    check_equal(bench.model, mixed, new)


def test_only_the_hooks_of_what_changes_run(bench):
    bench.framework.calls.clear()
    load_only(bench, ["layers.2.weight"], bench.state(2)).finish()
    assert [type(module).__name__ for _, module in bench.framework.calls] == ["RepackedLinear"]


@pytest.mark.holds("C19", "W12")
@pytest.mark.parametrize("commit", COMMITS)
def test_a_scope_that_splits_what_is_processed_together_is_refused(bench, commit):
    """Weight and scales are folded into one tensor by the hook, so neither comes alone."""
    bench = Bench(packed)
    names = [name for name in bench.state(2) if name.startswith("layers.1")]
    assert len(names) > 1
    before = outputs(bench.model)
    session = bench.session(scope=Scope.only(names[:1]), commit=commit)
    with pytest.raises(IncompleteLoadError) as caught:
        session.prepare()
    assert names[1] in str(caught.value)
    assert caught.value.model_intact
    assert session.state is SessionState.ABORTED
    assert identical(outputs(bench.model), before)
    bench.reload(bench.state(3))


@pytest.mark.parametrize("commit", COMMITS)
def test_what_the_scope_names_and_does_not_come_is_missing(bench, commit):
    session = bench.open(scope=Scope.only(["layers.0.weight", "layers.2.weight"]), commit=commit)
    session.load({"layers.2.weight": bench.state(2)["layers.2.weight"]})
    with pytest.raises(IncompleteLoadError, match=r"layers\.0\.weight") as caught:
        session.finish()
    assert caught.value.model_intact == (commit == "atomic")
    assert session.receipt.missing.first == ["layers.0.weight"]


def test_what_the_scope_does_not_name_is_refused_before_the_loaders_see_it(bench):
    session = bench.open(scope=Scope.only(["layers.0.weight"]))
    with pytest.raises(UnexpectedWeightError, match=r"'layers\.2\.weight' is not in the scope"):
        session.load({"layers.2.weight": bench.state(2)["layers.2.weight"]})
    assert session.state is SessionState.ABORTED
    assert session.receipt.unexpected.first == ["layers.2.weight"]
    check_equal(bench.model, mixed, bench.state(1))


def test_a_loader_that_writes_outside_of_the_scope_is_refused():
    """The name is in the scope; the loader sends it somewhere else this time."""
    bench = Bench(mixed)
    session = bench.open(scope=Scope.only(["layers.0.weight"]))
    bench.model.store = lambda name, tensor: bench.model.layers[1].weight.data[:8].copy_(tensor)
    with pytest.raises(UnexpectedWeightError, match=r"layers\.1\.weight.*not in the scope"):
        session.load({"layers.0.weight": bench.state(2)["layers.0.weight"]})
    assert session.state is SessionState.ABORTED


def test_a_scope_names_patterns_and_each_has_to_match(bench):
    new = bench.state(2)
    names = [name for name in new if name.startswith("layers.1.")]
    with bench.session(scope=Scope.only(["layers.1.*"])) as session:
        session.load({name: new[name] for name in names})
    check_equal(bench.model, mixed, together(bench.state(1), new, names))
    with pytest.raises(UnexpectedWeightError, match=r"layers\.9\.\*"):
        bench.session(scope=Scope.only(["layers.0.weight", "layers.9.*"])).prepare()


def test_a_scope_of_nothing_is_refused():
    with pytest.raises(UsageError, match="at least one"):
        Scope.only([])


def test_one_name_is_no_list_of_letters():
    assert Scope.only("layers.0.weight").names == ("layers.0.weight",)


def test_a_first_load_must_be_complete():
    model = mixed()
    session = WeightLoadSession(
        model, framework=toy_framework(), scope=Scope.only(["layers.0.weight"])
    )
    with pytest.raises(UnsupportedError, match="load everything"):
        session.prepare()


def test_a_part_does_not_cure_a_poisoned_model(bench):
    with pytest.raises(IncompleteLoadError), bench.session() as session:
        session.load(iter([("layers.0.weight", bench.state(2)["layers.0.weight"])]))
    assert poison_of(bench.model) is not None
    with pytest.raises(ModelPoisonedError):
        bench.session(scope=Scope.only(["layers.0.weight"])).prepare()
    bench.serves = None
    bench.reload(bench.state(3))


# ---------------------------------------------------------------- what may stay away


ABSENT = {
    "by the source's name": ["layers.2.weight"],
    "by a pattern": ["layers.2.*"],
    "one shard of a fused layer that is not packed": ["layers.1.weight/1"],
    "several layers": ["layers.0.weight", "layers.2.weight"],
    "an attention layer as a whole": ["layers.3.*"],
    "the projection that an attention layer reads": ["layers.3.projection.weight"],
}


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("case", ABSENT)
def test_what_may_stay_away_keeps_its_value(bench, case, commit):
    scope = Scope.full(allow_missing=ABSENT[case])
    old, new = bench.state(1), bench.state(2)
    absent = [name for name in new if scope.may_miss(name)]
    assert absent
    with bench.session(scope=scope, commit=commit) as session:
        session.load({name: new[name] for name in new if name not in absent})
    check_equal(bench.model, mixed, together(new, old, absent))
    bench.kept.check(bench.model)
    assert session.receipt.missing.count
    # The names that stayed away are still known: they come again in the next load.
    bench.serves = None
    bench.reload(bench.state(3))
    check_equal(bench.model, mixed, bench.state(3))


@pytest.mark.parametrize("commit", COMMITS)
def test_a_shard_that_stayed_away_is_still_known_by_its_name(bench, commit):
    """The load that went without it does not unlearn which part it fills."""
    absent, new, newer = ["layers.1.weight/1"], bench.state(2), bench.state(3)
    with bench.session(scope=Scope.full(allow_missing=absent), commit=commit) as session:
        session.load({name: new[name] for name in new if name not in absent})
    load_only(bench, absent, newer, commit=commit).finish()
    check_equal(bench.model, mixed, together(new, newer, absent))


def test_what_may_stay_away_may_come(bench):
    with bench.session(scope=Scope.full(allow_missing=["*"])) as session:
        session.load(bench.state(2))
    check_equal(bench.model, mixed, bench.state(2))
    assert session.receipt.missing.count == 0


@pytest.mark.parametrize("commit", COMMITS)
def test_a_packed_layer_with_scales_that_several_names_fill_stays_away_as_a_whole(commit):
    """That several names fill its scales is known from before; none of them came now."""
    bench = Bench(packed)
    old, new = bench.state(1), bench.state(2)
    absent = [name for name in new if name.startswith("layers.1.")]
    with bench.session(scope=Scope.full(allow_missing=["layers.1.*"]), commit=commit) as session:
        session.load({name: new[name] for name in new if name not in absent})
    check_equal(bench.model, packed, together(new, old, absent))


def test_a_refusal_speaks_of_poison_only_where_there_is_some(bench):
    """One layer may stay away, another is missing, and the model is in order."""
    new = bench.state(2)
    with (
        pytest.raises(IncompleteLoadError, match=r"layers\.3") as caught,
        bench.session(scope=Scope.full(allow_missing=["layers.2.weight"])) as session,
    ):
        session.load(iter([(n, new[n]) for n in new if not n.startswith(("layers.2", "layers.3"))]))
    assert "poisoned, so" not in str(caught.value)


@pytest.mark.parametrize("commit", COMMITS)
def test_what_is_packed_together_stays_away_as_a_whole(commit):
    bench = Bench(packed)
    new = bench.state(2)
    first = next(name for name in new if name.startswith("layers.1"))
    session = bench.open(scope=Scope.full(allow_missing=[first]), commit=commit)
    session.load(iter([(name, new[name]) for name in new if name != first]))
    with pytest.raises(IncompleteLoadError, match=r"layers\.1"):
        session.finish()


def test_nothing_may_stay_away_while_the_model_is_poisoned(bench):
    with pytest.raises(IncompleteLoadError), bench.session() as session:
        session.load(iter([("layers.0.weight", bench.state(2)["layers.0.weight"])]))
    new = bench.state(3)
    with (
        pytest.raises(IncompleteLoadError, match="poisoned"),
        bench.session(scope=Scope.full(allow_missing=["layers.2.weight"])) as session,
    ):
        session.load({name: new[name] for name in new if name != "layers.2.weight"})


def test_what_may_come_without_a_place_is_dropped_and_counted(bench):
    new = bench.state(2)
    scope = Scope.full(allow_unexpected=["*.rotary.inv_freq"])
    with bench.session(scope=scope) as session:
        session.load({**new, "layers.0.rotary.inv_freq": torch.ones(3)})
    check_equal(bench.model, mixed, new)
    assert session.receipt.unexpected.first == ["layers.0.rotary.inv_freq"]
    with pytest.raises(UnexpectedWeightError), bench.session() as session:
        session.load({**new, "layers.0.rotary.inv_freq": torch.ones(3)})


def test_an_allow_list_does_not_drop_what_has_a_place(bench):
    new = bench.state(2)
    with bench.session(scope=Scope.full(allow_unexpected=["*"])) as session:
        session.load(new)
    check_equal(bench.model, mixed, new)


def test_the_names_of_tied_tensors_count_once():
    """Either name brings the tensor; a part may name it by the one that counted."""
    bench = Bench(TOYS["tied"]) if "tied" in TOYS else Bench(TOYS["everything"])
    new = bench.state(2)
    old = bench.state(1)
    embedding = next(name for name in new if "embed" in name)
    head = [name for name in new if "head" in name and "bias" not in name]
    names = [embedding, *head, *[n for n in new if "head" in n and "bias" in n]]
    try:
        load_only(bench, names, new).finish()
    except IncompleteLoadError:
        pytest.fail("the scope names everything that is tied")
    state = together(old, new, names)
    check_equal(bench.model, bench.factory, state)


class Collector(nn.Module):
    """Computes with collected tensors, so that nobody knows which names fill its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.other = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights):
        found = dict(weights)
        self.other.data.copy_(found["other"])
        if "a" in found:
            self.weight.data.copy_(torch.stack([found["a"], found["b"]]))


def test_a_part_is_refused_where_nobody_knows_which_names_fill_what():
    model = Collector()
    state = {"a": torch.tensor(1.0), "b": torch.tensor(2.0), "other": torch.ones(2)}
    with WeightLoadSession(model) as session:
        session.load(state)
    session = WeightLoadSession(model, scope=Scope.only(["a"]))
    with pytest.raises(UnsupportedError, match=r"'weight'.*Load everything"):
        session.prepare()
    assert torch.equal(model.weight, torch.tensor([1.0, 2.0]))


class Rank(LoadingModel):
    """One rank of two: it has no place for the experts of the other one."""

    def load_weights(self, weights):
        super().load_weights((n, t) for n, t in weights if not n.startswith("other"))


def test_a_scope_may_name_what_another_rank_has():
    """The same names are sent to all ranks; each takes its own, and needs no others."""
    model = Rank(layers.Linear(), layers.Linear())
    state = make_state(lambda: Rank(layers.Linear(), layers.Linear()), 1)
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load({**state, "other.weight": torch.ones(3)})
    names = ["layers.0.weight", "other.weight"]
    new = {"layers.0.weight": torch.full((8, 8), 2.0), "other.weight": torch.ones(3)}
    for sent in (new, {"layers.0.weight": new["layers.0.weight"]}):
        with WeightLoadSession(model, scope=Scope.only(names)) as session:
            session.load(sent)
        assert torch.equal(model.layers[0].weight, new["layers.0.weight"])
        assert torch.equal(model.layers[1].weight, state["layers.1.weight"])
        assert session.receipt.skipped.count == len(sent) - 1
    with WeightLoadSession(model, scope=Scope.only(["other.weight"])) as session:
        session.load({"other.weight": torch.zeros(3)})
    with (
        pytest.raises(IncompleteLoadError, match=r"layers\.0\.weight"),
        WeightLoadSession(model, scope=Scope.only(names)) as session,
    ):
        session.load({"other.weight": torch.ones(3)})


def test_a_callback_may_compute_with_a_part_that_is_new(bench):
    """Everything is in its place when callbacks are told."""
    seen = []
    options = {"publish": [lambda *versions: seen.append(outputs(bench.model))]}
    load_only(bench, ["layers.0.weight"], bench.state(2), **options).finish()
    state = together(bench.state(1), bench.state(2), ["layers.0.weight"])
    assert identical(seen[0], expected(mixed, state))


def test_an_atomic_part_writes_nothing_live_where_loaders_write_no_plain_region():
    """The loader writes by index, and refuses another type in the middle of the load."""
    bench = Bench(lambda: LoadingModel(layers.Linear(), loading.ScatteredLinear(packed=False)))
    new = bench.state(2)
    names = [name for name in new if name.startswith("layers.1")]
    sent = {name: new[name] for name in names}
    sent[names[1]] = sent[names[1]].double()
    session = bench.open(scope=Scope.only(names), commit="atomic")
    with pytest.raises(WeightMismatchError) as caught:
        session.load(iter(sent.items()))
    assert session.state is SessionState.ABORTED
    bench.check_ended(session, caught.value)


@pytest.mark.parametrize("commit", COMMITS)
def test_an_optional_tensor_that_came_before_is_waited_for(commit):
    """The layer is processed when its weight has come; its scale stands last in the mapping."""
    bench = Bench(lambda: LoadingModel(layers.Linear(), layers.DefaultScaleLinear()))
    for seed in (2, 3, 4):
        state = {**bench.state(seed), "layers.1.scale": torch.tensor([float(seed)])}
        bench.reload(state, commit=commit)
        forms = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
        session = bench.open()
        session.check(forms, complete=True)
        session.abort()
    bench.serves = None
    forms = {name: (tuple(t.shape), t.dtype) for name, t in bench.state(5).items()}
    with bench.session(commit=commit) as session:
        session.check(forms, complete=True)  # without the scale, for which there is a default
        session.load(bench.state(5))
    check_equal(bench.model, bench.factory, bench.state(5))


@pytest.mark.parametrize("plans", list(itertools.product((True, False), repeat=4)))
def test_an_optional_tensor_is_waited_for_whichever_loads_use_plans(plans):
    """It comes from the second load on, so that the plan that knows it is not that of the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(planning.MODE, "on" if plans[0] else "off")
        bench = Bench(lambda: LoadingModel(layers.Linear(), layers.DefaultScaleLinear()))
    for number, uses in enumerate(plans[1:], 2):
        scale = {"layers.1.scale": torch.tensor([float(number)])}
        bench.reload({**bench.state(number), **scale}, plans=uses)


@pytest.mark.parametrize("commit", COMMITS)
def test_an_optional_tensor_that_may_stay_away_keeps_its_value(commit):
    """It has a default, came once, and the scope names it: the default is not what is served."""
    bench = Bench(lambda: LoadingModel(layers.Linear(), layers.BufferedLayer()))
    state = {**bench.state(2), "layers.1.temperature": torch.tensor(3.0)}
    bench.reload(state, commit=commit)
    for seed in (3, 4):
        new = {**bench.state(seed), "layers.1.temperature": torch.tensor(3.0)}
        part = {name: one for name, one in new.items() if "temperature" not in name}
        session = bench.open(commit=commit, scope=Scope.full(allow_missing=["*.temperature"]))
        session.load(part)
        session.finish()
        check_equal(bench.model, bench.factory, new)


def test_a_part_that_is_written_by_index_does_not_let_the_rest_stay_away_in_an_atomic_load():
    """Nobody knows which rows came, so that the others could not be kept."""
    bench = Bench(lambda: LoadingModel(layers.Linear(), loading.ScatteredLinear(packed=False)))
    scope = Scope.full(allow_missing=["*"])
    session = bench.open(commit="atomic", scope=scope)
    session.load({"layers.1.weight/1": bench.state(2)["layers.1.weight/1"]})
    with pytest.raises(IncompleteLoadError, match=r"layers\.1\.weight"):
        session.finish()
    bench.check_ended(session)
    session = bench.open(scope=scope)
    session.load({"layers.1.weight/1": bench.state(2)["layers.1.weight/1"]})
    session.finish()
    state = together(bench.state(1), bench.state(2), ["layers.1.weight/1"])
    check_equal(bench.model, bench.factory, state)


@pytest.mark.parametrize("commit", COMMITS)
def test_a_scale_of_several_does_not_stay_away_from_a_model_that_collects(commit):
    """The largest of two scales counts. They came in two calls, and nobody knows which wrote what."""
    factory = lambda: CollectingModel(loading.ScaledLinear(packed=False))  # noqa: E731
    model, first, new = factory(), make_state(factory, 1), make_state(factory, 2)
    with WeightLoadSession(model, framework=toy_framework()) as session:
        for name in first:
            session.load({name: first[name]})
    part = {name: one for name, one in new.items() if name != "layers.0.largest/0"}
    scope = Scope.full(allow_missing=["layers.0.largest/0"])
    with (
        pytest.raises(IncompleteLoadError, match=r"largest/0"),
        WeightLoadSession(model, commit=commit, scope=scope) as session,
    ):
        session.load(part)


@pytest.mark.parametrize("commit", COMMITS)
def test_an_optional_tensor_that_is_packed_with_others_may_not_stay_away_alone(commit):
    """The hook has made the scale a number: it cannot be kept beside a weight that is new."""
    bench = Bench(lambda: LoadingModel(layers.Linear(), layers.DefaultScaleLinear()))
    state = {**bench.state(2), "layers.1.scale": torch.tensor([3.0])}
    bench.reload(state, commit=commit)
    scope = Scope.full(allow_missing=["*.scale"])
    session = bench.open(commit=commit, scope=scope)
    session.load({"layers.0.weight": bench.state(3)["layers.0.weight"]})
    session.load({"layers.1.weight": bench.state(3)["layers.1.weight"]})
    with pytest.raises(IncompleteLoadError, match=r"layers\.1\.scale"):
        session.finish()
    bench.reload(state, commit=commit)


@pytest.mark.parametrize("commit", COMMITS)
def test_a_part_waits_for_an_optional_tensor_that_it_names(commit):
    """The buffer has a default, came with the last load, and comes last with the part."""
    bench = Bench(lambda: ToyModel(layers.BufferedLayer()))
    state = {**bench.state(2), "layers.0.temperature": torch.tensor(3.0)}
    bench.reload(state, commit=commit)
    new = {**bench.state(3), "layers.0.temperature": torch.tensor(2.0)}
    load_only(bench, list(new), new, commit=commit).finish()
    check_equal(bench.model, bench.factory, new)


def test_a_part_of_a_model_with_packed_layers_of_another_rank_can_be_loaded():
    """A packed layer that is left alone has other dimensions than its checkpoint format."""
    from weightload.testing import kernels

    bench = Bench(lambda: LoadingModel(layers.Linear(), kernels.BlockExperts(16)))
    load_only(bench, ["layers.0.weight"], bench.state(2)).finish()
    state = together(bench.state(1), bench.state(2), ["layers.0.weight"])
    check_equal(bench.model, bench.factory, state)


def test_what_is_derived_from_all_is_made_again_by_a_part():
    """The derived layer reads a layer that it does not hold."""
    bench = Bench(TOYS["derived"])
    new = bench.state(2)
    names = [name for name in new if name.startswith("layers.1")]
    load_only(bench, names, new).finish()
    check_equal(bench.model, bench.factory, together(bench.state(1), new, names))


def test_a_scope_travels_as_plain_data():
    for scope in (Scope.full(allow_missing=["a*"], allow_unexpected="b"), Scope.only(["c", "d"])):
        assert Scope.from_plain(scope.to_plain()) == scope


def test_states_differ():
    """The states that the tests above mix differ in every tensor."""
    one, two = make_state(mixed, 1), make_state(mixed, 2)
    assert all(not torch.equal(one[name], two[name]) for name in one)


def load_and_finish(session, weights):
    session.load(weights)
    session.finish()


@pytest.mark.long_way("the loader writes elsewhere, where a plan would not ask it")
@pytest.mark.parametrize("toy", ["buffers", "plain", "repacked"])
def test_an_atomic_load_of_one_tensor_that_a_loader_writes_elsewhere_leaves_the_model_intact(toy):
    """Also if a buffer that is in the scope looks into the memory of a weight that is not."""
    for wanted in Bench(TOYS[toy]).state(2):
        bench = Bench(TOYS[toy])
        state = bench.state(2)

        class Rogue(type(bench.model)):
            def load_weights(self, weights, wanted=wanted):
                for name, tensor in weights:
                    for other, place in (*self.named_parameters(), *self.named_buffers()):
                        if other != name and place.shape == tensor.shape:
                            place.data.copy_(tensor)

        bench.model.__class__ = Rogue
        session = bench.open(scope=Scope.only([wanted]), commit="atomic")
        with pytest.raises(WeightLoadError) as caught:
            load_and_finish(session, {wanted: state[wanted]})
        assert caught.value.model_intact
        bench.check_ended(session, caught.value)
