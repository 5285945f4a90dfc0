"""Engines that are updated together agree, or the caller is told which one serves what.

Damage shown: one engine of several goes on with old weights beside others with new ones, or serves
a mixture, or what it had computed with other weights; an engine that was lost in the middle takes
the others with it; a call that hangs holds up everybody; an update that failed stands in the way of
the next.
"""

import itertools
import pickle
import threading
import time

import pytest
import torch
from fleets import BUCKET, LAYERS, SIZE, STATES, ProcessReplica, ToyReplica, replaced, toy
from small import Live

from weightload import (
    Fleet,
    FleetError,
    IncompleteLoadError,
    Scope,
    UsageError,
    VerificationError,
    WeightLoadError,
    poison_of,
    start_reload,
)

SHORT = 1.0
"""Seconds until an engine that hangs is given up."""
NAMES = ("a", "b", "c")
LAST = LAYERS - 1

BEFORE = (
    ("pause", 0), ("start", 0), ("open_buckets", 0), ("load_bucket", 0), ("load_bucket", 1),
    ("load_bucket", LAST), ("close_buckets", 0), ("seal", 0),
)  # fmt: skip
"""Steps before the decision, and how many of the same name come before."""
AFTER = (("finish", 0), ("publish", 0), ("resume", 0))
WHO_AND_WHAT = [
    *itertools.product((0, 1, 2), ("fails", "call is lost", "answer is lost")),
    *itertools.product((0, 1, 2), ("dies before", "dies after")),
    (1, "hangs"),
]


def engines(names=NAMES):
    return [ToyReplica(name) for name in names]


def fleet_of(replicas, **options):
    return Fleet(replicas, **{"deadline": 60.0, "bucket_bytes": BUCKET, **options})


def served(replicas):
    return [replica.serves() for replica in replicas]


def update(replicas, number, fleet=None, **options):
    """Bring all to a checkpoint, and check that they are there."""
    fleet = fleet or fleet_of(replicas)
    receipt = fleet.update(STATES[number], version=number, **options)
    assert served(replicas) == [number] * len(replicas)
    assert [replica.version for replica in replicas] == [number] * len(replicas)
    assert fleet.version == receipt.version == number
    assert receipt.replicas.keys() == {replica.name for replica in replicas}
    for ranks in receipt.replicas.values():
        assert [one.rank for one in ranks] == [0, 1]
        assert all((one.outcome, one.version) == ("finished", number) for one in ranks)
    return receipt


def check_truth(error, replicas, old, new):
    """Check that what the error says about each engine is so; return what each serves."""
    said = error.facts["replicas"]
    assert said.keys() == {replica.name for replica in replicas}
    for replica in replicas:
        one = said[replica.name]
        assert one["state"] == "serves" or not one["new"]
        assert f"{replica.name!r}" in str(error)
        if one["state"] == "serves":
            assert replica.serves() == one["version"] == (new if one["new"] else old)
        elif one["state"] == "refuses":
            assert replica.serves() is None
            assert one["why"]
        elif one["state"] == "lost":
            # Nothing is known then, and nothing wrong is served nevertheless.
            assert replica.serves() in (None, old, new)
    serving = {replica.serves() for replica in replicas} - {None}
    assert len(serving) <= 1, "old weights are served beside new ones"
    whole = all(one["state"] == "serves" and not one["new"] for one in said.values())
    assert error.model_intact == whole
    return [one["state"] for one in said.values()]


def states_in(error):
    return [one["state"] for one in error.facts["replicas"].values()]


def eventually(replica, number):
    """Wait until an engine that hung has done what waited for it."""
    deadline = time.monotonic() + 5
    while replica.serves() != number:
        assert time.monotonic() < deadline, f"serves {replica.serves()}"
        time.sleep(0.01)


# ---------------------------------------------------------------- all goes well


@pytest.mark.parametrize("commit", ["atomic", "stream"])
@pytest.mark.parametrize("as_stream", [False, True])
def test_every_rank_of_every_engine_goes_to_the_new_weights(commit, as_stream):
    replicas = engines()
    fleet = fleet_of(replicas)
    for number in (2, 3, 1):
        weights = iter(STATES[number].items()) if as_stream else STATES[number]
        fleet.update(weights, version=number, commit=commit, verify="full")
        assert served(replicas) == [number] * 3


