"""With plans a later load goes past the model's loaders, and comes to the same: right or refused.

Damage shown: a plan that is replayed on a model whose loaders, tensors or settings are others by now
puts tensors into the wrong places; one that takes a name which is unknown, missing or double for what
it knows hides what the loaders would have said.
"""

import gc
import random
import time
import weakref

import pytest
import torch

from weightload import (
    DuplicateWeightError,
    IncompleteLoadError,
    ModuleRule,
    Role,
    Scope,
    StorageChangedError,
    UnexpectedWeightError,
    WeightLoadError,
    WeightLoadSession,
    WeightMismatchError,
    recorded,
)
from weightload.record import record_of
from weightload.testing import TOYS, Bench, LoadingModel, layers, loading

COMMITS = ("stream", "atomic")
COLLECTING = {"collecting", "collecting, composed"}
LOOKING = {"scattered"}
SOURCES = {
    "mapping": lambda state: state,
    "list": lambda state: list(state.items()),
    "iterator": lambda state: iter(list(state.items())),
}


class Counted(Bench):
    """A bench that counts what the model's own loaders are given."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.given = []
        own = getattr(type(self.model), "load_weights", None)
        if own is None:
            return

        class Counting(type(self.model)):
            def load_weights(model, weights):
                def counted():
                    for name, tensor in weights:
                        self.given.append(name)
                        yield name, tensor

                return own(model, counted())

        self.model.__class__ = Counting


def shuffled(state, seed):
    names = list(state)
    random.Random(seed).shuffle(names)
    return {name: state[name] for name in names}


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("toy", TOYS)
def test_loads_by_a_plan_equal_fresh_loads_in_any_order(toy, source, commit):
    bench = Bench(TOYS[toy])
    for seed in (2, 3, 4, 5):
        with bench.session(plans=True, commit=commit) as session:
            session.load(SOURCES[source](shuffled(bench.state(seed), seed)))
        bench.serves = bench.state(seed)
        bench.check_finished(session)


@pytest.mark.parametrize("toy", sorted(TOYS.keys() - COLLECTING - LOOKING))
def test_loaders_are_asked_only_for_what_they_compute_with(toy):
    """Of most toys they are not asked at all from the second load with plans on."""
    bench = Counted(TOYS[toy])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    record = vars(bench.model)["_weightload_record"]
    asked = set(bench.given[len(bench.state(2)) :])
    if hasattr(bench.model, "load_weights"):
        assert asked == set(record.plan.plan.computed) & set(bench.state(3))
    if toy in ("fused", "repacked", "hook over children", "attention", "bare copies"):
        assert asked == set()


def test_a_recorded_plan_says_where_each_shard_goes():
    """Worked out by hand: the second of the shards fills the rows after those of the first."""
    bench = Bench(lambda: LoadingModel(loading.FusedLinear()))
    bench.reload(bench.state(2), plans=True)
    plan = vars(bench.model)["_weightload_record"].plan.plan
    rows = 0
    for name, writes in plan.writes.items():
        if not name.startswith("layers.0.weight/"):
            continue
        [write] = writes
        shape = tuple(bench.state(2)[name].shape)
        assert (write.place, write.source.offset, write.source.shape) == (
            "layers.0.weight",
            0,
            shape,
        )
        assert (write.target.offset, write.target.shape) == (rows * shape[1], shape)
        rows += shape[0]
    assert rows == bench.model.layers[0].weight.shape[0]


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("missing", IncompleteLoadError),
        ("twice", DuplicateWeightError),
        ("unknown", (UnexpectedWeightError, WeightMismatchError)),
        ("shape", WeightMismatchError),
        ("dtype", WeightMismatchError),
    ],
)
def test_what_is_wrong_is_found_as_without_a_plan(fault, error, source, commit):
    bench = Bench(TOYS["fused"])
    bench.reload(bench.state(2), plans=True)
    new = bench.state(3)
    name = list(new)[2]
    pairs = list(new.items())
    if fault == "missing":
        pairs = [pair for pair in pairs if pair[0] != name]
    elif fault == "twice":
        pairs.append((name, new[name]))
    elif fault == "unknown":
        pairs.insert(2, (f"{name}.nowhere", new[name]))
    elif fault == "shape":
        pairs = [(n, t[:1] if n == name else t) for n, t in pairs]
    else:
        pairs = [(n, t.to(torch.int32) if n == name else t) for n, t in pairs]
    sent = dict(pairs) if source == "mapping" and fault != "twice" else pairs
    sent = iter(sent) if source == "iterator" else sent
    with pytest.raises(error), bench.session(plans=True, commit=commit) as session:
        session.load(sent)
    bench.check_ended(session)
    bench.reload(bench.state(4), plans=True)


def test_other_types_take_the_long_way_and_are_cast():
    bench = Counted(TOYS["fused"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    bench.given.clear()
    half = {name: tensor.half() for name, tensor in bench.state(4).items()}
    bench.reload(half, plans=True)
    assert sorted(bench.given) == sorted(half)


@pytest.mark.parametrize("how", ["loader", "load_weights", "setting", "list", "attribute tensor"])
def test_a_plan_ends_when_the_loaders_or_what_they_look_at_change(how):
    """The loader puts shards at the place that a table of the module names."""

    class Placed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
            self.weight.weight_loader = self.load
            self.shift, self.order = 0, [0, 1]
            self.table = torch.tensor([0, 1])

        def load(self, place, tensor, shard):
            slot = (self.order[shard] + self.shift + int(self.table[shard]) - shard) % 2
            place.data[2 * slot : 2 * slot + 2].copy_(tensor)

    class Model(torch.nn.Module):
        turned = False

        def __init__(self):
            super().__init__()
            self.inner = Placed()

        def load_weights(self, weights):
            for name, tensor in weights:
                shard = int(name[-1]) ^ self.turned
                self.inner.weight.weight_loader(self.inner.weight, tensor, shard)

    class Turned(Model):
        def load_weights(self, weights):
            for name, tensor in weights:
                self.inner.weight.weight_loader(self.inner.weight, tensor, 1 - int(name[-1]))

    model = Model()

    def load(start):
        sent = {"s.0": torch.tensor([start, start]), "s.1": torch.tensor([start + 1, start + 1])}
        with WeightLoadSession(model, plans=True) as session:
            session.load(sent)
        return model.inner.weight.tolist()

    assert load(1.0) == [1, 1, 2, 2]
    assert load(3.0) == [3, 3, 4, 4]
    if how == "loader":
        inner = model.inner
        inner.weight.weight_loader = lambda place, tensor, shard: inner.load(
            place, tensor, 1 - shard
        )
    elif how == "load_weights":
        model.__class__ = Turned
    elif how == "setting":
        model.inner.shift = 1
    elif how == "list":
        model.inner.order[:] = [1, 0]
    else:
        model.inner.table.copy_(torch.tensor([1, 0]))
    assert load(5.0) == [6, 6, 5, 5]
    assert load(7.0) == [8, 8, 7, 7]


@pytest.mark.parametrize("commit", COMMITS)
def test_verification_and_the_check_of_values_work_by_a_plan(commit):
    bench = Bench(TOYS["everything"])
    for seed in (2, 3, 4):
        session = bench.reload(
            bench.state(seed), plans=True, verify="full", check_finite=True, commit=commit
        )
        assert session.receipt.verdict
    bad = bench.state(5)
    bad["layers.0.weight"][0, 0] = float("nan")
    with (
        pytest.raises(WeightMismatchError, match=r"layers\.0\.weight"),
        bench.session(plans=True, check_finite=True, commit=commit) as session,
    ):
        session.load(bad)
    bench.check_ended(session)


def test_receipts_count_the_same_on_both_ways():
    """Names, bytes and what was written do not depend on the way."""
    counted = []
    for plans in (False, True):
        bench = Bench(TOYS["fused"])
        for seed in (2, 3):
            receipt = bench.reload(bench.state(seed), plans=plans).receipt
        counted.append(
            (receipt.consumed, receipt.skipped, receipt.bytes_received, receipt.bytes_written)
        )
    assert counted[0] == counted[1]


def test_a_load_without_plans_and_one_of_a_part_leave_the_plan():
    """They neither use it nor forget it."""
    bench = Counted(TOYS["fused"])
    bench.reload(bench.state(2), plans=True)
    bench.reload(bench.state(3), plans=False)
    with bench.session(scope=Scope.only(["layers.0.*"])) as session:
        session.load({n: t for n, t in bench.state(4).items() if n.startswith("layers.0.")})
    bench.given.clear()
    bench.reload(bench.state(5), plans=True)
    assert bench.given == []


def test_an_empty_source_goes_to_the_loaders_unless_a_plan_is_used():
    """A model may do something when it has read everything, however little that was."""
    calls = []

    class Ending(LoadingModel):
        def load_weights(self, weights):
            super().load_weights(weights)
            calls.append("end")

    bench = Bench(lambda: Ending(layers.Linear()))
    calls.clear()
    with bench.session(plans=False) as session:
        session.load(iter(()))
        session.load(bench.state(2))
        session.load_through(lambda: bench.model.load_weights(iter(())), exact=True)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "pair", [("layers.0.weight", None), ("layers.0.weight",), (7, torch.ones(1))]
)
def test_what_is_no_pair_is_named_by_a_plan_as_well(pair):
    bench = Bench(TOYS["fused"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    with (
        pytest.raises(WeightMismatchError, match=r"\(name, tensor\) pairs"),
        bench.session(plans=True) as session,
    ):
        session.load(iter([pair]))


def test_loads_of_a_part_and_loads_by_a_plan_go_together():
    bench = Bench(TOYS["plain"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    part = {"layers.0.weight": bench.state(4)["layers.0.weight"]}
    with bench.session(plans=True, scope=Scope.only(list(part))) as session:
        session.load(part)
    bench.reload(bench.state(5), plans=True)


@pytest.mark.parametrize("plans", [False, True])
def test_an_empty_source_writes_nothing(plans):
    """What is refused after it leaves the model as it was."""
    bench = Bench(TOYS["bare copies"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    wrong = {name: tensor[:1] for name, tensor in bench.state(4).items()}
    session = bench.open(plans=plans)
    session.load({})
    with pytest.raises(WeightMismatchError) as caught:
        session.load(wrong)
    assert caught.value.model_intact
    bench.check_ended(session, caught.value)


@pytest.mark.parametrize("plans", [False, True])
def test_a_name_that_is_new_to_the_plan_counts_as_consumed(plans):
    bench = Bench(
        lambda: LoadingModel(layers.Linear(), layers.DefaultScaleLinear(), layers.RepackedLinear())
    )
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    state = {**bench.state(4), "layers.1.scale": torch.full((1,), 3.0)}
    receipt = bench.reload(state, plans=plans).receipt
    assert receipt.consumed.count == len(state)
    assert receipt.skipped.count == 0


def test_a_tensor_that_is_replaced_during_a_quick_load_is_named():
    """Nothing but the place of a live tensor tells that graphs compute with another one."""
    bench = Bench(TOYS["plain"])
    bench.reload(bench.state(2), plans=True)
    bench.reload(bench.state(3), plans=True)
    session = bench.open(plans=True)
    session.load(bench.state(4))
    path, module = next((n, m) for n, m in bench.model.named_modules() if "weight" in m._parameters)
    module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    with pytest.raises(StorageChangedError, match=rf"{path}\.weight: it is another tensor"):
        session.finish()


class Picking(torch.nn.Module):
    """Takes one name of many, as a rank does that owns few of the experts."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "mine":
                self.weight.copy_(tensor)


