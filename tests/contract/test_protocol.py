"""Every wrong order of calls is refused with the calls that are allowed now."""

import gc
import pickle
import warnings

import pytest
import torch

from weightload import (
    IncompleteLoadError,
    InvalidTransitionError,
    ProcessingError,
    Role,
    SessionMisnestedError,
    SessionState,
    UsageError,
    WeightLoadError,
    WeightLoadSession,
    abort_reload,
    current_session,
    finish_reload,
    open_session,
    poison_of,
    start_reload,
    weights_version,
)
from weightload.ownership import owner_of
from weightload.testing import TOYS, Bench, ToyFault, ToyModel, layers, sharing, toy_framework


@pytest.fixture
def bench():
    return Bench(TOYS["everything"])


def finished(bench):
    return bench.reload(bench.state(2))


def aborted(bench):
    session = bench.open()
    session.abort()
    return session


def poisoned(bench):
    session = bench.open()
    session.load({"embedding.weight": bench.state(2)["embedding.weight"]})
    session.abort()
    bench.serves = None
    return session


CALLS = {
    "prepare": lambda session: session.prepare(),
    "load": lambda session: session.load({}),
    "load_through": lambda session: session.load_through(lambda: None),
    "check": lambda session: session.check({}, complete=False),
    "finish": lambda session: session.finish(),
    "abort": lambda session: session.abort(),
    "process_quant": lambda session: session.process_quant(session.model),
    "finalize_attention_runtime": lambda session: session.finalize_attention_runtime(session.model),
}


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"prepare", "abort"}))
def test_nothing_but_prepare_and_abort_is_allowed_in_a_new_session(bench, call):
    """The model is not claimed yet; the session is still good after the refusal."""
    session = WeightLoadSession(bench.model)
    with pytest.raises(InvalidTransitionError) as caught:
        CALLS[call](session)
    assert f"{call}()" in str(caught.value)
    assert "allowed now: prepare, abort" in str(caught.value)
    assert session.state is SessionState.NEW
    session.prepare()
    session.load(bench.state(2))
    session.finish()
    bench.serves = bench.state(2)
    bench.check_finished(session)


@pytest.mark.holds("C13")
def test_a_session_is_prepared_once(bench):
    """A second prepare is refused, and the first one still holds."""
    session = bench.open()
    with pytest.raises(InvalidTransitionError, match="allowed now: load, seal, finish, abort"):
        session.prepare()
    assert session.state is SessionState.PREPARED
    session.abort()
    bench.check_ended(session)


@pytest.mark.parametrize("end", [finished, aborted, poisoned], ids=lambda end: end.__name__)
@pytest.mark.parametrize("call", CALLS)
def test_a_session_that_has_ended_is_not_used_again(bench, end, call):
    """Whatever is called, the refusal changes neither the model nor the session's receipt."""
    session = end(bench)
    state, receipt = session.state, session.receipt
    poison = poison_of(bench.model)
    with pytest.raises(InvalidTransitionError) as caught:
        CALLS[call](session)
    assert caught.value.facts == {"state": state.value, "call": call, "allowed": []}
    assert "single use" in str(caught.value)
    assert (session.state, session.receipt) == (state, receipt)
    assert poison_of(bench.model) == poison
    bench.check_structure()
    bench.check_recovers()


def test_a_session_that_has_ended_cannot_be_entered_again(bench):
    """As a context manager it is for single use as well."""
    session = finished(bench)
    with pytest.raises(InvalidTransitionError), session:
        pass
    assert current_session() is None
    bench.check_finished(session)


def test_the_block_finishes_or_aborts(bench):
    """A clean exit finishes, an exception aborts and comes out with a note."""
    with WeightLoadSession(bench.model, version=2) as session:
        assert current_session() is session
        session.load(bench.state(2))
        assert session.receipt is None
    assert session.receipt.outcome == "finished"
    bench.serves = bench.state(2)
    bench.check_finished(session)
    with pytest.raises(ToyFault) as caught, WeightLoadSession(bench.model) as session:
        raise ToyFault("the caller's own")
    assert session.state is SessionState.ABORTED
    assert session.receipt.cause == "ToyFault: the caller's own"
    assert any("no live weight was written" in note for note in caught.value.__notes__)
    bench.check_ended(session)


def test_a_block_may_end_its_session_itself(bench):
    """Finish or abort inside the block are respected."""
    with WeightLoadSession(bench.model) as session:
        session.load(bench.state(2))
        receipt = session.finish()
    assert session.receipt is receipt
    bench.serves = bench.state(2)
    bench.check_finished(session)
    with WeightLoadSession(bench.model) as session:
        session.abort("changed my mind")
    assert session.receipt.cause == "changed my mind"
    bench.check_ended(session)


def test_a_block_does_not_hide_that_its_session_failed(bench):
    """The error of a load that was swallowed inside the block leaves an ended session behind."""
    with WeightLoadSession(bench.model) as session:
        with pytest.raises(WeightLoadError):
            session.load({"nothing": torch.ones(1)})
        assert session.state.terminal
    assert session.receipt.outcome == "aborted"
    bench.check_ended(session)


