"""The examples of the documentation run, and show what they are there to show.

Damage shown: an engine that samples with other weights than the trainer believes, by one step of
training or by all of them, which no error reports and only the log-probabilities give away.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

EXAMPLES = Path(__file__).parents[2] / "docs/examples"

NUMERICS = {
    # Two programs sum some hundred products in another order: some units in the last place of
    # log-probabilities of about 6, which are 5e-7 apart.
    "float32": 2e-6,
    # Activations of about 1 have a last place of 8e-3, and logits of about 0.1 one of 5e-4.
    "bfloat16": 4e-3,
}


def test_a_training_loop_has_the_trainer_and_the_engine_agree(tmp_path):
    """After each update they differ by the numerics; without it by ten times that and more."""
    figures, log = tmp_path / "figures.json", tmp_path / "log.txt"
    command = [sys.executable, str(EXAMPLES / "rl_loop.py"), "--dtype", *NUMERICS, "--steps", "3"]
    settings = {
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "TMPDIR": str(tmp_path),
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),  # names of sockets have to be short
    }
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--samples", "16", "--json", str(figures)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            status = process.wait(240)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert status == 0, log.read_text()[-4000:]
    assert not list(tmp_path.glob("rl-loop-*")), "a folder with weights is left behind"
    found = json.loads(figures.read_text())
    assert found.keys() == NUMERICS.keys()
    for dtype, rows in found.items():
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:
            assert row["updated"] < NUMERICS[dtype]
            assert row["left out"] > 5 * NUMERICS[dtype]
        never = [row["never"] for row in rows]
        assert never == sorted(never), "each update that is left out takes them further apart"
        assert never[-1] > 10 * NUMERICS[dtype]
