"""What no checkpoint brings survives a reload: buffers, padding, ties, sentinels, loaders, contexts.

The damage shown here comes from reloads that make a layer's tensors anew, load into them, process, and
copy everything back: ``rematerialised`` below does that by hand. What loaders do not fill is then
whatever was in that memory, and what shared memory does not any more.
"""

import collections
import contextlib
import contextvars
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from weightload import (
    IncompleteLoadError,
    ModelBusyError,
    ProcessingError,
    UnsupportedError,
    WeightLoadSession,
)
from weightload.storage import Fingerprint
from weightload.testing import (
    TOYS,
    Bench,
    Kept,
    LoadingModel,
    TiedModel,
    ToyModel,
    expected,
    fresh,
    identical,
    make_state,
    outputs,
    toy_framework,
)
from weightload.testing.capture import CapturedGraph, check_reloads, damage
from weightload.testing.kernels import Processed
from weightload.testing.layers import (
    WIDTH,
    BufferedLayer,
    DefaultScaleLinear,
    InPlaceLinear,
    Linear,
    RepackedLinear,
    parameter,
)
from weightload.testing.loading import SENTINEL, PaddedLinear
from weightload.testing.oracle import ToyFramework, reload_by_hand

COMMITS = ("stream", "atomic")
each_commit = pytest.mark.parametrize("commit", COMMITS)
GARBAGE = 7.0
"""What new memory holds here."""


def rematerialised(model, state):
    """Make every tensor anew, load, process, and copy back what has the old shape."""
    old = {}
    for module in model.modules():
        for section in (module._parameters, module._buffers):
            for name, tensor in section.items():
                old[id(module), name] = section, tensor
                new = torch.full_like(tensor.detach(), GARBAGE)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=False)
                vars(new).update(vars(tensor))
                section[name] = new
    reload_by_hand(model, state)
    for (_, name), (section, tensor) in old.items():
        new = section.get(name)
        if new is not None and new.shape == tensor.shape and new.dtype == tensor.dtype:
            tensor.data.copy_(new)
            section[name] = tensor


def serving(factory, framework=None, number=1):
    """Return a model that was loaded by a session."""
    model = factory()
    with WeightLoadSession(model, framework=framework or toy_framework()) as session:
        session.load(make_state(factory, number))
    return model


# ------------------------------------------------------------------------------ buffers


class RootSize(Processed):
    """Divides by a number that its constructor worked out and keeps as a buffer."""

    def __init__(self, *, packed):
        super().__init__()
        self.packed = packed
        root = torch.tensor(WIDTH**-0.5)
        self.register_buffer("root_size", root, persistent=False)

    def process_weights_after_loading(self):
        if self.packed:
            self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)

    def forward(self, x):
        weight = self.weight.t() if self.packed else self.weight
        return torch.tanh(functional.linear(x, weight)) * self.root_size


@pytest.mark.holds("D01")
@pytest.mark.parametrize("packed", [True, False])
@each_commit
def test_a_buffer_that_no_checkpoint_brings_keeps_its_value(commit, packed):
    """One wrong number in one layer, and every token is another."""
    factory = lambda: ToyModel(RootSize(packed=packed), Linear())  # noqa: E731
    assert damage(factory, after=1, reload=rematerialised) >= {"value"}
    bench = check_reloads(factory, options={"commit": commit})
    assert float(bench.model.layers[0].root_size) == pytest.approx(8**-0.5)


class MixedViews(BufferedLayer):
    """The layer around holds a view of what the layer inside holds, and a hook packs the latter."""

    def __init__(self):
        super().__init__()
        self.inner = InPlaceLinear()
        self.register_buffer("first_row", self.inner.weight.detach()[0], persistent=False)


@pytest.mark.holds("D02")
@pytest.mark.parametrize("layer", [BufferedLayer, MixedViews])
@each_commit
def test_a_buffer_that_is_a_view_of_a_childs_parameter_stays_one(commit, layer):
    """Copied back on its own it brings back what nothing was loaded into."""
    factory = lambda: ToyModel(layer(), Linear())  # noqa: E731
    assert damage(factory, after=1, reload=rematerialised) >= {"value"}
    bench = check_reloads(factory, options={"commit": commit})
    kept = bench.model.layers[0]
    assert kept.first_row.data_ptr() == kept.inner.weight.data_ptr()
    kept.inner.weight.data[0, 0] = 5.0
    assert float(kept.first_row[0]) == 5.0


