"""What was made while a hook ran and is alive afterwards is known, wherever it is held."""

import pytest
import torch
from torch import nn

from weightload.births import Births
from weightload.storage import storage_key

HELD = []


@pytest.fixture(autouse=True)
def _nothing_is_held():
    HELD.clear()
    yield
    HELD.clear()


MAKERS = {
    "an operation": lambda: torch.ones(3) + 1,
    "a factory": lambda: torch.full((3,), 2.0),
    "numbers": lambda: torch.tensor([1.0, 2.0, 3.0]),
    "a copy": lambda: torch.ones(3).clone(),
    "a conversion": lambda: torch.ones(3).to(torch.float64).float(),
    "a view of a result": lambda: (torch.ones(4) * 2)[1:],
    "a parameter": lambda: nn.Parameter(torch.ones(3) * 3),
    "an out argument": lambda: torch.add(torch.ones(3), 1, out=torch.empty(3)),
    "a split": lambda: torch.ones(6).reshape(2, 3).clone().unbind()[0],
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_tensor_that_is_held_is_alive(kind):
    with Births() as births:
        HELD.append(MAKERS[kind]())
    assert len(births.alive(())) == 1
    assert births.alive({storage_key(HELD[0])}) == []
    HELD.clear()
    assert births.alive(()) == []


def test_what_nobody_holds_is_not_alive():
    """Hooks make many tensors that are gone when they return."""
    with Births() as births:
        (torch.ones(3) * 2).sum().sqrt()
    assert births.alive(()) == []


def test_what_only_a_cycle_holds_is_not_alive():
    """It is garbage that was not collected yet."""

    class Node:
        pass

    with Births() as births:
        node = Node()
        node.self, node.tensor = node, torch.ones(3) * 2
        del node
    assert births.alive(()) == []


def test_what_was_there_before_was_not_born():
    """Nor are other views of it."""
    before = torch.ones(4)
    with Births() as births:
        HELD.extend([before, before[1:], before.view(2, 2), before.detach(), before.add_(1)])
    assert births.alive(()) == []


def test_what_is_alive_is_named_by_shape_and_type():
    with Births() as births:
        HELD.append(torch.zeros(2, 3, dtype=torch.int8))
    assert births.alive(()) == ["shape (2, 3), torch.int8"]


def test_nothing_is_kept_alive():
    with Births() as births:
        made = torch.ones(1000)
    gone = torch.multiprocessing.reductions.StorageWeakRef(made.untyped_storage())
    del made
    assert gone.expired()
    assert births.alive(()) == []


def test_tensors_inside_wrappers_are_born():
    """A wrapper has no memory; what it holds has."""
    from weightload.testing.kernels import ScaledTensor

    with Births() as births:
        HELD.append(ScaledTensor.pack(torch.ones(2, 2)))
    inner = {storage_key(HELD[0].packed), storage_key(HELD[0].scale)}
    assert len(births.alive(())) == 2
    assert births.alive(inner) == []
