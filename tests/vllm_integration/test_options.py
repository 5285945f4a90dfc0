"""The options of a reload on real engines: what was asked for holds, bit for bit.

Verified reloads process what vLLM's hooks repack a second time and find no difference. Loads of a part
give what a new engine gives on a checkpoint that was put together by hand.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PARTS = {
    "llama": ["*norm*", "model.layers.0.self_attn.*"],
    "mixtral": ["model.layers.1.block_sparse_moe.*", "model.norm.weight"],
}
VERIFIED = {"verified, from files", "verified, from a stream", "verified, atomic", "a sample of it"}
PARTIAL = {
    "a part of it",
    "the rest of it",
    "a part of it, atomic",
    "the rest may stay away",
}


@pytest.mark.parametrize("family", PARTS)
def test_what_was_asked_for_holds(run_case, family):
    case = run_case("options", family=family, part=PARTS[family], timeout=400).whole()
    for other in ("A against B", "A against mixed"):
        assert case.pop(other) != "same", "or else nothing here could fail"
    assert case.pop("told") == [["A again", "told"]]
    reports = case.pop("reports")
    assert reports["last"] == reports["sent"]
    refused = case.pop("checked for NaN")
    assert (refused["error"], refused["model_intact"]) == ("WeightMismatchError", True)
    assert refused["verdict"] == "same"
    assert "model.layers.1.input_layernorm.weight" in refused["text"]
    assert case.pop("NaN computes") != "same"
    case.pop("after NaN, blocks kept")  # as the kernels of this platform have it
    assert case.keys() >= VERIFIED | PARTIAL | {"after NaN"}
    for label, step in case.items():
        assert step["verdict"] == "same", label
        assert step["changes"] == [], label
        assert step["version"] == label
        assert (step["verified"] is not None) == (label in VERIFIED), label
        assert (step["missing"] > 0) == (label == "the rest may stay away"), label
    for label in VERIFIED:
        assert case[label]["verified"]["units"] > 0
        assert case[label]["verified"]["tensors"] > 0