class RopeLayer(Processed):
    """Its positions are a buffer that the engine makes longer while it serves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(1.0, 1 + WIDTH), persistent=False)

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x @ self.weight) * self.positions[-WIDTH:]


@pytest.mark.holds("D11")
@each_commit
def test_a_buffer_that_the_engine_changed_since_is_not_put_back(commit):
    """The constructor would make another one; only the engine knows what is right."""
    factory = lambda: ToyModel(RopeLayer(), Linear())  # noqa: E731
    model = serving(factory)
    longer = torch.arange(1.0, 1 + 3 * WIDTH) * 0.5
    model.layers[0].register_buffer("positions", longer, persistent=False)
    graph, mark = CapturedGraph(model), Fingerprint.of(longer)
    for number in (2, 3, 1):
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load(make_state(factory, number))
        assert model.layers[0].positions is longer
        assert mark.difference(longer) is None
        by_hand = fresh(factory, make_state(factory, number))
        assert not identical(outputs(model), outputs(by_hand)), "the constructor's are others"
        by_hand.layers[0].positions = longer.clone()
        assert identical(outputs(model), outputs(by_hand))
        assert identical(graph(model.example()), outputs(by_hand))


# ------------------------------------------------------------------------------ padding, sentinels


@pytest.mark.holds("D03")
@pytest.mark.parametrize("packed", [True, False])
@each_commit
def test_padding_keeps_what_it_was_filled_with(commit, packed):
    """Loaders write the rows that a checkpoint has, and kernels read them all."""
    factory = lambda: LoadingModel(PaddedLinear(packed=packed), Linear())  # noqa: E731
    by_hand = {"error"} if packed else {"value", "stale"}
    assert damage(factory, after=1, reload=rematerialised) == by_hand
    bench = check_reloads(factory, options={"commit": commit})
    if not packed:
        assert bench.model.layers[0].weight[WIDTH - 2 :].unique().tolist() == [SENTINEL]


def bits(model):
    return {
        name: tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8)
        for name, tensor in Kept.of(model).tensors.items()
    }


@pytest.mark.holds("D03", "D08")
@each_commit
@pytest.mark.parametrize("toy", TOYS)
def test_to_load_the_same_checkpoint_again_changes_no_byte(toy, commit):
    """Not one, in no tensor that a graph knows; and nothing moves either."""
    bench = Bench(TOYS[toy])
    before = bits(bench.model)
    for _ in range(2):
        bench.reload(bench.state(1), commit=commit)
        after = bits(bench.model)
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.holds("D08")
@pytest.mark.parametrize("toy", ["buffers", "padded", "tied", "default scale"])
def test_to_make_a_layer_anew_that_needs_no_repacking_changes_it(toy):
    """What the test above would find."""
    assert damage(TOYS[toy], after=1, reload=rematerialised) != set()


class SentinelScale(nn.Module):
    """A scale that is -1 until a checkpoint brings one; nothing is ever repacked."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(WIDTH, WIDTH)
        self.scale = parameter(1, fill=-1.0)

    def forward(self, x):
        scale = torch.where(self.scale < 0, torch.full_like(self.scale, 2.5), self.scale)
        return torch.tanh(functional.linear(x, self.weight)) * scale


@pytest.mark.holds("D10")
@pytest.mark.parametrize("layer", [SentinelScale, DefaultScaleLinear])
@each_commit
def test_a_sentinel_that_says_not_loaded_survives(commit, layer):
    """A checkpoint that brings a scale is followed by one that does not, and -1 is back."""
    factory = lambda: ToyModel(layer(), Linear())  # noqa: E731
    assert damage(factory, after=1, reload=rematerialised) & {"value", "error"}
    bench = Bench(factory)
    for number, scale in ((2, 0.75), (3, None), (2, None), (1, 0.25), (1, None)):
        state = bench.state(number)
        if scale is not None:
            state["layers.0.scale"] = torch.tensor([scale])
        with bench.session(commit=commit) as session:
            session.load(state)
        assert identical(outputs(bench.model), expected(factory, state))
        bench.kept.check(bench.model)


# ------------------------------------------------------------------------------ later additions


