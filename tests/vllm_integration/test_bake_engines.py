"""A dry run on a live engine leaves no trace, and loads by its plan equal fresh engines bit for bit.

The plan is made where the engine was loaded by vLLM itself, and where weightload loaded it. Only the
parts of sources that the plan names are given to the replay.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("family", "origins"),
    [("llama", ["weightload"]), ("mixtral", ["auto"]), ("w8a8-static", ["auto", "weightload"])],
)
def test_a_dry_run_leaves_no_trace_and_its_plan_loads_the_engine(run_case, family, origins):
    case = run_case("bake", family=family, origins=origins, timeout=240).whole()
    assert list(case) == origins
    for found in case.values():
        assert found["A against B"] != "same"
        assert found["looked at"] > 1000, "the inventory saw nothing"
        assert found["trace"] == []
        assert found["still A"] == "same"
        assert found["writes"] == found["names"], "vLLM's loaders copy views here, and nothing else"
        assert found["computed"] == found["skipped"] == []
        assert found["replays"] == [["B", "same", 0], ["A", "same", 0], ["B", "same", 0]]
