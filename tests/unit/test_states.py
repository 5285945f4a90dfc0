"""The table of moves, compared with the diagram of the design, pair by pair."""

import itertools

import pytest

from weightload.states import TRANSITIONS, Event, SessionState, allowed_calls, next_state

S, E = SessionState, Event

DIAGRAM = {
    S.NEW: {E.PREPARE: S.PREPARED, E.ABORT_CLEAN: S.ABORTED},
    S.PREPARED: {
        E.LOAD: S.LOADING,
        E.SEAL: S.SEALED,
        E.FINISH: S.FINISHING,
        E.ABORT_CLEAN: S.ABORTED,
        E.ABORT_DIRTY: S.POISONED,
    },
    S.LOADING: {
        E.LOAD: S.LOADING,
        E.SEAL: S.SEALED,
        E.FINISH: S.FINISHING,
        E.ABORT_CLEAN: S.ABORTED,
        E.ABORT_DIRTY: S.POISONED,
    },
    S.SEALED: {
        E.FINISH: S.FINISHING,
        E.ABORT_CLEAN: S.ABORTED,
        E.ABORT_DIRTY: S.POISONED,
    },
    S.FINISHING: {E.DONE: S.FINISHED, E.ABORT_CLEAN: S.ABORTED, E.ABORT_DIRTY: S.POISONED},
    S.FINISHED: {},
    S.ABORTED: {},
    S.POISONED: {},
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_every_pair_of_state_and_event_is_as_drawn(state, event):
    assert next_state(state, event) is DIAGRAM[state].get(event)


def test_the_table_holds_nothing_else():
    assert len(TRANSITIONS) == sum(len(moves) for moves in DIAGRAM.values())


@pytest.mark.parametrize("state", list(S))
def test_a_terminal_state_has_no_move_and_every_other_has_one(state):
    assert state.terminal == (not DIAGRAM[state])


@pytest.mark.parametrize("state", list(S))
def test_a_state_is_new_or_open_or_terminal(state):
    assert (state is S.NEW) + state.open + state.terminal == 1


def test_every_state_can_be_reached():
    reached, frontier = {S.NEW}, [S.NEW]
    while frontier:
        for state in DIAGRAM[frontier.pop()].values():
            if state not in reached:
                reached.add(state)
                frontier.append(state)
    assert reached == set(S)


@pytest.mark.parametrize(
    ("state", "calls"),
    [
        (S.NEW, ["prepare", "abort"]),
        (S.PREPARED, ["load", "seal", "finish", "abort"]),
        (S.LOADING, ["load", "seal", "finish", "abort"]),
        (S.SEALED, ["finish", "abort"]),
        (S.FINISHING, []),
        (S.FINISHED, []),
        (S.ABORTED, []),
        (S.POISONED, []),
    ],
)
def test_the_calls_named_in_a_refusal_are_those_that_work(state, calls):
    assert allowed_calls(state) == calls


@pytest.mark.parametrize("state", list(S))
def test_every_state_says_what_must_have_happened(state):
    """The sentence under each member stands in the source, for readers and for the docs."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(S)).body[0].body
    names = [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
    following = dict(
        zip(
            names,
            [body[body.index(node) + 1] for node in body if isinstance(node, ast.Assign)],
            strict=True,
        )
    )
    sentence = following[state.name].value.value
    assert sentence.endswith(".")
