"""Trainers that lie, die, fall silent or come two at a time, and workers that end, on a live engine.

Each would leave an engine that serves a mixture, waits for ever, or publishes a version that it does
not have. Here every one ends in an error in seconds; the engine then serves what it served, or refuses;
nothing is published; and the next update, by a trainer that does not know what happened, ends in an
engine equal to a fresh one, bit for bit.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}

SAID = {
    "shape": "came; announced was [",
    "dtype": "of float32 came; announced was [",
    "digest": "expected 0000000000000000",
    "count": "closed the update with tensors 22; received 21",
    "order": "Bucket 105 came, and those before it were left out; bucket 100 was expected",
    "twice": "Bucket 100 came again; bucket 101 was expected",
    "rank 1 alone fails": "this rank is broken",
    "killed in a broadcast": "has ended or did not answer in time (RuntimeError: ",
    "silent": "It is given up when nothing came for 2 s",
}
"""What the trainer is told."""

KILLED_IN_BUCKET = {"shm": "Broken pipe", "gloo": "The trainer at 127.0.0.1:"}

LEFT_OUT = {
    "shm": "Bucket 101 came, and those before it were left out; bucket 100 was expected",
    "gloo": "The engine answered before workers",
}

PROMPTLY = 30.0
"""Seconds; the deadline that the trainers here set is 20."""


def problems(label, found, ranks):
    transport, fault, commit = label.split(", ")
    said = str(found["raised"])
    wanted = {"left out": LEFT_OUT[transport], "killed in a bucket": KILLED_IN_BUCKET[transport]}
    told = fault not in ("killed between buckets", "ended from outside")
    if told and wanted.get(fault, SAID.get(fault)) not in said:
        yield f"the trainer is told {said}"
    if found["seconds"] > PROMPTLY:
        yield f"took {found['seconds']} s"
    if found["published"]:
        yield "a version was published"
    given_up_later = fault in ("killed between buckets", "silent")
    if not given_up_later and found["finish"] is None:
        yield "a finish after it was not refused"
    if found["open"] != [given_up_later] * ranks:
        yield f"sessions open: {found['open']}"
    if commit == "atomic" and any(found["poisoned"]):
        yield "poisoned, though nothing should have been committed"
    if len(set(found["poisoned"])) != 1:
        yield f"ranks disagree: {found['poisoned']}"
    if not any(found["poisoned"]) and not given_up_later and found["serves"] != "A":
        yield f"serves {found['serves']}"
    for path in "AB":
        if found[f"then {path}"] != "same":
            yield f"the next update to {path} ends in {found[f'then {path}']}"


@pytest.mark.holds("H04", "H07")
@pytest.mark.parametrize(("ranks", "worker"), [(1, "auto"), (2, "weightload.vllm.GuardedWorker")])
def test_a_fault_is_told_in_time_and_the_next_update_is_right(ranks, worker, run_case):
    case = run_case(
        "transfer_faults", ranks=ranks, worker=worker, timeout=500, environment=ENVIRONMENT
    ).whole()
    assert case.pop("A against B").startswith("tokens differ"), "or else nothing here could fail"
    assert case.pop("files left") == [], "of trainers that were killed as well"
    assert case.pop("files seen") > 4
    two = case.pop("two at once")
    assert two["first"] is None
    assert two["verdict"] == "same"
    assert two["version"] == "first of two"
    assert "Another update is under way" in str(two["others"][0])
    assert "Another update is under way" in str(two["others"][1])
    assert "The update that is under way goes on" in str(two["others"][2])
    if ranks == 2:
        lost = case.pop("receiver killed")
        assert lost["raised"] is not None
        assert lost["seconds"] < PROMPTLY
    assert len(case) == (23 if ranks == 1 else 9)
    wrong = {label: list(problems(label, found, ranks)) for label, found in case.items()}
    assert {label: texts for label, texts in wrong.items() if texts} == {}
    written = [label for label, found in case.items() if any(found["poisoned"])]
    assert written, "no fault came after a live write, so poison was not tried"
