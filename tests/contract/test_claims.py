"""One session at a time can change a module, whoever opens the second one, and from where."""

import asyncio
import contextvars
import gc
import threading
import weakref

import pytest

from weightload import (
    ModelBusyError,
    SessionMisnestedError,
    SessionState,
    UsageError,
    WeightLoadSession,
    current_session,
    open_session,
    start_reload,
)
from weightload.ownership import owner_of
from weightload.testing import TOYS, Bench, ToyModel


@pytest.fixture
def bench():
    return Bench(TOYS["everything"])


def in_thread(function):
    """Run ``function`` in another thread and return what it returned or raised."""
    box = []

    def run():
        try:
            box.append(function())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return box[0]


# ------------------------------------------------------------------------------ the same model


@pytest.mark.holds("H13")
def test_a_second_session_on_the_model_is_refused_with_the_owner(bench):
    """The message says who owns it; the second session may be prepared later."""
    first = bench.open()
    second = WeightLoadSession(bench.model)
    with pytest.raises(ModelBusyError) as caught:
        second.prepare()
    assert f"owned by session {first.id}" in str(caught.value)
    assert caught.value.model_intact
    assert second.state is SessionState.NEW
    assert owner_of(bench.model) is first
    first.abort()
    second.prepare()
    second.load(bench.state(2))
    second.finish()
    bench.serves = bench.state(2)
    bench.check_finished(second)


def test_a_second_session_from_another_thread_is_refused(bench):
    """The other thread does not see the current session; the claim it does see."""
    with WeightLoadSession(bench.model) as first:
        error = in_thread(lambda: WeightLoadSession(bench.model).prepare())
        assert type(error) is ModelBusyError
        assert in_thread(current_session) is None
        assert current_session() is first
        first.load(bench.state(2))
    bench.serves = bench.state(2)
    bench.check_finished(first)


def test_a_session_inside_a_session_on_the_same_model_is_misnested(bench):
    """From inside the block, this is a mistake in the caller's own code."""
    with WeightLoadSession(bench.model) as first:
        inner = WeightLoadSession(bench.model)
        with pytest.raises(SessionMisnestedError, match=f"inside session {first.id}"), inner:
            pytest.fail("the inner block must not be entered")
        assert inner.state is SessionState.NEW
        assert current_session() is first
        first.load(bench.state(2))
    bench.serves = bench.state(2)
    bench.check_finished(first)


def test_a_source_cannot_open_a_session_on_the_model_that_reads_it(bench):
    """A reload inside a reload: the inner one is refused and ends the outer one."""
    session = bench.open(commit="atomic")

    def source():
        yield next(iter(bench.state(2).items()))
        WeightLoadSession(bench.model).prepare()

    with pytest.raises(SessionMisnestedError) as caught:
        session.load(source())
    bench.check_ended(session, caught.value)
    bench.check_recovers()


def test_a_hook_cannot_open_a_session_on_its_model(bench, monkeypatch):
    """Post-processing runs inside the session as well."""

    def reentrant(layer):
        WeightLoadSession(bench.model).prepare()

    session = bench.open(commit="atomic")
    session.load(bench.state(2))
    first = bench.framework.calls[0][1]
    monkeypatch.setattr(type(first), "process_weights_after_loading", reentrant, raising=False)
    monkeypatch.setattr(
        type(getattr(first, "quant_method", first)),
        "process_weights_after_loading",
        lambda *args: reentrant(args[-1]),
    )
    with pytest.raises(Exception, match="cannot be opened inside") as caught:
        session.finish()
    monkeypatch.undo()
    bench.check_ended(session, caught.value)
    bench.check_recovers()


def test_another_asyncio_task_is_refused(bench):
    """A task that runs in between has the model refused, and sees no current session."""

    async def load_slowly(started, go_on):
        session = bench.open()
        started.set()
        await go_on.wait()
        assert current_session() is None
        session.load(bench.state(2))
        session.finish()
        return session

    async def intrude(started, go_on):
        await started.wait()
        try:
            with pytest.raises(ModelBusyError):
                WeightLoadSession(bench.model).prepare()
        finally:
            go_on.set()

    async def both():
        events = asyncio.Event(), asyncio.Event()
        session, _ = await asyncio.gather(load_slowly(*events), intrude(*events))
        return session

    session = asyncio.run(both())
    bench.serves = bench.state(2)
    bench.check_finished(session)


def test_a_task_started_inside_a_block_is_refused_and_forgets_an_ended_session(bench):
    """A child task inherits the context: while the session is open it may not open a second one,
    and when the session has ended the inherited value counts as none."""
    seen = []

    async def child(ended):
        seen.append(current_session())
        with pytest.raises(SessionMisnestedError):
            WeightLoadSession(bench.model).prepare()
        await ended.wait()
        seen.append(current_session())
        session = bench.open()
        session.abort()

    async def parent():
        ended = asyncio.Event()
        with WeightLoadSession(bench.model) as session:
            task = asyncio.ensure_future(child(ended))
            await asyncio.sleep(0)
            session.load(bench.state(2))
        ended.set()
        await task
        return session

    session = asyncio.run(parent())
    assert seen == [session, None]
    bench.serves = bench.state(2)
    bench.check_finished(session)


