"""Any tree of toy layers and any stream of its tensors: the model is what a fresh load gives, or
the load is refused and says truly what is left. ``make fuzz`` runs the same with many examples."""

from collections import Counter

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from loads import FAULTS, SCOPES, SOURCES
from random_models import run_example
from torch import nn
from trees import KINDS, REFERRING, ROOTS, TABLE, Recipe

from weightload import Scope, WeightLoadSession
from weightload.testing import (
    check_equal,
    kernels,
    layers,
    loading,
    make_state,
    sharing,
    toy_framework,
)

EXAMPLES = 12 * settings.default.max_examples


def unnoticed(coverage):
    """Return the faults of which none was refused so far."""
    seen = {group for group, outcome in coverage if "refused" in outcome or "aborted" in outcome}
    return {f"fault: {fault}" for fault in FAULTS} - seen


def test_a_load_gives_what_a_fresh_load_gives_or_is_refused():
    """Up to four loads in a row, most of them broken, and a complete one at the end.

    Examples resemble each other, so that a round of them may miss a fault; others follow then.
    """
    coverage = Counter()
    for number in range(5):

        @seed(number)
        @settings(max_examples=EXAMPLES)
        @given(st.data())
        def every_example(data):
            run_example(data.draw, coverage)

        every_example()
        if EXAMPLES < 700:
            return
        if not unnoticed(coverage):
            break
    assert unnoticed(coverage) == set(), "a fault that nobody noticed"
    finished = {group for group, outcome in coverage if outcome == "finished"}
    assert {f"scope: {scope}" for scope in SCOPES} - finished == set()
    assert {("source", kind) for kind in SOURCES} - coverage.keys() == set()


def test_the_kinds_are_all_that_the_kit_has():
    """A new layer of the kit joins in."""
    made = {type(make()) for make in KINDS.values()} | {sharing.TableLinear}
    known = {
        getattr(kit, name)
        for kit in (layers, loading, sharing, kernels)
        for name in kit.__all__
        if isinstance(getattr(kit, name), type) and issubclass(getattr(kit, name), nn.Module)
    }
    bases = {kernels.Processed, kernels.ProcessedAttention, kernels.ProcessedState}
    assert known - made - bases == {sharing.PackedHead, sharing.SummedState}, (
        "these refer to others"
    )


@pytest.mark.parametrize("kind", sorted({*KINDS, TABLE}))
def test_each_kind_alone_is_reloaded_right(kind):
    """The shortest tree of each kind, so that a failure there is named at once."""
    _reload(Recipe("loaders", [kind]))


@pytest.mark.parametrize("root", sorted(ROOTS))
@pytest.mark.parametrize("how", REFERRING)
def test_each_way_to_refer_to_another_layer_is_reloaded_right(how, root):
    """A layer at two places, one that shares a weight, one that is derived from another."""
    _reload(Recipe(root, ["repacked", (how, 0)]))


def _reload(factory):
    model, framework = factory(), toy_framework()
    for number in (1, 2, 1):
        state = make_state(factory, number)
        with WeightLoadSession(
            model, framework=framework, scope=Scope.full(allow_missing=model.may_miss)
        ) as session:
            session.load(state)
        check_equal(model, factory, state)
