"""One family under the options of a reload: verified, in part, with names that stay away, with NaN."""

from common import Places, checkpoints, fresh, main, model_of, start
from safetensors.torch import save_file

from weightload import Checkpoint, Scope, WeightLoadError, weights_version
from weightload.vllm import caches, reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe
from weightload.vllm.testing.sources import read_checkpoint

NORM = "model.layers.1.input_layernorm.weight"


def mixed_checkpoint(a_path, weights, folder):
    """Write a checkpoint with the configuration of another one and these weights."""
    folder.mkdir()
    for file in a_path.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors")
    return folder


def run(family, folder, part):
    register()
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path), fresh(family, b_path)
    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)
    scope = Scope.only(part)
    names = scope.resolve(a_weights)
    mixture = {**a_weights, **{name: b_weights[name] for name in names}}
    mixed = fresh(family, mixed_checkpoint(a_path, mixture, a_path.parent / "mixed"))

    llm = start(family, a_path, load_format="weightload", enable_prefix_caching=True)
    model = model_of(llm)
    places = Places(model)
    result = {
        "A against B": describe_difference(a, b),
        "A against mixed": describe_difference(a, mixed),
    }

    def step(label, want, weights, **options):
        [receipt] = reload(llm, weights, version=label, **options)
        result[label] = {
            "verdict": describe_difference(want, observe(llm)),
            "changes": places.changes(),
            "verified": receipt.verified,
            "moved": receipt.moved,
            "missing": receipt.missing.count,
            "version": weights_version(model),
        }

    def refused(label, weights, **options):
        try:
            reload(llm, weights, **options)
        except WeightLoadError as error:
            result[label] = {
                "error": type(error).__name__,
                "model_intact": error.model_intact,
                "text": str(error),
                "verdict": describe_difference(a, observe(llm)) if error.model_intact else None,
            }

    observe(llm)
    step("verified, from files", b, b_path, verify="full")
    step("verified, from a stream", a, iter(a_weights.items()), verify="full")
    step("verified, atomic", b, b_weights, verify="full", commit="atomic")
    step("a sample of it", a, a_weights, verify="sampled")
    step("a part of it", mixed, {name: b_weights[name] for name in names}, scope=scope)
    step("the rest of it", b, {n: t for n, t in b_weights.items() if n not in names},
         scope=Scope.only(n for n in b_weights if n not in names))  # fmt: skip
    step("a part of it, atomic", b, {n: b_weights[n] for n in names}, scope=scope, commit="atomic")
    step("back to A", a, a_path)
    allowed = Scope.full(allow_missing=[n for n in a_weights if n not in names])
    step("the rest may stay away", mixed, {n: b_weights[n] for n in names}, scope=allowed)
    reports = []
    step("files, and reports", b, Checkpoint(b_path), progress=reports.append)
    result["reports"] = {
        "last": [reports[-1].tensors, reports[-1].nbytes, reports[-1].ended],
        "sent": [len(b_weights), sum(tensor.nbytes for tensor in b_weights.values()), True],
    }
    step("A again", a, a_path)

    told = []
    reload(llm, b_path, version="told", publish=[lambda *versions: told.append(versions)])
    result["told"] = told
    step("A at last", a, a_path)

    # Weights that are not finite leave NaN in the KV cache; the next ones must not see it.
    spoiled = {**b_weights, NORM: b_weights[NORM].clone().fill_(float("nan"))}
    refused("checked for NaN", spoiled, check_finite=True)
    reload(llm, spoiled)
    result["NaN computes"] = describe_difference(a, observe(llm))
    kept = [name for name in caches.ALL if name != "kv"]
    reload(llm, b_path, reset_caches=kept)
    result["after NaN, blocks kept"] = describe_difference(b, observe(llm))
    reload(llm, spoiled)
    observe(llm)
    step("after NaN", b, b_path)
    return result


if __name__ == "__main__":
    main(run)
