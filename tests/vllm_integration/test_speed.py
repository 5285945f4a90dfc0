"""A change that makes replacing weights slow is seen before it is merged.

Small shapes, and only what must hold by CPU time, in rounds in which vLLM's own reload, weightload and
plain copies of the same bytes take turns. That what was loaded is right is checked in every round.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
ROWS = ("C2", "C5")
"""The rows that small shapes can judge while other tests run. On the others the fixed cost of a session
counts for too much there, or the bound is too near; `make bench` judges them on their own shapes."""


def test_what_must_hold_holds_where_small_shapes_can_judge():
    """The quick check of the benchmark ends without complaint, and has measured what it should."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--smoke", "--only", *ROWS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:] + ended.stdout
    rows = [line.split("|")[1].split()[0] for line in ended.stdout.splitlines() if "| C" in line]
    assert set(rows) == set(ROWS)