def test_the_receipt_says_what_each_had_before_and_got():
    replicas = engines()
    update(replicas[:1], 2)
    receipt = update(replicas, 3)
    assert receipt.before == {"a": 2, "b": 1, "c": 1}
    for ranks in receipt.replicas.values():
        assert all(one.consumed.count == LAYERS for one in ranks)


def test_engines_compute_nothing_from_before_the_first_write_to_after_the_last():
    replicas = engines()
    update(replicas, 2)
    for replica in replicas:
        log = replica.log
        assert log.index("pause") < log.index("start")
        assert log.index("resume") > log.index("finish")


def test_none_commits_before_all_have_sealed_and_none_goes_on_before_all_have_committed():
    order = []
    replicas = engines()
    for replica in replicas:
        replica.log = order
    update(replicas, 2)
    steps = [step for step, _ in itertools.groupby(order)]
    assert steps == [
        "status", "pause", "start", "open_buckets", "load_bucket", "close_buckets", "seal",
        "finish", "publish", "resume",
    ]  # fmt: skip
    assert order.count("load_bucket") == 3 * LAYERS


# ---------------------------------------------------------------- one engine, one fault


@pytest.mark.long_way("loaders of a rank fail")
@pytest.mark.parametrize(("victim", "kind"), WHO_AND_WHAT)
@pytest.mark.parametrize(("step", "countdown"), BEFORE)
def test_a_fault_before_the_decision_takes_all_back(step, countdown, victim, kind):
    replicas = engines()
    fleet = fleet_of(replicas)
    replicas[victim].plan(step, kind, countdown)
    fleet.deadline = SHORT if kind == "hangs" else 60.0
    began = time.monotonic()
    with pytest.raises(FleetError) as caught:
        fleet.update(STATES[2], version=2)
    assert time.monotonic() - began < SHORT + 10
    fleet.deadline = 60.0
    states = check_truth(caught.value, replicas, 1, 2)
    gone = kind == "hangs" or kind.startswith("dies")
    assert states[victim] == ("lost" if gone else "serves")
    assert caught.value.__cause__ is not None
    for index, replica in enumerate(replicas):
        if index != victim or not gone:
            assert replica.serves() == 1
    replicas[victim].mend()
    if kind == "hangs":
        # It goes back by itself as soon as it can.
        eventually(replicas[victim], 1)
        update(replicas, 3, fleet)
    replicas = [replaced(replica) for replica in replicas]
    update(replicas, 4, None if kind.startswith("dies") else fleet)


@pytest.mark.parametrize(("victim", "kind"), WHO_AND_WHAT)
@pytest.mark.parametrize(("step", "countdown"), AFTER)
def test_a_fault_after_the_decision_costs_the_one_that_has_it(step, countdown, victim, kind):
    """What got lost on the way is said again; who cannot follow refuses, and is named."""
    replicas = engines()
    fleet = fleet_of(replicas)
    replicas[victim].plan(step, kind, countdown)
    fleet.deadline = SHORT if kind == "hangs" else 60.0
    if kind.endswith("is lost") or (kind, step) in {("fails", "publish"), ("fails", "resume")}:
        update(replicas, 2, fleet)
    else:
        with pytest.raises(FleetError, match="agreed upon, and missed by") as caught:
            fleet.update(STATES[2], version=2)
        states = check_truth(caught.value, replicas, 1, 2)
        assert states[victim] == ("refuses" if kind == "fails" else "lost")
        assert [replica.serves() for replica in replicas if replica is not replicas[victim]] == [
            2, 2,
        ]  # fmt: skip
        assert fleet.version is None
        if step == "finish":
            assert replicas[victim].version == 1, "it says that it has what it missed"
    fleet.deadline = 60.0
    replicas[victim].mend()
    replicas = [replaced(replica) for replica in replicas]
    if kind == "hangs":
        deadline = time.monotonic() + 5
        while any(lane.busy for lane in fleet._lanes.values()):
            assert time.monotonic() < deadline
        assert replicas[victim].serves() in (None, 2)
    update(replicas, 3, None if kind.startswith("dies") else fleet)


