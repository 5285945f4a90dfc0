"""New values go into old memory wherever old and new hold a tensor at the same place."""

import collections
import enum
import functools
import re
import threading
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightload.derived import Reconciliation
from weightload.record import MISSING
from weightload.storage import inner_tensors
from weightload.testing.sharing import AddressHandle

Point = namedtuple("Point", ["x", "y"])


def tensor(value):
    return torch.full((2,), float(value))


class Color(enum.Enum):
    RED = 1


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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (None, tensor(2), "layer: None became a tensor"),
        (MISSING, tensor(2), "layer: it was not there before"),
        ({}, {"a": tensor(2)}, "layer['a']: it was not there before"),
        ([], [tensor(2)], "layer[0]: it was not there before"),
        ((1,), (1, tensor(2)), "layer[1]: it was not there before"),
        ({"a": None}, {"a": [tensor(2)]}, "layer['a'][0]: None became list"),
    ],
)
def test_a_tensor_that_was_not_there_before_is_taken_and_named(old, new, said):
    """No captured graph computes with it."""
    found = Reconciliation()
    assert found.match(old, new, "layer") is new
    assert (found.copies, found.moved) == ([], [said])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (tensor(1), None, "layer: a tensor became None"),
        (tensor(1), MISSING, "layer: it is gone"),
        (tensor(1), 2.5, "layer: a tensor became float"),
        ({"a": tensor(1)}, {}, "layer['a']: it is gone"),
        ([1, tensor(1)], [1], "layer[1]: it is gone"),
        ((1, tensor(1)), (1,), "layer[1]: it is gone"),
        ({"a": [tensor(1)]}, {"a": None}, "layer['a'][0]: list became None"),
        (Plain(tensor(1)).apply, None, "layer.scale: method became None"),
        (closure(tensor(1)), 3, "layer.scale: function became int"),
    ],
)
def test_a_tensor_that_vanishes_is_named(old, new, said):
    """A captured graph still reads it."""
    found = Reconciliation()
    assert found.match(old, new, "layer") is new
    assert (found.copies, found.moved) == ([], [said])


def test_what_only_changes_its_place_is_not_named():
    """A list that was sorted anew, a key of another name: the tensor is kept all the same."""
    one, two, three = tensor(1), tensor(2), tensor(3)
    found = Reconciliation()
    found.match({"a": one, "b": [two]}, {"c": one, "b": [two], "d": two}, "layer")
    assert found.moved == []
    found.match({three}, {three}, "layer")
    assert found.moved == []


def test_the_tensors_of_a_set_are_named():
    """Nothing says which item of the new set stands where one of the old set stood."""
    shared = tensor(3)
    found = Reconciliation()
    new = {tensor(2), shared}
    assert found.match({tensor(1), shared}, new, "layer") is new
    assert found.moved == ["layer[0]: nothing says which item of a set it was"]


def test_objects_of_different_types_are_not_compared():
    """An engine that switches to another kernel gets that kernel as it was made."""
    new = Plain(tensor(2))
    found = Reconciliation()
    assert found.match(Slotted(tensor(1)), new, "layer") is new
    assert found.copies == []
    assert found.moved == ["layer.scale: Slotted became Plain"]


def test_classes_that_a_hook_defines_anew_are_the_same_kind():
    """A class statement inside a hook makes another class object in each pass."""

    def make(value):
        class Config:
            def __init__(self, scale):
                self.scale = scale

        return Config(value)

    old, new = make(tensor(1)), make(tensor(2))
    assert type(old) is not type(new)
    found = Reconciliation()
    found.match(old, new, "layer")
    found.apply()
    assert new.scale is old.scale


def test_closures_of_different_code_are_not_compared():
    found = Reconciliation()
    new = closure(tensor(2))
    found.match(with_default(tensor(1)), new, "layer")
    assert found.copies == []
    assert found.moved == [
        "layer.kwdefaults['by']: function became another function",
        "layer.scale: function became another function",
    ]


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
    assert found.opaque_paths == ["layer[0]"]
    assert found.copies == []
    assert found.moved == []


