"""Staging and processing use the memory of the live tensor where that has been shown to end there.

Damage shown: a hook that did something else this time spoils the tensor whose memory it got; a load
that fails before anything live was written leaves a model that is not what it was; memory that nobody
can give away grows with the order in which tensors come.
"""

import pytest
import torch
from files_of import write
from torch import nn

from weightload import (
    Checkpoint,
    Framework,
    IncompleteLoadError,
    ModuleRegistry,
    ModuleRule,
    ProcessingError,
    Role,
    StagingBudgetError,
    UsageError,
    WeightLoadSession,
    staging,
)
from weightload.testing import Bench, LoadingModel, layers

WEIGHT = layers.WIDTH * layers.WIDTH * 4


class Spied(layers.RoomLinear):
    """Says where its hook finds the weight, and where it gets what it makes."""

    def process_weights_after_loading(self):
        self.before = self.weight.data_ptr()
        super().process_weights_after_loading()
        self.made = self.weight.data_ptr(), self.gain.data_ptr()


class SpiedInPlace(layers.InPlaceLinear):
    def process_weights_after_loading(self):
        self.before = self.weight.data_ptr()
        super().process_weights_after_loading()


def judged(*makes):
    """Return a bench whose plan knows by now what its hooks do."""
    bench = Bench(lambda: LoadingModel(*(make() for make in makes)))
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    return bench


def ordered(state, *first):
    """Return a state with the tensors of some layers first."""
    early = [name for layer in first for name in state if name.startswith(f"layers.{layer}.")]
    return {name: state[name] for name in (*early, *(n for n in state if n not in early))}


def test_what_a_hook_makes_to_write_into_is_the_live_memory():
    bench = judged(layers.Linear, Spied)
    layer = bench.model.layers[1]
    live = layer.weight.data_ptr(), layer.gain.data_ptr()
    receipt = bench.reload(bench.state(4), plans=True).receipt
    assert layer.made == live
    assert layer.before not in live
    assert receipt.bytes_committed == 0


def test_what_a_hook_changes_in_place_is_staged_in_the_live_memory():
    bench = judged(layers.Linear, SpiedInPlace)
    layer = bench.model.layers[1]
    live = layer.weight.data_ptr()
    receipt = bench.reload(bench.state(4), plans=True).receipt
    assert layer.before == live
    assert receipt.staging_peak_bytes == receipt.bytes_committed == 0


@pytest.mark.parametrize("make", [Spied, SpiedInPlace])
@pytest.mark.parametrize("options", [{"commit": "atomic"}, {"verify": "full"}])
def test_values_and_addresses_are_right_with_other_options(make, options):
    bench = judged(layers.Linear, make, make)
    for seed in (4, 5, 6):
        bench.reload(bench.state(seed), plans=True, **options)
        bench.reload(bench.state(seed + 10), plans=True)


@pytest.mark.parametrize("make", [Spied, SpiedInPlace])
def test_atomic_loads_write_nothing_live_before_all_has_come(make):
    bench = judged(layers.Linear, make)
    session = bench.open(plans=True, commit="atomic")
    session.load(bench.state(4))
    session.abort()
    bench.check_ended(session)
    assert session.receipt.model_intact


class TwoInPlace(layers.InPlaceLinear):
    def __init__(self):
        super().__init__()
        self.bias = layers.parameter(layers.WIDTH)


@pytest.mark.parametrize("make", [Spied, TwoInPlace])
def test_nothing_is_lost_as_long_as_nothing_live_was_written(make):
    """Live memory is used only if an abort would poison in any case."""
    bench = judged(layers.Linear, make)
    state = bench.state(4)
    last = next(name for name in state if name.startswith("layers.0."))
    session = bench.open(plans=True)
    session.load(iter([pair for pair in ordered(state, 1).items() if pair[0] != last][:1]))
    with pytest.raises(IncompleteLoadError) as caught:
        session.finish()
    assert caught.value.model_intact
    bench.check_ended(session, caught.value)


