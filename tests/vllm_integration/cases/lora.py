"""An engine that serves adapters, whose layers vLLM wraps after they were loaded, gets new weights."""

import json

import torch
from common import Places, checkpoints, main, model_of, start
from safetensors.torch import save_file

from weightload import WeightLoadError, weights_version
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing import probe
from weightload.vllm.testing.probe import describe_difference, observe
from weightload.vllm.testing.sources import read_checkpoint

RANK = 4
TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def make_adapter(weights, folder):
    """Write an adapter for some of the linear layers, in the form that peft writes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, tensor in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith(TARGETS):
            continue
        rows, columns = tensor.shape
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            value = torch.randn(shape, generator=generator) * 0.3
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = value.to(tensor.dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(TARGETS),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Adapted:
    """An engine whose every request uses one adapter."""

    def __init__(self, llm, folder):
        from vllm.lora.request import LoRARequest

        self._llm, self._request = llm, LoRARequest("one", 1, str(folder))

    def generate(self, *args, **options):
        return self._llm.generate(*args, lora_request=self._request, **options)


def run(family, folder):
    register()
    paths = checkpoints(family, folder)
    weights = {name: read_checkpoint(path) for name, path in zip("AB", paths, strict=True)}
    adapter = make_adapter(weights["A"], paths[0].parent / "adapter")
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    wanted = {}
    for name, path in zip("AB", paths, strict=True):
        llm = start(family, path, **options)
        wanted[name], wanted[f"{name} adapted"] = observe(llm), observe(Adapted(llm, adapter))
        probe.stop_engine(llm)

    llm = start(family, paths[0], load_format="weightload", **options)
    model = model_of(llm)
    places = Places(model)
    result = {
        "A against B": describe_difference(wanted["A"], wanted["B"]),
        "A against adapted": describe_difference(wanted["A"], wanted["A adapted"]),
        "wrapped": sum(name.endswith("base_layer") for name, _ in model.named_modules()),
    }

    def look(label, name):
        result[label] = {
            "verdict": describe_difference(wanted[name], observe(llm)),
            "adapted": describe_difference(
                wanted[f"{name} adapted"], observe(Adapted(llm, adapter))
            ),
            "changes": places.changes(),
            "version": weights_version(model),
        }

    look("first", "A")
    for label, name, source, how in (
        ("from files", "B", paths[1], {}),
        ("from a mapping", "A", weights["A"], {}),
        ("from a stream", "B", None, {}),
        ("atomic", "A", weights["A"], {"commit": "atomic"}),
        ("verified", "B", weights["B"], {"verify": "full"}),
    ):
        given = iter(list(weights[name].items())) if source is None else source
        reload(llm, given, version=label, **how)
        look(label, name)
    lacking = dict(list(weights["A"].items())[:-1])
    try:
        reload(llm, lacking, commit="atomic")
    except WeightLoadError as error:
        result["refused"] = [type(error).__name__, error.model_intact]
    look("after a refusal", "B")
    return result


if __name__ == "__main__":
    main(run)
