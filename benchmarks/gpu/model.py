"""A decoder of plain torch, loaded by name as vLLM's Qwen3 models are; its checkpoints; its rules."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn

from benchmarks.gpu.layers import (
    METHODS,
    Attention,
    Embedding,
    Experts,
    ExpertsMethod,
    Linear,
    Norm,
    Pairs,
    Rotary,
    Unquantized,
    plain_loader,
)
from weightload import ModuleRegistry, ModuleRule, Role
from weightload.framework import Framework

DTYPE = torch.bfloat16
State = dict[str, torch.Tensor]
STACKED = {
    ".q_proj": (".qkv_proj", "q"),
    ".k_proj": (".qkv_proj", "k"),
    ".v_proj": (".qkv_proj", "v"),
    ".mlp.gate_proj": (".mlp.gate_up_proj", 0),
    ".mlp.up_proj": (".mlp.gate_up_proj", 1),
}
logger = logging.getLogger(__name__)
DROPPED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        layers: how many.
        hidden: width.
        inner: width inside a dense layer's MLP, or inside one expert.
        heads: of queries.
        kv_heads: of keys and values.
        head: width of one.
        vocab: tokens.
        experts: of each layer, 0 if it is dense.
        method: what processes its linear layers.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    experts: int = 0
    method: str = "none"

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Return that of a model of Hugging Face's configuration."""
        experts = config.get("num_experts", 0)
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["moe_intermediate_size" if experts else "intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head=config["head_dim"],
            vocab=config["vocab_size"],
            experts=experts,
        )

    def sources(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of a checkpoint, in the order of the layers."""
        q, kv, hidden, inner = (
            self.heads * self.head,
            self.kv_heads * self.head,
            self.hidden,
            self.inner,
        )
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            found[f"{layer}.input_layernorm.weight"] = (hidden,)
            projections = {"q_proj": q, "k_proj": kv, "v_proj": kv}
            for name, rows in projections.items():
                found[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
            found[f"{layer}.self_attn.o_proj.weight"] = (hidden, q)
            found[f"{layer}.self_attn.q_norm.weight"] = (self.head,)
            found[f"{layer}.self_attn.k_norm.weight"] = (self.head,)
            found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
            blocks = [f"{layer}.mlp.experts.{number}" for number in range(self.experts)]
            if blocks:
                found[f"{layer}.mlp.gate.weight"] = (self.experts, hidden)
            for block in blocks or [f"{layer}.mlp"]:
                found[f"{block}.gate_proj.weight"] = (inner, hidden)
                found[f"{block}.up_proj.weight"] = (inner, hidden)
                found[f"{block}.down_proj.weight"] = (hidden, inner)
        found["model.norm.weight"] = (hidden,)
        found["lm_head.weight"] = (self.vocab, hidden)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of a checkpoint."""
        return sum(torch.Size(shape).numel() for shape in self.sources().values()) * DTYPE.itemsize

    @property
    def tensors(self) -> int:
        """How many a checkpoint has."""
        return len(self.sources())


def draw(shape: Shape, seed: int, device: str) -> State:
    """Return a checkpoint in one run of memory; two seeds differ in every tensor."""
    starts, size = {}, 0
    for name, sizes in shape.sources().items():
        starts[name] = size
        size += -(-torch.Size(sizes).numel() // 64) * 64
    flat = torch.empty(size, device=device, dtype=DTYPE)
    generator = torch.Generator(device).manual_seed(seed)
    state = {}
    for name, sizes in shape.sources().items():
        view = flat[starts[name] : starts[name] + torch.Size(sizes).numel()].view(sizes)
        low, high = (0.8, 1.2) if len(sizes) == 1 else (-1.0, 1.0)
        view.uniform_(low, high, generator=generator)
        if len(sizes) == 2 and "embed" not in name:
            view.mul_((3 / sizes[1]) ** 0.5)
        state[name] = view
    return state


class AttentionBlock(nn.Module):
    """Projections around an attention."""

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
        method = METHODS[shape.method]()
        self.qkv_proj = Linear(shape.hidden, {"q": q, "k": kv, "v": kv}, method)
        self.o_proj = Linear(q, {0: shape.hidden}, method)
        self.rotary_emb = rotary
        self.attn = Attention()
        self.q_norm, self.k_norm = Norm(shape.head), Norm(shape.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        q, k, v = (
            part.view(len(x), -1, shape.head)
            for part in self.qkv_proj(x).split(list(self.qkv_proj.outputs.values()), -1)
        )
        q, k = self.rotary_emb(self.q_norm(q)), self.rotary_emb(self.k_norm(k))
        return self.o_proj(self.attn(q, k, v).flatten(1))


class Activation(nn.Module):
    """Multiplies a half by the other, gated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class Mlp(nn.Module):
    """A dense MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        method = METHODS[shape.method]()
        self.gate_up_proj = Linear(shape.hidden, {0: shape.inner, 1: shape.inner}, method)
        self.down_proj = Linear(shape.inner, {0: shape.hidden}, method)
        self.act_fn = Activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Runner(nn.Module):
    """What stands between a block and the weights of its experts, and passes them on."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Identity()
        self.routed_experts = Experts(shape.experts, shape.hidden, shape.inner)

    def load_weights(self, weights: Pairs) -> Iterator[str]:
        """Give everything to the experts."""
        for name in self.routed_experts.load_weights(weights):
            yield f"routed_experts.{name}"

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return self.routed_experts(*given)


class MoeBlock(nn.Module):
    """A router and experts, two for each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, {0: shape.experts}, Unquantized())
        self.experts = Runner(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part, chosen = self.gate(x).float().softmax(-1).topk(2, -1)
        return self.experts(x, chosen, part.to(x.dtype))


class Layer(nn.Module):
    """One layer of the decoder."""

    def __init__(self, shape: Shape, rotary: Rotary) -> None:
        super().__init__()
        self.self_attn = AttentionBlock(shape, rotary)
        self.mlp = MoeBlock(shape) if shape.experts else Mlp(shape)
        self.input_layernorm = Norm(shape.hidden)
        self.post_attention_layernorm = Norm(shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Everything but the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = Embedding(shape.vocab, shape.hidden)
        rotary = Rotary(shape.head)
        self.layers = nn.ModuleList(Layer(shape, rotary) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def load_weights(self, weights: Pairs) -> set[str]:
        """Load by the names of the checkpoint."""
        return Walk(self, STACKED).load(weights)


class Decoder(nn.Module):
    """The model; tokens to the scores of the next one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = Embedding(shape.vocab, shape.hidden)
        self.logits_processor = nn.Identity()

    def load_weights(self, weights: Pairs) -> set[str]:
        """Load by the names of the checkpoint."""
        return Walk(self, {}).load(weights)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(tokens))

    def example(self) -> torch.Tensor:
        """Return tokens to compute with."""
        device = self.lm_head.weight.device
        return torch.arange(3, 11, device=device) * 7 % self.shape.vocab


class Walk:
    """Takes tensors to the modules that their names lead to, in one pass over the source.

    Args:
        root: where names begin.
        stacked: by a part of a name what it is called in the model, and the shard.
    """

    def __init__(self, root: nn.Module, stacked: dict[str, tuple[str, Any]]) -> None:
        self._root = root
        self._stacked = stacked
        self._tied = self._find_tied()

    def load(self, weights: Pairs) -> set[str]:
        """Load everything; return the names of what was filled."""
        return set(self._module("", self._root, self._wanted(self._renamed(weights))))

    def _find_tied(self) -> set[str]:
        first: dict[int, str] = {}
        tied = set()
        for prefix, module in self._root.named_modules(remove_duplicate=False):
            if isinstance(module, Embedding):
                for name, param in module.named_parameters(remove_duplicate=False):
                    full = f"{prefix}.{name}"
                    if first.setdefault(id(param), full) != full:
                        tied.add(full)
        return tied

    def _renamed(self, weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        for name, loaded in weights:
            if any(part in name for part in DROPPED):
                continue
            shard = None
            for part, (new, which) in self._stacked.items():
                if part in name:
                    name, shard = name.replace(part, new, 1), which
            if shard is not None:
                loaded.shard_id = shard
            yield name, loaded

    def _wanted(self, weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, loaded) for name, loaded in weights if name not in self._tied)

    def _module(self, prefix: str, module: nn.Module, weights: Pairs) -> Iterator[str]:
        own = getattr(module, "load_weights", None)
        if module is not self._root and callable(own):
            yield from (self._join(prefix, name) for name in own(weights))
        children = dict(module.named_children())
        params = dict(module.named_parameters(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in params and name not in module._non_persistent_buffers_set:
                params[name] = buffer
        split = ((name.split(".", 1), loaded) for name, loaded in weights)
        for part, group in itertools.groupby(split, key=lambda pair: pair[0][0]):
            inner = (("" if len(name) == 1 else name[1], loaded) for name, loaded in group)
            full = self._join(prefix, part)
            if part in children:
                yield from self._module(full, children[part], inner)
            elif part in params:
                yield from self._param(full, params[part], inner)
            else:
                raise ValueError(f"no module or parameter {full!r}")

    def _param(self, full: str, param: torch.Tensor, weights: Pairs) -> Iterator[str]:
        for rest, loaded in weights:
            if rest:
                raise ValueError(f"{full!r} is a parameter and has no {rest!r}")
            if param.dtype != loaded.dtype:
                raise ValueError(f"{full!r} is {param.dtype}, not {loaded.dtype}")
            getattr(param, "weight_loader", plain_loader)(param, loaded)
            logger.debug("%s is loaded, of shape %s", full, param.shape)
            yield full

    def _join(self, prefix: str, name: str) -> str:
        return ".".join(part for part in (prefix, name) if part)


def build(shape: Shape, device: str) -> Decoder:
    """Construct a model without weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(device):
            return Decoder(shape).eval()
    finally:
        torch.set_default_dtype(before)


def process(model: nn.Module) -> None:
    """Call the hooks, in the order in which an engine does after the first load."""
    late = []
    for module in model.modules():
        if getattr(module, "deferred", False):
            late.append(module)
        elif getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    for module in late:
        module.process_weights_after_loading()


def fresh(shape: Shape, state: State, device: str) -> Decoder:
    """Build, load and process a model without weightload: what a reload has to give."""
    model = build(shape, device)
    with torch.no_grad():
        model.load_weights(iter(state.items()))
        process(model)
    return model


def framework() -> Framework:
    """Return what a session has to know about these models."""
    registry = ModuleRegistry()
    for method in (Unquantized, ExpertsMethod):
        registry.register(
            method,
            ModuleRule(
                role=Role.QUANT,
                process=lambda module: module.quant_method.process_weights_after_loading(module),
            ),
            strategy=True,
        )
    late = ModuleRule(
        role=Role.ATTENTION, process=lambda module: module.process_weights_after_loading()
    )
    registry.register(Attention, late)
    return Framework(registry)
