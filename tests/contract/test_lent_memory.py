"""A model that keeps what it is given has what it was given, though the sender reuses its memory.

The sender has one buffer, or two that take turns, and fills it with NaN as soon as it is asked for
the next tensor, or as ``load`` returns. Shards of one element hold 20, 21 and 22, and a hook negates
them. What is copied is counted: as many bytes as the model keeps, and none for a model that keeps
nothing.
"""

import collections
import functools
import gc
import itertools
import threading

import pytest
import torch
from small import COMMITS, Fused, Live, Negated, Net, Plain, number, parameter
from torch import nn

from weightload import (
    IncompleteLoadError,
    Role,
    SessionState,
    UnsupportedError,
    UsageError,
    WeightLoadSession,
    WeightMismatchError,
    transport,
)

NAN = float("nan")
FIRST = {f"layers.0.weight/{shard}": number(1.0 + shard) for shard in range(3)}
STATE = {f"layers.0.weight/{shard}": number(20.0 + shard) for shard in range(3)}


@pytest.fixture(params=COMMITS)
def commit(request):
    return request.param


def lent(state, buffers=1):
    """Yield each tensor in a buffer that is filled with NaN as soon as the next is asked for."""
    size = max(tensor.nbytes for tensor in state.values())
    memory = [torch.empty(size, dtype=torch.uint8) for _ in range(buffers)]
    for turn, (name, tensor) in enumerate(state.items()):
        buffer = memory[turn % buffers]
        view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        yield name, view.copy_(tensor)
        buffer.fill_(0xFF)


def copied(live, source, commit="stream", **options):
    """Reload, and return how many bytes were copied for the model."""
    with WeightLoadSession(live.model, commit=commit) as session:
        session.load(source, **options)
    return session.receipt.bytes_copied


class Keeping(Net):
    """Reads its whole source first, and keeps each tensor in the form that a test wants."""

    def __init__(self, *layers, keep=lambda tensor: tensor, get=lambda kept: kept):
        super().__init__(*layers)
        self.keep, self.get = keep, get

    def load_weights(self, weights):
        kept = [(name, self.keep(tensor)) for name, tensor in weights]
        for name, value in kept:
            self.store(name, self.get(value))