def test_what_nobody_takes_costs_the_same_for_each_name_however_many_there_are():
    """Of 500,000 expert tensors a rank may own 8,000."""
    spent = {}
    for count in (1_000, 32_000):
        state = {f"other.{number}": torch.zeros(1) for number in range(count)}
        state["mine"] = torch.ones(2)
        firsts = []
        for _ in range(3):  # what else the process does at the moment takes time as well
            model = Picking()
            with WeightLoadSession(model, plans=True) as session:
                session.load(state)
            gc.collect()
            gc.disable()  # a collection looks at all that earlier tests left, and costs as much as a load
            try:
                begin = time.thread_time()
                with WeightLoadSession(
                    model, plans=True
                ) as session:  # the first that uses the plan
                    session.load(state)
                firsts.append(time.thread_time() - begin)
            finally:
                gc.enable()
            assert model.weight.tolist() == [1.0, 1.0]
        spent[count] = min(firsts)
    assert spent[32_000] < 100 * spent[1_000]  # 32 times as many; looking through all was 300


def known(toy="plain"):
    """Return a bench whose last two loads brought the same names in one call each."""
    bench = Bench(TOYS[toy])
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)
    return bench


def _strided(tensor):
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("change", [_strided, torch._neg_view, torch.nn.Parameter])
def test_a_call_that_comes_as_before_but_for_the_layout_of_a_tensor_is_right(change):
    bench = known()
    state = bench.state(5)
    name = next(name for name, tensor in state.items() if tensor.dim() == 2)
    sent = {**state, name: change(state[name])}
    with bench.session(plans=True) as session:
        session.load(sent)
    bench.serves = {**state, name: sent[name].detach().clone()}
    bench.check_finished(session)


