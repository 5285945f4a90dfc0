"""How far a load has come is told while it runs, and nothing that a listener does harms the load.

Damage shown: an exception of a progress bar poisons a model; a report that says that all has come when
it has not.
"""

import io
import warnings

import pytest
from files_of import write_folder

from weightload import Checkpoint, LoadProgress, ProgressBar, SessionState, reporting
from weightload.testing import TOYS, Bench

SOURCES = {
    "mapping": lambda state, folder: state,
    "iterator": lambda state, folder: iter(list(state.items())),
    "files": lambda state, folder: Checkpoint(write_folder(folder, state)),
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(reporting, "EVERY", 0.0)


def size(state):
    return sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("plans", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_reports_count_up_to_everything_that_comes(source, plans, tmp_path):
    bench = Bench(TOYS["fused"])
    for seed in (2, 3):
        state, told = bench.state(seed), []
        with bench.session(plans=plans) as session:
            session.load(SOURCES[source](state, tmp_path / str(seed)), progress=told.append)
        bench.serves = state
        bench.check_finished(session)
        assert all(isinstance(one, LoadProgress) for one in told)
        counts = [one.nbytes for one in told]
        assert counts == sorted(counts)
        last = told[-1]
        assert [one.ended for one in told] == [False] * (len(told) - 1) + [True]
        assert (last.tensors, last.nbytes) == (len(state), size(state))
        known = (None, None) if source == "iterator" else (len(state), size(state))
        assert (last.tensors_total, last.nbytes_total) == known
        if source == "iterator" or not plans:  # else what is taken together is told of together
            assert [one.tensors for one in told[:-1]] == list(range(1, len(state) + 1))


def test_each_call_counts_for_itself():
    bench = Bench(TOYS["plain"])
    state, told = bench.state(2), []
    with bench.session() as session:
        for pair in state.items():
            session.load([pair], progress=told.append)
    assert [one.tensors for one in told if one.ended] == [1] * len(state)
    assert {one.tensors_total for one in told} == {1}


def test_reports_are_at_most_ten_a_second(monkeypatch):
    monkeypatch.undo()
    bench, told = Bench(TOYS["everything"]), []
    with bench.session() as session:
        session.load(iter(bench.state(2).items()), progress=told.append)
    assert 2 <= len(told) <= 2 + 10 * told[-1].seconds


def test_what_a_callback_raises_is_a_warning_and_the_load_goes_on():
    bench, calls = Bench(TOYS["plain"]), []

    def broken(progress):
        calls.append(progress)
        raise ValueError("no such widget")

    with pytest.warns(RuntimeWarning, match="no such widget"), bench.session() as session:
        session.load(bench.state(2), progress=broken)
    bench.serves = bench.state(2)
    bench.check_finished(session)
    assert len(calls) == 1


def test_the_last_report_of_a_load_that_fails_says_how_far_it_came():
    bench, told = Bench(TOYS["plain"]), []

    def source():
        yield next(iter(bench.state(2).items()))
        raise OSError("the cable was pulled")

    session = bench.open()
    with pytest.raises(OSError, match="cable"):
        session.load(source(), progress=told.append)
    assert (told[-1].tensors, told[-1].ended) == (1, True)
    assert session.state is SessionState.POISONED
    bench.check_ended(session)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_is_drawn_on_a_terminal_only():
    pytest.importorskip("tqdm")
    bench = Bench(TOYS["plain"])
    shown, hidden = Terminal(), io.StringIO()
    for seed, stream in ((2, shown), (3, hidden)):
        with warnings.catch_warnings(), bench.session() as session:
            warnings.simplefilter("error")
            session.load(bench.state(seed), progress=ProgressBar("Reload", stream))
    count = len(bench.state(2))
    drawn = shown.getvalue().split("\r")[-1]
    assert drawn.startswith("Reload: 100%")
    assert f"{count}/{count} tensors" in drawn
    assert not hidden.getvalue()


def test_a_bar_of_an_unknown_total_counts():
    pytest.importorskip("tqdm")
    shown = Terminal()
    bar = ProgressBar("Reload", shown)
    bar(LoadProgress(tensors=1, nbytes=3000, tensors_total=None, nbytes_total=None, seconds=0.1))
    bar(
        LoadProgress(
            tensors=2, nbytes=5000, tensors_total=None, nbytes_total=None, seconds=0.2, ended=True
        )
    )
    assert "5.00kB" in shown.getvalue()
    assert "2 tensors" in shown.getvalue()
