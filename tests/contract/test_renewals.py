"""A hook that is known to make a handle anew, and nothing else, is called without a watch around it.

Damage shown: what it leaves besides, on the one day that it does, is lost or computed with; a handle of
the old weights stays; a failure is not told as any other is.
"""

import pytest
import torch
from torch import nn

from weightload import ProcessingError, SessionState, StorageChangedError, layer
from weightload.record import record_of
from weightload.testing import TOYS, Bench, LoadingModel, fresh, identical, layers, outputs, sharing


@pytest.fixture
def planned(monkeypatch):
    """The units whose commits were worked out by a walk."""
    found = []
    plan = layer.Unit.plan_commit
    monkeypatch.setattr(
        layer.Unit, "plan_commit", lambda unit: (found.append(unit.name), plan(unit))[1]
    )
    return found


def known(factory=TOYS["foreign kernel"]):
    """Return a bench whose plan knows what its hooks leave."""
    bench = Bench(factory)
    for seed in (2, 3):
        bench.reload(bench.state(seed), plans=True)
    assert record_of(bench.model).plan.renewals
    return bench


@pytest.mark.parametrize("toy", ["foreign kernel", "weight handle", "padded", "everything"])
def test_what_is_known_is_not_walked_and_is_right(toy, planned):
    bench = known(TOYS[toy])
    names = record_of(bench.model).plan.renewals.keys()
    for seed in (4, 5, 4):
        planned.clear()
        bench.framework.calls.clear()
        session = bench.reload(bench.state(seed), plans=True)
        assert not names & {*planned}
        assert session.receipt.hooks_run == len(bench.framework.calls)


def test_the_receipt_says_what_was_made_anew():
    bench = known()
    told = bench.reload(bench.state(4), plans=True).receipt
    other = bench.reload(bench.state(5), plans=False).receipt
    assert told.moved == other.moved != []
    for name in ("hooks_run", "layers_staged", "tensors_staged", "tensors_moved"):
        assert getattr(told, name) == getattr(other, name)


def test_the_old_handle_is_let_go(monkeypatch):
    alive = set()
    monkeypatch.setattr(sharing.ForeignKernel, "__del__", lambda kernel: alive.discard(id(kernel)))
    made = sharing.ForeignKernel.__init__

    def making(kernel, weight):
        made(kernel, weight)
        alive.add(id(kernel))

    monkeypatch.setattr(sharing.ForeignKernel, "__init__", making)
    bench = Bench(TOYS["foreign kernel"])
    for seed in range(2, 8):
        with bench.session(plans=True) as session:
            session.load(bench.state(seed))
        assert len(alive) == 2


class Moody(sharing.ForeignLinear):
    """Its hook does something else on some days; nothing that a plan looks at says which."""

    mood = [""]  # noqa: RUF012

    def process_weights_after_loading(self):
        loaded = self.weight.detach().clone()
        super().process_weights_after_loading()
        if self.mood[0] == "keeps the weight":
            self.weight = nn.Parameter(loaded, requires_grad=False)
        elif self.mood[0] == "changes the bias":
            self.bias = nn.Parameter(self.bias.detach() * 2, requires_grad=False)
        elif self.mood[0] == "notes a number":
            self.largest = float(loaded.max())
        elif self.mood[0] == "makes a tensor":
            self.means = loaded.mean(0)
        elif self.mood[0] == "names it anew":
            self.weight.comment = "packed"
        elif self.mood[0] == "another function":
            kernel = sharing.ForeignKernel(loaded)
            self.compute = lambda x, bias: kernel(x) + bias + 1

    def forward(self, x):
        return (
            super().forward(x) + getattr(self, "largest", 0.0) + getattr(self, "means", x[0]).sum()
        )


class Bare(Moody):
    """It has nothing that is written in place."""

    def __init__(self):
        super().__init__()
        del self.bias
        self.bias = 0.5


MOODS = {
    "": None,
    "keeps the weight": StorageChangedError,
    "changes the bias": None,
    "notes a number": None,
    "makes a tensor": None,
    "names it anew": None,
    "another function": None,
}


def bench_of(mood, monkeypatch):
    monkeypatch.setattr(Moody, "mood", [""])

    def factory():
        return LoadingModel(Moody(), layers.Linear())

    bench = known(factory)
    Moody.mood[0] = mood
    return bench


@pytest.mark.parametrize("mood", MOODS)
def test_a_hook_that_leaves_something_else_is_walked(mood, monkeypatch, planned):
    """The same comes of it as without a plan: right, or the same error."""
    bench, plain = (bench_of(mood, monkeypatch) for _ in range(2))
    for seed in (4, 5, 6):
        raised, told, kept = [], [], []
        for one, plans in ((bench, True), (plain, False)):
            layer_of, before = one.model.layers[0], getattr(one.model.layers[0], "means", None)
            planned.clear()
            session = one.open(plans=plans)
            try:
                session.load(one.state(seed))
                session.finish()
            except StorageChangedError as error:
                raised.append(str(error))
            want = SessionState.POISONED if MOODS[mood] else SessionState.FINISHED
            assert session.state is want
            # The next time it may be what was known.
            assert seed > 4 or plans <= ("layers.0" in planned or not mood)
            told.append([session.receipt.moved, session.receipt.tensors_moved])
            comment = getattr(layer_of.weight, "comment", None)
            kept.append((getattr(layer_of, "means", None) is before, comment))
        assert len({*raised}) == bool(MOODS[mood])
        assert told[0] == told[1]
        assert kept[0] == kept[1]
        if not raised:
            found = outputs(bench.model)
            assert identical(found, outputs(plain.model))
            assert identical(found, outputs(fresh(bench.factory, bench.state(seed))))


