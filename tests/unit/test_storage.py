"""Fingerprints say whether a tensor is where it was; twins are like the tensor they stand for."""

import functools

import pytest
import torch
from torch import nn

from weightload.errors import UnsupportedError
from weightload.storage import (
    Fingerprint,
    TensorSpec,
    describe_change,
    inner_tensors,
    make_twins,
    new_group,
    rebound,
    select,
    storage_key,
)

# ------------------------------------------------------------------------------ fingerprints


def test_a_tensor_does_not_differ_from_itself_whatever_its_values():
    tensor = torch.zeros(4)
    mark = Fingerprint.of(tensor)
    tensor.fill_(3)
    assert mark.difference(tensor) is None
    assert mark.difference(tensor.detach()) is None


def test_an_equal_tensor_elsewhere_differs():
    assert Fingerprint.of(torch.zeros(4)).difference(torch.zeros(4)) == "it has another storage"


def test_memory_that_was_freed_and_used_again_is_not_the_same():
    """The fingerprint holds the old storage, so that no new one can get its address."""
    tensor = torch.zeros(1000)
    mark = Fingerprint.of(tensor)
    del tensor
    for _ in range(10):
        assert mark.difference(torch.zeros(1000)) == "it has another storage"


def test_empty_tensors_at_address_zero_are_told_apart():
    assert Fingerprint.of(torch.empty(0)).difference(torch.empty(0)) == "it has another storage"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t[1:], "offset"),
        (lambda t: t[:, :2], "shape"),
        (lambda t: t.t(), "stride"),
        (lambda t: t.view(torch.int32), "dtype"),
    ],
)
def test_another_view_of_the_same_storage_differs(change, said):
    tensor = torch.zeros(3, 3)
    assert said in Fingerprint.of(tensor).difference(change(tensor))


def test_a_storage_that_was_resized_differs():
    tensor = torch.zeros(4)
    mark = Fingerprint.of(tensor)
    tensor.untyped_storage().resize_(1024)
    assert mark.difference(tensor) is not None


def test_a_parameter_whose_data_was_rebound_differs():
    parameter = nn.Parameter(torch.zeros(4))
    mark = Fingerprint.of(parameter)
    parameter.data = torch.zeros(4)
    assert mark.difference(parameter) == "it has another storage"


def test_a_tensor_that_went_to_meta_differs():
    assert Fingerprint.of(torch.zeros(4)).difference(torch.zeros(4, device="meta")) is not None


# ------------------------------------------------------------------------------ fitting


@pytest.mark.parametrize(
    ("live", "new", "said"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3), None),
        (torch.zeros(2, 3), torch.ones(3, 2), "shape (2, 3) became (3, 2)"),
        (torch.zeros(2, 3), torch.ones(1, 3), "shape (2, 3) became (1, 3)"),
        (torch.zeros(2), torch.ones(2).double(), "dtype torch.float32 became torch.float64"),
        (torch.zeros(2, 2), torch.ones(2, 2).t(), "stride (2, 1) became (1, 2)"),
        (torch.zeros(2), torch.ones(2, device="meta"), "device cpu became meta"),
        (torch.zeros(2), torch.ones(2).to_sparse(), "layout torch.strided became torch.sparse_coo"),
        (torch.zeros(0, 3), torch.ones(3, 0).t(), None),
        (torch.zeros(1, 3), torch.ones(3, 1).t(), None),
    ],
)
def test_a_new_value_fits_if_it_can_be_copied_as_it_is(live, new, said):
    assert describe_change(live, new) == said


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_fits_nothing_but_itself():
    """What is copied into it through a view brings its integers and leaves its scale."""
    plain = torch.ones(2)
    one, two = (torch.quantize_per_tensor(plain, scale, 0, torch.qint8) for scale in (0.1, 0.2))
    for live, new in ((one, two), (one, plain), (plain, one), (one, one.clone())):
        assert describe_change(live, new).startswith("a quantized tensor of torch has scales")
    assert describe_change(one, one) is None
    with pytest.raises(UnsupportedError, match=r"torch\.qint8 and shape \(2,\)"):
        TensorSpec.of(one)


# ------------------------------------------------------------------------------ twins


class Special(nn.Parameter):
    """A parameter with a loader of its own."""

    def load(self, tensor):
        self.data.copy_(tensor)


def allocated(specs):
    """Make twins and give them their memory, as the first write does."""
    twins = make_twins(specs)
    for twin, spec in zip(twins, specs, strict=True):
        assert twin.untyped_storage().nbytes() == 0 or twin.untyped_storage().nbytes()
        twin.untyped_storage().resize_(spec.nbytes)
    return twins


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(10)[2:8:2],
        torch.zeros(()),
        torch.zeros(0, 4),
        nn.Parameter(torch.zeros(3), requires_grad=False),
        nn.Parameter(torch.zeros(3)),
        Special(torch.zeros(3), requires_grad=False),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.int8),
    ],
    ids=lambda tensor: f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype}",
)
def test_a_twin_is_like_its_tensor_and_elsewhere(tensor):
    [twin] = allocated([TensorSpec.of(tensor)])
    assert type(twin) is type(tensor)
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(twin, name) == getattr(tensor, name)
    assert twin.stride() == tensor.stride()
    assert twin.storage_offset() == tensor.storage_offset()
    assert storage_key(twin) != storage_key(tensor)


def test_a_twin_has_no_memory_before_it_is_needed():
    [twin] = make_twins([TensorSpec.of(torch.zeros(1000, 1000))])
    assert twin.untyped_storage().nbytes() == 0


def test_a_twin_has_the_attributes_of_its_tensor():
    tensor = nn.Parameter(torch.zeros(3))
    tensor.output_dim = 0
    tensor.weight_loader = print
    [twin] = make_twins([TensorSpec.of(tensor)])
    assert (twin.output_dim, twin.weight_loader) == (0, print)
    twin.output_dim = 1
    assert tensor.output_dim == 0


def test_a_loader_bound_to_the_tensor_is_bound_to_the_twin():
    """Otherwise it would write into the tensor that is being served."""
    tensor = Special(torch.zeros(3), requires_grad=False)
    tensor.weight_loader = tensor.load
    tensor.partial_loader = functools.partial(tensor.load, tensor=torch.ones(3))
    [twin] = allocated([TensorSpec.of(tensor)])
    twin.weight_loader(torch.full((3,), 2.0))
    assert torch.equal(twin, torch.full((3,), 2.0))
    twin.partial_loader()
    assert torch.equal(twin, torch.ones(3))
    assert torch.equal(tensor, torch.zeros(3))


def test_a_spec_keeps_no_data_alive():
    import weakref

    tensor = Special(torch.zeros(3), requires_grad=False)
    tensor.weight_loader = tensor.load
    gone = weakref.ref(tensor)
    spec = TensorSpec.of(tensor)
    del tensor
    import gc

    gc.collect()
    assert gone() is None
    assert spec.shape == (3,)


def test_specs_of_one_group_get_twins_that_share_memory():
    """Two views of one storage stay views of one storage."""
    base = torch.zeros(4, 4)
    group = new_group()
    whole, row = allocated([TensorSpec.of(base, group), TensorSpec.of(base[1], group)])
    whole.fill_(5)
    assert torch.equal(row, torch.full((4,), 5.0))
    assert storage_key(whole) == storage_key(row)


def test_equal_specs_of_one_group_get_the_same_twin():
    """Tied parameters are one object."""
    tensor = nn.Parameter(torch.zeros(2))
    group = new_group()
    one, two = make_twins([TensorSpec.of(tensor, group), TensorSpec.of(tensor, group)])
    assert one is two
    three, four = make_twins([TensorSpec.of(tensor), TensorSpec.of(tensor)])
    assert three is not four


# ------------------------------------------------------------------------------ small things


def test_rebound_leaves_what_belongs_to_others():
    one, two, three = Special(torch.zeros(1)), Special(torch.zeros(1)), Special(torch.zeros(1))
    assert rebound(one.load, one, two).__self__ is two
    assert rebound(three.load, one, two).__self__ is three
    assert rebound("text", one, two) == "text"
    made = rebound(functools.partial(print, one, three, end=one), one, two)
    assert made.args[0] is two
    assert made.args[1] is three
    assert made.keywords["end"] is two


def test_select_returns_the_view_that_a_region_names():
    tensor = torch.arange(12).view(3, 4)
    part = select(tensor, ((0, 3, 2), (1, 3, 1)))
    assert part.tolist() == [[1, 2], [9, 10]]
    part.zero_()
    assert int(tensor[2, 1]) == 0
    assert select(torch.tensor(5), ()).item() == 5


class Wrapper(torch.Tensor):
    """Its data is in a tensor that it holds; what it says of its own storage is only a name."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Telling(Wrapper):
    """Says what it holds."""

    def __tensor_flatten__(self):
        return ["inner"], None


@pytest.mark.parametrize("cls", [Wrapper, Telling])
def test_wrappers_without_memory_of_their_own_share_no_key(cls):
    one, two = cls(torch.zeros(2)), cls(torch.zeros(2))
    assert storage_key(torch.zeros(2)) is not None
    assert storage_key(one) is None or storage_key(one) != storage_key(two)


@pytest.mark.parametrize("cls", [Wrapper, Telling])
def test_the_fingerprint_of_a_wrapper_is_that_of_the_tensors_inside(cls):
    """The wrapper stays the same object when its data moves away."""
    wrapper = cls(torch.zeros(2))
    mark = Fingerprint.of(wrapper)
    wrapper.inner.fill_(3)
    assert mark.difference(wrapper) is None
    assert mark.difference(cls(wrapper.inner)) is None
    wrapper.inner = torch.zeros(2)
    assert mark.difference(wrapper) == "inner tensor 'inner': it has another storage"
    assert mark.difference(torch.zeros(2)) is not None


def test_the_fingerprint_of_a_sparse_tensor_is_that_of_its_indices_and_values():
    sparse = torch.eye(3).to_sparse()
    mark = Fingerprint.of(sparse)
    sparse._values().fill_(3)
    assert mark.difference(sparse) is None
    sparse.copy_(torch.ones(3, 3).to_sparse())
    assert "another storage" in mark.difference(sparse)


def test_inner_tensors_are_those_that_hold_the_data():
    plain = torch.zeros(2)
    plain.attached = torch.zeros(3)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.attached = torch.zeros(3)
    wrapper = Telling(plain)
    wrapper.attached = torch.zeros(3)
    assert inner_tensors(plain) == inner_tensors(parameter) == {}
    assert inner_tensors(wrapper) == {"inner": plain}
    assert inner_tensors(torch.eye(2).to_sparse()).keys() == {"_indices", "_values"}