# ---------------------------------------------------------------- engines in processes


def test_an_engine_that_is_killed_takes_no_other_with_it():
    """``kill -9`` at one step after another; each time a new one comes to the new weights as well."""
    a, b = ProcessReplica("a"), ProcessReplica("b")
    number = 1
    try:
        for step, countdown, moment in (
            ("load_bucket", 1, "dies before"),
            ("seal", 0, "dies after"),
            ("finish", 0, "dies before"),
            ("finish", 0, "dies after"),
        ):
            old, new = number, number % 3 + 2
            b.plan(step, moment, countdown)
            with pytest.raises(FleetError) as caught:
                fleet_of([a, b]).update(STATES[new], version=new)
            assert check_truth(caught.value, [a, b], old, new) == ["serves", "lost"]
            assert a.serves() == (new if (step, countdown) in AFTER else old)
            b.stop()
            b = ProcessReplica("b")
            number = new % 3 + 2
            fleet_of([a, b]).update(STATES[number], version=number)
            assert served([a, b]) == [number, number]
    finally:
        a.stop()
        b.stop()


# ---------------------------------------------------------------- what is sent


class SourceFault(Exception):
    """What a source raises here, and nothing else does."""


@pytest.mark.parametrize("position", range(LAYERS))
@pytest.mark.parametrize("fault", [SourceFault, KeyboardInterrupt])
def test_what_a_source_raises_reaches_the_caller_and_takes_all_back(fault, position):
    replicas = engines()

    def failing():
        for index, pair in enumerate(STATES[2].items()):
            if index == position:
                raise fault
            yield pair

    with pytest.raises(fault) as caught:
        fleet_of(replicas).update(failing(), version=2)
    assert "serves the weights that it had" in caught.value.__notes__[-1]
    assert served(replicas) == [1, 1, 1]
    update(replicas, 3)


def test_weights_that_lack_something_are_taken_back_everywhere():
    replicas = engines()
    short = dict(list(STATES[2].items())[:-1])
    with pytest.raises(FleetError) as caught:
        fleet_of(replicas).update(iter(short.items()), version=2)
    assert check_truth(caught.value, replicas, 1, 2) == ["serves"] * 3
    cause = caught.value.__cause__
    assert type(cause) is IncompleteLoadError
    assert cause.facts["replica"] == "a"
    assert sum(" too: IncompleteLoadError" in note for note in cause.__notes__) == 2
    update(replicas, 3)


def test_a_stream_that_turns_out_bad_is_refused_by_those_who_wrote_it_already():
    """The price of ``commit="stream"``: nobody can go back, and nobody serves a mixture."""
    replicas = engines()
    short = dict(list(STATES[2].items())[:-1])
    with pytest.raises(FleetError) as caught:
        fleet_of(replicas).update(iter(short.items()), version=2, commit="stream")
    assert check_truth(caught.value, replicas, 1, 2) == ["refuses"] * 3
    assert all(replica.paused for replica in replicas)
    update(replicas, 3)


def test_engines_that_received_something_else_do_not_commit():
    """One of them reads other bytes under the same names, as from a stale copy of a folder."""
    replicas = engines()
    other = replicas[1]
    whole = other.call

    def call(operation, **arguments):
        if operation == "load_bucket":
            name = arguments["record"]["rows"][0][0]
            wrong = [(name, STATES[2][name] + 1)]
            return whole("load", weights=wrong, opener=arguments["opener"])
        if operation == "close_buckets":
            return [{"rank": rank.rank, "value": None} for rank in other.ranks]
        return whole(operation, **arguments)

    other.call = call
    with pytest.raises(FleetError, match="received different tensors") as caught:
        fleet_of(replicas).update(iter(STATES[2].items()), version=2, verify="full")
    assert type(caught.value.__cause__) is VerificationError
    assert check_truth(caught.value, replicas, 1, 2) == ["serves"] * 3


