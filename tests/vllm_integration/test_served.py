"""A server is updated over HTTP, at rest and while it generates, by vLLM's own client.

The yardstick is an engine that was started on the same checkpoint in another process: tokens and
log-probabilities, bit for bit. A request that was in flight ends as the mode of the pause says.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}

STEPS = {
    "B": "B",
    "A in small buckets, atomic": "A",
    "paused by abort": "B",
    "paused by wait": "A",
    "paused by keep": "B",
    "A after it": "A",
}


def test_a_server_is_updated_over_http_also_while_it_generates(run_case):
    case = run_case("served", timeout=400, environment=ENVIRONMENT).whole()
    assert case["A is not B"]
    assert case["at first"] == "A"
    steps = case["steps"]
    told, served, version = steps.pop("refused: a lie")
    assert "HTTPError: 500" in told
    assert (served, version) == ("B", "paused by keep")
    told, served, version = steps.pop("refused: met before another")
    assert "HTTPError: 500" in told
    assert (served, version) == ("A", "default")
    assert steps == {label: [None, want, label] for label, want in STEPS.items()}
    reason, tokens, under_way = case["request, abort"]
    assert (reason, under_way) == ("abort", False)
    assert tokens < 412, "it was not done"
    assert case["request, wait"] == ["length", 412, False]
    assert case["request, keep"] == ["length", 412, True]
