"""Two engines in Ray actors are updated by one trainer, through vLLM's own client for Ray.

One arena feeds both. What a trainer leaves out is refused on both, before anything is written. The
yardstick is a fresh engine, compared bit for bit.
"""

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")
pytestmark = pytest.mark.vllm


def test_two_actors_are_updated_by_one_trainer(run_case):
    case = run_case("ray_client", timeout=400, environment={"TORCH_COMPILE_DISABLE": "1"})
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    assert case["at first"] == [["A", "default"]] * 2
    assert case["updated"] == [["B", "seven"]] * 2
    assert "model.norm.weight" in case["refused"]
    assert case["after it"] == [["B", "seven"]] * 2
    assert case["and again"] == [["A", "nine"]] * 2
