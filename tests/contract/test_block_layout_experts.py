"""Experts in a kernel format that nothing leads back from, and a chain of scales outside parameters.

The backend is picked while a layer is processed, and not all layers of a model get the same one. One
format has another rank and type (blocks of int8), in one the gate and up projections have only changed
their places, one is the checkpoint's own. A loader that meets the wrong one fails, or it does not and
scrambles; scales that were multiplied into one another are stale where only weights travel.
"""

import random

import pytest
import torch

from weightload import IncompleteLoadError, StorageChangedError, WeightLoadSession
from weightload.ownership import poison_of
from weightload.testing import (
    Bench,
    LoadingModel,
    check_equal,
    expected,
    fresh,
    identical,
    make_state,
    outputs,
)
from weightload.testing.capture import CapturedGraph, FreedMemoryError, check_reloads, damage
from weightload.testing.kernels import BlockExperts
from weightload.testing.layers import Linear

COMMITS = ("stream", "atomic")
each_commit = pytest.mark.parametrize("commit", COMMITS)
INNER = {"plain": 6, "swapped": 4, "blocks": 8}
"""The inner size of a layer, by the backend that it gets for it."""


class Experts(LoadingModel):
    """A checkpoint brings each projection of each expert, and each scale, on its own."""

    def sources(self, name, place):
        owner = self.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, BlockExperts):
            yield from super().sources(name, place)
            return
        count, shape = owner.parts()[name.rpartition(".")[2]]
        for part in range(count):
            yield f"{name}/{part}", shape


def mixed():
    """One model, three backends."""
    return Experts(*(BlockExperts(inner) for inner in INNER.values()), Linear())


def only(backend):
    return lambda: Experts(BlockExperts(INNER[backend]), Linear())


def by_formula(layer, state, x, *, swapped=False, chain=None):
    """Work out what one layer computes from a checkpoint, with no kernel format at all.

    Args:
        layer: qualified name of the layer.
        state: the checkpoint.
        x: the input.
        swapped: take the gate for the up projection.
        chain: the checkpoint whose scales were multiplied into one another.
    """
    chain = state if chain is None else chain
    first, second = (
        torch.stack([chain[f"{layer}.input_scale/{e}"] for e in range(2)]).abs().amax(0) + 0.5
    )
    total = torch.zeros_like(x)
    for e in range(2):
        gate, up = (state[f"{layer}.w13/{2 * e + half}"] for half in range(2))
        gate, up = (up, gate) if swapped else (gate, up)
        scales = {
            name: tuple(source[f"{layer}.{name}/{e}"].abs() + 0.5 for source in (state, chain))
            for name in ("w13_scale", "w2_scale")
        }
        (own13, used13), (own2, used2) = scales["w13_scale"], scales["w2_scale"]
        y = torch.tanh(x @ gate.t() / own13 * used13) * (x @ up.t() / own13 * used13)
        total = total + y @ state[f"{layer}.w2/{e}"].t() / own2 * used2
    assert first > 0
    assert second > 0
    return torch.tanh(total)


def layer_output(model, x):
    with torch.no_grad():
        return model.layers[0](x)


# ------------------------------------------------------------------------------ the toy


def test_the_backend_depends_on_the_layer():
    """And is known only when the layer has been processed."""
    model = mixed()
    assert [layer.backend for layer in model.layers[:3]] == ["auto"] * 3
    model = fresh(mixed, make_state(mixed, 1))
    assert [layer.backend for layer in model.layers[:3]] == list(INNER)
    assert [layer.w13.ndim for layer in model.layers[:3]] == [3, 3, 4]
    assert model.layers[2].w13.dtype == torch.int8


