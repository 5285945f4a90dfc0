"""A fleet of toy engines, whose calls can fail in every way that calls to another machine can.

The ranks are real models with real sessions, and do what a worker of vLLM does. Only the way to
them is a toy: it can lose a call or its answer, hang, or end with the engine.
"""

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import torch
from small import Live, Negated, Net

from weightload import EngineLostError, poison_of
from weightload.ownership import open_session
from weightload.testing import ToyFault
from weightload.vllm.worker import run_operation

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["weightload.testing", "weightload.vllm.worker", "pytest"])
SIZE = 1104
BUCKET = 4 * SIZE
"""Bytes of a weight of the toy, so that each comes in a bucket of its own."""
LAYERS = 3


def toy():
    """Make a model whose hooks would undo one another, so that a second run is seen."""
    return Net(*(Negated(SIZE) for _ in range(LAYERS)))


STATES = {
    number: {
        f"layers.{layer}.weight": torch.arange(SIZE, dtype=torch.float32) + 10 * layer + number
        for layer in range(LAYERS)
    }
    for number in (1, 2, 3, 4)
}
"""Checkpoints; every engine is started on the first."""


class ToyRank:
    """One rank: what weightload asks of a worker."""

    vllm_config = model_config = None
    device = torch.device("cpu")

    def __init__(self, rank):
        self.rank = rank
        self.misled = None
        self.live = Live(toy, STATES[1], version=1)
        self.model_runner = SimpleNamespace()

    def get_model(self):
        return self.live.model

    def fail(self, operation):
        """Let the next operation of that name fail in the engine itself."""
        model = self.live.model
        if operation == "start":
            self._sleep_saved_buffers = {"asleep": True}
        elif operation == "load_bucket":
            model.load_weights = broken
        elif operation in ("open_buckets", "close_buckets"):
            self.misled = operation
        elif operation == "seal":
            model.layers[-1].process_weights_after_loading = broken
        elif operation == "finish":
            self.model_runner.reset_encoder_cache = broken

    def hears(self, arguments):
        """Return what comes of what was said: lies about the memory, or about what was in it."""
        misled, self.misled = self.misled, None
        if misled == "open_buckets":
            return {**arguments, "where": {**arguments["where"], "path": "/nowhere"}}
        if misled == "close_buckets":
            record = arguments["record"]
            return {**arguments, "record": {**record, "tensors": record["tensors"] + 1}}
        return arguments

    def mend(self):
        self.misled = None
        self._sleep_saved_buffers = None
        vars(self.live.model).pop("load_weights", None)
        vars(self.live.model.layers[-1]).pop("process_weights_after_loading", None)
        self.model_runner = SimpleNamespace()


def broken(*args):
    raise ToyFault("this rank is broken")


