"""Runs cases on real engines, each in a process of its own, and hands their results to tests.

An engine that raised may leave requests or distributed groups behind, or hang. So a case is a script
in ``cases/`` that prints nothing that matters and writes one JSON file; a test runs one case and looks
at everything that came out, because to start an engine is what takes the time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

CASES = Path(__file__).parent / "cases"


@attrs.frozen(kw_only=True)
class Case:
    """How one case ended.

    Attributes:
        result: what it wrote; ``None`` if it did not get that far.
        log: the end of what it printed.
        status: exit status, or ``None`` if it ran out of time and was killed.
    """

    result: dict | None
    log: str
    status: int | None

    def __getitem__(self, key):
        return self.whole()[key]

    def whole(self):
        """Return everything that the case gave."""
        assert self.result is not None, f"the case ended with status {self.status}:\n{self.log}"
        return dict(self.result)


def run_process(script, arguments, folder, *, timeout, environment=None):
    """Run a case and end every process that it started."""
    out, log = folder / "result.json", folder / "log.txt"
    command = [sys.executable, str(CASES / f"{script}.py"), json.dumps(arguments), str(out)]
    settings = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **(environment or {})}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Case(
        result=json.loads(out.read_text()) if out.exists() else None,
        log=log.read_text()[-4000:],
        status=status,
    )


@pytest.fixture
def run_case(tmp_path):
    """Run a case in a folder of this test's own and return what it gave."""

    def run(script, *, timeout=120, environment=None, **arguments):
        arguments["folder"] = str(tmp_path)
        return run_process(script, arguments, tmp_path, timeout=timeout, environment=environment)

    return run
