"""What a reload is compared with: models that were built and processed without weightload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from weightload.framework import Framework
from weightload.registry import Convert, ModuleRegistry, ModuleRule, Role
from weightload.testing import kernels, layers, loading, sharing
from weightload.testing.models import Factory, State, ToyModel

__all__ = [
    "Kept",
    "ToyFault",
    "ToyFramework",
    "check_equal",
    "expected",
    "fresh",
    "identical",
    "outputs",
    "reload_by_hand",
    "require",
    "toy_framework",
]

Tensor = torch.Tensor

_ROLES: dict[type, Role] = {
    layers.InPlaceLinear: Role.QUANT,
    layers.RoomLinear: Role.QUANT,
    sharing.PackedHead: Role.QUANT,
    loading.PaddedLinear: Role.QUANT,
    layers.DefaultScaleLinear: Role.QUANT,
    layers.KeptScaleLinear: Role.QUANT,
    layers.KernelLinear: Role.QUANT,
    layers.FloatBiasLinear: Role.QUANT,
    loading.InterleavedLinear: Role.QUANT,
    loading.PackedStack: Role.QUANT,
    loading.PiecedStack: Role.QUANT,
    sharing.HandleLinear: Role.QUANT,
    sharing.WeightHandleLinear: Role.QUANT,
    sharing.ForeignLinear: Role.QUANT,
    layers.FilledScaleLinear: Role.QUANT,
    sharing.FusedExperts: Role.QUANT,
    loading.ScaledLinear: Role.QUANT,
    loading.HollowLinear: Role.QUANT,
    loading.ScatteredLinear: Role.QUANT,
    sharing.LatentAttention: Role.ATTENTION,
    sharing.SinkAttention: Role.ATTENTION,
    sharing.SummedState: Role.DERIVED,
    kernels.BlockExperts: Role.QUANT,
    kernels.Processed: Role.QUANT,
    kernels.ProcessedAttention: Role.ATTENTION,
    kernels.ProcessedState: Role.DERIVED,
}
_METHODS = (layers.RepackMethod, sharing.SharedTableMethod)


def require(condition: bool, message: str) -> None:
    """Raise ``AssertionError`` unless the condition holds, also under ``-O``."""
    if not condition:
        raise AssertionError(message)


class ToyFault(Exception):
    """What a hook raises on demand."""


class ToyFramework(Framework):
    """A framework that knows the toy layers, counts their hooks and can let one fail.

    Attributes:
        calls: role and module of every hook that was called, in order.
    """

    def __init__(self) -> None:
        super().__init__(registry=ModuleRegistry())
        self.calls: list[tuple[Role, nn.Module]] = []
        self._fault: tuple[int, str] | None = None
        for cls, role in _ROLES.items():
            pieces = _pieces if cls is loading.PiecedStack else None
            rule = ModuleRule(role=role, process=self._processing(role), pieces=pieces)
            self.registry.register(cls, rule)
        for method in _METHODS:
            rule = ModuleRule(role=Role.QUANT, process=self._processing(Role.QUANT))
            self.registry.register(method, rule, strategy=True)

    def fail_hook(self, countdown: int = 0, *, half_way: bool = False) -> None:
        """Let one hook raise :class:`ToyFault`.

        Args:
            countdown: how many hooks run before it.
            half_way: let it do its work before it raises.
        """
        self._fault = (countdown, "half way" if half_way else "before")

    def misfit_hook(self, countdown: int = 0) -> None:
        """Let one hook give its module a parameter of another shape than a fresh load does.

        Args:
            countdown: how many hooks run before it.
        """
        self._fault = (countdown, "misfit")

    def disarm(self) -> bool:
        """Let no hook fail; return whether one was still to fail."""
        armed, self._fault = self._fault is not None, None
        return armed

    def _processing(self, role: Role) -> Callable[[Any], None]:
        def process(module: Any) -> None:
            self.calls.append((role, module))
            fault = self._count_down()
            if fault == "before":
                raise ToyFault("the hook failed before it did anything")
            _process(module)
            if fault == "half way":
                raise ToyFault("the hook failed when it had done everything")
            if fault == "misfit":
                name, value = next(iter(vars(module)["_parameters"].items()), ("extra", None))
                rows = len(value) + 1 if value is not None else 1
                setattr(module, name, nn.Parameter(torch.zeros(rows), requires_grad=False))

        return process

    def _count_down(self) -> str | None:
        if self._fault is None:
            return None
        countdown, kind = self._fault
        self._fault = (countdown - 1, kind) if countdown else None
        return kind if countdown == 0 else None


def _pieces(module: Any) -> Mapping[str, Convert]:
    return {"both": module.turn, "down": module.turn}


def toy_framework() -> ToyFramework:
    """Return a framework whose registry has a rule for every toy layer."""
    return ToyFramework()


def _process(module: Any) -> None:
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)
    else:
        module.process_weights_after_loading()


def _hooked(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules with hooks in the order of processing; looks into no registry."""
    for role in (Role.QUANT, Role.ATTENTION, Role.DERIVED):
        for module in model.modules():
            quantised = hasattr(module, "quant_method") and role is Role.QUANT
            own = next((_ROLES[cls] for cls in type(module).__mro__ if cls in _ROLES), None)
            if quantised or own is role:
                yield module


