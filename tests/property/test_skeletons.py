"""What a skeleton does not look at again has not changed: with tags it says what it says without."""

from contextlib import suppress
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightload import skeleton as subject
from weightload.registry import ModuleRegistry
from weightload.session import WeightLoadSession
from weightload.skeleton import Skeleton
from weightload.tags import tags_of


class Leaf(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("empty", None)
        self.size, self.name, self.sizes = n, f"leaf {n}", [n, n + 1]
        self.where = {"first": n}
        self.table = torch.arange(3)

    def forward(self, x):
        return x


class Other(Leaf):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaves = nn.ModuleList([Leaf(n) for n in range(3)])
        self.bare = nn.Identity()
        self.size = 4


def _of(model, at):
    return [*model.leaves, model.bare, model][at]


def _replace_table(module, name):
    setattr(module, name, dict(getattr(module, name)))


def _new_tables(module):
    for name in ("_parameters", "_buffers", "_modules"):
        module.__dict__[name] = dict(module.__dict__[name])


def _rename(table, before, after):
    items = [(after if key == before else key, value) for key, value in table.items()]
    table.clear()
    table.update(items)


def _swap(module):
    order = [*module._parameters.items()][::-1]
    module._parameters.clear()
    module._parameters.update(order)


def _again(module, name):
    """Take something out and put it back."""
    value = module.__dict__.pop(name)
    module.__dict__[name] = value


def _own_forward(module):
    kind = type(module)
    module.forward = lambda *args: kind.forward(module, *args)


def _new_weight(module):
    _new_tables(module)
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def _nothing(*args):
    return None


CHANGES = {
    "nothing": lambda m: None,
    "an equal number": lambda m: setattr(m, "size", m.size),
    "another number": lambda m: setattr(m, "size", m.size + 1),
    "the first number": lambda m: setattr(m, "size", 1),
    "a number less": lambda m: m.__dict__.pop("size", None),
    "a number more": lambda m: setattr(m, "more", 1),
    "an object more": lambda m: setattr(m, "thing", object()),
    "a tensor of integers more": lambda m: setattr(m, "mapped", torch.arange(2)),
    "no tensor more": lambda m: m.__dict__.pop("mapped", None),
    "no object more": lambda m: m.__dict__.pop("thing", None),
    "a list filled anew": lambda m: m.sizes.__setitem__(0, 7),
    "a list filled as before": lambda m: m.sizes.__setitem__(0, m.sizes[1] - 1),
    "an equal list": lambda m: setattr(m, "sizes", [*m.sizes]),
    "an equal dictionary": lambda m: setattr(m, "where", dict(m.where)),
    "a dictionary changed": lambda m: m.where.update(first=9),
    "integers changed": lambda m: m.table.add_(1),
    "integers changed back": lambda m: m.table.copy_(torch.arange(3)),
    "integers of another type": lambda m: setattr(m, "table", m.table.to(torch.int32)),
    "an equal tensor of integers": lambda m: setattr(m, "table", m.table.clone()),
    "another class": lambda m: setattr(m, "__class__", Other if type(m) is Leaf else type(m)),
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach().clone())),
    "the same parameter": lambda m: setattr(m, "weight", m.weight),
    "a parameter less": lambda m: m._parameters.pop("weight", None),
    "a parameter more": lambda m: setattr(m, "late", nn.Parameter(torch.zeros(1))),
    "a buffer for none": lambda m: m._buffers.update(empty=torch.zeros(1)),
    "none for a buffer": lambda m: m._buffers.update(scale=None),
    "another buffer": lambda m: m._buffers.update(scale=torch.ones(2)),
    "a name": lambda m: _rename(m._buffers, "scale", "scales"),
    "the order": _swap,
    "new tables": _new_tables,
    "other memory": lambda m: setattr(m.weight, "data", m.weight.data.clone()),
    "another shape": lambda m: setattr(m.weight, "data", m.weight.data.reshape(4)),
    "transposed": lambda m: setattr(m.weight, "data", m.weight.data.t()),
    "another type": lambda m: setattr(m.weight, "data", m.weight.data.half()),
    "another parameter in new tables": _new_weight,
    "a hook that torch calls": lambda m: m.register_full_backward_hook(_nothing),
    "a module more": lambda m: m.add_module("inner", nn.Identity()),
    "a module less": lambda m: m._modules.pop("bare", None),
    "the same again": lambda m: _again(m, "training"),
    "trains": lambda m: m.train(),
    "evaluates": lambda m: m.eval(),
    "its own forward": _own_forward,
    "no forward of its own": lambda m: m.__dict__.pop("forward", None),
}