class Slotted:
    """Holds a tensor where only its class knows."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


def suspended(tensor):
    """A generator that has begun and holds a tensor in its frame."""

    def wait():
        yield
        yield tensor

    started = wait()
    next(started)
    return started


def call(kept):
    return kept()


FORMS = {
    "itself": (lambda tensor: tensor, lambda kept: kept),
    "a pair": (lambda tensor: (tensor, 1), lambda kept: kept[0]),
    "detached": (lambda tensor: tensor.detach(), lambda kept: kept),
    "its data": (lambda tensor: tensor.data, lambda kept: kept),
    "a slice": (lambda tensor: tensor[0:], lambda kept: kept),
    "transposed": (lambda tensor: tensor.view(1, 1).t(), lambda kept: kept[0]),
    "as other bytes": (
        lambda tensor: tensor.view(torch.int32),
        lambda kept: kept.view(torch.float),
    ),
    "a parameter": (
        lambda tensor: nn.Parameter(tensor, requires_grad=False),
        lambda kept: kept.data,
    ),
    "a closure": (lambda tensor: lambda: tensor[:], call),
    "a closure over a view": (lambda tensor: (lambda view: lambda: view)(tensor[:]), call),
    "a partial": (lambda tensor: functools.partial(torch.Tensor.view, tensor[:], 1), call),
    "a deque": (lambda tensor: collections.deque([tensor[:]]), lambda kept: kept[0]),
    "a dict": (
        lambda tensor: {"deep": [{"er": tensor.view(1)}]},
        lambda kept: kept["deep"][0]["er"],
    ),
    "slots": (lambda tensor: Slotted(tensor[:]), lambda kept: kept.tensor),
    "a generator": (suspended, next),
}


@pytest.mark.holds("frameworks-O3", "C11", "W23")
@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_keeps_of_an_iterator_is_its_own(form, commit):
    """The sender has one buffer, or two that take turns. In whatever form it keeps it, it reads the value that it was given, and each is copied once."""
    keep, get = FORMS[form]
    live = Live(lambda: Keeping(Fused(), keep=keep, get=get), FIRST)
    assert copied(live, lent(STATE, 1 + (commit == "atomic")), commit) == 3 * 4
    live.equals(STATE)


@pytest.mark.parametrize("form", ["itself", "a slice", "a closure"])
def test_what_a_model_keeps_of_a_list_until_the_call_ends_is_not_copied(form, commit):
    """The memory of a collection may change when the call has returned, not before."""
    keep, get = FORMS[form]
    live = Live(lambda: Keeping(Fused(), keep=keep, get=get), FIRST)
    assert copied(live, dict(STATE), commit) == 0
    live.equals(STATE)


@pytest.mark.holds("frameworks-O1", "frameworks-O2", "frameworks-R1")
@pytest.mark.parametrize("deliver", ["iterator", "wrapped", "calls", "lists"])
def test_nothing_is_copied_for_a_model_that_keeps_nothing(deliver, commit):
    live = Live(lambda: Net(Fused()), FIRST)
    buffer = torch.empty(1)
    with WeightLoadSession(live.model, commit=commit) as session:
        if deliver == "iterator":
            session.load(lent(STATE))
        elif deliver == "wrapped":
            session.load((name, tensor.detach()[:]) for name, tensor in lent(STATE))
        for name, tensor in STATE.items() if deliver in ("calls", "lists") else ():
            sent = [(name, buffer.copy_(tensor))]
            session.load(dict(sent) if deliver == "calls" else sent)
            buffer.fill_(NAN)
    assert session.receipt.bytes_copied == 0
    assert session.receipt.bytes_received == 3 * 4
    live.equals(STATE)


class Previous(Net):
    """Is always one behind: it writes a tensor when it has the next one."""

    def load_weights(self, weights):
        before = None
        for name, tensor in weights:
            if before is not None:
                self.store(*before)
            before = name, tensor
        self.store(*before)


class Last(Net):
    """Writes the last tensor of all when the loop is over."""

    def load_weights(self, weights):
        for name, tensor in weights:
            if not name.endswith("/2"):
                self.store(name, tensor)
        self.store(name, tensor)


class Parts(Net):
    """Leaves parts of each tensor behind in variables that it does not read again."""

    def load_weights(self, weights):
        for name, tensor in weights:
            first, *_ = tensor.split(1)
            pair = (name, first)
            self.store(*pair)


class Renaming(Net):
    """Hands its source through generators and groups before it reads it."""

    def load_weights(self, weights):
        named = ((name.split("."), tensor) for name, tensor in weights)
        for _, group in itertools.groupby(named, key=lambda pair: pair[0][1]):
            self.inner((".".join(parts), tensor) for parts, tensor in group)

    def inner(self, weights):
        for pair in self.each(weights):
            self.store(*pair)

    def each(self, weights):
        yield from weights


@pytest.mark.parametrize(
    ("model", "kept"), [(Previous, 3), (Last, 3), (Parts, 0), (Renaming, 0)], ids=lambda p: str(p)
)
def test_variables_count_if_they_are_going_to_be_read(model, kept, commit):
    """A loop's own variables are overwritten before they are read; others may be read later."""
    live = Live(lambda: model(Fused()), FIRST)
    assert copied(live, lent(STATE), commit) == kept * 4
    live.equals(STATE)


class Stacking(Net):
    """Has experts, of which a rank owns some; those that it owns it collects, or takes at once."""

    def __init__(self, owned, collects):
        super().__init__(*(Negated() for _ in owned))
        self.owned, self.collects = owned, collects

    def load_weights(self, weights):
        later = []
        for name, tensor in weights:
            expert = int(name.split(".")[1])
            if expert not in self.owned:
                continue
            pair = f"layers.{self.owned.index(expert)}.weight", tensor
            if self.collects:
                later.append(pair)
            else:
                self.store(*pair)
        for pair in later:
            self.store(*pair)


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("owned", [(0, 1), (2, 5), (7,)])
def test_experts_of_other_ranks_are_not_copied(owned, collects, commit):
    """Eight experts come by; a rank copies what it keeps of its own, and nothing of the others."""
    state = {f"experts.{expert}": number(expert, -expert) for expert in range(8)}
    live = Live(lambda: Stacking(owned, collects), {n: t + 1 for n, t in state.items()})
    assert copied(live, lent(state), commit) == (8 * len(owned) if collects else 0)
    assert [layer.weight.tolist() for layer in live.model.layers] == [
        [-expert, expert] for expert in owned
    ]
    live.equals(state)


