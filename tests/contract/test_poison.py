"""A model that holds a mixture refuses to compute, until a complete load cures it."""

import copy
import pickle

import attrs
import pytest
import torch
from torch import nn

from weightload import (
    IncompleteLoadError,
    ModelBusyError,
    ModelPoisonedError,
    ProcessingError,
    Scope,
    SessionState,
    WeightLoadSession,
    current_session,
    poison_of,
    require_usable,
    weights_version,
)
from weightload.ownership import entered
from weightload.testing import TOYS, Bench, ToyModel, layers
from weightload.testing.oracle import check_equal, expected, identical, outputs


def poisoned(toy="repacked", **options):
    """Return a bench whose model a load left half new."""
    bench = Bench(TOYS[toy])
    state = bench.state(2)
    name = next(iter(state))
    session = bench.open(**options)
    session.load(iter([(name, state[name])]))
    with pytest.raises(IncompleteLoadError):
        session.finish()
    bench.serves = None
    return bench, session


def test_a_poisoned_model_refuses_to_run_and_says_who_did_it():
    bench, session = poisoned(version=7)
    with pytest.raises(ModelPoisonedError, match=rf"session {session.id} failed in step 'finish'"):
        bench.model(bench.model.example())
    poison = poison_of(bench.model)
    assert (poison.session, poison.version, poison.terminal) == (session.id, 7, False)
    assert "IncompleteLoadError" in poison.cause
    assert weights_version(bench.model) is None


CALLS = {
    "the model": lambda model, x: model(x),
    "its forward": lambda model, x: model.forward(x),
    "a module of it": lambda model, x: model.layers[1](x),
    "a compiled model": lambda model, x: torch.compile(model, backend="eager")(x),
}


@pytest.mark.holds("H03", "H08")
@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_run_it_is_refused(call):
    bench, _ = poisoned()
    with pytest.raises(ModelPoisonedError):
        CALLS[call](bench.model, bench.model.example())


def test_a_function_that_was_compiled_before_is_refused_too():
    bench = Bench(TOYS["repacked"])
    compiled = torch.compile(bench.model, backend="eager")
    compiled(bench.model.example())
    session = bench.open()
    state = bench.state(2)
    session.load(iter([("layers.0.weight", state["layers.0.weight"])]))
    session.abort()
    with pytest.raises(ModelPoisonedError):
        compiled(bench.model.example())
    bench.reload(bench.state(3))
    assert identical(compiled(bench.model.example()), expected(bench.factory, bench.state(3)))


def test_a_model_that_shares_a_module_is_refused_and_cured_with_it():
    bench, _ = poisoned()
    draft = ToyModel(layers.Linear(), bench.model.layers[1])
    with pytest.raises(ModelPoisonedError):
        draft(draft.example())
    with pytest.raises(ModelPoisonedError):
        require_usable(draft)
    bench.reload(bench.state(3))
    draft(draft.example())


def test_a_complete_load_cures_and_leaves_no_guard():
    bench, _ = poisoned()
    bench.reload(bench.state(3))
    bench.model(bench.model.example())
    assert not any("forward" in vars(module) for module in bench.model.modules())


def test_a_guard_gives_a_forward_of_the_module_itself_back():
    """Frameworks put their own forward on instances."""
    bench = Bench(TOYS["plain"])
    layer = bench.model.layers[0]
    own = lambda x: x * 2  # noqa: E731
    layer.forward = own
    session = bench.open()
    session.load(iter([("layers.0.weight", bench.state(2)["layers.0.weight"])]))
    session.abort()
    with pytest.raises(ModelPoisonedError):
        layer(torch.ones(8))
    with bench.session() as session:
        session.load(bench.state(3))
    assert layer.forward is own


def test_a_failed_cure_leaves_the_model_guarded():
    bench, _ = poisoned()
    with pytest.raises(IncompleteLoadError), bench.session() as session:
        session.load({})
    assert session.state is SessionState.ABORTED
    with pytest.raises(ModelPoisonedError):
        bench.model(bench.model.example())
    bench.reload(bench.state(3))


def test_hooks_may_call_the_model_while_a_session_cures_it():
    class Calibrated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
            self.other = nn.Parameter(torch.zeros(2), requires_grad=False)

        def process_weights_after_loading(self):
            self.peak = self(torch.ones(2)).max()

        def forward(self, x):
            return self.weight * x + self.other

    from weightload import Framework, ModuleRegistry, ModuleRule, Role

    registry = ModuleRegistry()
    registry.register(
        Calibrated,
        ModuleRule(role=Role.QUANT, process=lambda module: module.process_weights_after_loading()),
    )
    model = Calibrated()
    with WeightLoadSession(model, framework=Framework(registry)) as session:
        session.load({"weight": torch.ones(2), "other": torch.ones(2)})
    with pytest.raises(IncompleteLoadError), WeightLoadSession(model) as session:
        session.load(iter([("weight", torch.full((2,), 5.0))]))
    assert poison_of(model) is not None
    with WeightLoadSession(model) as session:
        session.load({"weight": torch.full((2,), 3.0), "other": torch.full((2,), 4.0)})
    assert float(model.peak) == 7.0


