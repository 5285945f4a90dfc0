"""A reload gives, bit for bit and at the old addresses, what a fresh load gives."""

import random
from collections import Counter

import pytest
import torch

from weightload import (
    Framework,
    IncompleteLoadError,
    ModuleRegistry,
    ModuleRule,
    Role,
    Scope,
    UnexpectedWeightError,
    WeightLoadSession,
    poison_of,
    weights_version,
)
from weightload.testing import (
    TOYS,
    Bench,
    Kept,
    LoadingModel,
    fresh,
    identical,
    layers,
    make_state,
)
from weightload.testing.layers import WIDTH, RepackedLinear, parameter

COMMITS = ("stream", "atomic")


def in_order(session, state):
    session.load(list(state.items()))


def as_mapping(session, state):
    session.load(state)


def reversed_order(session, state):
    session.load(list(reversed(state.items())))


def shuffled(session, state):
    items = list(state.items())
    random.Random(len(items)).shuffle(items)
    session.load(items)


def chunks_of_five(session, state):
    items = list(reversed(state.items()))
    for start in range(0, len(items), 5):
        session.load(items[start : start + 5])


def one_by_one(session, state):
    for name, tensor in sorted(state.items()):
        session.load({name: tensor})


def generator(session, state):
    session.load((name, tensor.clone()) for name, tensor in state.items())


def one_overwritten_buffer(session, state):
    """Every tensor is yielded as a view of one buffer, which the next one overwrites."""
    largest = max(tensor.numel() for tensor in state.values())
    buffer = next(iter(state.values())).new_empty(largest)

    def source():
        for name, tensor in state.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            buffer.fill_(float("nan"))

    session.load(source())


def taken_back_after_load(session, state):
    """Each call's tensors are overwritten as soon as the call has returned."""
    items = list(state.items())
    for start in range(0, len(items), 3):
        sent = [(name, tensor.clone()) for name, tensor in items[start : start + 3]]
        session.load(sent)
        for _, tensor in sent:
            tensor.fill_(float("nan"))


DELIVERIES = (
    in_order,
    as_mapping,
    reversed_order,
    shuffled,
    chunks_of_five,
    one_by_one,
    generator,
    one_overwritten_buffer,
    taken_back_after_load,
)


@pytest.mark.holds("C07", "C14", "frameworks-O1", "W23")
@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("deliver", DELIVERIES, ids=lambda deliver: deliver.__name__)
@pytest.mark.parametrize("toy", TOYS)
def test_every_reload_equals_a_fresh_load(toy, deliver, commit):
    """A over A, then B, B again, and back to A: each time what a fresh model computes."""
    bench = Bench(TOYS[toy])
    hooks = Counter(bench.framework.calls)
    for number in (1, 2, 2, 1):
        bench.framework.calls.clear()
        with WeightLoadSession(bench.model, version=number, commit=commit) as session:
            deliver(session, bench.state(number))
        bench.serves = bench.state(number)
        bench.check_finished(session)
        assert weights_version(bench.model) == number
        ran, receipt = Counter(bench.framework.calls), session.receipt
        assert ran <= hooks, "each hook runs once in a session"
        left = receipt.hooks_spared + receipt.hooks_in_pieces
        assert ran.total() + left == hooks.total(), (
            "or does the same whatever is loaded, or is done"
        )
        assert set(hooks.values()) <= {1}


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("plans", [False, True])
def test_parts_without_elements_may_come_stay_away_and_come_again(plans, commit):
    """A sender may drop what holds nothing: no value is missing then, and none is awaited."""
    bench = Bench(TOYS["hollow"])
    names = list(bench.state(1))
    hollow = [name for name in names if not bench.state(1)[name].numel()]
    assert len(hollow) == 6
    rest = [name for name in names if name not in hollow]
    orders = (
        rest,
        [*rest, *hollow],
        [*hollow, *rest],
        rest,
        rest,
        [*rest, *hollow],
        [*rest, *hollow],
    )
    for number, order in enumerate(orders, start=2):
        state = bench.state(number)
        with bench.session(commit=commit, plans=plans) as session:
            for name in order:
                session.load([(name, state[name])])
        bench.serves = state
        bench.check_finished(session)


