"""Every way in from outside does the same: worker methods, engine arguments, the async engine."""

from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def test_worker_methods_take_the_steps_one_by_one(run_case):
    """Under a prefix of one's own; ``status`` tells at every point where the model stands."""
    case = run_case("entry", family="llama", way="methods")
    nothing = dict.fromkeys(["session", "opener", "state", "version", "poison"]) | {"rank": 0}
    assert case["at first"] == nothing
    session = case["after start"]["session"]
    assert case["after start"] == {**nothing, "session": session, "state": "prepared"}
    assert case["after load"] == {**nothing, "session": session, "state": "loading"}
    assert case["after finish"] == {**nothing, "version": 7}
    assert (case["receipt"]["session"], case["receipt"]["version"]) == (session, 7)
    assert (case["verdict"], case["back to A"]) == ("same", "same")

    # After an abort it says that it must not be used, until a complete reload has finished.
    assert case["aborted"]["outcome"] == "poisoned"
    assert case["aborted"]["cause"] == "we changed our mind"
    assert case["after abort"]["version"] is None
    assert "we changed our mind" in case["after abort"]["poison"]
    assert case["finish after abort"] == "UsageError"
    assert (case["after reload"]["version"], case["after reload"]["poison"]) == (10, None)
    assert case["recovered"] == "same"
    assert not case["poisoned"]


def test_a_single_worker_may_be_in_a_process_of_its_own(run_case):
    """Though the core is in this one: tensors then go through shared memory as well."""
    environment = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    case = run_case("entry", family="llama", way="own process", environment=environment)
    assert case.result == dict.fromkeys(
        ["fresh", "B from a generator", "A from files", "B from a mapping"], "same"
    ), case.log


def test_an_installed_weightload_needs_no_import(run_case):
    """vLLM finds the load format through the entry point."""
    found = entry_points(group="vllm.general_plugins", name="weightload")
    if not found:
        pytest.skip("weightload is not installed, so vLLM cannot find it by itself")
    assert {entry.value for entry in found} == {"weightload.vllm.plugin:register"}
    assert run_case("entry", family="llama", way="plugin")["verdict"] == "same"


def test_an_async_engine_is_reloaded_between_requests(run_case):
    """It is paused meanwhile, and stays paused only if the weights are a mixture."""
    environment = {"TORCH_COMPILE_DISABLE": "1"}
    case = run_case("entry", family="llama", way="async", environment=environment)
    assert case["fresh"] == "same"
    for label in ("A to B from files", "A from a stream", "B from a mapping"):
        assert case[label] == {"verdict": "same", "version": label, "paused": False}
    assert case["no norm in a mapping"] == {
        "error": "IncompleteLoadError",
        "model_intact": True,
        "paused": False,
    }
    assert case["still B"] == "same"
    assert case["source fails"] == {
        "error": "SourceFailure",
        "model_intact": None,
        "paused": False,
    }
    assert case["still B after that"] == "same"
    assert case["no norm in a stream"] == {
        "error": "IncompleteLoadError",
        "model_intact": False,
        "paused": True,
    }
    assert case["recovered"] == "same"
