"""Models of vLLM, some of which collect tensors, updated from one buffer that is reused."""

import struct

import tokenizers
import torch
import transformers
from common import checkpoints, main, model_of, start

from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing.families import get_family
from weightload.vllm.testing.parts import Family, bias, matrix, norm
from weightload.vllm.testing.probe import DEFAULT_PROMPTS, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint, shuffled, through_one_buffer

SIZE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODERN = {"cls_token_id": 1, "sep_token_id": 2, "num_labels": 3}
KINDS = {
    "bert": ("BertModel", transformers.BertConfig(**SIZE)),
    "modernbert": (
        "ModernBertForSequenceClassification",
        transformers.ModernBertConfig(**SIZE, **MODERN),
    ),
}


def spec_of(name, shape):
    if name.endswith("bias"):
        return bias(*shape)
    return norm(*shape) if len(shape) == 1 else matrix(*shape, gain=1.5)


def family_of(kind):
    """Return a family with the names and shapes that Transformers gives such a model."""
    architecture, config = KINDS[kind]
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.startswith("pooler")
    }
    return Family(
        name=kind,
        summary=architecture,
        config={**config.to_dict(), "architectures": [architecture]},
        tensors=lambda _: ((name, spec_of(name, shape)) for name, shape in shapes.items()),
        engine={"runner": "pooling", "skip_tokenizer_init": False},
    )


def add_tokenizer(path):
    """Write a tokenizer that nobody asks; vLLM wants one for models that do not generate."""
    words = {f"word{i}": i for i in range(SIZE["vocab_size"] - 1)} | {"[UNK]": 511}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)


def observed(llm, kind):
    """Return the bits of what the engine computes for some prompts."""
    if kind not in KINDS:
        return observe(llm)
    prompts = [{"prompt_token_ids": list(tokens)} for tokens in DEFAULT_PROMPTS]
    if kind == "modernbert":
        outputs = [one.outputs.probs for one in llm.classify(prompts, use_tqdm=False)]
    else:
        outputs = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    return [[struct.pack("<d", value).hex() for value in row] for row in outputs]


def fresh(family, path, kind):
    llm = start(family, path)
    seen = observed(llm, kind)
    stop_engine(llm)
    return seen


def run(kind, folder):
    register()
    family = family_of(kind) if kind in KINDS else get_family(kind)
    a_path, b_path = checkpoints(family, folder)
    for path in (a_path, b_path) if kind in KINDS else ():
        add_tokenizer(path)
    want = {"A": fresh(family, a_path, kind), "B": fresh(family, b_path, kind)}
    weights = {"A": read_checkpoint(a_path), "B": read_checkpoint(b_path)}
    llm = start(family, a_path, load_format="weightload")
    result = {
        "class": type(model_of(llm)).__name__,
        "differ": want["A"] != want["B"],
        "fresh": observed(llm, kind) == want["A"],
        "steps": {},
    }
    for label, version, source in [
        ("one buffer", "B", lambda: through_one_buffer(weights["B"])),
        ("buffers of four", "A", lambda: through_one_buffer(weights["A"], bucket=4)),
        ("shuffled", "B", lambda: through_one_buffer(shuffled(weights["B"], seed=3))),
        ("mapping", "A", lambda: weights["A"]),
    ]:
        [receipt] = reload(llm, source(), version=label)
        result["steps"][label] = {
            "same": observed(llm, kind) == want[version],
            "received": receipt.bytes_received,
            "copied": receipt.bytes_copied,
            "put aside": sum(
                tensor.nbytes
                for name, tensor in weights[version].items()
                if not name.startswith("model.")
            ),
        }
    stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