# ---------------------------------------------------------------- who may take part


def test_an_engine_that_has_another_version_gets_everything_or_nothing():
    """A part of the weights makes no whole with the rest of another version."""
    replicas = engines()
    update(replicas[:2], 2)
    fleet = fleet_of(replicas)
    part = {"layers.1.weight": torch.zeros(SIZE)}
    with pytest.raises(FleetError, match="do not all have the same") as caught:
        fleet.update(part, version=3, scope=Scope.only(list(part)))
    assert served(replicas) == [2, 2, 1]
    assert [one["version"] for one in caught.value.facts["replicas"].values()] == [2, 2, 1]
    update(replicas, 3, fleet)
    fleet.update(part, version=4, scope=Scope.only(list(part)))
    for replica in replicas:
        assert not replica.paused
        for rank in replica.ranks:
            rank.live.equals({**STATES[3], **part})


def test_a_lost_engine_is_named_before_anything_is_begun():
    replicas = engines()
    replicas[2].dead = True
    with pytest.raises(FleetError, match="'c' cannot take part, and nothing was begun") as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    assert check_truth(caught.value, replicas, 1, 2) == ["serves", "serves", "lost"]
    assert "pause" not in replicas[0].log
    update(replicas[:2], 2)
    update([*replicas[:2], ToyReplica("d")], 3)


def test_an_engine_that_could_not_publish_refuses_even_if_somebody_resumes_it():
    """What it had computed with the old weights may still be served with the new ones."""
    replicas = engines()
    for _ in range(2):
        replicas[1].plan("publish", "fails")
    with pytest.raises(FleetError, match="missed by 'b'") as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    assert check_truth(caught.value, replicas, 1, 2) == ["serves", "refuses", "serves"]
    assert replicas[1].paused
    for rank in replicas[1].ranks:
        assert "version 2 was missed" in poison_of(rank.live.model).cause
    update(replicas, 3)


def test_a_session_that_could_not_be_ended_does_not_stand_in_the_way_of_the_next_update():
    """The engine was out of reach when the update was taken back, and is there again."""
    replicas = engines()
    fleet = fleet_of(replicas)
    replicas[2].plan("seal", "fails")
    for _ in range(2):
        replicas[1].plan("abort", "call is lost")
    with pytest.raises(FleetError) as caught:
        fleet.update(STATES[2], version=2)
    assert states_in(caught.value) == ["serves", "lost", "serves"]
    for replica in replicas:
        replica.mend()
    update(replicas, 3, fleet)


def test_an_engine_that_somebody_else_takes_first_is_not_set_going():
    """It was free when it was asked, and had a session when the update was to start."""
    replicas = engines()
    other = []
    whole = replicas[1].pause

    def pause():
        whole()
        other.append(start_reload(replicas[1].ranks[0].live.model, version=7))

    replicas[1].pause = pause
    with pytest.raises(FleetError, match="owned by session") as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    assert states_in(caught.value) == ["serves", "busy", "serves"]
    assert replicas[1].paused
    assert other[0].state.open
    other[0].abort()
    replicas[1].pause = whole
    update(replicas, 3)


def test_an_engine_that_somebody_else_updates_is_left_to_them():
    replicas = engines()
    model = replicas[1].ranks[0].live.model
    session = start_reload(model, version=7)
    with pytest.raises(FleetError, match="session is open on it") as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    assert states_in(caught.value) == ["serves", "busy", "serves"]
    assert session.state.open
    session.abort()
    update(replicas, 2)


def test_two_fleets_that_meet_do_not_harm_each_other():
    """One of them has the engines; the other hears so, and does not set them going again."""
    replicas = engines()
    second = []

    def weights():
        for index, pair in enumerate(STATES[2].items()):
            if index == 1:
                with pytest.raises(FleetError) as caught:
                    fleet_of(replicas).update(STATES[3], version=3)
                second.append(caught.value)
                assert all(replica.paused for replica in replicas)
            yield pair

    fleet_of(replicas).update(weights(), version=2)
    assert states_in(second[0]) == ["busy"] * 3
    assert served(replicas) == [2, 2, 2]


