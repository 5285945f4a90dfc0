"""Every write into a watched tensor is seen, whatever operation makes it, with its region."""

import pytest
import torch

from weightload import UnsupportedError
from weightload.observer import WriteObserver


class Notes:
    """Writes down what the observer says, and lets everything pass unless told otherwise."""

    def __init__(self):
        self.writes, self.done, self.reads, self.touched = [], [], [], []
        self.sources = []
        self.allow = True
        self.executed = 0

    def before_touch(self, storage):
        self.touched.append(storage)

    def before_write(self, watched, region, target, source):
        self.writes.append(region)
        self.sources.append(source)
        return self.allow

    def writing(self):
        self.executed += 1

    def after_write(self, watched, region):
        self.done.append(region)

    def before_read(self, watched, region):
        self.reads.append(region)


@pytest.fixture
def notes():
    return Notes()


@pytest.fixture
def place(notes):
    """A watched weight of 6 by 4."""
    tensor = torch.zeros(6, 4)
    notes.observer = WriteObserver(notes)
    notes.watched = notes.observer.watch(tensor)
    return tensor


WHOLE = ((0, 6, 1), (0, 4, 1))
ROWS = ((2, 4, 1), (0, 4, 1))
ONES = torch.ones(6, 4)


def clamp_out(place):
    torch.clamp(ONES, min=2, out=place)


def set_rows(place):
    place[2:4] = torch.ones(2, 4)


def set_number(place):
    place[2:4] = 1


def into_chunk(place):
    place.chunk(3)[1].copy_(ONES[:2])


def under_no_grad(place):
    with torch.no_grad():
        place.copy_(ONES)


def under_inference_mode(place):
    with torch.inference_mode():
        place.copy_(ONES)


WRITES = {
    "copy": (lambda place: place.copy_(ONES), [WHOLE]),
    "copy into data": (lambda place: place.data.copy_(ONES), [WHOLE]),
    "copy into detached": (lambda place: place.detach().copy_(ONES), [WHOLE]),
    "copy without grad": (under_no_grad, [WHOLE]),
    "copy in inference mode": (under_inference_mode, [WHOLE]),
    "fill": (lambda place: place.fill_(3), [WHOLE]),
    "zero": (lambda place: place.zero_(), [WHOLE]),
    "add in place": (lambda place: place.add_(1), [WHOLE]),
    "augmented": (lambda place: place.__iadd__(1), [WHOLE]),
    "out": (clamp_out, [WHOLE]),
    "matmul out": (lambda place: torch.mm(torch.ones(6, 2), torch.ones(2, 4), out=place), [WHOLE]),
    "rows": (set_rows, [ROWS]),
    "number into rows": (set_number, [ROWS]),
    "narrow": (lambda place: place.narrow(0, 2, 2).copy_(ONES[:2]), [ROWS]),
    "chunk": (into_chunk, [ROWS]),
    "select": (lambda place: place[1].copy_(ONES[0]), [((1, 2, 1), (0, 4, 1))]),
    "column": (lambda place: place[:, 1].fill_(1), [((0, 6, 1), (1, 2, 1))]),
    "step": (lambda place: place[1::2].copy_(ONES[:3]), [((1, 6, 2), (0, 4, 1))]),
    "transposed": (lambda place: place.t()[2:].fill_(1), [((0, 6, 1), (2, 4, 1))]),
    "split dimension": (lambda place: place.view(3, 2, 4)[1].fill_(1), [ROWS]),
    "flat": (lambda place: place.view(-1)[8:16].fill_(1), [ROWS]),
    "bytes of equal size": (lambda place: place.view(torch.int32)[2:4].fill_(1), [ROWS]),
    "foreach copy": (lambda place: torch._foreach_copy_([place[2:4]], [ONES[:2]]), [ROWS]),
    "foreach two": (
        lambda place: torch._foreach_zero_([place[0], place[1]]),
        [((0, 1, 1), (0, 4, 1)), ((1, 2, 1), (0, 4, 1))],
    ),
    "foreach add": (lambda place: torch._foreach_add_([place], 1.0), [WHOLE]),
    "by index": (lambda place: place.index_put_((torch.tensor([0, 2]),), ONES[:2]), [None]),
    "by list": (lambda place: place.__setitem__([0, 2], ONES[:2]), [None]),
    "by mask": (lambda place: place.masked_fill_(ONES > 0, 1), [None]),
    "index copy": (lambda place: place.index_copy_(0, torch.tensor([1]), ONES[:1]), [None]),
    "scatter": (lambda place: place.scatter_(0, torch.zeros(1, 4).long(), ONES), [None]),
    "other bytes": (lambda place: place.view(torch.uint8)[0].fill_(1), [None]),
    "diagonal": (lambda place: place.diagonal().fill_(1), [None]),
    "random": (lambda place: place.normal_(), [WHOLE]),
    "set number": (lambda place: place.__setitem__((0, 0), 5), [((0, 1, 1), (0, 1, 1))]),
}


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_is_seen_with_its_region(notes, place, kind):
    """Before it happens and after, once, and the tensor has the new value."""
    write, regions = WRITES[kind]
    before = place.clone()
    with notes.observer:
        write(place)
    assert notes.writes == regions
    assert notes.done == regions
    assert not torch.equal(place, before) or kind in ("zero", "foreach two")


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_that_is_refused_does_not_happen(notes, place, kind):
    """The listener said no: not a bit changes."""
    notes.allow = False
    place.fill_(7)
    with notes.observer:
        WRITES[kind][0](place)
    assert torch.equal(place, torch.full((6, 4), 7.0))
    assert notes.done == []