def fresh(factory: Factory, state: Mapping[str, Tensor]) -> ToyModel:
    """Build a model, fill it by its own loaders or plain copies, call its hooks in order.

    No session is used, so that the result is worked out independently of weightload.
    """
    model = factory()
    reload_by_hand(model, state)
    return model


def reload_by_hand(model: ToyModel, state: Mapping[str, Tensor]) -> None:
    """Call a model's own loaders and then its hooks in order, with no regard to what it serves.

    For a model without weights that is its first load; for one that serves it is how reloads are
    done where nobody keeps track of what the first one did.
    """
    places = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    load_weights = getattr(model, "load_weights", None)
    with torch.no_grad():
        if load_weights is not None:
            load_weights([(name, tensor.clone()) for name, tensor in state.items()])
        else:
            for name, tensor in state.items():
                if places[name].shape != tensor.shape:
                    raise ValueError(f"{name} has shape {tuple(tensor.shape)}")
                places[name].data.copy_(tensor)
        for module in _hooked(model):
            _process(module)


def outputs(model: ToyModel) -> Tensor:
    """Return what the model computes for its example."""
    with torch.no_grad():
        return torch.as_tensor(model(model.example())).clone()


def expected(factory: Factory, state: Mapping[str, Tensor]) -> Tensor:
    """Return what a freshly built and processed model computes."""
    return outputs(fresh(factory, state))


def identical(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits; NaN equals NaN."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return torch.equal(*bits)


def check_equal(model: ToyModel, factory: Factory, state: State) -> None:
    """Compare a reloaded model with a fresh one: outputs, parameters and buffers, bit for bit.

    Raises:
        AssertionError: something differs; the message names it.
    """
    want = fresh(factory, state)
    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(model, kind)()), dict(getattr(want, kind)())
        if list(mine) != list(theirs):
            raise AssertionError(f"{kind}: {list(mine)}, but fresh {list(theirs)}")
        for name in mine:
            if type(mine[name]) is not type(theirs[name]):
                raise AssertionError(f"{name} is a {type(mine[name])}, not {type(theirs[name])}")
            if not identical(mine[name], theirs[name]):
                raise AssertionError(f"{name} is {mine[name]}, but fresh {theirs[name]}")
    if not identical(outputs(model), outputs(want)):
        raise AssertionError(f"output is {outputs(model)}, but fresh {outputs(want)}")


@attrs.frozen(repr=False)
class Kept:
    """Where everything is that a captured graph would know, at one moment.

    Attributes:
        tensors: parameters, buffers and further tensors by name, held as objects.
        places: for each the storage, held, and its address and that of the first element.
    """

    tensors: dict[str, Tensor]
    places: dict[str, tuple[Any, int, int]]

    @classmethod
    def of(cls, model: nn.Module) -> Kept:
        """Look at ``model``, and at what its kernels hold."""
        tensors = dict(_graph_tensors(model))
        return cls(tensors, {name: _place(tensor) for name, tensor in tensors.items()})

    def check(self, model: nn.Module) -> None:
        """Check that ``model`` has the same tensors at the same addresses, with data.

        Raises:
            AssertionError: one moved, is gone, is new, or has no data.
        """
        now = dict(_graph_tensors(model))
        if now.keys() != self.tensors.keys():
            raise AssertionError(f"{sorted(now)} were {sorted(self.tensors)}")
        for name, tensor in now.items():
            storage, *addresses = _place(tensor)
            before, *old_addresses = self.places[name]
            if storage._cdata != before._cdata or addresses != old_addresses:
                raise AssertionError(f"{name} has another storage")
            if tensor.is_meta:
                raise AssertionError(f"{name} is on the meta device")
            whole = tensor.storage_offset() + tensor.numel()
            if storage.nbytes() < whole * tensor.element_size():
                raise AssertionError(f"the storage of {name} holds {storage.nbytes()} bytes")


def _place(tensor: Tensor) -> tuple[Any, int, int]:
    storage = tensor.untyped_storage()
    return storage, storage.data_ptr(), tensor.data_ptr()


def _graph_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with memory of its own that a captured graph would know."""
    for name, tensor in _known_tensors(model):
        inside: Any = tensor
        if hasattr(type(tensor), "__tensor_flatten__"):
            for part in inside.__tensor_flatten__()[0]:
                yield f"{name}.{part}", getattr(tensor, part)
        else:
            yield name, tensor


def _known_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}", value
        if isinstance(module, layers.KernelLinear) and module.kernel:
            for index, tensor in enumerate(module.tensors()):
                yield f"{prefix}.kernel.{index}", tensor
        if isinstance(module, kernels.RebuiltKernelLinear):
            for name, tensor in module.tensors().items():
                yield f"{prefix}.{name}", tensor
        if isinstance(module, sharing.PackedHead) and module.compute is not None:
            cells = getattr(module.compute, "__closure__", None) or ()
            for cell in cells:
                yield f"{prefix}.packed", cell.cell_contents
        method = getattr(module, "quant_method", None)
        for owner in (method, getattr(method, "kernel", None), getattr(module, "kernel", None)):
            for name, value in getattr(owner, "__dict__", {}).items():
                if isinstance(value, Tensor):
                    yield f"{prefix}.method.{name}", value