@pytest.mark.parametrize("backend", INNER)
def test_every_backend_computes_what_the_checkpoint_says(backend):
    """Up to the rounding of blocks, which is what nothing leads back from."""
    factory = only(backend)
    x = factory().example()
    for number in (1, 2, 3):
        state = make_state(factory, number)
        found = layer_output(fresh(factory, state), x)
        want = by_formula("layers.0", state, x)
        tolerance = 0.05 if backend == "blocks" else 1e-5
        torch.testing.assert_close(found, want, rtol=0, atol=tolerance)
        assert (found - want).abs().max() > 0 or backend != "blocks"
        other = by_formula("layers.0", state, x, swapped=True)
        assert (found - other).abs().max() > 2 * tolerance, "the halves are not alike"


# ------------------------------------------------------------------------------ sessions


@pytest.mark.holds("A13", "C02")
@each_commit
@pytest.mark.parametrize("factory", [mixed, *map(only, INNER)], ids=["mixed", *INNER])
def test_repeated_updates_equal_a_fresh_model(factory, commit):
    """Five checkpoints, bit for bit, at the same addresses, seen by a captured graph as well."""
    bench = check_reloads(factory, numbers=(2, 3, 4, 5, 1), options={"commit": commit})
    layer = bench.model.layers[0]
    chain = dict(vars(layer.kernel.chain))
    addresses = {name: tensor.data_ptr() for name, tensor in chain.items()}
    for number in (2, 3, 1):
        bench.reload(bench.state(number), commit=commit)
        now = vars(layer.kernel.chain)
        assert {name: tensor.data_ptr() for name, tensor in now.items()} == addresses
        want = vars(fresh(factory, bench.state(number)).layers[0].kernel.chain)
        assert all(identical(now[name], want[name]) for name in want)


@pytest.mark.holds("C02")
@each_commit
def test_experts_may_come_in_any_order_and_in_pieces(commit):
    """Loaders meet the checkpoint's format until the last piece of a layer is there."""
    bench = Bench(mixed)
    for number in (2, 3, 1):
        items = list(bench.state(number).items())
        random.Random(number).shuffle(items)
        with bench.session(commit=commit) as session:
            for start in range(0, len(items), 3):
                session.load(dict(items[start : start + 3]))
        bench.serves = bench.state(number)
        bench.check_finished(session)


@each_commit
def test_an_expert_that_never_comes_is_named_and_nothing_is_packed(commit):
    bench = Bench(only("blocks"))
    state = bench.state(2)
    del state["layers.0.w13/3"]
    session = bench.open(commit=commit)
    bench.framework.calls.clear()
    session.load(iter(state.items()))
    with pytest.raises(IncompleteLoadError, match=r"layers\.0\.w13.*1:2, 8:16") as caught:
        session.finish()
    assert bench.framework.calls == []
    bench.check_ended(session, caught.value)
    bench.check_recovers()


@pytest.mark.holds("A13", "D05")
@each_commit
def test_another_pick_than_at_the_first_load_is_refused(commit, monkeypatch):
    """The pick reads what a framework sets, and a reload may come when that is something else."""
    factory = only("blocks")
    bench = Bench(factory)
    graph, x = CapturedGraph(bench.model), bench.model.example()
    before = expected(factory, bench.state(1))
    monkeypatch.setattr(BlockExperts, "large", 100)
    with (
        pytest.raises(StorageChangedError, match=r"w13: shape .* became \(2, 16, 8\)") as caught,
        WeightLoadSession(bench.model, commit=commit) as session,
    ):
        session.load(bench.state(2))
    # The scales are no staged tensors: with commit="stream" they are live by then.
    assert caught.value.model_intact == (commit == "atomic")
    assert (poison_of(bench.model) is None) == (commit == "atomic")
    if commit == "atomic":
        assert bench.model.layers[0].backend == "blocks"
        assert identical(outputs(bench.model), before)
        assert identical(graph(x), before)
    monkeypatch.undo()
    bench.reload(bench.state(3), commit=commit)
    assert identical(graph(x), expected(factory, bench.state(3)))


# ------------------------------------------------------------------------------ bypassed


