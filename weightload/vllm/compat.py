"""The one place that knows vLLM's private names; features are detected, versions never compared.

Seen to matter between vLLM 0.25 and 0.32: which attention layers are processed late, whether a
model as a whole has a hook, whether untied word embeddings are tied again, whether a layer
reconciles the tensor-parallel state of new parameters, and where online quantisation keeps the
loaders that it wraps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import nn

from weightload.errors import UnsupportedError
from weightload.refusals import why_refused
from weightload.registry import Convert

__all__ = [
    "calls_model_hook",
    "construct",
    "data_parallel_cores",
    "device_context",
    "engine_is_down",
    "engine_processes",
    "is_late_attention",
    "layers_on_meta",
    "processed_in_pieces",
    "reads_plainly",
    "recorded_format",
    "release_memory",
    "retie_word_embeddings",
    "rpc_to_all_cores",
    "safetensors_files",
    "says_engine_is_down",
    "set_torchao_attributes",
    "take_over_online_layer",
    "update_tensor_parallel_state",
]


def _find(module: str, name: str) -> Any:
    """Return a private name of vLLM, or ``None`` in a version that does not have it."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def construct(loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> nn.Module:
    """Construct a model the way ``loader`` does; loaders up to 0.28 leave it to a function."""
    create = getattr(loader, "create_model", None)
    if create is None:
        create = _find("vllm.model_executor.model_loader.utils", "initialize_model")
    model: nn.Module = create(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    return model


@functools.cache
def calls_model_hook() -> bool:
    """Whether vLLM's pass calls the hook of a model as a whole; 0.25 and 0.26 do not."""
    driver = _find("vllm.model_executor.model_loader.utils", "process_weights_after_loading")
    try:
        return "model.process_weights_after_loading(" in inspect.getsource(driver)
    except (OSError, TypeError):
        return True


def is_late_attention(module: nn.Module) -> bool:
    """Whether vLLM processes ``module`` after all other layers."""
    known = _find("vllm.model_executor.layers.attention", "is_deferred_attention_layer")
    if known is not None:
        return bool(known(module))
    names = ("Attention", "MLAAttention", "MMEncoderAttention")
    classes = tuple(
        cls
        for home in (
            "vllm.model_executor.layers.attention",
            "vllm.model_executor.layers.attention.mm_encoder_attention",
        )
        for cls in (_find(home, name) for name in names)
        if isinstance(cls, type)
    )
    return isinstance(module, classes)


def retie_word_embeddings(model: nn.Module, model_config: Any) -> None:
    """Tie an output head again that vLLM had untied and whose values equal the embedding's."""
    retie = _find("vllm.model_executor.model_loader.weight_tying", "maybe_retie_word_embeddings")
    if retie is not None:
        retie(model, model_config)


def update_tensor_parallel_state(module: nn.Module) -> None:
    """Let a layer correct the tensor-parallel state of parameters that its hook made."""
    update = getattr(module, "update_param_tp_status", None)
    if callable(update):
        update()


def set_torchao_attributes(model: nn.Module, model_config: Any) -> None:
    """Set what vLLM sets on models that torchao quantised."""
    if model_config.quantization == "torchao":
        setter = _find("vllm.model_executor.model_loader.reload", "set_torchao_reload_attrs")
        if setter is not None:
            setter(model, model_config)


def process_hpc_modules(model: nn.Module) -> None:
    """Run the pass over HPC modules that vLLM up to 0.29 has after attention."""
    cls = _find("vllm.model_executor.layers.hpc.hpc_module", "HpcModule")
    hook = getattr(cls, "process_weights_after_loading", None)
    if callable(hook):
        hook(model)


@contextlib.contextmanager
def device_context(module: nn.Module, device: torch.device, method: Any) -> Iterator[None]:
    """Have the parameters of ``module`` on the device while its hook runs, as vLLM does."""
    from vllm.model_executor.model_loader.utils import device_loading_context

    if not getattr(method, "requires_device_loading", True):
        yield
        return
    with device_loading_context(module, device):
        yield


def processed_in_pieces(module: nn.Module) -> dict[str, Convert] | None:
    """Return what the hook of a layer does to each expert by itself, by the parameter's name.

    On a CPU vLLM packs unquantised experts for its kernels, into tensors of the same shape.
    """
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts: Any = getattr(kernel, "fused_experts", None)
    known = _find("vllm.model_executor.layers.fused_moe.experts.cpu_moe", "CPUUnquantizedExperts")
    pack = getattr(torch.ops._C, "prepack_moe_weight", None)
    if known is None or not isinstance(experts, known) or pack is None:
        return None
    if getattr(experts, "_use_zentorch", False) or not hasattr(experts, "isa"):
        return None

    def convert(loaded: torch.Tensor, new: torch.Tensor) -> None:
        pack(loaded, new, experts.isa)

    return {"w13_weight": convert, "w2_weight": convert}


def release_memory(device: torch.device) -> None:
    """Give cached memory back if the system is short of it, as vLLM does after each layer."""
    release = _find("vllm.utils.mem_utils", "release_device_memory_under_pressure")
    if release is not None:
        release(device)


_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def _info(module: nn.Module) -> Any:
    table = _find(_LAYERWISE, "LAYERWISE_INFO")
    return table.get(module) if table is not None else None


def layers_on_meta(model: nn.Module) -> list[nn.Module]:
    """Return the layers that online quantisation constructed on meta, with wrapped loaders."""
    found = []
    for module in model.modules():
        info = _info(module)
        if info is not None and info.can_load():
            found.append(module)
    return found


def take_over_online_layer(module: nn.Module) -> None:
    """Take vLLM's wrappers off the loaders of a layer, so that it is not wrapped twice."""
    original = _find(_LAYERWISE, "_get_original_loader")
    for section in (module._parameters, module._buffers):
        for tensor in section.values():
            if tensor is not None and hasattr(tensor, "weight_loader"):
                tensor.weight_loader = original(tensor)
    _info(module).reset()


def recorded_format(module: nn.Module) -> dict[tuple[str, str], torch.Tensor] | None:
    """Return the meta tensors that vLLM recorded when it constructed ``module``.

    Returns:
        By section and name; ``None`` if vLLM never recorded the module.
    """
    info = _info(module)
    if info is None:
        return None
    restore = _find("vllm.model_executor.model_loader.reload.sanitize", "restore_layer_refs")
    parameters, buffers = info.restore_metadata
    found = {}
    for section, tensors in (("_parameters", parameters), ("_buffers", buffers)):
        for name, tensor in tensors.items():
            copy = tensor.detach()
            copy.__class__ = tensor.__class__
            copy.__dict__.update(tensor.__dict__)
            found[section, name] = restore(copy, module) if restore is not None else copy
    return found


def gather_from_ranks(value: Any) -> list[Any]:
    """Return what every rank of the engine has; each of them must call this."""
    import torch.distributed
    from vllm.distributed import get_world_group

    group = get_world_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def engine_config(worker: Any) -> contextlib.AbstractContextManager[Any]:
    """Enter the engine's configuration, as vLLM does around its own updates."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)


def draft_config(worker: Any) -> Any:
    """Return the configuration that a draft model was constructed with."""
    drafter = getattr(worker.model_runner, "drafter", None)
    make = getattr(drafter, "_create_draft_vllm_config", None)
    return worker.vllm_config if make is None else make()


def why_not_through_sessions(cls: type, mixin: type) -> str | None:
    """Say why what a transfer engine receives cannot be given to a session, or return ``None``.

    Engines that hand tensors in checkpoint format to ``load_weights`` wrap the model's loaders
    when an update starts, and that is how they are told: others write to live tensors.

    Args:
        cls: the engine's class.
        mixin: what was put before the class that knows the wire.
    """
    if getattr(cls, "weightload_checkpoint_format", False):
        return None
    wire = next((one for one in cls.__mro__ if not issubclass(one, mixin)), cls)
    start = getattr(wire, "start_weight_update", None)
    try:
        source = inspect.getsource(start) if start is not None else ""
    except (OSError, TypeError):
        source = ""
    direct = "_uses_load_weights" in source or getattr(wire, "defers_processing", False)
    if "initialize_layerwise_reload" in source and not direct:
        return None
    return why_refused("past the loaders", wire.__name__)


def worker_in_construction() -> Any:
    """Return the worker that constructs a transfer engine; vLLM gives the engine no way to it."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "weight_transfer_engine") and hasattr(caller, "model_runner"):
            return caller
        frame = frame.f_back
    return None


def set_update_active(worker: Any, flag: bool) -> None:
    """Set the flag by which vLLM's worker lets calls to its transfer engine through."""
    worker._weight_update_active = flag


def set_update_target(engine: Any, target: tuple[nn.Module, Any] | None) -> None:
    """Point a transfer engine at a model and its configuration, or at its own for ``None``.

    Versions that have one target only have no such methods.
    """
    if target is None:
        getattr(engine, "reset_weight_update_target", lambda: None)()
    else:
        getattr(engine, "set_weight_update_target", lambda *_: None)(*target)


def drain_pending(engine: Any) -> None:
    """Wait until a transfer engine has done what it put off, in versions that let it."""
    getattr(engine, "drain_pending", lambda: None)()


def release_received(engine: Any) -> None:
    """Let go of the sender's memory, as vLLM's IPC engine does when an update is finished."""
    importer = getattr(engine, "_packed_importer", None)
    if importer is not None:
        importer.close()


def register_transfer(backend: str, module: str, engine: str, trainer: str) -> None:
    """Register both sides of a transport; a side that this vLLM does not have is left out.

    Trainers have been made from their initial information alone only since that names its backend.
    """
    base = "vllm.distributed.weight_transfer.base"
    home = "vllm.distributed.weight_transfer.factory"
    known = getattr(_find(base, "TrainerInitInfo"), "__annotations__", {})
    for has, factory, name in (
        (
            hasattr(_find(base, "WeightTransferEngine"), "start_weight_update"),
            _find(home, "WeightTransferEngineFactory"),
            engine,
        ),
        ("backend" in known, _find(home, "WeightTransferTrainerFactory"), trainer),
    ):
        if has and factory is not None and backend not in getattr(factory, "_registry", ()):
            factory.register_engine(backend, module, name)


def safetensors_files(loader: Any, model_config: Any, model: nn.Module) -> list[str] | None:
    """Return the safetensors files that ``loader`` would read, in its order.

    ``None`` if it reads others, or more, or does not say.
    """
    prepare = getattr(loader, "_prepare_weights", None)
    if prepare is None or getattr(model, "secondary_weights", None):
        return None
    found = prepare(
        model_config.model,
        None,
        model_config.revision,
        getattr(model, "fall_back_to_pt_during_load", True),
        getattr(model, "allow_patterns_overrides", None),
    )
    _, files, safetensors = found[:3]  # versions add to it
    key = _find("vllm.model_executor.model_loader.weight_utils", "_natural_sort_key")
    return sorted(files, key=key) if safetensors else None


def reads_plainly(loader: Any, model: nn.Module) -> bool:
    """Whether ``loader`` yields every tensor of its safetensors files, under its own name.

    It is vLLM's default one then, has been told of no other way to read, and leaves nothing out.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    config = loader.load_config
    extra = config.model_loader_extra_config or {}
    return (
        type(loader) is DefaultModelLoader
        and config.load_format in ("auto", "hf", "safetensors", "mistral")
        and getattr(config, "safetensors_load_strategy", None)
        in (None, "lazy", "eager", "prefetch")
        and not extra.get("enable_multithread_load")
        and getattr(loader, "local_expert_ids", None) is None
        and getattr(loader, "_encoder_only_lm_prefixes", None) is None
        and getattr(model, "is_unused_checkpoint_weight", None) is None
    )


def captures_graphs(vllm_config: Any, device: torch.device) -> bool:
    """Whether the engine captures graphs, which know the addresses of tensors."""
    config = getattr(vllm_config, "compilation_config", None)
    mode = getattr(config, "cudagraph_mode", None)
    return device.type != "cpu" and getattr(mode, "name", "NONE") != "NONE"


def _executor(core: Any) -> Any:
    return getattr(getattr(core, "engine_core", None), "model_executor", None)


def engine_processes(core: Any) -> list[Any]:
    """Return the processes that a client of an engine's core, in this process, has started."""
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    workers = getattr(_executor(core), "workers", None) or ()
    return [*getattr(manager, "processes", ()), *(worker.proc for worker in workers)]


def engine_is_down(core: Any) -> str | None:
    """Return why the engine behind a client of its core cannot answer, ``None`` if it can."""
    for process in engine_processes(core):
        if wait([process.sentinel], timeout=0):
            return f"process {process.name} has ended with exit code {process.exitcode}"
    if getattr(getattr(core, "resources", None), "engine_dead", False):
        return "its core is down"
    if getattr(_executor(core), "is_failed", False):
        return "its executor has failed"
    return None


def says_engine_is_down(error: Exception) -> bool:
    """Whether a failed call says that a worker was lost, which shows only seconds later."""
    said = str(error).removeprefix("Call to collective_rpc method failed: ")
    return said in ("Executor failed.", "cancelled", "Server shutting down")


def data_parallel_cores(core: Any) -> int:
    """Return how many engine cores a client has behind it, each with all of the model."""
    return len(getattr(core, "core_engines", None) or [core])


def rpc_to_all_cores(core: Any) -> Any:
    """Return a ``collective_rpc`` that gives what the workers of all cores say.

    Raises:
        UnsupportedError: this version of vLLM has no way to hear more than the first core.
    """
    call = getattr(core, "call_utility_all_async", None)
    if call is None:
        raise UnsupportedError(
            "This version of vLLM tells what the first of several data-parallel engine cores "
            "says, and no other, so that nobody could know whether all have the same weights. "
            "Run one engine for each, and update them as a weightload.Fleet."
        )

    async def collective_rpc(method: Any, *, kwargs: dict[str, Any]) -> list[Any]:
        found = await call("collective_rpc", method, None, (), kwargs)
        return [outcome for outcomes in found for outcome in outcomes]

    return collective_rpc
