"""A fleet of toy engines in which anything can go wrong at any step, any number of times.

Beside it stands the simplest model of it: which checkpoint each engine serves, or that it does not.
After every update each engine serves one checkpoint as a whole, or refuses; what the error says of
it is so; never does one serve the old weights while another serves the new ones; and none serves
what it has computed with other weights than those it has. An update without faults brings every
engine that lives to the new weights, whatever happened before.
"""

import contextlib
import sys
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fleets import BUCKET, LAYERS, STATES, ToyReplica, replaced

from weightload import Fleet, FleetError
from weightload.ownership import weights_version

STEPS = st.sampled_from(
    [
        "status",
        "pause",
        "start",
        "open_buckets",
        "load_bucket",
        "close_buckets",
        "seal",
        "finish",
        "publish",
        "resume",
        "abort",
        "poison",
    ]
)
# An engine that hangs costs seconds; tests/contract has that.
KINDS = st.sampled_from(
    [
        "fails",
        "call is lost",
        "answer is lost",
        "cut off before",
        "cut off after",
        "dies before",
        "dies after",
    ]
)
NUMBERS = st.integers(1, 4)
COMMITS = st.sampled_from(["atomic", "stream"])


class SourceFault(Exception):
    """What a source raises here, and nothing else does."""


class CallerDied(BaseException):
    """The process that holds the fleet ends, and takes nothing back."""


class FleetMachine(RuleBasedStateMachine):
    """Faults are planned, updates tried, lost engines started anew."""

    @initialize(size=st.integers(1, 4), ranks=st.integers(1, 2))
    def start(self, size, ranks):
        self.replicas = [ToyReplica(f"r{index}", ranks) for index in range(size)]
        self.fleet = self.new_fleet()
        self.serves = {replica.name: 1 for replica in self.replicas}

    def new_fleet(self):
        return Fleet(self.replicas, deadline=60, bucket_bytes=BUCKET)

    @rule(data=st.data(), step=STEPS, kind=KINDS, countdown=st.integers(0, LAYERS - 1))
    def plan(self, data, step, kind, countdown):
        replica = data.draw(st.sampled_from(self.replicas))
        replica.plan(step, kind, countdown)

    @rule(data=st.data())
    def mend(self, data):
        """One engine is reached again, and does what it is asked for."""
        data.draw(st.sampled_from(self.replicas)).mend()

    @rule(number=NUMBERS, commit=COMMITS)
    def update(self, number, commit):
        held = self.held()
        try:
            receipt = self.fleet.update(STATES[number], version=number, commit=commit)
        except FleetError as error:
            self.believe(error, held, number)
        else:
            assert receipt.replicas.keys() == held.keys()
            self.serves = dict.fromkeys(held, number)
            assert self.fleet.version == number

    @rule(number=NUMBERS, commit=COMMITS, position=st.integers(0, LAYERS - 1))
    def update_from_a_source_that_fails(self, number, commit, position):
        held = self.held()

        def failing():
            yield from list(STATES[number].items())[:position]
            raise SourceFault

        try:
            self.fleet.update(failing(), version=number, commit=commit)
        except SourceFault:
            self.look(held)
        except FleetError as error:
            self.believe(error, held, number)

    @rule(number=NUMBERS, commit=COMMITS, step=STEPS, after=st.booleans())
    def update_by_a_caller_that_dies(self, number, commit, step, after):
        ask, dead = self.fleet._ask, []

        def mortal(what, *args):
            dead.extend([True] * (what == step and not after))
            if dead:
                raise CallerDied
            found = ask(what, *args)
            dead.extend([True] * (what == step))
            return found

        self.fleet._ask = mortal
        held = self.held()
        with contextlib.suppress(CallerDied, FleetError):
            self.fleet.update(STATES[number], version=number, commit=commit)
        self.look({name: {version, number} for name, version in held.items()})
        self.fleet = self.new_fleet()

    def held(self):
        """Return the version that each engine has, whether it computes or not."""
        return {
            replica.name: weights_version(replica.ranks[0].live.model) for replica in self.replicas
        }

    def look(self, held):
        """See what each serves now: what it had, or nothing."""
        for replica in self.replicas:
            had = held[replica.name]
            serves = self.serves[replica.name] = replica.serves()
            assert serves is None or serves in (had if isinstance(had, set) else {had})

    def believe(self, error, held, number):
        said = error.facts["replicas"]
        assert said.keys() == held.keys()
        decided = any(one["new"] for one in said.values())
        for replica in self.replicas:
            one = said[replica.name]
            if one["state"] == "serves":
                assert one["new"] == decided, "old weights are served beside new ones"
                # It may be known to have weights, and not whether it computes.
                assert replica.serves() in (
                    [one["version"], None] if one["why"] else [one["version"]]
                )
                assert one["version"] == (number if one["new"] else held[replica.name])
            elif one["state"] in ("refuses", "busy"):
                assert replica.serves() is None
            else:
                assert replica.serves() in (None, held[replica.name], number)
            self.serves[replica.name] = replica.serves()
        clean = all(one["state"] == "serves" and not one["new"] for one in said.values())
        assert error.model_intact == clean

    @rule()
    def start_a_new_fleet(self):
        """The process that held the old one has ended."""
        self.fleet = self.new_fleet()

    @rule()
    def abort(self):
        standings = self.fleet.abort()
        for replica in self.replicas:
            one = standings[replica.name]
            serves = self.serves[replica.name] = replica.serves()
            if one.state == "serves":
                assert serves in ([one.version, None] if one.why else [one.version])
            elif one.state != "lost":
                assert serves is None

    @rule(number=NUMBERS)
    def update_without_faults(self, number):
        for replica in self.replicas:
            replica.mend()
        lost = any(replica.dead for replica in self.replicas)
        self.replicas = [replaced(replica) for replica in self.replicas]
        if lost:
            self.fleet = self.new_fleet()
        self.fleet.abort("before a new start")
        self.fleet.update(STATES[number], version=number)
        self.serves = {replica.name: number for replica in self.replicas}
        assert [replica.version for replica in self.replicas] == [number] * len(self.replicas)

    @invariant()
    def every_engine_serves_what_it_is_believed_to(self):
        for replica in getattr(self, "replicas", ()):
            assert replica.serves() == self.serves[replica.name]
            if replica.serves() is not None:
                assert replica.version == replica.serves(), "it says that it has something else"

    @invariant()
    def all_that_serve_serve_the_same(self):
        assert len(set(getattr(self, "serves", {}).values()) - {None}) <= 1


FleetMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestFleet = FleetMachine.TestCase
