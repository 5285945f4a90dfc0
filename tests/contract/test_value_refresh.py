"""Every derived value is what the new weights give: copies, mirrors, caches, numbers, flags.

The damage shown here is there in eager mode as well: a copy that was detached from its source, a hook
that finds its own kernel and does nothing, a cache that nobody drops. Addresses can be perfect. That
A, B and C differ in every value is what shows it; to load A again would not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from weightload import (
    IncompleteLoadError,
    ModuleRule,
    ProcessingError,
    Role,
    Scope,
    StorageChangedError,
    VerificationError,
    WeightLoadSession,
)
from weightload.testing import (
    Bench,
    Kept,
    LoadingModel,
    ToyModel,
    expected,
    fresh,
    identical,
    make_state,
    outputs,
)
from weightload.testing.capture import CapturedGraph, check_reloads, damage
from weightload.testing.kernels import Processed, ProcessedState
from weightload.testing.layers import WIDTH, Linear, RepackedLinear, parameter
from weightload.testing.oracle import ToyFramework, reload_by_hand
from weightload.testing.sharing import SinkAttention

COMMITS = ("stream", "atomic")
each_commit = pytest.mark.parametrize("commit", COMMITS)


def with_linear(layer):
    """Return a factory of models with that layer and a plain one."""
    return lambda: ToyModel(layer(), Linear())


# ------------------------------------------------------------------------------ detached copies


class Sinks(Processed):
    """Attention sinks in bfloat16, and what the kernel made of them in float32, once."""

    def __init__(self):
        super().__init__()
        self.sinks = parameter(WIDTH, dtype=torch.bfloat16)
        self.runtime = None

    def process_weights_after_loading(self):
        if self.runtime is None:
            self.runtime = self.sinks.detach().to(torch.float32)

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) + self.runtime


@pytest.mark.holds("B01")
@each_commit
def test_a_copy_in_another_type_follows_its_source(commit):
    """``.to()`` gives the tensor itself where the type is right already, and else a copy."""
    assert damage(with_linear(Sinks)) == {"value", "stale"}
    bench = check_reloads(with_linear(Sinks), options={"commit": commit})
    bench.reload(bench.state(2))
    want = bench.state(2)["layers.0.sinks"].to(torch.bfloat16).to(torch.float32)
    assert torch.equal(bench.model.layers[0].runtime, want)


@pytest.mark.holds("B08")
@each_commit
def test_the_same_address_is_no_proof_of_the_value(commit):
    """By hand every address is kept, and two of the values are those of the old checkpoint."""
    factory = with_linear(SinkAttention)
    bench = Bench(factory)
    model = fresh(factory, bench.state(1))
    kept = Kept.of(model)
    reload_by_hand(model, bench.state(2))
    kept.check(model)
    assert not identical(outputs(model), expected(factory, bench.state(2)))
    check_reloads(factory, options={"commit": commit})


# ------------------------------------------------------------------------------ model-level hooks


class NormMirror(nn.Module):
    """A norm whose kernel reads a mirror in float32 of the weight."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(WIDTH, dtype=torch.bfloat16)
        self.mirror = parameter(WIDTH, fill=0.0)

    def forward(self, x):
        return functional.normalize(x, dim=-1) * self.mirror


class MirrorModel(ToyModel):
    """A hook of the model as a whole fills the mirrors."""

    def checkpoint(self):
        return {name: shape for name, shape in super().checkpoint().items() if "mirror" not in name}

    def finish_weights(self):
        for layer in self.layers:
            if isinstance(layer, NormMirror):
                layer.mirror.data.copy_(layer.weight.detach().float() + 1)


class MirrorFramework(ToyFramework):
    """Knows the hook of the model as a whole."""

    def model_rule(self, model):
        return ModuleRule(role=Role.DERIVED, process=lambda module: module.finish_weights())


