"""A captured CUDA graph computes with the new weights after every reload."""

import pytest
import torch

from weightload import WeightLoadSession
from weightload.testing import ToyModel, fresh, identical, make_state, toy_framework
from weightload.testing.kernels import RebuiltKernelLinear
from weightload.testing.layers import KernelLinear, Linear, RepackedLinear
from weightload.testing.oracle import reload_by_hand
from weightload.testing.sharing import LatentAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]
LAYERS = (RebuiltKernelLinear, KernelLinear, LatentAttention, RepackedLinear)


class Graph:
    """A captured forward pass; the input and the output have fixed addresses."""

    def __init__(self, model, x):
        self._input = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(3):
                model(self._input)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._output = model(self._input)

    def __call__(self, x):
        self._input.copy_(x)
        self._graph.replay()
        return self._output.clone()


def on_gpu(layer):
    return lambda: ToyModel(layer(), Linear(), layer()).to("cuda")


def eager(model, x):
    with torch.no_grad():
        return model(x).clone()


@pytest.mark.parametrize("commit", ["stream", "atomic"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_captured_graph_replays_with_the_new_weights(layer, commit):
    """Captured once, after the first load; five checkpoints, bit for bit what a new model gives."""
    factory = on_gpu(layer)
    model = factory()
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load(make_state(factory, 1))
    x = model.example().cuda()
    graph, before = Graph(model, x), None
    for number in (2, 3, 4, 5, 1):
        state = make_state(factory, number)
        with WeightLoadSession(model, commit=commit, strict=True) as session:
            session.load({name: tensor.cuda() for name, tensor in state.items()})
        want = eager(fresh(factory, state), x)
        assert before is None or not identical(want, before)
        assert identical(eager(model, x), want)
        assert identical(graph(x), want)
        assert session.receipt.moved == []
        before = want


@pytest.mark.parametrize("layer", [KernelLinear])
def test_a_graph_is_stale_after_a_reload_by_hand(layer):
    """Eager mode is right; the old memory is kept here, or the replay would read anything."""
    factory = on_gpu(layer)
    model = fresh(factory, make_state(factory, 1))
    x = model.example().cuda()
    graph = Graph(model, x)
    held = [tensor for one in model.layers[::2] for tensor in one.tensors()]
    reload_by_hand(model, make_state(factory, 2))
    want = eager(fresh(factory, make_state(factory, 2)), x)
    assert identical(eager(model, x), want)
    assert not identical(graph(x), want)
    assert held
