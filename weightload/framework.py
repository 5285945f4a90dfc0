"""What a session needs to know about the framework that a model belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weightload.errors import UnexpectedWeightError, WeightMismatchError
from weightload.registry import ModuleRegistry, ModuleRule

__all__ = ["Framework", "default_registry", "load_into"]

default_registry = ModuleRegistry()
"""The registry of models that belong to no framework; applications register their types here."""

Weights = Iterable[tuple[str, torch.Tensor]]


class Framework:
    """Plain torch: the base class of adapters.

    An adapter overrides what its framework does otherwise. The one that made the first load of a
    model is remembered with it and used for every later one.

    Args:
        registry: what modules need after loading.

    Attributes:
        constructed: numbers that whole storages were filled with at construction, by storage key,
            for a first load that brings no names and overwrites them.
        device: where tensors that were constructed without data get their memory.
        requires_all: whether the first load must bring every parameter; ``False`` if the
            framework checks that itself.
        owner: rank of this process, and how many there are, where each has a part of the model; a
            plan of one is refused by another. ``None``: not checked.
        advice: what to tell a user whose model was not loaded through a session.
    """

    requires_all = True
    owner: tuple[int, int] | None = None
    advice = "Load the model through a session from the start."

    def __init__(self, registry: ModuleRegistry | None = None) -> None:
        self.registry = default_registry if registry is None else registry
        self._dtype = torch.get_default_dtype()
        self.constructed: Mapping[int, float | int] = {}
        self.device = torch.get_default_device()

    @contextmanager
    def ambient(self, model: nn.Module) -> Iterator[None]:
        """Enter the state that loaders and hooks ran in at the first load.

        Here: the default dtype and the default device of that time, and no gradients.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with torch.no_grad():
                if torch.get_default_device() == self.device:
                    yield
                else:
                    with self.device:
                        yield
        finally:
            torch.set_default_dtype(before)

    def load(self, model: nn.Module, weights: Weights) -> None:
        """Hand the weights to the model's own loaders.

        A model without ``load_weights`` is loaded by :func:`load_into`.
        """
        loader: Callable[[Weights], Any] | None = getattr(model, "load_weights", None)
        if callable(loader):
            loader(weights)
        else:
            load_into(model, weights)

    def also(self, weights: Weights) -> Weights:
        """Give what passes to others too; for models that are loaded together."""
        return weights

    def adopt(self, model: nn.Module) -> None:
        """Learn what can be learned about a model that was loaded without a session."""

    def captured(self, model: nn.Module) -> bool:
        """Whether graphs were captured that know the addresses of the model's tensors."""
        return False

    def is_terminal(self, error: BaseException) -> bool:
        """Whether ``error`` leaves the process unable to compute, such as a device that failed."""
        lost: type[BaseException] | None = getattr(torch, "AcceleratorError", None)
        return lost is not None and isinstance(error, lost)

    def before_processing(self, model: nn.Module) -> None:
        """Do what comes between the first load and the hooks."""

    def model_rule(self, model: nn.Module) -> ModuleRule | None:
        """Return the rule for a hook of the model as a whole, which runs after all others."""
        return None

    def after_processing(self, model: nn.Module) -> None:
        """Do what comes after all hooks."""


def load_into(model: nn.Module, weights: Weights) -> None:
    """Load tensors by qualified name into parameters and persistent buffers.

    A parameter's ``weight_loader`` attribute is called as ``weight_loader(parameter, tensor)``;
    without one, the tensor must have the parameter's shape exactly.

    Raises:
        UnexpectedWeightError: the model has no parameter or persistent buffer of that name.
        WeightMismatchError: the shapes differ.
    """
    places: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    places.update(
        (name, buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name not in transient
    )
    for name, tensor in weights:
        place = places.get(name)
        if place is None:
            raise UnexpectedWeightError(
                f"The model has no parameter or persistent buffer {name!r}.", name=name
            )
        loader = getattr(place, "weight_loader", None)
        if callable(loader):
            loader(place, tensor)
            continue
        if place.shape != tensor.shape:
            raise WeightMismatchError(
                f"{name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(place.shape)}.",
                name=name,
                expected=tuple(place.shape),
                found=tuple(tensor.shape),
            )
        with torch.no_grad():
            place.detach().copy_(tensor)
