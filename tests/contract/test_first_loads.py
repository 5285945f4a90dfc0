"""A first load gives what a fresh load gives, and what it leaves to defaults stays a default."""

import pytest
import torch

from weightload import (
    DuplicateWeightError,
    IncompleteLoadError,
    ProcessingError,
    Scope,
    SessionState,
    UnexpectedWeightError,
    WeightLoadSession,
    WeightMismatchError,
    poison_of,
)
from weightload.testing import (
    TOYS,
    Bench,
    LoadingModel,
    check_equal,
    layers,
    loading,
    make_state,
    toy_framework,
)

COMMITS = ("stream", "atomic")


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


def first_session(model, **options):
    return WeightLoadSession(
        model, framework=toy_framework(), scope=Scope.full(allow_missing=model.may_miss), **options
    )


@pytest.mark.parametrize("toy", TOYS)
def test_a_first_load_equals_a_fresh_one(toy, commit):
    """Tensors are written where they are and each hook runs once."""
    model, state = TOYS[toy](), make_state(TOYS[toy], 1)
    with first_session(model, commit=commit) as session:
        session.load(state)
    check_equal(model, TOYS[toy], state)
    assert session.receipt.kind == "initial"


WITHOUT_VALUES = (
    "plain",
    "repacked",
    "tied",
    "fused",
    "hollow",
    "attention",
    "kernel",
    "interleaved",
)
"""Toys that are constructed without any value of their own."""


@pytest.mark.holds("I06")
@pytest.mark.parametrize("toy", WITHOUT_VALUES)
def test_a_model_on_meta_gets_its_memory_as_it_loads(toy, commit):
    """The model was constructed without memory; afterwards it serves and can be reloaded."""
    with torch.device("meta"):
        model = TOYS[toy]()
    with first_session(model, commit=commit) as session:
        session.load(make_state(TOYS[toy], 1))
    check_equal(model, TOYS[toy], make_state(TOYS[toy], 1))
    for number in (2, 1):
        with WeightLoadSession(model, commit=commit) as session:
            session.load(make_state(TOYS[toy], number))
        assert session.receipt.kind == "reload"
        check_equal(model, TOYS[toy], make_state(TOYS[toy], number))


@pytest.mark.parametrize("bring", [["order", "rest"], ["rest", "order"], ["order"], []])
def test_a_model_on_meta_waits_for_tensors_without_elements(bring, commit):
    """They may come after all others, or not at all."""
    with torch.device("meta"):
        model = TOYS["hollow"]()
    state = make_state(TOYS["hollow"], 1)
    last = [f"layers.{number}.{name}" for name in bring for number in (0, 2)]
    first = [name for name in state if not name.endswith((".order", ".rest"))]
    with first_session(model, commit=commit) as session:
        for name in (*first, *last):
            session.load([(name, state[name])])
    check_equal(model, TOYS["hollow"], state)


@pytest.mark.parametrize("toy", TOYS)
def test_a_first_load_may_be_tried_again_after_any_failure_of_its_source(toy, commit):
    """Nothing of the first attempt is left in what the second one makes."""
    state, other = make_state(TOYS[toy], 1), make_state(TOYS[toy], 2)
    for position in range(len(state) + 1):
        model = TOYS[toy]()

        def source(position=position):
            yield from list(other.items())[:position]
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="disk"), first_session(model, commit=commit) as failed:
            failed.load(source())
        if "collecting" not in toy:
            expected = SessionState.POISONED if position else SessionState.ABORTED
            assert failed.state is expected
        with first_session(model, commit=commit) as session:
            session.load(state)
        check_equal(model, TOYS[toy], state)
        assert poison_of(model) is None


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("half_way", [False, True], ids=["before", "half way"])
def test_a_first_load_may_be_tried_again_after_any_failure_of_a_hook(toy, commit, half_way):
    """What the hooks did that had run is undone, as in a reload."""
    state, other = make_state(TOYS[toy], 1), make_state(TOYS[toy], 2)
    number = 0
    while True:
        model, framework = TOYS[toy](), toy_framework()
        options = {
            "framework": framework,
            "scope": Scope.full(allow_missing=model.may_miss),
            "commit": commit,
        }
        framework.fail_hook(number, half_way=half_way)
        try:
            with WeightLoadSession(model, **options) as session:
                session.load(other)
        except ProcessingError:
            assert session.state is SessionState.POISONED
        else:
            assert framework.disarm()
            break
        with WeightLoadSession(model, **options) as session:
            session.load(state)
        check_equal(model, TOYS[toy], state)
        for again in (other, state):
            with WeightLoadSession(model, commit=commit) as session:
                session.load(again)
            check_equal(model, TOYS[toy], again)
        number += 1
    assert number == len(framework.calls)


@pytest.mark.parametrize("toy", ["plain", "repacked", "kernel", "everything"])
def test_a_first_load_must_bring_every_parameter(toy):
    """What never came would be whatever the memory held."""
    state = make_state(TOYS[toy], 1)
    for name in state:
        if "/" in name or "mean" in name:
            continue  # parts and buffers: only a model that was loaded once knows them
        model = TOYS[toy]()
        session = first_session(model)
        session.prepare()
        session.load({other: tensor for other, tensor in state.items() if other != name})
        with pytest.raises(IncompleteLoadError) as caught:
            session.finish()
        assert name in str(caught.value)


def test_a_first_load_may_leave_out_what_it_is_allowed_to(commit):
    """Without permission the missing scale is an error, with it the default stays."""
    state = make_state(TOYS["default scale"], 1)
    model = TOYS["default scale"]()
    with (
        pytest.raises(IncompleteLoadError, match=r"layers\.0\.scale"),
        WeightLoadSession(model, framework=toy_framework()) as session,
    ):
        session.load(state)
    with first_session(model, commit=commit) as session:
        session.load(state)
    check_equal(model, TOYS["default scale"], state)


