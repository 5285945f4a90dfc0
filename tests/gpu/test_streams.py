"""On a GPU, tensors that are lent are read before their memory changes, whatever stream it is on.

The sender fills its buffers on streams of its own and poisons them with NaN behind each tensor. A
kernel that spins keeps each stream busy for a while before it writes or poisons, so that what is not
ordered is read too early or too late.
"""

import pytest
import torch

from weightload import UnsupportedError, WeightLoadSession
from weightload.testing import ToyModel, fresh, identical, make_state, toy_framework
from weightload.testing.kernels import RebuiltKernelLinear
from weightload.testing.layers import Linear, RepackedLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]
TIMES = 1000
CYCLES = 20_000
"""How long a stream is kept busy: about ten microseconds."""


def on_gpu():
    return ToyModel(RepackedLinear(), Linear(), RebuiltKernelLinear()).to("cuda")


class Collecting(ToyModel):
    """Reads its whole source before it loads anything, and keeps views of it."""

    def load_weights(self, weights):
        super().load_weights([(name, tensor[:]) for name, tensor in weights])


def collecting():
    return Collecting(RepackedLinear(), Linear(), RebuiltKernelLinear()).to("cuda")


def loaded(factory):
    model = factory()
    with WeightLoadSession(model, framework=toy_framework()) as session:
        session.load(make_state(factory, 1))
    return model


def lent(state, *, buffers, streams, inside):
    """Yield each tensor in a buffer that is written, and poisoned, on the next of some streams.

    Args:
        state: what is sent, on the host.
        buffers: how many buffers take turns.
        streams: how many streams take turns; the buffers are allocated on the first.
        inside: whether the stream stays current while the tensor is with the loaders; if not, the
            sender makes the stream wait for what is current and the other way round, as it must.
    """
    size = max(tensor.nbytes for tensor in state.values())
    lanes = [torch.cuda.Stream() for _ in range(streams)]
    with torch.cuda.stream(lanes[0]):
        memory = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(buffers)]
    lanes[0].synchronize()
    on_device = {name: tensor.cuda() for name, tensor in state.items()}
    torch.cuda.synchronize()
    for turn, (name, tensor) in enumerate(on_device.items()):
        buffer, lane = memory[turn % buffers], lanes[turn % streams]
        view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        with torch.cuda.stream(lane):
            torch.cuda._sleep(CYCLES)
            view.copy_(tensor)
            if inside:
                yield name, view
                torch.cuda._sleep(CYCLES)
                buffer.fill_(0xFF)
        if not inside:
            torch.cuda.current_stream().wait_stream(lane)
            yield name, view
            lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane):
                torch.cuda._sleep(CYCLES)
                buffer.fill_(0xFF)
        if buffers > 1 and turn + 1 < len(on_device):
            lanes[(turn + 1) % streams].wait_stream(lane)  # the sender's own order of its streams


def outputs(model):
    with torch.no_grad():
        return model(model.example().cuda()).clone()


@pytest.mark.parametrize("single_stream", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["current", "joined"])
@pytest.mark.parametrize("factory", [on_gpu, collecting])
@pytest.mark.parametrize(("buffers", "streams"), [(1, 1), (2, 2)])
def test_streams_that_overlap_bring_what_was_sent(buffers, streams, factory, inside, single_stream):
    """A thousand loads, of two checkpoints in turn, in all combinations together."""
    model = loaded(factory)
    states = {number: make_state(factory, number) for number in (1, 2)}
    want = {number: outputs(fresh(factory, state)) for number, state in states.items()}
    assert not identical(want[1], want[2])
    for turn in range(TIMES // 16):
        number = 1 + turn % 2
        source = lent(states[number], buffers=buffers, streams=streams, inside=inside)
        with WeightLoadSession(model, version=turn) as session:
            session.load(source, single_stream=single_stream)
        assert identical(outputs(model), want[number]), f"load {turn}"
        if factory is on_gpu:
            assert session.receipt.bytes_copied == 0


def test_one_layer_in_two_buffers_on_two_streams_a_thousand_times():
    """The first part of a layer comes in one call on one stream, the rest in another on another, and
    what the first call staged is read by the hook that the second one runs."""
    model = loaded(on_gpu)
    states = {number: make_state(on_gpu, number) for number in (1, 2)}
    want = {number: outputs(fresh(on_gpu, state)) for number, state in states.items()}
    lanes = [torch.cuda.Stream(), torch.cuda.Stream()]
    for turn in range(TIMES):
        number = 1 + turn % 2
        with WeightLoadSession(model, version=turn) as session:
            for index, (name, tensor) in enumerate(states[number].items()):
                with torch.cuda.stream(lanes[index % 2]):
                    torch.cuda._sleep(CYCLES)
                    buffer = tensor.cuda(non_blocking=True)
                    session.load([(name, buffer)])
                    buffer.fill_(float("nan"))
        assert identical(outputs(model), want[number]), f"load {turn}"
    torch.cuda.synchronize()


def test_when_load_returns_the_memory_has_been_read():
    """Another process overwrites the buffer without asking this one's streams: here, a stream that
    waits for nobody."""
    model = loaded(on_gpu)
    state = {name: tensor.cuda() for name, tensor in make_state(on_gpu, 2).items()}
    other = torch.cuda.Stream()
    with WeightLoadSession(model) as session:
        for name, tensor in state.items():
            buffer = tensor.clone()
            torch.cuda.synchronize()
            torch.cuda._sleep(CYCLES * 10)
            session.load([(name, buffer)])
            with torch.cuda.stream(other):
                buffer.fill_(float("nan"))
            other.synchronize()
    assert identical(outputs(model), outputs(fresh(on_gpu, make_state(on_gpu, 2))))


def test_what_a_model_keeps_is_copied_on_the_device():
    """As many bytes as it keeps; a capsule that it makes of one is refused."""
    model = loaded(collecting)
    state = make_state(collecting, 2)
    with WeightLoadSession(model) as session:
        session.load(lent(state, buffers=1, streams=1, inside=True))
    assert session.receipt.bytes_copied == sum(tensor.nbytes for tensor in state.values())

    class Exporting(ToyModel):
        def load_weights(self, weights):
            kept = [torch.utils.dlpack.to_dlpack(tensor) for _, tensor in weights]
            assert kept

    model.__class__ = Exporting
    with (
        pytest.raises(UnsupportedError, match=r"transport=\[\]"),
        WeightLoadSession(model) as session,
    ):
        session.load(lent(state, buffers=1, streams=1, inside=True))
