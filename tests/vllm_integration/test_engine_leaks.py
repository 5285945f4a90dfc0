"""An engine that is reloaded again and again does not grow.

A session that stays reachable keeps staged weights; a hook that runs again may leave what it made
the last time. Each costs little, until a training run has reloaded its engine a thousand times.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

MORE = {"resident": 12.0, "objects": 30}
"""MiB, and objects of any type, that 30 reloads may add; vLLM adds some of its own."""


@pytest.mark.holds("W22")
def test_fifty_reloads_with_new_weights_each_time_leave_nothing_behind(run_case):
    """From mappings, iterators and files, as a stream and atomic; some fail in the middle first."""
    case = run_case("leaks", family="llama", timeout=300)
    assert all(text.startswith("tokens differ") for text in case["one after another"])
    assert case["verdicts"] == dict.fromkeys(["1", "13", "26", "38", "50"], "same")
    assert case["changes"] == []
    assert len(case["ways"]) == 55
    assert len(set(case["ways"])) == 8

    # To look at a storage gives it an object, so the first look does not count.
    _, first, *later = case["held"]
    assert len(later) == 3
    for held in later:
        for exact in ("tensors", "storages", "bytes"):
            assert held[exact] == first[exact], f"{exact}: {case['held']}"
        for roughly, more in MORE.items():
            assert held[roughly] < first[roughly] + more, f"{roughly}: {case['held']}"
