"""Nobody waits for an engine for ever: a call ends in its answer, its error, or one that says who hangs."""

import threading

import pytest

from weightload import TransportError
from weightload.vllm.transfer.pending import Pending


def test_a_call_gives_what_it_returned_or_raised():
    assert Pending("a question", lambda: 3).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        Pending("a question", lambda: 1 / 0).result(5)


def test_a_call_that_hangs_is_given_up_and_named():
    go_on = threading.Event()
    call = Pending("bucket 7", lambda: go_on.wait(30))
    assert not call.done
    with pytest.raises(TransportError, match=r"did not answer bucket 7 within 0\.05 s"):
        call.result(0.05)
    go_on.set()
    assert call.result(5) is True
    assert call.done