def test_an_incomplete_block_raises_at_its_end(bench):
    """Leaving the block is finishing, and finishing is refused."""
    with pytest.raises(IncompleteLoadError), WeightLoadSession(bench.model) as session:
        pass
    bench.check_ended(session)


# ------------------------------------------------------------------------------ from inside


@pytest.mark.holds("H13")
@pytest.mark.parametrize("call", ["prepare", "load", "load_through", "check", "finish", "abort"])
def test_a_source_cannot_call_the_session_that_reads_it(bench, call):
    """The source runs inside load; the refusal comes out of load and the session has ended."""
    session = bench.open(commit="atomic")

    def source():
        yield next(iter(bench.state(2).items()))
        CALLS[call](session)

    with pytest.raises(SessionMisnestedError) as caught:
        session.load(source())
    assert f"{call}() was called from inside" in str(caught.value)
    bench.check_ended(session, caught.value)
    bench.check_recovers()


def test_code_inside_a_load_can_ask_for_its_session(bench):
    """Loaders, hooks and sources see the session that they run in; the caller does not."""
    session = bench.open()
    seen = []

    def source():
        seen.append(current_session())
        yield from bench.state(2).items()

    assert current_session() is None
    session.load(source())
    assert seen == [session]
    assert current_session() is None
    session.finish()
    bench.serves = bench.state(2)
    bench.check_finished(session)


# ------------------------------------------------------------------------------ early processing


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_loader_may_process_a_layer_as_soon_as_it_is_complete(commit):
    """The hook runs once: a second call, and finish, leave it alone."""
    bench = Bench(TOYS["attention"])
    state = bench.state(2)
    first, second = bench.model.layers
    session = bench.open(commit=commit)
    session.load({name: value for name, value in state.items() if name.startswith("layers.0.")})
    bench.framework.calls.clear()
    ran = session.process_quant(first.projection)
    assert ran == (commit == "atomic"), "in a stream it ran when its last weight had come"
    assert session.process_quant(first.projection) is False
    assert session.finalize_attention_runtime(first) is True
    assert session.finalize_attention_runtime(first) is False
    assert session.process_quant(bench.model.layers) is False, "there is no hook"
    session.load({name: value for name, value in state.items() if name.startswith("layers.1.")})
    session.finish()
    assert bench.framework.calls.count((Role.ATTENTION, first)) == 1
    assert bench.framework.calls.count((Role.ATTENTION, second)) == 1
    assert bench.framework.calls.count((Role.QUANT, first.projection)) == ran
    bench.serves = state
    bench.check_finished(session)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_what_is_packed_together_is_packed_in_order_when_the_last_is_asked_for(commit):
    """The head shares a weight that the hook of the first layer changes in place."""

    def factory():
        first = layers.InPlaceLinear()
        return ToyModel(first, sharing.PackedHead(first.weight))

    bench = Bench(factory)
    session = bench.open(commit=commit)
    session.load(bench.state(2))
    head = bench.model.layers[1]
    assert session.process_quant(head) is (commit == "atomic"), "as a stream it has run already"
    assert session.process_quant(bench.model.layers[0]) is False
    session.finish()
    bench.serves = bench.state(2)
    bench.check_finished(session)


@pytest.mark.holds("C22")
@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("toy", ["repacked", "tied", "hook over children", "everything"])
def test_a_layer_is_not_processed_before_its_weights_have_come(toy, commit):
    """Processing early would pack old weights, or memory that nobody has filled."""
    bench = Bench(TOYS[toy])
    for module in bench.model.modules():
        if (Role.QUANT, module) not in bench.framework.calls:
            continue
        session = bench.open(commit=commit)
        with pytest.raises(IncompleteLoadError):
            session.process_quant(module)
        bench.check_ended(session)
        assert session.state is SessionState.ABORTED
    bench.check_recovers()


@pytest.mark.holds("C16")
@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_attention_is_not_finalized_before_what_it_reads(commit):
    """Neither before the layers inside it are packed nor before its own weights have come."""
    bench = Bench(TOYS["attention"])
    attention = bench.model.layers[0]
    session = bench.open(commit=commit)
    with pytest.raises(UsageError, match=r"layers\.0\.projection"):
        session.finalize_attention_runtime(attention)
    bench.check_ended(session)
    session = bench.open(commit=commit)
    name = "layers.0.projection.weight"
    session.load({name: bench.state(2)[name]})
    session.process_quant(attention.projection)
    with pytest.raises(IncompleteLoadError, match=r"layers\.0\.sinks"):
        session.finalize_attention_runtime(attention)
    bench.check_ended(session)
    bench.check_recovers()


