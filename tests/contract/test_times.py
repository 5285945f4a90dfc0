"""A receipt tells the time in which a model could not compute apart from the time of the transfer.

Damage shown: a slow source is taken for a slow load, and an operator looks in the wrong place. Time
passes only when the test says so, in whole seconds, so that all of it has to be found again.
"""

import pytest
from files_of import write_folder

from weightload import Checkpoint, intake, progress
from weightload.testing import TOYS, Bench


class Clock:
    """Stands for the module ``time``, as far as sessions use it."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    monkeypatch.setattr(progress, "time", one)
    monkeypatch.setattr(intake, "time", one)
    return one


def slow(state, clock):
    for name, tensor in state.items():
        clock.sleep(1)
        yield name, tensor


def test_waiting_for_an_iterator_counts_for_the_source(clock):
    bench = Bench(TOYS["plain"])
    state = bench.state(2)
    with bench.session() as session:
        session.load(slow(state, clock))
    seconds = session.receipt.seconds
    assert seconds["source"] == seconds["load"] == len(state)
    assert seconds["between"] == 0
    with bench.session() as session:
        session.load(state)
    assert "source" not in session.receipt.seconds


def test_reading_files_counts_for_the_source(tmp_path):
    bench = Bench(TOYS["plain"])
    with bench.session() as session:
        session.load(Checkpoint(write_folder(tmp_path / "c", bench.state(2))))
    seconds = session.receipt.seconds
    assert 0 < seconds["source"] <= seconds["load"]


def test_waiting_for_the_next_call_counts_for_nobody(clock):
    bench = Bench(TOYS["plain"])
    state = bench.state(2)
    with bench.session() as session:
        for pair in state.items():
            clock.sleep(1)
            session.load([pair])
        clock.sleep(1)
    seconds = session.receipt.seconds
    assert seconds["between"] == len(state) + 1
    assert sum(seconds.values()) == len(state) + 1


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_model_is_blocked_from_the_first_live_write_on(commit, clock):
    """With ``stream`` the wait for the second tensor counts, with ``atomic`` it does not."""
    bench = Bench(TOYS["plain"])
    count = len(bench.state(2))
    with bench.session(commit=commit) as session:
        session.load(slow(bench.state(2), clock))
    bench.serves = bench.state(2)
    bench.check_finished(session)
    waits = {"stream": count - 1, "atomic": 0}
    assert session.receipt.blocked_seconds == waits[commit]


def test_a_model_that_was_not_written_was_not_blocked():
    bench = Bench(TOYS["plain"])
    session = bench.open(commit="atomic")
    session.load(bench.state(2))
    receipt = session.abort()
    assert receipt.blocked_seconds == 0
    bench.check_ended(session)