def _change(model, what, at):
    with suppress(AttributeError, KeyError):  # a module that has no such thing
        CHANGES[what](_of(model, at))


class Side:
    """A model, what is remembered of it, and whether tags may be used."""

    def __init__(self, *, tags):
        self.model = Model()
        self.registry = ModuleRegistry()
        self.patch = lambda: mock.patch.object(subject, "tags_of", tags_of if tags else _nothing)
        self.remember()

    def remember(self):
        modules = dict(self.model.named_modules())
        self.skeleton = Skeleton.of(modules, self.registry, ["leaves.0.weight"])

    def session(self, inside):
        """Do what a session does; return whether the model is what it was, and what changed."""
        with self.patch():
            body = self.skeleton.body(self.model)
            if body is None:
                self.remember()
                return None
            body.guard(WeightLoadSession(self.model))
            body.hold()
            for what, at in inside:
                _change(self.model, what, at)
            changes = body.changes()
            body.let_compute()
            state = {name: sorted(vars(one)) for name, one in self.model.named_modules()}
            return [*body.modules], len(body.tensors), changes and _plain(changes), state


def _plain(changes):
    return [one.partition(" was ")[0] for one in changes]


STEPS = st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 4))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.lists(STEPS, max_size=2), st.lists(STEPS, max_size=1)), max_size=6))
def test_what_has_no_other_tag_need_not_be_looked_at(sessions):
    quick, thorough = Side(tags=True), Side(tags=False)
    for before, inside in sessions:
        found = []
        for side in (quick, thorough):
            for what, at in before:
                _change(side.model, what, at)
            found.append(side.session(inside))
        assert found[0] == found[1]


@pytest.mark.parametrize("what", sorted(CHANGES))
@pytest.mark.parametrize("at", [0, 3, 4])
@pytest.mark.parametrize("when", ["between", "inside"])
def test_each_change_alone_is_seen_after_quiet_sessions(what, at, when):
    found = []
    for tags in (True, False):
        side = Side(tags=tags)
        found.append([side.session([]), side.session([])])
        if when == "between":
            _change(side.model, what, at)
            found[-1].append(side.session([]))
        else:
            found[-1].append(side.session([(what, at)]))
        found[-1] += [side.session([]), side.session([])]
    assert found[0] == found[1]
    assert found[0][0] is not None
    assert found[0][0] == found[0][1]


SAME = {
    "nothing", "an equal number", "the first number", "the order", "an object more", "no object more", "no tensor more", "an equal list",
    "an equal dictionary", "a list filled as before", "integers changed back", "new tables",
    "an equal tensor of integers", "the same parameter", "other memory", "the same again", "evaluates",
    "no forward of its own", "its own forward", "a hook that torch calls", "a module less",
}  # fmt: skip


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("what", sorted(CHANGES))
def test_a_model_is_another_where_loaders_or_copies_could_see_it(what, tags):
    side = Side(tags=tags)
    side.model.eval()
    side.remember()
    for _ in range(2):
        assert side.session([]) is not None
    _change(side.model, what, 1)
    assert (side.session([]) is not None) is (what in SAME)


def test_any_two_changes_one_after_the_other_are_seen():
    for first in CHANGES:
        for second in CHANGES:
            found = []
            for tags in (True, False):
                side = Side(tags=tags)
                found.append([side.session([]), side.session([])])
                for what in (first, second):
                    _change(side.model, what, 1)
                    found[-1].append(side.session([]))
            assert found[0] == found[1], (first, second)


def test_only_what_was_set_is_looked_at():
    side = Side(tags=True)
    assert side.session([]) is not None
    holds, asks = subject._Part.holds, subject._strategies
    looked = []

    def noted(part, tables, places):
        looked.extend((part.table, at) for at in places)
        return holds(part, tables, places)

    def asked(*args):
        looked.append("strategies")
        return asks(*args)

    with (
        mock.patch.object(subject._Part, "holds", noted),
        mock.patch.object(subject, "_strategies", asked),
    ):
        assert side.session([]) is not None
        assert not looked
        side.model.thing = object()
        assert side.session([]) is not None
        assert looked == ["strategies"]
        assert side.session([]) is not None
        assert looked == ["strategies"]
        side.model.leaves[1]._buffers["more"] = None
        assert side.skeleton.body(side.model) is None
        assert looked == ["strategies", ("_buffers", 3)]