def test_a_hook_that_failed_early_is_not_run_again(bench):
    """Attempted and done are different things; the session has ended with the failure."""
    bench = Bench(TOYS["repacked"])
    session = bench.open(commit="atomic")
    session.load(bench.state(2))
    bench.framework.fail_hook(half_way=True)
    with pytest.raises(ProcessingError):
        session.process_quant(bench.model.layers[0])
    with pytest.raises(InvalidTransitionError):
        session.process_quant(bench.model.layers[0])
    bench.check_ended(session)
    bench.check_recovers()


# ------------------------------------------------------------------------------ separate calls


def test_the_lifecycle_as_separate_calls(bench):
    """Start, load through the model's session, finish: the caller keeps nothing."""
    start_reload(bench.model, version=5)
    assert current_session() is None
    session = open_session(bench.model)
    session.load(bench.state(2))
    receipt = finish_reload(bench.model)
    assert receipt.version == 5
    assert weights_version(bench.model) == 5
    bench.serves = bench.state(2)
    bench.check_finished(session)


def test_abort_as_a_separate_call(bench):
    """The cause comes back in the receipt and the model can be loaded again."""
    session = start_reload(bench.model)
    receipt = abort_reload(bench.model, "the trainer is gone")
    assert receipt.cause == "the trainer is gone"
    bench.check_ended(session)
    bench.check_recovers()


@pytest.mark.parametrize("call", [finish_reload, abort_reload])
@pytest.mark.parametrize("before", ["never started", "finished", "failed"])
def test_a_separate_call_without_an_open_session_is_refused(bench, call, before):
    """Finishing what was never started, or has ended, says so."""
    if before == "finished":
        session = start_reload(bench.model)
        session.load(bench.state(1))
        finish_reload(bench.model)
    elif before == "failed":
        session = start_reload(bench.model)
        with pytest.raises(WeightLoadError):
            session.load({"nothing": torch.ones(1)})
    with pytest.raises(UsageError, match="Call start_reload first"):
        call(bench.model)
    bench.check_structure()
    bench.check_recovers()


def test_a_failure_between_separate_calls_leaves_nothing_on_the_model(bench):
    """The session that failed is not kept by the model, which can be copied and pickled."""
    session = start_reload(bench.model)
    with pytest.raises(WeightLoadError):
        session.load({"nothing": torch.ones(1)})
    bench.check_ended(session)
    bench.check_recovers()


def test_finish_as_a_separate_call_reports_what_is_missing(bench):
    """The refusal ends the session, and a new one can be started at once."""
    session = start_reload(bench.model)
    with pytest.raises(IncompleteLoadError):
        finish_reload(bench.model)
    bench.check_ended(session)
    start_reload(bench.model)
    open_session(bench.model).load(bench.state(2))
    finish_reload(bench.model)
    bench.serves = bench.state(2)
    bench.check_structure()


# ------------------------------------------------------------------------------ dropped


def test_a_dropped_session_says_so_and_leaves_a_model_that_can_be_loaded(bench):
    """Nobody finished or aborted it: a warning, and the claims are free."""
    session = bench.open()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del session
        gc.collect()
    [warning] = [one for one in caught if one.category is ResourceWarning]
    assert "dropped without finish() or abort()" in str(warning.message)
    assert owner_of(bench.model) is None
    bench.check_structure()
    bench.check_recovers()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_session_is_cleaned_up_where_warnings_are_errors(bench):
    """The warning must not get in the way of the clean-up."""
    session = bench.open()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del session
        gc.collect()
    bench.check_structure()
    bench.check_recovers()


@pytest.mark.holds("frameworks-E")
def test_a_dropped_session_that_had_written_poisons_the_model(bench):
    """The mixture it leaves is refused like any other."""
    session = bench.open()
    session.load({"embedding.weight": bench.state(2)["embedding.weight"]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del session
        gc.collect()
    assert "dropped" in poison_of(bench.model).cause
    bench.check_structure()
    bench.check_recovers()


def test_an_ended_session_is_dropped_silently(bench, recwarn):
    """Only pending work is worth a warning."""
    finished(bench)
    aborted(bench)
    WeightLoadSession(bench.model)
    gc.collect()
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


def test_receipts_and_errors_cross_processes(bench):
    """Both pickle, and a receipt is the same after."""
    session = finished(bench)
    assert pickle.loads(pickle.dumps(session.receipt)) == session.receipt
    with pytest.raises(InvalidTransitionError) as caught:
        session.load({})
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is InvalidTransitionError
    assert str(again) == str(caught.value)


def test_a_session_shows_its_state(bench):
    """The repr tells the number, the model and the state."""
    session = WeightLoadSession(bench.model)
    assert repr(session) == f"<WeightLoadSession {session.id} on TiedModel, new>"
    session.prepare()
    assert "prepared" in repr(session)
    session.abort()
    assert "aborted" in repr(session)


def test_load_through_restores_a_loader_that_the_model_had_itself():
    """A load_weights that was set on the instance is still there afterwards."""
    model = TOYS["fused"]()
    mine = model.load_weights
    model.load_weights = mine
    bench = Bench(TOYS["fused"])
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load_through(lambda: model.load_weights(bench.state(1).items()))
    assert vars(model).get("load_weights") is mine
