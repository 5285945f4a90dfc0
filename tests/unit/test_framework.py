"""Plain torch: loading by name, and the state that loaders and hooks run in."""

import pytest
import torch
from torch import nn

from weightload import Framework, UnexpectedWeightError, WeightMismatchError, default_registry
from weightload.framework import load_into


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.tied = self.inner


@pytest.fixture
def model():
    return Model().requires_grad_(False)


def test_parameters_and_persistent_buffers_are_loaded_by_name(model):
    load_into(model, [("inner.weight", torch.ones(2, 3)), ("mean", torch.ones(2))])
    assert torch.equal(model.inner.weight, torch.ones(2, 3))
    assert torch.equal(model.mean, torch.ones(2))


def test_a_shared_module_may_be_loaded_under_either_name(model):
    load_into(model, [("tied.bias", torch.ones(2))])
    assert torch.equal(model.inner.bias, torch.ones(2))


def test_a_loader_of_the_parameter_is_called(model):
    calls = []
    model.inner.bias.weight_loader = lambda place, tensor: calls.append((place, tensor))
    sent = torch.ones(7)
    load_into(model, [("inner.bias", sent)])
    assert calls[0][0] is model.inner.bias
    assert calls[0][1] is sent


@pytest.mark.parametrize("name", ["inner.weigth", "scratch", "inner", ""])
def test_a_name_without_a_place_is_refused(model, name):
    with pytest.raises(UnexpectedWeightError, match=repr(name)):
        load_into(model, [(name, torch.ones(2))])


@pytest.mark.parametrize("shape", [(2,), (1, 3), (3, 2), (2, 3, 1), ()])
def test_another_shape_is_never_broadcast(model, shape):
    model.inner.weight.fill_(5)
    with pytest.raises(WeightMismatchError) as caught:
        load_into(model, [("inner.weight", torch.ones(shape))])
    assert caught.value.facts["expected"] == (2, 3)
    assert caught.value.facts["found"] == shape
    assert torch.equal(model.inner.weight, torch.full((2, 3), 5.0))


def test_another_dtype_is_converted(model):
    load_into(model, [("mean", torch.ones(2, dtype=torch.float64))])
    assert model.mean.dtype is torch.float32


def test_a_parameter_with_gradients_is_loaded_without_a_graph():
    model = Model()
    load_into(model, [("inner.weight", torch.ones(2, 3))])
    assert model.inner.weight.is_leaf
    assert model.inner.weight.grad_fn is None


def test_the_models_own_load_weights_comes_first(model):
    seen = []
    model.load_weights = lambda weights: seen.extend(weights)
    Framework().load(model, iter([("mean", torch.ones(2))]))
    assert [name for name, _ in seen] == ["mean"]
    del model.load_weights
    Framework().load(model, iter([("mean", torch.ones(2))]))
    assert torch.equal(model.mean, torch.ones(2))


def test_the_default_registry_is_used_unless_another_is_given():
    from weightload import ModuleRegistry

    own = ModuleRegistry()
    assert Framework().registry is default_registry
    assert Framework(own).registry is own


@pytest.mark.holds("W7")
def test_ambient_is_the_default_dtype_of_the_first_load_and_no_gradients(model):
    """Hooks that make tensors get the type that they got at first, whatever is set now."""
    framework = Framework()
    torch.set_default_dtype(torch.float64)
    try:
        with framework.ambient(model):
            assert torch.get_default_dtype() is torch.float32
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float64
        with pytest.raises(KeyError), framework.ambient(model):
            raise KeyError
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.is_grad_enabled()


@pytest.mark.holds("W20")
def test_ambient_is_the_default_device_of_the_first_load(model):
    framework = Framework()
    with torch.device("meta"), framework.ambient(model):
        assert torch.empty(1).device.type == "cpu"
