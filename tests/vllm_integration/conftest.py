"""Runs cases on real engines, each in a process of its own, and hands their results to tests.

An engine that raised may leave requests or distributed groups behind, or hang. So a case is a script
in ``cases/`` that prints nothing that matters and writes one JSON file; the tests read it. A case
that several tests look at runs once, also when several processes run the tests.
"""

import fcntl
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
        assert self.result is not None, f"the case ended with status {self.status}:\n{self.log}"
        return self.result[key]


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
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return Case(
        result=json.loads(out.read_text()) if out.exists() else None,
        log=log.read_text()[-4000:],
        status=status,
    )


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all processes of one test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def run_case(shared):
    """Return what a case gave, running it if no test has asked for it before."""
    known = {}

    def run(script, arguments, *, timeout=120, environment=None):
        key = json.dumps([script, arguments, environment], sort_keys=True)
        if key not in known:
            words = [script, *map(str, arguments.values()), *(environment or {}).values()]
            folder = shared / "-".join(words).replace("/", "_")
            folder.mkdir(exist_ok=True)
            done = folder / "case.json"
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not done.exists():
                    case = run_process(
                        script,
                        {**arguments, "folder": str(folder)},
                        folder,
                        timeout=timeout,
                        environment=environment,
                    )
                    done.write_text(json.dumps(attrs.asdict(case)))
            known[key] = Case(**json.loads(done.read_text()))
        return known[key]

    return run


def grouped(*names):
    """Parameters whose tests share a case, so one process should run them all."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(str(name))) for name in names]
