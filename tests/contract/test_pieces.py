"""What a hook does to each piece of a tensor by itself is done as the pieces come, without the hook.

Damage shown: a piece is processed twice, or never, or before all of it has come; a hook that does more
than its rule says is not called; a stack of experts is staged as a whole in some order of the source.
"""

import itertools
import random
import warnings
import weakref

import pytest
import torch
from files_of import write_folder
from torch import nn

from weightload import (
    Checkpoint,
    DuplicateWeightError,
    IncompleteLoadError,
    ModuleRule,
    ProcessingError,
    Role,
    Scope,
    SessionState,
    StagingBudgetError,
    UsageError,
    WeightLoadError,
    bundle,
    pieces,
    quick,
    reporting,
)
from weightload.record import record_of
from weightload.testing import (
    TOYS,
    Bench,
    LoadingModel,
    ToyModel,
    identical,
    layers,
    loading,
    outputs,
)
from weightload.testing.layers import WIDTH, parameter

PIECE = 2 * WIDTH * WIDTH * 4
"""Bytes of one expert of the toy, in the larger of its two stacks."""

SOURCES = {
    "mapping": lambda state, path: state,
    "list": lambda state, path: list(state.items()),
    "iterator": lambda state, path: iter(list(state.items())),
    "file": lambda state, path: Checkpoint(write_folder(path, state, files=1)),
    "files": lambda state, path: Checkpoint(write_folder(path, state, files=3)),
}


def _by_expert(name):
    path, _, number = name.partition("/")
    layer, _, stack = path.rpartition(".")
    expert = int(number or 0) // (2 if stack == "both" else 1)
    return layer, expert, stack, int(number or 0)


ORDERS = {
    "as it is": lambda names: names,
    "reversed": lambda names: names[::-1],
    "by expert": lambda names: sorted(names, key=_by_expert),
    "shuffled": lambda names: random.Random(5).sample(names, len(names)),
}


def known(factory=TOYS["pieced experts"], **options):
    """Return a bench whose plan knows what is done in pieces."""
    bench = Bench(factory)
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True, **options)
    bench.framework.calls.clear()
    return bench


def load(bench, seed, deliver, **options):
    with bench.session(plans=True, **options) as session:
        deliver(session, bench.state(seed))
    bench.serves = bench.state(seed)
    bench.check_finished(session)
    return session.receipt


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_comes_in_any_order_is_right_and_no_hook_is_called(source, order, tmp_path):
    bench = known()
    for seed in (4, 5, 4):
        path = tmp_path / str(random.random())

        def deliver(session, state, path=path):
            names = ORDERS[order](list(state))
            session.load(SOURCES[source]({name: state[name] for name in names}, path))

        receipt = load(bench, seed, deliver)
        assert (receipt.hooks_run, receipt.hooks_in_pieces) == (0, 2)
        assert (receipt.tensors_staged, receipt.layers_staged) == (4, 2)
        assert bench.framework.calls == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("parts", [2, 3, 7, 100])
