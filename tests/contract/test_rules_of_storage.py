"""A rule can say where derived tensors are, and build again what cannot be looked into."""

import pytest
import torch
from torch import nn

from weightload import (
    Framework,
    ModuleRegistry,
    ModuleRule,
    ProcessingError,
    Role,
    SessionState,
    StorageChangedError,
    WeightLoadSession,
)


class Handle:
    """Stands for a C library's object that was built on the address of a tensor."""

    def __init__(self, tensor):
        self.address = tensor.data_ptr()

    def __del__(self):
        self.address = 0


class Packed(nn.Module):
    """Packs its weight, makes a scale in a nested kernel, and a handle on the packed weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(self.weight.detach().t().contiguous() * 2, requires_grad=False)
        self.kernel = {"scales": [self.weight.detach().sum(0)], "note": self.weight.detach().sum()}
        self.handle = Handle(self.weight)


def model_with(layer=Packed, **rule):
    registry = ModuleRegistry()
    process = lambda module: module.process_weights_after_loading()  # noqa: E731
    registry.register(Packed, ModuleRule(role=Role.QUANT, process=process, **rule))
    model = layer()
    with WeightLoadSession(model, framework=Framework(registry)) as session:
        session.load({"weight": torch.arange(16.0).view(4, 4)})
    return model


NEW = {"weight": torch.arange(16.0).view(4, 4).flip(0) + 1}


def rebind(module):
    module.handle = Handle(module.weight)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_an_opaque_handle_is_built_again_on_the_live_tensor(commit):
    model = model_with(rebind=rebind)
    weight, scale = model.weight, model.kernel["scales"][0]
    with WeightLoadSession(model, strict=True, commit=commit) as session:
        session.load(NEW)
    assert model.weight is weight
    assert model.handle.address == weight.data_ptr()
    assert torch.equal(weight, NEW["weight"].t() * 2)
    assert model.kernel["scales"][0] is scale
    assert session.receipt.moved == []


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_without_a_rule_strict_storage_refuses_the_handle(commit):
    model = model_with()
    with (
        pytest.raises(StorageChangedError, match=r"handle.*opaque") as caught,
        WeightLoadSession(model, strict=True, commit=commit) as session,
    ):
        session.load(NEW)
    assert caught.value.model_intact
    assert session.state is SessionState.ABORTED
    assert model.handle.address == model.weight.data_ptr()


def test_without_strict_storage_the_handle_is_named_in_the_receipt():
    model = model_with()
    with WeightLoadSession(model) as session:
        session.load(NEW)
    assert len(session.receipt.moved) == 1
    assert "handle" in session.receipt.moved[0]


def test_a_rebind_that_raises_poisons():
    def fails(module):
        raise ValueError("no such primitive")

    model = model_with(rebind=fails)
    with (
        pytest.raises(ProcessingError, match=r"rebind.*no such primitive"),
        WeightLoadSession(model) as session,
    ):
        session.load(NEW)
    assert session.state is SessionState.POISONED


def test_only_the_named_places_are_kept_where_a_rule_names_them():
    model = model_with(derived=("kernel.scales.0",), rebind=rebind)
    scale, note = model.kernel["scales"][0], model.kernel["note"]
    with WeightLoadSession(model, strict=True) as session:
        session.load(NEW)
    assert model.kernel["scales"][0] is scale
    assert torch.equal(scale, (NEW["weight"].t() * 2).sum(0))
    assert model.kernel["note"] is not note
    assert torch.equal(model.kernel["note"], (NEW["weight"] * 2).sum())
    assert session.receipt.tensors_derived == 1


class Paired(Packed):
    """Holds what it derives in a tuple."""

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.kernel["pair"] = (self.weight.detach().sum(1), [self.weight.detach().amax(0)])


@pytest.mark.parametrize("path", ["kernel.pair.0", "kernel.pair.1.0", "kernel.pair"])
@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_named_place_in_a_tuple_is_kept(path, commit):
    """A tuple cannot be changed, so it is compared whole, and made again with live tensors."""
    model = model_with(Paired, derived=(path,), rebind=rebind)
    held, [maximum] = model.kernel["pair"]
    with WeightLoadSession(model, strict=True, commit=commit) as session:
        session.load(NEW)
    total, [largest] = model.kernel["pair"]
    assert torch.equal(total, (NEW["weight"].t() * 2).sum(1))
    assert torch.equal(largest, (NEW["weight"].t() * 2).amax(0))
    assert total is held
    assert largest is maximum


class Slotted:
    __slots__ = ("scale",)


class SlottedKernel(Packed):
    """Holds what it derives in an object without a dict."""

    def process_weights_after_loading(self):
        super().process_weights_after_loading()
        self.slotted = Slotted()
        self.slotted.scale = self.weight.detach().sum(1)


@pytest.mark.parametrize("commit", ["stream", "atomic"])
def test_a_named_place_in_an_object_with_slots_is_kept(commit):
    model = model_with(SlottedKernel, derived=("slotted.scale",), rebind=rebind)
    held = model.slotted.scale
    with WeightLoadSession(model, strict=True, commit=commit) as session:
        session.load(NEW)
    assert model.slotted.scale is held
    assert torch.equal(held, (NEW["weight"].t() * 2).sum(1))


@pytest.mark.parametrize("path", ["kernel.scales.7", "kernel.nothing", "nowhere.at.all"])
def test_a_place_that_is_not_there_harms_nothing(path):
    model = model_with(derived=(path,), rebind=rebind)
    with WeightLoadSession(model) as session:
        session.load(NEW)
    assert torch.equal(model.kernel["note"], (NEW["weight"] * 2).sum())


def test_a_place_in_a_strategy_object_is_found_as_it_was_before_the_hook():
    from weightload.testing import TOYS, Bench, layers

    bench = Bench(TOYS["repacked"])
    registry = bench.framework.registry
    process = registry._strategy_types[layers.RepackMethod].process
    rule = ModuleRule(role=Role.QUANT, process=process, derived=("quant_method.kernel.scale",))
    registry.register(layers.RepackMethod, rule, strategy=True, replace=True)
    for seed in (2, 3, 1):
        bench.reload(bench.state(seed), strict=True)