class Moody(layers.RoomLinear):
    """Its hook makes its tensors in another order, or more of them, when it is told to."""

    mood = "as ever"

    def process_weights_after_loading(self):
        self.passes += 1
        value = (self.weight.detach() / (self.gain.detach() + 2)).flip(1)
        double = self.gain.detach() * 2 * self.passes
        if self.mood == "one more":
            torch.empty_like(self.weight).fill_(7.0)
        made = [torch.empty_like(self.weight), torch.empty_like(self.weight)]
        if self.mood == "the other one":
            made.reverse()
        made[1].fill_(9.0)
        made[0].copy_(value)
        if self.mood == "scratch":
            made[0] = made[0].clone() + 0
        self.weight = nn.Parameter(made[0], requires_grad=False)
        self.gain = nn.Parameter(double, requires_grad=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mood", ["one more", "the other one", "scratch"])
def test_a_hook_that_does_something_else_this_time_is_right_all_the_same(mood, strict):
    bench = judged(layers.Linear, Moody)
    for seed, now in ((4, mood), (5, "as ever"), (6, mood)):
        Moody.mood = now
        try:
            session = bench.reload(bench.state(seed), plans=True, strict=strict)
        finally:
            Moody.mood = "as ever"
        assert session.receipt.moved == []


class Swapping(nn.Module):
    """Has two weights of one form; when told to, the hook makes the second first."""

    swaps = False

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.parameter(2, 2), layers.parameter(2, 2)

    def process_weights_after_loading(self):
        order = ["two", "one"] if self.swaps else ["one", "two"]
        made = {name: torch.empty_like(self.one) for name in order}
        for name in order:
            made[name].copy_(getattr(self, name) + {"one": 1, "two": 2}[name])
        for name in order:
            setattr(self, name, nn.Parameter(made[name], requires_grad=False))

    def forward(self, x):
        return x + self.one.sum() - self.two.sum()


def test_two_tensors_that_change_places_do_not_spoil_each_other():
    """Each is made in the other's live memory then."""
    framework = Framework(registry=ModuleRegistry())
    rule = ModuleRule(
        role=Role.QUANT, process=lambda module: module.process_weights_after_loading()
    )
    framework.registry.register(Swapping, rule)
    model = nn.Sequential(nn.Linear(2, 2), Swapping()).requires_grad_(False)

    def reload(number):
        state = {
            "0.weight": torch.full((2, 2), number),
            "0.bias": torch.full((2,), number),
            "1.one": torch.full((2, 2), number + 10),
            "1.two": torch.full((2, 2), number + 20),
        }
        with WeightLoadSession(model, framework=framework, plans=True) as session:
            session.load(state)
        assert model[1].one.tolist() == [[number + 11] * 2] * 2
        assert model[1].two.tolist() == [[number + 22] * 2] * 2

    for number in (1.0, 2.0, 3.0, 4.0):
        reload(number)
    places = model[1].one.data_ptr(), model[1].two.data_ptr()
    Swapping.swaps = True
    reload(5.0)
    Swapping.swaps = False
    reload(6.0)
    assert (model[1].one.data_ptr(), model[1].two.data_ptr()) == places


@pytest.mark.parametrize("half_way", [False, True])
@pytest.mark.parametrize("make", [Spied, SpiedInPlace])
def test_a_hook_that_fails_leaves_a_model_that_the_next_load_cures(make, half_way):
    bench = judged(layers.Linear, make, make)
    bench.framework.fail_hook(half_way=half_way)
    session = bench.open(plans=True)
    with pytest.raises(ProcessingError) as caught:
        session.load(bench.state(4))
    bench.check_ended(session, caught.value)
    bench.check_recovers()


@pytest.mark.parametrize("make", [layers.RoomLinear, layers.InPlaceLinear])
def test_what_waits_takes_no_memory_where_it_can_wait_in_the_live_tensor(make, monkeypatch):
    """Tensors come the wrong way round: everything waits until the last one has come."""
    bench = judged(layers.Linear, *[make] * 6)
    monkeypatch.setattr(staging, "BUCKET", 2 * WEIGHT)
    state = bench.state(4)
    last = {name for name in state if name.startswith("layers.0.")}
    names = sorted(state.keys() - last, key=lambda name: name[::-1]) + sorted(last)
    receipt = bench.reload({name: state[name] for name in names}, plans=True).receipt
    assert receipt.staging_peak_bytes <= 3 * WEIGHT
    monkeypatch.undo()
    assert bench.reload(bench.state(5), plans=True).receipt.outcome == "finished"


def test_a_budget_that_staging_would_exceed_is_an_error_that_names_everything():
    bench = judged(layers.Linear, layers.RepackedLinear, layers.RepackedLinear)
    state = ordered(bench.state(4), 1, 2)
    session = bench.open(plans=True, staging_budget=WEIGHT - 1)
    with pytest.raises(StagingBudgetError, match=rf"layers\.1.*{WEIGHT} bytes.*{WEIGHT - 1}") as e:
        session.load(state)
    assert e.value.facts["needed"] == WEIGHT
    assert e.value.model_intact
    bench.check_ended(session, e.value)
    bench.reload(state, plans=True, staging_budget=WEIGHT)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_budget_holds_on_both_ways(plans, lacks):
    """One layer after the other needs one layer's memory; the long way and a plan agree."""
    bench = judged(layers.Linear, layers.RepackedLinear, layers.RepackedLinear)
    session = bench.open(plans=plans, staging_budget=WEIGHT - lacks)
    if lacks:
        with pytest.raises(StagingBudgetError) as caught:
            session.load(bench.state(4))
        bench.check_ended(session, caught.value)
        bench.check_recovers()
        return
    session.load(iter(bench.state(4).items()))
    session.finish()
    bench.serves = bench.state(4)
    bench.check_finished(session)
    assert session.receipt.staging_peak_bytes == WEIGHT


def test_an_error_that_is_kept_does_not_keep_later_sessions_from_seeing_writes():
    bench = judged(layers.Linear, layers.RepackedLinear)
    session = bench.open(plans=True, staging_budget=0)
    with pytest.raises(StagingBudgetError) as kept:
        session.load(bench.state(4))
    Bench(bench.factory).reload(bench.state(4), plans=False)
    assert kept.value.facts["budget"] == 0


def test_an_atomic_load_stages_everything_at_once():
    bench = judged(layers.Linear, layers.RepackedLinear)
    session = bench.open(plans=True, commit="atomic", staging_budget=2 * WEIGHT - 1)
    with pytest.raises(StagingBudgetError) as caught:
        session.load(bench.state(4))
    assert caught.value.model_intact
    bench.check_ended(session, caught.value)
    bench.reload(bench.state(4), plans=True, commit="atomic", staging_budget=2 * WEIGHT)


@pytest.mark.parametrize("budget", [-1, 1.5, "64MB", True])
def test_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(UsageError, match="staging_budget"):
        WeightLoadSession(nn.Linear(1, 1), staging_budget=budget)


@pytest.mark.parametrize("written", [True, False])
def test_a_stream_that_made_much_wait_is_expected_again(written, monkeypatch):
    """The first unit that comes would take memory of its own, as it does in a stream by layer.

    That is so whether something else was written before, or it is the first.
    """
    bench = judged(layers.Linear, *[layers.RoomLinear] * 6)
    monkeypatch.setattr(staging, "BUCKET", 2 * WEIGHT)
    names = sorted(
        bench.state(4), key=lambda name: (("layers.0" in name) is written, name[::-1]), reverse=True
    )
    peaks = []
    for seed in (4, 5):
        state = bench.state(seed)
        session = bench.reload({name: state[name] for name in names}, plans=True)
        peaks.append(session.receipt.staging_peak_bytes)
    assert peaks[0] > peaks[1] == 0
    for _ in range(2):
        by_layer = bench.reload(bench.state(6), plans=True).receipt.staging_peak_bytes
    assert WEIGHT <= by_layer <= 2 * WEIGHT


def test_a_file_is_not_read_on_before_a_layer_is_processed_that_has_come(tmp_path):
    """Its memory would wait beside that of the next one."""
    bench = judged(layers.Linear, *[layers.RoomLinear] * 4)
    for seed in (4, 5):
        write(tmp_path / "model.safetensors", bench.state(seed))
        with bench.session(plans=True) as session:
            session.load(Checkpoint(tmp_path))
        bench.serves = bench.state(seed)
        bench.check_finished(session)
        assert session.receipt.staging_peak_bytes <= WEIGHT + layers.WIDTH * 4


class Mirrored(nn.Module):
    """Its hook writes into what it makes while it still reads the weight."""

    def __init__(self):
        super().__init__()
        self.weight = layers.parameter(layers.WIDTH, layers.WIDTH)

    def process_weights_after_loading(self):
        made = torch.empty_like(self.weight)
        for column in range(layers.WIDTH):
            made[:, column] = self.weight[:, layers.WIDTH - 1 - column]
        self.weight = nn.Parameter(made, requires_grad=False)


class Doubled(nn.Module):
    """Its hook changes the weight where it is."""

    def __init__(self):
        super().__init__()
        self.weight = layers.parameter(layers.WIDTH, layers.WIDTH)

    def process_weights_after_loading(self):
        self.weight.data.mul_(2)


class Sparse(Doubled):
    """Its hook makes a tensor without a storage, too."""

    def process_weights_after_loading(self):
        torch.empty((2, 2), layout=torch.sparse_coo)
        super().process_weights_after_loading()


class Small:
    """A model of plain linears and one kind of hook, loaded by hand-computed values.

    Its first two reloads, with plans, have shown what the hooks do.
    """

    def __init__(self, *kinds, expected=None):
        self.framework = Framework(registry=ModuleRegistry())
        for kind in {type(one) for one in kinds}:
            rule = ModuleRule(
                role=Role.QUANT, process=lambda module: module.process_weights_after_loading()
            )
            self.framework.registry.register(kind, rule)
        linear = nn.Linear(layers.WIDTH, layers.WIDTH, bias=False)
        self.model = nn.Sequential(linear, *kinds).requires_grad_(False)
        self.expected = expected or (lambda value: value)
        for seed in (1, 2, 3):
            self.reload(seed)

    def state(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(place.shape, generator=generator)
            for name, place in self.model.named_parameters()
        }

    def reload(self, seed, state=None, **options):
        state = self.state(seed) if state is None else state
        places = [place.data_ptr() for place in self.model.parameters()]
        session = WeightLoadSession(
            self.model, framework=self.framework, **{"plans": True, **options}
        )
        with session:
            session.load(state)
        assert places == [place.data_ptr() for place in self.model.parameters()] or seed == 1
        for name, place in self.model.named_parameters():
            wanted = state[name] if name.startswith("0.") else self.expected(state[name])
            assert torch.equal(place, wanted), name
        return session


def test_a_tensor_that_waits_in_live_memory_is_not_overwritten_by_what_is_made_of_it(monkeypatch):
    small = Small(*(Mirrored() for _ in range(4)), expected=lambda value: value.flip(1))
    monkeypatch.setattr(staging, "BUCKET", 0)
    for seed in (4, 5, 6):
        state = small.state(seed)
        halves = {name: state[name] for name in reversed(state)}
        small.reload(seed, halves)


def test_a_hook_that_fails_before_anything_was_written_leaves_the_model_as_it_was():
    bench = judged(layers.Linear, layers.RoomLinear)
    bench.framework.fail_hook(half_way=True)
    session = bench.open(plans=True)
    with pytest.raises(ProcessingError) as caught:
        session.load(ordered(bench.state(4), 1))
    assert caught.value.model_intact
    bench.check_ended(session, caught.value)


@pytest.mark.parametrize("kind", [Doubled, Mirrored])
def test_live_tensors_that_were_given_other_memory_since_are_left_alone_in_it(kind):
    """They are parts of one flat tensor now, so that another's memory is beside theirs."""
    expected = (lambda value: value * 2) if kind is Doubled else (lambda value: value.flip(1))
    small = Small(kind(), kind(), expected=expected)
    flat = torch.zeros(4 * layers.WIDTH * layers.WIDTH)
    for place, part in zip(small.model.parameters(), flat.chunk(4), strict=False):
        place.data = part.view(place.shape).copy_(place)
    for seed in (4, 5, 6):
        small.reload(seed)
        assert not flat.chunk(4)[3].any()


def test_live_tensors_that_were_tied_since_take_the_hooks_as_without_a_plan():
    outcomes = []
    for plans in (False, True):
        small = Small(Doubled(), Doubled(), expected=lambda value: value * 2)
        small.model[2].weight.data = small.model[1].weight.data
        state = small.state(4)
        state["2.weight"] = state["1.weight"].clone()
        order = {name: state[name] for name in ("0.weight", "2.weight", "1.weight")}
        try:
            small.reload(4, order, plans=plans)
            outcomes.append("right")
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


def test_a_hook_that_makes_a_tensor_without_a_storage_is_let_alone():
    Small(Sparse(), expected=lambda value: value * 2).reload(4)


TABLE = {}


class Scratched(nn.Module):
    """Its hook keeps a scratch tensor where nobody looks, until somebody clears it."""

    def __init__(self):
        super().__init__()
        self.weight = layers.parameter(layers.WIDTH, layers.WIDTH)

    def process_weights_after_loading(self):
        if "scratch" not in TABLE:
            TABLE["scratch"] = torch.empty_like(self.weight)
        torch.mul(self.weight, 2, out=TABLE["scratch"])
        made = torch.empty_like(self.weight)
        made.copy_(TABLE["scratch"])
        self.weight = nn.Parameter(made, requires_grad=False)


def test_scratch_that_is_made_anew_is_not_taken_for_the_weight():
    """It is the first tensor that the hook makes then, as the weight was before."""
    TABLE.clear()
    small = Small(Scratched(), expected=lambda value: value * 2)
    small.reload(4)
    TABLE.clear()
    state = small.state(5)
    session = small.reload(5, state)
    TABLE["scratch"].zero_()
    assert torch.equal(small.model[1].weight, state["1.weight"] * 2)
    assert session.receipt.moved


class Reaching(nn.Module):
    """Its hook reads another layer's live weight, past the model, once it is told to."""

    other = None

    def __init__(self):
        super().__init__()
        self.weight = layers.parameter(layers.WIDTH, layers.WIDTH)

    def process_weights_after_loading(self):
        made = torch.empty_like(self.weight)
        made.copy_(self.weight)
        if Reaching.other is not None:
            made += Reaching.other
        self.weight = nn.Parameter(made, requires_grad=False)


@pytest.mark.parametrize("bucket", [0, 64 << 20])
def test_a_hook_that_begins_to_read_what_is_staged_in_live_memory_is_refused(monkeypatch, bucket):
    small = Small(Reaching(), Reaching())
    monkeypatch.setattr(staging, "BUCKET", bucket)
    small.reload(4)
    Reaching.other = small.model[2].weight
    try:
        state = small.state(5)
        order = {name: state[name] for name in ("0.weight", "1.weight", "2.weight")}
        with pytest.raises(ProcessingError, match=r"2\.weight"):
            small.reload(5, order)
    finally:
        Reaching.other = None
    small.reload(6)
