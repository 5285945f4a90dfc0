"""The GPU's benchmark runs to its end without a GPU, says so, and counts no wrong result.

Damage shown: a limit that passes where nothing was measured, an arm that drops a tensor or moves one
and is still timed, and an emulation that does less than what it stands for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.case import Case, WrongResultError  # noqa: E402
from benchmarks.gpu.clock import Clock  # noqa: E402
from benchmarks.gpu.row import SMALL, SMALL_EXPERTS  # noqa: E402

ROWS = {"G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9"}
NEEDS_A_DEVICE = {"G3", "G5", "G7", "G9"}


def test_without_a_gpu_every_row_says_that_nothing_was_judged(tmp_path):
    """About 15 seconds, most of it two processes that import torch."""
    pytest.importorskip("safetensors")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--write", str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=300
    )
    [file] = tmp_path.glob("gpu-cpu-*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["id"].split()[0] for row in rows} == ROWS
    for row in rows:
        assert set(row["must"].values()) | set(row["goal"].values()) <= {None}, row
        without = row["id"].split()[0] in NEEDS_A_DEVICE
        assert row["status"].startswith("not run: no device" if without else "CPU part only"), row
        assert without or row["figures"]["weightload_s"] > 0


@pytest.fixture
def case():
    return Case(SMALL, Clock("cpu"))


def test_an_arm_that_drops_a_tensor_is_found(case):
    def drops(weights):
        case.ours(weights)
        case.model.model.norm.weight.data.fill_(0)

    with pytest.raises(WrongResultError, match=r"1 tensors are wrong, such as .*norm\.weight"):
        case.compare(1, native=False, ours=drops)


def test_an_arm_that_does_nothing_is_found_though_the_weights_were_there(case):
    with pytest.raises(WrongResultError, match="wrong"):
        case.compare(2, native=False, ours=lambda weights: None)


def test_an_arm_that_moves_a_tensor_is_found(case):
    def moves(weights):
        case.ours(weights)
        norm = case.model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)

    with pytest.raises(WrongResultError, match="moved"):
        case.compare(1, native=False, ours=moves)


@pytest.mark.parametrize("shape", [SMALL, SMALL_EXPERTS])
def test_the_emulation_writes_every_byte_as_often_as_vllm(shape):
    """Linear layers twice, experts four times; each loader runs once more on no data.

    Worked out by hand from the shape: 2 bytes an element.
    """
    case = Case(shape, Clock("cpu"))

    class Written(torch.utils._python_dispatch.TorchDispatchMode):
        real = bare = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                if args[0].is_meta:
                    self.bare += args[0].nbytes
                else:
                    self.real += args[0].nbytes
            return func(*args, **(kwargs or {}))

    with Written() as written:
        case.native(case.states[0])
    experts = 3 * shape.layers * shape.experts * shape.inner * shape.hidden * 2
    assert written.bare == case.nbytes
    assert written.real == 2 * case.nbytes + 2 * experts
    case.require(0, "the emulation")
