"""Weights that vLLM quantises itself while it loads them, and engines that start on dummy ones."""

from common import HookCounter, Places, checkpoints, fresh, main, model_of, start

from weightload import WeightLoadError, poison_of
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, hooks_agree, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint, reversed_order, through_one_buffer

ONLINE = {"quantization": "fp8_per_channel"}
DUMMY = {"load_format": "weightload", "model_loader_extra_config": {"inner": "dummy"}}


def quantised(family, folder):
    """Reload an engine that quantises online."""
    a_path, b_path = checkpoints(family, folder)
    plain = fresh(family, a_path)
    b = fresh(family, b_path, **ONLINE)
    llm = start(family, a_path, **ONLINE)
    a = observe(llm)
    stop_engine(llm)
    result = {
        "plain against online": describe_difference(plain, a),
        "A against B": describe_difference(a, b),
        "steps": {},
    }
    hooks = HookCounter()
    llm = start(family, a_path, load_format="weightload", **ONLINE)
    result["fresh"] = describe_difference(a, observe(llm))
    model = model_of(llm)
    places = Places(model)
    fresh_hooks = hooks.take(model)
    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)
    for label, weights, want, options in [
        ("A over A", a_path, a, {}),
        ("A to B", b_path, b, {}),
        ("back to A", a_path, a, {}),
        ("B reversed", reversed_order(b_weights), b, {}),
        ("A through one buffer", through_one_buffer(a_weights), a, {}),
        ("B, atomic", b_weights, b, {"commit": "atomic"}),
        ("its own checkpoint", None, a, {}),
    ]:
        [receipt] = reload(llm, weights, **options)
        took = hooks.take(model)
        result["steps"][label] = {
            "verdict": describe_difference(want, observe(llm)),
            "changes": places.changes(),
            "hooks": "same"
            if hooks_agree(took, fresh_hooks, receipt.to_plain())
            else f"{took}, not {fresh_hooks}: {receipt}",
        }
    return result


def from_dummy(family, folder, options, through_weightload):
    """Start an engine without a checkpoint's values, then load real ones."""
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path, **options), fresh(family, b_path, **options)
    how = DUMMY if through_weightload else {"load_format": "dummy"}
    llm = start(family, a_path, **how, **options)
    model = model_of(llm)
    places = Places(model)
    before = observe(llm)
    result = {"at first": describe_difference(b, before), "error": None}
    try:
        reload(llm, b_path)
    except WeightLoadError as error:
        result["error"] = type(error).__name__
        result["text"] = str(error)
        result["model_intact"] = error.model_intact
        result["unchanged"] = describe_difference(before, observe(llm))
    else:
        result["A to B"] = describe_difference(b, observe(llm))
        reload(llm, a_path)
        result["back to A"] = describe_difference(a, observe(llm))
    result["poison"] = poison_of(model) is not None
    result["changes"] = places.changes()
    return result


def run(family, folder, start_on):
    register()
    if start_on == "checkpoint":
        return quantised(family, folder)
    kind, _, online = start_on.partition(", ")
    return from_dummy(family, folder, ONLINE if online else {}, kind == "dummy by weightload")


if __name__ == "__main__":
    main(run)
