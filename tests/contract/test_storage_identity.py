"""A captured graph computes with the new weights, because every tensor it knows is where it was.

The damage shown here is invisible in eager mode: a hook that runs again rebinds, rebuilds, moves or
frees a tensor, and only what was captured before still reads the old memory. A graph is captured
after the first load of each toy and replayed after every reload, see ``weightload.testing.capture``.
``damage`` says what the same reload breaks when it is done by hand.
"""

import collections
import contextlib
import functools
import re

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from weightload import (
    Framework,
    ModuleRegistry,
    ModuleRule,
    ProcessingError,
    Role,
    SessionState,
    StorageChangedError,
    WeightLoadSession,
)
from weightload.storage import Fingerprint
from weightload.testing import (
    Bench,
    ToyModel,
    expected,
    fresh,
    identical,
    make_state,
    outputs,
    toy_framework,
)
from weightload.testing.capture import CapturedGraph, FreedMemoryError, check_reloads, damage
from weightload.testing.kernels import Processed
from weightload.testing.layers import WIDTH, KernelLinear, Linear, parameter
from weightload.testing.oracle import reload_by_hand
from weightload.testing.sharing import LatentAttention

COMMITS = ("stream", "atomic")
each_commit = pytest.mark.parametrize("commit", COMMITS)


# ------------------------------------------------------------------------------ rebound tensors


