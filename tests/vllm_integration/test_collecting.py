"""Models of vLLM that keep what they are given, updated through a buffer that is filled again.

Some of vLLM's models read their whole source before they load anything, others put a part of it
aside. The sender packs tensors into one buffer and fills it with 0xFF between them, so that what is
read too late is NaN. The yardstick is a new engine that vLLM loaded by itself from the files.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

STREAMS = ("one buffer", "buffers of four", "shuffled")


@pytest.mark.holds("frameworks-O3")
@pytest.mark.parametrize(
    ("kind", "model", "keeps"),
    [
        ("bert", "BertEmbeddingModel", "received"),
        ("modernbert", "ModernBertForSequenceClassification", "put aside"),
    ],
)
def test_a_model_that_collects_gets_what_was_sent(kind, model, keeps, run_case):
    """BERT makes a list of everything, so everything is copied, once. ModernBERT puts aside what is
    not in its backbone, and that alone is copied. Of a mapping nothing is, whose memory stays."""
    case = run_case("collecting", kind=kind, timeout=180)
    assert case["class"] == model
    assert case["differ"], "or else nothing here could fail"
    assert case["fresh"]
    steps = case["steps"]
    assert [label for label, step in steps.items() if not step["same"]] == []
    assert {label: steps[label]["copied"] for label in STREAMS} == {
        label: steps[label][keeps] for label in STREAMS
    }
    assert steps["mapping"]["copied"] == 0
    assert 0 < steps["one buffer"][keeps] <= steps["one buffer"]["received"]


@pytest.mark.holds("frameworks-O1")
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_model_that_loads_as_it_reads_needs_no_copies(kind, run_case):
    """Neither for fused projections, nor for experts: the receipt says that no byte was copied."""
    case = run_case("collecting", kind=kind, timeout=180)
    assert case["differ"], "or else nothing here could fail"
    for label, step in case["steps"].items():
        assert (label, step["same"], step["copied"]) == (label, True, 0)
