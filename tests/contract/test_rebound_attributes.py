"""Tensors that a model binds itself while it loads keep their storage, although no hook made them."""

import pytest
import torch
from torch import nn

from weightload import SessionState, StorageChangedError, UnsupportedError, WeightLoadSession
from weightload.testing import ToyModel, layers, make_state
from weightload.testing.layers import WIDTH
from weightload.testing.oracle import toy_framework

COMMITS = ["stream", "atomic"]


class Summing(nn.Module):
    """At the end of its load it makes tensors out of its weights, in several places."""

    def __init__(self, size=None):
        super().__init__()
        self.first = layers.Linear()
        self.second = layers.RepackedLinear()
        self.size = size
        self.total = None
        self.kept = {}

    def load_weights(self, weights):
        found = dict(weights)
        self.first.weight.data.copy_(found["first"])
        self.second.weight.data.copy_(found["second"])
        self.total = found["first"].sum(0)[: self.size]
        self.kept = {"rows": [found["second"].sum(1)]}
        self.note = f"loaded {len(found)}"


def state(seed):
    generator = torch.Generator().manual_seed(seed)
    names = ("first", "second")
    return {name: torch.randn(WIDTH, WIDTH, generator=generator) for name in names}


@pytest.fixture
def model():
    made = Summing()
    with WeightLoadSession(made, framework=toy_framework()) as session:
        session.load(state(1))
    return made


@pytest.mark.parametrize("commit", COMMITS)
def test_they_get_the_new_values_where_they_are(model, commit):
    total, rows = model.total, model.kept["rows"][0]
    where = total.data_ptr(), rows.data_ptr()
    for seed in (2, 3, 1):
        new = state(seed)
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load(new)
        assert model.total is total
        assert model.kept["rows"][0] is rows
        assert (total.data_ptr(), rows.data_ptr()) == where
        assert torch.equal(total, new["first"].sum(0))
        assert torch.equal(rows, new["second"].sum(1))
        assert session.receipt.tensors_moved == 0


def test_an_abort_binds_the_old_ones_again(model):
    """The model is said to be intact, so everything that it computes with has to be."""
    total, rows, kept = model.total, model.kept["rows"][0], model.kept
    session = WeightLoadSession(model, commit="atomic")
    session.prepare()
    session.load(state(2))
    session.seal()
    session.abort()
    assert session.state is SessionState.ABORTED
    assert model.total is total
    assert model.kept is kept
    assert torch.equal(total, state(1)["first"].sum(0))
    assert torch.equal(rows, state(1)["second"].sum(1))


@pytest.mark.parametrize("strict", [False, True])
def test_one_that_cannot_stay_is_named_or_refused(model, strict):
    model.size = 3
    session = WeightLoadSession(model, commit="atomic", strict=strict)
    session.prepare()
    session.load(state(2))
    if strict:
        with pytest.raises(StorageChangedError, match=r"total: shape \(8,\) became \(3,\)"):
            session.finish()
        assert session.state is SessionState.ABORTED
        assert torch.equal(model.total, state(1)["first"].sum(0))
    else:
        receipt = session.finish()
        assert receipt.moved == ["total: shape (8,) became (3,)"]
        assert torch.equal(model.total, state(2)["first"].sum(0)[:3])


def test_what_holds_no_tensor_is_left_as_the_model_made_it(model):
    model.note = "before"
    session = WeightLoadSession(model)
    session.prepare()
    session.load(state(2))
    session.abort()
    assert model.note == "loaded 2"


def test_a_parameter_type_that_cannot_be_made_again_is_refused_by_name():
    class Slotted(nn.Parameter):
        __slots__ = ("extra",)

    class Holder(layers.RepackedLinear):
        def __init__(self):
            super().__init__()
            self.weight = Slotted(self.weight.data, requires_grad=False)

    def factory():
        return ToyModel(Holder())

    model = factory()
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load(make_state(factory, 1))
    session = WeightLoadSession(model)
    with pytest.raises(UnsupportedError, match="Slotted"):
        session.prepare()
    assert session.state is SessionState.ABORTED