class Biased(RepackedLinear):
    """Its hook replaces the first of two parameters."""

    def __init__(self):
        super().__init__()
        self.bias = parameter(WIDTH)

    def forward(self, x):
        return super().forward(x) + self.bias


@pytest.mark.parametrize("commit", COMMITS)
def test_parameters_keep_their_order(commit):
    """Checksums and optimisers walk them by position."""
    bench = Bench(lambda: LoadingModel(Biased(), Biased()))
    names = [name for name, _ in bench.model.named_parameters()]
    for number in (2, 1):
        bench.reload(bench.state(number), commit=commit)
        assert [name for name, _ in bench.model.named_parameters()] == names


@pytest.mark.parametrize("commit", COMMITS)
def test_what_the_engine_bound_later_stays_bound(commit):
    """A cache that was bound to an attention layer after the first load is not the hook's."""
    bench = Bench(TOYS["attention"])
    cache = bench.model.layers[0].cache = torch.zeros(4)
    bench.kept = Kept.of(bench.model)
    for number in (2, 1):
        bench.reload(bench.state(number), commit=commit)
        assert bench.model.layers[0].cache is cache


@pytest.mark.holds("frameworks-L", "W26")
@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize("toy", TOYS)
def test_a_captured_graph_computes_with_the_new_weights(toy, commit):
    """Tensors that something else holds since the first load have the new values."""
    bench = Bench(TOYS[toy])
    held = dict(bench.kept.tensors)
    bench.reload(bench.state(2), commit=commit)
    want = Kept.of(fresh(bench.factory, bench.state(2))).tensors
    assert held.keys() == want.keys()
    for name, tensor in held.items():
        assert identical(tensor, want[name]), name


def optional(bench, seed, *names):
    """Return a checkpoint of the kept scales, which brings those of some layers."""
    scales = {f"layers.{name}.scale": torch.full((1,), seed + 0.5) for name in names}
    return {**bench.state(seed), **scales}


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("commit", COMMITS)
def test_a_stream_waits_for_a_tensor_that_may_stay_away_once_it_has_come(plans, commit):
    """A hook reads it: one that came after the hook had run would count for nothing."""
    bench = Bench(TOYS["kept scale"])
    bench.reload(optional(bench, 2, 0, 2), plans=plans)
    for seed, names in ((3, (0, 2)), (4, (0,)), (5, ()), (6, (0, 2)), (7, (2,)), (8, (0, 2))):
        state = optional(bench, seed, *names)
        with bench.session(commit=commit, plans=plans) as session:
            for pair in sorted(state.items(), reverse=True):  # weights before scales
                session.load([pair])
        bench.serves = state
        bench.check_finished(session)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("verify", [None, "full"])
