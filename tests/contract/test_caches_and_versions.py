"""What was computed with the old weights is not served with the new ones.

A cache here remembers what the model computed for an input. The model cannot know of it; a publish
callback is told both versions when everything is in place, and its owner decides what to drop.
"""

import pytest
import torch
from small import COMMITS, Live, Negated, Net, Plain, X, number

from weightload import (
    IncompleteLoadError,
    ModelPoisonedError,
    SessionState,
    WeightLoadSession,
    poison_of,
    weights_version,
)
from weightload.testing import identical


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


def state(value):
    return {"layers.0.weight": number(value, 2.0), "layers.1.weight": number(value, 4.0)}


@pytest.fixture
def live():
    return Live(lambda: Net(Negated(), Plain()), state(1.0), version=1)


class ByContent:
    """Remembers results by what was asked alone, as encoder and prefix caches do."""

    def __init__(self, compute):
        self.compute = compute
        self.entries = {}
        self.told = []

    def ask(self, x):
        key = tuple(x.tolist())
        if key not in self.entries:
            self.entries[key] = self.compute(x).clone()
        return self.entries[key]

    def published(self, old, new):
        self.told.append((old, new))
        self.entries.clear()


class ByVersion(ByContent):
    """Has the version in its keys, and keeps what other versions gave."""

    def __init__(self, model):
        super().__init__(model)
        self.model = model

    def ask(self, x):
        key = (weights_version(self.model), *x.tolist())
        if key not in self.entries:
            self.entries[key] = self.compute(x).clone()
        return self.entries[key]


@pytest.mark.holds("G01", "G02")
def test_a_cache_that_is_told_answers_with_the_new_weights(live, commit):
    """One that is not told answers with the old ones."""
    told, untold = ByContent(live.model), ByContent(live.model)
    before = told.ask(X), untold.ask(X)
    assert identical(*before)
    live.reload(state(5.0), version=2, commit=commit, publish=[told.published])
    assert told.told == [(1, 2)]
    assert identical(told.ask(X), live.model(X))
    assert identical(untold.ask(X), before[1]), "this is the defect"
    assert not identical(told.ask(X), untold.ask(X))


@pytest.mark.holds("G02")
def test_a_cache_that_has_the_version_in_its_keys_need_not_be_dropped(live, commit):
    """Going back to a version, it answers with what it knows of it, which is right."""
    cache = ByVersion(live.model)
    first = cache.ask(X)
    live.reload(state(5.0), version=2, commit=commit)
    assert identical(cache.ask(X), live.model(X))
    assert not identical(cache.ask(X), first)
    live.reload(state(1.0), version=1, commit=commit)
    assert cache.ask(X) is first
    assert identical(first, live.model(X))


@pytest.mark.holds("G03")
def test_a_cache_is_told_of_other_weights_under_the_same_name(live, commit):
    """The adapter is replaced and is called what it was called; a key made of the name is none."""
    live.reload(state(3.0), version="adapter", commit=commit)
    cache, by_name = ByContent(live.model), ByVersion(live.model)
    cache.ask(X), by_name.ask(X)
    live.reload(state(5.0), version="adapter", commit=commit, publish=[cache.published])
    assert cache.told == [("adapter", "adapter")]
    assert identical(cache.ask(X), live.model(X))
    assert not identical(by_name.ask(X), live.model(X)), "this is the defect"


@pytest.mark.holds("G04")
def test_every_cache_is_told_once_and_in_turn(live, commit):
    """A tower, what connects it, and the whole model have a cache each, of what they compute."""
    tower, connector = live.model.layers
    caches = [ByContent(tower), ByContent(connector), ByContent(live.model)]
    for cache in caches:
        cache.ask(X)
    live.reload(state(5.0), version=2, commit=commit, publish=[cache.published for cache in caches])
    assert [cache.told for cache in caches] == [[(1, 2)]] * 3
    for cache, module in zip(caches, (tower, connector, live.model), strict=True):
        assert identical(cache.ask(X), module(X))


class Router:
    """Lives outside of the engine, knows which inputs the cache has, and may be out of reach."""

    def __init__(self, cache):
        self.cache = cache
        self.hints = set(cache.entries)
        self.reachable = True

    def published(self, old, new):
        if not self.reachable:
            raise ConnectionError("the router does not answer")
        self.hints = set(self.cache.entries)


@pytest.mark.holds("G05")
def test_an_index_outside_is_told_after_the_cache_it_describes(live, commit):
    """It has no hint for what is not there any more. When it cannot be told, the cache is told
    nevertheless, and the model refuses until a load has been published to everybody."""
    cache = ByContent(live.model)
    cache.ask(X)
    router = Router(cache)
    assert router.hints
    publish = [cache.published, router.published]
    live.reload(state(5.0), version=2, commit=commit, publish=publish)
    assert router.hints == set()

    cache.ask(X)
    router.reachable = False
    session = live.open(version=3, commit=commit, publish=publish[::-1])
    session.load(state(6.0))
    with pytest.raises(ConnectionError):
        session.finish()
    assert cache.told == [(1, 2), (2, 3)]
    assert cache.entries == {}
    assert session.state is SessionState.POISONED
    assert weights_version(live.model) is None
    with pytest.raises(ModelPoisonedError, match="does not answer"):
        cache.ask(X)
    router.reachable = True
    live.reload(state(6.0), version=3, commit=commit, publish=publish)
    live.equals(state(6.0))


@pytest.mark.holds("G01", "G02", "G05")
@pytest.mark.parametrize("how", ["refused", "aborted"])
def test_nobody_is_told_of_a_load_that_did_not_finish(live, how):
    """What the cache holds is still right, and dropping it would only cost time."""
    cache = ByContent(live.model)
    first = cache.ask(X)
    session = live.open(version=2, commit="atomic", publish=[cache.published])
    session.load(list(state(5.0).items())[:1])
    if how == "refused":
        with pytest.raises(IncompleteLoadError):
            session.finish()
    else:
        session.abort()
    assert cache.told == []
    assert poison_of(live.model) is None
    assert cache.ask(X) is first
    assert identical(first, live.model(X))
    assert weights_version(live.model) == 1


@pytest.mark.holds("G01", "G02")
def test_the_callback_sees_the_model_that_will_be_served(live, commit):
    """It may ask the model already, to fill a cache instead of dropping it."""
    seen = []
    with WeightLoadSession(
        live.model,
        version=2,
        commit=commit,
        verify="full",
        publish=[lambda old, new: seen.append((live.model(X), weights_version(live.model)))],
    ) as session:
        session.load(state(5.0))
    [(computed, version)] = seen
    assert torch.equal(computed, live.model(X))
    assert version == 2
    live.equals(state(5.0))
