"""A model that is split over two worker processes is reloaded on both, or on neither for good.

The workers take only calls by name, so the engine is started with a worker extension, and tensors
go through shared memory. The yardstick is a new engine on two ranks that vLLM loaded itself.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or vLLM wants a memory node for each rank
    "TORCH_COMPILE_DISABLE": "1",  # small models; compilation in workers takes ten seconds or more
}
REFUSED = {
    "source fails at the start": "SourceFailure",
    "source fails in the middle": "SourceFailure",
    "wrong shape in a stream": "WeightMismatchError",
    "wrong shape in a mapping": "WeightMismatchError",
    "no norm in a stream": "IncompleteLoadError",
    "path that does not exist": "CheckpointFileError",
    "rank 0 alone fails": "WeightMismatchError",
    "rank 1 alone fails": "WeightMismatchError",
    "rank 1 alone fails, atomic": "WeightMismatchError",
    "rank 1 alone lacks a norm": "IncompleteLoadError",
    "rank 1 alone lacks a norm, atomic": "IncompleteLoadError",
    "interrupted while rank 1 loads": "KeyboardInterrupt",
    "a load is lost": "TimeoutError",
    "a finish is lost": "TimeoutError",
}
SEEN_BEFORE_A_WRITE = {
    "source fails at the start",
    "wrong shape in a mapping",
    "path that does not exist",
    "rank 1 alone fails, atomic",
    "rank 1 alone lacks a norm, atomic",
    "a load is lost",
}
MIXED = {"rank 1 alone lacks a norm", "a finish is lost"}
"""Live weights were written by then, so neither rank may be served, whatever each holds itself."""
PROMPTLY = 10.0
"""Seconds within which a failure has to reach the caller; a hang takes minutes."""


def step_problems(label, step):
    if step["verdict"] != "same":
        yield step["verdict"]
    if any(step["changes"]):
        yield f"tensors moved: {step['changes']}"
    if [receipt["rank"] for receipt in step["receipts"]] != [0, 1]:
        yield f"receipts of ranks {[receipt['rank'] for receipt in step['receipts']]}"
    for receipt in step["receipts"]:
        if (receipt["version"], receipt["outcome"]) != (label, "finished"):
            yield str(receipt)
    if step["versions"] != [label, label]:
        yield f"versions {step['versions']}"


def fault_problems(label, found):
    if found["error"] != REFUSED[label]:
        yield f"raised {found['error']}, not {REFUSED[label]}: {found.get('text')}"
    if found["seconds"] > PROMPTLY:
        yield f"took {found['seconds']} s"
    if found["session left"] != [None, None]:
        yield f"sessions left: {found['session left']}"
    intact = not any(found["poison"])
    if found["model_intact"] not in (None, intact):
        yield f"model_intact is {found['model_intact']}, poison is {found['poison']}"
    if label in SEEN_BEFORE_A_WRITE and not intact:
        yield f"live weights were written before the fault was seen: {found['poison']}"
    if label in MIXED and not all(found["poison"]):
        yield f"ranks disagree, and are not all poisoned: {found['poison']}"
    if "alone" in label and found["facts"].get("rank") != int(label.split()[1]):
        yield f"does not say which rank failed: {found['facts']}"
    if intact and found["is A"] != "same":
        yield f"is said to be intact, and is not: {found['is A']}"
    if found["then B"] != "same" or any(found["then changes"]):
        yield f"does not recover: {found['then B']}, {found['then changes']}"
    if found["then A"] != "same":
        yield f"does not get back to A: {found['then A']}"


@pytest.mark.holds("H07", "H14")
@pytest.mark.parametrize(
    ("family", "extension", "core"),
    [
        ("llama", "MyExtension", "in this process"),
        ("mixtral", "Extension", "in a process of its own"),
    ],
)
def test_both_ranks_are_reloaded_together(family, extension, core, run_case):
    """Right from every source, with a receipt per rank; after a fault on any rank as well."""
    several = "1" if core == "in a process of its own" else "0"
    environment = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": several}
    case = run_case(
        "two_ranks", family=family, extension=extension, environment=environment, timeout=400
    )
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    assert case["fresh"] == "same"
    assert len(case["steps"]) == 8
    assert case["faults"].keys() == REFUSED.keys()
    wrong = {label: list(step_problems(label, step)) for label, step in case["steps"].items()}
    wrong |= {label: list(fault_problems(label, one)) for label, one in case["faults"].items()}
    assert {label: texts for label, texts in wrong.items() if texts} == {}
    assert case["files left"] == []
