"""An engine with a draft model is updated from one stream, target and draft together or neither.

What an engine serves does not depend on the weights of its draft, only how fast; so parts of the draft
are computed and compared with those of a fresh engine as well.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_target_and_draft_become_those_of_a_fresh_engine_or_stay(run_case):
    case = run_case("drafts", timeout=240).whole()
    for origin in ("auto", "weightload"):
        found = case[origin]
        assert found["A against B"] != "same"
        assert found["draft A against B"] is False
        assert found["a tensor of the draft is missing"] is True
        assert found["still A"] == ["same", True]
        assert found["B"] == ["same", True]
        assert found["version"] == "B"
        assert found["poisoned"] is False
