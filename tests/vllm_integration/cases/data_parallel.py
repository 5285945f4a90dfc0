"""An AsyncLLM with two data-parallel engine cores is updated as one replica, in its own loop."""

import asyncio

from common import Buckets, checkpoints, fresh, main

from weightload import Fleet, FleetError
from weightload.vllm import LocalReplica, areload
from weightload.vllm.plugin import register
from weightload.vllm.testing import families, probe
from weightload.vllm.testing.sources import read_checkpoint

CORES = 2


async def tokens(engine, core):
    """Return the greedy tokens of one core after each prompt of the probe."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    found = []
    for index, prompt in enumerate(probe.DEFAULT_PROMPTS):
        outputs = engine.generate(
            {"prompt_token_ids": list(prompt)},
            params,
            request_id=f"{core}-{index}",
            data_parallel_rank=core,
        )
        async for output in outputs:
            last = list(output.outputs[0].token_ids)
        found.append(last)
    return found


async def serve(family, a_path, b_path, want):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = {**probe.ENGINE_DEFAULTS, **families.get_family(family).engine}
    options |= {"model": str(a_path), "load_format": "weightload", "data_parallel_size": CORES}
    options["worker_extension_cls"] = "weightload.vllm.WorkerExtension"
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options))
    fleet = Fleet(
        [LocalReplica("here", engine, loop=asyncio.get_running_loop())],
        deadline=120,
        bucket_bytes=20_000,
    )
    buckets = Buckets()
    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)

    async def served():
        seen = [await tokens(engine, core) for core in range(CORES)]
        return [next((key for key in want if want[key] == one), "something else") for one in seen]

    result = {
        "A against B": "differ" if want["A"] != want["B"] else "same",
        "before": await served(),
        "vLLM hears": len(await engine.collective_rpc("weightload_status")),
    }
    receipt = await asyncio.to_thread(fleet.update, b_weights, version=1)
    result["to B"] = [len(receipt.replicas["here"]), *await served()]
    short = iter(list(a_weights.items())[:-1])
    try:
        await asyncio.to_thread(fleet.update, short, version=2)
    except FleetError as error:
        result["short"] = [str(error), *await served()]
    receipts = await areload(engine, a_weights, version=3)
    result["to A"] = [len(receipts), *await served()]
    result["files left"] = buckets.left()
    return result


def run(family, folder):
    register()
    a_path, b_path = checkpoints(family, folder)
    want = {
        name: [list(one) for one in fresh(family, path).tokens]
        for name, path in (("A", a_path), ("B", b_path))
    }
    # No tidy end, as by `asyncio.run`: the processes of the engine end with this one.
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(serve(family, a_path, b_path, want))


if __name__ == "__main__":
    main(run)
