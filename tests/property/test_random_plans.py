"""Any tree of toy layers: a dry run leaves no trace, and a load by its plan gives the fresh model."""

from hypothesis import given
from hypothesis import strategies as st
from trees import recipes

from weightload import WeightLoadSession, bake
from weightload.replaying import part_of
from weightload.testing import Bench
from weightload.testing.inventory import Inventory


@given(recipes, st.sampled_from(["stream", "atomic"]), st.randoms(use_true_random=False))
def test_a_plan_of_any_model_loads_it_right(factory, commit, random):
    """The names come in any order, and the plan is made twice: of 1 for 2, then of 2 for 3."""
    bench = Bench(factory)
    for seed in (2, 3):
        state = bench.state(seed)
        names = random.sample(list(state), len(state))
        forms = {name: (state[name].shape, state[name].dtype) for name in names}
        before = Inventory.of(bench.model)
        plan = bake(bench.model, forms)
        assert before.differences(Inventory.of(bench.model)) == []
        assert not plan.skipped
        with WeightLoadSession(bench.model, commit=commit) as session:
            session.replay(plan, lambda name, view, state=state: part_of(state[name], view).clone())
        bench.serves = state
        bench.check_finished(session)
