"""Who holds a tensor, on every Python: what newer ones do otherwise is done here by hand."""

import gc

import pytest
import torch

from weightload import holders
from weightload.holders import find_views
from weightload.intake import Intake


class Holder:
    """Has attributes."""


def hidden_among_views(tensor):
    """Return how many tensors look at the memory of one, and how many of them somebody hides."""
    found, hidden = find_views([tensor.untyped_storage()._cdata], list)
    return len(found), len(hidden)


@pytest.fixture(params=["as it is", "gives the call's own tuple too"])
def referrers(request, monkeypatch):
    """Python 3.13 names the tuple of the arguments as a holder of each of them."""
    real = gc.get_referrers
    if request.param != "as it is":
        monkeypatch.setattr(
            holders.gc,
            "get_referrers",
            lambda *args: [args, *(o for o in real(*args) if o is not args)],
        )


def test_what_python_holds_is_seen(referrers):
    tensor = torch.arange(8.0)
    assert hidden_among_views(tensor) == (1, 0)
    holder = Holder()
    holder.kept, holder.pair = tensor, (tensor, tensor)
    assert hidden_among_views(tensor) == (1, 0)
    holder.view = tensor[2:]
    assert hidden_among_views(tensor) == (2, 0)


def test_what_numpy_holds_is_not(referrers):
    pytest.importorskip("numpy")
    tensor = torch.arange(8.0)
    array = tensor.numpy()
    assert hidden_among_views(tensor)[1] == 1
    del array
    assert hidden_among_views(tensor)[1] == 0


@pytest.mark.parametrize(("hidden", "again"), [(0, False), (375, False), (200_000, True)])
def test_a_heap_is_hidden_again_if_an_engine_has_hidden_it(hidden, again, monkeypatch):
    """Python 3.12 hides 375 objects of its own when it starts."""
    calls = []
    monkeypatch.setattr(holders.gc, "get_freeze_count", lambda: hidden)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(holders.gc, name, lambda name=name: calls.append(name))
    tensor = torch.arange(8.0)
    assert hidden_among_views(tensor) == (1, 0)
    assert calls == ["unfreeze"] * bool(hidden) + ["freeze"] * again


def test_a_source_that_is_closed_has_not_failed():
    intake = Intake(manifest=None)
    given = intake.watched(iter([("a", torch.ones(1)), ("b", torch.ones(1))]))
    next(given)
    given.close()
    assert intake.source_error is None


def test_a_source_that_fails_has():
    def failing():
        yield "a", torch.ones(1)
        raise KeyboardInterrupt

    intake = Intake(manifest=None)
    given = intake.watched(failing())
    next(given)
    with pytest.raises(KeyboardInterrupt) as caught:
        next(given)
    assert intake.source_error is caught.value