@pytest.mark.holds("B02")
@each_commit
def test_mirrors_that_a_hook_of_the_whole_model_fills(commit):
    """Only the cold start calls it: no reload, no transfer, no wake-up does."""
    factory = lambda: MirrorModel(NormMirror(), Linear(), NormMirror())  # noqa: E731
    states = {number: make_state(factory, number) for number in (1, 2, 3)}
    model, by_hand = factory(), factory()
    with WeightLoadSession(
        model, framework=MirrorFramework(), scope=Scope.full(allow_missing=("*.mirror",))
    ) as session:
        session.load(states[1])
    reload_by_hand(by_hand, states[1])
    by_hand.finish_weights()
    graph, kept = CapturedGraph(model), Kept.of(model)
    assert identical(outputs(model), outputs(by_hand))
    for number in (2, 3, 1):
        reload_by_hand(by_hand, states[number])
        stale = outputs(by_hand)
        by_hand.finish_weights()
        assert not identical(stale, outputs(by_hand)), "or else nothing is shown"
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load(states[number])
        assert identical(outputs(model), outputs(by_hand))
        assert identical(graph(model.example()), outputs(by_hand))
        kept.check(model)


# ------------------------------------------------------------------------------ lazy caches


class LazyMerge(Processed):
    """Its first forward pass merges two weights, and nobody ever drops what it made."""

    def __init__(self):
        super().__init__()
        self.other = parameter(WIDTH, WIDTH)
        self.merged = None

    def forward(self, x):
        if self.merged is None:
            self.merged = self.weight.detach() @ self.other.detach()
        return torch.tanh(functional.linear(x, self.merged))


class DroppedMerge(LazyMerge):
    """The same, with the cache declared: its hook drops it."""

    def process_weights_after_loading(self):
        self.merged = None


@pytest.mark.holds("B03")
@each_commit
def test_a_lazy_cache_that_a_hook_drops_is_made_anew(commit):
    """It is made of the new weights; a captured graph knows the old one, so it is named."""
    factory = with_linear(DroppedMerge)
    assert damage(with_linear(LazyMerge)) == {"value", "stale"}
    assert damage(factory) == {"freed"}
    bench = Bench(factory)
    for number in (2, 3, 1):
        outputs(bench.model)
        with bench.session(commit=commit) as session:
            session.load(bench.state(number))
        assert session.receipt.moved == ["layers.0.merged: a tensor became None"]
        assert identical(outputs(bench.model), expected(factory, bench.state(number)))
    with (
        pytest.raises(StorageChangedError, match=r"layers\.0\.merged"),
        bench.session(commit=commit, strict=True) as session,
    ):
        session.load(bench.state(2))


class RefreshedMerge(LazyMerge):
    """The same, declared better: its hook makes the cache, and forward finds it."""

    def process_weights_after_loading(self):
        self.merged = self.weight.detach() @ self.other.detach()


@pytest.mark.holds("B03")
@each_commit
def test_a_lazy_cache_that_a_hook_makes_is_refreshed_in_its_place(commit):
    check_reloads(with_linear(RefreshedMerge), options={"commit": commit})


# ------------------------------------------------------------------------------ mirrors


class MirroredScale(Processed):
    """One scale in four forms: a parameter, a number, a tensor on the host, an array.

    Its hook makes the others when it finds the defaults there.
    """

    def __init__(self):
        super().__init__()
        self.level = parameter(WIDTH)
        self.number = 1.0
        self.on_host = torch.ones(WIDTH)
        self.array = None

    def process_weights_after_loading(self):
        if self.number == 1.0:
            self.number = float(self.level.detach().sum())
        if self.array is None:
            self.on_host.copy_(self.level.detach().cpu())
            self.array = self.level.detach().cpu().clone().numpy()

    def forward(self, x):
        x = functional.linear(x, self.weight) * self.level + self.number
        return torch.tanh(x) * self.on_host + float(self.array.sum())


