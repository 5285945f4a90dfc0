"""Any tree of toy layers and any stream of its tensors: the model is what a fresh load gives, or
the load is refused and says truly what is left."""

import random
from functools import partial

import pytest
import torch
from hypothesis import event, given, note, settings
from hypothesis import strategies as st
from torch import nn

from weightload import Scope, SessionState, WeightLoadError, WeightLoadSession, poison_of
from weightload.testing import (
    CollectingModel,
    Kept,
    LoadingModel,
    TiedModel,
    ToyFault,
    check_equal,
    layers,
    make_state,
    toy_framework,
)

KINDS = {
    "linear": layers.Linear,
    "repacked": layers.RepackedLinear,
    "in place": layers.InPlaceLinear,
    "fused": layers.FusedLinear,
    "padded": layers.PaddedLinear,
    "padded, not packed": partial(layers.PaddedLinear, packed=False),
    "default scale": layers.DefaultScaleLinear,
    "attention": layers.LatentAttention,
    "kernel": layers.KernelLinear,
    "rebound bias": layers.FloatBiasLinear,
    "buffers": layers.BufferedLayer,
    "experts": layers.ExpertStack,
    "composed loader": layers.ComposedLoaderLinear,
    "interleaved": layers.InterleavedLinear,
    "interleaved, packed": partial(layers.InterleavedLinear, packed=True),
    "handle": layers.HandleLinear,
    "weight handle": layers.WeightHandleLinear,
    "filled attribute": layers.FilledScaleLinear,
    "sinks": layers.SinkAttention,
    "loaders that look": partial(layers.ScaledLinear, packed=False),
    "loaders that look, packed": partial(layers.ScaledLinear, packed=True),
    "scattered": partial(layers.ScatteredLinear, packed=True),
    "hook over children": layers.FusedExperts,
    "table": None,
}
"""How to make a layer of each kind; the tables of one model share their strategy object."""

trees = st.recursive(
    st.sampled_from(sorted(KINDS)),
    lambda inner: st.lists(inner, min_size=1, max_size=3),
    max_leaves=6,
).map(lambda tree: tree if isinstance(tree, list) else [tree])

models = st.builds(
    lambda cls, tree, twice: (cls, tree, twice),
    st.sampled_from([LoadingModel, CollectingModel, TiedModel]),
    trees,
    st.booleans(),
)


def build(recipe):
    """Make a model without weights."""
    cls, tree, twice = recipe
    method = layers.SharedTableMethod()

    def grow(node):
        if isinstance(node, list):
            return nn.Sequential(*map(grow, node))
        return layers.TableLinear(method) if node == "table" else KINDS[node]()

    grown = [grow(node) for node in tree]
    return cls(*grown, twice=twice) if cls is TiedModel else cls(*grown)


def optional_names(model):
    """Return name and shape of what a checkpoint may bring or leave to its default."""
    for prefix, module in model.named_modules():
        if isinstance(module, layers.DefaultScaleLinear):
            yield f"{prefix}.scale", (1,)
        if isinstance(module, layers.BufferedLayer):
            yield f"{prefix}.temperature", ()


@st.composite
def loads(draw, recipe):
    """Return how one load goes: its weights, their order and kind of source, and what is wrong."""
    factory = partial(build, recipe)
    state = make_state(factory, draw(st.integers(1, 3)))
    for name, shape in optional_names(factory()):
        if draw(st.booleans()):
            state[name] = torch.full(shape, draw(st.sampled_from([0.25, 3.0])))
    names = list(state)
    random.Random(draw(st.integers(0, 1000))).shuffle(names)
    cuts = sorted(draw(st.lists(st.integers(0, len(names)), max_size=3)))
    chunks = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    kinds = [draw(st.sampled_from(["mapping", "list", "iterator", "buffer"])) for _ in chunks]
    fault = draw(
        st.sampled_from([None] * 6 + ["missing", "twice", "unknown", "shape", "source", "hook"])
    )
    return {
        "state": {name: state[name] for name in names},
        "chunks": list(zip(chunks, kinds, strict=True)),
        "commit": draw(st.sampled_from(["stream", "atomic"])),
        "fault": fault,
        "where": draw(st.integers(0, len(names) - 1)),
        "half way": draw(st.booleans()),
    }


class SourceError(Exception):
    """What a source raises."""


def pairs_of(load, names):
    """Yield what is sent under ``names``, with the fault of the load built in."""
    at_fault = list(load["state"])[load["where"]]
    for name in names:
        tensor = load["state"][name].clone()
        fault = load["fault"] if name == at_fault else None
        if fault == "missing":
            continue
        if fault == "source":
            raise SourceError
        if fault == "shape":
            tensor = torch.cat([tensor.reshape(-1), tensor.reshape(-1)])
        if fault == "unknown":
            yield f"{name}.nowhere", tensor
        yield name, tensor
        if fault == "twice":
            yield name, tensor


