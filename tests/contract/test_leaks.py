"""Sessions leave nothing behind: no tensor, no object, and no reference that keeps a model alive.

What weightload knows about a model hangs on the model itself or on weak keys. A session that a
registry, a hook or a loader keeps would hold staged weights, and after a thousand updates the
memory of the machine.
"""

import contextlib
import gc
import warnings
import weakref

import pytest
import torch

from weightload import (
    Scope,
    WeightLoadError,
    WeightLoadSession,
    abort_reload,
    planning,
    start_reload,
)
from weightload.testing import TOYS, Bench, LoadingModel, layers


class SourceFailure(Exception):
    """What a source raises here, and nothing else does."""


@pytest.fixture(autouse=True)
def _only_what_is_new():
    """Let the garbage collector see nothing that is there already; there is a lot, and it is slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def stream(bench, seed):
    bench.reload(bench.state(seed))


def atomic(bench, seed):
    bench.reload(bench.state(seed), commit="atomic")


def step_by_step(bench, seed):
    """One session over separate calls, kept by the model alone."""
    session = start_reload(bench.model, version=seed)
    for pair in bench.state(seed).items():
        session.load([pair])
    session.finish()


def some_names(bench, seed):
    """What one layer owns, where that can be loaded by itself."""
    state = bench.state(seed)
    names = [name for name in state if name.startswith("layers.1.")]
    with contextlib.suppress(WeightLoadError), bench.session(scope=Scope.only(names)) as session:
        session.load({name: state[name] for name in names})


def refused(bench, seed):
    """Seen before anything is written."""
    with pytest.raises(WeightLoadError), WeightLoadSession(bench.model) as session:
        session.load({**bench.state(seed), "no.such.name": torch.ones(2)})


def failed(bench, seed):
    """In the middle of a stream, so that the model is poisoned in most cases."""
    pairs = list(bench.state(seed).items())

    def source():
        yield from pairs[: len(pairs) // 2 + 1]
        raise SourceFailure

    with pytest.raises(SourceFailure), WeightLoadSession(bench.model) as session:
        session.load(source())


def aborted(bench, seed):
    session = bench.open()
    session.load(list(bench.state(seed).items())[:1])
    session.abort()


def aborted_by_call(bench, seed):
    start_reload(bench.model).load(list(bench.state(seed).items())[:1])
    abort_reload(bench.model)


def abandoned(bench, seed):
    """Dropped without an end, in the middle of an atomic load."""
    session = bench.open(commit="atomic")
    session.load(list(bench.state(seed).items())[:1])
    with pytest.warns(ResourceWarning, match="dropped"):
        del session


def abandoned_before_prepare(bench, seed):
    bench.session()


WAYS = {
    way.__name__.replace("_", " "): way
    for way in (
        stream,
        atomic,
        step_by_step,
        some_names,
        refused,
        failed,
        aborted,
        aborted_by_call,
        abandoned,
        abandoned_before_prepare,
    )
}


def watched(model):
    """Return weak references to a model's modules, tensors and storages, by name."""
    found = {f"module {name}": weakref.ref(one) for name, one in model.named_modules()}
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        found[f"tensor {name}"] = weakref.ref(one)
        found[f"storage {name}"] = weakref.ref(one.untyped_storage())
    return found


@pytest.mark.holds("W22")
@pytest.mark.parametrize("toy", TOYS)
def test_a_model_dies_with_its_last_reference(toy):
    """Whatever sessions it has had, and with the receipts still in the caller's hands."""
    receipts = []
    for way in WAYS.values():
        bench = Bench(TOYS[toy])
        way(bench, 2)
        receipts.append(bench.reload(bench.state(3)).receipt)
        way(bench, 4)
        references = watched(bench.model)
        assert len(references) > 3
        del bench
        gc.collect()
        alive = [name for name, reference in references.items() if reference() is not None]
        assert alive == [], way.__name__


def test_a_model_dies_with_a_session_that_it_keeps_open_itself():
    """The model holds the session, and the session the model; nobody else holds either."""
    bench = Bench(TOYS["everything"])
    session = start_reload(bench.model, commit="atomic")
    session.load(list(bench.state(2).items())[:3])
    references = watched(bench.model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del bench, session
        gc.collect()
    assert [name for name, reference in references.items() if reference() is not None] == []
    assert [one.category for one in caught] == [ResourceWarning]


@pytest.mark.parametrize("way", ["failed", "refused"])
def test_an_error_that_is_kept_does_not_keep_the_model(way):
    """Its traceback does, as that of every exception; without that, its facts are plain data."""
    bench = Bench(TOYS["everything"])
    pairs = list(bench.state(2).items())
    pairs[-1 if way == "failed" else 0] = ("no.such.name", torch.ones(2))
    session = bench.open()
    with pytest.raises(WeightLoadError) as caught:
        session.load(iter(pairs) if way == "failed" else pairs)
    error = caught.value.with_traceback(None)
    error.__cause__ = error.__context__ = None
    references = watched(bench.model)
    del bench, session, caught
    gc.collect()
    assert error.facts
    assert [name for name, reference in references.items() if reference() is not None] == []


def held():
    """Return how many objects and tensors there are, and how large all storages are together."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [one for one in objects if issubclass(type(one), torch.Tensor) and not one.is_meta]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return len(tensors), len(storages), sum(storages.values()), len(objects)


@pytest.mark.parametrize("toy", TOYS)
def test_many_sessions_leave_no_tensor_and_no_object_behind(toy, monkeypatch):
    """With other weights each time, and every way that a session can end in between.

    One coin for all of them: a model that a plan was recorded for has more objects than before.
    """
    monkeypatch.setenv(planning.MODE, "on" if planning.uses_plans(None) else "off")
    bench = Bench(TOYS[toy])
    counts = []
    for lap in range(4):
        for seed, way in enumerate(WAYS.values(), start=2 + lap * len(WAYS)):
            way(bench, seed)
            bench.reload(bench.state(seed + 1), commit=("stream", "atomic")[seed % 2])
        bench.framework.calls.clear()  # the toys' own list of what was called
        counts.append(held())
    # The first laps fill what is made once: patterns, caches of results, weak references.
    *_, before, after = counts
    assert after[:3] == before[:3], "tensors, storages, bytes"
    assert after[3] <= before[3] + 2, "objects: two for the list of counts itself"


made_classes = []


class MakingKernel(layers.InPlaceLinear):
    """Its hook makes a class for its kernel, as compilers do; the class knows layer and table."""

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        kernel = type(
            "Kernel", (), {"table": torch.ones(3), "layer": self, "__slots__": ("scale",)}
        )
        made_classes.append(weakref.ref(kernel))
        self.kernel = kernel()
        self.kernel.scale = 2.0


def test_classes_that_hooks_make_are_let_go_with_the_model():
    made_classes.clear()
    bench = Bench(lambda: LoadingModel(MakingKernel(), layers.Linear()))
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)
    assert any(made() is not None for made in made_classes)
    del bench
    gc.collect()
    assert all(made() is None for made in made_classes)