def test_one_fleet_makes_one_update_at_a_time():
    replicas = engines()
    fleet = fleet_of(replicas)
    refused = []

    def weights():
        thread = threading.Thread(target=lambda: refused.append(attempt()))
        thread.start()
        thread.join()
        yield from STATES[2].items()

    def attempt():
        try:
            fleet.update(STATES[3], version=3)
        except UsageError as error:
            return str(error)

    fleet.update(weights(), version=2)
    assert "wait for its end" in refused[0]
    assert served(replicas) == [2, 2, 2]


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_engines_have_names_that_tell_them_apart(names):
    with pytest.raises(UsageError, match="different names"):
        fleet_of(engines(names))


@pytest.mark.parametrize("replicas", [5, None, [1], ["a"], ToyReplica("a")])
def test_what_is_no_engine_is_named(replicas):
    with pytest.raises(UsageError, match="A fleet is made of engines"):
        Fleet(replicas)


@pytest.mark.parametrize("value", [None, "x", 0, -1.0, True, float("nan")])
def test_a_deadline_that_is_no_time_is_refused_where_it_is_set(value):
    with pytest.raises(UsageError, match="deadline is a number of seconds"):
        fleet_of(engines(), deadline=value)
    fleet = fleet_of(engines())
    with pytest.raises(UsageError, match="deadline is a number of seconds"):
        fleet.deadline = value


@pytest.mark.parametrize("value", ["x", 0, -5, 4.0, True])
def test_memory_of_no_size_is_refused_at_once(value):
    with pytest.raises(UsageError, match="bucket_bytes is a number of bytes"):
        fleet_of(engines(), bucket_bytes=value)


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "x"}, {"scope": ["layers.0.weight"]}, {"version": None}, {"version": 1.5},
        {"version": True}, {"draft": 5},
    ],
)  # fmt: skip
def test_what_an_update_cannot_be_is_refused_before_anything_is_asked(options):
    replicas = engines()
    with pytest.raises(UsageError, match=f"{next(iter(options))} is"):
        fleet_of(replicas).update(STATES[2], **{"version": 2, **options})
    assert [replica.log for replica in replicas] == [[], [], []]


NO_ANSWERS = ([], None, "x", [{"rank": 0}])


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        *itertools.product(["status", "start", "seal", "finish"], NO_ANSWERS),
        ("status", [{"rank": 0, "value": None}]),
    ],
)
def test_an_answer_that_says_nothing_is_taken_for_none(step, answer):
    """As from a way to an engine that lost the ranks of it."""
    replicas = engines()
    whole = replicas[1].call

    def call(operation, **arguments):
        found = whole(operation, **arguments)
        return answer if operation == step else found

    replicas[1].call = call
    with pytest.raises(FleetError) as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    check_truth(caught.value, replicas, 1, 2)
    replicas[1].call = whole
    fleet_of(replicas).abort()
    update(replicas, 3)


def test_a_fleet_that_was_left_a_mixture_has_no_version():
    replicas = engines()
    fleet = fleet_of(replicas)
    update(replicas, 2, fleet)
    with pytest.raises(SourceFault):
        fleet.update(broken_source(), version=3)
    assert fleet.version == 2
    with pytest.raises(FleetError):
        fleet.update(iter(list(STATES[3].items())[:-1]), version=3, commit="stream")
    assert fleet.version is None


def test_draft_models_are_brought_along():
    replicas = engines()
    drafts = []
    for replica in replicas:
        for rank in replica.ranks:
            drafts.append(Live(toy, STATES[1], version=1))
            rank.get_draft_model = lambda draft=drafts[-1].model: draft
    both = {**STATES[2], **{f"draft.{name}": tensor for name, tensor in STATES[3].items()}}
    fleet_of(replicas).update(both, version=2, draft="draft.")
    assert served(replicas) == [2, 2, 2]
    for draft in drafts:
        draft.equals(STATES[3])


# ---------------------------------------------------------------- who decides may die as well