def test_calls_may_part_the_pieces(order, parts):
    bench = known()

    def deliver(session, state):
        names = ORDERS[order](list(state))
        for start in range(0, len(names), -(-len(names) // parts)):
            some = names[start : start + -(-len(names) // parts)]
            session.load({name: state[name] for name in some})

    for seed in (4, 5):
        receipt = load(bench, seed, deliver)
        assert receipt.hooks_in_pieces == 2
    assert bench.framework.calls == []


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("source", ["mapping", "iterator", "file"])
def test_no_order_needs_memory_for_more_than_a_few_pieces(source, order, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "AT_ONCE", 2 * PIECE)
    monkeypatch.setattr(bundle, "AT_ONCE", 2 * PIECE)
    monkeypatch.setattr(bundle, "MOST", 8 * PIECE)
    bench = known(lambda: LoadingModel(loading.PiecedStack(64)))

    def deliver(session, state):
        names = ORDERS[order](list(state))
        session.load(SOURCES[source]({name: state[name] for name in names}, tmp_path / "c"))

    receipt = load(bench, 4, deliver)
    assert 0 < receipt.staging_peak_bytes <= 8 * PIECE
    assert receipt.hooks_in_pieces == 1


class Whole(nn.Module):
    """A stack that comes as one tensor."""

    def __init__(self):
        super().__init__()
        self.stack = parameter(5, WIDTH, WIDTH)

    def process_weights_after_loading(self):
        new = torch.empty_like(self.stack)
        loading.PiecedStack.turn(self.stack.detach(), new.detach())
        self.stack = nn.Parameter(new.detach(), requires_grad=False)

    def forward(self, x):
        for weight in self.stack:
            x = torch.tanh(nn.functional.linear(x, weight))
        return x


def ruled(cls, of, **rule):
    """Return a kind of bench whose framework has a rule of its own for a class."""

    class Ruled(Bench):
        def __attrs_post_init__(self):
            def process(module):
                self.framework.calls.append((Role.QUANT, module))
                module.process_weights_after_loading()

            self.framework.registry.register(
                cls, ModuleRule(role=Role.QUANT, process=process, pieces=of, **rule), replace=True
            )
            super().__attrs_post_init__()

        def check_finished(self, session):
            self._free_what_nobody_holds()
            check_by_hand(self.model, self.factory, self.serves)
            self.check_structure()

    return Ruled


def check_by_hand(model, factory, state):
    """Compare outputs with those of a model that was filled and processed by hand."""
    want = factory()
    want.load_weights(state.items()) if hasattr(want, "load_weights") else want.load_state_dict(
        state
    )
    with torch.no_grad():
        for module in want.modules():
            if hasattr(module, "process_weights_after_loading"):
                module.process_weights_after_loading()
        assert torch.equal(model(model.example()), want(want.example()))


@pytest.mark.parametrize("source", SOURCES)
def test_one_tensor_may_bring_all_pieces(source, tmp_path):
    turn = loading.PiecedStack.turn
    bench = ruled(Whole, lambda _: {"stack": turn})(lambda: ToyModel(Whole(), layers.Linear()))
    for seed in range(2, 6):
        bench.framework.calls.clear()
        receipt = load(
            bench, seed, lambda s, state, p=tmp_path / str(seed): s.load(SOURCES[source](state, p))
        )
    assert (receipt.hooks_in_pieces, bench.framework.calls) == (1, [])


@pytest.mark.parametrize("source", SOURCES)
def test_one_tensor_with_all_pieces_needs_memory_for_few_of_them(source, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "AT_ONCE", 1)
    monkeypatch.setattr(bundle, "MOST", 1)
    turn = loading.PiecedStack.turn
    bench = ruled(Whole, lambda _: {"stack": turn})(lambda: ToyModel(Whole(), layers.Linear()))
    for seed in range(2, 5):
        receipt = load(
            bench, seed, lambda s, state, p=tmp_path / str(seed): s.load(SOURCES[source](state, p))
        )
    assert receipt.staging_peak_bytes == PIECE // 2
    assert receipt.hooks_in_pieces == 1


# ------------------------------------------------------- when it has to be watched after all


def odd(tensor):
    """The same values, not one run of memory: no plan takes that."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("single", [True, False])
def test_from_any_tensor_on_the_loaders_may_be_needed(single, order):
    """What was processed is not processed again; what loaders bring then, is."""
    bench = known()
    names = ORDERS[order](list(bench.state(4)))
    for at in range(len(names)):
        bench.framework.calls.clear()

        def deliver(session, state, at=at):
            given = {n: odd(state[n]) if n == names[at] else state[n] for n in names}
            session.load(iter(given.items()) if single else {n: given[n] for n in names[:at]})
            if not single:
                session.load({n: given[n] for n in names[at:]})

        receipt = load(bench, 4 + at % 2, deliver)
        ran = [module for _, module in bench.framework.calls]
        assert receipt.hooks_run == len(ran) == len({*map(id, ran)})
        assert receipt.hooks_run + receipt.hooks_in_pieces == 2
        assert receipt.bytes_written == receipt.bytes_received
        assert (receipt.tensors_staged, receipt.tensors_in_place) == (4, 2)


@pytest.mark.parametrize("at", range(0, 18, 3))
def test_a_module_may_be_processed_by_hand_in_the_middle(at):
    bench = known()
    names = ORDERS["by expert"](list(bench.state(4)))
    stacks = [m for m in bench.model.modules() if isinstance(m, loading.PiecedStack)]
    for seed in (4, 5):
        asked = []

        def deliver(session, state, asked=asked):
            session.load({name: state[name] for name in names[:at]})
            for module in stacks:
                mine = [
                    n
                    for n in names
                    if bench.model.get_submodule(n.partition("/")[0].rpartition(".")[0]) is module
                ]
                if {*mine} <= {*names[:at]}:
                    asked.append((session.process_quant(module), session.process_quant(module)))
            session.load({name: state[name] for name in names[at:]})

        load(bench, seed, deliver)
        assert asked == [(True, False)] * len(asked)


@pytest.mark.parametrize("hand_over", [False, True])
def test_what_comes_twice_is_double_and_the_next_load_is_right(hand_over):
    bench = known()
    state = bench.state(4)
    first = "layers.0.both/0"
    session = bench.open(plans=True)
    session.load({name: state[name] for name in ORDERS["by expert"](list(state))})
    with pytest.raises(DuplicateWeightError) as caught:
        session.load({first: odd(state[first]) if hand_over else state[first]})
    bench.check_ended(session, caught.value)
    assert session.state is SessionState.POISONED
    bench.check_recovers()


@pytest.mark.parametrize("lost", ["layers.0.both/1", "layers.2.down/1"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_missing_is_named_and_the_next_load_is_right(order, lost):
    bench = known()
    state = bench.state(4)
    session = bench.open(plans=True)
    session.load({name: state[name] for name in ORDERS[order](list(state)) if name != lost})
    with pytest.raises(IncompleteLoadError, match=lost.partition("/")[0]) as caught:
        session.finish()
    bench.check_ended(session, caught.value)
    assert session.state is SessionState.POISONED
    bench.check_recovers()


@pytest.mark.parametrize("cut", range(1, 17, 4))
@pytest.mark.parametrize("order", ORDERS)
def test_an_abort_in_the_middle_poisons_and_the_next_load_is_right(order, cut):
    bench = known()
    state = bench.state(4)
    session = bench.open(plans=True)
    session.load({name: state[name] for name in ORDERS[order](list(state))[:cut]})
    session.abort()
    bench.check_ended(session)
    assert session.state is SessionState.POISONED
    load(bench, 5, lambda s, state: s.load(state))


@pytest.mark.parametrize("before", [0, 1, 4])
def test_what_a_loader_refuses_poisons_if_something_was_processed(before):
    bench = known()
    state = bench.state(4)
    names = ORDERS["by expert"](list(state))
    session = bench.open(plans=True)
    session.load({name: state[name] for name in names[:before]})
    with pytest.raises(WeightLoadError) as caught:
        session.load({names[before]: torch.zeros(3, 3)})
    bench.check_ended(session, caught.value)
    assert session.state is (SessionState.POISONED if before else SessionState.ABORTED)
    bench.check_recovers()


@pytest.mark.parametrize("source", ["mapping", "iterator", "file"])
def test_a_listener_may_process_a_module_while_pieces_wait(source, tmp_path, monkeypatch):
    """From there on the whole model is watched; what is complete by then must not be left."""
    monkeypatch.setattr(reporting, "EVERY", 0.0)
    monkeypatch.setattr(bundle, "AT_ONCE", 1)
    bench = known(
        lambda: LoadingModel(loading.PiecedStack(), layers.InPlaceLinear(), loading.PiecedStack(2))
    )
    for seed in (4, 5):
        state, asked = bench.state(seed), []
        state = {name: state[name] for name in sorted(state, key=lambda name: "1." not in name)}
        with bench.session(plans=True) as session:

            def tell(progress, session=session, asked=asked):
                if progress.tensors == 7 and not asked:
                    asked.append(session.process_quant(bench.model.layers[1]))

            session.load(SOURCES[source](state, tmp_path / str(seed)), progress=tell)
        bench.serves = state
        bench.check_finished(session)


@pytest.mark.parametrize("source", SOURCES)
def test_a_function_that_raises_is_named_and_the_next_load_is_right(source, tmp_path):
    fails = []

    def turn(loaded, new):
        if fails:
            raise ValueError("no such kernel")
        loading.PiecedStack.turn(loaded, new)

    of = lambda _: {"both": turn, "down": turn}  # noqa: E731
    bench = ruled(loading.PiecedStack, of)(TOYS["pieced experts"])
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    fails.append(True)
    session = bench.open(plans=True)
    with pytest.raises(ProcessingError, match=r"layers\.[02].*no such kernel") as caught:
        session.load(SOURCES[source](bench.state(4), tmp_path / "c"))
    bench.check_ended(session, caught.value)
    fails.clear()
    bench.reload(bench.state(5), plans=True)


# ------------------------------------------------------- rules that say what is not so


class Summed(loading.PiecedStack):
    """Its hook does to each expert what depends on all of them."""

    def process_weights_after_loading(self):
        loaded = self.down.detach().clone()
        super().process_weights_after_loading()
        self.down = nn.Parameter(self.down.detach() + loaded.sum(), requires_grad=False)


class Counting(loading.PiecedStack):
    """Its hook notes a number that depends on the weights, and the model computes with it."""

    largest = 1.0

    def process_weights_after_loading(self):
        self.largest = float(self.both.detach().abs().max())
        super().process_weights_after_loading()

    def forward(self, x):
        return super().forward(x) * self.largest


class Noting(loading.PiecedStack):
    """Its hook makes another tensor of the weights, which is no parameter."""

    def process_weights_after_loading(self):
        self.means = self.both.detach().mean((1, 2))
        super().process_weights_after_loading()

    def forward(self, x):
        return super().forward(x) + self.means.sum()


class Kept(loading.PiecedStack):
    """Its hook keeps the weights as they were loaded, in an object."""

    def process_weights_after_loading(self):
        self.kernel = {"down": self.down.detach().clone()}
        super().process_weights_after_loading()

    def forward(self, x):
        return super().forward(x) + self.kernel["down"].sum()


class Listing(loading.PiecedStack):
    """Its hook makes a list that is as long as the weights say, and the model computes with it."""

    def process_weights_after_loading(self):
        self.items = [1.0] * (1 + int(1000 * self.both.detach().abs().max()) % 7)
        super().process_weights_after_loading()

    def forward(self, x):
        return super().forward(x) * len(self.items)


class Asking(loading.PiecedStack):
    """Its hook asks another parameter what to do, which mostly says the same."""

    def __init__(self, experts=3):
        super().__init__(experts)
        self.bias = parameter(WIDTH)

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        if self.bias.sum() > 1e6:
            self.down = nn.Parameter(self.down.detach() + 1, requires_grad=False)


class Strided(loading.PiecedStack):
    """Its weights are loaded as columns, and lie in memory otherwise than what the hook makes."""

    def __init__(self, experts=3):
        super().__init__(experts)
        self.down = nn.Parameter(self.down.detach().transpose(1, 2), requires_grad=False)
        layers.set_loader(self.down, self.load_matrix)

    def load_matrix(self, place, tensor, number):
        stack = place.data if place.is_contiguous() else place.data.transpose(1, 2)
        target = stack.view(-1, WIDTH, WIDTH)[number]
        target.copy_(tensor)

    def process_weights_after_loading(self):
        for name in ("both", "down"):
            loaded = getattr(self, name).detach().contiguous()
            new = torch.empty_like(loaded)
            self.turn(loaded, new)
            setattr(self, name, nn.Parameter(new, requires_grad=False))


class Both(LoadingModel):
    """One tensor goes to an expert and to a layer that is packed as a whole."""

    def checkpoint(self):
        return {
            name: shape for name, shape in super().checkpoint().items() if name != "layers.1.weight"
        }

    def store(self, name, tensor):
        super().store(name, tensor)
        if name == "layers.0.down/1":
            super().store("layers.1.weight", tensor)


@pytest.mark.parametrize("source", SOURCES)
def test_a_tensor_may_go_to_an_expert_and_elsewhere(source, tmp_path):
    bench = Bench(lambda: Both(loading.PiecedStack(), layers.RepackedLinear()))
    for seed in (2, 3, 4, 5):
        load(
            bench, seed, lambda s, state, p=tmp_path / str(seed): s.load(SOURCES[source](state, p))
        )


def halfway(loaded, new):
    """Write half of each piece."""
    made = torch.empty_like(loaded)
    loading.PiecedStack.turn(loaded, made)
    new[:, : loaded.shape[1] // 2] = made[:, : loaded.shape[1] // 2]


TURN = loading.PiecedStack.turn
CLAIMS = {
    "all of them count": (Summed, {"both": TURN, "down": TURN}),
    "a number is noted": (Counting, {"both": TURN, "down": TURN}),
    "a tensor is made": (Noting, {"both": TURN, "down": TURN}),
    "another parameter is asked": (Asking, {"both": TURN, "down": TURN}),
    "they lie in memory otherwise": (Strided, {"both": TURN, "down": TURN}),
    "a list is longer": (Listing, {"both": TURN, "down": TURN}),
    "an object keeps them": (Kept, {"both": TURN, "down": TURN}),
    "one function is another": (
        loading.PiecedStack,
        {"both": TURN, "down": lambda loaded, new: new.copy_(loaded)},
    ),
    "one function does half": (loading.PiecedStack, {"both": TURN, "down": halfway}),
    "one parameter is left out": (loading.PiecedStack, {"both": TURN}),
    "one parameter is not there": (loading.PiecedStack, {"both": TURN, "other": TURN}),
    "this module has none": (loading.PiecedStack, None),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_hook_that_does_more_than_its_rule_says_is_called(claim, source, tmp_path):
    cls, functions = CLAIMS[claim]
    bench = ruled(cls, lambda _: functions)(lambda: LoadingModel(cls(), layers.Linear(), cls(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(2, 6):
            bench.framework.calls.clear()
            load(
                bench,
                seed,
                lambda s, state, p=tmp_path / str(seed): s.load(SOURCES[source](state, p)),
            )
            assert len(bench.framework.calls) == 2


class Summing(loading.PiecedStack):
    """Its hook overwrites a buffer with what depends on the weights."""

    def __init__(self, experts=3):
        super().__init__(experts)
        self.register_buffer("sums", torch.zeros(experts), persistent=False)

    def process_weights_after_loading(self):
        self.sums.copy_(self.both.detach().sum((1, 2)))
        super().process_weights_after_loading()

    def forward(self, x):
        return super().forward(x) + self.sums.sum()


@pytest.mark.parametrize("frozen", ["all", "one stack", "one expert"])
@pytest.mark.parametrize("cls", [Counting, Noting, Summing, Kept])
def test_nothing_is_learned_of_pieces_that_are_what_they_were(cls, frozen):
    """As when a trainer first sends what the engine was started with."""
    bench = ruled(cls, lambda _: {"both": TURN, "down": TURN})(lambda: LoadingModel(cls()))
    kept = {
        "all": lambda name: True,
        "one stack": lambda name: ".both" in name,
        "one expert": lambda name: name.endswith(("both/0", "both/1", "down/0")),
    }[frozen]
    first = bench.state(1)
    for seed in (1, 1, 2, 3, 4, 5, 6):
        state = bench.state(seed)
        if seed < 4:
            state = {name: first[name] if kept(name) else state[name] for name in state}
        with bench.session(plans=True) as session:
            session.load(state)
        bench.serves = state
        bench.check_finished(session)
        assert session.receipt.hooks_in_pieces == 0


@pytest.mark.parametrize("frozen", [True, False])
def test_what_cannot_be_told_for_long_is_done_by_hooks(frozen):
    """Experts that are never trained do not keep everything else from being quick."""
    bench = Bench(lambda: LoadingModel(loading.PiecedStack(), layers.RepackedLinear()))
    first = bench.state(1)
    for seed in (1, 1, 4, 5, 6, 7):
        state = bench.state(seed)
        if frozen:
            state = {n: first[n] if n.startswith("layers.0") else state[n] for n in state}
        with bench.session(plans=True) as session:
            session.load(state)
        bench.serves = state
        bench.check_finished(session)
        receipt = session.receipt
    assert receipt.hooks_in_pieces == (not frozen)
    assert not record_of(bench.model).plan.part.whole


class Outer:
    def __init__(self, weight):
        self.weight = weight


class Held(loading.PiecedStack):
    """An object looks into the memory of the new weight."""

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.kernel = Outer(self.both.detach())

    def forward(self, x):
        return super().forward(x) + self.kernel.weight[0].sum()


@pytest.mark.parametrize("when", [0, 1, 2])
def test_what_looked_into_a_weight_does_not_follow_it_to_other_memory(when):
    bench = ruled(Held, lambda _: {"both": TURN, "down": TURN})(lambda: LoadingModel(Held()))
    for number, seed in enumerate((2, 3, 4, 5)):
        if number == when:
            stack = bench.model.layers[0]
            stack.both.data = stack.both.data.clone()
            bench.kept = type(bench.kept).of(bench.model)
        with bench.session(plans=True) as session:
            session.load(bench.state(seed))
        bench.serves = bench.state(seed)
        check_by_hand(bench.model, bench.factory, bench.serves)


def boom(loaded, new):
    raise ValueError("no such kernel")


def raising(module):
    raise RuntimeError("no such backend")


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (lambda _: {"both": boom, "down": TURN}, "raises ValueError for 'both': no such kernel"),
        (lambda _: {"both": 3, "down": TURN}, r"names \['both'\]"),
        (lambda _: {"bothe": TURN}, r"names \['bothe'\]"),
        (lambda _: 3, "raised TypeError"),
        (raising, "raised RuntimeError: no such backend"),
    ],
)
def test_a_rule_that_makes_no_sense_is_told_of_and_hooks_are_called(says, told):
    bench = ruled(loading.PiecedStack, says)(TOYS["pieced experts"])
    with pytest.warns(UserWarning, match=rf"PiecedStack.*'layers\.0'.*{told}"):
        bench.reload(bench.state(2), plans=True)
    for seed in (3, 4):
        session = bench.reload(bench.state(seed), plans=True)
        assert (session.receipt.hooks_in_pieces, session.receipt.hooks_run) == (0, 2)


def test_a_rule_that_raises_later_is_told_of_and_hooks_are_called():
    says = [lambda _: {"both": TURN, "down": TURN}]
    bench = ruled(loading.PiecedStack, lambda module: says[0](module))(TOYS["pieced experts"])
    for seed in (2, 3):
        session = bench.reload(bench.state(seed), plans=True)
    assert session.receipt.hooks_in_pieces == 2
    says[0] = raising
    with pytest.warns(UserWarning, match="no such backend"):
        session = bench.reload(bench.state(4), plans=True)
    assert session.receipt.hooks_in_pieces == 0


@pytest.mark.parametrize("rule", [{"role": Role.ATTENTION}, {"role": Role.QUANT, "rebind": id}])
def test_a_rule_with_pieces_that_nobody_would_ask_is_refused(rule):
    with pytest.raises(UsageError, match="role QUANT and no rebind"):
        ModuleRule(process=id, pieces=lambda _: {}, **rule)


def test_tensors_of_inference_mode_are_done_by_hooks():
    with torch.inference_mode():
        bench = Bench(TOYS["pieced experts"])
        bench.reload(bench.state(2), plans=True)
    for seed in (3, 4):
        with bench.session(plans=True) as session:
            session.load(bench.state(seed))
        assert session.receipt.hooks_in_pieces == 0


def test_what_is_tried_is_let_go_with_its_layer(monkeypatch):
    alive, held = [], []
    of = pieces.Trial.of.__func__

    def trying(cls, module, converts):
        alive.append(sum(one() is not None for one in held))
        made = of(cls, module, converts)
        held.append(weakref.ref(made))
        return made

    monkeypatch.setattr(pieces.Trial, "of", classmethod(trying))
    bench = Bench(lambda: LoadingModel(*(loading.PiecedStack() for _ in range(4))))
    bench.reload(bench.state(2), plans=True)
    assert alive == [0] * 4


def test_an_abort_tells_what_was_done_in_pieces():
    bench = known()
    state = bench.state(4)
    told = []
    for plans in (True, False):
        session = bench.open(plans=plans)
        session.load({n: t for n, t in state.items() if n.startswith("layers.0")})
        session.abort()
        receipt = session.receipt
        told.append(
            (
                receipt.tensors_staged,
                receipt.layers_staged,
                receipt.tensors_in_place,
                receipt.hooks_run + receipt.hooks_in_pieces,
            )
        )
    assert told[0] == told[1] == (2, 1, 0, 1)


class Fixed(loading.PiecedStack):
    """Its second stack is the same in every checkpoint that we have."""


def test_a_module_that_needs_its_hook_does_not_keep_others_from_being_done_in_pieces():
    turn = {"both": TURN, "down": TURN}
    of = lambda module: {"both": TURN} if isinstance(module, Fixed) else turn  # noqa: E731
    bench = ruled(loading.PiecedStack, of)(
        lambda: LoadingModel(loading.PiecedStack(), Fixed(), layers.Linear())
    )
    fixed = {name: t for name, t in bench.state(1).items() if name.startswith("layers.1.down")}
    for seed in range(2, 6):
        state = {**bench.state(seed), **fixed}
        with bench.session(plans=True) as session:
            session.load(state)
        bench.serves = state
        bench.check_finished(session)
    assert (session.receipt.hooks_in_pieces, session.receipt.hooks_run) == (1, 1)


def test_a_function_that_gives_other_values_than_the_hook_is_told_of():
    cls, functions = CLAIMS["one function is another"]
    bench = ruled(cls, lambda _: functions)(lambda: LoadingModel(cls()))
    with pytest.warns(UserWarning, match=r"PiecedStack.*'layers\.0'.*other values.*'down'"):
        bench.reload(bench.state(2), plans=True)


def test_a_rule_that_no_longer_says_so_is_asked_each_time():
    answers = itertools.cycle([{"both": TURN, "down": TURN}])
    bench = ruled(loading.PiecedStack, lambda _: next(answers))(TOYS["pieced experts"])
    for seed in (2, 3):
        receipt = load(bench, seed, lambda s, state: s.load(state))
    assert receipt.hooks_in_pieces == 2
    answers = itertools.cycle([None])
    receipt = load(bench, 4, lambda s, state: s.load(state))
    assert (receipt.hooks_in_pieces, receipt.hooks_run) == (0, 2)


# ------------------------------------------------------- when hooks are called all the same


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "full"},
        {"verify": "sampled"},
        {"commit": "atomic"},
        {"plans": False},
        {"scope": Scope.full(allow_missing=["*.bias"])},
        {"check_finite": True},
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_hooks_are_called_where_something_is_looked_at_or_may_stay_away(options):
    bench = known()
    for seed in (4, 5):
        bench.framework.calls.clear()
        with bench.session(**{"plans": True, **options}) as session:
            session.load(bench.state(seed))
        bench.serves = bench.state(seed)
        bench.check_finished(session)
        assert session.receipt.hooks_in_pieces == 0
        # What is verified is processed a second time, aside.
        assert len(bench.framework.calls) >= session.receipt.hooks_run == 2
    assert load(bench, 6, lambda s, state: s.load(state)).hooks_in_pieces == 2


def test_a_tensor_in_whose_memory_another_one_lies_is_not_processed_in_pieces():
    """As after an engine has moved its parameters into one block."""
    bench = known()
    stack = bench.model.layers[0]
    block = torch.cat([stack.both.detach().flatten(), stack.down.detach().flatten()])
    count = stack.both.numel()
    stack.both.data = block[:count].view_as(stack.both)
    stack.down.data = block[count:].view_as(stack.down)
    bench.kept = type(bench.kept).of(bench.model)
    for seed in (4, 5):
        bench.reload(bench.state(seed), plans=True)


def test_tensors_that_were_given_one_memory_are_as_they_are_without_a_plan():
    """What waits for its other half must not wait in memory that is another tensor's too."""
    found = []
    for plans in (True, False):
        bench = known(lambda: LoadingModel(*(loading.PiecedStack(2) for _ in range(2))))
        one, two = bench.model.layers
        one.both.data = two.both.data
        state = bench.state(4)
        names = sorted(state, key=lambda name: (*_by_expert(name)[1:], name))
        with bench.session(plans=plans) as session:
            session.load(iter([(name, state[name]) for name in names]))
        found.append(outputs(bench.model))
    assert identical(*found)


def test_what_comes_singly_is_processed_a_few_pieces_at_a_time(monkeypatch):
    monkeypatch.setattr(pieces, "AT_ONCE", 8 * PIECE)
    called = []

    def turn(loaded, new):
        called.append(len(loaded))
        loading.PiecedStack.turn(loaded, new)

    of = lambda _: {"both": turn, "down": turn}  # noqa: E731
    bench = ruled(loading.PiecedStack, of)(lambda: LoadingModel(loading.PiecedStack(64)))
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    called.clear()
    load(bench, 4, lambda s, state: s.load(iter(state.items())))
    assert sum(called) == 2 * 64
    assert len(called) == 64 // 8 + 64 // 16


@pytest.mark.parametrize("source", ["iterator", "mapping", "file"])
def test_what_comes_singly_does_not_wait_long(source, tmp_path, monkeypatch):
    """It is processed while it is still in the processor's cache."""
    monkeypatch.setattr(pieces, "AT_ONCE", 8 * PIECE)
    monkeypatch.setattr(quick.Quick, "bundle", lambda *_: None)
    bench = known(lambda: LoadingModel(loading.PiecedStack(64)))
    waited, settle = [], pieces.Pieces.settle

    def settling(self):
        waited.append(self._waiting)
        settle(self)

    monkeypatch.setattr(pieces.Pieces, "settle", settling)
    load(bench, 4, lambda s, state: s.load(SOURCES[source](state, tmp_path / "c")))
    assert 0 < max(waited) <= 8 * PIECE


@pytest.mark.parametrize("source", ["mapping", "list", "file"])
@pytest.mark.parametrize("experts", [5, 64, 100])
def test_what_comes_expert_by_expert_is_never_taken_singly(source, experts, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "AT_ONCE", 8 * PIECE)
    monkeypatch.setattr(bundle, "MOST", 32 * PIECE)
    bench = known(lambda: LoadingModel(loading.PiecedStack(experts)))
    monkeypatch.setattr(pieces.Pieces, "came", None)
    for seed in (4, 5):

        def deliver(session, state, path=tmp_path / str(seed)):
            names = sorted(state, key=lambda name: _by_expert(name)[1:])
            session.load(SOURCES[source]({name: state[name] for name in names}, path))

        load(bench, seed, deliver)


def test_a_budget_that_a_stack_does_not_fit_in_is_enough_for_its_pieces():
    bench = known(lambda: LoadingModel(loading.PiecedStack(3)))
    room = pieces.room_for(record_of(bench.model).plan.in_pieces.pieced.values())
    receipt = load(bench, 4, lambda s, state: s.load(state), staging_budget=room)
    assert receipt.hooks_in_pieces == 1
    session = bench.open(plans=True, staging_budget=3 * PIECE // 2)
    with pytest.raises(StagingBudgetError):
        session.load(bench.state(5))
    bench.check_ended(session)
    bench.check_recovers()


@pytest.mark.parametrize("spare", [0, -1])
def test_what_is_staged_beside_pieces_has_what_they_leave_of_a_budget(spare):
    bench = known(lambda: LoadingModel(loading.PiecedStack(3), layers.RepackedLinear()))
    room = pieces.room_for(record_of(bench.model).plan.in_pieces.pieced.values())
    budget = room + 4 * WIDTH * WIDTH + spare
    session = bench.open(plans=True, staging_budget=budget)
    if spare < 0:
        with pytest.raises(StagingBudgetError):
            session.load(bench.state(4))
        bench.check_ended(session)
        return
    session.load(bench.state(4))
    session.finish()
    bench.serves = bench.state(4)
    bench.check_finished(session)
    assert session.receipt.hooks_in_pieces == 1
    assert session.receipt.staging_peak_bytes <= budget


def test_memory_is_kept_for_a_few_pieces_and_is_used_again():
    bench = known()
    pool = record_of(bench.model).plan.pool
    sizes = []
    for seed in range(4, 9):
        receipt = load(bench, seed, lambda s, state: s.load(iter(state.items())))
        blocks = {size for size, _ in pool._free}
        assert receipt.staging_peak_bytes in blocks
        sizes.append(pool.nbytes)
    assert len({*sizes}) == 1
