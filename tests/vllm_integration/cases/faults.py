"""One family and everything bad that a reload of a live engine can be given."""

import shutil

import torch
from common import Places, checkpoints, fresh, main, model_of, operate, start

from weightload import WeightLoadError, WeightLoadSession, poison_of, weights_version
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.families import make_checkpoint
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import chunks, read_checkpoint

NORM = "model.layers.1.input_layernorm.weight"


class SourceFailure(Exception):
    """What a source raises here, and nothing else does."""


def without(weights, *names):
    return {name: tensor for name, tensor in weights.items() if name not in names}


def failing(weights, position, act=None):
    """Yield the first tensors, then fail, or do something else."""
    for index, pair in enumerate(weights.items()):
        if index == position:
            if act is None:
                raise SourceFailure(f"before tensor {index}")
            act()
        yield pair


def holed(tensor):
    """Return a copy with one NaN in it."""
    found = tensor.clone()
    found.view(-1)[3] = float("nan")
    return found


def interrupt():
    raise KeyboardInterrupt


def cut_short(path, folder, size):
    """Copy a checkpoint and cut the end off its file."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(int(file.stat().st_size * size))
    return folder


def faults(llm, b_path, b, key, projection, live):
    """Yield a name and what to do for each fault.

    ``key`` is the k of a fused q, k and v; ``live`` are the parameters of an engine on B.
    """
    names = list(b)
    middle, last = len(names) // 2, len(names) - 1
    inside = names.index(key)
    norm = b[NORM]
    flat = b[projection][:1].clone()
    broad = {**b, projection: flat}
    long = {**b, NORM: torch.cat([norm, norm])}
    tall = {**b, projection: torch.cat([b[projection], b[projection]])}
    whole = {**b, NORM: norm.to(torch.int64)}
    bad = {**b, NORM: holed(norm)}
    twice = [*b.items(), (NORM, norm)]
    fused_twice = [*list(b.items())[: inside + 1], (key, b[key]), *list(b.items())[inside + 1 :]]
    other = make_checkpoint("opt", b_path.parent / "other", seed=1)

    def give(weights, **options):
        return lambda: reload(llm, weights, **options)

    def each_chunk(commit):
        """Open and close a session for every few tensors, as several update calls do."""

        def reload_all():
            raised = []
            for chunk in chunks(b, 8):
                try:
                    reload(llm, iter(chunk), commit=commit)
                except WeightLoadError as error:
                    raised.append(error)
            assert len(raised) == -(-len(b) // 8), "a part passed for the whole"
            raise raised[0]

        return reload_all

    def through_two_sessions():
        """While one session is open by separate calls, ask for another."""
        operate(llm, "start", version="first")
        operate(llm, "load", weights=list(b.items())[:middle])
        try:
            reload(llm, b_path)
        finally:
            assert operate(llm, "status")["state"] == "loading", "the first session was ended"
            operate(llm, "load", weights=list(b.items())[middle:])
            operate(llm, "finish")
            assert weights_version(model_of(llm)) == "first"

    def direct_session_on_a_busy_model():
        operate(llm, "start")
        try:
            WeightLoadSession(model_of(llm)).prepare()
        finally:
            operate(llm, "abort")

    yield "unknown name in a stream", give(iter({**b, "model.layers.0.no.weight": norm}.items()))
    yield "unknown name in a mapping", give({**b, "model.layers.0.no.weight": norm})
    yield "layer that does not exist", give({**b, NORM.replace(".1.", ".7."): norm})
    yield "norm of one element in a stream", give(iter({**b, NORM: norm[:1].clone()}.items()))
    yield "norm of one element in a mapping", give({**b, NORM: norm[:1].clone()})
    yield "projection of one row in a stream", give(iter(broad.items()))
    yield "projection of one row in a mapping", give(broad)
    yield "norm of twice the size in a stream", give(iter(long.items()))
    yield "norm of twice the size in a mapping", give(long)
    yield "projection of twice the rows in a stream", give(iter(tall.items()))
    yield "projection of twice the rows in a mapping", give(tall)
    yield "norm of another type in a stream", give(iter(whole.items()))
    yield "norm of another type in a mapping", give(whole)
    yield "NaN in a stream", give(iter(bad.items()), check_finite=True)
    yield "NaN in a mapping", give(bad, check_finite=True)
    yield "NaN in a stream, atomic", give(iter(bad.items()), check_finite=True, commit="atomic")
    yield "parameters of a live engine in a stream", give(iter(live.items()))
    yield "parameters of a live engine in a mapping", give(live)
    yield "parameters of a live engine, atomic", give(iter(live.items()), commit="atomic")
    yield "a lifecycle for each chunk", each_chunk("stream")
    yield "a lifecycle for each chunk, atomic", each_chunk("atomic")
    yield "norm twice in a stream", give(iter(twice))
    yield "norm twice in a list", give(twice)
    yield "part of a fused layer twice", give(iter(fused_twice))
    yield "no norm in a stream", give(iter(without(b, NORM).items()))
    yield "no norm in a mapping", give(without(b, NORM))
    yield "no k of q, k and v in a stream", give(iter(without(b, key).items()))
    yield "no k of q, k and v in a mapping", give(without(b, key))
    yield "no k of q, k and v, atomic", give(iter(without(b, key).items()), commit="atomic")
    yield "nothing", give(iter(()))
    yield "an empty mapping", give({})
    yield "source fails at the start", give(failing(b, 0))
    yield "source fails in the middle", give(failing(b, middle))
    yield "source fails inside a fused layer", give(failing(b, inside))
    yield "source fails at the last tensor", give(failing(b, last))
    yield "source fails in the middle, atomic", give(failing(b, middle), commit="atomic")
    yield "source fails at the last tensor, atomic", give(failing(b, last), commit="atomic")
    yield "interrupted in the source", give(failing(b, middle, interrupt))
    yield "path that does not exist", give(b_path.parent / "nowhere")
    yield "file cut short", give(cut_short(b_path, b_path.parent / "short", 0.7))
    yield "file cut inside its header", give(cut_short(b_path, b_path.parent / "stub", 0.0001))
    yield "another architecture from files", give(other)
    yield "another architecture in a stream", give(iter(read_checkpoint(other).items()))
    yield "reload inside the source", give(failing(b, middle, lambda: reload(llm, b_path)))
    yield "reload by a second caller", through_two_sessions
    yield "session on a busy model", direct_session_on_a_busy_model
    yield "pairs that are none", give(iter([*list(b.items())[:3], "model.norm.weight"]))
    yield "commit that does not exist", give(b_path, commit="perhaps")


def run(family, folder):
    register()
    a_path, b_path = checkpoints(family, folder)
    a = fresh(family, a_path)
    llm = start(family, b_path)
    b = observe(llm)
    live = {name: one.detach().clone() for name, one in model_of(llm).named_parameters()}
    stop_engine(llm)
    weights = read_checkpoint(b_path)
    suffix = "weight_packed" if family == "w4a16" else "weight"
    key = f"model.layers.0.self_attn.k_proj.{suffix}"
    projection = f"model.layers.1.self_attn.o_proj.{suffix}"

    llm = start(family, a_path, load_format="weightload")
    model = model_of(llm)
    places = Places(model)
    result = {"A against B": describe_difference(a, b), "faults": {}}
    for name, act in faults(llm, b_path, weights, key, projection, live):
        found = {"error": None, "model_intact": None, "text": ""}
        try:
            act()
        except BaseException as error:
            found["error"] = type(error).__name__
            found["text"] = "\n".join([str(error), *getattr(error, "__notes__", ())])
            if isinstance(error, WeightLoadError):
                found["model_intact"] = error.model_intact
        poison = poison_of(model)
        found["poison"] = None if poison is None else poison.cause
        found["session left"] = operate(llm, "status")["session"]
        found["changes"] = places.changes()
        if poison is None:
            seen = observe(llm)
            found["is A"] = describe_difference(a, seen)
            found["is B"] = describe_difference(b, seen)
        reload(llm, b_path, version=name)
        found["then B"] = describe_difference(b, observe(llm))
        found["then poison"] = poison_of(model) is not None
        found["then changes"] = places.changes()
        reload(llm, a_path)
        found["then A"] = describe_difference(a, observe(llm))
        result["faults"][name] = found
    return result


if __name__ == "__main__":
    main(run)
