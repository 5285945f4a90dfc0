"""A kernel object that every pass of a hook builds anew keeps its tensors where they were.

Scales, strides and workspaces hang on it as attributes of a configuration, items of dicts and lists,
arguments of a partial, cells of a closure, and inside a tensor subclass. Graphs and compiled functions
know the tensors and not the object. Five reloads with five checkpoints, in eager mode, replayed at
the captured addresses, and under ``torch.compile``, which must not compile again.
"""

import functools
import shutil

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from weightload import (
    DuplicateWeightError,
    Framework,
    Scope,
    StorageChangedError,
    UnexpectedWeightError,
    UnsupportedError,
    WeightLoadSession,
)
from weightload.testing import (
    Bench,
    LoadingModel,
    ToyModel,
    expected,
    fresh,
    identical,
    make_state,
    outputs,
)
from weightload.testing.capture import CapturedGraph, check_reloads, damage
from weightload.testing.kernels import Processed, RebuiltKernelLinear, ScaledTensor
from weightload.testing.layers import WIDTH, Linear
from weightload.testing.oracle import reload_by_hand

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*_stable_hash_for_caching:UserWarning"),
]
COMMITS = ("stream", "atomic")
each_commit = pytest.mark.parametrize("commit", COMMITS)
FIVE = (2, 3, 4, 5, 1)


def rebuilt():
    return ToyModel(RebuiltKernelLinear(), Linear(), RebuiltKernelLinear())


# ------------------------------------------------------------------------------ eager


@pytest.mark.holds("A02", "A05")
@each_commit
def test_every_tensor_of_a_rebuilt_kernel_keeps_its_address_and_gets_its_value(commit):
    """The objects around them are those that the last pass made."""
    assert damage(rebuilt) == {"value", "freed"}
    bench = Bench(rebuilt)
    layer = bench.model.layers[0]
    tensors, kernel, weight = layer.tensors(), layer.kernel, layer.weight
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert len(set(addresses.values())) == 13
    for number in FIVE:
        session = bench.reload(bench.state(number), commit=commit, strict=True)
        now, want = layer.tensors(), fresh(rebuilt, bench.state(number)).layers[0].tensors()
        assert {name: tensor.data_ptr() for name, tensor in now.items()} == addresses
        assert all(now[name] is tensor for name, tensor in tensors.items())
        assert [name for name in want if not identical(now[name], want[name])] == []
        assert layer.kernel is not kernel
        assert layer.weight is weight
        assert session.receipt.moved == []
        kernel = layer.kernel


@pytest.mark.holds("A02", "A05")
@each_commit
def test_a_captured_graph_of_a_rebuilt_kernel_is_right_after_every_reload(commit):
    check_reloads(rebuilt, numbers=FIVE, options={"commit": commit})


@pytest.mark.holds("A02")
def test_strides_that_come_out_the_same_still_move_by_hand():
    """They never change their value, so no comparison of values shows that the graph lost them."""
    model = fresh(rebuilt, make_state(rebuilt, 1))
    before = model.layers[0].kernel.config.strides
    address, value = before.data_ptr(), before.tolist()
    model.layers[0].kernel = type(model.layers[0].kernel)(torch.ones(WIDTH, WIDTH))
    after = model.layers[0].kernel.config.strides
    assert after.tolist() == value
    assert after.data_ptr() != address


class LockedKernel:
    """Has a workspace of counters that each call counts up, and must find at zero."""

    def __init__(self, weight):
        self.order = weight[0].argsort()
        self.workspace = torch.zeros(4, dtype=torch.int32)

    def apply(self, x):
        self.workspace.add_(1)
        x = torch.tanh(x[..., self.order] * self.workspace.sum())
        self.workspace.sub_(1)
        return x


class LockedLinear(Processed):
    """Its hook makes the kernel anew, with its workspace."""

    def process_weights_after_loading(self):
        self.kernel = LockedKernel(self.weight.detach())

    def forward(self, x):
        return self.kernel.apply(functional.linear(x, self.weight))