def test_a_listener_that_raises_prevents_the_write(notes, place):
    def refuse(*args):
        raise KeyError("no")

    notes.before_write = refuse
    with pytest.raises(KeyError), notes.observer:
        place.fill_(1)
    assert torch.equal(place, torch.zeros(6, 4))


def test_a_plain_copy_tells_its_source(notes, place):
    """The storage of the source says which tensor of the checkpoint it was."""
    source = torch.ones(6, 4)
    with notes.observer:
        place.copy_(source)
        place[2:4] = source[:2]
        place.add_(source)
    assert notes.sources[0] is source
    assert notes.sources[1].untyped_storage()._cdata == source.untyped_storage()._cdata
    assert notes.sources[2] is None


def test_writes_outside_the_mode_or_elsewhere_are_not_seen(notes, place):
    place.fill_(1)
    with notes.observer:
        torch.zeros(6, 4).fill_(1)
        ONES.clone().copy_(place)
    assert notes.writes == []


@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (lambda place: place + 1, [WHOLE]),
        (lambda place: place[2:4].sum(), [ROWS]),
        (lambda place: bool(place[0, 0] == 1), [((0, 1, 1), (0, 1, 1))]),
        (lambda place: place[0, 0].item(), [((0, 1, 1), (0, 1, 1))]),
        (lambda place: torch.zeros(6, 4).copy_(place), [WHOLE]),
        (lambda place: place.mul_(2), [WHOLE]),
        (lambda place: place.view(-1), []),
        (lambda place: place.t().narrow(0, 1, 2).detach(), []),
        (lambda place: place.data, []),
        (lambda place: torch.empty_like(place), []),
        (lambda place: (place.shape, place.dtype, place.numel(), place.stride()), []),
        (lambda place: place.copy_(ONES), []),
        (lambda place: place[2:4].fill_(1), []),
        (lambda place: place.index_put_((torch.tensor([0]),), ONES[:1]), []),
    ],
)
def test_using_a_value_is_told_apart_from_looking_at_the_shape(notes, place, read, seen):
    """A loader that computes with what was there depends on it; one that slices does not."""
    with notes.observer:
        read(place)
    assert notes.reads == seen


def test_two_watched_views_of_one_storage_each_hear_of_a_write(notes):
    base = torch.zeros(6, 4)
    notes.observer = WriteObserver(notes)
    whole, row = notes.observer.watch(base), notes.observer.watch(base[1])
    assert notes.observer.shares(whole)
    with notes.observer:
        base[1].fill_(1)
    assert notes.writes == [((1, 2, 1), (0, 4, 1)), ((0, 4, 1),)]
    notes.observer.forget(row)
    assert not notes.observer.shares(whole)
    with notes.observer:
        base[1].fill_(2)
    assert len(notes.writes) == 3


def test_a_forgotten_tensor_is_not_watched(notes, place):
    notes.observer.forget(notes.watched)
    with notes.observer:
        place.fill_(1)
    assert notes.writes == []
    notes.observer.forget(notes.watched)


def test_memory_can_be_given_before_the_first_operation(notes):
    """A twin has none until something touches it; its writer never notices."""
    twin = torch.zeros(6, 4)
    twin.untyped_storage().resize_(0)
    observer = WriteObserver(notes)
    observer.watch(twin)
    notes.before_touch = lambda storage: twin.untyped_storage().resize_(6 * 4 * 4)
    with observer:
        twin.copy_(ONES)
    assert torch.equal(twin, ONES)


def test_a_parameter_with_gradients_is_watched_like_any_other(notes):
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    observer = WriteObserver(notes)
    observer.watch(parameter)
    with observer:
        parameter.data.copy_(ONES)
        with torch.no_grad():
            parameter.mul_(2)
    assert notes.writes == [WHOLE, WHOLE]
    assert torch.equal(parameter, ONES * 2)


def test_of_several_tensors_at_once_each_is_asked_for(notes):
    """A copy of many is many copies: one that is refused does not hold up the others."""
    one, two = torch.zeros(2), torch.zeros(2)
    observer = WriteObserver(notes)
    first = observer.watch(one)
    observer.watch(two)
    notes.before_write = lambda watched, *rest: watched is not first
    with observer:
        torch._foreach_copy_([one, two], [torch.ones(2), torch.ones(2)])
    assert torch.equal(one, torch.zeros(2))
    assert torch.equal(two, torch.ones(2))


def test_several_tensors_at_once_cannot_be_refused_in_part(notes):
    """Nothing is written rather than the wrong half."""
    one, two = torch.zeros(2), torch.zeros(2)
    observer = WriteObserver(notes)
    first = observer.watch(one)
    observer.watch(two)
    notes.before_write = lambda watched, *rest: watched is not first
    with observer, pytest.raises(UnsupportedError, match="_foreach_add_"):
        torch._foreach_add_([one, two], 1.0)
    assert torch.equal(torch.cat([one, two]), torch.zeros(4))


@pytest.mark.parametrize("allow", [True, False])
def test_a_write_is_announced_once_all_that_look_into_its_memory_have_been_asked(
    place, notes, allow
):
    notes.observer.watch(place[2])
    notes.allow = allow
    with notes.observer:
        place.data.copy_(ONES)
    assert len(notes.writes) == 2
    assert notes.executed == allow


def test_what_one_of_them_refuses_is_not_announced(place, notes):
    notes.observer.watch(place[2])
    asked = []

    def refuse_the_second(watched, region, target, source):
        asked.append(watched)
        if len(asked) == 2:
            raise UnsupportedError("no")
        return True

    notes.before_write = refuse_the_second
    with pytest.raises(UnsupportedError), notes.observer:
        place.data.copy_(ONES)
    assert (len(asked), notes.executed, place.sum()) == (2, 0, 0)
