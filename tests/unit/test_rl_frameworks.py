"""The integrations of the how-to are run, with the calls of each framework in its order.

Stand-ins send what trainers send: views of one buffer that the next bucket overwrites. The model is a
toy whose layers are packed; the oracle is a fresh one.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weightload import (
    IncompleteLoadError,
    InvalidTransitionError,
    ModelPoisonedError,
    UsageError,
    WeightLoadSession,
    poison_of,
    require_usable,
)
from weightload.testing import TOYS, Bench, check_equal

PAGE = (Path(__file__).parents[2] / "docs/how-to/rl-frameworks.md").read_text()
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", PAGE, re.M | re.S))
LINES = 20


def block(title, **given):
    """Run a block of the page and return what it defines."""
    space = dict(given)
    exec(compile(BLOCKS[title], title, "exec"), space)
    return SimpleNamespace(**space)


@pytest.fixture
def bench():
    return Bench(TOYS["everything"])


def worker(bench, base=object, **more):
    """Make a stand-in for vLLM's worker, with the extension as a base, as vLLM does it."""
    made = type("Worker", (base,), {})()
    runner = SimpleNamespace(model=bench.model, eplb_state=None)
    vars(made).update(model_runner=runner, model_config=None, rank=0, device="cpu", **more)
    type(made).get_model = lambda self: bench.model
    return made


