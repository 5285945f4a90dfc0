"""A skeleton notices what loaders or copies could see, and nothing else; a portrait says what that is."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weightload.registry import ModuleRegistry
from weightload.session import WeightLoadSession
from weightload.skeleton import Skeleton


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
    "a buffer that no checkpoint has": lambda m: m._non_persistent_buffers_set.add("scale"),
    "a buffer behind an attribute": lambda m: m._buffers.update(table=None),
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


NOT_KEPT = "_non_persistent_buffers_set"
FILLED = {"leaves.0": {"weight"}}


def portrait(model):
    """Return all that loaders or copies could see of a model, as plain values and the objects.

    Written for this test, by looking at each thing by itself.
    """
    found = {}
    for path, module in model.named_modules():
        mine = vars(module)
        plain = {}
        for name, value in mine.items():
            bare = name in vars(nn.Module()) and name not in ("training", NOT_KEPT)
            if bare or name in FILLED.get(path, ()) or callable(value):
                continue
            if isinstance(value, torch.Tensor):
                value = str(value.dtype), value.tolist()
            if isinstance(value, int | float | str | tuple | list | dict | set):
                plain[name] = repr(value)
        tables = [
            [(name, value) for name, value in mine[table].items()]
            for table in ("_modules", "_parameters", "_buffers")
        ]
        forms = [
            (value.shape, value.dtype, value.stride())
            for table in tables[1:]
            for _, value in table
            if value is not None
        ]
        numbers = [
            value.tolist()
            for name, value in tables[2]
            if value is not None and not value.is_floating_point()
        ]
        found[path] = module, type(module), plain, tables, forms, numbers
    return found


def same(one, two):
    """Whether two portraits show the same; objects are compared by identity."""
    if isinstance(one, list | tuple) and type(one) is type(two) and len(one) == len(two):
        return all(map(same, one, two))
    if isinstance(one, torch.Tensor | nn.Module) or isinstance(two, torch.Tensor | nn.Module):
        return one is two
    return one == two


class Side:
    """A model, what is remembered of it, and its portrait of then."""

    def __init__(self):
        self.model = Model()
        self.registry = ModuleRegistry()
        self.remember()

    def remember(self):
        modules = dict(self.model.named_modules())
        filled = [f"{path}.{name}" for path, names in FILLED.items() for name in names]
        self.skeleton = Skeleton.of(modules, self.registry, filled)
        self.portrait = portrait(self.model)

    def look(self):
        """Return what the model consists of, if it is what it was, and see that this is right."""
        body = self.skeleton.body(self.model)
        now = portrait(self.model)
        alike = self.portrait.keys() == now.keys() and all(
            same(self.portrait[path], now[path]) for path in now
        )
        assert (body is not None) is alike
        return body


STEPS = st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 4))


@settings(deadline=None, max_examples=300)
@given(st.lists(STEPS, max_size=8))
def test_a_model_is_another_where_loaders_or_copies_could_see_it(steps):
    side = Side()
    for what, at in steps:
        _change(side.model, what, at)
        if side.look() is None:
            side.remember()
            assert side.look() is not None


@pytest.mark.parametrize("first", sorted(CHANGES))
def test_any_two_changes_are_noticed(first):
    for second in CHANGES:
        side = Side()
        _change(side.model, first, 1)
        side.look()
        _change(side.model, second, 1)
        side.look()


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_what_changes_while_a_session_is_open_is_named(what):
    """Only parameters and buffers count then: where they are, their names, addresses and shapes."""
    side = Side()
    body = side.look()
    assert body.guard(WeightLoadSession(side.model))
    body.hold()

    def tensors():
        return {
            name: (tensor, tensor.data_ptr(), tensor.shape)
            for kind in (side.model.named_parameters, side.model.named_buffers)
            for name, tensor in kind(remove_duplicate=False)
        }

    before = tensors()
    _change(side.model, what, 0)
    now = tensors()
    gone, new = before.keys() - now.keys(), now.keys() - before.keys()
    other = {
        name
        for name in before.keys() & now.keys()
        if before[name][0] is not now[name][0] or before[name][1:] != now[name][1:]
    }
    problems = body.changes()
    assert {one.partition(":")[0] for one in problems} == gone | new | other
    body.let_compute()
    left = sum("forward" in vars(module) for module in body.modules.values())
    assert left == (what == "its own forward")