def test_a_call_that_comes_as_before_for_the_second_time_in_a_session_is_double():
    bench = known()
    session = bench.open(plans=True)
    session.load(bench.state(5))
    with pytest.raises(DuplicateWeightError):
        session.load(bench.state(6))


def test_a_call_that_comes_as_before_is_refused_where_the_scope_has_less():
    bench = known()
    names = list(bench.state(5))
    session = bench.open(plans=True, scope=Scope.only(names[:1]))
    with pytest.raises(UnexpectedWeightError, match="not in the scope") as caught:
        session.load(bench.state(5))
    assert caught.value.model_intact
    bench.check_ended(session, caught.value)


def test_calls_that_never_come_again_are_not_kept_for_good(monkeypatch):
    monkeypatch.setattr(recorded, "_KEPT", 0)
    bench = known("everything")
    record = vars(bench.model)["_weightload_record"].plan
    for seed in range(30):
        bench.reload(shuffled(bench.state(seed), seed), plans=True)
    kept = sum(len(bundle.names) for bundle in record.bundles.values())
    assert kept <= 2 * len(record.routes)


class Complex(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64), requires_grad=False)


@pytest.mark.parametrize("make", [dict, list, iter])
@pytest.mark.parametrize("verify", [None, "full"])
def test_conjugates_are_resolved(make, verify):
    """Their bytes are those of the tensor that they are conjugates of."""
    model = Complex()
    for number in range(1, 5):
        sent = torch.full((3,), complex(number, number)).to(torch.complex64).conj()
        pairs = {"weight": sent}
        with WeightLoadSession(model, plans=True, verify=verify) as session:
            session.load(pairs if make is dict else make(list(pairs.items())))
        assert model.weight.tolist() == [complex(number, -number)] * 3