@pytest.mark.parametrize("commit", ["atomic", "stream"])
def test_the_next_fleet_lets_go_what_a_dead_one_left_sealed(commit):
    """A fleet that ended between agreement and decision: engines refuse until one asks them back."""
    replicas = engines()
    for replica in replicas:
        replica.pause()
        replica.call("start", version=2, commit=commit, opener="gone")
        for name, tensor in STATES[2].items():
            replica.call("load", weights=[(name, tensor)], opener="gone")
        replica.call("seal", opener="gone")
    assert served(replicas) == [None] * 3
    fleet = fleet_of(replicas)
    with pytest.raises(FleetError, match="session is open on it"):
        fleet.update(STATES[3], version=3)
    standings = fleet.abort("its fleet is gone")
    wanted = "serves" if commit == "atomic" else "refuses"
    assert [standing.state for standing in standings.values()] == [wanted] * 3
    assert served(replicas) == [1 if commit == "atomic" else None] * 3
    update(replicas, 3, fleet)


def test_engines_of_which_some_had_committed_stay_paused_until_they_are_one_again():
    """Their fleet was lost in the middle of the commits: no old weights beside new ones."""
    replicas = engines()
    for replica in replicas:
        replica.pause()
        replica.call("start", version=2, commit="atomic", opener="gone")
        replica.call("load", weights=list(STATES[2].items()), opener="gone")
        replica.call("seal", opener="gone")
    replicas[0].call("finish", opener="gone")
    fleet = fleet_of(replicas)
    standings = fleet.abort()
    assert [(one.state, one.version) for one in standings.values()] == [
        ("refuses", 2), ("refuses", 1), ("refuses", 1),
    ]  # fmt: skip
    assert served(replicas) == [None] * 3
    update(replicas, 3, fleet)


def test_a_call_that_comes_late_does_nothing_to_the_update_of_somebody_else():
    """The session that it was meant for has ended, and another one is open."""
    replicas = engines()
    for replica in replicas:
        replica.call("start", version=2, opener="new")
    for operation, arguments in (
        ("load", {"weights": list(STATES[3].items())}),
        ("seal", {}),
        ("finish", {}),
    ):
        [outcome, _] = replicas[0].call(operation, opener="old", **arguments)
        assert outcome["error"]["type"] == "ModelBusyError"
    assert replicas[0].call("abort", opener="old")[0]["value"] is None
    for replica in replicas:
        replica.call("load", weights=list(STATES[2].items()), opener="new")
        replica.call("finish", opener="new")
        replica.publish(2)
    assert served(replicas) == [2, 2, 2]


def test_an_interrupt_after_the_decision_says_that_it_was_taken():
    replicas = engines()
    fleet = fleet_of(replicas)

    def interrupted(opener, version):
        raise KeyboardInterrupt

    fleet._bring_forward = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        fleet.update(STATES[2], version=2)
    assert "had been agreed upon" in caught.value.__notes__[-1]
    assert {standing.state for standing in fleet.status().values()} == {"busy"}
    fleet.abort()
    update(replicas, 3)


# ---------------------------------------------------------------- who missed an update


def broken_source():
    raise SourceFault
    yield


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["finish", "publish"])
@pytest.mark.parametrize("again", ["as it is", "a new fleet", "a new fleet that aborts"])
def test_who_was_out_of_reach_after_the_decision_does_not_go_on_beside_the_others(
    step, moment, again
):
    """It is reached again, and the update that would bring it to the others does not come about."""
    replicas = engines()
    fleet = fleet_of(replicas)
    replicas[0].plan(step, f"cut off {moment}")
    with pytest.raises(FleetError, match="missed by 'a'") as caught:
        fleet.update(STATES[2], version=2)
    assert check_truth(caught.value, replicas, 1, 2) == ["lost", "serves", "serves"]
    for replica in replicas:
        replica.mend()
    if again != "as it is":
        fleet = fleet_of(replicas)
    if again == "a new fleet that aborts":
        fleet.abort()
    with pytest.raises((SourceFault, FleetError)):
        fleet.update(broken_source(), version=3)
    assert len(set(served(replicas)) - {None}) <= 1
    if again == "as it is":
        assert served(replicas) == [None, 2, 2], "who has nothing to do with it goes on"
        assert [one.state for one in fleet.status().values()] == ["refuses", "serves", "serves"]
    fleet.abort()
    update(replicas, 3, fleet)


