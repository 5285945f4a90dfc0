"""Code that calls ``load_weights`` past every session: each call becomes one, or is refused.

The damage shown: checkpoint rows written into a layer that a hook has packed, which nobody notices;
a hook that runs for the first time in a session, and for the second time in truth.
"""

import pytest
import torch

from weightload import (
    Framework,
    IncompleteLoadError,
    ModelBusyError,
    UsageError,
    WeightLoadSession,
    WeightMismatchError,
    current_session,
    in_session,
    open_session,
    start_reload,
    weights_version,
)
from weightload.testing import (
    CollectingModel,
    LoadingModel,
    check_equal,
    identical,
    layers,
    loading,
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
    model = cls(layers.RepackedLinear(), loading.FusedLinear())
    with WeightLoadSession(model, framework=toy_framework(), version=1) as session:
        session.load(state(cls, 1))
    return model


def factory(cls):
    return lambda: cls(layers.RepackedLinear(), loading.FusedLinear())


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


def run_hooks(model):
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
        elif hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()


HOOKED = (layers.RepackedLinear, layers.InPlaceLinear, layers.KernelLinear)
FRAMEWORKS = {
    "nothing said": None,
    "said that it has none": lambda model: None,
    "one that knows nothing of it": lambda model: toy_framework(),
}


@pytest.mark.parametrize("rules", ["no rules", "rules"])
@pytest.mark.parametrize("known", FRAMEWORKS)
@pytest.mark.parametrize("layer", HOOKED, ids=lambda layer: layer.__name__)
def test_a_model_whose_hooks_a_framework_ran_is_refused(layer, known, rules, monkeypatch):
    """A session would take its packed layers for new ones, and run their hooks again."""
    if rules == "rules":
        monkeypatch.setattr("weightload.framework.default_registry", toy_framework().registry)

    class Raw(LoadingModel):
        load_weights = in_session(LoadingModel.load_weights, framework=FRAMEWORKS[known])

    model = Raw(layer())
    model.load_weights(make_state(lambda: LoadingModel(layer()), 1).items())
    run_hooks(model)
    x = model.example()
    before = model(x)
    with pytest.raises(UsageError, match=r"layers\.0.*framework="):
        model.load_weights(make_state(lambda: LoadingModel(layer()), 2).items())
    assert identical(model(x), before)
    assert current_session() is None


def plain_layers():
    return LoadingModel(layers.Linear(), layers.Linear())


@pytest.mark.parametrize("known", FRAMEWORKS)
def test_a_model_without_hooks_needs_no_framework(known):
    class Raw(LoadingModel):
        load_weights = in_session(LoadingModel.load_weights, framework=FRAMEWORKS[known])

    model = Raw(layers.Linear(), layers.Linear())
    for seed in (1, 2, 3):
        model.load_weights(make_state(plain_layers, seed).items())
        check_equal(model, plain_layers, make_state(plain_layers, seed))


def test_a_framework_that_knows_such_models_is_asked():
    learned = []

    class Adopting(Framework):
        def adopt(self, model):
            learned.append(model)

    class Raw(LoadingModel):
        load_weights = in_session(
            LoadingModel.load_weights, framework=lambda model: Adopting(toy_framework().registry)
        )

    model = Raw(layers.Linear(), layers.InPlaceLinear())
    state = make_state(lambda: LoadingModel(layers.Linear(), layers.InPlaceLinear()), 1)
    model.load_weights(state.items())
    model.load_weights(state.items())
    assert learned == [model]


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


@pytest.mark.parametrize("wrong", ["refuse", 5, {}])
def test_what_is_decorated_is_checked(wrong):
    with pytest.raises(UsageError, match="load_weights"):
        in_session(wrong)
    with pytest.raises(UsageError, match="load_weights"):
        in_session(on_raw="refuse")(wrong)


def test_options_are_checked_when_a_class_is_decorated():
    for options in ({"commit": "bogus"}, {"verify": 1}, {"drafts": ["draft"]}):
        with pytest.raises(UsageError):
            in_session(**options)
    with pytest.raises(UsageError, match="framework"):
        in_session(framework=toy_framework())


class Choosy(LoadingModel):
    """Its method takes more than weights, and returns what it loaded."""

    @in_session
    def load_weights(self, weights, *others, flag=None):
        self.calls = [*getattr(self, "calls", ()), (others, flag)]
        weights = dict(weights)
        super().load_weights(weights.items())
        return set(weights)


def test_arguments_that_a_session_cannot_pass_on_are_refused():
    """The first load of a framework gets them; later ones are no longer the framework's alone."""
    model = Choosy(layers.Linear())
    first = make_state(lambda: LoadingModel(layers.Linear()), 1)
    assert model.load_weights(first.items(), 1, flag=2) == {*first}
    assert model.calls == [((1,), 2)]
    for extra, more in (((1,), {}), ((), {"flag": 2})):
        with pytest.raises(UsageError, match="arguments"):
            model.load_weights(first.items(), *extra, **more)
    assert model.load_weights(first.items()) is None
    session = start_reload(model)
    with pytest.raises(UsageError, match="arguments"):
        model.load_weights(first.items(), flag=2)
    assert session.state.open
    session.load(first)
    session.finish()


@pytest.mark.parametrize("wrong", [["layers.0.weight"], [(1, 2, 3)], [5], None, 5])
def test_what_is_no_list_of_pairs_is_named(wrong):
    model = loaded(Guarded)
    with pytest.raises((UsageError, WeightMismatchError), match="pairs"):
        model.load_weights(wrong)
    check(model, 1)