class Waiting(nn.Module):
    """Its loader leaves a factor for its hook, which comes when the layer is complete."""

    role = Role.QUANT

    def __init__(self):
        super().__init__()
        self.weight = parameter(2)
        self.factor = parameter(1, loader=self.load_factor)

    def load_factor(self, place, tensor):
        place.data.copy_(tensor)
        self.later = tensor[:]

    def process_weights_after_loading(self):
        self.weight = nn.Parameter(self.weight.detach() * self.later, requires_grad=False)
        del self.later

    def forward(self, x):
        return x * self.weight


@pytest.mark.holds("frameworks-H")
@pytest.mark.parametrize(
    "deliver", [lent, lambda state: [*state.items()]], ids=["iterator", "list"]
)
def test_what_is_kept_for_a_hook_is_there_when_the_hook_comes(deliver, commit):
    """It comes in a later call, or at the very end; the memory has been overwritten long before."""
    state = {"layers.0.factor": number(3.0), "layers.0.weight": number(5.0, 7.0)}
    live = Live(lambda: Net(Waiting()), {n: t + 1 for n, t in state.items()})
    with WeightLoadSession(live.model, commit=commit) as session:
        for name, tensor in state.items():
            mine = tensor.clone()
            session.load(deliver({name: mine}))
            mine.fill_(NAN)
    assert session.receipt.bytes_copied == 4
    assert live.model.layers[0].weight.tolist() == [15.0, 21.0]


