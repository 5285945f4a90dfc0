"""A trainer's process updates an engine on a GPU three times, and captured graphs replay the new weights.

Through vLLM's own wires (CUDA IPC on one GPU, NCCL between two) and through those of weightload, with
graphs of the whole model and of its pieces. The yardstick is a fresh engine, compared bit for bit.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]

CASES = Path(__file__).parents[1] / "vllm_integration" / "conftest.py"


@pytest.fixture
def run_case(tmp_path):
    """Run a case of the other engine tests in a process of its own."""
    spec = importlib.util.spec_from_file_location("engine_cases", CASES)
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)

    def run(script, **arguments):
        arguments["folder"] = str(tmp_path)
        return cases.run_process(script, arguments, tmp_path, timeout=900)

    return run


@pytest.mark.parametrize("graphs", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("backend", ["ipc", "nccl", "shm", "gloo"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_graphs_replay_what_a_trainer_sent(family, backend, graphs, run_case):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("two ranks of a communicator may not share a GPU")
    case = run_case("transfer_gpu", family=family, backend=backend, graphs=graphs)
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    assert case["at first"] == "same"
    assert case["steps"] == {str(number): [None, "same"] for number in range(3)}