def source(load, names, kind):
    """Return a source of one kind."""
    pairs = pairs_of(load, names)
    if kind == "mapping" and load["fault"] not in ("source", "twice"):
        return dict(pairs)
    if kind == "list" and load["fault"] != "source":
        return list(pairs)
    return overwriting(pairs) if kind == "buffer" else pairs


def overwriting(pairs):
    """Yield each tensor as a view of one buffer that the next one overwrites."""
    buffer = torch.empty(4096)
    for name, tensor in pairs:
        view = buffer[: tensor.numel()].view(tensor.shape)
        yield name, view.copy_(tensor)
        buffer.fill_(float("nan"))


def perform(session, load, framework):
    """Run one load to its end, and return what ended it, if it did not finish."""
    if load["fault"] == "hook":
        framework.fail_hook(load["where"], half_way=load["half way"])
    try:
        for names, kind in load["chunks"]:
            session.load(source(load, names, kind))
        session.finish()
    except (WeightLoadError, SourceError) as error:
        return error
    return None


@settings(max_examples=5 * settings.default.max_examples)
@given(st.data())
def test_a_load_gives_what_a_fresh_load_gives_or_is_refused(data):
    """Four loads in a row, some of them broken, and a complete one at the end."""
    recipe = data.draw(models)
    factory, framework = partial(build, recipe), toy_framework()
    model, serves, kept = factory(), None, None
    for number in range(5):
        load = data.draw(loads(recipe))
        at_fault = list(load["state"])[load["where"]]
        if number == 4 or (kept is None and may_miss(at_fault, True)):
            load["fault"] = None  # a first load cannot know all that should come
        state, options = load["state"], {"commit": load["commit"], "version": number}
        if serves is None and kept is None:
            options |= {"framework": framework, "scope": Scope.full(allow_missing=model.may_miss)}
        session = WeightLoadSession(model, **options)
        session.prepare()
        error = perform(session, load, framework)
        armed = framework.disarm()
        if error is not None:
            note(f"{type(error).__name__}: {error}")
            event(f"refused: {type(error).__name__}")
            why = isinstance(error.__cause__, ToyFault) or load["fault"]
            assert why or may_refuse(state, model), f"refused without a reason: {error}"
            intact = session.state is SessionState.ABORTED
            assert getattr(error, "model_intact", intact) == intact
            assert intact == (poison_of(model) is None) or serves is None
            serves = serves if intact else None
        else:
            event("finished")
            assert load["fault"] in (None, "hook", "missing"), "the fault went unnoticed"
            if load["fault"] == "hook":
                assert armed, "a hook failed and nobody noticed"
            if load["fault"] == "missing":
                assert may_miss(at_fault, False), f"{at_fault} was left out and not missed"
                del state[at_fault]
            serves = state
            kept = kept or Kept.of(model)
        if serves is not None and poison_of(model) is None:
            check_equal(model, factory, serves)
        if kept is not None:
            kept.check(model)


def may_refuse(state, model):
    """Whether a load without a fault may be refused: it leaves out what an earlier load brought,
    or brings, when it is too late to wait for it, what no load brought before."""
    return any(True for _ in optional_names(model)) or any(
        name.endswith((".scale", ".temperature")) for name in state
    )


def may_miss(name, first):
    """Whether a model can be right without that tensor of a checkpoint."""
    if name.endswith((".scale", ".temperature")) or name in ("head.weight", "embedding.weight"):
        return True
    return first and ("/" in name or name.endswith(".mean"))


def test_the_kinds_are_all_that_the_kit_has():
    """A new layer of the kit joins in."""
    made = {type(make()) for make in KINDS.values() if make is not None} | {layers.TableLinear}
    known = {
        getattr(layers, name)
        for name in layers.__all__
        if isinstance(getattr(layers, name), type) and issubclass(getattr(layers, name), nn.Module)
    }
    assert known - made == {layers.PackedHead, layers.SummedState}, "the tied model has these"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_alone_is_reloaded_right(kind):
    """The shortest tree of each kind, so that a failure there is named at once."""
    recipe = (LoadingModel, [kind], False)
    factory = partial(build, recipe)
    model, framework = factory(), toy_framework()
    for number in (1, 2, 1):
        state = make_state(factory, number)
        with WeightLoadSession(
            model, framework=framework, scope=Scope.full(allow_missing=model.may_miss)
        ) as session:
            session.load(state)
        check_equal(model, factory, state)
