"""One of two workers ends as by ``kill -9`` while weights are on their way to it."""

import asyncio
import inspect
import os
import signal
import time
from pathlib import Path

from common import Buckets, main, start

from weightload import WeightLoadError, sending
from weightload.vllm import areload, reload
from weightload.vllm.plugin import register
from weightload.vllm.testing import families, probe
from weightload.vllm.testing.sources import read_checkpoint

ENGINE = {
    "load_format": "weightload",
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "extension.Extension",
}


async def attempt(do, weights):
    """Return what a reload raised, and how long that took."""
    began = time.monotonic()
    found = {"error": None}
    try:
        done = do(weights)
        if inspect.isawaitable(done):
            await done
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
        if isinstance(error, WeightLoadError):
            found["model_intact"] = error.model_intact
    return {**found, "seconds": time.monotonic() - began}


async def serve(path, weights, client, moment):
    if client == "async":
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = {**probe.ENGINE_DEFAULTS, "model": str(path), **ENGINE}
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    else:
        engine = start("llama", path, **ENGINE)

    async def call(method, *args):
        done = engine.collective_rpc(method, args=args)
        return await done if inspect.isawaitable(done) else done

    def do(weights):
        return (areload if client == "async" else reload)(engine, weights)

    pids = await call("process")
    buckets = Buckets()
    result = {"healthy": await attempt(do, iter(weights.items()))}

    def deadly(weights):
        for index, pair in enumerate(weights.items()):
            if index == 12:
                os.kill(pids[1], signal.SIGKILL)
            yield pair

    if moment != "between calls":
        await call("die_in", 1, moment)
    given = deadly(weights) if moment == "between calls" else iter(weights.items())
    result["killed"] = await attempt(do, given)
    result["once more"] = await attempt(do, iter(weights.items()))
    result["files left"] = buckets.left()
    return result


def run(folder, client, moment):
    register()
    path = families.make_checkpoint("llama", Path(folder) / "A", seed=1)
    other = families.make_checkpoint("llama", Path(folder) / "B", seed=2)
    sending.BUCKET_BYTES = 20_000  # less than most tensors: many calls
    # No tidy end, as by `asyncio.run`: that would wait for threads of an engine that is lost.
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(serve(path, read_checkpoint(other), client, moment))


if __name__ == "__main__":
    main(run)
