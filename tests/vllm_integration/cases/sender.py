"""A trainer in a process of its own, that is told what to do over a pipe.

It reaches the engine through the same pipe: vLLM's client protocol is four methods, and here each is a
question that the engine's process answers.
"""

import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightload.vllm import transfer
from weightload.vllm.testing.sources import read_checkpoint


class Checkpoint(WeightSource):
    """What a trainer that holds a checkpoint's tensors sends."""

    def __init__(self, path, device="cpu"):
        self.weights = {name: one.to(device) for name, one in read_checkpoint(path).items()}

    def metadata(self):
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.weights.items()]

    def __iter__(self):
        yield from self.weights.items()


class Pipe:
    """vLLM's client protocol over the pipe."""

    def __init__(self, pipe):
        self._pipe = pipe

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self._ask(method, args)

    def _ask(self, method, args):
        self._pipe.send(("call", method, args))
        kind, value = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(value)
        return value


class Trainer:
    def __init__(self, pipe):
        self.pipe = pipe
        self.engine = None

    def meet(self, backend, device="cpu", **options):
        self.part()
        self.device = device
        if device != "cpu":
            torch.cuda.set_device(device)
        info = {
            "shm": transfer.ShmTrainerInitInfo,
            "gloo": transfer.GlooTrainerInitInfo,
            "file": transfer.FileTrainerInitInfo,
            "ipc": transfer.IpcTrainerInitInfo,
            "nccl": transfer.NcclTrainerInitInfo,
        }[backend](rank=0, **options)
        source = Checkpoint(PATHS[0], device)
        client = Pipe(self.pipe)
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def send(self, path, version=None, die_at=None):
        self.engine.source = Checkpoint(path, self.device)
        if die_at is not None:
            self.die_in_broadcast(die_at)
        if version is None:
            self.engine.send_weights()  # vLLM's own trainers know no version
        else:
            self.engine.send_weights(version)

    def die_in_broadcast(self, number):
        """End as by ``kill -9`` when all workers are waiting for the bytes of a bucket."""
        broadcast, calls = self.engine._end.broadcast, []

        def deadly(nbytes):
            calls.append(nbytes)
            if len(calls) == number:
                time.sleep(0.5)  # by then they wait for nothing but the bytes
                os.kill(os.getpid(), signal.SIGKILL)
            broadcast(nbytes)

        self.engine._end.broadcast = deadly

    def part(self):
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None
        self.device = "cpu"


PATHS = sys.argv[2:]


def main():
    torch.set_num_threads(1)
    transfer.register()
    pipe = Client(sys.argv[1], family="AF_UNIX")
    trainer = Trainer(pipe)
    pipe.send(("ready", None))
    while True:
        try:
            method, options = pipe.recv()
        except EOFError:
            return
        try:
            getattr(trainer, method)(**options)
            pipe.send(("done", None))
        except Exception as error:
            traceback.print_exc()
            pipe.send(("failed", (type(error).__name__, str(error))))


if __name__ == "__main__":
    main()