def buckets(state, size=7):
    """Yield lists of named views of one buffer, which is overwritten after each."""
    items = list(state.items())
    buffer = torch.zeros(sum(sorted(t.numel() for t in state.values())[-size:]))
    for start in range(0, len(items), size):
        offset, views = 0, []
        for name, tensor in items[start : start + size]:
            view = buffer[offset : offset + tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            offset += tensor.numel()
            views.append((name, view))
        yield buffer, views
        buffer.fill_(float("nan"))


def loaded(bench, seed=2):
    bench.serves = bench.state(seed)
    assert poison_of(bench.model) is None
    check_equal(bench.model, bench.factory, bench.serves)
    bench.check_structure()


def without_one(state):
    return dict(list(state.items())[:-1])


@pytest.mark.parametrize("title", sorted(BLOCKS))
def test_each_integration_is_short(title):
    code = [line for line in BLOCKS[title].splitlines() if line.strip()]
    assert len(code) < LINES


def test_the_page_has_all_of_them():
    named = ["NeMo-RL", "verl", "prime-rl", "SkyRL", "TRL", "OpenRLHF", "checkpoint-engine"]
    assert list(BLOCKS)[:7] == named


def test_nemo_rl(bench):
    """Buckets, then finalize, then the acknowledgement; leaving without finalize finishes too."""
    extension = worker(bench, block("NeMo-RL").Extension)
    for finalizes in (True, False):
        with extension._weight_update_lifecycle("ipc") as finalize:
            for buffer, weights in buckets(bench.state(2)):
                extension._load_weights(weights, buffer)
            if finalizes:
                finalize()
        loaded(bench)

    def one_short():
        with extension._weight_update_lifecycle("ipc") as finalize:
            for buffer, weights in buckets(without_one(bench.state(3))):
                extension._load_weights(weights, buffer)
            finalize()

    with pytest.raises(IncompleteLoadError):
        one_short()
    with pytest.raises(ModelPoisonedError):
        require_usable(bench.model)


class Receiver:
    """Stands for verl's receiver: it answers each bucket when the callback has returned."""

    def __init__(self, zmq_handle, device):
        self.state, self.newer = zmq_handle
        self.buffer = None
        self.answered = 0

    def receive_weights(self, on_bucket_received):
        for buffer, weights in buckets(self.state):
            self.buffer = buffer
            on_bucket_received(weights, is_last=False) if self.newer else on_bucket_received(
                weights
            )
            self.answered += 1


@pytest.mark.parametrize("newer", [True, False])
def test_verl(bench, newer):
    """Callbacks with and without ``is_last``; every bucket is answered, also after an error."""
    made = []

    def receiver(**options):
        made.append(Receiver(**options))
        return made[-1]

    extension = worker(bench, block("verl", BucketedWeightReceiver=receiver).Extension)
    extension.update_weights_from_ipc((bench.state(2), newer))
    loaded(bench)
    wrong = {**bench.state(3), "no.such": torch.ones(1)}
    wrong = dict(sorted(wrong.items(), key=lambda pair: pair[0] != "no.such"))
    with pytest.raises(Exception, match=r"no\.such"):
        extension.update_weights_from_ipc((wrong, newer))
    assert made[-1].answered == len(list(buckets(wrong)))
    loaded(bench)


def test_prime_rl(bench):
    made = block("prime-rl")
    engine = SimpleNamespace(resumed=0)
    engine.resume = lambda: setattr(engine, "resumed", engine.resumed + 1)
    made.load_weights_checkpoint_layerwise(bench.model, iter(bench.state(2).items()), None, None)
    loaded(bench)
    made.resume(bench.model, engine)
    with pytest.raises(IncompleteLoadError):
        made.load_weights_checkpoint_layerwise(
            bench.model, iter(without_one(bench.state(3)).items()), None, None
        )
    with pytest.raises(ModelPoisonedError):
        made.resume(bench.model, engine)
    assert engine.resumed == 1


def test_skyrl(bench):
    pytest.importorskip("vllm")
    made = block("SkyRL", rebuild=lambda info: info).LayerwiseReloadWorkerMixin
    extension = worker(bench, made)
    assert "error" not in extension.skyrl_start_weight_update()
    for chunk in buckets(bench.state(2)):
        extension.update_weights_ipc(chunk)
    assert extension.skyrl_finish_weight_update()["value"]["outcome"] == "finished"
    loaded(bench)
    extension.skyrl_start_weight_update()
    assert "error" in extension.skyrl_start_weight_update(), "two updates at once"
    assert extension.skyrl_abort()["value"]["model_intact"]
    assert "error" in extension.skyrl_finish_weight_update(), "a finish after a failure"
    loaded(bench)


def test_an_extension_has_no_constructor_and_only_names_with_its_prefix():
    """vLLM makes it a base of the worker and refuses clashes."""
    pytest.importorskip("vllm")
    from weightload.vllm import worker_extension

    public = {name for name in vars(worker_extension("roll")) if not name.startswith("__")}
    assert "__init__" not in vars(worker_extension("roll"))
    assert {"roll_start", "roll_load_bucket", "roll_finish", "roll_abort"} <= public
    assert all(name.startswith("roll_") for name in public)


def test_trl(bench):
    """Every parameter of the trainer is sent by itself; the prefix cache is dropped at the end."""
    made = block("TRL").VLLMGeneration()
    made.llm_model = bench.model
    made.model = SimpleNamespace(
        named_parameters=lambda: [
            (f"module.{name}", torch.nn.Parameter(tensor))
            for name, tensor in bench.state(2).items()
        ]
    )
    made.fix_name = lambda name: name.removeprefix("module.")
    dropped = []
    made.llm = SimpleNamespace(reset_prefix_cache=lambda: dropped.append(True))
    made.sync_weights()
    loaded(bench)
    assert dropped == [True]


def test_openrlhf(bench):
    """One RPC per parameter, whose memory is received into a new tensor each time."""
    pytest.importorskip("vllm")
    made = block("OpenRLHF")
    sent = []
    group = SimpleNamespace(broadcast=lambda tensor, src: tensor.copy_(sent.pop()))
    extension = worker(bench, made.WorkerWrap, _model_update_group=group)

    def rpc(method, *args):
        if method == "update_weight":
            sent.append(dict(bench.state(2))[args[0]])
        return getattr(extension, method)(*args)

    made.broadcast_to_vllm(rpc, bench.state(2).items())
    loaded(bench)


def shared_bytes(path, size):
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def test_checkpoint_engine(bench, monkeypatch, tmp_path):
    """The real worker side, over its own socket; only its device manager is a stand-in for a CPU."""
    import threading

    worker_side = pytest.importorskip("checkpoint_engine.worker")
    zmq = pytest.importorskip("zmq")
    nothing = SimpleNamespace(
        synchronize=lambda: None, empty_cache=lambda: None, ipc_collect=lambda: None
    )
    monkeypatch.setattr(
        worker_side, "DeviceManager", lambda: SimpleNamespace(device_module=nothing)
    )
    made = block("checkpoint-engine")
    context, size = zmq.Context.instance(), 1 << 16

    def serve(name, state, answers):
        """Send as the parameter server does: the handle, buckets, None, None."""
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.RCVTIMEO, 20000)
        socket.bind(f"inproc://{name}")
        path = str(tmp_path / name)
        buffer = shared_bytes(path, size)
        socket.send_pyobj((shared_bytes, (path, size)))
        answers.append(socket.recv())
        items = list(state.items())
        for start in range(0, len(items), 6):
            table, offset = [], 0
            for key, tensor in items[start : start + 6]:
                data = tensor.contiguous().view(-1).view(torch.uint8)
                buffer[offset : offset + data.numel()] = data
                table.append(
                    {"name": key, "shape": tensor.shape, "dtype": tensor.dtype, "offset": offset}
                )
                offset += (data.numel() + 255) // 256 * 256
            socket.send_pyobj(table)
            answers.append(socket.recv())
            buffer.fill_(255)
        for _ in range(2):
            socket.send_pyobj(None)
            try:
                answers.append(socket.recv())
            except zmq.Again:
                answers.append(None)
        socket.close(0)

    answers = []
    sender = threading.Thread(target=serve, args=("good", bench.state(2), answers))
    sender.start()
    made.update(bench.model, context, "inproc://good", None)
    sender.join()
    assert set(answers) == {b""}
    loaded(bench)

    # The sender does not look at the answer to the last bucket; the worker must fail all the same.
    state = {**bench.state(3)}
    last = next(reversed(state))
    state[last] = state[last][:1]
    answers = []
    sender = threading.Thread(target=serve, args=("bad", state, answers), daemon=True)
    sender.start()
    with pytest.raises(InvalidTransitionError):
        made.update(bench.model, context, "inproc://bad", None)
    assert answers[-1] == b"" or b"Error" in answers[-1] or answers[-1] is None
    with pytest.raises(ModelPoisonedError):
        require_usable(bench.model)


def test_raw_calls_become_sessions_or_are_refused():
    """What torchao's decorator does for one backend: a model that was packed is loaded again."""
    pytest.importorskip("vllm")
    for on_raw in ("session", "refuse"):
        own = Bench(TOYS["collecting"])
        cls = type("Model", (type(own.model),), {})
        block("Anything that calls `load_weights`").guard(cls, worker(own), on_raw)
        own.model.__class__ = cls
        if on_raw == "session":
            own.model.load_weights(own.state(2).items())
            own.serves = own.state(2)
        else:
            with pytest.raises(UsageError, match="outside of a session"):
                own.model.load_weights(own.state(2).items())
            check_equal(own.model, own.factory, own.serves)
        session = WeightLoadSession(own.model)
        session.prepare()
        for pair in own.state(3).items():
            own.model.load_weights([pair])  # is given to the open session
        session.finish()
        check_equal(own.model, own.factory, own.state(3))