REFUSED = {
    "a numpy array": lambda tensor: tensor.numpy(),
    "an array of a view": lambda tensor: tensor[:].numpy(),
    "a memory view": lambda tensor: memoryview(tensor.numpy()),
    "a storage": lambda tensor: tensor.untyped_storage(),
    "a capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor[:]),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_follow_a_copy_is_refused(form, commit):
    """An array has the address of the sender's memory and would read NaN, so the load ends. A model
    that keeps tensors is loaded afterwards."""
    if form not in ("a storage", "a capsule"):
        pytest.importorskip("numpy")
    live = Live(lambda: Keeping(Fused()), FIRST)
    live.model.keep, live.model.get = REFUSED[form], lambda kept: torch.zeros(1)
    name = next(iter(STATE))
    with live.refuses(UnsupportedError, name, "numpy", "transport=[]", commit=commit) as session:
        session.load(lent(STATE))
    assert session.state is SessionState.ABORTED
    live.model.keep = live.model.get = lambda tensor: tensor
    live.reload(lent(STATE), commit=commit)
    live.equals(STATE)


class Hoarding(Net):
    """Keeps everything for good, beside loading it."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.hoard = []

    def store(self, name, tensor):
        super().store(name, tensor)
        self.hoard.append(tensor[:])


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_kept_for_good_never_changes(frozen, commit):
    """Also in a list that engines have hidden from the garbage collector."""
    live = Live(lambda: Hoarding(Fused()), FIRST)
    sent = {name: tensor.clone() for name, tensor in STATE.items()}
    if frozen:
        gc.freeze()
    try:
        assert copied(live, sent, commit) == 3 * 4
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.unfreeze()
    for tensor in sent.values():
        tensor.fill_(NAN)
    assert [tensor.item() for tensor in live.model.hoard] == [1, 2, 3, 20, 21, 22]


def test_what_a_failed_load_left_with_the_model_does_not_change_either(commit):
    """The sender takes its memory back, whether the load went well or not."""
    live = Live(lambda: Hoarding(Fused()), FIRST)
    sent = {name: tensor.clone() for name, tensor in STATE.items()}
    sent["layers.0.weight/2"] = number(1.0, 2.0)
    session = live.open(commit=commit)
    with pytest.raises(WeightMismatchError, match=r"layers\.0\.weight/2"):
        session.load((name, tensor) for name, tensor in sent.items())
    for tensor in sent.values():
        tensor.fill_(NAN)
    assert [tensor.item() for tensor in live.model.hoard] == [1, 2, 3, 20, 21]


@pytest.mark.holds("frameworks-O4")
def test_only_what_lies_in_the_transport_is_copied(commit):
    """The sender names its buffers. What lies elsewhere is the model's, and handed on as it is."""
    live = Live(lambda: Keeping(Plain(), Plain(), Plain()), {
        f"layers.{i}.weight": number(1.0, 1.0) for i in range(3)
    })  # fmt: skip
    buffers = [torch.empty(8), torch.empty(2)]
    own = number(9.0, 9.0)
    taken = []
    live.model.keep = lambda tensor: taken.append(tensor.data_ptr()) or tensor

    def source():
        yield "layers.0.weight", buffers[0][4:6].fill_(7.0)
        buffers[0].fill_(NAN)
        yield "layers.1.weight", own
        yield "layers.2.weight", buffers[1].fill_(8.0)
        buffers[1].fill_(NAN)

    assert copied(live, source(), commit, transport=buffers) == 2 * 8
    assert [layer.weight.tolist() for layer in live.model.layers] == [[7, 7], [9, 9], [8, 8]]
    assert taken[1] == own.data_ptr()


@pytest.mark.parametrize(
    "transport",
    ["buffer", 7, [None], [torch.empty(1), "x"], torch.empty(0), [torch.empty(1), torch.empty(0)]],
    ids=["text", "number", "none", "text in a list", "no byte", "no byte in a list"],
)
def test_a_transport_is_made_of_tensors_with_memory(transport):
    """An empty buffer would say that nothing is lent. The session is as it was, for another try."""
    live = Live(lambda: Net(Fused()), FIRST)
    run = functools.partial(live.model.load_weights, STATE.items())
    with WeightLoadSession(live.model) as session:
        with pytest.raises(UsageError, match="transport"):
            session.load(STATE, transport=transport)
        with pytest.raises(UsageError, match="transport"):
            session.load_through(run, exact=True, transport=transport)
        assert session.state is SessionState.PREPARED
        session.load(STATE)
    live.equals(STATE)


@pytest.mark.parametrize("make", [list, tuple, iter], ids=lambda make: make.__name__)
def test_a_transport_stays_what_it_is_in_every_call_of_a_receiver(make, commit):
    """An iterator can be read once; the receiver calls the model once for each tensor."""
    live = Live(lambda: Hoarding(Fused()), FIRST)
    buffer = torch.empty(1)

    def receive():
        for name, tensor in STATE.items():
            live.model.load_weights([(name, buffer.copy_(tensor))])
            buffer.fill_(NAN)

    with WeightLoadSession(live.model, commit=commit) as session:
        session.load_through(receive, exact=True, transport=make([buffer]))
    assert session.receipt.bytes_copied == 3 * 4
    assert [tensor.item() for tensor in live.model.hoard[3:]] == [20, 21, 22]
    live.equals(STATE)


@pytest.mark.holds("frameworks-O5")
def test_a_receiver_that_calls_the_model_itself_may_reuse_its_buffer_after_each_call(commit):
    live = Live(lambda: Hoarding(Fused()), FIRST)
    buffer = torch.empty(1)

    def receive():
        for name, tensor in STATE.items():
            live.model.load_weights([(name, buffer.copy_(tensor))])
            buffer.fill_(NAN)

    with WeightLoadSession(live.model, commit=commit) as session:
        session.load_through(receive, exact=True)
    assert session.receipt.bytes_copied == 3 * 4
    assert [tensor.item() for tensor in live.model.hoard[3:]] == [20, 21, 22]
    live.equals(STATE)


def test_the_heap_is_not_searched_for_every_tensor(monkeypatch, commit):
    """A model keeps views of hundreds of tensors: after a few searches it gets copies at once."""
    state = {f"layers.{i}.weight": number(float(i), -float(i)) for i in range(200)}
    first = {name: tensor + 1 for name, tensor in state.items()}
    live = Live(
        lambda: Keeping(*(Plain() for _ in range(200)), keep=lambda tensor: tensor[:]), first
    )
    searches = []
    search = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(1) or search())
    assert copied(live, lent(state), commit) == 200 * 8
    assert 1 <= len(searches) <= 4
    live.equals(state)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12.0).view(3, 4)[:, 1:3],
        torch.arange(3.0).expand(2, 3),
        torch.arange(4, dtype=torch.bfloat16),
        torch.arange(4).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor(5.0),
        torch.empty(0, 3),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.arange(7, dtype=torch.uint8)[3:],
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}",
)
def test_every_kind_of_tensor_can_be_lent(tensor):
    """Whatever its type and its strides, a model that collects has its bytes afterwards."""
    spare = parameter(*tensor.shape, dtype=tensor.dtype, fill=0)
    layer = nn.Module()
    layer.weight = spare
    model = Keeping(layer)
    buffer = tensor.untyped_storage().clone()
    mine = torch.empty(0, dtype=tensor.dtype).set_(
        buffer, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    mine = mine.conj() if tensor.is_conj() else mine

    def source():
        yield "layers.0.weight", mine
        torch.empty(0, dtype=torch.uint8).set_(buffer).fill_(0xFF)

    with WeightLoadSession(model) as session:
        session.load(source())
    assert torch.equal(layer.weight.float() if tensor.element_size() == 1 else layer.weight,
                       tensor.float() if tensor.element_size() == 1 else tensor)  # fmt: skip


@pytest.mark.long_way("counts what is lent to loaders")
@pytest.mark.parametrize("deliver", [lent, dict], ids=["iterator", "mapping"])
def test_where_uses_cannot_be_counted_everything_is_copied(deliver, monkeypatch, commit):
    """On a device that tells nothing, or a Python that counts less, it is safe all the same."""
    monkeypatch.setattr(transport, "_CAN_LEND", False)
    live = Live(lambda: Hoarding(Fused()), FIRST)
    assert copied(live, deliver(STATE), commit) == 3 * 4
    live.equals(STATE)
    assert [tensor.item() for tensor in live.model.hoard] == [1, 2, 3, 20, 21, 22]


class Writing(Net):
    """Works in the tensor that it was given, as a loader may that thinks it is its own."""

    def load_weights(self, weights):
        for name, tensor in weights:
            low, high = tensor.split(1)
            whole = tensor.view(2)
            low.neg_()
            high.data.mul_(10)
            self.store(name, whole)


@pytest.mark.parametrize("deliver", [iter, list], ids=["iterator", "list"])
def test_a_loader_that_works_in_what_it_was_given_does_not_change_it(deliver, commit):
    """The memory may be the trainer's own weights, or a bucket that other ranks read too. All views
    that the loader has made agree with one another nevertheless."""
    state = {f"layers.{i}.weight": number(1.0 + i, 2.0 + i) for i in range(8)}
    live = Live(
        lambda: Writing(*(Plain() for _ in range(8))), {n: t.clone() for n, t in state.items()}
    )
    sent = {name: tensor + 4 for name, tensor in state.items()}
    before = {name: tensor.clone() for name, tensor in sent.items()}
    assert copied(live, deliver(sent.items()), commit) == 8 * 8
    assert all(torch.equal(sent[name], before[name]) for name in sent)
    assert [layer.weight.tolist() for layer in live.model.layers] == [
        [-5.0 - i, 60.0 + 10 * i] for i in range(8)
    ]


def test_a_thread_that_holds_a_tensor_has_its_value(commit):
    """What it writes does not count as arrived, see I10; but what it read was right."""
    seen, go = [], threading.Event()

    class Threaded(Fused):
        threads = ()

        def load_shard(self, place, tensor, shard):
            super().load_shard(place, tensor, shard)
            wait = threading.Thread(target=lambda: (go.wait(), seen.append(tensor.item())))
            wait.start()
            self.threads = [*self.threads, wait]

    live = Live(lambda: Net(Threaded()), FIRST)
    assert copied(live, lent(STATE), commit) == 3 * 4
    go.set()
    for thread in live.model.layers[0].threads:
        thread.join()
    assert sorted(seen) == [1, 2, 3, 20, 21, 22]


def test_a_model_that_keeps_its_tensors_and_never_writes_them_is_refused(commit):
    """That they are safe does not make the load complete."""
    live = Live(lambda: Keeping(Fused()), FIRST)
    live.model.store = lambda name, tensor: None
    with live.refuses(IncompleteLoadError, "layers.0.weight", commit=commit) as session:
        session.load(lent(STATE))
        session.finish()
