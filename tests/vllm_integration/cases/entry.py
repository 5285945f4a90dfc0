"""The ways into weightload from outside: worker methods, engine arguments, the async engine."""

import asyncio

from common import checkpoints, fresh, main, model_of, start

from weightload import WeightLoadError, poison_of
from weightload.vllm import areload, reload
from weightload.vllm.plugin import register
from weightload.vllm.testing import probe
from weightload.vllm.testing.sources import read_checkpoint
from weightload.vllm.worker import gather


def methods(family, folder):
    """Take every step through the methods of a worker extension with a prefix of one's own."""
    register()
    a_path, b_path = checkpoints(family, folder)
    b = fresh(family, b_path)
    llm = start(
        family, a_path, load_format="weightload", worker_extension_cls="extension.MyExtension"
    )
    a = probe.observe(llm)
    weights = list(read_checkpoint(b_path).items())

    def call(name, *args, **kwargs):
        [value] = gather(llm.collective_rpc(f"mine_{name}", args=args, kwargs=kwargs))
        return value

    result = {"at first": call("status")}
    result["after start"] = call("start", version=7)
    call("load", weights[:9])
    result["after load"] = call("status")
    call("load", weights[9:])
    result["receipt"] = call("finish")
    result["after finish"] = call("status")
    result["verdict"] = probe.describe_difference(b, probe.observe(llm))
    call("start", version=8)
    call("load_path", str(a_path))
    call("finish")
    result["back to A"] = probe.describe_difference(a, probe.observe(llm))
    call("start", version=9)
    call("load", weights[:9])
    result["aborted"] = call("abort", cause="we changed our mind")
    result["after abort"] = call("status")
    try:
        call("finish")
    except WeightLoadError as error:
        result["finish after abort"] = type(error).__name__
    reload(llm, b_path, version=10)
    result["after reload"] = call("status")
    result["recovered"] = probe.describe_difference(b, probe.observe(llm))
    result["poisoned"] = poison_of(model_of(llm)) is not None
    return result


def plugin(family, folder):
    """Start an engine with the load format and leave it to vLLM to find out what that is."""
    a_path, b_path = checkpoints(family, folder)
    b = fresh(family, b_path)
    llm = start(family, a_path, load_format="weightload")
    reload(llm, b_path)
    return {"verdict": probe.describe_difference(b, probe.observe(llm))}


def own_process(family, folder):
    """Let the only worker have a process of its own, which a generator cannot be sent to."""
    register()
    a_path, b_path = checkpoints(family, folder)
    right = {"A": fresh(family, a_path), "B": fresh(family, b_path)}
    llm = start(
        family,
        a_path,
        load_format="weightload",
        distributed_executor_backend="mp",
        worker_extension_cls="weightload.vllm.WorkerExtension",
    )
    result = {"fresh": probe.describe_difference(right["A"], probe.observe(llm))}
    b = read_checkpoint(b_path)
    for label, given in [
        ("B from a generator", (pair for pair in b.items())),
        ("A from files", a_path),
        ("B from a mapping", b),
    ]:
        reload(llm, given)
        result[label] = probe.describe_difference(right[label[0]], probe.observe(llm))
    return result


async def observe(engine):
    """What ``probe.observe`` does, with an async engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=8,
        ignore_eos=True,
        detokenize=False,
        logprobs=8,
        prompt_logprobs=8,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    tokens, after, before = [], [], []
    for index, prompt in enumerate(probe.DEFAULT_PROMPTS):
        stream = engine.generate({"prompt_token_ids": list(prompt)}, params, f"request-{index}")
        async for result in stream:
            final = result
        [completion] = final.outputs
        tokens.append(tuple(completion.token_ids))
        after.append(tuple(probe._ranked(position) for position in completion.logprobs))
        before.append(tuple(probe._ranked(one) for one in final.prompt_logprobs if one))
    return probe.Observation(
        tokens=tuple(tokens), logprobs=tuple(after), prompt_logprobs=tuple(before)
    )


class SourceFailure(Exception):
    """What a source raises here, and nothing else does."""


def failing():
    raise SourceFailure("at the start")
    yield


async def serve(a_path, b_path, a, b):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {
        **probe.ENGINE_DEFAULTS,
        "model": str(a_path),
        "load_format": "weightload",
        "worker_extension_cls": "weightload.vllm.WorkerExtension",
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    result = {"fresh": probe.describe_difference(a, await observe(engine))}
    weights = read_checkpoint(b_path)
    for label, given, want in [
        ("A to B from files", b_path, b),
        ("A from a stream", iter(read_checkpoint(a_path).items()), a),
        ("B from a mapping", weights, b),
    ]:
        [receipt] = await areload(engine, given, version=label)
        result[label] = {
            "verdict": probe.describe_difference(want, await observe(engine)),
            "version": receipt.version,
            "paused": await engine.is_paused(),
        }

    async def fault(given):
        try:
            await areload(engine, given)
        except Exception as error:
            return {
                "error": type(error).__name__,
                "model_intact": getattr(error, "model_intact", None),
                "paused": await engine.is_paused(),
            }

    del weights["model.norm.weight"]
    result["no norm in a mapping"] = await fault(weights)
    result["still B"] = probe.describe_difference(b, await observe(engine))
    result["source fails"] = await fault(failing())
    result["still B after that"] = probe.describe_difference(b, await observe(engine))
    result["no norm in a stream"] = await fault(iter(weights.items()))
    await areload(engine, a_path)
    if await engine.is_paused():
        await engine.resume_generation()
    result["recovered"] = probe.describe_difference(a, await observe(engine))
    engine.shutdown()
    return result


def async_engine(family, folder):
    register()
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path), fresh(family, b_path)
    return asyncio.run(serve(a_path, b_path, a, b))


CASES = {"methods": methods, "own process": own_process, "plugin": plugin, "async": async_engine}


def run(family, folder, way):
    return CASES[way](family, folder)


if __name__ == "__main__":
    main(run)
