"""A load by a plan and the same load by the model's loaders come to the same.

Two equal models get the same loads, most of them broken: one with plans, the other without. Damage
shown: a plan that goes another way to a wrong tensor, that lets a fault pass which the loaders' watch
would have found, that names another fault, or that says something else about what is left.
"""

import copy
import re
from unittest import mock

import attrs
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loads import loads
from random_models import BUCKETS, Subject, run_load
from trees import recipes

from weightload import staging
from weightload.testing import identical

SAID = (
    "kind", "outcome", "version", "commit", "model_intact", "verdict", "scope", "consumed",
    "skipped", "missing", "unexpected", "duplicate", "bytes_received", "casts", "tensors_moved",
    "moved",
)  # fmt: skip
"""What a receipt says on both ways; what else it says is how long or by which memory it went."""


OF_HOOKS = ("hook fails", "hook fails half way", "hook misfits")


@attrs.define(eq=False)
class Watched(Subject):
    """Keeps the session of its last load."""

    session_of_last: object = None

    def session_for(self, load):
        self.session_of_last = super().session_for(load)
        return self.session_of_last


def said(session):
    """Return what is known of a session that has ended, without its number."""
    receipt = session.receipt
    if receipt is None:
        return session.state
    cause = re.sub(r"[Ss]ession \d+", "session N", receipt.cause or "")
    return {"cause": cause, **{name: getattr(receipt, name) for name in SAID}}


def excused(one, load):
    """Whether a load was refused for what nobody could know before: a name that came late."""
    return one["cause"].partition(":")[0] in {error.__name__ for error in load.excuses}


def spares(session):
    """Whether hooks did not run because they do the same whatever is loaded, or are done in pieces."""
    receipt = session.receipt
    return receipt is not None and receipt.hooks_spared + receipt.hooks_in_pieces > 0


def tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_both_ways_come_to_the_same(data):
    with mock.patch.object(staging, "BUCKET", data.draw(BUCKETS)):
        both_ways_come_to_the_same(data)


def both_ways_come_to_the_same(data):
    recipe = data.draw(recipes)
    ways = {plans: Watched(recipe) for plans in (True, False)}
    one = ways[False]
    recorded = data.draw(
        st.sampled_from([0, 1, 2, 2])
    )  # so many loads are right before faults come
    count = data.draw(st.integers(2, 4))
    for number in range(count + 1):
        state = (recipe, one.served, one.known, one.first, one.ever, one.tried, one.poisoned)
        load = data.draw(loads(*state, last=number in (*range(recorded), count)))
        assume(load.fault != "loader writes outside")  # a plan does not ask the loader
        outcomes = {}
        for plans, subject in ways.items():
            mine = copy.deepcopy(load)
            mine.options["plans"] = plans
            outcomes[plans], _ = run_load(subject, mine)
        if spares(ways[True].session_of_last):
            # What does not run cannot fail, or another one fails, and what comes late is in time.
            late = bool(load.excuses) and outcomes[True] == "finished" != outcomes[False]
            if late or load.fault in OF_HOOKS:
                return  # the two models differ now
        assert outcomes[True] == outcomes[False]
        told = [said(subject.session_of_last) for subject in ways.values()]
        if all(isinstance(way, dict) and excused(way, load) for way in told):
            for one_way in told:  # a loader that is asked later finds other things gone
                del one_way["cause"]
                for names in ("unexpected", "duplicate"):
                    del one_way[names]
        assert told[0] == told[1]
        if one.poisoned:
            continue
        for (name, left), (other, right) in zip(
            tensors(ways[True].model), tensors(one.model), strict=True
        ):
            assert name == other
            assert identical(left, right), name