def test_two_threads_cannot_be_inside_one_session(bench):
    """A session is used by one thread at a time; the intruder is told so and changes nothing."""
    session = bench.open()
    errors = []

    def source():
        yield from list(bench.state(2).items())
        for call in (session.finish, session.abort, lambda: session.load({})):
            errors.append(in_thread(call))

    session.load(source())
    assert [type(error) for error in errors] == [UsageError] * 3
    assert "Another thread is inside" in str(errors[0])
    session.finish()
    bench.serves = bench.state(2)
    bench.check_finished(session)


def test_a_session_may_move_from_thread_to_thread(bench):
    """Prepare here, load there, finish here: no thread owns a session, only calls do."""
    session = bench.open()
    assert in_thread(lambda: session.load(bench.state(2))) is None
    session.finish()
    bench.serves = bench.state(2)
    bench.check_finished(session)


def test_of_many_threads_exactly_one_gets_the_model(bench):
    """The claim is compared and set under a lock."""
    barrier = threading.Barrier(8)
    got, errors = [], []

    def race():
        session = WeightLoadSession(bench.model)
        barrier.wait()
        try:
            session.prepare()
            got.append(session)
        except ModelBusyError as error:
            errors.append(error)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(errors) == 7
    got[0].abort()
    bench.check_ended(got[0])
    bench.check_recovers()


# ------------------------------------------------------------------------------ a shared module


@pytest.fixture
def pair():
    """A loaded target, and a draft model around one of its layers."""
    target = Bench(TOYS["repacked"])
    return target, ToyModel(target.model.layers[0])


@pytest.mark.holds("W24")
def test_a_draft_model_that_shares_a_layer_is_refused_while_the_target_loads(pair):
    """The claim is per module, whatever tree it is seen through."""
    target, draft = pair
    session = target.open()
    with pytest.raises(ModelBusyError) as caught:
        WeightLoadSession(draft, framework=target.framework).prepare()
    assert "'layers.0'" in str(caught.value)
    assert owner_of(draft) is None, "all modules are claimed or none"
    assert owner_of(target.model.layers[0]) is session
    assert open_session(draft) is None
    session.abort()
    target.check_ended(session)
    target.check_recovers()


def test_a_draft_model_is_misnested_inside_the_targets_block(pair):
    """From inside the block the refusal is the one for wrong nesting."""
    target, draft = pair
    with WeightLoadSession(target.model) as session:
        with pytest.raises(SessionMisnestedError, match=r"layers\.0"):
            WeightLoadSession(draft, framework=target.framework).prepare()
        session.load(target.state(2))
    target.serves = target.state(2)
    target.check_finished(session)


def test_models_that_share_nothing_may_be_nested():
    """A draft of its own may be loaded inside the target's block."""
    outer, inner = Bench(TOYS["tied"]), Bench(TOYS["repacked"])
    with WeightLoadSession(outer.model) as first:
        with WeightLoadSession(inner.model) as second:
            assert current_session() is second
            second.load(inner.state(2))
        assert current_session() is first
        first.load(outer.state(2))
    outer.serves, inner.serves = outer.state(2), inner.state(2)
    outer.check_finished(first)
    inner.check_finished(second)


# ------------------------------------------------------------------------------ wrong nesting


def test_closing_the_outer_block_first_is_refused():
    """The outer session is aborted, the inner one can go on, no session stays current."""
    outer, inner = Bench(TOYS["tied"]), Bench(TOYS["repacked"])
    first, second = WeightLoadSession(outer.model), WeightLoadSession(inner.model)
    first.__enter__()
    second.__enter__()
    with pytest.raises(SessionMisnestedError, match=f"while session {second.id}"):
        first.__exit__(None, None, None)
    assert first.state is SessionState.ABORTED
    second.load(inner.state(2))
    second.__exit__(None, None, None)
    outer.check_ended(first)
    inner.serves = inner.state(2)
    inner.check_finished(second)
    outer.check_recovers()


def test_leaving_the_block_in_another_context_is_refused_and_ends_the_session(bench):
    """A block that is entered in one task and left in another would leave its session open."""
    session = WeightLoadSession(bench.model)
    contextvars.copy_context().run(session.__enter__)
    with pytest.raises(SessionMisnestedError):
        session.__exit__(None, None, None)
    bench.check_ended(session)
    bench.check_recovers()


# ------------------------------------------------------------------------------ nothing leaks


@pytest.mark.holds("W22")
def test_nothing_keeps_a_model_alive_that_was_loaded():
    """Claims, versions and records go with the model."""
    bench = Bench(TOYS["everything"])
    bench.check_recovers()
    start_reload(bench.model).abort()
    model = weakref.ref(bench.model)
    session = weakref.ref(bench.reload(bench.state(2)))
    del bench
    gc.collect()
    assert session() is None
    assert model() is None


@pytest.mark.holds("W22")
def test_nothing_keeps_a_failed_session_alive(bench):
    """The error holds names and numbers, never the model."""
    session = bench.open()
    with pytest.raises(Exception, match="layers") as caught:
        session.load({"layers.0.weight": bench.state(1)["layers.0.weight"][0]})
    gone = weakref.ref(session)
    error = caught.value.with_traceback(None)
    error.__cause__ = error.__context__ = None
    del session, caught
    gc.collect()
    assert gone() is None