def test_an_opaque_object_inside_what_cannot_be_compared_is_found():
    """What the hook made must live as long as it does, wherever it is."""
    found = Reconciliation()
    found.match(None, {"kernel": [AddressHandle(tensor(1))]}, "layer")
    assert found.opaque_paths == ["layer['kernel'][0]"]


def test_what_holds_neither_tensor_nor_resource_is_not_opaque():
    """Locks, patterns and ranges are made anew by many a constructor."""
    made = [
        (threading.Lock(), re.compile("a"), range(3), slice(1), Color.RED, torch.float, ..., b"x")
        for _ in range(2)
    ]
    found = Reconciliation()
    found.match(*made, "layer")
    assert found.opaque_paths == []


def test_numbers_and_text_are_taken_as_the_hook_made_them():
    found = Reconciliation()
    assert found.match({"a": 1, "b": "x"}, {"a": 2, "b": "y"}, "layer") == {"a": 2, "b": "y"}
    assert not found.opaque


def test_a_place_that_only_one_of_both_has_is_left_alone_and_named():
    old, new = Plain(tensor(1)), Plain(tensor(2))
    old.only_old, new.only_new = tensor(3), tensor(4)
    found = Reconciliation()
    found.match(old, new, "layer")
    found.apply()
    assert new.scale is old.scale
    assert torch.equal(new.only_new, tensor(4))
    assert not hasattr(new, "only_old")
    assert found.moved == ["layer.only_old: it is gone", "layer.only_new: it was not there before"]


# ------------------------------------------------------------------------------ shared memory


def test_two_places_that_shared_one_tensor_and_have_two_values_now():
    """One tensor cannot hold both: the first place keeps it, the second is named."""
    shared = tensor(1)
    old, new = {"a": shared, "b": shared}, {"a": tensor(2), "b": tensor(3)}
    mine = new["b"]
    found = Reconciliation()
    found.match(old, new, "layer")
    assert found.moved == [
        "layer['b']: it shares memory with layer['a'], whose new value is another"
    ]
    found.pairs.copy()
    found.apply()
    assert new["a"] is shared
    assert new["b"] is mine
    assert torch.equal(new["a"], tensor(2))
    assert torch.equal(new["b"], tensor(3))


def test_two_places_that_shared_one_tensor_and_have_equal_values_now():
    """They stay one."""
    shared = tensor(1)
    old, new = {"a": shared, "b": shared}, {"a": tensor(2), "b": tensor(2)}
    found = Reconciliation()
    found.match(old, new, "layer")
    found.pairs.copy()
    found.apply()
    assert found.moved == []
    assert new["a"] is new["b"] is shared
    assert torch.equal(shared, tensor(2))


def test_a_tensor_that_must_keep_its_value_and_would_be_overwritten_is_a_conflict():
    """It was found too late to choose another way; a commit refuses this."""
    base = torch.arange(4.0)
    old, new = {"a": base[1:3], "b": base}, {"a": tensor(9), "b": base}
    found = Reconciliation()
    found.match(old, new, "layer")
    [text] = found.conflicts
    assert text.startswith("layer['b']: it shares memory with layer['a']")


# ------------------------------------------------------------------------------ hidden places


def test_a_bound_method_of_a_tensor_is_bound_to_the_old_one():
    """In Python or in C, it would compute with memory that nobody refreshes."""

    class Scale(torch.Tensor):
        def apply(self, x):
            return x * self

    old, new = (torch.full((2,), float(v)).as_subclass(Scale) for v in (1, 2))
    found = Reconciliation()
    value = found.match([old.apply, old.mul], [new.apply, new.mul], "layer")
    assert len(found.copies) == 1
    found.pairs.copy()
    found.apply()
    assert [method.__self__ is old for method in value] == [True, True]
    assert value[1](torch.ones(2)).tolist() == [2, 2]