@pytest.mark.holds("A03")
@each_commit
def test_a_workspace_of_lock_counters_stays_where_it_is_and_starts_at_zero(commit):
    """A call that was cut off leaves locks behind, on which the next one would wait for ever."""
    factory = lambda: ToyModel(LockedLinear(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    bench = check_reloads(factory, numbers=FIVE, options={"commit": commit})
    kernel = bench.model.layers[0].kernel
    workspace = kernel.workspace
    workspace.fill_(9)
    bench.reload(bench.state(2), commit=commit)
    assert bench.model.layers[0].kernel is not kernel
    assert bench.model.layers[0].kernel.workspace is workspace
    assert workspace.tolist() == [0, 0, 0, 0]


# ------------------------------------------------------------------------------ wrapped tensors


class Rounded(Processed):
    """Its hook makes the weight a wrapper whose steps depend on the values."""

    def process_weights_after_loading(self):
        steps = 7 if self.weight.detach().sum() > 0 else 127
        packed = ScaledTensor.pack(self.weight.detach(), steps)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        self.mirror = ScaledTensor.pack(packed.unpack().flip(0), steps)

    def forward(self, x):
        return functional.linear(torch.tanh(functional.linear(x, self.weight)), self.mirror)


@each_commit
def test_a_wrapper_with_other_numbers_is_made_anew_around_the_same_memory(commit):
    """The number of steps is no tensor: the wrapper with the new number holds the old tensors."""
    factory = lambda: ToyModel(Rounded(), Linear())  # noqa: E731
    bench = Bench(factory)
    states = [bench.state(number) for number in range(1, 9)]
    graph, layer = CapturedGraph(bench.model), bench.model.layers[0]
    inner = [layer.weight.packed, layer.weight.scale, layer.mirror.packed, layer.mirror.scale]
    seen = set()
    for state in (*states, states[0]):
        with bench.session(commit=commit, strict=True) as session:
            session.load(state)
        now = [layer.weight.packed, layer.weight.scale, layer.mirror.packed, layer.mirror.scale]
        assert all(one is two for one, two in zip(inner, now, strict=True))
        assert isinstance(layer.weight, torch.nn.Parameter)
        want = fresh(factory, state)
        assert layer.weight.rounding == layer.mirror.rounding == want.layers[0].weight.rounding
        assert identical(outputs(bench.model), outputs(want))
        assert identical(graph(bench.model.example()), outputs(want))
        seen.add(layer.weight.rounding)
    assert seen == {7, 127}, "both kinds of checkpoint came"


class Widened(Processed):
    """Its hook makes the scales of the wrapper finer where the values are large."""

    def process_weights_after_loading(self):
        packed = ScaledTensor.pack(self.weight.detach())
        if self.weight.detach().abs().max() > 100:
            packed.scale = packed.scale.expand(WIDTH, WIDTH).contiguous()
        self.weight = torch.nn.Parameter(packed, requires_grad=False)


@each_commit
def test_a_wrapper_whose_inner_tensors_do_not_fit_is_refused(commit):
    """A parameter must keep its memory, and for a wrapper that is the memory inside."""
    factory = lambda: ToyModel(Widened())  # noqa: E731
    bench = Bench(factory)
    large = {name: tensor * 1000 for name, tensor in bench.state(2).items()}
    with (
        pytest.raises(StorageChangedError, match="inner tensor 'scale': shape") as caught,
        bench.session(commit=commit) as session,
    ):
        session.load(large)
    bench.check_ended(session, caught.value)
    assert caught.value.model_intact
    bench.reload(bench.state(3), commit=commit)


# ------------------------------------------------------------------------------ compiled


class Baked:
    """A backend that bakes addresses in, as a captured graph does, and tells when others come."""

    def __init__(self):
        self.compiled = 0
        self.moved = 0
        self._known = {}

    def __call__(self, graph, inputs):
        self.compiled += 1
        number = self.compiled

        def run(*tensors):
            now = [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]
            self.moved += now != self._known.setdefault(number, now)
            return graph(*tensors)

        return functools.wraps(graph.forward)(run)


def compiled_with(backend, model):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.holds("A02", "A05")
@each_commit
def test_a_compiled_function_finds_every_tensor_at_the_address_that_it_was_compiled_for(commit):
    """Also those inside tensor subclasses, which a compiler takes apart."""
    x = rebuilt().example()
    by_hand, backend = fresh(rebuilt, make_state(rebuilt, 1)), Baked()
    run = compiled_with(aot_autograd(fw_compiler=backend), by_hand)
    with torch.no_grad():
        run(x)
        for layer in by_hand.layers[::2]:
            layer.kernel = type(layer.kernel)(torch.ones(WIDTH, WIDTH))
        run(x)
    assert backend.moved == 1

    bench, backend = Bench(rebuilt), Baked()
    run = compiled_with(aot_autograd(fw_compiler=backend), bench.model)
    with torch.no_grad():
        run(x)
    for number in FIVE:
        bench.reload(bench.state(number), commit=commit, strict=True)
        with torch.no_grad():
            assert identical(run(x), expected(rebuilt, bench.state(number)))
    assert (backend.compiled, backend.moved) == (1, 0)


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None and shutil.which("clang++") is None,
            reason="inductor needs a C++ compiler on a CPU",
        ),
    ),
]


