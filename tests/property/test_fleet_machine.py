"""A fleet of toy engines in which anything can go wrong at any step, any number of times.

Beside it stands the simplest model of it: which checkpoint each engine serves, or that it does not.
After every update each engine serves one checkpoint as a whole, or refuses; what the error says of
it is so; and never does one serve the old weights while another serves the new ones. An update
without faults brings every engine that lives to the new weights, whatever happened before.
"""

import sys
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fleets import BUCKET, LAYERS, STATES, ToyReplica, replaced

from weightload import Fleet, FleetError

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
KINDS = st.sampled_from(["fails", "call is lost", "answer is lost", "dies before", "dies after"])


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

    @rule(number=st.integers(1, 4), commit=st.sampled_from(["atomic", "stream"]))
    def update(self, number, commit):
        before = dict(self.serves)
        try:
            receipt = self.fleet.update(STATES[number], version=number, commit=commit)
        except FleetError as error:
            self.believe(error, before, number, commit)
        else:
            assert receipt.replicas.keys() == before.keys()
            self.serves = dict.fromkeys(before, number)

    def believe(self, error, before, number, commit):
        said = error.facts["replicas"]
        assert said.keys() == before.keys()
        decided = any(one["new"] for one in said.values())
        for replica in self.replicas:
            one = said[replica.name]
            if one["state"] == "serves":
                assert one["new"] == decided, "old weights are served beside new ones"
                # It may be known to have weights, and not whether it computes.
                assert replica.serves() in (
                    [one["version"], None] if one["why"] else [one["version"]]
                )
                assert one["version"] == (number if one["new"] else before[replica.name])
            elif one["state"] in ("refuses", "busy"):
                assert replica.serves() is None
            else:
                assert replica.serves() in (None, before[replica.name], number)
            self.serves[replica.name] = replica.serves()
        clean = all(one["state"] == "serves" and not one["new"] for one in said.values())
        assert error.model_intact == clean

    @rule()
    def start_a_new_fleet(self):
        """The process that held the old one has ended."""
        self.fleet = self.new_fleet()

    @rule()
    def abort(self):
        self.fleet.abort()
        self.serves = {replica.name: replica.serves() for replica in self.replicas}

    @rule(number=st.integers(1, 4))
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

    @invariant()
    def all_that_serve_serve_the_same(self):
        assert len(set(getattr(self, "serves", {}).values()) - {None}) <= 1


FleetMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
TestFleet = FleetMachine.TestCase
