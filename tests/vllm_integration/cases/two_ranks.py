"""One family on two ranks, whose workers are processes of their own."""

import os
import signal
import time

from common import Buckets, checkpoints, fresh, main, start
from extension import NORM

from weightload import WeightLoadError, sending
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint, shuffled, through_one_buffer


class SourceFailure(Exception):
    """What a source raises here, and nothing else does."""


def failing(weights, position):
    for index, pair in enumerate(weights.items()):
        if index == position:
            raise SourceFailure(f"before tensor {index}")
        yield pair


def run(family, folder, extension):
    register()
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path, **two), fresh(family, b_path, **two)
    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)

    two["worker_extension_cls"] = f"extension.{extension}"
    llm = start(family, a_path, load_format="weightload", **two)
    prefix = "mine" if extension == "MyExtension" else "weightload"
    llm.collective_rpc("remember_places")
    buckets = Buckets()
    result = {
        "A against B": describe_difference(a, b),
        "fresh": describe_difference(a, observe(llm)),
        "steps": {},
        "faults": {},
    }

    def step(label, weights, want, **options):
        receipts = reload(llm, weights, version=label, **options)
        result["steps"][label] = {
            "verdict": describe_difference(want, observe(llm)),
            "changes": llm.collective_rpc("moved"),
            "receipts": [receipt.to_plain() for receipt in receipts],
            "versions": [one["value"]["version"] for one in llm.collective_rpc(f"{prefix}_status")],
        }

    step("A to B from files", b_path, b)
    step("back to A from files", a_path, a)
    step("B from a stream", iter(b_weights.items()), b)
    step("A from a mapping", a_weights, a)
    sending.BUCKET_BYTES = 20_000  # less than most tensors: many buckets now
    step("B shuffled, in small buckets", shuffled(b_weights, seed=3), b)
    step("A through one buffer, in small buckets", through_one_buffer(a_weights), a)
    step("B from a mapping in small buckets, atomic", b_weights, b, commit="atomic")
    step("its own checkpoint", None, a)

    middle = len(b_weights) // 2
    short = {**b_weights, NORM: b_weights[NORM][:1].clone()}

    def fault(label, act):
        found = {"error": None, "model_intact": None, "facts": {}}
        began = time.monotonic()
        try:
            act()
        except (Exception, KeyboardInterrupt) as error:
            found["error"] = type(error).__name__
            found["text"] = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if isinstance(error, WeightLoadError):
                found["model_intact"] = error.model_intact
                found["facts"] = error.to_plain()["facts"]
        found["seconds"] = time.monotonic() - began
        states = [one["value"] for one in llm.collective_rpc(f"{prefix}_status")]
        found["poison"] = [state["poison"] for state in states]
        found["session left"] = [state["session"] for state in states]
        if not any(found["poison"]):
            found["is A"] = describe_difference(a, observe(llm))
        llm.collective_rpc("mend_loaders")
        reload(llm, b_path)
        found["then B"] = describe_difference(b, observe(llm))
        found["then changes"] = llm.collective_rpc("moved")
        reload(llm, a_path)
        found["then A"] = describe_difference(a, observe(llm))
        result["faults"][label] = found

    def on_one_rank(rank, how, **options):
        llm.collective_rpc("break_loaders", args=(rank, how))
        reload(llm, b_path, **options)

    def interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        llm.collective_rpc("interrupt", args=(os.getpid(),))
        reload(llm, iter(b_weights.items()))

    def with_a_call_that_fails(call, weights):
        """Let one call to the workers raise on its way, as a time limit would."""
        whole = llm.collective_rpc

        def rpc(method, *args, **kwargs):
            if method == f"{prefix}_{call}":
                raise TimeoutError("the call took too long")
            return whole(method, *args, **kwargs)

        llm.collective_rpc = rpc
        try:
            reload(llm, weights)
        finally:
            llm.collective_rpc = whole

    fault("source fails at the start", lambda: reload(llm, failing(b_weights, 0)))
    fault("source fails in the middle", lambda: reload(llm, failing(b_weights, middle)))
    fault("wrong shape in a stream", lambda: reload(llm, iter(short.items())))
    fault("wrong shape in a mapping", lambda: reload(llm, short))
    fault(
        "no norm in a stream", lambda: reload(llm, (x for x in b_weights.items() if x[0] != NORM))
    )
    fault("path that does not exist", lambda: reload(llm, a_path.parent / "nowhere"))
    fault("rank 0 alone fails", lambda: on_one_rank(0, "raise"))
    fault("rank 1 alone fails", lambda: on_one_rank(1, "raise"))
    fault("rank 1 alone fails, atomic", lambda: on_one_rank(1, "raise", commit="atomic"))
    fault("rank 1 alone lacks a norm", lambda: on_one_rank(1, "lose"))
    fault("rank 1 alone lacks a norm, atomic", lambda: on_one_rank(1, "lose", commit="atomic"))
    fault("interrupted while rank 1 loads", interrupted)
    fault("a load is lost", lambda: with_a_call_that_fails("load_bucket", b_weights))
    fault("a finish is lost", lambda: with_a_call_that_fails("finish", iter(b_weights.items())))
    result["files left"] = buckets.left()
    stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
