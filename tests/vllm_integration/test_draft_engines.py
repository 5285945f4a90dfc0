"""An engine with a draft model is updated from one stream, target and draft together or neither.

What an engine serves does not depend on the weights of its draft, only how fast; so parts of the draft
are computed and compared with those of a fresh engine as well.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_target_and_draft_become_those_of_a_fresh_engine_or_stay(run_case, method):
    case = run_case("drafts", timeout=240, method=method).whole()
    for origin in ("auto", "weightload"):
        found = case[origin]
        assert found["A against B"] != "same"
        assert found["shared"] is (method == "eagle")
        assert not any(found["draft A against B"]), "the drafts cannot be told apart"
        assert found["a tensor of the draft is missing"] is True
        assert found["still A"] == ["same", True]
        assert found["B"] == ["same", True]
        assert found["version"] == "B"
        assert found["poisoned"] is False
