"""On a device that runs its streams in any order, loaders read what the source wrote for them.

The device here is a stand-in: operations wait in the queue of their stream, and are run in a random
order that keeps what streams and events promise, and nothing else. Many orders are tried, so that
what is not promised goes wrong. Whether a GPU keeps those promises, `tests/gpu` has to show.
"""

import random
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import nn

from weightload import WeightLoadSession
from weightload.lanes import Lane

ORDERS = 200
POISON = "poison"


@attrs.define(eq=False)
class Stream:
    """A queue of operations; an operation that is an event not done yet blocks it."""

    device: "Device"
    queue: list = attrs.field(factory=list)

    def wait_event(self, event):
        self.queue.append(event)

    def synchronize(self):
        self.device.run(until=lambda: not self.queue)


@attrs.define(eq=False)
class Event:
    done: bool = False
    recorded: bool = False

    def record(self, stream):
        self.recorded = True

        def mark():
            self.done = True

        stream.queue.append(mark)


class Device:
    """Streams, of which one is current; what is queued runs when somebody waits."""

    Event = Event

    def __init__(self, seed, streams):
        self.random = random.Random(seed)
        self.streams = [Stream(self) for _ in range(streams)]
        self._current = self.streams[0]
        self.waits = 0

    def current_stream(self):
        return self._current

    def set_stream(self, stream):
        self._current = stream

    def do(self, operation):
        self._current.queue.append(operation)

    def run(self, until):
        self.waits += 1
        while not until():
            ready = [
                stream
                for stream in self.streams
                if stream.queue
                and not (isinstance(stream.queue[0], Event) and not self._done(stream))
            ]
            assert ready, "the streams wait for one another"
            operation = self.random.choice(ready).queue.pop(0)
            if not isinstance(operation, Event):
                operation()

    def _done(self, stream):
        return stream.queue[0].done


def load(device, lane, *, buffers, turns=6):
    """Let a source with streams of its own fill buffers, and loaders read them; return what they read."""
    memory = [POISON] * buffers
    seen, uses, before = [], [], None
    with lane.entered():
        for turn in range(turns):
            slot = turn % buffers
            mine = device.streams[1 + turn % (len(device.streams) - 1)]
            if before is not None and buffers == 1:  # the source keeps its own streams in order
                event = Event()
                event.record(before)
                mine.wait_event(event)
            before = mine
            device.set_stream(mine)
            device.do(lambda slot=slot: memory.__setitem__(slot, POISON))
            device.do(lambda slot=slot, turn=turn: memory.__setitem__(slot, turn))
            tensor = SimpleNamespace(device=SimpleNamespace(type="cuda"), record_stream=uses.append)
            lane.arrived(tensor)
            device.do(lambda slot=slot: seen.append(memory[slot]))
            lane.asking(tensor)
    return seen, uses


@pytest.mark.parametrize("single_stream", [False, True])
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("streams", [2, 3])
def test_loaders_read_what_was_written_for_them_in_any_order(streams, buffers, single_stream):
    for seed in range(ORDERS):
        device = Device(seed, streams)
        lane = Lane(api=lambda device=device: device, single_stream=single_stream)
        seen, uses = load(device, lane, buffers=buffers)
        assert seen == list(range(6)), f"order {seed}"
        assert uses == [device.streams[0]] * 6, "memory is recorded on the stream that uses it"


def test_without_order_they_do_not():
    """Or else the tests above could not fail: streams change as they do there, without events."""

    class Unordered(Lane):
        def _follow(self, *_):
            pass

    wrong = 0
    for seed in range(ORDERS):
        device = Device(seed, 3)
        seen, _ = load(device, Unordered(api=lambda device=device: device), buffers=2)
        wrong += seen != list(range(6))
    assert wrong > ORDERS / 2


def test_the_host_waits_once_at_the_end_or_around_each_tensor():
    waits = {}
    for single_stream in (False, True):
        device = Device(0, 3)
        load(device, Lane(api=lambda device=device: device, single_stream=single_stream), buffers=1)
        waits[single_stream] = device.waits
    assert waits == {False: 1, True: 1 + 2 * 6}


def test_a_later_call_on_another_stream_works_on_the_first_one():
    """So memory that an earlier call allocated belongs to the stream that uses it."""
    device = Device(0, 3)
    lane = Lane(api=lambda: device)
    worked_on = []
    for current in (0, 1, 2):
        device.set_stream(device.streams[current])
        with lane.entered():
            worked_on.append(device.streams.index(device.current_stream()))
            with lane.entered():  # a loader that calls the session
                worked_on.append(device.streams.index(device.current_stream()))
        assert device.current_stream() is device.streams[current]
    assert worked_on == [0] * 6


def test_what_was_queued_before_a_call_is_done_before_its_work():
    """The caller wrote a buffer on his own stream, and another stream loads it."""
    for seed in range(ORDERS):
        device = Device(seed, 2)
        lane = Lane(api=lambda device=device: device)
        with lane.entered():
            pass
        memory, seen = [POISON], []
        device.set_stream(device.streams[1])
        device.do(lambda memory=memory: memory.__setitem__(0, 1))
        with lane.entered():
            device.do(lambda memory=memory, seen=seen: seen.append(memory[0]))
        assert seen == [1], f"order {seed}"


def test_pinned_memory_is_read_before_the_source_goes_on():
    """A copy from it need not be done when the loader returns, and the host writes past streams."""
    device = Device(0, 2)
    lane = Lane(api=lambda: device)
    memory, seen = [1], []
    pinned = SimpleNamespace(device=SimpleNamespace(type="cpu"), is_pinned=lambda: True)
    with lane.entered():
        lane.arrived(pinned)
        device.do(lambda: seen.append(memory[0]))
        lane.asking(pinned)
        memory[0] = POISON
    assert seen == [1]


@pytest.mark.parametrize("single_stream", [False, True])
def test_a_session_loads_on_its_own_stream_and_leaves_the_source_on_its(single_stream):
    """The source makes a stream current for good; the next tensor is asked for with that one."""
    device = Device(0, 2)
    home, away = device.streams
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
            self.bias = nn.Parameter(torch.zeros(2), requires_grad=False)

        def load_weights(self, weights):
            for name, tensor in weights:
                seen.append(("loader", device.current_stream()))
                getattr(self, name).data.copy_(tensor)

    def source():
        for name in ("weight", "bias"):
            seen.append(("source", device.current_stream()))
            device.set_stream(away)
            yield name, torch.ones(2)
        seen.append(("source", device.current_stream()))

    session = WeightLoadSession(Model())
    session._lane = Lane(api=lambda: device)
    session.prepare()
    session.load(source(), single_stream=single_stream)
    assert seen == [
        ("source", home),
        ("loader", home),
        ("source", away),
        ("loader", home),
        ("source", away),
    ]
    assert device.current_stream() is home
    assert device.waits == (5 if single_stream else 1)
    session.finish()
    assert device.waits >= 2, "the engine may use the weights on any stream"
