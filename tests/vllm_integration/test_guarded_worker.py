"""Under the guarded worker no mixture runs, and vLLM's own reload calls are right or refused.

vLLM's own calls give wrong tokens for Mixtral on a CPU; through sessions they give exactly those of an
engine that was started on the new weights. On two ranks the workers are processes of their own, and a
failure of either reaches the caller as an error of the call, after which the next call works.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SERVES = {
    "reload_weights from a path": "B",
    "reload_weights of the checkpoint it started on": "A",
    "reload_weights from tensors": "B",
    "recovered": "A",
    "an update in two chunks": "B",
    "finished after that": "B",
    "and the first of them finished": "B",
    "and a complete update": "B",
    "at the end": "A",
}
"""What is served afterwards, of the calls that succeed."""

REFUSED = {
    "kernel format": "UnsupportedError",
    "a transport past the loaders": "UnsupportedError",
    "a finish without a start": "UsageError",
    "an update that is started twice": "ModelBusyError",
    "a step while an update is open": "ModelBusyError",
    "a cache that cannot be reset": "OSError",
    "reload_weights without a norm": "IncompleteLoadError",
    "a step of a poisoned engine": "ModelPoisonedError",
    "an update that lacks a chunk": "IncompleteLoadError",
    "an update whose trainer dies": "ConnectionError",
    "a finish after that": "UsageError",
    "rank 0 alone fails": "WeightMismatchError",
    "rank 1 alone fails": "WeightMismatchError",
}
"""The class of the error; on two ranks vLLM makes a RuntimeError of each, with our text in it."""

TEXTS = {
    "kernel format": "past every check",
    "a transport past the loaders": "past the model's loaders",
    "a finish without a start": "not started, or failed",
    "an update that is started twice": "One at a time",
    "an update that lacks a chunk": "never arrived whole",
    "a cache that cannot be reset": "the cache does not answer",
    "an update whose trainer dies": "the trainer is gone",
    "rank 0 alone fails": "this rank is broken",
    "rank 1 alone fails": "this rank is broken",
}

POISONED = {
    "a cache that cannot be reset",
    "reload_weights without a norm",
    "a step of a poisoned engine",
    "an update that lacks a chunk",
    "an update whose trainer dies",
    "a finish after that",
    "rank 0 alone fails",
    "rank 1 alone fails",
}
STILL_OPEN = {"a step while an update is open", "an update that is started twice"}


def problems(label, found, ranks):
    refused = REFUSED.get(label)
    if ranks == 2 and refused is not None:
        refused = "RuntimeError"
    if found["error"] != refused:
        yield f"raised {found['error']}, not {refused}: {found['text']}"
    if TEXTS.get(label, "") not in found["text"]:
        yield f"does not say {TEXTS[label]!r}: {found['text']}"
    if found["poisoned"] != [label in POISONED] * ranks:
        yield f"poisoned: {found['poisoned']}"
    if found["open"] != [label in STILL_OPEN] * ranks:
        yield f"open: {found['open']}"
    if "serves" in found and found["serves"] != SERVES.get(label, "A"):
        yield f"serves {found['serves']}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_mixture_runs_and_native_calls_are_right_or_refused(run_case, ranks):
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    case = run_case(
        "guarded", family="mixtral", ranks=ranks, timeout=400, environment=environment
    ).whole()
    assert case.pop("A against B").startswith("tokens differ"), "or else nothing here could fail"
    assert case.pop("fresh") == "same"
    assert case.keys() <= SERVES.keys() | REFUSED.keys()
    wrong = {label: list(problems(label, found, ranks)) for label, found in case.items()}
    assert {label: texts for label, texts in wrong.items() if texts} == {}