def test_a_tensor_that_is_new_to_a_model_is_refused_after_the_hook_that_reads_it(plans, verify):
    bench = Bench(TOYS["kept scale"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    state = optional(bench, 4, 0)
    session = bench.open(plans=plans, verify=verify)
    with pytest.raises(UnexpectedWeightError, match=r"'layers.0.scale' arrived after"):
        session.load(iter(sorted(state.items(), reverse=True)))
    assert poison_of(bench.model) is not None
    bench.reload(state, plans=plans)  # a mapping is looked through before


@pytest.mark.parametrize("plans", [False, True])
def test_a_stream_waits_for_a_new_tensor_that_was_announced(plans):
    """A bucket names what comes in it; of names that are new to the model only that is known."""
    bench = Bench(TOYS["kept scale"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=plans)
    state = optional(bench, 4, 0, 2)
    with bench.session(plans=plans) as session:
        session.check({name: tuple(one.shape) for name, one in state.items()}, complete=True)
        for pair in sorted(state.items(), reverse=True):
            session.load([pair])
    bench.serves = state
    bench.check_finished(session)


@pytest.mark.parametrize("plans", [False, True])
def test_a_plain_buffer_that_may_stay_away_may_come_last(plans):
    bench = Bench(TOYS["buffers"])
    for seed in (2, 3, 4, 5):
        state = {**bench.state(seed), "layers.0.temperature": torch.full((), seed + 0.5)}
        order = list(state) if seed > 2 else ["layers.0.temperature", *bench.state(seed)]
        with bench.session(plans=plans) as session:
            for name in order:
                session.load([(name, state[name])])
        bench.serves = state
        bench.check_finished(session)


def test_what_a_hook_reads_is_not_reset_while_the_rest_of_its_layer_keeps_its_value():
    """The weight was packed with the scale that came; its checkpoint format is gone."""
    bench = Bench(TOYS["kept scale"])
    bench.reload(optional(bench, 2, 0))
    rest = {name: one for name, one in bench.state(3).items() if name != "layers.0.weight"}
    session = bench.open(scope=Scope.full(allow_missing=["layers.0.weight"]), commit="atomic")
    session.load(rest)
    with pytest.raises(IncompleteLoadError, match=r"layers\.0\.weight"):
        session.finish()
    with bench.session(scope=Scope.full(allow_missing=["layers.0.*"])) as session:
        session.load(rest)
    bench.serves = {**rest, **{k: v for k, v in optional(bench, 2, 0).items() if "layers.0" in k}}
    bench.check_finished(session)


def squares(**values):
    """Return a checkpoint of square layers of the given names, each of one value."""
    return {f"{name}.weight": torch.full((WIDTH, WIDTH), value) for name, value in values.items()}


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("commit", COMMITS)
def test_a_module_that_was_added_has_to_be_loaded_like_the_others(plans, commit):
    """Nobody knows what it was constructed with: that is no default, and no value to fall back to."""
    model = torch.nn.ModuleDict({"a": layers.Linear(), "b": layers.Linear()})

    def load(**values):
        with WeightLoadSession(model, plans=plans, commit=commit) as session:
            session.load(iter(squares(**values).items()))
        assert {n: float(one.weight[0, 0]) for n, one in model.items()} == values

    load(a=1.0, b=1.0)
    load(a=2.0, b=2.0)
    for change in ({"c": layers.Linear()}, {"b": layers.Linear()}):
        model.update(change)
        for _ in range(2):
            with pytest.raises(IncompleteLoadError, match=rf"{next(iter(change))}\.weight"):
                load(**{name: 3.0 for name in model if name not in change})
        for value in (4.0, 5.0):
            load(**dict.fromkeys(model, value))
        with pytest.raises(IncompleteLoadError, match=rf"{next(iter(change))}\.weight"):
            load(**{name: 6.0 for name in model if name not in change})
    model["a"], model["b"] = model["b"], model["a"]
    for value in (7.0, 8.0):
        load(a=value, b=value + 10, c=value + 20)
    del model["a"]
    with pytest.raises(IncompleteLoadError, match=r"b\.weight, c\.weight"):
        load()
    load(b=9.0, c=10.0)


class Unfolding(torch.nn.Module):
    """Its hook makes the modules that it computes with."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)

    def process_weights_after_loading(self):
        inner = layers.Linear()
        inner.weight.data.copy_(self.weight.detach().t())
        self.kernel = torch.nn.Sequential(inner)

    def forward(self, x):
        return self.kernel(x)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("commit", COMMITS)
def test_modules_that_a_hook_makes_are_not_waited_for(plans, commit):
    registry = ModuleRegistry()
    registry.register(Unfolding, ModuleRule(role=Role.QUANT, process=_process))
    model, framework = LoadingModel(layers.Linear(), Unfolding()), Framework(registry)
    for seed in range(5):
        state = make_state(lambda: LoadingModel(layers.Linear(), Unfolding()), seed)
        options = {} if seed else {"framework": framework}
        with WeightLoadSession(model, commit=commit, plans=plans, **options) as session:
            session.load(state)
        assert torch.equal(model.layers[1].kernel[0].weight, state["layers.1.weight"].t())


def _process(module):
    module.process_weights_after_loading()


def test_a_layer_with_parts_without_elements_may_stay_away_as_a_whole():
    """By the names of its sources, as a caller knows them."""
    bench = Bench(TOYS["hollow"])
    bench.reload(bench.state(2))
    names = [name for name in bench.state(2) if name.startswith("layers.0.")]
    with bench.session(scope=Scope.full(allow_missing=names)) as session:
        session.load({n: one for n, one in bench.state(3).items() if n not in names})
    bench.serves = {**bench.state(3), **{name: bench.state(2)[name] for name in names}}
    bench.check_finished(session)
