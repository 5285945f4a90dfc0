"""Unquantised decoders without experts, and one state space model."""

from weightload.vllm.testing.parts import (
    Config,
    Family,
    Tensors,
    TensorSpec,
    base_config,
    decoder,
    ends,
    linear,
    norm,
)


def phi3_tensors(config: Config) -> Tensors:
    """Yield the tensors of Phi3, whose fused projections are fused on disk."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    fused = queries + 2 * config["num_key_value_heads"] * config["head_dim"]
    yield from ends(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        yield from linear(f"{layer}.self_attn.qkv_proj", fused, hidden, gain=1.5)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, queries, gain=2.0)
        yield from linear(f"{layer}.mlp.gate_up_proj", 2 * inner, hidden, gain=1.5)
        yield from linear(f"{layer}.mlp.down_proj", hidden, inner, gain=1.5)


def olmo2_tensors(config: Config) -> Tensors:
    """Yield the tensors of OLMo2, which normalises whole queries and keys and a block's output."""
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    yield from decoder(config, norms=names)
    size = config["head_dim"]
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}.self_attn"
        yield f"{block}.q_norm.weight", norm(config["num_attention_heads"] * size)
        yield f"{block}.k_norm.weight", norm(config["num_key_value_heads"] * size)


def shifted_norm(size: int) -> TensorSpec:
    """Return the scale of a normalisation that adds one to it, as those of Gemma do."""
    return TensorSpec(shape=(size,), kind="uniform", low=-0.4, high=0.4)


def gemma2_tensors(config: Config) -> Tensors:
    """Yield the tensors of Gemma2, which has four normalisations in a layer.

    The model multiplies embeddings by the root of their size before the first layer. They are drawn
    smaller for that, and the last normalisation larger, so that the tied head does not echo.
    """
    names = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    table = (config["vocab_size"], config["hidden_size"])
    own = {
        "model.embed_tokens.weight": TensorSpec(shape=table, high=0.03),
        "model.norm.weight": TensorSpec(shape=table[1:], kind="uniform", low=3.0, high=6.0),
    }
    for name, spec in decoder(config, norms=names, scale=shifted_norm):
        yield name, own.get(name, spec)


LLAMA = Family(
    name="llama",
    summary="Llama with its own head",
    config=base_config("LlamaForCausalLM", "llama"),
    tensors=decoder,
)

QWEN2 = base_config("Qwen2ForCausalLM", "qwen2")

QWEN3 = base_config("Qwen3ForCausalLM", "qwen3")

DENSE: tuple[Family, ...] = (
    LLAMA,
    Family(
        name="qwen2-tied",
        summary="Qwen2 with biased queries, keys and values, whose head is its embedding",
        config={**QWEN2, "tie_word_embeddings": True},
        tensors=lambda config: decoder(config, qkv_bias=True),
    ),
    Family(
        name="qwen2-untied",
        summary="Qwen2 with its own head",
        config=QWEN2,
        tensors=lambda config: decoder(config, qkv_bias=True),
    ),
    Family(
        name="qwen3",
        summary="Qwen3, which normalises the queries and keys of every head",
        config=QWEN3,
        tensors=lambda config: decoder(config, qk_norm=True),
    ),
    Family(
        name="phi3",
        summary="Phi3, whose checkpoint holds fused projections",
        config=base_config("Phi3ForCausalLM", "phi3"),
        tensors=phi3_tensors,
    ),
    Family(
        name="gemma2",
        summary="Gemma2 with four normalisations in a layer, a tied head and capped logits",
        config=base_config(
            "Gemma2ForCausalLM",
            "gemma2",
            tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=32,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
            sliding_window=64,
        ),
        tensors=gemma2_tensors,
    ),
    Family(
        name="olmo2",
        summary="OLMo2, which normalises after each block; vLLM runs it through Transformers",
        config=base_config("Olmo2ForCausalLM", "olmo2"),
        tensors=olmo2_tensors,
    ),
)
