"""Several engines of vLLM are updated as one, and it is known which of them serves what.

Damage shown: an actor that is killed in mid-update, or whose loader fails in the last layer, leaves
the other one on other weights than the caller believes, or in a mixture. The yardstick for every
engine, after every update, is a new engine on the checkpoint, bit for bit.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENVIRONMENT = {"TORCH_COMPILE_DISABLE": "1"}
OLD = {"state": "serves", "version": "A", "new": False, "why": None}
NEW = {"state": "serves", "version": "B", "new": True, "why": None}


def problems(step, version, before):
    """Yield what is not as it has to be after an update that went well."""
    if step["error"]:
        yield step["error"]
        return
    if step["serves"] != {"first": version, "second": version}:
        yield f"serves {step['serves']}"
    if step["before"] != before:
        yield f"says that before it served {step['before']}"
    if step["receipts"] != {name: [[0, "finished", version]] for name in ("first", "second")}:
        yield f"has receipts {step['receipts']}"


@pytest.mark.holds("H07", "H14")
def test_two_ray_actors_are_updated_together(run_case):
    """Whoever is not killed serves what was agreed upon; a second update brings both there."""
    pytest.importorskip("ray")
    case = run_case("ray_fleet", family="llama", environment=ENVIRONMENT, timeout=300)
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    steps = case["steps"]

    both = {"first": "A", "second": "A"}
    went_well = {
        "to B": ("B", {"first": None, "second": None}),
        "to A, as a stream": ("A", {"first": "B", "second": "B"}),
        "to B, from a folder": ("B", both),
        "to A, from a folder": ("A", {"first": "B", "second": "B"}),
        "and then to B": ("B", both),
        "and back to A": ("A", {"first": "B", "second": "B"}),
        "both to B": ("B", {"first": "A", "second": None}),
        "both back to A": ("A", {"first": "B", "second": "B"}),
        "both to B again": ("B", {"first": "B", "second": None}),
    }
    wrong = {label: list(problems(steps[label], *want)) for label, want in went_well.items()}
    assert {label: texts for label, texts in wrong.items() if texts} == {}

    failed = steps["one fails in its last layer"]
    assert failed["replicas"] == {"first": OLD, "second": OLD}
    assert failed["serves"] == both
    assert failed["model_intact"]
    assert "WeightMismatchError" in failed["cause"]

    killed = steps["one is killed in mid-load"]
    assert killed["replicas"]["first"] == OLD
    assert killed["replicas"]["second"]["state"] == "lost"
    assert killed["serves"] == {"first": "A", "second": "lost"}
    assert "'second' is lost" in killed["error"]
    assert "EngineLostError" in killed["cause"]
    without = steps["the fleet as it is"]
    assert "'second' cannot take part, and nothing was begun" in without["error"]
    assert without["serves"] == {"first": "A", "second": "lost"}
    assert case["started anew"] == both

    late = steps["one is killed after the decision"]
    assert late["replicas"]["first"] == NEW
    assert late["replicas"]["second"]["state"] == "lost"
    assert late["serves"] == {"first": "B", "second": "lost"}
    assert "agreed upon, and missed by 'second'" in late["error"]

    assert max(killed["seconds"], late["seconds"], failed["seconds"]) < 30
    assert case["files left"] == []


@pytest.mark.holds("H14")
def test_a_server_behind_http_and_an_engine_of_this_process_are_updated_together(run_case):
    """A real server; a request that comes in the middle waits, and gets the new weights' answer."""
    case = run_case("http_fleet", family="llama", environment=ENVIRONMENT, timeout=400)
    assert case["A against B"] == "differ", "or else nothing here could fail"
    assert case["before"] == ["A", "A"]
    steps = case["steps"]
    for label, version in (
        ("to B", "B"),
        ("to A, from a folder", "A"),
        ("to B, with a request in the middle", "B"),
    ):
        assert steps[label] == {"error": None, "serves": [version, version]}, label
    assert case["version"] == "1"

    short = steps["without a tensor"]
    assert "never arrived" in short["error"]
    assert (short["states"], short["serves"]) == (["serves", "serves"], ["A", "A"])

    assert case["paused"] is True
    assert case["answered in the middle"] == []
    assert case["answers"] == ["B"]

    killed = steps["the server is killed"]
    assert "Nobody listens at" in killed["error"]
    assert (killed["states"], killed["serves"]) == (["lost", "serves"], ["lost", "B"])
    assert case["files left"] == []


@pytest.mark.holds("H07")
def test_every_data_parallel_core_of_an_engine_is_heard(run_case):
    """What the second core says about an update is lost in vLLM's own ``collective_rpc``."""
    case = run_case("data_parallel", family="llama", environment=ENVIRONMENT, timeout=400)
    assert case["A against B"] == "differ", "or else nothing here could fail"
    assert case["before"] == ["A", "A"]
    assert case["vLLM hears"] == 1
    assert case["to B"] == [2, "B", "B"]
    text, *serves = case["short"]
    assert "was taken back" in text
    assert serves == ["B", "B"]
    assert case["to A"] == [2, "A", "A"]
    assert case["files left"] == []