@pytest.mark.holds("B04")
@each_commit
def test_every_form_of_one_value_is_refreshed(commit):
    """The tensor on the device travels; the number stays what it was at the cold start."""
    pytest.importorskip("numpy")
    factory = with_linear(MirroredScale)
    assert "value" in damage(factory)
    bench = Bench(factory)
    on_host = bench.model.layers[0].on_host
    for number in (2, 3, 1):
        bench.reload(bench.state(number), commit=commit)
        layer, want = bench.model.layers[0], bench.state(number)["layers.0.level"]
        assert layer.number == float(want.sum())
        assert torch.equal(layer.level.detach(), want)
        assert torch.equal(layer.on_host, want)
        assert layer.on_host is on_host
        assert torch.equal(torch.from_numpy(layer.array), want)


class Guarded(Processed):
    """Its hook builds its kernel once, to keep the kernel's tensors where they are."""

    def __init__(self):
        super().__init__()
        self.kernel = None

    def process_weights_after_loading(self):
        if self.kernel is not None:
            return
        self.kernel = {"scale": self.weight.detach().abs().amax(1), "zero": 0.5}

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight) / self.kernel["scale"])


@pytest.mark.holds("B05")
@pytest.mark.parametrize("layer", [Guarded, RepackedLinear])
@each_commit
def test_a_hook_that_skips_itself_when_its_kernel_exists(layer, commit):
    """What is meant to keep addresses freezes values; the session does both."""
    assert damage(with_linear(layer)) == {"value", "stale"}
    check_reloads(with_linear(layer), options={"commit": commit})


# ------------------------------------------------------------------------------ too early


class FusedKeys(ProcessedState):
    """Its hook fuses the weights of the layers before it, and counts what it found."""

    def __init__(self, layers):
        super().__init__()
        self.sources = tuple(layers)
        self.seen = []

    def process_weights_after_loading(self):
        weights = [torch.as_tensor(layer.weight).detach() for layer in self.sources]
        self.seen = [bool(weight.isfinite().all()) for weight in weights]
        self.fused = torch.cat(weights).sum(0)

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) + self.fused


class Fusion(LoadingModel):
    """Two layers, and one that fuses what they hold."""

    def __init__(self):
        first, second = Linear(), Linear()
        super().__init__(first, second, FusedKeys((first, second)))


class EagerFusion(Fusion):
    """Fuses at the end of every call of its loader, whatever has arrived by then."""

    def load_weights(self, weights):
        super().load_weights(weights)
        self.layers[2].process_weights_after_loading()


def buckets(state, size=1):
    items = list(state.items())
    return [dict(items[start : start + size]) for start in range(0, len(items), size)]


@pytest.mark.holds("B07")
@each_commit
def test_what_is_derived_waits_until_everything_is_there(commit):
    """By hand, a bucket at a time, the first fusion is made of memory that nobody has filled."""
    bench = Bench(Fusion)
    by_hand = EagerFusion()
    with torch.no_grad():
        by_hand.load_weights(list(buckets(bench.state(1))[0].items()))
    assert by_hand.layers[2].seen == [True, False]
    assert by_hand.layers[2].fused.isnan().all()

    for number in (2, 3, 1):
        bench.framework.calls.clear()
        with bench.session(commit=commit) as session:
            for bucket in buckets(bench.state(number)):
                session.load(bucket)
                assert bench.framework.calls == []
        assert [role for role, _ in bench.framework.calls] == [Role.DERIVED]
        assert bench.model.layers[2].seen == [True, True]
        bench.serves = bench.state(number)
        bench.check_finished(session)


@pytest.mark.holds("B07")
@each_commit
def test_a_load_that_lacks_what_is_fused_never_fuses(commit):
    bench = Bench(Fusion)
    first, *rest = buckets(bench.state(2))
    bench.framework.calls.clear()
    session = bench.open(commit=commit)
    for bucket in rest:
        session.load(bucket)
    with pytest.raises(IncompleteLoadError, match=r"layers\.0\.weight"):
        session.finish()
    assert bench.framework.calls == []
    assert first.keys() == {"layers.0.weight"}


# ------------------------------------------------------------------------------ latched flags


