"""Speculative decoding: target and draft are updated from one stream.

The draft is a small model of its own, or an EAGLE head that has the target's embedding and output layer.
"""

import json
from pathlib import Path

import torch
from common import families, main, operate, start
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config

from weightload import IncompleteLoadError, poison_of
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint


def eagle_head(path, folder, seed):
    """Make an EAGLE head of the first layer of a model, and return its folder."""
    config = json.loads((path / "config.json").read_text())
    size = config["hidden_size"]
    weights = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in read_checkpoint(path).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    generator = torch.Generator().manual_seed(seed)
    joined = torch.rand(size, 2 * size, generator=generator) - 0.5
    weights["fc.weight"] = joined.to(next(iter(weights.values())).dtype)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    save_file(weights, folder / "model.safetensors")
    return folder


def draft_says(llm):
    """Return what parts of the draft compute, as bits; what is served does not depend on it."""

    def look(worker):
        draft = worker.get_draft_model()
        layer, head = draft.model.layers[0], draft.lm_head
        dtype, size = next(draft.parameters()).dtype, draft.config.hidden_size
        x = torch.linspace(-2, 2, 10 * size, dtype=dtype).view(5, 2 * size)
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            parts = [draft.model.embed_tokens(torch.arange(5)), layer.mlp(x[:, :size])]
            parts.append(head.quant_method.apply(head, x[:, :size]))
            if hasattr(draft.model, "fc"):
                parts.append(draft.model.fc(x))
        tensors = (part[0] if isinstance(part, tuple) else part for part in parts)
        return [tensor.float().flatten().tolist() for tensor in tensors]

    [said] = llm.collective_rpc(look)
    return said


def run(folder, method):
    register()
    folder = Path(folder)
    paths = {
        seed: families.make_checkpoint("llama", folder / str(seed), seed=seed)
        for seed in (1, 2, 3, 4)
    }
    for seed in (3, 4) if method == "eagle" else ():
        paths[seed] = eagle_head(paths[seed], folder / f"head{seed}", seed)

    def begin(target, draft, **options):
        speculative = {"method": method, "model": str(paths[draft]), "num_speculative_tokens": 2}
        return start("llama", paths[target], speculative_config=speculative, **options)

    llm = begin(2, 4)
    wanted, said = observe(llm), draft_says(llm)
    stop_engine(llm)
    own = {f"draft.{name}": tensor for name, tensor in read_checkpoint(paths[4]).items()}
    weights = {**own, **read_checkpoint(paths[2])}
    result = {}
    for origin in ("auto", "weightload"):
        llm = begin(1, 3, load_format=origin)
        before, said_before = observe(llm), draft_says(llm)
        found = result[origin] = {
            "A against B": describe_difference(before, wanted),
            "draft A against B": [one == two for one, two in zip(said_before, said, strict=True)],
        }
        lacking = {name: tensor for name, tensor in weights.items() if name != next(iter(own))}
        try:
            reload(llm, lacking, draft="draft.")
        except IncompleteLoadError as error:
            found["a tensor of the draft is missing"] = error.model_intact
        found["still A"] = describe_difference(before, observe(llm)), draft_says(llm) == said_before
        reload(llm, weights, version="B", draft="draft.")
        found["B"] = describe_difference(wanted, observe(llm)), draft_says(llm) == said
        found["version"] = operate(llm, "status")["version"]
        [found["poisoned"]] = llm.collective_rpc(
            lambda worker: poison_of(worker.get_draft_model()) is not None
        )
        [found["shared"]] = llm.collective_rpc(
            lambda worker: worker.get_draft_model().lm_head is worker.get_model().lm_head
        )
        stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
