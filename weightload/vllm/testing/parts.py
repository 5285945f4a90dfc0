"""The parts of random checkpoints: tensor specifications and blocks that families share.

Values depend only on a tensor's name and the seed. The ranges keep activations near unit size
through two layers.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

Config = dict[str, Any]

VOCAB = 512
HIDDEN = 128
LAYERS = 2


@attrs.frozen(kw_only=True)
class TensorSpec:
    """Shape, dtype and distribution of one tensor of a checkpoint.

    The values are normal with mean `low` and standard deviation `high` for `kind` "normal", uniform
    in `low` to `high` for "uniform", and integers in `low` to `high` inclusive for "integer". A
    tensor with `fixed` values describes the layout of others and is the same for every seed.
    `dtype` is None for tensors that take the dtype of the checkpoint.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    low: float = 0.0
    high: float = 1.0
    dtype: torch.dtype | None = None
    fixed: tuple[int, ...] | None = attrs.field(default=None, repr=False)

    def draw(self, name: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of the tensor `name`, which depend on nothing but the arguments."""
        target = self.dtype or dtype
        if self.fixed is not None:
            return torch.tensor(self.fixed, dtype=target).reshape(self.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        if self.kind == "integer":
            low, high = int(self.low), int(self.high) + 1
            values = torch.randint(low, high, self.shape, generator=generator, dtype=torch.int64)
        elif self.kind == "uniform":
            values = torch.rand(self.shape, generator=generator)
            values = values.mul_(self.high - self.low).add_(self.low)
        elif self.kind == "normal":
            values = torch.randn(self.shape, generator=generator).mul_(self.high).add_(self.low)
        else:
            raise ValueError(
                f"tensor {name!r}: kind {self.kind!r} is none of 'normal', 'uniform', 'integer'"
            )
        return values.to(target)


Tensors = Iterator[tuple[str, TensorSpec]]


@attrs.frozen(kw_only=True)
class Family:
    """One kind of model: its configuration, its tensors on disk and what its engine needs.

    `config` is the content of config.json without the dtype, `tensors` lists names and
    specifications for such a configuration, and `engine` holds keyword arguments that
    `start_engine` needs beyond its defaults.
    """

    name: str
    summary: str
    config: Config
    tensors: Callable[[Config], Tensors] = attrs.field(repr=False)
    engine: dict[str, Any] = attrs.field(factory=dict)


def matrix(rows: int, columns: int, *, gain: float = 1.0) -> TensorSpec:
    """Return a projection that keeps inputs of unit size at the size `gain`."""
    return TensorSpec(shape=(rows, columns), high=gain / math.sqrt(columns))


def embedding(rows: int, size: int) -> TensorSpec:
    """Return a table that is small beside what layers add, so that a tied head does not echo."""
    return TensorSpec(shape=(rows, size), high=0.15)


def norm(size: int) -> TensorSpec:
    """Return the scale of a normalisation: around one, and far enough from it to be seen."""
    return TensorSpec(shape=(size,), kind="uniform", low=0.6, high=1.4)


def layer_norm(name: str, size: int) -> Tensors:
    """Yield the scale and the shift of a normalisation that has both."""
    yield f"{name}.weight", norm(size)
    yield f"{name}.bias", bias(size)


def bias(*shape: int) -> TensorSpec:
    """Return an additive bias of a fifth of the size of what it is added to."""
    return TensorSpec(shape=shape, high=0.2)


def linear(
    name: str, rows: int, columns: int, *, biased: bool = False, gain: float = 1.0
) -> Tensors:
    """Yield the weight of a linear layer and, if it is `biased`, its bias."""
    yield f"{name}.weight", matrix(rows, columns, gain=gain)
    if biased:
        yield f"{name}.bias", bias(rows)


Linear = Callable[..., Tensors]


def attention(
    config: Config,
    prefix: str,
    *,
    linear: Linear = linear,
    qkv_bias: bool = False,
    out_bias: bool = False,
    out: str = "o_proj",
) -> Tensors:
    """Yield the four projections of an attention with grouped keys and values.

    Queries and keys are drawn larger than values so that attention is far from uniform.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    groups = config.get("num_key_value_heads", heads)
    yield from linear(f"{prefix}.q_proj", heads * size, hidden, biased=qkv_bias, gain=1.5)
    yield from linear(f"{prefix}.k_proj", groups * size, hidden, biased=qkv_bias, gain=1.5)
    yield from linear(f"{prefix}.v_proj", groups * size, hidden, biased=qkv_bias)
    yield from linear(f"{prefix}.{out}", hidden, heads * size, biased=out_bias, gain=2.0)


def gated(
    prefix: str,
    hidden: int,
    inner: int,
    *,
    linear: Linear = linear,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    """Yield the three projections of a gated feed-forward block."""
    gate, up, down = names
    yield from linear(f"{prefix}.{gate}", inner, hidden, gain=1.5)
    yield from linear(f"{prefix}.{up}", inner, hidden, gain=1.5)
    yield from linear(f"{prefix}.{down}", hidden, inner, gain=1.5)


def ends(
    config: Config,
    *,
    model: str = "model",
    embed: str = "embed_tokens",
    last: str = "norm",
    scale: Callable[[int], TensorSpec] = norm,
) -> Tensors:
    """Yield what stands around the layers: embedding, last norm and a head that is not tied."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    yield f"{model}.{embed}.weight", embedding(vocab, hidden)
    yield f"{model}.{last}.weight", scale(hidden)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", matrix(vocab, hidden, gain=2.0)


BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")


def decoder(
    config: Config,
    *,
    linear: Linear = linear,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    norms: tuple[str, ...] = BLOCK_NORMS,
    scale: Callable[[int], TensorSpec] = norm,
) -> Tensors:
    """Yield a decoder with the tensor names of Llama and, per layer, the norms called `norms`."""
    hidden, size = config["hidden_size"], config["head_dim"]
    yield from ends(config, scale=scale)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name in norms:
            yield f"{layer}.{name}.weight", scale(hidden)
        yield from attention(config, f"{layer}.self_attn", linear=linear, qkv_bias=qkv_bias)
        if qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", norm(size)
            yield f"{layer}.self_attn.k_norm.weight", norm(size)
        yield from gated(f"{layer}.mlp", hidden, config["intermediate_size"], linear=linear)


def base_config(architecture: str, model_type: str, **more: Any) -> Config:
    """Return the configuration that most families share, with `more` on top."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }
