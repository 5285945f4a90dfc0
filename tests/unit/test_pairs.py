"""New values go into live tensors that may share memory, and no copy may spoil another."""

import pytest
import torch
from torch import nn

from weightload.pairs import Pairs, same_bits, same_values
from weightload.storage import inner_tensors


def other(where):
    return f"it shares memory with {where}, whose new value is another"


def added(*entries):
    """Enter pairs of live and new tensor; return the pairs and what was said to each."""
    pairs = Pairs()
    return pairs, [pairs.add(live, new, f"#{n}") for n, (live, new) in enumerate(entries)]


def test_a_value_goes_where_it_belongs():
    live, new = torch.zeros(3), torch.ones(3)
    pairs, said = added((live, new))
    assert said == [None]
    assert pairs.paths == ["#0"]
    assert torch.equal(live, torch.zeros(3)), "nothing is copied before it is asked for"
    assert pairs.copy() == 12
    assert torch.equal(live, torch.ones(3))


def test_one_pair_is_copied_once():
    live, new = torch.zeros(3), torch.ones(3)
    pairs, _ = added((live, new), (live, new))
    assert len(pairs.copies) == len(pairs.paths) == 1


def test_what_does_not_fit_is_not_entered():
    pairs, said = added((torch.zeros(3), torch.zeros(4)))
    assert said == ["shape (3,) became (4,)"]
    assert pairs.copies == []


def test_one_live_tensor_cannot_have_two_values():
    """The last copy would win, and nobody would hear of it."""
    live = torch.zeros(3)
    pairs, said = added((live, torch.ones(3)), (live, torch.full((3,), 2.0)))
    assert said == [None, other("#0")]
    pairs.copy()
    assert torch.equal(live, torch.ones(3))


def test_one_live_tensor_can_have_one_value_twice():
    live = torch.zeros(3)
    _, said = added((live, torch.ones(3)), (live, torch.ones(3)))
    assert said == [None, None]


def test_equal_means_the_same_bits():
    """NaN is equal to NaN, and 0 is not -0."""
    nan = torch.full((2,), float("nan"))
    live = torch.ones(2)
    assert added((live, nan), (live, nan.clone()))[1] == [None, None]
    assert added((live, torch.zeros(2)), (live, -torch.zeros(2)))[1] == [None, other("#0")]


TYPES = sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str)
"""Every type of elements that torch has."""
SCALED = [t for t in TYPES if str(t).startswith("torch.q")]


@pytest.mark.parametrize("dtype", [t for t in TYPES if t not in SCALED], ids=str)
def test_bits_are_compared_whatever_the_type(dtype):
    """Torch itself does not compare all of them."""
    width = 2 * max(dtype.itemsize, 8)
    octets = torch.arange(4 * width, dtype=torch.uint8).view(4, width)
    one, same, other = (some.view(dtype) for some in (octets, octets.clone(), octets + 1))
    assert one.shape[1] > 1
    for look in (
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[1:, 1:],  # begins where no word does
        lambda t: t[:, ::2],
        lambda t: t[0, 1],
        lambda t: t[:1, ::2][:, :1],  # one element with the strides of many
        lambda t: t[:1].expand(3, -1),
    ):
        assert same_bits(look(one), look(same))
        assert not same_bits(look(one), look(other))
    assert same_bits(one[:, :0], other[:, :0])
    assert not same_bits(one, one[:2])
    assert same_bits(nn.Parameter(one, requires_grad=False), same)


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view])
def test_bits_are_those_that_a_tensor_stands_for(turn):
    """A conjugate, or a negative, may be a mere look at the memory of what it is made of."""
    one = torch.randn(3, dtype=torch.complex64)
    assert same_bits(turn(one), turn(one).clone())
    assert not same_bits(turn(one), one)


def test_the_memory_of_two_tensors_is_compared_where_it_is(monkeypatch):
    """A transposed weight and its new value are not copied, only to be looked at."""
    monkeypatch.setattr(torch.Tensor, "clone", None)
    one = torch.zeros(4, 3, 2).permute(2, 0, 1)
    seen = []
    monkeypatch.setattr(torch, "equal", lambda *tensors: seen.extend(tensors))
    same_bits(one, one)
    assert [tensor.data_ptr() for tensor in seen] == [one.data_ptr()] * 2


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_compared_counts_as_different():
    matrix = torch.zeros(2, 2)
    opaque = matrix.to_mkldnn()
    scaled = torch.quantize_per_tensor(matrix, 1.0, 0, torch.qint8)
    for one in (opaque, scaled, matrix.to("meta")):
        assert not same_bits(one, one)
    for other in (opaque, matrix.to_sparse(), matrix.view(4)):
        assert not same_bits(matrix, other)
        assert not same_values(matrix, other)
    assert not same_bits(matrix, matrix.double())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_bits_of_a_sparse_tensor_are_those_of_what_it_consists_of(layout):
    one = torch.eye(3).to_sparse(layout=layout)
    assert same_bits(one, one.clone())
    assert not same_bits(one, one * 2)
    assert not same_bits(one, torch.eye(3).flip(0).to_sparse(layout=layout))


def test_values_are_the_same_if_they_are_equal_or_of_the_same_bits():
    zeros, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert same_values(zeros, -zeros)
    assert same_values(nan, nan.clone())
    assert not same_values(zeros, nan)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_views_that_overlap_in_part(dtype):
    """Rows 0 to 2 and rows 1 to 3: row 1 and 2 must get one value from both."""
    live = torch.zeros(4, 2).to(dtype)
    whole = torch.arange(8.0).view(4, 2).to(dtype)
    fitting = added((live[:3], whole[:3].clone()), (live[1:], whole[1:].clone()))
    assert fitting[1] == [None, None]
    fitting[0].copy()
    assert same_bits(live, whole)
    assert added((live[:3], whole[:3].clone()), (live[1:], whole[:3].clone()))[1] == [
        None,
        other("#0"),
    ]


