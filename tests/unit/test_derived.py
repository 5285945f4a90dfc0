"""New values go into old memory wherever old and new hold a tensor at the same place."""

import functools
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightload.derived import Reconciliation
from weightload.testing.layers import AddressHandle

Point = namedtuple("Point", ["x", "y"])


def tensor(value):
    return torch.full((2,), float(value))


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class SlottedChild(Slotted):
    __slots__ = ("extra",)


class Plain:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale


def closure(scale):
    def apply(x):
        return x * scale

    return apply


def with_default(scale):
    def apply(x, *, by=scale):
        return x * by

    return apply


def child(scale):
    made = SlottedChild(scale)
    made.extra = scale * 2
    return made


KINDS = {
    "tensor": (lambda t: t, lambda v: [v]),
    "list": (lambda t: [1, t], lambda v: [v[1]]),
    "tuple": (lambda t: (t, "text"), lambda v: [v[0]]),
    "nested tuple": (lambda t: ((t,), [t]), lambda v: [v[0][0], v[1][0]]),
    "named tuple": (lambda t: Point(x=1, y=t), lambda v: [v.y]),
    "dict": (lambda t: {"a": t, 3: [t]}, lambda v: [v["a"], v[3][0]]),
    "ordered dict": (lambda t: OrderedDict(a=t), lambda v: [v["a"]]),
    "object": (Plain, lambda v: [v.scale]),
    "namespace": (lambda t: SimpleNamespace(scale=t), lambda v: [v.scale]),
    "slots": (Slotted, lambda v: [v.scale]),
    "inherited slots": (child, lambda v: [v.scale, v.extra]),
    "closure": (closure, lambda v: [v.__closure__[0].cell_contents]),
    "closure of a closure": (
        lambda t: closure(Plain(closure(t))),
        lambda v: [v.__closure__[0].cell_contents.scale.__closure__[0].cell_contents],
    ),
    "keyword default": (with_default, lambda v: [v.__kwdefaults__["by"]]),
    "partial": (
        lambda t: functools.partial(torch.mul, t, other=[t]),
        lambda v: [v.args[0], v.keywords["other"][0]],
    ),
    "bound method": (lambda t: Plain(t).apply, lambda v: [v.__self__.scale]),
    "module": (
        lambda t: nn.ParameterDict({"scale": nn.Parameter(t, requires_grad=False)}),
        lambda v: [v["scale"]],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_tensor_takes_the_place_and_the_value_of_the_new_one(kind):
    """The object is the new one, the memory the old one, the value the new one."""
    make, tensors_of = KINDS[kind]
    old, new = make(tensor(1)), make(tensor(2))
    kept = tensors_of(old)
    found = Reconciliation()
    value = found.match(old, new, "layer.kernel")
    assert all(torch.equal(one, two / 2) for one, two in zip(kept, tensors_of(new), strict=True))
    for before, after in found.copies:
        before.copy_(after)
    found.apply()
    now = tensors_of(value)
    assert [id(one) for one in now] == [id(one) for one in kept]
    assert all(torch.equal(one / one, torch.ones(2)) for one in now)
    first = now[0]
    assert torch.equal(first, tensor(2))
    assert found.moved == []
    if kind != "tensor":
        assert value is not old, "the object is the one that the hook made"


def test_nothing_is_changed_before_apply():
    """A commit that is refused must find everything as the hooks left it."""
    old, new = (
        {"a": [tensor(1)], "b": closure(tensor(1))},
        {"a": [tensor(2)], "b": closure(tensor(2))},
    )
    mine = new["a"][0], new["b"].__closure__[0].cell_contents
    found = Reconciliation()
    found.match(old, new, "layer")
    assert new["a"][0] is mine[0]
    assert new["b"].__closure__[0].cell_contents is mine[1]
    assert torch.equal(old["a"][0], tensor(1))


def test_a_tensor_that_two_places_share_is_copied_once_and_stays_shared():
    shared_old, shared_new = tensor(1), tensor(2)
    old, new = [shared_old, {"a": shared_old}], [shared_new, {"a": shared_new}]
    found = Reconciliation()
    found.match(old, new, "layer")
    assert len(found.copies) == 1
    found.apply()
    assert new[0] is new[1]["a"] is shared_old


def test_the_walk_ends_where_both_hold_the_same_object():
    """Configs and groups of the engine are shared, and must never be entered."""
    shared = Plain(tensor(1))
    found = Reconciliation()
    found.match([shared, 1], [shared, 2], "layer")
    assert found.copies == []


def test_a_cycle_does_not_hang():
    old, new = {"scale": tensor(1)}, {"scale": tensor(2)}
    old["self"], new["self"] = old, new
    found = Reconciliation()
    found.match(old, new, "layer")
    found.apply()
    assert new["scale"] is old["scale"]
    assert new["self"] is new


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (tensor(1), torch.ones(3), "layer: shape (2,) became (3,)"),
        (tensor(1), torch.ones(2).int(), "layer: dtype torch.float32 became torch.int32"),
        ([tensor(1)], [torch.ones(3)], "layer[0]: shape (2,) became (3,)"),
        ({"a": tensor(1)}, {"a": torch.ones(3)}, "layer['a']: shape (2,) became (3,)"),
        (Plain(tensor(1)), Plain(torch.ones(3)), "layer.scale: shape (2,) became (3,)"),
        (closure(tensor(1)), closure(torch.ones(3)), "layer.scale: shape (2,) became (3,)"),
        ((tensor(1),), (tensor(1), 2), "layer: 1 items became 2"),
        (3, tensor(2), "layer: int became a tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_moves_and_is_named(old, new, said):
    """The new one is taken, and the receipt counts it."""
    found = Reconciliation()
    value = found.match(old, new, "layer")
    found.apply()
    assert found.moved == [said]
    assert found.copies == []
    assert value is new


def test_what_was_not_there_before_is_simply_new():
    found = Reconciliation()
    new = tensor(2)
    assert found.match(None, new, "layer") is new
    assert found.match({}, {"a": tensor(2)}, "layer") is not None
    assert (found.copies, found.moved) == ([], [])


def test_objects_of_different_types_are_not_compared():
    """An engine that switches to another kernel gets that kernel as it was made."""
    new = Plain(tensor(2))
    found = Reconciliation()
    assert found.match(Slotted(tensor(1)), new, "layer") is new
    assert found.copies == []


def test_closures_of_different_code_are_not_compared():
    found = Reconciliation()
    new = closure(tensor(2))
    found.match(with_default(tensor(1)), new, "layer")
    assert found.copies == []


def test_a_tensor_of_another_class_is_still_a_value():
    """A parameter that became a plain tensor keeps its memory."""
    old, new = nn.Parameter(tensor(1), requires_grad=False), tensor(2)
    found = Reconciliation()
    assert found.match(old, new, "layer") is old


def test_an_opaque_object_is_taken_whole():
    """It may know the address of what the hook made, which nobody can patch."""
    scale = tensor(2)
    old, new = AddressHandle(tensor(1)), AddressHandle(scale)
    found = Reconciliation()
    assert found.match([old], [new], "layer") == [new]
    assert found.opaque
    assert found.copies == []


def test_numbers_and_text_are_taken_as_the_hook_made_them():
    found = Reconciliation()
    assert found.match({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, "layer") == {"a": 2, "b": "y"}
    assert not found.opaque


def test_a_place_that_only_one_of_both_has_is_left_alone():
    old, new = Plain(tensor(1)), Plain(tensor(2))
    old.only_old, new.only_new = tensor(3), tensor(4)
    found = Reconciliation()
    found.match(old, new, "layer")
    found.apply()
    assert new.scale is old.scale
    assert torch.equal(new.only_new, tensor(4))
    assert not hasattr(new, "only_old")
