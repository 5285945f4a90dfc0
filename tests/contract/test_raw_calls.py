"""Code that calls ``load_weights`` past every session: each call becomes one, or is refused.

The damage shown: checkpoint rows written into a layer that a hook has packed, which nobody notices.
"""

import pytest
import torch

from weightload import (
    IncompleteLoadError,
    ModelBusyError,
    UsageError,
    WeightLoadSession,
    in_session,
    open_session,
    start_reload,
    weights_version,
)
from weightload.testing import (
    CollectingModel,
    LoadingModel,
    check_equal,
    layers,
    make_state,
    toy_framework,
)


class Guarded(LoadingModel):
    """Each raw call becomes a session."""

    load_weights = in_session(LoadingModel.load_weights, version="raw")


class Strict(CollectingModel):
    """A raw call is an error."""

    @in_session(on_raw="refuse")
    def load_weights(self, weights):
        super().load_weights(weights)


def loaded(cls):
    model = cls(layers.RepackedLinear(), layers.FusedLinear())
    with WeightLoadSession(model, framework=toy_framework(), version=1) as session:
        session.load(state(cls, 1))
    return model


def factory(cls):
    return lambda: cls(layers.RepackedLinear(), layers.FusedLinear())


def state(cls, seed):
    return make_state(factory(cls), seed)


def plain(cls):
    """The oracle is built of the class without the decorator."""
    return LoadingModel if cls is Guarded else CollectingModel


def check(model, seed):
    cls = type(model)
    check_equal(model, factory(plain(cls)), state(plain(cls), seed))


def test_a_raw_call_with_everything_is_a_reload():
    model = loaded(Guarded)
    for seed in (2, 3):
        model.load_weights(state(Guarded, seed).items())
        check(model, seed)
    assert weights_version(model) == "raw"


def test_a_raw_call_with_a_part_is_refused_and_says_what_is_missing():
    model = loaded(Guarded)
    part = dict(list(state(Guarded, 2).items())[:-1])
    with pytest.raises(IncompleteLoadError, match=r"layers\.1\.bias"):
        model.load_weights(part)
    check(model, 1)


def test_a_raw_call_can_be_refused():
    model = loaded(Strict)
    with pytest.raises(UsageError, match="outside of a session"):
        model.load_weights(state(Strict, 2).items())
    check(model, 1)


@pytest.mark.parametrize("cls", [Guarded, Strict])
def test_calls_while_a_session_is_open_are_given_to_it(cls):
    """Per-parameter calls between start and finish, as some trainers make them."""
    model = loaded(cls)
    start_reload(model, version=2)
    for pair in state(cls, 2).items():
        model.load_weights([pair])
    open_session(model).finish()
    check(model, 2)
    assert weights_version(model) == 2


@pytest.mark.parametrize("cls", [Guarded, Strict])
def test_the_first_load_of_a_framework_goes_through_and_later_ones_do_not(cls):
    """vLLM loads a model and runs the hooks itself; a session inside would run them twice."""
    model = factory(cls)()
    before = model.layers[0].weight
    model.load_weights(state(cls, 1).items())
    assert model.layers[0].weight is before, "a hook ran"
    assert torch.equal(before, state(cls, 1)["layers.0.weight"])
    if cls is Strict:
        with pytest.raises(UsageError):
            loaded(cls).load_weights(state(cls, 1).items())
        with pytest.raises(UsageError, match="outside of a session"):
            model.load_weights(state(cls, 2).items())


def test_a_part_of_a_model_that_is_being_loaded_is_busy():
    model = loaded(Guarded)
    whole = LoadingModel(model)
    session = WeightLoadSession(whole, framework=toy_framework())
    session.prepare()
    with pytest.raises(ModelBusyError, match="part of another"):
        model.load_weights(state(Guarded, 2).items())
    session.abort()


def test_the_choice_is_checked():
    with pytest.raises(UsageError, match="on_raw"):
        in_session(on_raw="perhaps")