class Latched(Processed):
    """Its hook converts the scale once, and from then on takes every scale for a converted one."""

    def __init__(self):
        super().__init__()
        self.level = parameter(WIDTH)
        self.converted = False

    def process_weights_after_loading(self):
        level = self.level.detach()
        if self.converted:
            level = torch.log2(level.abs())
        self.keys = self.weight.detach() * level
        self.level.data.copy_(torch.exp2(level))
        self.converted = True

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.keys)) / self.level


@pytest.mark.holds("B09")
@each_commit
def test_a_flag_that_says_converted_is_put_back(commit):
    """It is kept by the module, and says nothing about the weights that have just arrived."""
    assert "value" in damage(with_linear(Latched))
    bench = check_reloads(with_linear(Latched), options={"commit": commit})
    assert bench.model.layers[0].converted
    bench.reload(bench.state(2))
    want = torch.exp2(bench.state(2)["layers.0.level"])
    assert torch.equal(bench.model.layers[0].level, want)


# ------------------------------------------------------------------------------ written in place


class RefreshedInPlace(LazyMerge):
    """Its hook writes into the cache that a forward pass made, and makes none itself."""

    def process_weights_after_loading(self):
        if self.merged is not None:
            self.merged.copy_(self.weight.detach() @ self.other.detach())


@pytest.mark.holds("B03")
@each_commit
def test_a_lazy_cache_that_a_hook_writes_to_gets_its_value_with_the_commit(commit):
    """At the first load there was none, so nothing was recorded; a graph knows its address."""
    factory = with_linear(RefreshedInPlace)
    assert damage(factory) == set(), "a good hook needs no help, until something fails"
    bench = check_reloads(factory, options={"commit": commit})
    merged = bench.model.layers[0].merged
    bench.reload(bench.state(2), commit=commit)
    assert bench.model.layers[0].merged is merged


@pytest.mark.holds("B03")
def test_a_lazy_cache_that_a_hook_writes_to_is_not_written_before_the_commit():
    """A later hook fails, nothing live was to have been written, and so it is."""
    factory = lambda: ToyModel(RefreshedInPlace(), RepackedLinear())  # noqa: E731
    bench = Bench(factory)
    want = outputs(bench.model)
    merged = bench.model.layers[0].merged
    value = merged.clone()
    bench.kept = Kept.of(bench.model)
    bench.framework.fail_hook(1)
    with pytest.raises(ProcessingError) as caught:
        bench.reload(bench.state(2), commit="atomic")
    assert caught.value.model_intact
    assert bench.model.layers[0].merged is merged
    assert torch.equal(merged, value)
    assert identical(outputs(bench.model), want)
    bench.framework.fail_hook(0, half_way=True)
    with pytest.raises(ProcessingError):
        bench.reload(bench.state(2), commit="atomic")
    assert torch.equal(merged, value)
    bench.reload(bench.state(3), commit="atomic")
    assert bench.model.layers[0].merged is merged


class Scaling(LazyMerge):
    """What its hook makes of the cache depends on what the cache held before."""

    def process_weights_after_loading(self):
        if self.merged is not None:
            self.merged.copy_(self.weight.detach() @ self.other.detach() - self.merged)

    def forward(self, x):
        if self.merged is None:
            self.merged = torch.zeros(WIDTH, WIDTH)
        return torch.tanh(functional.linear(x, self.weight)) + self.merged[0]


def test_to_verify_a_unit_writes_to_nothing_that_is_live():
    """It is processed a second time, aside, from what the hook found the first time."""
    bench = Bench(with_linear(Scaling))
    outputs(bench.model)
    merged = bench.model.layers[0].merged
    with bench.session(verify=None) as session:
        session.load(bench.state(2))
    want = merged.clone()
    merged.zero_()
    with pytest.raises(VerificationError), bench.session(verify="full") as session:
        session.load(bench.state(2))
    assert torch.equal(merged, want), "as it was when its second value was found to be another"
