"""Pairs are checked before a loader sees them, and counted."""

import pytest
import torch

from weightload import DuplicateWeightError, UnexpectedWeightError, WeightMismatchError
from weightload.intake import Intake
from weightload.record import SourceFact
from weightload.sources import pairs_of, unpack
from weightload.transport import Loans


def feed(intake, pairs, *, lent=False, between=lambda: None):
    loans = Loans(buffers=None if lent else [], each=True)
    return intake.feed(pairs, loans=loans, between=between)


def known(**shapes):
    return {name: SourceFact(shape=shape, consumed=True) for name, shape in shapes.items()}


def test_a_mapping_and_pairs_are_read_alike():
    tensor = torch.ones(1)
    assert list(pairs_of({"a": tensor})) == [("a", tensor)]
    assert list(pairs_of([("a", tensor)])) == [("a", tensor)]


@pytest.mark.parametrize("bad", [None, "abc", 3, ("a",), ("a", 1, 2)])
def test_what_has_not_two_parts_is_refused(bad):
    with pytest.raises(WeightMismatchError, match="pairs"):
        unpack(bad)


def test_the_first_load_takes_every_name_and_remembers_its_shape():
    intake = Intake(manifest=None)
    for _ in feed(intake, [("a", torch.ones(2, 3)), ("b", torch.ones(()))]):
        intake.consumed(intake.current, "layer.weight", None)
    intake.end_batch()
    assert intake.facts() == {
        "a": SourceFact(shape=(2, 3), dtype=torch.float32, consumed=True, place="layer.weight"),
        "b": SourceFact(shape=(), dtype=torch.float32, consumed=True, place="layer.weight"),
    }
    assert intake.nbytes == 7 * 4


def test_a_known_name_must_have_its_shape():
    intake = Intake(manifest=known(a=(2,)))
    with pytest.raises(WeightMismatchError) as caught:
        list(feed(intake, [("a", torch.ones(1))]))
    assert caught.value.facts == {"name": "a", "expected": (2,), "found": (1,)}


def test_a_name_comes_once():
    intake = Intake(manifest=None)
    with pytest.raises(DuplicateWeightError, match="'a' arrived twice"):
        list(feed(intake, [("a", torch.ones(1)), ("a", torch.ones(1))]))


def test_a_lenient_intake_takes_a_name_again():
    intake = Intake(manifest=None, lenient=True)
    assert len(list(feed(intake, [("a", torch.ones(1)), ("a", torch.ones(1))]))) == 2


def test_a_lent_tensor_that_is_kept_is_copied_before_the_next_one_is_asked_for():
    buffer = torch.zeros(2)

    def source():
        for value in (1, 2):
            yield f"w{value}", buffer.fill_(value)

    intake = Intake(manifest=None)
    kept = list(feed(intake, source(), lent=True))
    assert [tensor.tolist() for _, tensor in kept] == [[1, 1], [2, 2]]


def test_an_owned_tensor_is_handed_on_as_it_is():
    tensor = torch.ones(2)
    [(_, handed)] = feed(Intake(manifest=None), [("a", tensor)])
    assert handed is tensor


def test_the_error_of_a_source_is_remembered_and_passed_on():
    error = OSError("gone")

    def source():
        yield "a", torch.ones(1)
        raise error

    intake = Intake(manifest=None)
    with pytest.raises(OSError, match="gone"):
        list(feed(intake, source()))
    assert intake.source_error is error


def test_between_is_called_when_the_loader_has_let_go_of_a_tensor():
    calls = []
    intake = Intake(manifest=None)
    pairs = [("a", torch.ones(1)), ("b", torch.ones(1))]
    for name, _ in feed(intake, pairs, between=lambda: calls.append("between")):
        calls.append(name)
    assert calls == ["a", "between", "b", "between"]


def test_a_write_belongs_to_the_tensor_that_it_copies():
    """A model that collects first and writes later still has the right name on each write."""
    intake = Intake(manifest=None)
    pairs = dict(feed(intake, [("a", torch.ones(2)), ("b", torch.ones(2))]))
    assert intake.current is None
    assert intake.name_of(pairs["a"]) == "a"
    assert intake.name_of(pairs["b"][1:]) == "b"
    assert intake.name_of(torch.ones(2)) is None


def test_views_of_one_buffer_are_told_apart():
    """A model that collects, and a list of tensors that are parts of one: the names are right."""
    buffer = torch.ones(6)
    intake = Intake(manifest=None)
    pairs = dict(feed(intake, [("a", buffer[:2]), ("b", buffer[2:])]))
    assert intake.name_of(pairs["b"]) == "b"
    assert intake.name_of(pairs["a"]) == "a"
    assert intake.name_of(pairs["a"][1:]) == "a"


def test_a_value_that_was_computed_belongs_to_what_was_asked_for_last():
    intake = Intake(manifest=None)
    for name, tensor in feed(intake, [("a", torch.ones(2)), ("b", torch.ones(2))]):
        assert intake.name_of(tensor * 2) == name
        assert intake.name_of(None) == name


def test_a_new_name_that_filled_nothing_is_refused():
    intake = Intake(manifest=known(a=(1,)))
    list(feed(intake, [("zzz", torch.ones(1))]))
    with pytest.raises(UnexpectedWeightError, match="zzz"):
        intake.end_batch()


def test_a_known_name_may_fill_nothing_if_it_filled_nothing_at_first():
    intake = Intake(manifest={"a": SourceFact(shape=(1,), consumed=False)})
    list(feed(intake, [("a", torch.ones(1))]))
    intake.end_batch()
    assert intake.unclaimed == {}


def test_a_name_that_filled_something_at_first_and_nothing_now_is_kept_to_be_compared():
    """Two tensors that were tied later: the second one's value must still be the first one's."""
    intake = Intake(manifest=known(a=(1,)))
    sent = torch.ones(1)
    list(feed(intake, [("a", sent)]))
    intake.end_batch()
    sent.zero_()
    assert intake.unclaimed["a"].item() == 1