@pytest.mark.holds("D04")
@pytest.mark.parametrize("layer", [Linear, RepackedLinear, InPlaceLinear])
@each_commit
def test_a_parameter_that_was_created_after_the_first_load_is_left_alone(commit, layer):
    """Nobody recorded it, so nobody knows what it should be: it is what it is."""
    factory = lambda: ToyModel(layer(), Linear())  # noqa: E731
    model = serving(factory)
    bias = nn.Parameter(torch.arange(1.0, 1 + WIDTH), requires_grad=False)
    model.layers[0].register_parameter("bias", bias)
    mark = Fingerprint.of(bias)
    for number in (2, 3, 1):
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load(make_state(factory, number))
        assert model.layers[0].bias is bias
        assert mark.difference(bias) is None
        assert bias.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert identical(outputs(model), expected(factory, make_state(factory, number)))

    by_hand = fresh(factory, make_state(factory, 1))
    by_hand.layers[0].register_parameter("bias", nn.Parameter(bias.clone(), requires_grad=False))
    rematerialised(by_hand, make_state(factory, 1))
    assert by_hand.layers[0].bias.unique().tolist() == [GARBAGE]


class BiasFromHook(Processed):
    """Its hook creates a parameter."""

    def process_weights_after_loading(self):
        bias = self.weight.detach().sum(0)
        self.register_parameter("bias", nn.Parameter(bias, requires_grad=False))

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight, self.bias))


@pytest.mark.holds("D04")
@each_commit
def test_a_parameter_that_a_hook_creates_is_no_weight_of_a_checkpoint(commit):
    """It is made again of the new weights, in its place, and nobody waits for it to arrive."""
    factory = lambda: ToyModel(BiasFromHook(), Linear())  # noqa: E731
    assert damage(factory) == {"freed"}
    bench = check_reloads(factory, options={"commit": commit})
    weight = bench.state(1)["layers.0.weight"]
    assert torch.equal(bench.model.layers[0].bias.detach(), weight.sum(0))


# ------------------------------------------------------------------------------ contexts


BACKEND = contextvars.ContextVar("backend")
"""A framework's current configuration, as hooks read it."""


class Configured(Processed):
    """Its hook packs for the backend that is configured where it runs, in the default dtype."""

    def process_weights_after_loading(self):
        sign = {"one": 1.0, "two": -1.0}[BACKEND.get()]
        table = torch.arange(1.0, 1 + WIDTH) * sign
        self.table = table * self.weight.detach().sum().to(table.dtype)

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight)) * self.table.to(x.dtype)


class ConfiguredFramework(ToyFramework):
    """Enters the configuration of the first load around every later one."""

    def __init__(self):
        super().__init__()
        self.backend = BACKEND.get()

    @contextlib.contextmanager
    def ambient(self, model):
        token = BACKEND.set(self.backend)
        try:
            with super().ambient(model):
                yield
        finally:
            BACKEND.reset(token)


@pytest.mark.holds("D05")
@each_commit
def test_hooks_find_the_configuration_of_the_first_load(commit):
    """The engine configured the backend when it started; a reload comes from somewhere else."""
    factory = lambda: ToyModel(Configured(), Linear()).to(torch.float32)  # noqa: E731

    def start():
        BACKEND.set("two")
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = factory()
            with WeightLoadSession(model, framework=ConfiguredFramework()) as session:
                session.load(make_state(factory, 1))
            fresh_ones = [fresh(factory, make_state(factory, number)) for number in (2, 3, 1)]
        finally:
            torch.set_default_dtype(torch.float32)
        return model, fresh_ones

    model, wanted = contextvars.copy_context().run(start)
    with pytest.raises(LookupError):
        fresh(factory, make_state(factory, 2))
    for number, want in zip((2, 3, 1), wanted, strict=True):
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load(make_state(factory, number))
        assert model.layers[0].table.dtype == torch.bfloat16
        assert identical(model.layers[0].table, want.layers[0].table)
        assert (torch.get_default_dtype(), BACKEND.get(None)) == (torch.float32, None)


@pytest.mark.holds("D05")
@each_commit
def test_a_configuration_that_is_missing_is_an_error_that_names_the_module(commit):
    """And leaves the model as it was."""
    factory = lambda: ToyModel(Configured(), Linear())  # noqa: E731

    def start():
        BACKEND.set("one")
        return serving(factory)

    model = contextvars.copy_context().run(start)
    before = outputs(model)
    with (
        pytest.raises(ProcessingError, match=r"layers\.0") as caught,
        WeightLoadSession(model, commit="atomic") as session,
    ):
        session.load(make_state(factory, 2))
    assert caught.value.model_intact
    assert identical(outputs(model), before)


# ------------------------------------------------------------------------------ sharing


