"""Many copies cost a device few calls, and none is lost, done twice, or done after its memory changed.

Damage shown: a weight that keeps its old value because its copy still waits or raised another away, a
weight that holds what the sender wrote next, and one launch for each tensor. Copies on the host wait
here as they do on a device; that they do not by default is shown too.
"""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightload.batching import Batch


class Calls(TorchDispatchMode):
    """Counts the calls that copy."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "copy_" in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def pairs(count, *, dtype=torch.float32, source=None, size=4):
    made = torch.arange(count * size, dtype=torch.float32).view(count, size)
    return [(torch.full((size,), -1.0, dtype=dtype), row.to(source or dtype)) for row in made]


def test_a_thousand_copies_of_three_pairs_of_types_are_three_calls():
    every = (
        pairs(400)
        + pairs(300, dtype=torch.bfloat16)
        + pairs(300, dtype=torch.bfloat16, source=torch.float32)
    )
    random.Random(0).shuffle(every)
    batch = Batch(on_host=True)
    with Calls() as calls:
        for target, source in every:
            batch.add(target, source)
        assert calls.names == []
        assert len(batch) == 1000
        batch.flush()
    assert calls.names == ["aten::_foreach_copy_"] * 3
    assert len(batch) == 0
    for target, source in every:
        assert torch.equal(target, source.to(target.dtype))


def test_nothing_is_done_twice():
    (target, source), *_ = pairs(1)
    batch = Batch(on_host=True)
    batch.add(target, source)
    batch.flush()
    target.fill_(7)
    batch.flush()
    assert target.tolist() == [7, 7, 7, 7]


def test_on_the_host_a_copy_is_done_at_once():
    (target, source), *_ = pairs(1)
    batch = Batch()
    batch.add(target, source)
    source.fill_(9)
    assert target.tolist() == [0, 1, 2, 3]
    assert len(batch) == 0


def test_what_waits_holds_what_was_there_at_the_flush():
    """Why it has to be flushed before the sender writes again; also that it does wait."""
    (target, source), *_ = pairs(1)
    batch = Batch(on_host=True)
    batch.add(target, source)
    source.fill_(9)
    batch.flush()
    assert target.tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("side", ["target", "source"])
def test_a_copy_with_gaps_is_done_at_once_and_spoils_no_batch(side):
    wide = torch.full((3, 8), -1.0)
    part, whole = wide[:, 2:5], torch.full((3, 3), -1.0)
    target, source = (part, whole) if side == "target" else (whole, part)
    source.copy_(torch.arange(9.0).view(3, 3))
    batch = Batch(on_host=True)
    batch.add(target, source)
    assert target.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert len(batch) == 0


@pytest.mark.parametrize(
    ("limits", "waiting"),
    [({"most_copies": 4}, [1, 2, 3, 0, 1]), ({"most_bytes": 48}, [1, 2, 0, 1, 2])],
    ids=["copies", "bytes"],
)
def test_a_full_batch_flushes_itself(limits, waiting):
    """Each source has 16 bytes."""
    batch, found = Batch(on_host=True, **limits), []
    for target, source in pairs(5):
        batch.add(target, source)
        found.append(len(batch))
    assert found == waiting


def test_other_shapes_are_copied_as_copy_does():
    batch = Batch(on_host=True)
    target = torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match="size"):
        batch.add(target, torch.ones(4))
    assert len(batch) == 0


def test_after_a_flush_that_raises_nothing_waits(monkeypatch):
    """The session is aborted then, and no later one may do its copies."""
    (target, source), *_ = pairs(1)
    batch = Batch(on_host=True)
    batch.add(target, source)

    def fails(targets, sources):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch, "_foreach_copy_", fails)
    with pytest.raises(RuntimeError, match="lost"):
        batch.flush()
    monkeypatch.undo()
    batch.flush()
    assert target.tolist() == [-1, -1, -1, -1]
