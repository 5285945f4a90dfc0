"""Decoders with other skeletons than Llama: OPT, Falcon, GPT-NeoX and a state space model."""

from weightload.vllm.testing.parts import (
    Config,
    Family,
    Tensors,
    TensorSpec,
    attention,
    bias,
    embedding,
    ends,
    layer_norm,
    linear,
    matrix,
    norm,
)


def opt_tensors(config: Config) -> Tensors:
    """Yield the tensors of OPT, whose learned positions start at row 2 of their table."""
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    positions = config["max_position_embeddings"] + 2
    yield "model.decoder.embed_tokens.weight", embedding(config["vocab_size"], hidden)
    yield "model.decoder.embed_positions.weight", embedding(positions, hidden)
    yield from layer_norm("model.decoder.final_layer_norm", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.decoder.layers.{index}"
        yield from layer_norm(f"{layer}.self_attn_layer_norm", hidden)
        yield from layer_norm(f"{layer}.final_layer_norm", hidden)
        yield from attention(
            config, f"{layer}.self_attn", qkv_bias=True, out_bias=True, out="out_proj"
        )
        yield from linear(f"{layer}.fc1", inner, hidden, biased=True, gain=1.5)
        yield from linear(f"{layer}.fc2", hidden, inner, biased=True, gain=1.5)


def falcon_tensors(config: Config) -> Tensors:
    """Yield the tensors of the first Falcon: one key and value head, two blocks in parallel."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    fused = hidden + 2 * hidden // heads
    yield "transformer.word_embeddings.weight", embedding(config["vocab_size"], hidden)
    yield from layer_norm("transformer.ln_f", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"transformer.h.{index}"
        yield from layer_norm(f"{layer}.input_layernorm", hidden)
        yield from linear(f"{layer}.self_attention.query_key_value", fused, hidden, gain=1.5)
        yield from linear(f"{layer}.self_attention.dense", hidden, hidden, gain=2.0)
        yield from linear(f"{layer}.mlp.dense_h_to_4h", 4 * hidden, hidden, gain=1.5)
        yield from linear(f"{layer}.mlp.dense_4h_to_h", hidden, 4 * hidden, gain=1.5)


def gpt_neox_tensors(config: Config) -> Tensors:
    """Yield the tensors of GPT-NeoX, which interleaves queries, keys and values by head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "gpt_neox.embed_in.weight", embedding(config["vocab_size"], hidden)
    yield "embed_out.weight", matrix(config["vocab_size"], hidden, gain=2.0)
    yield from layer_norm("gpt_neox.final_layer_norm", hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{index}"
        yield from layer_norm(f"{layer}.input_layernorm", hidden)
        yield from layer_norm(f"{layer}.post_attention_layernorm", hidden)
        fused = f"{layer}.attention.query_key_value"
        yield from linear(fused, 3 * hidden, hidden, biased=True, gain=1.5)
        yield from linear(f"{layer}.attention.dense", hidden, hidden, biased=True, gain=2.0)
        yield from linear(f"{layer}.mlp.dense_h_to_4h", inner, hidden, biased=True, gain=1.5)
        yield from linear(f"{layer}.mlp.dense_4h_to_h", hidden, inner, biased=True, gain=1.5)


def mamba2_tensors(config: Config) -> Tensors:
    """Yield the tensors of Mamba2, drawn so that its states neither vanish nor grow."""
    hidden, heads = config["hidden_size"], config["num_heads"]
    inner = config["expand"] * hidden
    mixed = inner + 2 * config["n_groups"] * config["state_size"]
    yield from ends(config, model="backbone", embed="embeddings", last="norm_f")
    for index in range(config["num_hidden_layers"]):
        mixer = f"backbone.layers.{index}.mixer"
        yield f"backbone.layers.{index}.norm.weight", norm(hidden)
        yield f"{mixer}.A_log", TensorSpec(shape=(heads,), kind="uniform", low=-1.0, high=1.5)
        yield f"{mixer}.D", TensorSpec(shape=(heads,), kind="uniform", low=0.5, high=1.5)
        yield f"{mixer}.dt_bias", TensorSpec(shape=(heads,), kind="uniform", low=-2.0, high=0.5)
        yield (
            f"{mixer}.conv1d.weight",
            TensorSpec(shape=(mixed, 1, config["conv_kernel"]), high=0.5),
        )
        yield f"{mixer}.conv1d.bias", bias(mixed)
        yield f"{mixer}.norm.weight", norm(inner)
        yield from linear(f"{mixer}.in_proj", inner + mixed + heads, hidden, gain=1.5)
        yield from linear(f"{mixer}.out_proj", hidden, inner, gain=1.5)


CLASSIC: tuple[Family, ...] = (
    Family(
        name="opt",
        summary="OPT with learned positions, biases everywhere and a tied head",
        config={
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "vocab_size": 512,
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "enable_bias": True,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        tensors=opt_tensors,
    ),
    Family(
        name="falcon",
        summary="Falcon with one key and value head, parallel blocks and a tied head",
        config={
            "architectures": ["FalconForCausalLM"],
            "model_type": "falcon",
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tensors=falcon_tensors,
    ),
    Family(
        name="gpt-neox",
        summary="GPT-NeoX with fused projections and biases; vLLM runs it through Transformers",
        config={
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "hidden_act": "gelu",
            "rotary_pct": 0.25,
            "rope_theta": 10000.0,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        tensors=gpt_neox_tensors,
    ),
    Family(
        name="mamba2",
        summary="Mamba2, a state space model without attention",
        config={
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 32,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 64,
            "use_bias": False,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        tensors=mamba2_tensors,
    ),
)