def loaders_only(model, state):
    """What a trainer does that calls the model's ``load_weights`` and nothing else."""
    with torch.no_grad():
        model.load_weights([(name, tensor.clone()) for name, tensor in state.items()])


@pytest.mark.holds("C01", "A13")
@pytest.mark.parametrize(
    ("backend", "by_loaders", "by_loaders_and_hooks"),
    [
        ("plain", {"value", "stale"}, {"value", "stale"}),
        ("swapped", {"value", "stale"}, {"value", "stale"}),
        ("blocks", {"error"}, {"error"}),
    ],
)
def test_a_reload_past_the_session_is_wrong(backend, by_loaders, by_loaders_and_hooks):
    """Loud where the rank is another, and silent where the shape happens to fit."""
    assert damage(only(backend), reload=loaders_only) == by_loaders
    assert damage(only(backend)) == by_loaders_and_hooks


@pytest.mark.holds("C01")
def test_past_the_session_gate_and_up_projection_change_their_places():
    """What is wrong is exactly that, and the scales; the oracle catches it."""
    factory = only("swapped")
    model, one = fresh(factory, make_state(factory, 1)), make_state(factory, 1)
    x = model.example()
    loaders_only(model, one)
    # The kernel multiplies with the scales that the weights were divided by, and these were not.
    undivided = {
        name: tensor * scale_of(one, name) if "/" in name else tensor
        for name, tensor in one.items()
    }
    torch.testing.assert_close(
        layer_output(model, x), by_formula("layers.0", undivided, x, swapped=True)
    )
    with pytest.raises(AssertionError, match=r"layers\.0\.w13 is"):
        check_equal(model, factory, one)


def scale_of(state, name):
    """Return the scale that the kernel format divides a tensor by, 1 if there is none."""
    place, _, part = name.partition("/")
    expert = int(part) // 2 if place.endswith("w13") else int(part)
    if place.endswith(("w13", "w2")):
        return state[f"{place}_scale/{expert}"].abs() + 0.5
    return 1.0


@pytest.mark.holds("A13")
def test_past_the_session_the_chain_of_scales_is_that_of_the_old_checkpoint():
    """A trainer that brings weights in kernel format still multiplies with the old scales."""
    factory = only("plain")
    one, two = make_state(factory, 1), make_state(factory, 2)
    model, want = fresh(factory, one), fresh(factory, two)
    x = model.example()
    with torch.no_grad():
        for name, place in model.named_parameters():
            place.copy_(want.get_parameter(name))
    torch.testing.assert_close(layer_output(model, x), by_formula("layers.0", two, x, chain=one))
    assert not torch.allclose(layer_output(model, x), by_formula("layers.0", two, x), atol=1e-3)
    with pytest.raises(AssertionError, match="output is"):
        check_equal(model, factory, two)


@pytest.mark.holds("A13")
def test_a_chain_that_is_rebuilt_by_hand_is_right_in_eager_mode_and_freed_for_a_graph():
    """What repairs the values loses the addresses."""
    factory = only("plain")
    model, state = fresh(factory, make_state(factory, 1)), make_state(factory, 2)
    graph, x = CapturedGraph(model), model.example()
    loaders_only(model, state)
    model.layers[0].kernel = None
    model.layers[0].process_weights_after_loading()
    assert identical(outputs(model), expected(factory, state))
    with pytest.raises(FreedMemoryError):
        graph(x)


@pytest.mark.holds("C01")
@pytest.mark.parametrize("backend", INNER)
def test_a_session_repairs_what_was_loaded_past_it(backend):
    """A complete reload starts from the checkpoint's format, whatever is there."""
    factory = only(backend)
    bench = Bench(factory)
    if backend == "blocks":
        with torch.no_grad():
            bench.model.layers[0].w13.fill_(3)
    else:
        loaders_only(bench.model, bench.state(2))
    with pytest.raises(AssertionError):
        check_equal(bench.model, factory, bench.state(2))
    bench.reload(bench.state(3))
