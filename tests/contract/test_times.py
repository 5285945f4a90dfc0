"""A receipt tells the time in which a model could not compute apart from the time of the transfer.

Damage shown: a slow source is taken for a slow load, and an operator looks in the wrong place. Times
are lower bounds from sleeps of a known length, and upper bounds that leave ten times as much.
"""

import time

import pytest
from files_of import write_folder

from weightload import Checkpoint
from weightload.testing import TOYS, Bench

NAP = 0.05


def slow(state):
    for name, tensor in state.items():
        time.sleep(NAP)
        yield name, tensor


def test_waiting_for_an_iterator_counts_for_the_source():
    bench = Bench(TOYS["plain"])
    state = bench.state(2)
    with bench.session() as session:
        session.load(slow(state))
    seconds = session.receipt.seconds
    assert len(state) * NAP <= seconds["source"] <= seconds["load"]
    assert seconds["load"] - seconds["source"] < len(state) * NAP
    with bench.session() as session:
        session.load(state)
    assert "source" not in session.receipt.seconds


def test_reading_files_counts_for_the_source(tmp_path):
    bench = Bench(TOYS["plain"])
    with bench.session() as session:
        session.load(Checkpoint(write_folder(tmp_path / "c", bench.state(2))))
    seconds = session.receipt.seconds
    assert 0 < seconds["source"] <= seconds["load"]


def test_waiting_for_the_next_call_counts_for_nobody():
    bench = Bench(TOYS["plain"])
    state = bench.state(2)
    with bench.session() as session:
        for pair in state.items():
            time.sleep(NAP)
            session.load([pair])
        time.sleep(NAP)
    seconds = session.receipt.seconds
    assert (len(state) + 1) * NAP <= seconds["between"] < 10 * NAP * (len(state) + 1)
    assert seconds["load"] < NAP


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_model_is_blocked_from_the_first_live_write_on(commit):
    """With ``stream`` the wait for the second tensor counts, with ``atomic`` it does not."""
    bench = Bench(TOYS["plain"])
    count = len(bench.state(2))
    with bench.session(commit=commit) as session:
        session.load(slow(bench.state(2)))
    bench.serves = bench.state(2)
    bench.check_finished(session)
    blocked = session.receipt.blocked_seconds
    assert blocked > 0
    if commit == "stream":
        assert (count - 1) * NAP <= blocked
    else:
        assert blocked < (count - 1) * NAP


def test_a_model_that_was_not_written_was_not_blocked():
    bench = Bench(TOYS["plain"])
    session = bench.open(commit="atomic")
    session.load(bench.state(2))
    receipt = session.abort()
    assert receipt.blocked_seconds == 0
    bench.check_ended(session)