def test_an_engine_that_commits_late_does_not_serve_caches_of_the_old_weights():
    """Its answer had been given up; then the next update is taken back."""
    replicas = engines()
    fleet = fleet_of(replicas, deadline=SHORT)
    replicas[0].plan("finish", "hangs")
    with pytest.raises(FleetError, match="missed by 'a'"):
        fleet.update(STATES[2], version=2)
    replicas[0].mend()
    deadline = time.monotonic() + 5
    while any(lane.busy for lane in fleet._lanes.values()):
        assert time.monotonic() < deadline
    fleet.deadline = 60.0
    with pytest.raises(SourceFault):
        fleet.update(broken_source(), version=3)
    assert served(replicas) == [None, 2, 2]
    update(replicas, 3, fleet)


@pytest.mark.parametrize("through", ["abort", "an update that is taken back"])
def test_caches_are_dropped_where_a_fleet_was_lost_after_all_commits(through):
    """Nobody had published: what the engines had kept is of the weights before."""
    replicas = engines()
    for replica in replicas:
        replica.pause()
        replica.call("start", version=2, commit="atomic", opener="gone")
        replica.call("load", weights=list(STATES[2].items()), opener="gone")
        replica.call("seal", opener="gone")
        replica.call("finish", opener="gone")
    fleet = fleet_of(replicas)
    if through == "abort":
        fleet.abort()
    else:
        with pytest.raises(SourceFault):
            fleet.update(broken_source(), version=3)
    assert served(replicas) == [2, 2, 2]
    assert [replica.version for replica in replicas] == [2, 2, 2]
    assert [replica.cache for replica in replicas] == [2, 2, 2]


def test_an_engine_that_does_not_pause_keeps_what_it_is_at():
    """Its requests go on with the weights and the caches that they have."""
    replicas = engines()

    def pause():
        raise UsageError("requests are unfinished")

    replicas[1].pause = pause
    with pytest.raises(FleetError, match="requests are unfinished") as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    assert check_truth(caught.value, replicas, 1, 2) == ["serves"] * 3
    assert not {"publish", "resume"} & set(replicas[1].log)
    standings = fleet_of(replicas).abort()
    assert [one.state for one in standings.values()] == ["serves"] * 3
    assert not {"publish", "resume"} & set(replicas[1].log)


def test_engines_of_different_versions_do_not_go_on_when_an_update_is_taken_back():
    """They may have stood still because of that; who is not asked to pause cannot tell."""
    replicas = engines()
    update(replicas[:2], 2)
    with pytest.raises(SourceFault) as caught:
        fleet_of(replicas).update(broken_source(), version=3)
    assert served(replicas) == [None] * 3
    assert "others have another version" in caught.value.__notes__[-1]
    update(replicas, 3)


def test_an_engine_that_missed_the_decision_with_its_session_open_can_take_part_again():
    replicas = engines()
    fleet = fleet_of(replicas)
    for _ in range(2):
        replicas[0].plan("finish", "call is lost")
    with pytest.raises(FleetError, match="missed by 'a'") as caught:
        fleet.update(STATES[2], version=2)
    assert check_truth(caught.value, replicas, 1, 2) == ["refuses", "serves", "serves"]
    update(replicas, 3, fleet)


# ---------------------------------------------------------------- errors travel


def test_the_error_survives_the_way_to_another_process():
    replicas = engines()
    replicas[0].plan("seal", "fails")
    with pytest.raises(FleetError) as caught:
        fleet_of(replicas).update(STATES[2], version=2)
    for again in (
        pickle.loads(pickle.dumps(caught.value)),
        WeightLoadError.from_plain(caught.value.to_plain()),
    ):
        assert type(again) is FleetError
        assert again.facts == caught.value.facts
