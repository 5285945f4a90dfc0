"""Real vLLM models of the shapes that the rows need, their weights, and what is compared.

A model has the layout of its checkpoint (``skip``: vLLM's own switch keeps linear layers as they
are, which is what they are on CUDA) or that of the CPU's kernels. Weights of a round are those of
round 0 with the round's number in the low bits of every value, so that any two of 127 rounds
differ in every element and no second copy of the weights is needed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import blake3
import torch
from torch import nn

from weightload.record import record_of
from weightload.session import WeightLoadSession
from weightload.vllm.testing.dense import QWEN3
from weightload.vllm.testing.experts import qwen3_moe_tensors
from weightload.vllm.testing.parts import base_config, decoder

ALIGNMENT = 64
DTYPE = torch.bfloat16


def _dense(**sizes: Any) -> dict[str, Any]:
    return {**QWEN3, **sizes}


def _moe(**sizes: Any) -> dict[str, Any]:
    return base_config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        num_hidden_layers=8,
        **sizes,
    )


GEOMETRIES: dict[str, dict[str, Any]] = {
    "dense06": _dense(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "wide": _dense(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "deep": _dense(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=200,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "tiny200": _dense(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=200,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ),
    "moe": _moe(
        vocab_size=32000,
        hidden_size=512,
        moe_intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    ),
    "moetiny": _moe(
        vocab_size=2048,
        hidden_size=128,
        moe_intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    ),
}
"""By name what goes into config.json. The sizes of ``reduced`` models are a part of these."""


def reduced(config: dict[str, Any]) -> dict[str, Any]:
    """Return a model small enough for a check that must be quick, with the same kinds of layers."""
    smaller = {
        "num_hidden_layers": min(
            config["num_hidden_layers"], 40 if config["hidden_size"] < 512 else 8
        ),
        "vocab_size": min(config["vocab_size"], 2048),
        "intermediate_size": min(config["intermediate_size"], 2048),
    }
    if "num_experts" in config:
        smaller.update(num_hidden_layers=2, num_experts=32)
    return {**config, **smaller}


@attrs.frozen(eq=False)
class Source:
    """The tensors of one checkpoint, in one buffer, whose values change from round to round.

    Attributes:
        config: what the model is.
        flat: the buffer, bytes.
        tensors: views into it by name, in the order of the layers.
    """

    config: dict[str, Any]
    flat: torch.Tensor
    tensors: dict[str, torch.Tensor]
    _round: list[int] = attrs.field(factory=lambda: [0], init=False)

    @classmethod
    def of(cls, config: dict[str, Any], seed: int = 1) -> Source:
        """Draw random weights."""
        specs = dict((qwen3_moe_tensors if "num_experts" in config else _qwen3)(config))
        places, size = {}, 0
        for name, spec in sorted(specs.items(), key=lambda item: _place(item[0])):
            places[name] = (size, spec)
            size += -(-2 * _numel(spec.shape) // ALIGNMENT) * ALIGNMENT
        flat = torch.zeros(size, dtype=torch.uint8)
        values = flat.view(DTYPE)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (start, spec) in places.items():
            count = _numel(spec.shape)
            view = values[start // 2 : start // 2 + count]
            if spec.kind == "uniform":
                view.uniform_(spec.low, spec.high, generator=generator)
            else:
                # A third of the time of normal values; the deviation is the same.
                edge = spec.high * 3**0.5
                view.uniform_(-edge, edge, generator=generator)
            tensors[name] = view.view(spec.shape)
        return cls(config=config, flat=flat, tensors=tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def turn(self, number: int) -> dict[str, torch.Tensor]:
        """Give the buffer the weights of round ``number``, 0 to 127, and return the tensors."""
        change = self._round[0] ^ number
        if change:
            self.flat.view(torch.int16).bitwise_xor_(change)
        self._round[0] = number
        return self.tensors

    def write(self, folder: Path) -> Path:
        """Write the weights of this round as a checkpoint."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_config(self.config, folder)
        return folder


