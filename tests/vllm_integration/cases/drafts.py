"""Speculative decoding with a small draft: target and draft are updated from one stream."""

from pathlib import Path

import torch
from common import families, main, operate, start
from vllm.config import set_current_vllm_config

from weightload import IncompleteLoadError, poison_of
from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint


def draft_says(llm):
    """Return what parts of the draft compute, as bits; what is served does not depend on it."""

    def look(worker):
        draft = worker.get_draft_model()
        layer = draft.model.layers[1]
        dtype = next(draft.parameters()).dtype
        x = torch.linspace(-2, 2, 5 * draft.config.hidden_size, dtype=dtype).view(5, -1)
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            embedded = draft.model.embed_tokens(torch.arange(5))
            parts = (embedded, layer.mlp(layer.input_layernorm(x)), draft.compute_logits(x))
        return [part.float().flatten().tolist() for part in parts]

    [said] = llm.collective_rpc(look)
    return said


def run(folder):
    register()
    paths = {
        seed: families.make_checkpoint("llama", Path(folder) / str(seed), seed=seed)
        for seed in (1, 2, 3, 4)
    }

    def begin(target, draft, **options):
        speculative = {
            "method": "draft_model",
            "model": str(paths[draft]),
            "num_speculative_tokens": 2,
        }
        return start("llama", paths[target], speculative_config=speculative, **options)

    llm = begin(2, 4)
    wanted, said = observe(llm), draft_says(llm)
    stop_engine(llm)
    own = {f"draft.{name}": tensor for name, tensor in read_checkpoint(paths[4]).items()}
    weights = {**read_checkpoint(paths[2]), **own}
    result = {}
    for origin in ("auto", "weightload"):
        llm = begin(1, 3, load_format=origin)
        before, said_before = observe(llm), draft_says(llm)
        found = result[origin] = {
            "A against B": describe_difference(before, wanted),
            "draft A against B": said_before == said,
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
        stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