class ToyReplica:
    """An engine of two ranks.

    Attributes:
        paused: whether it computes nothing.
        version: what it says that it has.
        cache: the checkpoint that it has kept results of, ``None`` if of none.
        log: every step that it was asked for.
    """

    def __init__(self, name, ranks=2):
        self.name = name
        self.ranks = [ToyRank(rank) for rank in range(ranks)]
        self.paused = False
        self.version = 1
        self.cache = 1
        self.log = []
        self.dead = False
        self.cut_off = False
        self.awake = threading.Event()
        self._faults = []

    def plan(self, step, kind, countdown=0):
        """Let something happen when it is asked for a step for the ``countdown``-th time.

        Args:
            step: an operation, ``"pause"``, ``"publish"`` or ``"resume"``.
            kind: ``"fails"`` in the last rank; the ``"call is lost"``, or the ``"answer is
                lost"``, or with it everything until it is mended, ``"cut off before"`` or ``"cut
                off after"``; it ``"hangs"``; it ``"dies before"`` or ``"dies after"`` it.
            countdown: how many of these steps go well.
        """
        self._faults.append((step, kind, countdown))
        self.awake.clear()

    def mend(self):
        """Let everything go well from now on, and whoever hangs go on."""
        self._faults = []
        self.cut_off = False
        self.awake.set()
        for rank in self.ranks:
            rank.mend()

    def call(self, operation, **arguments):
        return self._step(
            operation,
            lambda: [
                run_operation(rank, operation, **rank.hears(arguments)) for rank in self.ranks
            ],
        )

    def call_plain(self, operation, arguments):
        """Return outcomes that can go to another process."""
        return [_plain(outcome) for outcome in self.call(operation, **arguments)]

    def pause(self):
        def act():
            self.serves()
            self.paused = True

        self._step("pause", act)

    def publish(self, version):
        def act():
            self.cache = None
            self.version = self.version if version is None else version

        self._step("publish", act)

    def resume(self):
        self._step("resume", lambda: setattr(self, "paused", False))

    def _step(self, step, act):
        if self.dead:
            raise EngineLostError("its process has ended", model_intact=False)
        self.log.append(step)
        kind = self._due(step)
        if kind == "cut off before":
            self.cut_off = True
        if kind == "call is lost" or self.cut_off:
            raise ConnectionError("connection reset")
        if kind == "dies before":
            self._die()
        if kind == "hangs":
            self.awake.wait()
        if kind == "fails":
            if step in ("pause", "publish", "resume"):
                broken()
            self.ranks[-1].fail(step)
        value = act()
        self.cut_off = kind == "cut off after"
        if kind == "answer is lost" or self.cut_off:
            raise ConnectionError("connection reset")
        if kind == "dies after":
            self._die()
        return value

    def _due(self, step):
        for index, (planned, kind, countdown) in enumerate(self._faults):
            if planned == step:
                if countdown:
                    self._faults[index] = step, kind, countdown - 1
                    return None
                del self._faults[index]
                return kind
        return None

    def _die(self):
        self.dead = True
        raise EngineLostError("its process has ended", model_intact=False)

    # ------------------------------------------------------------------ looking

    def serves(self):
        """Return the number of the checkpoint that it serves, ``None`` if it refuses.

        Raises:
            AssertionError: it serves something else, such as a mixture, or what it has kept of
                other weights.
        """
        models = [rank.live.model for rank in self.ranks]
        if self.dead or self.paused or any(poison_of(model) for model in models):
            return None
        if any(open_session(model) for model in models):
            return None
        for number, state in STATES.items():
            try:
                for rank in self.ranks:
                    rank.live.equals(state)
            except AssertionError:
                continue
            assert self.cache in (None, number), f"{self.name} serves caches of {self.cache}"
            self.cache = number
            return number
        raise AssertionError(f"{self.name} serves no checkpoint as a whole")


def replaced(replica):
    """Return an engine that was started anew on the first checkpoint, if this one is lost."""
    return ToyReplica(replica.name, len(replica.ranks)) if replica.dead else replica


def _run_engine(way):
    """Be an engine in a process of its own: do what comes, one step after another."""
    replica = ToyReplica("in its process")
    replica._die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    while True:
        method, arguments = way.recv()
        try:
            way.send((True, getattr(replica, method)(**arguments)))
        except Exception as error:
            way.send((False, f"{type(error).__name__}: {error}"))


def _plain(outcome):
    return {key: value for key, value in outcome.items() if key != "exception"}


class ProcessReplica:
    """An engine in a process of its own, which can be killed for good."""

    def __init__(self, name):
        self.name = name
        self._way, other = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_run_engine, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def _do(self, method, **arguments):
        try:
            self._way.send((method, arguments))
            well, value = self._way.recv()
        except (EOFError, OSError):
            raise EngineLostError("its process has ended", model_intact=False) from None
        if not well:
            raise RuntimeError(value)
        return value

    def call(self, operation, **arguments):
        return self._do("call_plain", operation=operation, arguments=arguments)

    def pause(self):
        self._do("pause")

    def publish(self, version):
        self._do("publish", version=version)

    def resume(self):
        self._do("resume")

    def plan(self, step, kind, countdown=0):
        self._do("plan", step=step, kind=kind, countdown=countdown)

    def serves(self):
        """Return the number of the checkpoint that it serves, ``None`` if none, or if it is gone."""
        try:
            return self._do("serves")
        except EngineLostError:
            return None

    def stop(self):
        self._process.kill()
        self._process.join()
        self._way.close()