def _qwen3(config: dict[str, Any]) -> Any:
    return decoder(config, qk_norm=True)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _place(name: str) -> tuple[Any, ...]:
    """Order names as checkpoints do: embedding, layers by number, experts by number, the rest."""
    parts = name.split(".")
    if "layers" not in parts:
        return (0 if "embed" in name else 2, 0, 0, name)
    layer = int(parts[parts.index("layers") + 1])
    expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else -1
    return (1, layer, expert, name)


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write config.json."""
    text = json.dumps({**config, "dtype": str(DTYPE).removeprefix("torch.")}, indent=1)
    (folder / "config.json").write_text(text + "\n")


@attrs.define(eq=False)
class Built:
    """One model with what is needed to load it.

    Attributes:
        model: it.
        vllm_config: the engine's configuration, of this model alone.
        places: address of every parameter and buffer after the first load.
        version: of the last load.
    """

    model: nn.Module
    vllm_config: Any
    places: dict[str, int] = attrs.field(init=False, factory=dict)
    version: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.places = addresses(self.model)

    def settled(self) -> bool:
        """Whether every parameter and buffer is where it was after the first load."""
        return addresses(self.model) == self.places

    @contextlib.contextmanager
    def ambient(self) -> Iterator[None]:
        """Be in the state that vLLM's worker is in when it reloads."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_current_vllm_config(self.vllm_config), set_default_torch_dtype(DTYPE):
            yield

    def native(self, weights: Any) -> None:
        """Reload as vLLM does."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with self.ambient():
            initialize_layerwise_reload(self.model)
            given = weights.items() if hasattr(weights, "items") else weights
            self.model.load_weights(iter(given))  # type: ignore[operator]
            finalize_layerwise_reload(self.model, self.vllm_config.model_config)

    def ours(self, weights: Any, **options: Any) -> WeightLoadSession:
        """Reload through a session and return it."""
        self.version += 1
        how = {"transport": options.pop("transport", None)}
        with WeightLoadSession(self.model, version=self.version, **options) as session:
            session.load(weights, **how)
        return session

    @property
    def kept_bytes(self) -> int:
        """Bytes that weightload keeps for the next reload to stage in."""
        record = record_of(self.model)
        return 0 if record is None or record.plan is None else record.plan.pool.nbytes

    def observe(self) -> dict[str, str]:
        """Return the digest of every live tensor, and of what every linear layer computes."""
        found = {}
        for name, tensor in self._tensors():
            found[name] = digest_of(tensor)
        with self.ambient(), torch.no_grad():
            for name, module in self.model.named_modules():
                if hasattr(module, "cpu_linear"):
                    bias = getattr(module, "bias", None)
                    out = module.quant_method.apply(module, linear_probe(module), bias)
                    found[f"{name}()"] = digest_of(out)
        return found

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def linear_probe(module: nn.Module) -> torch.Tensor:
    """Return a fixed input of a linear layer."""
    width = module.input_size if hasattr(module, "input_size") else module.embedding_dim
    return torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to(DTYPE)


def addresses(model: nn.Module) -> dict[str, int]:
    """Return the address of every parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named}


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bits."""
    flat = tensor.detach().contiguous().flatten()
    if not flat.numel():
        return "empty"
    return blake3.blake3(flat.view(torch.uint8).numpy()).hexdigest()


_STARTED = False
_FILES = tempfile.TemporaryDirectory(prefix="weightload-speed-")
"""Small files that vLLM asks for, gone when the process ends."""


def start() -> None:
    """Make this process one in which vLLM builds models, with one thread."""
    global _STARTED
    if _STARTED:
        return
    _STARTED = True
    torch.set_num_threads(1)
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    register()
    vllm_config = make_config(GEOMETRIES["moetiny"])  # also the groups that experts need
    from vllm.config import set_current_vllm_config

    place = Path(_FILES.name) / "store"
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{place}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    if not torch.accelerator.is_available():
        # vLLM's reload calls it, and without an accelerator torch refuses.
        torch.accelerator.empty_cache = lambda: None


def register() -> None:
    """Make the load format known."""
    from weightload.vllm.plugin import register as plugin

    plugin()


def make_config(config: dict[str, Any]) -> Any:
    """Return a new configuration of an engine on a model of these sizes."""
    from vllm.engine.arg_utils import EngineArgs

    folder = Path(tempfile.mkdtemp(dir=_FILES.name))
    write_config(config, folder)
    arguments = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
    )
    return arguments.create_engine_config()


def build(source: Source, *, skip: bool, how: str) -> Built:
    """Construct a model and load the source's present weights, for the first time.

    Args:
        source: the weights.
        skip: whether linear layers keep the layout of the checkpoint.
        how: "native" for vLLM's own steps, "ours" for a session.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    from weightload.vllm.framework import VllmFramework

    start()
    vllm_config = make_config(source.config)
    model_config, device = vllm_config.model_config, torch.device("cpu")
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(DTYPE), torch.no_grad():
        model = initialize_model(vllm_config=vllm_config, model_config=model_config)
        if skip:

            class Plain(UnquantizedEmbeddingMethod):
                """Packs nothing, as on CUDA: embeddings and heads do not know the switch."""

                def process_weights_after_loading(self, layer: nn.Module) -> None:
                    layer.cpu_linear = nn.functional.linear

            for module in model.modules():
                if isinstance(module, LinearBase):
                    module._cpu_skip_gemm_dispatch = True
                elif isinstance(module, VocabParallelEmbedding):
                    module.quant_method = Plain()
        if how == "ours":
            framework = VllmFramework(vllm_config, model_config, device)
            with WeightLoadSession(model, framework=framework, version=0) as session:
                session.load(source.tensors)
        else:
            model.load_weights(iter(source.tensors.items()))
            process_weights_after_loading(model, model_config, device)
    return Built(model.eval(), vllm_config)


def references(source: Source, rounds: int, *, skip: bool) -> dict[int, dict[str, str]]:
    """Return by round what a model shows that was freshly built from the round's weights."""
    found = {}
    for number in range(1, rounds + 1):
        source.turn(number)
        fresh = build(source, skip=skip, how="native")
        found[number] = fresh.observe()
        del fresh
        gc.collect()
    return found