@pytest.mark.holds("D06")
@pytest.mark.parametrize("twice", [True, False])
@each_commit
def test_tied_weights_stay_tied(commit, twice):
    """Whether a checkpoint brings them once, or under both names."""
    factory = lambda: TiedModel(Linear(), twice=twice)  # noqa: E731
    assert damage(factory, reload=rematerialised) & {"value", "freed", "stale"}
    bench = check_reloads(factory, options={"commit": commit})
    assert bench.model.head.weight is bench.model.embedding.weight

    by_hand = fresh(factory, bench.state(1))
    rematerialised(by_hand, bench.state(2))
    by_hand.embedding.weight = nn.Parameter(by_hand.embedding.weight.detach().clone())
    assert by_hand.head.weight is not by_hand.embedding.weight


@pytest.mark.holds("D06")
@each_commit
def test_tied_weights_that_arrive_different(commit):
    """One of them counts for both places: the one that the model's own loaders let win."""
    factory = lambda: TiedModel(Linear(), twice=True)  # noqa: E731
    bench = Bench(factory)
    for number in (2, 3):
        state = bench.state(number)
        state["head.weight"] = state["head.weight"] + 1
        for sent in (state, dict(reversed(state.items()))):
            with bench.session(commit=commit) as session:
                session.load(sent)
            bench.serves = state
            bench.check_finished(session)
        assert bench.model.head.weight is bench.model.embedding.weight


@pytest.mark.holds("D07")
@each_commit
def test_a_module_that_two_models_share_is_loaded_by_one_session_at_a_time(commit):
    """A drafter holds the target's embedding; who loads the one must not touch the other."""
    factory = lambda: TiedModel(RepackedLinear())  # noqa: E731
    target = Bench(factory)
    drafter = ToyModel(Linear())
    drafter.embedding = target.model.embedding
    own = {"layers.0.weight": torch.ones(WIDTH, WIDTH)}
    session = target.open(commit=commit)
    session.load(dict(list(target.state(2).items())[:1]))
    with (
        pytest.raises(ModelBusyError, match="embedding") as caught,
        WeightLoadSession(drafter, framework=toy_framework()) as second,
    ):
        second.load(own)
    assert caught.value.model_intact
    session.load(dict(list(target.state(2).items())[1:]))
    session.finish()
    target.serves = target.state(2)
    target.check_finished(session)
    assert drafter.embedding.weight is target.model.embedding.weight
    assert not drafter.embedding.weight.is_meta


# ------------------------------------------------------------------------------ loaders


@pytest.mark.holds("D09")
@each_commit
def test_a_hook_that_replaces_a_parameter_and_drops_its_loader(commit):
    """The first reload finds no loader, and so does the one that is to undo it."""
    factory = lambda: LoadingModel(PaddedLinear(), Linear())  # noqa: E731
    model = fresh(factory, make_state(factory, 1))
    assert not hasattr(model.layers[0].weight, "weight_loader"), "as the hook leaves it"
    assert damage(factory) == {"error"}
    bench = Bench(factory)
    for number in (2, 3):
        bench.reload(bench.state(number), commit=commit)
        broken = bench.state(1)
        del broken["layers.1.weight"]
        session = bench.open(commit="atomic")
        session.load(iter(broken.items()))
        with pytest.raises(IncompleteLoadError) as caught:
            session.finish()
        bench.check_ended(session, caught.value)
        assert caught.value.model_intact
    check_reloads(factory, options={"commit": commit})


# ------------------------------------------------------------------------------ state in containers


class Items(list):
    """A list of a class of its own."""


class Table(dict):
    """A dict with attributes."""

    def __init__(self):
        super().__init__()
        self.made = 0


@dataclasses.dataclass
class Made:
    """What a hook has made."""

    weight: torch.Tensor | None = None


def looped():
    """Return a dict that is an item of itself."""
    outer = {"inner": {}}
    outer["outer"] = outer
    return outer


KEPT = {
    "dict": (dict, lambda kept: kept),
    "OrderedDict": (collections.OrderedDict, lambda kept: kept),
    "defaultdict": (lambda: collections.defaultdict(list), lambda kept: kept),
    "Counter": (collections.Counter, lambda kept: kept),
    "dict subclass": (Table, lambda kept: kept),
    "UserDict": (collections.UserDict, lambda kept: kept),
    "UserList": (collections.UserList, lambda kept: kept),
    "list subclass": (Items, lambda kept: kept),
    "deque": (lambda: collections.deque(maxlen=3), lambda kept: kept),
    "namespace": (types.SimpleNamespace, vars),
    "dataclass": (Made, vars),
    "attributes of a dict": (Table, vars),
    "dict in a dict": (lambda: {"inner": {}}, lambda kept: kept["inner"]),
    "dict in itself": (looped, lambda kept: kept["outer"]["inner"]),
    "list in a tuple in a dict": (lambda: {"inner": ([],)}, lambda kept: kept["inner"][0]),
    "dict in a list in a deque": (lambda: collections.deque([[{}]]), lambda kept: kept[0][0]),
    "dict in a list in a namespace": (
        lambda: types.SimpleNamespace(inner=[{}]),
        lambda kept: kept.inner[0],
    ),
    "namespace in a list": (lambda: [types.SimpleNamespace()], lambda kept: vars(kept[0])),
}


