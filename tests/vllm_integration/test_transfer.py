"""A trainer in another process sends its weights, and the engine is then a fresh engine on them.

Through shared memory, sockets and files; in buckets of 1, 8 and 64 MiB, and in buckets that are smaller
than most tensors, which then come in parts; on one rank and on two. Both of vLLM's own worker and of the
guarded one. The yardstick is a new engine on the same checkpoint, compared bit for bit.
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
    ("family", "ranks", "worker"),
    [
        ("llama", 2, "auto"),
        ("mixtral", 2, GUARDED),
        ("qwen2-tied", 1, GUARDED),
        ("w8a8-dynamic", 1, "auto"),
    ],
)
def test_what_a_trainer_sends_is_what_the_engine_serves(family, ranks, worker, run_case):
    case = run_case(
        "transfer", family=family, ranks=ranks, worker=worker, timeout=400, environment=ENVIRONMENT
    )
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    assert len(case["steps"]) == 12
    good = {"raised": None, "verdict": "same"}
    wrong = {
        label: step for label, step in case["steps"].items() if step != {**good, "version": label}
    }
    assert wrong == {}
