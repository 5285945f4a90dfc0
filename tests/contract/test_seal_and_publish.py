"""seal() is the last moment at which a load can be refused; publish and veto are the caller's word."""

import pytest
import torch

from weightload import (
    InvalidTransitionError,
    ModelPoisonedError,
    ProcessingError,
    SessionState,
    StorageChangedError,
    UnsupportedError,
    poison_of,
    weights_version,
)
from weightload.testing import TOYS, Bench
from weightload.testing.oracle import check_equal, expected, identical, outputs


@pytest.mark.holds("H07", "W28")
@pytest.mark.parametrize("toy", TOYS)
def test_a_sealed_atomic_load_has_changed_nothing_yet(toy):
    """Outputs are those of before, bit for bit, and finish makes them those of the new weights."""
    bench = Bench(TOYS[toy])
    state = bench.state(2)
    session = bench.open(commit="atomic")
    session.load(state)
    agreed = session.seal()
    assert agreed == {"names": len(state), "digest": None}
    assert session.state is SessionState.SEALED
    session.abort()
    check_equal(bench.model, bench.factory, bench.state(1))
    bench.kept.check(bench.model)
    session = bench.open(commit="atomic")
    session.load(state)
    session.seal()
    session.finish()
    bench.serves = state
    bench.check_finished(session)


def test_a_sealed_load_takes_nothing_more():
    bench = Bench(TOYS["repacked"])
    session = bench.open()
    session.load(bench.state(2))
    session.seal()
    for call in (session.seal, lambda: session.load({})):
        with pytest.raises(InvalidTransitionError, match="allowed now: finish, abort"):
            call()
    session.finish()
    check_equal(bench.model, bench.factory, bench.state(2))


@pytest.mark.parametrize("countdown", [0, 1])
@pytest.mark.parametrize("kind", ["fail_hook", "misfit_hook"])
def test_what_can_fail_fails_before_the_first_live_byte(kind, countdown):
    bench = Bench(TOYS["repacked"])
    session = bench.open(commit="atomic")
    session.load(bench.state(2))
    getattr(bench.framework, kind)(countdown)
    with pytest.raises((ProcessingError, StorageChangedError)) as caught:
        session.seal()
    assert caught.value.model_intact
    assert identical(outputs(bench.model), expected(bench.factory, bench.state(1)))
    bench.check_ended(session, caught.value)
    bench.framework.disarm()
    bench.check_recovers()


@pytest.mark.holds("G01", "G02")
def test_callbacks_are_told_old_and_new_version_when_everything_is_in_place():
    bench = Bench(TOYS["repacked"])
    told = []

    def callback(old, new):
        told.append((old, new, weights_version(bench.model)))
        assert identical(outputs(bench.model), expected(bench.factory, bench.state(2)))

    with bench.session(version=2, publish=[callback]) as session:
        session.load(bench.state(2))
        assert told == []
    assert told == [(1, 2, 2)]


def test_callbacks_are_not_called_by_a_load_that_fails():
    bench = Bench(TOYS["repacked"])
    told = []
    session = bench.open(publish=[lambda *versions: told.append(versions)])
    session.abort()
    assert told == []


@pytest.mark.holds("G05")
def test_a_callback_that_raises_poisons_after_all_others_were_called():
    """A cache that could not be dropped holds results of the old weights."""
    bench = Bench(TOYS["repacked"])
    told = []

    def fails(old, new):
        raise OSError("the cache does not answer")

    session = bench.open(version=2, publish=[fails, lambda *versions: told.append(versions)])
    session.load(bench.state(2))
    with pytest.raises(OSError, match="the cache does not answer"):
        session.finish()
    assert told == [(1, 2)]
    assert session.state is SessionState.POISONED
    assert poison_of(bench.model).step == "publish"
    assert weights_version(bench.model) is None
    with pytest.raises(ModelPoisonedError):
        bench.model(bench.model.example())
    bench.serves = None
    bench.reload(bench.state(3))


@pytest.mark.holds("I01")
def test_a_veto_refuses_before_anything_is_claimed():
    bench = Bench(TOYS["repacked"])
    asked = []

    def asleep(model):
        asked.append(model)
        return "the engine is asleep; wake it first"

    session = bench.session(veto=[lambda model: None, asleep])
    with pytest.raises(UnsupportedError, match="wake it first"):
        session.prepare()
    assert asked == [bench.model]
    assert session.state is SessionState.NEW
    bench.check_structure()
    bench.reload(bench.state(2))


# ---------------------------------------------------------------- strict storage


class Swapping(torch.nn.Module):
    """Its hook makes a table whose size depends on the values."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def process_weights_after_loading(self):
        self.table = self.weight.detach()[self.weight > 0].clone()

    def forward(self, x):
        return x * self.table.sum()


def swapping():
    from weightload import Framework, ModuleRegistry, ModuleRule, Role, WeightLoadSession

    registry = ModuleRegistry()
    rule = ModuleRule(role=Role.QUANT, process=lambda m: m.process_weights_after_loading())
    registry.register(Swapping, rule)
    model = Swapping()
    with WeightLoadSession(model, framework=Framework(registry), version="A") as session:
        session.load({"weight": torch.tensor([1.0, -1.0, 2.0, 3.0])})
    return model


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_strict_storage_refuses_a_derived_tensor_that_cannot_stay_where_it_is(commit):
    from weightload import WeightLoadSession

    model = swapping()
    table = model.table
    new = {"weight": torch.tensor([1.0, -1.0, -2.0, 4.0])}
    with (
        pytest.raises(StorageChangedError, match=r"table: shape \(3,\) became \(2,\)") as caught,
        WeightLoadSession(model, strict=True, commit=commit) as session,
    ):
        session.load(new)
    if commit == "atomic":
        assert caught.value.model_intact
        assert model.table is table
        assert float(model(torch.ones(()))) == 6.0


def test_without_strict_storage_it_is_named_in_the_receipt():
    from weightload import WeightLoadSession

    model = swapping()
    with WeightLoadSession(model) as session:
        session.load({"weight": torch.tensor([1.0, -1.0, -2.0, 4.0])})
    assert float(model(torch.ones(()))) == 5.0
    assert session.receipt.tensors_moved == 1
    assert "table" in session.receipt.moved[0]


def test_a_framework_that_has_captured_graphs_makes_strict_storage_the_default():
    from weightload import WeightLoadSession
    from weightload.record import record_of

    model = swapping()
    framework = record_of(model).framework
    framework.captured = lambda model: True
    with pytest.raises(StorageChangedError), WeightLoadSession(model) as session:
        session.load({"weight": torch.tensor([1.0, -1.0, -2.0, 4.0])})
    with WeightLoadSession(model, strict=False) as session:
        session.load({"weight": torch.tensor([1.0, -1.0, -2.0, 4.0])})