class OnceKept(Processed):
    """Makes what it computes with unless it has made it, and keeps it in some container."""

    def __init__(self, kind):
        super().__init__()
        make, self.inside = KEPT[kind]
        self.kept = make()

    @property
    def made(self):
        """The container that the hook puts it into, as a mutable mapping or sequence."""
        return self.inside(self.kept)

    def process_weights_after_loading(self):
        made, keyed = self.made, hasattr(self.made, "keys")
        if keyed and made.get("weight") is None:
            made["weight"] = self.weight.detach() * 2
        elif not keyed and not len(made):
            made.append(self.weight.detach() * 2)

    def forward(self, x):
        made = self.made
        return torch.tanh(x @ (made["weight"] if hasattr(made, "keys") else made[0]))


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("kind", KEPT)
@each_commit
def test_what_a_hook_keeps_in_containers_is_made_anew(commit, kind, plans):
    """The hook asks its own state whether it has run; where it keeps that is its own affair."""
    factory = lambda: ToyModel(OnceKept(kind), Linear())  # noqa: E731
    bench = check_reloads(factory, options={"commit": commit, "plans": plans})
    assert len(bench.model.layers[0].made) <= 2


HOLDING = {
    "dict": (lambda tensor: {"it": tensor}, lambda kept: kept["it"]),
    "list": (lambda tensor: [tensor], lambda kept: kept[0]),
    "OrderedDict": (lambda tensor: collections.OrderedDict(it=tensor), lambda kept: kept["it"]),
    "deque": (lambda tensor: collections.deque([tensor]), lambda kept: kept[0]),
    "list in a dict": (lambda tensor: {"it": [tensor]}, lambda kept: kept["it"][0]),
    "namespace": (lambda tensor: types.SimpleNamespace(it=tensor), lambda kept: kept.it),
}


class ReadsItself(Processed):
    """Finds its weight in a container and packs it; so its weight is another tensor then."""

    def __init__(self, kind):
        super().__init__()
        make, self.inside = HOLDING[kind]
        self.kept = make(self.weight)

    def process_weights_after_loading(self):
        self.doubled = self.inside(self.kept).detach() * 2
        self.weight = nn.Parameter(self.weight.detach().t().contiguous(), requires_grad=False)

    def forward(self, x):
        return torch.tanh(x @ self.doubled + x @ self.weight)


class WritesInside(Processed):
    """Multiplies a tensor in a container by its weight, in place."""

    def __init__(self, kind):
        super().__init__()
        make, self.inside = HOLDING[kind]
        self.kept = make(torch.full((WIDTH, WIDTH), 2.0))

    def process_weights_after_loading(self):
        self.inside(self.kept).mul_(self.weight)

    def forward(self, x):
        return torch.tanh(x @ self.inside(self.kept))


@pytest.mark.parametrize("layer", [ReadsItself, WritesInside])
@pytest.mark.parametrize("kind", HOLDING)
@each_commit
def test_hooks_find_tensors_in_containers_as_they_were(commit, kind, layer):
    """A weight is the new one there too, and what is written in place has its value from before."""
    check_reloads(lambda: ToyModel(layer(kind), Linear()), options={"commit": commit})


class Hooked(Processed):
    """Registers a forward hook, unless one was registered by the constructor; then it removes that."""

    def __init__(self, *, registered):
        super().__init__()
        self.handle = None
        if registered:
            self.handle = self.register_forward_hook(lambda module, args, out: out * 3)

    def process_weights_after_loading(self):
        if self.handle is not None:
            self.handle.remove()
            return
        weight = self.weight.detach() * 2
        self.register_forward_hook(lambda module, args, out: out + args[0] @ weight)