def _adds_a_module(bench):
    bench.model.layers[0].adapter = layers.Linear()
    bench.model.layers[0].adapter.weight.data.zero_()


def _adds_a_module_without_tensors(bench):
    bench.model.layers[0].adapter = torch.nn.Identity()


def _wraps_a_module(bench):
    class Wrapped(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

        def forward(self, x):
            return self.base_layer(x)

    bench.model.layers[1] = Wrapped(bench.model.layers[1])


def _loses_a_module(bench):
    del bench.model.layers[2]


def _has_a_new_rule(bench):
    rule = ModuleRule(role=Role.QUANT, process=lambda module: module.weight.data.mul_(3))
    bench.framework.registry.register(layers.Linear, rule)


def _has_another_type(bench):
    bench.model.layers[1].to(torch.float64)


def _has_other_memory(bench):
    place = bench.model.layers[1].weight
    place.data = place.data.clone()


def _has_another_parameter(bench):
    layer = bench.model.layers[1]
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def _has_another_loader(bench):
    def turned(place, tensor):
        place.data.copy_(tensor.flip(0))

    bench.model.layers[1].weight.weight_loader = turned


CHANGES = [
    _adds_a_module, _adds_a_module_without_tensors, _wraps_a_module, _loses_a_module,
    _has_a_new_rule, _has_another_type, _has_other_memory, _has_another_parameter,
    _has_another_loader,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after the plan was used"])
def test_a_model_that_has_changed_loads_as_without_a_plan(change, when):
    """Adapters come and go, engines re-allocate, users register rules: plans must not outlive that."""
    outcomes = []
    for plans in (True, False):
        bench = Bench(
            lambda: LoadingModel(layers.RepackedLinear(), layers.Linear(), layers.InPlaceLinear())
        )
        state = bench.state(5)
        for seed in (2, 3, 4) if when != "before" else (2,):
            bench.reload(bench.state(seed), plans=plans)
        change(bench)
        mine = []
        for _ in range(2):
            session = bench.session(plans=plans)
            try:
                with session:
                    session.load(dict(state))
                tensors = (*bench.model.named_parameters(), *bench.model.named_buffers())
                mine.append({name: tensor.tolist() for name, tensor in tensors})
            except WeightLoadError as error:
                mine.append((type(error), error.model_intact))
        outcomes.append(mine)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("toy", ["plain", "fused", "pieced experts", "kernel"])
def test_what_a_load_that_stages_everything_shows_of_hooks_is_not_kept(toy):
    """The first reload of an engine that vLLM loaded itself is one; the others are to be quick."""
    bench, other = Bench(TOYS[toy]), Bench(TOYS[toy])
    bench.reload(bench.state(2), plans=True, commit="atomic")
    for one in (bench, other):
        for seed in (3, 4):
            session = one.reload(one.state(seed), plans=True)
    parts = [record_of(one.model).plan.part for one in (bench, other)]
    assert parts[0].modules == parts[1].modules
    assert parts[0].whole is parts[1].whole is False
    assert session.receipt.hooks_in_pieces == (2 if toy == "pieced experts" else 0)


@pytest.mark.parametrize("toy", ["plain", "fused", "pieced experts", "packed experts", "kernel"])
def test_nothing_is_held_while_the_next_tensor_is_made(toy):
    """A source that makes one large tensor after another needs memory for one of them."""
    bench = Bench(TOYS[toy])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    state, made, alive = bench.state(4), [], []

    def source():
        for name, tensor in state.items():
            alive.append(sum(one() is not None for one in made))
            new = tensor.clone()
            made.append(weakref.ref(new))
            yield name, new
            del new

    with bench.session(plans=True) as session:
        session.load(source(), transport=[])
    bench.serves = state
    bench.check_finished(session)
    assert alive == [0] * len(state)


class Completing(torch.nn.Module):
    """Fills what no source has brought, once its source is exhausted."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.tied = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights):
        places, came = dict(self.named_parameters()), set()
        for name, tensor in weights:
            places[name].data.copy_(tensor)
            came.add(name)
        if "tied" not in came:
            self.tied.data.copy_(self.weight)


def test_a_plan_does_not_keep_loaders_from_filling_what_does_not_come_any_more():
    """They are not asked when a plan takes all that comes; the load after the one that fails asks."""
    model = Completing()
    for value in (1.0, 2.0, 3.0):
        with WeightLoadSession(model, plans=True) as session:
            session.load({"weight": torch.full((2,), value), "tied": torch.full((2,), value + 1)})
    rest = {"weight": torch.full((2,), 5.0)}
    with (
        pytest.raises(IncompleteLoadError, match="tied"),
        WeightLoadSession(model, plans=True) as session,
    ):
        session.load(rest)
    for value in (6.0, 7.0):
        with WeightLoadSession(model, plans=True) as session:
            session.load({"weight": torch.full((2,), value)})
        assert model.tied.tolist() == [value, value]
