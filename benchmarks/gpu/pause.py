"""Row G9: how long inference stands still, if the transfer goes on beside it until the commit."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.case import Case, WrongResultError, same
from benchmarks.gpu.copies import on_host
from benchmarks.gpu.model import State
from benchmarks.gpu.row import NO_DEVICE, Row, Run

BUCKET = 64 << 20


class Staged:
    """Memory of the device for one checkpoint, which is filled while the model computes.

    Args:
        like: a checkpoint on the device.
        device: it.
    """

    def __init__(self, like: State, device: str) -> None:
        self.state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self._side = torch.cuda.Stream() if device == "cuda" else None

    def fill(self, host: State, case: Case, want: torch.Tensor) -> int:
        """Bring a checkpoint here; return how often the model has computed meanwhile.

        Raises:
            WrongResultError: the model computed something else than before.
        """
        if self._side is None:
            for name, tensor in host.items():
                self.state[name].copy_(tensor)
            done: Any = None
        else:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                for name, tensor in host.items():
                    self.state[name].copy_(tensor, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
        steps = 0
        while steps == 0 or (done is not None and not done.query()):
            if not same(case.output(), want):
                raise WrongResultError("the model changed while the next weights were on the way")
            steps += 1
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
        return steps


def g9(run: Run) -> Row:
    """The pause with the transfer beside inference, and with all of it inside the pause."""
    row = Row.made(run, "G9", "time that inference stands still")
    case = Case(run.dense(0.5), run.clock)
    hosts = [on_host(state, pinned=run.clock.on_device) for state in case.states]
    staged = Staged(case.states[0], run.clock.device)
    pauses, whole, steps, direct = [], [], [], []
    for number in range(run.rounds + 1):
        which = number % 2
        want = case.output()
        run.clock.settle()
        start = time.perf_counter()
        count = staged.fill(hosts[which], case, want)
        took = run.clock.time(lambda: case.ours(staged.state))
        end = time.perf_counter() - start
        case.require(which, "the reload after the transfer")
        again = run.clock.time(lambda w=which: case.ours(hosts[1 - w]))
        case.require(1 - which, "the reload from the host")
        back = run.clock.time(lambda w=which: case.ours(hosts[w]))
        case.require(which, "the reload from the host")
        if number:
            pauses.append(took.wall)
            whole.append(end)
            steps.append(count)
            direct += [again.wall, back.wall]
    pause, reload = statistics.median(pauses), statistics.median(direct)
    last = BUCKET / run.ceilings["d2d"]
    row.figures = {
        "tensors": case.shape.tensors,
        "bytes": case.nbytes,
        "weightload_s": pause,
        "reload_from_host_s": reload,
        "start_to_finish_s": statistics.median(whole),
        "steps_meanwhile": statistics.median(steps),
        "one_bucket_s": last,
    }
    row.note = "the model computes the old weights, bit for bit, until the pause"
    if not run.clock.on_device:
        row.status = NO_DEVICE
        row.note = "on the CPU nothing overlaps; the loads ran and were right"
        row.figures = {"tensors": case.shape.tensors, "bytes": case.nbytes}
    row.judge(run, "must", "pause <= reload from the host", lambda: pause <= reload)
    row.judge(run, "goal", "pause <= one bucket of 64 MiB + 3 ms", lambda: pause <= last + 3e-3)
    return row