OPTIONAL = {
    "default scale": {"layers.0.scale": torch.tensor([0.25])},
    "buffers": {"layers.0.temperature": torch.tensor(3.0)},
}


@pytest.mark.parametrize("toy", OPTIONAL)
@pytest.mark.parametrize("at_first", [False, True], ids=["without", "with"])
def test_a_default_comes_back_or_is_missed_when_its_tensor_is_left_out(toy, at_first, commit):
    """Once with the optional tensor, once without: never is the value of an earlier load kept."""
    factory = TOYS[toy]
    plain = [make_state(factory, seed) for seed in (1, 2, 3, 4)]
    states = [
        {**state, **OPTIONAL[toy]} if (number % 2 == 0) == at_first else state
        for number, state in enumerate(plain)
    ]
    model = factory()
    with first_session(model) as session:
        session.load(states[0])
    check_equal(model, factory, states[0])
    for state in states[1:]:
        session = WeightLoadSession(model, commit=commit)
        session.prepare()
        session.load(state)
        if at_first and not OPTIONAL[toy].keys() <= state.keys():
            with pytest.raises(IncompleteLoadError):
                session.finish()
        else:
            session.finish()
            check_equal(model, factory, state)


@pytest.mark.parametrize("toy", OPTIONAL)
def test_what_a_failed_first_load_brought_is_not_taken_for_a_default(toy, commit):
    """The optional tensor came and the load failed: the next one has to bring it, too."""
    factory = TOYS[toy]
    model, state = factory(), make_state(factory, 1)
    failed = first_session(model)
    failed.prepare()
    failed.load(OPTIONAL[toy])
    failed.abort()
    assert failed.state is SessionState.POISONED
    session = first_session(model, commit=commit)
    session.prepare()
    session.load(state)
    with pytest.raises(IncompleteLoadError, match=next(iter(OPTIONAL[toy]))):
        session.finish()
    complete = {**state, **OPTIONAL[toy]}
    with first_session(model, commit=commit) as session:
        session.load(complete)
    check_equal(model, factory, complete)
    with WeightLoadSession(model, commit=commit) as session:
        session.load(complete)
    check_equal(model, factory, complete)


def test_a_loader_that_owns_its_source_can_run_inside_a_session():
    """The framework's own loader calls load_weights; the session sees all that it does."""
    factory = TOYS["everything"]
    model, state = factory(), make_state(factory, 1)
    with first_session(model) as session:
        session.load_through(lambda: model.load_weights(state.items()))
    check_equal(model, factory, state)
    assert session.receipt.consumed.count == len(state)
    assert "load_weights" not in vars(model)
    for number in (2, 1):
        with WeightLoadSession(model) as session:
            session.load(make_state(factory, number))
        check_equal(model, factory, make_state(factory, number))


def test_a_reload_can_run_through_a_loader_that_owns_its_source(commit):
    """The same for a reload, with the same checks at the end."""
    bench = Bench(TOYS["everything"])
    state = bench.state(2)
    with WeightLoadSession(bench.model, commit=commit) as session:
        session.load_through(lambda: bench.model.load_weights(state.items()))
    bench.serves = state
    bench.check_finished(session)
    failed = bench.open(commit=commit)
    failed.load_through(lambda: bench.model.load_weights(list(state.items())[:-1]))
    with pytest.raises(IncompleteLoadError):
        failed.finish()
    bench.check_ended(failed)
    bench.check_recovers()


def test_a_whole_set_can_be_checked_before_any_of_it_is_sent(commit):
    """A bad set is refused while the model still serves; a good one is loaded afterwards."""
    bench = Bench(TOYS["everything"])
    good = bench.state(2)
    first, *_, last = good
    bad = {
        IncompleteLoadError: {name: tensor for name, tensor in good.items() if name != first},
        WeightMismatchError: {**good, last: good[last].reshape(-1)[:1]},
        UnexpectedWeightError: {**good, "layers.99.weight": good[first]},
    }
    for expected, weights in bad.items():
        session = bench.open(commit=commit)
        with pytest.raises(expected):
            session.check(weights, complete=True)
        assert session.state is SessionState.ABORTED
        bench.check_ended(session)
    session = bench.open(commit=commit)
    session.check(good, complete=True)
    session.load(good)
    session.finish()
    bench.serves = good
    bench.check_finished(session)


EARLY = {
    "nothing came yet": [],
    "one shard of two came": ["layers.0.weight/0"],
}


@pytest.mark.parametrize("packed", [loading.InterleavedLinear, loading.ScatteredLinear])
@pytest.mark.parametrize("case", EARLY)
def test_what_comes_after_a_hook_was_asked_for_too_early_is_refused(case, packed):
    """The hook of a first load would pack what was constructed, and what comes then is not packed."""
    factory = lambda: LoadingModel(packed(packed=True), layers.Linear())  # noqa: E731
    model, state = factory(), make_state(factory, 1)
    session = WeightLoadSession(model, framework=toy_framework())
    session.prepare()

    def ask_too_early():
        session.load({name: state[name] for name in EARLY[case]})
        session.process_quant(model.layers[0])
        session.load({name: state[name] for name in state if name not in EARLY[case]})

    with pytest.raises((IncompleteLoadError, DuplicateWeightError)) as caught:
        ask_too_early()
    assert "layers.0." in str(caught.value)
    with WeightLoadSession(model, framework=toy_framework()) as again:
        again.load(state)
    check_equal(model, factory, state)
