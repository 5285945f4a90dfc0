"""A worker that is killed in the middle of an update costs the engine, and never the caller's time.

vLLM takes an engine down when one of its workers ends. But a client whose core is in another
process waits without a limit for calls that a dying core never answers. Without weightload's look
at the processes these cases do not end.
"""

import pytest
from test_two_ranks import ENVIRONMENT

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROMPTLY = 15.0
"""Seconds for the caller to hear of it; vLLM lets the other workers take up to nine to end."""


@pytest.mark.holds("H07")
@pytest.mark.parametrize(
    ("client", "core", "moment"),
    [
        ("sync", "in this process", "between calls"),
        ("sync", "in a process of its own", "load"),
        ("async", "in a process of its own", "finish"),
    ],
)
def test_the_caller_hears_of_it_at_once(client, core, moment, run_case):
    """A reload of a lost engine is refused as well, and leaves no shared memory behind."""
    several = "1" if core == "in a process of its own" else "0"
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": several}
    case = run_case("killed", client=client, moment=moment, environment=environment, timeout=150)
    assert case["healthy"]["error"] is None
    for attempt in (case["killed"], case["once more"]):
        assert attempt["error"] == "EngineLostError"
        assert attempt["model_intact"] is False
        assert "start a new engine" in attempt["text"]
    assert case["killed"]["seconds"] < PROMPTLY
    assert case["once more"]["seconds"] < 1.0
    assert case["files left"] == []