def test_a_partial_stays_the_object_that_the_hook_made():
    """Others may hold it already."""
    old, new = functools.partial(torch.mul, tensor(1)), functools.partial(torch.mul, tensor(2))
    found = Reconciliation()
    assert found.match(old, new, "layer") is new
    found.pairs.copy()
    found.apply()
    assert new.args[0] is old.args[0]
    assert new(torch.ones(2)).tolist() == [2, 2]


class Hidden:
    __slots__ = ("__scale",)

    def __init__(self, scale):
        self.__scale = scale

    @property
    def scale(self):
        return self.__scale


class Listing(list):
    """A list with an attribute."""


def listing(value):
    made = Listing([value])
    made.scale = value * 3
    return made


def function_with_attribute(value):
    def apply(x):
        return x * apply.scale

    apply.scale = value
    return apply


HIDDEN = {
    "private slot": (Hidden, lambda v: [v.scale]),
    "queue": (lambda t: collections.deque([t]), lambda v: [v[0]]),
    "list with attributes": (listing, lambda v: [v[0], v.scale]),
    "attribute of a function": (function_with_attribute, lambda v: [v.scale]),
    "attribute of a tensor": (lambda t: attach(torch.zeros(2), t), lambda v: [v.scale]),
    "cached property": (lambda t: cached(t), lambda v: [v.doubled]),
}


def attach(owner, value):
    owner.scale = value
    return owner


class Cached:
    def __init__(self, value):
        self.value = value

    @functools.cached_property
    def doubled(self):
        return self.value * 2


def cached(value):
    made = Cached(value)
    made.doubled  # noqa: B018
    return made


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_tensor_is_found_where_few_would_look(kind):
    make, tensors_of = HIDDEN[kind]
    old, new = make(tensor(1)), make(tensor(2))
    kept, wanted = tensors_of(old), [value.clone() for value in tensors_of(new)]
    found = Reconciliation()
    value = found.match(old, new, "layer")
    found.pairs.copy()
    found.apply()
    assert [id(one) for one in tensors_of(value)] == [id(one) for one in kept]
    assert all(map(torch.equal, tensors_of(value), wanted))
    assert found.moved == []


# ------------------------------------------------------------------------------ tensors in tensors


class Bare(torch.Tensor):
    """A wrapper: its data is in tensors that it holds. It does not say which."""

    @staticmethod
    def __new__(cls, data, scale, factor=1):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale, factor=1):
        self.data_, self.scale, self.factor = data, scale, factor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"nothing needs {func}")
        return cls(args[0].data_, args[0].scale, args[0].factor)


class Packed(Bare):
    """A wrapper that says what it holds."""

    def __tensor_flatten__(self):
        return ["data_", "scale"], self.factor

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["data_"], inner["scale"], context)


def packed(value, factor=1, cls=Packed):
    return cls(torch.full((2,), value, dtype=torch.int8), torch.full((1,), value / 2), factor)


def taken(old, new):
    found = Reconciliation()
    value = found.match(old, new, "layer")
    found.pairs.copy()
    found.apply()
    return value, found


def test_a_wrapper_is_kept_with_the_tensors_inside_it():
    old, new = packed(1), packed(2)
    inner = old.data_, old.scale
    value, found = taken(old, new)
    assert value is old
    assert (old.data_, old.scale) == inner
    assert (old.data_.tolist(), old.scale.tolist()) == ([2, 2], [1.0])
    assert found.moved == []


def test_a_wrapper_whose_numbers_changed_is_made_anew_around_the_old_tensors():
    """What a graph knows are the tensors inside; the number is the new one."""
    old, new = packed(1, factor=1), packed(2, factor=7)
    value, found = taken(old, new)
    assert value is not old
    assert (value.data_ is old.data_, value.scale is old.scale) == (True, True)
    assert (value.factor, value.data_.tolist(), value.scale.tolist()) == (7, [2, 2], [1.0])
    assert found.moved == []


