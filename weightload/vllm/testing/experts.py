"""Unquantised mixtures of experts."""

from weightload.vllm.testing.parts import (
    Config,
    Family,
    Tensors,
    TensorSpec,
    attention,
    base_config,
    bias,
    ends,
    gated,
    linear,
    matrix,
    norm,
)


def mixtral_tensors(config: Config) -> Tensors:
    """Yield the tensors of Mixtral: every feed-forward block is a router over gated experts."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield from ends(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        yield from attention(config, f"{layer}.self_attn")
        block = f"{layer}.block_sparse_moe"
        yield from linear(f"{block}.gate", config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            yield from gated(f"{block}.experts.{expert}", hidden, inner, names=("w1", "w3", "w2"))


def qwen3_moe_tensors(config: Config) -> Tensors:
    """Yield the tensors of Qwen3-MoE: normalised queries and keys, and experts in every layer."""
    hidden, size = config["hidden_size"], config["head_dim"]
    yield from ends(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        yield from attention(config, f"{layer}.self_attn")
        yield f"{layer}.self_attn.q_norm.weight", norm(size)
        yield f"{layer}.self_attn.k_norm.weight", norm(size)
        yield from linear(f"{layer}.mlp.gate", config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            name = f"{layer}.mlp.experts.{expert}"
            yield from gated(name, hidden, config["moe_intermediate_size"])


def gpt_oss_tensors(config: Config) -> Tensors:
    """Yield the tensors of gpt-oss in bfloat16: stacked experts with biases, and a sink per head.

    The expert matrices are stored as input by output, the other way round than linear layers.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    count = config["num_local_experts"]
    yield from ends(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        yield from attention(config, f"{layer}.self_attn", qkv_bias=True, out_bias=True)
        yield f"{layer}.self_attn.sinks", TensorSpec(shape=(config["num_attention_heads"],))
        yield from linear(f"{layer}.mlp.router", count, hidden, biased=True)
        experts = f"{layer}.mlp.experts"
        yield (
            f"{experts}.gate_up_proj",
            TensorSpec(shape=(count, hidden, 2 * inner), high=matrix(1, hidden, gain=1.5).high),
        )
        yield f"{experts}.gate_up_proj_bias", bias(count, 2 * inner)
        yield (
            f"{experts}.down_proj",
            TensorSpec(shape=(count, inner, hidden), high=matrix(1, inner, gain=1.5).high),
        )
        yield f"{experts}.down_proj_bias", bias(count, hidden)


def deepseek_v2_tensors(config: Config) -> Tensors:
    """Yield the tensors of DeepSeek-V2: latent attention, a dense layer, then experts."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    plain, rotated, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    rank, inner = config["kv_lora_rank"], config["moe_intermediate_size"]
    yield from ends(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        block = f"{layer}.self_attn"
        yield from linear(f"{block}.q_proj", heads * (plain + rotated), hidden, gain=1.5)
        yield from linear(f"{block}.kv_a_proj_with_mqa", rank + rotated, hidden, gain=1.5)
        yield f"{block}.kv_a_layernorm.weight", norm(rank)
        yield from linear(f"{block}.kv_b_proj", heads * (plain + value), rank, gain=1.5)
        yield from linear(f"{block}.o_proj", hidden, heads * value, gain=2.0)
        if index < config["first_k_dense_replace"]:
            yield from gated(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        yield from linear(f"{layer}.mlp.gate", config["n_routed_experts"], hidden)
        for expert in range(config["n_routed_experts"]):
            yield from gated(f"{layer}.mlp.experts.{expert}", hidden, inner)
        shared = config["n_shared_experts"] * inner
        yield from gated(f"{layer}.mlp.shared_experts", hidden, shared)


EXPERTS: tuple[Family, ...] = (
    Family(
        name="mixtral",
        summary="Mixtral with four experts, two of them per token",
        config=base_config(
            "MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2
        ),
        tensors=mixtral_tensors,
    ),
    Family(
        name="qwen3-moe",
        summary="Qwen3-MoE with four experts in every layer, two of them per token",
        config=base_config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            moe_intermediate_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
        ),
        tensors=qwen3_moe_tensors,
    ),
    Family(
        name="gpt-oss",
        summary="gpt-oss in bfloat16 with attention sinks, stacked experts and biases everywhere",
        config=base_config(
            "GptOssForCausalLM",
            "gpt_oss",
            intermediate_size=128,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_bias=True,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
            swiglu_limit=7.0,
            rope_theta=150000.0,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 256,
                "truncate": False,
            },
        ),
        tensors=gpt_oss_tensors,
    ),
    Family(
        name="deepseek-v2",
        summary="DeepSeek-V2 with latent attention, one dense layer, four experts and a shared one",
        config={
            **base_config(
                "DeepseekV2ForCausalLM",
                "deepseek_v2",
                num_key_value_heads=4,
                moe_intermediate_size=64,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_shared_experts=1,
                first_k_dense_replace=1,
                moe_layer_freq=1,
                n_group=1,
                topk_group=1,
                topk_method="greedy",
                norm_topk_prob=False,
                routed_scaling_factor=1.0,
                scoring_func="softmax",
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_nope_head_dim=32,
                qk_rope_head_dim=64,
                v_head_dim=32,
            ),
            "head_dim": 64,
        },
        tensors=deepseek_v2_tensors,
    ),
)