class Projections(Processed):
    """Its hook derives two projections from the weight, as plain attributes, in every pass."""

    def process_weights_after_loading(self):
        self.up_keys, values = self.weight.detach().split(WIDTH // 2)
        self.up_keys = self.up_keys.t().contiguous()
        self.up_values = values.contiguous() * 3

    def forward(self, x):
        return torch.tanh(x @ self.up_keys) @ self.up_values


@pytest.mark.holds("A01")
@each_commit
def test_projections_that_a_hook_derives_and_rebinds(commit):
    """Eager mode is right by hand; the graph reads projections that nobody refreshes any more."""
    factory = lambda: ToyModel(Projections(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    check_reloads(factory, options={"commit": commit})


@pytest.mark.holds("A01")
@each_commit
def test_projections_that_are_derived_from_a_packed_layer_inside(commit):
    factory = lambda: ToyModel(LatentAttention(), LatentAttention())  # noqa: E731
    assert damage(factory) == {"error"}
    check_reloads(factory, options={"commit": commit})


class ReplacedExperts(nn.Module):
    """Its hook gives both expert weights back shuffled, in new memory of the same shape."""

    def __init__(self):
        super().__init__()
        self.w13 = parameter(2, 2 * WIDTH, WIDTH)
        self.w2 = parameter(2, WIDTH, WIDTH)

    def process_weights_after_loading(self):
        self.w13 = nn.Parameter(self.w13.detach().flip(0), requires_grad=False)
        self.w2 = nn.Parameter(self.w2.detach().flip(0), requires_grad=False)

    def forward(self, x):
        for w13, w2 in zip(self.w13.flip(0), self.w2.flip(0), strict=True):
            gate, up = functional.linear(x, w13).split(WIDTH, -1)
            x = functional.linear(torch.tanh(gate) * up, w2)
        return x


class Experts(Processed, ReplacedExperts):
    """As above, known to be processed."""

    def __init__(self):
        ReplacedExperts.__init__(self)

    process_weights_after_loading = ReplacedExperts.process_weights_after_loading
    forward = ReplacedExperts.forward


@pytest.mark.holds("A07")
@each_commit
def test_expert_weights_that_a_hook_replaces(commit):
    """By hand the prefill is right, which is computed eagerly, and every decoded token is not."""
    factory = lambda: ToyModel(Experts(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    bench = check_reloads(factory, options={"commit": commit})
    assert isinstance(bench.model.layers[0].w13, nn.Parameter)


class CastLayout(Processed):
    """Its hook casts the weight to another layout, which allocates."""

    def process_weights_after_loading(self):
        self.weight.data = self.weight.data.t().contiguous()

    def forward(self, x):
        return torch.tanh(x @ self.weight)


@pytest.mark.holds("A15")
@each_commit
def test_a_weight_that_is_cast_to_another_layout(commit):
    """The parameter is the same object, and its memory is new in every pass."""
    factory = lambda: ToyModel(CastLayout(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    check_reloads(factory, options={"commit": commit})


class PaddedByData(Processed):
    """Its hook pads the weight for the kernel and shows the part without the padding."""

    def process_weights_after_loading(self):
        self.weight.data = functional.pad(self.weight.data, (0, 3))[..., :-3]


@pytest.mark.holds("A08")
@each_commit
def test_a_parameter_whose_data_is_assigned(commit):
    """``id()`` of the parameter does not change, and its address does."""
    factory = lambda: ToyModel(PaddedByData(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    bench = Bench(factory)
    weight, address = bench.model.layers[0].weight, bench.model.layers[0].weight.data_ptr()
    bench = check_reloads(factory, options={"commit": commit})
    bench.reload(bench.state(2))
    assert weight.data_ptr() == address

    by_hand = factory().layers[0]
    weight, address = by_hand.weight, by_hand.weight.data_ptr()
    by_hand.process_weights_after_loading()
    assert by_hand.weight is weight
    assert by_hand.weight.data_ptr() != address


# ------------------------------------------------------------------------------ hidden tensors


class ActOrder(Processed):
    """Its hook sorts columns, and hides the order in a partial that gathers the activations."""

    def __init__(self):
        super().__init__()
        self.group_index = parameter(WIDTH)
        self.gather = None

    def process_weights_after_loading(self):
        order = self.group_index.detach().argsort()
        self.weight.data.copy_(self.weight.detach()[:, order])
        self.gather = functools.partial(torch.index_select, dim=-1, index=order)

    def forward(self, x):
        return torch.tanh(functional.linear(self.gather(x), self.weight))


@pytest.mark.holds("A04")
@each_commit
def test_an_order_of_activations_that_is_hidden_in_a_partial(commit):
    """To load the same weights again shows nothing: the old order is the right one."""
    factory = lambda: ToyModel(ActOrder(), Linear())  # noqa: E731
    assert damage(factory, after=1) == {"freed"}, "or stale, were the old order still there"
    assert damage(factory, after=2) == {"freed"}
    held = []

    def keeping_the_old_order(model, state):
        held.append(model.layers[0].gather)
        reload_by_hand(model, state)

    assert damage(factory, after=1, reload=keeping_the_old_order) == set()
    assert damage(factory, after=2, reload=keeping_the_old_order) == {"stale"}
    bench = check_reloads(factory, options={"commit": commit})
    assert bench.model.layers[0].gather.keywords["index"].dtype == torch.int64


@pytest.mark.holds("A10")
@each_commit
def test_tensors_in_containers_partials_closures_and_slots(commit):
    """No parameter, no buffer, no attribute of a module names them."""
    factory = lambda: ToyModel(KernelLinear(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    check_reloads(factory, options={"commit": commit})


TABLES = {}
"""A module-level global, as backends have them."""


class GlobalTable(Processed):
    """Its hook puts a table where no walk of the model comes by."""

    def __init__(self):
        super().__init__()
        self.number = len(TABLES)

    def process_weights_after_loading(self):
        TABLES[self.number] = self.weight.detach().mean(0)

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) + TABLES[self.number]


class Helper:
    """Is there before the hook runs, and stays."""

    table = None


class Mutated(Processed):
    """Its hook changes an object that is not tracked: it has no hook, and no known name."""

    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def process_weights_after_loading(self):
        self.helper.table = self.weight.detach().mean(0)

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) + self.helper.table


@pytest.mark.holds("A10")
@pytest.mark.parametrize("layer", [GlobalTable, Mutated])
@each_commit
def test_a_tensor_that_no_walk_can_find_is_refused_under_strict_storage(layer, commit):
    """It was made while the hook ran and is still alive, so somebody holds it."""
    factory = lambda: ToyModel(layer(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    bench = Bench(factory)
    with (
        pytest.raises(StorageChangedError, match="held by what is not tracked"),
        WeightLoadSession(bench.model, strict=True, commit="atomic") as session,
    ):
        session.load(bench.state(2))
    bench = Bench(factory)
    for number in (2, 3, 1):
        session = bench.reload(bench.state(number), commit=commit)
        assert session.receipt.moved == [
            f"layers.0: a tensor of shape ({WIDTH},), torch.float32 that a hook made is held by "
            f"what is not tracked"
        ]


@pytest.mark.holds("A10")
@each_commit
def test_an_object_that_is_named_as_a_strategy_is_tracked(commit):
    """What the receipt asks for: then its tensors keep their storage."""
    registry = ModuleRegistry(strategies=("helper",))
    process = lambda module: module.process_weights_after_loading()  # noqa: E731
    registry.register(Mutated, ModuleRule(role=Role.QUANT, process=process))
    factory = lambda: ToyModel(Mutated(), Linear())  # noqa: E731
    bench = Bench(factory)
    model = factory()
    with WeightLoadSession(model, framework=Framework(registry)) as session:
        session.load(bench.state(1))
    graph, table = CapturedGraph(model), model.layers[0].helper.table
    for number in (2, 3, 1):
        with WeightLoadSession(model, strict=True, commit=commit) as session:
            session.load(bench.state(number))
        want = expected(factory, bench.state(number))
        assert identical(outputs(model), want)
        assert identical(graph(model.example()), want)
        assert model.layers[0].helper.table is table


@pytest.mark.holds("A11")
@each_commit
def test_memory_that_a_graph_reads_is_never_freed(commit):
    """A weak reference to a storage proves that it was freed, whoever sits at the address now."""
    factory = lambda: ToyModel(Projections(), Linear())  # noqa: E731
    bench = Bench(factory)
    graph = CapturedGraph(bench.model)
    memory = StorageWeakRef(bench.model.layers[0].up_keys.untyped_storage())
    for number in (2, 3, 1):
        with bench.session(commit=commit) as session:
            assert not memory.expired(), "parked tensors are held"
            session.load(bench.state(number))
            assert not memory.expired()
        assert identical(graph(bench.model.example()), expected(factory, bench.state(number)))
    session = bench.open(commit=commit)
    session.load(dict(list(bench.state(2).items())[:1]))
    session.abort()
    assert not memory.expired()

    by_hand = fresh(factory, bench.state(1))
    graph = CapturedGraph(by_hand)
    memory = StorageWeakRef(by_hand.layers[0].up_keys.untyped_storage())
    by_hand.layers[0].process_weights_after_loading()
    assert memory.expired()
    with pytest.raises(FreedMemoryError):
        graph(by_hand.example())


# ------------------------------------------------------------------------------ listed parameters


class Listed(Processed):
    """It computes with its parameter and parts of it in lists; its hook writes in place."""

    def __init__(self):
        super().__init__()
        self.row = self.weight.data[1]
        self.all = [self.weight, self.weight]
        self.named = {"turned": self.weight.data.t(), "first": self.weight.data[0]}
        self.parts = [*self.weight.data.split(WIDTH // 2)]
        self.deep = {"deque": collections.deque([self.weight]), "list": [[self.weight]]}

    def process_weights_after_loading(self):
        self.weight.data.mul_(2)

    def forward(self, x):
        y = torch.tanh(functional.linear(x, self.all[1])) + self.named["first"] * self.row
        return torch.cat(
            [functional.linear(y @ self.named["turned"], one) for one in self.parts], -1
        )


@each_commit
def test_lists_of_parameters_show_their_new_values(commit):
    factory = lambda: ToyModel(Listed(), Linear())  # noqa: E731
    bench = check_reloads(factory, options={"commit": commit, "verify": "full"})
    layer = bench.model.layers[0]
    assert all(
        one is layer.weight for one in (*layer.all, *layer.deep["deque"], *layer.deep["list"][0])
    )


@each_commit
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_torch_lists_itself(kind, commit):
    """Its recurrent layers compute with a list of their parameters."""
    model, other = kind(3, 4, num_layers=2), kind(3, 4, num_layers=2)
    x = torch.randn(5, 3)
    held = [*model._flat_weights]
    for number in range(4):
        state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
        with WeightLoadSession(model, commit=commit if number else "stream") as session:
            session.load(state)
        other.load_state_dict(state)
        assert identical(model(x)[0], other(x)[0])
        assert all(one is two for one, two in zip(model._flat_weights, held, strict=True))


class ListReader(Listed):
    """Its hook computes with what it lists."""

    def process_weights_after_loading(self):
        self.weight.data.mul_(2)
        self.scaled = self.all[0].detach() * 3


@each_commit
def test_a_hook_never_computes_with_old_weights_in_a_list(commit):
    """Where it does not find the new ones there, it is refused."""
    factory = lambda: ToyModel(ListReader(), Linear())  # noqa: E731
    bench = Bench(factory)
    held = [*bench.model.layers[0].all]
    state = bench.state(2)
    with contextlib.suppress(ProcessingError), bench.session(commit=commit) as session:
        session.load(state)
    serving = bench.state(1) if session.state is SessionState.ABORTED else state
    assert identical(outputs(bench.model), expected(factory, serving))
    assert identical(bench.model.layers[0].scaled, 6 * serving["layers.0.weight"])
    assert all(one is two for one, two in zip(bench.model.layers[0].all, held, strict=True))


class Defaulting(Processed):
    """Its hook takes the weight from a list for some values; then the list is of another tensor."""

    def __init__(self):
        super().__init__()
        self.defaults = [torch.ones(WIDTH, WIDTH)]

    def process_weights_after_loading(self):
        value = self.defaults[0] if self.weight.sum() > 0 else self.weight.detach() * 2
        self.weight = nn.Parameter(value, requires_grad=False)


@each_commit
def test_a_list_that_a_hook_takes_a_parameter_from_is_not_overwritten(commit):
    """The live parameter is in its memory, and the new value is no default."""
    factory = lambda: ToyModel(Defaulting(), Linear())  # noqa: E731
    model, _ = serving(factory, signed(factory, 1, +1))
    with (
        pytest.raises(StorageChangedError, match=r"defaults\[0\]: it shares memory with"),
        WeightLoadSession(model, commit=commit) as session,
    ):
        session.load(signed(factory, 2, -1))
    assert torch.equal(model.layers[0].defaults[0], torch.ones(WIDTH, WIDTH))


# ------------------------------------------------------------------------------ another look


class Slots(Processed):
    """Its hook writes to one of two places of a pool that is always there; the values say which."""

    def __init__(self):
        super().__init__()
        self.pool = torch.zeros(2, WIDTH, WIDTH)

    def process_weights_after_loading(self):
        place = int(self.weight.detach().sum() > 0)
        self.pool[place] = self.weight.detach() * 2
        self.packed = self.pool[place]

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.packed))


class Oriented(Processed):
    """Its hook transposes the weight or not, in the same memory; the values say which."""

    def process_weights_after_loading(self):
        if self.weight.detach().sum() > 0:
            self.weight.data.copy_(self.weight.detach().t().clone())
            self.weight.data = self.weight.data.t()


class Retyped(Processed):
    """Its hook shows the same bytes as another type; the values say which."""

    def process_weights_after_loading(self):
        bits = self.weight.detach()
        self.bits = bits.view(torch.int32) if bits.sum() > 0 else bits

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.bits.view(torch.float32)))


def signed(factory, number, sign):
    """Return a checkpoint whose first weight has a sum of that sign."""
    state = make_state(factory, number)
    weight = state["layers.0.weight"]
    state["layers.0.weight"] = weight - weight.mean() + 0.1 * sign
    return state


def serving(factory, state):
    """Return a model that was loaded by a session, and a graph of it."""
    model = factory()
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load(state)
    return model, CapturedGraph(model)


LOOKS = {
    Slots: "it shares memory with layers.0.pool, whose new value is another",
    Oriented: r"stride \(1, 8\) became \(8, 1\)",
    Retyped: "dtype torch.int32 became torch.float32",
}


@pytest.mark.holds("A09")
@each_commit
@pytest.mark.parametrize("layer", LOOKS)
def test_another_look_at_the_same_memory_is_refused(layer, commit):
    """An address says where memory begins, and not what a kernel takes from it."""
    factory = lambda: ToyModel(layer(), Linear())  # noqa: E731
    model, graph = serving(factory, signed(factory, 1, +1))
    fitting, turned = signed(factory, 2, +1), signed(factory, 3, -1)
    for state in (fitting, signed(factory, 1, +1)):
        with WeightLoadSession(model, strict=True, commit=commit) as session:
            session.load(state)
        assert identical(outputs(model), expected(factory, state))
        assert identical(graph(model.example()), expected(factory, state))
    with (
        pytest.raises(StorageChangedError, match=LOOKS[layer]) as caught,
        WeightLoadSession(model, strict=True, commit="atomic") as session,
    ):
        session.load(turned)
    assert caught.value.model_intact
    want = expected(factory, signed(factory, 1, +1))
    assert identical(outputs(model), want)
    assert identical(graph(model.example()), want)


@pytest.mark.holds("A09")
@each_commit
@pytest.mark.parametrize("layer", [Slots, Retyped])
def test_another_look_is_named_where_nothing_was_captured(layer, commit):
    """Without strict storage the value counts, and the receipt says what a graph would miss."""
    factory = lambda: ToyModel(layer(), Linear())  # noqa: E731
    model, _ = serving(factory, signed(factory, 1, +1))
    state = signed(factory, 2, -1)
    with WeightLoadSession(model, strict=False, commit=commit) as session:
        session.load(state)
    assert identical(outputs(model), expected(factory, state))
    [moved] = session.receipt.moved
    assert re.search(LOOKS[layer], moved)


@pytest.mark.holds("A09")
def test_another_look_at_the_same_memory_by_hand():
    """The address of the pool is what a simple check compares, and it does not change."""
    factory = lambda: ToyModel(Slots(), Linear())  # noqa: E731
    model = fresh(factory, signed(factory, 1, +1))
    graph, address = CapturedGraph(model), model.layers[0].pool.data_ptr()
    turned = signed(factory, 2, -1)
    reload_by_hand(model, turned)
    assert model.layers[0].packed.untyped_storage().data_ptr() == address
    assert identical(outputs(model), expected(factory, turned))
    assert not identical(graph(model.example()), expected(factory, turned))


@pytest.mark.holds("A09")
def test_an_address_that_was_freed_and_given_out_again_is_not_the_same_place():
    """The allocator gives the address of what was freed to the next one who asks."""
    layer = Projections()

    def process(number):
        layer.table = None
        layer.table = torch.full((100_000,), float(number))
        return layer.table.data_ptr()

    assert len({process(number) for number in range(100)}) < 100, "as allocators do"
    address = process(0)
    mark = Fingerprint.of(layer.table)
    for number in range(1, 100):
        assert process(number) != address, "the fingerprint holds the memory"
        assert mark.difference(layer.table) == "it has another storage"


# ------------------------------------------------------------------------------ memory that grows


class Growing(Processed):
    """Its hook repacks in place, for which the memory must grow; by how much the values may say.

    Args:
        by_value: whether they do.
    """

    def __init__(self, *, by_value=False):
        super().__init__()
        self.by_value = by_value

    def process_weights_after_loading(self):
        total = self.weight.detach().sum()
        weight = self.weight.detach().clone()
        rows = 2 * WIDTH + (int(total > 0) if self.by_value else 0)
        self.weight.resize_(rows, WIDTH)
        self.weight.data.fill_(float(total))
        self.weight.data[:WIDTH] = weight * 3

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight[:WIDTH])) + self.weight[-1]


@pytest.mark.holds("A12")
@each_commit
def test_a_repack_that_grows_the_memory(commit):
    """Growing moves the memory. Each reload starts in memory of the checkpoint's size."""
    factory = lambda: ToyModel(Growing(), Linear())  # noqa: E731
    assert damage(factory) == {"error"}
    bench = check_reloads(factory, options={"commit": commit})
    assert bench.model.layers[0].weight.shape == (2 * WIDTH, WIDTH)

    small = torch.zeros(WIDTH, WIDTH)
    address = small.data_ptr()
    assert small.resize_(4 * WIDTH, WIDTH).data_ptr() != address


@pytest.mark.holds("A12")
@each_commit
def test_a_repack_that_grows_more_than_before_is_refused(commit):
    """What was captured reads as many rows as there were."""
    factory = lambda: ToyModel(Growing(by_value=True))  # noqa: E731
    model, graph = serving(factory, signed(factory, 1, -1))
    with (
        pytest.raises(StorageChangedError, match=r"shape \(16, 8\) became \(17, 8\)") as caught,
        WeightLoadSession(model, commit=commit) as session,
    ):
        session.load(signed(factory, 2, +1))
    assert caught.value.model_intact
    want = expected(factory, signed(factory, 1, -1))
    assert identical(outputs(model), want)
    assert identical(graph(model.example()), want)


# ------------------------------------------------------------------------------ lazy scratch


class LazyScratch(Processed):
    """Its first forward pass allocates scratch memory, which the hook knows nothing about."""

    def __init__(self):
        super().__init__()
        self.scratch = None

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)

    def forward(self, x):
        if self.scratch is None:
            self.scratch = torch.empty(x.shape[0], WIDTH)
        torch.mm(x, self.weight, out=self.scratch)
        return torch.tanh(self.scratch)


class LazyKernel:
    """Allocates its scratch memory when it is first used."""

    scratch = None

    def __init__(self, scale):
        self.scale = scale


class LazyKernelScratch(LazyScratch):
    """As above, and the scratch memory hangs on a kernel that the hook makes anew."""

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.kernel = LazyKernel(self.weight.detach().abs().amax(0))

    def forward(self, x):
        if self.kernel.scratch is None:
            self.kernel.scratch = torch.empty(x.shape[0], WIDTH)
        torch.mm(x, self.weight, out=self.kernel.scratch)
        return self.kernel.scratch * self.kernel.scale


@pytest.mark.holds("A14")
@each_commit
def test_scratch_that_a_forward_pass_made_is_not_the_hooks_and_stays(commit):
    """It was not there at the first load, and is there at every later one."""
    factory = lambda: ToyModel(LazyScratch(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}, "the weight, by hand"
    bench = check_reloads(factory, options={"commit": commit})
    scratch = bench.model.layers[0].scratch
    for number in (2, 3, 1):
        bench.reload(bench.state(number), commit=commit)
        assert bench.model.layers[0].scratch is scratch


@pytest.mark.holds("A06", "A14")
@each_commit
def test_scratch_on_a_kernel_that_is_made_anew_is_refused_under_strict_storage(commit):
    """A graph writes to it, and the new kernel will allocate its own; so it must be named."""
    factory = lambda: ToyModel(LazyKernelScratch(), Linear())  # noqa: E731
    bench = Bench(factory)
    outputs(bench.model)
    with (
        pytest.raises(StorageChangedError, match=r"layers.0.kernel.scratch: it is gone") as caught,
        bench.session(strict=True, commit=commit) as session,
    ):
        session.load(bench.state(3))
    assert caught.value.model_intact
    assert identical(outputs(bench.model), expected(factory, bench.state(1)))
    with bench.session(strict=False, commit=commit) as session:
        session.load(bench.state(3))
    assert session.receipt.moved == ["layers.0.kernel.scratch: it is gone"]
    assert identical(outputs(bench.model), expected(factory, bench.state(3)))
