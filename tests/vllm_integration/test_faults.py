"""Bad input is refused by name, the engine says truly whether it is intact, and recovers.

Each fault hits a live engine that serves checkpoint A and is given checkpoint B with something
wrong in it. Afterwards the model either computes exactly what A computes, or it is marked as
poisoned. Whichever it is, the next complete reload gives exactly what a fresh load of B gives.
"""

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

REFUSED = {
    "unknown name in a stream": "UnexpectedWeightError",
    "unknown name in a mapping": "UnexpectedWeightError",
    "layer that does not exist": "UnexpectedWeightError",
    "norm of one element in a stream": "WeightMismatchError",
    "norm of one element in a mapping": "WeightMismatchError",
    "projection of one row in a stream": "WeightMismatchError",
    "projection of one row in a mapping": "WeightMismatchError",
    "norm of twice the size in a stream": "WeightMismatchError",
    "norm of twice the size in a mapping": "WeightMismatchError",
    "projection of twice the rows in a stream": "WeightMismatchError",
    "projection of twice the rows in a mapping": "WeightMismatchError",
    "norm of another type in a stream": "WeightMismatchError",
    "norm of another type in a mapping": "WeightMismatchError",
    "NaN in a stream": "WeightMismatchError",
    "NaN in a mapping": "WeightMismatchError",
    "NaN in a stream, atomic": "WeightMismatchError",
    "parameters of a live engine in a stream": "UnexpectedWeightError",
    "parameters of a live engine in a mapping": "WeightMismatchError",
    "parameters of a live engine, atomic": "UnexpectedWeightError",
    "a lifecycle for each chunk": "IncompleteLoadError",
    "a lifecycle for each chunk, atomic": "IncompleteLoadError",
    "norm twice in a stream": "DuplicateWeightError",
    "norm twice in a list": "DuplicateWeightError",
    "part of a fused layer twice": "DuplicateWeightError",
    "no norm in a stream": "IncompleteLoadError",
    "no norm in a mapping": "IncompleteLoadError",
    "no k of q, k and v in a stream": "IncompleteLoadError",
    "no k of q, k and v in a mapping": "IncompleteLoadError",
    "no k of q, k and v, atomic": "IncompleteLoadError",
    "nothing": "IncompleteLoadError",
    "an empty mapping": "IncompleteLoadError",
    "source fails at the start": "SourceFailure",
    "source fails in the middle": "SourceFailure",
    "source fails inside a fused layer": "SourceFailure",
    "source fails at the last tensor": "SourceFailure",
    "source fails in the middle, atomic": "SourceFailure",
    "source fails at the last tensor, atomic": "SourceFailure",
    "interrupted in the source": "KeyboardInterrupt",
    "path that does not exist": "CheckpointFileError",
    "file cut short": "CheckpointFileError",
    "file cut inside its header": "CheckpointFileError",
    "another architecture from files": "UnexpectedWeightError",
    "another architecture in a stream": "UnexpectedWeightError",
    "reload inside the source": "SessionMisnestedError",
    "reload by a second caller": "ModelBusyError",
    "session on a busy model": "ModelBusyError",
    "pairs that are none": "WeightMismatchError",
    "commit that does not exist": "UsageError",
}
"""The class of the error for each fault; see ``cases/faults.py``."""

NAMED = {
    "unknown name in a stream": "model.layers.0.no.weight",
    "layer that does not exist": "model.layers.7.input_layernorm.weight",
    "norm of one element in a stream": "model.layers.1.input_layernorm.weight",
    "projection of one row in a mapping": "model.layers.1.self_attn.o_proj",
    "norm of twice the size in a stream": "model.layers.1.input_layernorm.weight",
    "projection of twice the rows in a mapping": "model.layers.1.self_attn.o_proj",
    "norm of another type in a stream": "int64",
    "norm of another type in a mapping": "model.layers.1.input_layernorm.weight",
    "NaN in a stream": "model.layers.1.input_layernorm.weight",
    "NaN in a mapping": "index [3]",
    "parameters of a live engine in a mapping": "o_proj",
    "norm twice in a stream": "model.layers.1.input_layernorm.weight",
    "part of a fused layer twice": "model.layers.0.self_attn.k_proj",
    "no norm in a stream": "model.layers.1.input_layernorm.weight",
    "no k of q, k and v in a stream": "model.layers.0.self_attn.qkv_proj",
    "no k of q, k and v in a mapping": "model.layers.0.self_attn.",
    "path that does not exist": "nowhere",
    "file cut short": "model.safetensors",
}
"""What the message has to name."""

SEEN_BEFORE_A_WRITE = {
    name
    for name in REFUSED
    if "mapping" in name or "list" in name or "atomic" in name or "file" in name or "path" in name
} | {"nothing", "source fails at the start", "layer that does not exist", "session on a busy model"}
"""Faults that cannot cost the engine its weights, because all is checked before any is written."""

SERVES_THE_OTHER = {"reload by a second caller"}
"""Here the first caller brings B to its end, although the second one was refused."""


def problems(name, found):
    """Yield what is not as it has to be after one fault."""
    if found["error"] != REFUSED[name]:
        yield f"raised {found['error']}, not {REFUSED[name]}: {found['text']}"
    if NAMED.get(name, "") not in found["text"]:
        yield f"does not name {NAMED[name]}: {found['text']}"
    if found["session left"] is not None:
        yield f"session {found['session left']} is still open"
    if found["changes"]:
        yield f"tensors moved: {found['changes']}"
    if found["model_intact"] is not None and found["model_intact"] != (found["poison"] is None):
        yield f"model_intact is {found['model_intact']}, poison is {found['poison']}"
    if name in SEEN_BEFORE_A_WRITE and found["poison"] is not None:
        yield f"live weights were written before the fault was seen: {found['poison']}"
    serves = "is B" if name in SERVES_THE_OTHER else "is A"
    if found["poison"] is None and found[serves] != "same":
        yield f"is said to be intact, and is not: {found[serves]}"
    if found["then B"] != "same" or found["then poison"] or found["then changes"]:
        yield f"does not recover: {found['then B']}, {found['then changes']}"
    if found["then A"] != "same":
        yield f"does not get back to A: {found['then A']}"


@pytest.mark.holds("I08", "W4", "W9", "W18", "frameworks-K")
@pytest.mark.parametrize("family", ["llama", "w4a16", "mixtral"])
def test_every_fault_is_refused_by_name_and_the_engine_recovers(family, run_case):
    case = run_case("faults", family=family, timeout=300)
    assert case["A against B"].startswith("tokens differ"), "or else nothing here could fail"
    assert case["faults"].keys() == REFUSED.keys()
    wrong = {name: list(problems(name, found)) for name, found in case["faults"].items()}
    assert {name: texts for name, texts in wrong.items() if texts} == {}