def test_wrappers_in_wrappers_are_entered():
    def nest(value):
        return Packed(packed(value), torch.full((1,), float(value)), 3)

    old, new = nest(1), nest(2)
    innermost = old.data_.data_
    value, found = taken(old, new)
    assert value is old
    assert old.data_.data_ is innermost
    assert (innermost.tolist(), old.data_.scale.tolist(), old.scale.tolist()) == (
        [2, 2],
        [1.0],
        [2.0],
    )
    assert found.moved == []


def test_a_parameter_that_is_a_wrapper_stays_a_parameter():
    old, new = (nn.Parameter(packed(v, factor=v), requires_grad=False) for v in (1, 2))
    inner = old.data_
    value, _ = taken(old, new)
    assert isinstance(value, nn.Parameter)
    assert type(value) is Packed
    assert value.data_ is inner
    assert (value.factor, inner.tolist()) == (2, [2, 2])


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (
            Packed(torch.ones(2, dtype=torch.int16), torch.ones(1)),
            "layer: inner tensor 'data_': dtype torch.int8 became torch.int16",
        ),
        (
            Packed(torch.full((2,), 9, dtype=torch.int8), torch.ones(3)),
            "layer: inner tensor 'scale': shape (1,) became (3,)",
        ),
        (torch.ones(2), "layer: type Packed became Tensor"),
    ],
)
def test_a_wrapper_that_does_not_fit_is_taken_whole(new, said):
    """No part of it may be copied: half a wrapper has a value that was never there."""
    old = packed(1)
    value, found = taken(old, new)
    assert value is new
    assert found.moved == [said]
    assert (old.data_.tolist(), old.scale.tolist()) == ([1, 1], [0.5])


def test_a_wrapper_that_does_not_say_what_it_holds_is_entered_by_its_attributes():
    old, new = packed(1, 1, Bare), packed(2, 7, Bare)
    inner = old.data_
    value, found = taken(old, new)
    assert value is new
    assert value.data_ is inner
    assert (value.factor, inner.tolist()) == (7, [2, 2])
    assert found.moved == []


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_keeps_its_indices_and_values(layout):
    old, new = (
        torch.diag(torch.tensor([v, 2 * v, 3 * v])).to_sparse(layout=layout) for v in (1.0, 2.0)
    )
    places = {name: part.data_ptr() for name, part in inner_tensors(old).items()}
    value, found = taken(old, new)
    assert value is old
    assert {name: part.data_ptr() for name, part in inner_tensors(old).items()} == places
    assert torch.equal(old.to_dense(), torch.diag(torch.tensor([2.0, 4, 6])))
    assert found.moved == []


def test_a_sparse_tensor_with_more_values_does_not_fit():
    old, new = torch.eye(3).to_sparse(), torch.ones(3, 3).to_sparse()
    value, found = taken(old, new)
    assert value is new
    assert found.moved == ["layer: inner tensor '_indices': shape (2, 3) became (2, 9)"]
    assert torch.equal(old.to_dense(), torch.eye(3))


def test_attributes_that_a_hook_gave_a_tensor_go_to_the_old_one():
    """Some backends hang scales on the weight itself."""
    old, new = attach(tensor(1), tensor(3)), attach(tensor(2), tensor(4))
    old.bound_later = "by the engine"
    new.factor = 5
    scale = old.scale
    value, found = taken(old, new)
    assert value is old
    assert old.scale is scale
    assert (scale.tolist(), old.factor, old.bound_later) == ([4, 4], 5, "by the engine")
    assert found.moved == []


def test_attributes_that_a_hook_found_on_a_tensor_and_left_stay_the_engines():
    old, new = tensor(1), tensor(2)
    old.mode, new.mode = "set later by the engine", "as constructed"
    found = Reconciliation(dressed={id(new): {"mode": new.mode}})
    found.match(old, new, "layer")
    found.apply()
    assert old.mode == "set later by the engine"