@pytest.mark.parametrize("registered", [True, False])
@each_commit
def test_forward_hooks_that_a_hook_registers_or_removes(commit, registered):
    """Each load registers it once more, and graphs know the tensor that it closes over."""
    factory = lambda: ToyModel(Hooked(registered=registered), Linear())  # noqa: E731
    bench = check_reloads(factory, options={"commit": commit})
    hooks = bench.model.layers[0]._forward_hooks
    assert len(hooks) == (0 if registered else 1)
    mine = lambda module, args, out: None  # noqa: E731
    bench.model.layers[0].register_forward_hook(mine)
    for number in (2, 3, 1):
        bench.reload(bench.state(number), commit=commit)
        assert mine in hooks.values(), "somebody else's stay"
        assert len(hooks) == (1 if registered else 2)


class OnceFailing(OnceKept):
    """Raises when it has made something; the second time it does not."""

    fails = True

    def process_weights_after_loading(self):
        self.register_forward_hook(lambda module, args, out: out)
        super().process_weights_after_loading()
        if OnceFailing.fails:
            raise RuntimeError("no memory")


@pytest.mark.parametrize("kind", KEPT)
def test_containers_are_put_back_when_a_first_hook_fails(kind, monkeypatch):
    monkeypatch.setattr(OnceFailing, "fails", True)
    model = ToyModel(OnceFailing(kind))
    state = make_state(lambda: ToyModel(OnceKept(kind)), 1)
    for fails in (True, False):
        monkeypatch.setattr(OnceFailing, "fails", fails)
        failing = pytest.raises(ProcessingError) if fails else contextlib.nullcontext()
        with failing, WeightLoadSession(model, framework=toy_framework()) as session:
            session.load(make_state(lambda: ToyModel(OnceKept(kind)), 2) if fails else state)
    assert identical(outputs(model), expected(lambda: ToyModel(OnceKept(kind)), state))
    assert len(model.layers[0]._forward_hooks) == 1


# ------------------------------------------------------------------------------ classes and modules


class Served(nn.Module):
    """What a layer is once it has been processed; no rule is registered for it."""

    def forward(self, x):
        return torch.tanh(functional.linear(x, self.weight))


class BecomesServed(Processed):
    """Doubles its weight and takes another class."""

    def process_weights_after_loading(self):
        self.weight.data.mul_(2)
        self.__class__ = Served


@pytest.mark.parametrize("plans", [True, False])
@each_commit
def test_a_hook_that_gives_its_module_another_class(commit, plans):
    """Rules are found by the class from before, or the hook would not run again."""
    factory = lambda: ToyModel(BecomesServed(), Linear())  # noqa: E731
    bench = check_reloads(factory, options={"commit": commit, "plans": plans})
    layer = bench.model.layers[0]
    assert type(layer) is Served
    session = bench.open(commit="atomic", plans=plans)
    assert type(layer) is BecomesServed or plans, "hooks find it as it was"
    session.abort()
    assert type(layer) is Served


@pytest.mark.parametrize("plans", [True, False])
@each_commit
def test_a_module_that_has_lost_its_rule_is_refused(commit, plans):
    """Somebody else gave it another class: unprocessed weights would be served."""
    factory = lambda: ToyModel(InPlaceLinear(), Linear())  # noqa: E731
    model = serving(factory)
    options = {"framework": toy_framework(), "commit": commit, "plans": plans}
    with WeightLoadSession(model, **options) as session:
        session.load(make_state(factory, 2))
    model.layers[0].__class__ = Served
    want = outputs(model)
    with (
        pytest.raises(UnsupportedError, match=r"layers\.0 \(Served, quant\)") as caught,
        WeightLoadSession(model, **options) as session,
    ):
        session.load(make_state(factory, 3))
    assert caught.value.model_intact
    assert identical(outputs(model), want)


class Folding(Processed):
    """Multiplies its weight with that of a layer inside, which it takes out."""

    def __init__(self):
        super().__init__()
        self.after = Linear()

    def process_weights_after_loading(self):
        self.weight.data.copy_(self.after.weight @ self.weight)
        self.after = nn.Identity()


@each_commit
def test_a_hook_that_takes_out_a_module_with_weights_is_refused_by_name(commit):
    """The names of its weights mean nothing any more."""
    factory = lambda: ToyModel(Folding(), Linear())  # noqa: E731
    model = serving(factory)
    want = outputs(model)
    for _ in range(2):
        with (
            pytest.raises(UnsupportedError, match=r"after \(Linear\) by 'layers\.0'") as caught,
            WeightLoadSession(model, framework=toy_framework(), commit=commit, plans=False),
        ):
            pass
        assert caught.value.model_intact
        assert identical(outputs(model), want)