@pytest.mark.holds("H05")
def test_poison_is_recorded_before_anything_is_cleaned_up():
    """Whoever is called during the clean-up, or fails in it, finds the model refused."""
    bench = Bench(TOYS["repacked"])
    session = bench.open()
    session.load(iter([("layers.0.weight", bench.state(2)["layers.0.weight"])]))
    seen = []
    board = session._board
    restore = board.restore

    def watched():
        seen.append(poison_of(bench.model))
        restore()
        raise RuntimeError("the clean-up failed")

    board.restore = watched
    bench.framework.fail_hook()
    with pytest.raises(ProcessingError) as caught:
        session.load(iter([("layers.2.weight", bench.state(2)["layers.2.weight"])]))
    assert seen[0] is not None
    assert any("the clean-up failed" in note for note in caught.value.__notes__)
    assert session.state is SessionState.POISONED


def test_a_terminal_fault_is_cured_by_nothing():
    bench = Bench(TOYS["repacked"])
    session = bench.open()
    receipt = session.abort("the device is gone", terminal=True)
    assert not receipt.model_intact
    assert poison_of(bench.model).terminal
    for scope in (Scope.full(), Scope.only(["layers.1.weight"])):
        with pytest.raises(ModelPoisonedError, match="start the process again") as caught:
            bench.session(scope=scope).prepare()
        assert caught.value.facts["terminal"]
    assert current_session() is None


def test_an_error_of_the_device_is_terminal():
    bench = Bench(TOYS["repacked"])
    session = bench.open()
    lost = torch.AcceleratorError("device-side assert triggered", 710)

    def source():
        yield "layers.1.weight", bench.state(2)["layers.1.weight"]
        raise lost

    with pytest.raises(torch.AcceleratorError):
        session.load(source())
    assert poison_of(bench.model).terminal
    assert session.state is SessionState.POISONED


def test_later_poison_does_not_hide_a_terminal_one():
    from weightload.ownership import record_poison

    bench = Bench(TOYS["plain"])
    bench.open().abort("gone", terminal=True)
    first = poison_of(bench.model)
    record_poison(bench.model, attrs.evolve(first, session=0, terminal=False))
    assert poison_of(bench.model).terminal


def test_a_copy_of_a_poisoned_model_refuses_as_well():
    bench, _ = poisoned("plain")
    for other in (copy.deepcopy(bench.model), pickle.loads(pickle.dumps(bench.model))):
        with pytest.raises(ModelPoisonedError):
            other(other.example())


def test_poison_travels():
    bench, _ = poisoned()
    poison = poison_of(bench.model)
    assert pickle.loads(pickle.dumps(poison)) == poison
    error = pickle.loads(pickle.dumps(poison.error()))
    assert str(error) == str(poison.error())


def test_a_clean_abort_installs_nothing():
    bench = Bench(TOYS["repacked"])
    bench.open(commit="atomic").abort()
    assert identical(outputs(bench.model), expected(bench.factory, bench.state(1)))
    assert not any("forward" in vars(module) for module in bench.model.modules())
    check_equal(bench.model, bench.factory, bench.state(1))


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("toy", ["plain", "repacked", "attention", "everything"])
def test_a_model_does_not_compute_while_a_session_is_open(toy, commit):
    """It holds a mixture, or tensors without data."""
    bench = Bench(TOYS[toy])
    session = bench.open(commit=commit)
    for weights in ({}, bench.state(2)):
        session.load(weights)
        for run in (bench.model, bench.model.layers[0]):
            with pytest.raises(ModelBusyError, match=f"Session {session.id} is replacing"):
                run(bench.model.example())
    session.finish()
    bench.serves = bench.state(2)
    bench.check_finished(session)
    session = bench.open(commit=commit)
    session.abort()
    assert identical(outputs(bench.model), expected(bench.factory, bench.state(2)))


def _computes(model):
    return model(model.example()).isfinite().all()


@pytest.mark.parametrize("publish", [False, True])
def test_a_plan_that_a_reload_recorded_leaves_no_guard_behind(publish):
    """The guards of that reload were in place when the plan was made."""
    bench = Bench(TOYS["plain"])
    vars(bench.model)["_weightload_record"].plan = None
    seen = []
    options = {"publish": [lambda old, new: seen.append(_computes(bench.model))]} if publish else {}
    for seed in (2, 3, 4, 5):
        session = bench.reload(bench.state(seed), plans=True, version=seed, **options)
        assert _computes(bench.model)
        assert not any("forward" in vars(module) for module in bench.model.modules())
    assert len(seen) == (4 if publish else 0)
    assert session.receipt.outcome == "finished"


def test_a_poisoned_model_that_is_cured_again_and_again_computes():
    bench = Bench(TOYS["repacked"])
    for seed in (2, 3, 4):
        bench.framework.fail_hook(1)
        session = bench.open(plans=True)
        with pytest.raises(ProcessingError):
            session.load(bench.state(seed))
        vars(bench.model)["_weightload_record"].plan = None
        bench.reload(bench.state(seed), plans=True)
        assert _computes(bench.model)
        assert not any("forward" in vars(module) for module in bench.model.modules())


def test_a_forward_of_its_own_that_a_module_has_lost_is_not_called_any_more():
    bench = Bench(TOYS["plain"])
    vars(bench.model)["_weightload_record"].plan = None
    layer = bench.model.layers[0]
    layer.forward = lambda x: x * 0
    with bench.session(plans=True) as session:
        session.load(bench.state(2))
    del layer.forward
    for seed in (3, 4):
        session = bench.open(plans=True)
        session.load(bench.state(seed))
        with entered(session):
            assert torch.equal(
                layer(bench.model.example()), type(layer).forward(layer, bench.model.example())
            )
        session.finish()
