"""start_reload, finish_reload and abort_reload on the smallest model."""

import gc
import weakref

import pytest
import torch
from torch import nn

from weightload import (
    ModelBusyError,
    SessionState,
    UsageError,
    WeightLoadSession,
    abort_reload,
    finish_reload,
    open_session,
    start_reload,
)


@pytest.fixture
def model():
    made = nn.Linear(2, 2)
    with WeightLoadSession(made) as session:
        session.load(state())
    return made


def state(value=1.0):
    return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}


def test_start_returns_a_prepared_session_with_its_options(model):
    session = start_reload(model, version="v2", commit="atomic")
    assert session.state is SessionState.PREPARED
    assert session.version == "v2"
    assert open_session(model) is session
    assert abort_reload(model).commit == "atomic"


def test_the_model_keeps_the_session_alive_until_it_ends(model):
    session = weakref.ref(start_reload(model))
    gc.collect()
    assert open_session(model) is session()
    open_session(model).load(state(2.0))
    finish_reload(model)
    gc.collect()
    assert session() is None
    assert torch.equal(model.bias, torch.full((2,), 2.0))


def test_a_second_start_is_refused_and_the_first_goes_on(model):
    first = start_reload(model)
    with pytest.raises(ModelBusyError):
        start_reload(model)
    assert open_session(model) is first
    abort_reload(model)
    assert first.state is SessionState.ABORTED


def test_a_start_that_fails_keeps_nothing():
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError):
        start_reload(model, commit="never")
    assert open_session(model) is None
    assert "_weightload_open" not in vars(model)


def test_a_session_that_was_opened_as_a_block_can_be_finished_by_call(model):
    session = WeightLoadSession(model)
    session.prepare()
    session.load(state(3.0))
    assert finish_reload(model) is session.receipt


def test_a_part_of_an_open_model_is_no_model(model):
    """Only the root that was started can be finished."""
    outer = nn.Sequential(model)
    with WeightLoadSession(outer) as session:
        with pytest.raises(UsageError, match="No session is open on this model"):
            finish_reload(model)
        session.load({f"0.{name}": tensor for name, tensor in state().items()})
