"""One family: a trainer in another process sends its weights to a live engine, in each way there is."""

import itertools
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path
from typing import ClassVar

import attrs
from common import checkpoints, fresh, main, start

from weightload.vllm.plugin import register
from weightload.vllm.testing.families import get_family
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine

MIB = 1 << 20


class Sender:
    """The trainer's process, as the engine's process sees it.

    Args:
        llm: the engine that answers what the trainer asks.
        paths: checkpoints that the trainer may read.

    Attributes:
        arenas: the files through which trainers handed over tensors.
    """

    arenas: ClassVar[list] = []

    def __init__(self, llm, *paths):
        self.llm = llm
        self.on_message = lambda message: [message]
        self.last_error = None
        address = os.path.join(tempfile.mkdtemp(prefix="wl"), "pipe")
        with Listener(address, family="AF_UNIX") as listener:
            script = str(Path(__file__).with_name("sender.py"))
            command = [sys.executable, script, address, *map(str, paths)]
            self.process = subprocess.Popen(command)
            self._pipe = listener.accept()
        assert self._pipe.recv()[0] == "ready"

    def do(self, method, **options):
        """Have the trainer do something, answer what it asks, and return what it raised."""
        self._pipe.send((method, options))
        while True:
            kind, *said = self._pipe.recv()
            if kind == "done":
                return None
            if kind == "failed":
                return said[0]
            method, args = said
            try:
                self._pipe.send(("value", self.answer(method, args)))
            except EOFError:
                raise
            except Exception as error:
                self.last_error = f"{type(error).__name__}: {error}"
                self._pipe.send(("error", self.last_error))

    def answer(self, method, args):
        """Ask the engine; a test may have changed, doubled or dropped a message on its way."""
        if method == "init_weight_transfer_engine":
            if "token" in args[0]:
                self.arenas.append(args[0]["path"])
            self.llm.init_weight_transfer_engine({"init_info": args[0]})
        elif method == "update_weights":
            for message in self.on_message(args[0]):
                self.llm.update_weights({"update_info": message})
        else:
            getattr(self.llm, method)(*args)

    def close(self):
        self._pipe.close()
        self.process.wait(20)


class Switch:
    """A worker extension that lets one engine have one transfer engine after another."""

    def switch(self, backend):
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.weight_transfer_engine.shutdown()
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=backend), self.vllm_config, self.device, self.get_model()
        )


def run(family, folder, ranks, worker="auto", large=False):
    register()
    options = {}
    if ranks == 2:
        options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    if large:
        # Two tensors of 32 MiB: larger than a bucket of 1 or 8 MiB, and together than one of 64.
        known = get_family(family)
        family = attrs.evolve(known, config={**known.config, "vocab_size": 1 << 17})
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path, **options), fresh(family, b_path, **options)
    result = {"A against B": describe_difference(a, b), "steps": {}}
    llm = start(
        family,
        a_path,
        weight_transfer_config={"backend": "weightload_shm"},
        worker_extension_cls="transfer.Switch",
        worker_cls=worker,
        **options,
    )
    sender = Sender(llm, a_path, b_path)
    order = itertools.cycle([(b_path, b, "stream"), (a_path, a, "atomic"), (b_path, b, "atomic"),
                             (a_path, a, "stream")])  # fmt: skip

    def look(label, want, raised=None):
        result["steps"][label] = {
            "raised": raised,
            "verdict": describe_difference(want, observe(llm)),
            "version": llm.get_weight_version(),
        }

    for backend, way in {
        "shm": {},
        "gloo": {"world_size": 1 + ranks, "deadline": 60},
        "file": {"folder": folder},
    }.items():
        llm.collective_rpc("switch", args=(f"weightload_{backend}",))
        # Less than most tensors, which come in parts.
        for size in (MIB, 8 * MIB, 64 * MIB, *(() if large else (4096,))):
            path, want, commit = next(order)
            label = f"{backend}, {size}, {path.name}, {commit}"
            raised = sender.do("meet", backend=backend, bucket_bytes=size, commit=commit, **way)
            raised = raised or sender.do("send", path=str(path), version=label)
            look(label, want, raised)
    path, want, _ = next(order)
    label = "a folder that is there already, and no trainer"
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": str(path)}})
    llm.finish_weight_update(label)
    look(label, want)
    sender.close()
    stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