def test_views_that_interleave_do_not_overlap():
    """Two columns of one matrix cover the same range of bytes and share none."""
    live = torch.zeros(4, 2)
    pairs, said = added(
        (live[:, :1], torch.ones(4, 2)[:, :1]), (live[:, 1:], torch.full((4, 2), 2.0)[:, 1:])
    )
    assert said == [None, None]
    pairs.copy()
    assert torch.equal(live, torch.tensor([[1.0, 2.0]] * 4))


def test_views_of_another_type_are_compared_byte_by_byte():
    live = torch.zeros(4)
    new = torch.arange(4.0)
    fits = new.clone().view(torch.int32)
    assert added((live, new), (live.view(torch.int32), fits))[1] == [None, None]
    assert added((live, new), (live.view(torch.int32), fits + 1))[1] == [None, other("#0")]


def test_new_tensors_that_overlap_as_the_live_ones_do_are_not_compared(monkeypatch):
    """That is the ordinary case, and needs no memory and no time."""
    monkeypatch.setattr("weightload.pairs.same_bits", None)
    live, new = torch.zeros(4, 4), torch.ones(4, 4)
    rows = [(live[n : n + 2], new[n : n + 2]) for n in range(3)]
    assert added((live, new), *rows)[1] == [None] * 4


def test_a_tensor_that_keeps_its_value_is_not_overwritten_through_another():
    live = torch.zeros(4)
    pairs = Pairs()
    assert pairs.hold(live, "held") is None
    assert pairs.add(live[1:3], torch.ones(2), "part") == other("held")
    assert pairs.add(live[1:3], torch.zeros(2), "part") is None
    assert pairs.add(live[1:3], live[1:3], "itself") is None
    assert pairs.copies[0][1].tolist() == [0, 0]


def test_a_tensor_that_is_to_keep_what_is_going_to_be_overwritten():
    live = torch.zeros(4)
    pairs, _ = added((live[1:3], torch.ones(2)))
    assert pairs.hold(live, "held") == other("#0")


def test_the_same_view_of_the_same_memory_needs_no_copy():
    live = torch.zeros(4)
    pairs, said = added((live[1:3], live[1:3]))
    assert said == [None]
    assert pairs.copies == []


def test_two_buffers_are_swapped():
    """Each is the other's new value; the first copy must not spoil the second."""
    front, back = torch.zeros(3), torch.ones(3)
    pairs, said = added((front, back), (back, front))
    assert said == [None, None]
    pairs.copy()
    assert torch.equal(front, torch.ones(3))
    assert torch.equal(back, torch.zeros(3))


def test_three_buffers_are_rotated_through_views():
    live = [torch.full((2,), float(n)) for n in range(3)]
    pairs, _ = added(*((one, live[n - 1].view(1, 2)[0]) for n, one in enumerate(live)))
    pairs.copy()
    assert [one.tolist() for one in live] == [[2, 2], [0, 0], [1, 1]]


def test_a_value_that_lies_across_its_own_place_is_moved_whole():
    memory = torch.arange(6.0)
    pairs, said = added((memory[:4], memory[2:]))
    assert said == [None]
    pairs.copy()
    assert memory.tolist() == [2, 3, 4, 5, 4, 5]


def test_an_expanded_tensor_is_written_once():
    """Plain copy_ refuses it: many elements, one place in memory."""
    live = torch.zeros(3, 1).expand(3, 4)
    pairs, said = added((live, torch.arange(3.0).view(3, 1).expand(3, 4)))
    assert said == [None]
    pairs.copy()
    assert live.tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_tensors_made_in_inference_mode_are_written():
    """What a forward pass made there cannot be written outside, except by asking for it."""
    with torch.inference_mode():
        live = torch.zeros(3)
    pairs, _ = added((live, torch.ones(3)))
    pairs.copy()
    assert torch.equal(live, torch.ones(3))


def test_empty_tensors_and_tensors_without_data_share_nothing():
    empty, meta = torch.zeros(0), torch.zeros(3, device="meta")
    assert added((empty, torch.zeros(0)), (empty, torch.zeros(0)))[1] == [None, None]
    made = [torch.zeros(3, device="meta") for _ in range(2)]
    assert added(*((meta, one) for one in made))[1] == [None, None]


def test_what_was_entered_can_be_taken_back():
    live = torch.zeros(3)
    pairs = Pairs()
    mark = pairs.mark()
    assert pairs.add(live, torch.ones(3), "first") is None
    pairs.back_to(mark)
    assert (pairs.copies, pairs.paths) == ([], [])
    assert pairs.add(live, torch.full((3,), 2.0), "second") is None


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_of_which_a_part_does_not_fit_is_left_as_it_is():
    """Half of it would be neither the old value nor the new one."""
    live = torch.eye(3).to_sparse_csr()
    new = torch.tensor([[0.0, 2, 0], [2, 0, 0], [0, 0, 2]]).to_sparse_csr()
    more = torch.ones(3, 3).to_sparse_csr()
    pairs = Pairs()
    assert pairs.add(live, more, "more").startswith("inner tensor 'col_indices': shape")
    assert pairs.copies == []
    assert pairs.add(live, new, "new") is None
    assert pairs.paths == [f"new.{name}" for name in inner_tensors(live)]
    pairs.copy()
    assert torch.equal(live.to_dense(), new.to_dense())
