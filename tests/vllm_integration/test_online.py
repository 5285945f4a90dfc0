"""Engines that quantise while they load, and engines that start without a checkpoint's values."""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_weights_that_vllm_quantises_itself_are_quantised_again(run_case):
    """The same scales and codes as in a fresh load, in the same storages, by as many hooks."""
    case = run_case("online", family="llama", start_on="checkpoint")
    assert case["plain against online"] != "same", "the engine did not quantise anything"
    assert case["A against B"].startswith("tokens differ")
    assert case["fresh"] == "same"
    right = {"verdict": "same", "changes": [], "hooks": "same"}
    assert case["steps"] == dict.fromkeys(case["steps"], right)


@pytest.mark.parametrize("family", ["llama", "mixtral", "w4a16"])
def test_the_first_real_weights_after_dummy_ones(family, run_case):
    """What dummy values did to the model is undone by the first complete reload."""
    case = run_case("online", family=family, start_on="dummy by weightload")
    assert case["at first"] != "same", "or else nothing here could fail"
    assert (case["error"], case["poison"]) == (None, False)
    assert (case["A to B"], case["back to A"]) == ("same", "same")
    assert case["changes"] == []


def test_the_first_real_weights_after_dummy_ones_are_quantised(run_case):
    case = run_case("online", family="llama", start_on="dummy by weightload, online")
    assert case["at first"] != "same", "or else nothing here could fail"
    assert (case["error"], case["poison"]) == (None, False)
    assert (case["A to B"], case["back to A"]) == ("same", "same")
    assert case["changes"] == []


def test_what_cannot_be_known_is_refused_with_advice(run_case):
    """Online quantisation that vLLM started natively on dummy values left no record to go by."""
    case = run_case("online", family="llama", start_on="dummy by vLLM, online")
    assert case["error"] in ("UnsupportedError", "IncompleteLoadError")
    assert "load_format='weightload'" in case["text"]
    assert case["model_intact"]
    assert not case["poison"]
    assert case["unchanged"] == "same"
    assert case["changes"] == []
