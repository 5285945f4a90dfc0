"""Claims, the current session, versions and poison, without any load."""

import contextvars
import gc
import threading
import weakref

import pytest
from torch import nn

from weightload import (
    ModelBusyError,
    ModelPoisonedError,
    Poison,
    SessionMisnestedError,
    SessionState,
    WeightLoadSession,
    current_session,
    open_session,
    poison_of,
    require_usable,
    weights_version,
)
from weightload.ownership import (
    claim,
    entered,
    owner_of,
    record_poison,
    record_version,
    release,
)


def opened(model):
    """Return a session in an open state that owns nothing yet."""
    session = WeightLoadSession(model)
    session._gate.state = SessionState.PREPARED
    return session


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


@pytest.fixture
def sessions(model):
    made = [opened(model), opened(model)]
    yield made
    for session in made:
        session._gate.state = SessionState.ABORTED


def modules_of(model):
    return dict(model.named_modules())


def test_a_claim_is_for_every_module(model, sessions):
    claim(sessions[0], modules_of(model))
    assert all(owner_of(module) is sessions[0] for module in model.modules())
    assert open_session(model) is sessions[0]
    assert open_session(model[0]) is None, "it is owned, and the root of no session"


def test_one_module_that_is_owned_refuses_the_whole_claim(model, sessions):
    claim(sessions[0], {"1": model[1]})
    with pytest.raises(ModelBusyError, match="module '1' is owned by session"):
        claim(sessions[1], modules_of(model))
    assert owner_of(model) is None
    assert owner_of(model[0]) is None


def test_a_claim_may_be_repeated_by_its_owner(model, sessions):
    claim(sessions[0], modules_of(model))
    claim(sessions[0], modules_of(model))
    assert owner_of(model) is sessions[0]


def test_only_the_owner_can_give_a_claim_up(model, sessions):
    claim(sessions[0], modules_of(model))
    release(sessions[1], model.modules())
    assert owner_of(model) is sessions[0]
    release(sessions[0], model.modules())
    assert owner_of(model) is None
    claim(sessions[1], modules_of(model))
    assert owner_of(model) is sessions[1]


def test_an_ended_session_owns_nothing(model, sessions):
    claim(sessions[0], modules_of(model))
    sessions[0]._gate.state = SessionState.FINISHED
    assert owner_of(model) is None
    claim(sessions[1], modules_of(model))
    assert open_session(model) is sessions[1]


def test_a_session_that_is_gone_owns_nothing(model):
    session = opened(model)
    claim(session, modules_of(model))
    session._gate.state = SessionState.ABORTED
    del session
    gc.collect()
    assert owner_of(model) is None


def test_a_claim_inside_the_owner_itself_is_misnested(model, sessions):
    claim(sessions[0], modules_of(model))
    with entered(sessions[0]), pytest.raises(SessionMisnestedError, match="the model is owned"):
        claim(sessions[1], modules_of(model))


def test_a_claim_inside_a_session_on_another_model_is_just_busy(model, sessions):
    other = opened(nn.Linear(1, 1))
    claim(sessions[0], modules_of(model))
    with entered(other), pytest.raises(ModelBusyError):
        claim(sessions[1], modules_of(model))
    other._gate.state = SessionState.ABORTED


def test_the_current_session_is_that_of_the_innermost_block(sessions):
    assert current_session() is None
    with entered(sessions[0]):
        assert current_session() is sessions[0]
        with entered(sessions[1]):
            assert current_session() is sessions[1]
        assert current_session() is sessions[0]
    assert current_session() is None


def test_the_block_is_left_on_an_exception(sessions):
    with pytest.raises(KeyError), entered(sessions[0]):
        raise KeyError
    assert current_session() is None


def test_an_inherited_session_that_has_ended_counts_as_none(sessions):
    with entered(sessions[0]):
        inherited = contextvars.copy_context()
    assert inherited.run(current_session) is sessions[0]
    sessions[0]._gate.state = SessionState.ABORTED
    assert inherited.run(current_session) is None


def test_another_thread_does_not_see_it(sessions):
    seen = []
    with entered(sessions[0]):
        thread = threading.Thread(target=lambda: seen.append(current_session()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_every_session_has_a_number_of_its_own(model):
    numbers = []

    def make():
        numbers.extend(WeightLoadSession(model).id for _ in range(200))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 800


POISON = Poison(session=3, version=7, step="commit", module="layers.1", cause="OSError: gone")


def test_poison_says_who_did_it_and_takes_the_version_away(model):
    record_version(model, 6)
    require_usable(model)
    record_poison(model, POISON)
    assert poison_of(model) == POISON
    assert weights_version(model) is None
    with pytest.raises(ModelPoisonedError) as caught:
        require_usable(model)
    for part in ("session 3", "'commit'", "'layers.1'", "OSError: gone", "complete set"):
        assert part in str(caught.value)
    assert caught.value.model_intact is False


def test_a_version_takes_poison_away(model):
    record_poison(model, POISON)
    record_version(model, "step 8")
    assert poison_of(model) is None
    assert weights_version(model) == "step 8"


def test_a_model_that_was_never_loaded_has_neither(model):
    assert weights_version(model) is None
    assert poison_of(model) is None
    require_usable(model)


def test_nothing_keeps_the_model_alive(model):
    session = opened(model)
    claim(session, modules_of(model))
    record_version(model, 1)
    record_poison(model, POISON)
    session._gate.state = SessionState.ABORTED
    gone = weakref.ref(session.model)
    del session
    local = weakref.ref(model[0])
    model._modules.clear()
    gc.collect()
    assert local() is None
    assert gone() is model


def test_a_mixture_poisons_every_model_that_shares_a_module_of_it(model):
    """A draft model that shares the target's embedding computes with the mixture as well."""
    draft = nn.Sequential(model[1], nn.Linear(1, 1))
    other = nn.Linear(1, 1)
    record_version(draft, 5)
    record_poison(model, POISON)
    assert poison_of(draft) == POISON
    assert weights_version(draft) is None
    assert poison_of(other) is None
    record_version(draft, 6)
    assert poison_of(draft) is None
    assert weights_version(draft) == 6
    assert poison_of(model) == POISON, "only what the draft has was loaded"


def test_the_version_before_a_mixture_does_not_come_back(model):
    """A model whose shared layer was loaded again by another model serves no known version."""
    draft = nn.Sequential(model[1])
    record_version(model, 5)
    record_poison(draft, POISON)
    assert weights_version(model) is None
    record_version(draft, 6)
    assert weights_version(model) is None
