"""vLLM wraps layers for adapters after they were loaded; a reload reaches what is inside.

Damage shown: the new weights go past the wrapped layers, or are refused; an adapter is applied to the
old weights, or no longer at all.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_engines_that_serve_adapters_are_reloaded_right_with_and_without_them(run_case, family):
    case = run_case("lora", family=family, timeout=400).whole()
    for other in ("A against B", "A against adapted"):
        assert case.pop(other) != "same", "or else nothing here could fail"
    assert case.pop("wrapped") > 0
    assert case.pop("refused") == ["IncompleteLoadError", True]
    assert len(case) == 7
    for label, step in case.items():
        assert (step["verdict"], step["adapted"], step["changes"]) == ("same", "same", []), label
    assert case["after a refusal"]["version"] == "verified"
