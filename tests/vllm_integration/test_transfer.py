"""A trainer in another process sends its weights, and the engine is then a fresh engine on them.

Through shared memory, sockets and files; in buckets of 1, 8 and 64 MiB, with tensors that are larger and
come in parts; on one rank and on two; under vLLM's own worker and under the guarded one. The yardstick is a new engine on the same checkpoint, compared bit for bit.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or vLLM wants a memory node for each rank
    "TORCH_COMPILE_DISABLE": "1",  # small models; compilation in workers takes ten seconds or more
}
GUARDED = "weightload.vllm.GuardedWorker"


@pytest.mark.parametrize(
    ("family", "ranks", "worker", "large"),
    [
        ("llama", 2, "auto", False),
        ("mixtral", 2, GUARDED, False),
        ("qwen2-tied", 1, GUARDED, False),
        ("w8a8-dynamic", 1, "auto", False),
        ("llama", 1, "auto", True),
    ],
)
def test_what_a_trainer_sends_is_what_the_engine_serves(family, ranks, worker, large, run_case):
    case = run_case(
        "transfer",
        family=family,
        ranks=ranks,
        worker=worker,
        large=large,
        timeout=400,
        environment=ENVIRONMENT,
    )
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    steps = case["steps"]
    assert len(steps) == (10 if large else 13)
    good = {"raised": None, "verdict": "same"}
    wrong = {label: step for label, step in steps.items() if step != {**good, "version": label}}
    assert wrong == {}