@pytest.mark.parametrize("half_way", [False, True])
def test_a_hook_that_fails_leaves_an_intact_model_intact(half_way):
    bench = known(lambda: LoadingModel(Bare()))
    state = bench.state(4)
    bench.framework.fail_hook(half_way=half_way)
    session = bench.open(plans=True)
    with pytest.raises(ProcessingError, match=r"layers\.0") as caught:
        session.load({"layers.0.weight": state["layers.0.weight"]})
    bench.check_ended(session, caught.value)
    bench.reload(state, plans=True)


def test_what_is_refused_before_anything_was_written_leaves_an_intact_model(monkeypatch):
    monkeypatch.setattr(Moody, "mood", [""])
    bench = known(lambda: LoadingModel(Bare()))
    Moody.mood[0] = "keeps the weight"
    session = bench.open(plans=True)
    with pytest.raises(StorageChangedError) as caught:
        session.load(bench.state(4))
    Moody.mood[0] = ""
    bench.check_ended(session, caught.value)
    assert session.state is SessionState.ABORTED
    bench.reload(bench.state(5), plans=True)


@pytest.mark.parametrize("options", [{"strict": True}, {"verify": "full"}, {"commit": "atomic"}])
def test_it_is_walked_where_something_is_to_be_refused_or_compared(options, planned):
    bench = known()
    planned.clear()
    session = bench.open(plans=True, **options)
    if "strict" in options:
        with pytest.raises(StorageChangedError, match="opaque"):
            session.load(bench.state(4))
        bench.check_ended(session)
    else:
        session.load(bench.state(4))
        session.finish()
        bench.serves = bench.state(4)
        bench.check_finished(session)
    assert "layers.0" in planned
    bench.reload(bench.state(5), plans=True)


OUTSIDE = torch.ones(layers.WIDTH)


class Reading(sharing.ForeignLinear):
    """Its hook reads a tensor that belongs to nobody, and might be a live one's next time."""

    def process_weights_after_loading(self):
        self.weight.data += OUTSIDE
        super().process_weights_after_loading()


def test_a_hook_that_reads_what_is_not_its_own_is_not_among_them():
    bench = Bench(lambda: LoadingModel(layers.Linear(), Reading()))
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)
        assert not record_of(bench.model).plan.renewals


class Late(sharing.ForeignLinear):
    """Its hook makes a tensor from the second time on."""

    def process_weights_after_loading(self):
        if CALLED[0]:
            self.means = self.weight.detach().mean(0)
        CALLED[0] += 1
        super().process_weights_after_loading()


CALLED = [0]


def test_a_tensor_that_comes_later_keeps_its_memory_from_then_on():
    bench = Bench(lambda: LoadingModel(Late()))
    kept = []
    for seed in (2, 3, 4, 5):
        with bench.session(plans=True) as session:
            session.load(bench.state(seed))
        kept.append(bench.model.layers[0].means)
        assert not record_of(bench.model).plan.renewals
    assert all(tensor is kept[0] for tensor in kept)


class Scaled(sharing.ForeignLinear):
    """Its hook reads a tensor that is an attribute, and might write to it another time."""

    def __init__(self):
        super().__init__()
        self.factor = torch.full((1,), 2.0)

    def process_weights_after_loading(self):
        self.weight.data *= self.factor
        super().process_weights_after_loading()


def test_a_hook_with_a_tensor_of_its_layer_at_hand_is_watched():
    bench = Bench(lambda: LoadingModel(Scaled()))
    for seed in (2, 3, 4):
        bench.reload(bench.state(seed), plans=True)
        assert not record_of(bench.model).plan.renewals


class Holder:
    """An object that a hook makes anew each time."""


class Filling(sharing.ForeignLinear):
    """From some day on a tensor hangs on an object that is made anew."""

    filled = [False]  # noqa: RUF012

    def process_weights_after_loading(self):
        loaded = self.weight.detach().clone()
        super().process_weights_after_loading()
        self.holder = Holder()
        self.holder.sums = loaded.sum(0) if self.filled[0] else None


def test_a_tensor_that_comes_into_an_object_made_anew_keeps_its_memory_too(monkeypatch):
    monkeypatch.setattr(Filling, "filled", [False])
    told, kept = [], []
    for plans in (True, False):
        Filling.filled[0] = False
        bench = Bench(lambda: LoadingModel(Filling()))
        for seed in (2, 3):
            bench.reload(bench.state(seed), plans=plans)
        Filling.filled[0] = True
        places = []
        for seed in (4, 5, 6):
            with bench.session(plans=plans) as session:
                session.load(bench.state(seed))
            told.append(session.receipt.moved)
            places.append(bench.model.layers[0].holder.sums)
        kept.append([one.data_ptr() == places[0].data_ptr() for one in places])
    assert told[:3] == told[3:]
    assert kept[0] == kept[1] == [True] * 3
