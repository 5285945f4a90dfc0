"""A trainer in a process of its own, that is told what to do over a pipe.

It reaches the engine through the same pipe: vLLM's client protocol is four methods, and here each is a
question that the engine's process answers. Where a test wants HTTP, vLLM's own client is used.
"""

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
    """What a trainer that holds a checkpoint's tensors sends; it may stop in the middle."""

    def __init__(self, path, stop_at=None):
        self.weights = read_checkpoint(path)
        self.stop_at = stop_at

    def metadata(self):
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.weights.items()]

    def __iter__(self):
        for index, (name, tensor) in enumerate(self.weights.items()):
            if index == self.stop_at:
                print("stopped", flush=True)
                time.sleep(600)
            yield name, tensor


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

    def meet(self, backend, url=None, **options):
        self.part()
        info = {
            "shm": transfer.ShmTrainerInitInfo,
            "gloo": transfer.GlooTrainerInitInfo,
            "file": transfer.FileTrainerInitInfo,
        }[backend](rank=0, **options)
        if url is None:
            client = Pipe(self.pipe)
        else:
            from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

            client = HTTPVLLMWeightSyncClient(url)
        self.engine = WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=Checkpoint(options.pop("path", None) or PATHS[0])
        )

    def send(self, path, version=None, stop_at=None):
        self.engine.source = Checkpoint(path, stop_at)
        self.engine.send_weights(version)

    def part(self):
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None


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