@pytest.mark.holds("A02", "A05")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_computes_with_the_new_weights_and_is_not_compiled_again(backend):
    """Compiled once, before the first reload."""
    factory = lambda: ToyModel(RebuiltKernelLinear(), Linear())  # noqa: E731
    bench, counter = Bench(factory), CompileCounterWithBackend(backend)
    run, x = compiled_with(counter, bench.model), bench.model.example()
    with torch.no_grad():
        first = run(x)
    torch.testing.assert_close(first, expected(factory, bench.state(1)))
    for number, commit in zip(FIVE, ("stream", "atomic") * 3, strict=False):
        bench.reload(bench.state(number), commit=commit, strict=True)
        with torch.no_grad():
            found = run(x)
        torch.testing.assert_close(found, expected(factory, bench.state(number)))
        assert counter.frame_count == 1
    assert identical(found, first), "A again is A"


def test_a_compiled_model_shows_what_a_reload_by_hand_breaks():
    """The compiled function is no cover: it computes with what the model holds."""
    factory = lambda: ToyModel(RebuiltKernelLinear(), Linear())  # noqa: E731
    model = fresh(factory, make_state(factory, 1))
    counter = CompileCounterWithBackend("aot_eager")
    run, x = compiled_with(counter, model), model.example()
    with torch.no_grad():
        run(x)
        reload_by_hand(model, make_state(factory, 2))
        found = run(x)
    assert not torch.allclose(found, expected(factory, make_state(factory, 2)))


def test_the_toy_is_worth_it():
    """Each of its tensors changes what it computes, so that none can be stale unseen."""
    model = fresh(rebuilt, make_state(rebuilt, 1))
    before = outputs(model)
    for name, tensor in model.layers[0].tensors().items():
        kept = tensor.clone()
        tensor.copy_(tensor.flip(0) * 2 + 1)
        assert not identical(outputs(model), before), name
        tensor.copy_(kept)
    assert identical(outputs(model), before)


class ConstructedWrapped(torch.nn.Module):
    """Its weight is a wrapper from the start: loaders would write to the tensors inside."""

    def __init__(self):
        super().__init__()
        packed = ScaledTensor.pack(torch.ones(WIDTH, WIDTH))
        self.weight = torch.nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return functional.linear(x, self.weight)


class Lenient(Framework):
    """Its own loaders see to it that everything arrives at the first load."""

    requires_all = False


def test_a_wrapper_that_loaders_would_have_to_write_to_is_refused():
    """What they write to the tensors inside cannot be seen, so nobody could say what is missing."""
    model = ToyModel(ConstructedWrapped(), Linear())
    state = {"layers.1.weight": torch.ones(WIDTH, WIDTH)}
    with (
        pytest.raises(UnsupportedError, match=r"layers\.0\.weight \(ScaledTensor\)") as caught,
        WeightLoadSession(model) as session,
    ):
        session.load(state)
    assert caught.value.model_intact
    with WeightLoadSession(model, framework=Lenient()) as session:
        session.load(state)
    before = outputs(model)
    with (
        pytest.raises(UnsupportedError, match=r"layers\.0\.weight \(ScaledTensor\)"),
        WeightLoadSession(model) as session,
    ):
        session.load({"layers.1.weight": torch.zeros(WIDTH, WIDTH)})
    assert identical(outputs(model), before)


def test_a_late_write_to_a_live_wrapper_is_refused_and_not_lost():
    """The first layer was processed; then the loader of the second one writes to it once more."""

    class Careless(LoadingModel):
        errs = False

        def store(self, name, tensor):
            super().store(name, tensor)
            if self.errs and name == "layers.1.weight":
                super().store("layers.0.weight", tensor)

    bench = Bench(lambda: Careless(RebuiltKernelLinear(), Linear()))
    bench.model.errs = True
    session = bench.open()
    with pytest.raises(DuplicateWeightError, match=r"layers\.1\.weight.*layers\.0\.weight"):
        session.load(bench.state(2))
    bench.check_ended(session)
    bench.model.errs = False
    bench.reload(bench.state(3))
    bench.model.errs = True
    session = bench.open(scope=Scope.only(["layers.1.weight"]))
    with pytest.raises(UnexpectedWeightError, match=r"layers\.1\.weight.*layers\.0\.weight"):
        session.load({"layers.1.weight": bench.state(4)["layers.1.weight"]})
    bench.check_ended(session)
