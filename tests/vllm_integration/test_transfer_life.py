"""Trainers that wake up late, and calls that are lost: whose update it is that ends then.

A trainer that was given up knows nothing of it, and may speak into the update of the next one. A call
whose answer is lost may have been done or not. Either could leave an engine that waits for nobody, or
end the update of somebody else. Here engines and trainers are the real ones, in one process, around a
model of one layer; no engine of vLLM runs.
"""

import contextlib
import threading
import types

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: E402

from weightload import TransportError, UsageError, WeightLoadSession, open_session  # noqa: E402
from weightload.vllm import compat, transfer  # noqa: E402
from weightload.vllm.transfer import file, gloo, shm  # noqa: E402

ENGINES = {"shm": shm.ShmEngine, "gloo": gloo.GlooEngine, "file": file.FileEngine}
TRAINERS = {"shm": shm.ShmTrainer, "gloo": gloo.GlooTrainer, "file": file.FileTrainer}


def weights(value):
    return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}


def engine_of(backend, monkeypatch, *, replica=0):
    """Return an engine around a model that holds 0, as a worker would have it."""
    monkeypatch.setattr(compat, "set_update_target", lambda *_: None)
    monkeypatch.setattr(compat, "engine_config", lambda *_: contextlib.nullcontext())
    model = nn.Linear(2, 2)
    with WeightLoadSession(model) as session:
        session.load(weights(0.0))
    engine = object.__new__(ENGINES[backend])
    engine.model, engine.model_config, engine.device = model, None, torch.device("cpu")
    parallel = types.SimpleNamespace(rank=0, world_size=1, data_parallel_index=replica)
    engine.vllm_config = types.SimpleNamespace(parallel_config=parallel)
    return engine


def holds(engine):
    """Return the one value that the model has everywhere."""
    [value] = {value for one in engine.model.parameters() for value in one.flatten().tolist()}
    return value


class Client:
    """vLLM's client protocol; a test may do something at a call, or lose it."""

    def __init__(self, engine):
        self.engine = engine
        self.before = self.after = lambda method, message: None

    def _call(self, method, message, call):
        self.before(method, message)
        call()
        self.after(method, message)

    def init_weight_transfer_engine(self, told):
        engine = self.engine
        run = lambda: engine.init_transfer_engine(engine.parse_init_info(told))  # noqa: E731
        self._call("init", told, run)

    def start_weight_update(self):
        self._call("start", None, self.engine.start_weight_update)

    def update_weights(self, message):
        self._call(next(iter(message)), message, lambda: self.engine.update_weights(message))

    def finish_weight_update(self, version=None):
        self._call("finish", version, self.engine.finish_weight_update)


class Source(WeightSource):
    """One value everywhere; ``pause`` is called in the middle."""

    def __init__(self, value, pause=lambda: None):
        self.weights, self.pause = weights(value), pause

    def metadata(self):
        return [ParamMeta(name, one.dtype, tuple(one.shape)) for name, one in self.weights.items()]

    def __iter__(self):
        yield "weight", self.weights["weight"]
        self.pause()
        yield "bias", self.weights["bias"]


@pytest.fixture
def meet(tmp_path):
    """Return what makes a trainer that has met an engine."""
    made = []

    def make(engine, backend, source):
        infos = {
            "shm": transfer.ShmTrainerInitInfo,
            "gloo": transfer.GlooTrainerInitInfo,
            "file": lambda **rest: transfer.FileTrainerInitInfo(folder=str(tmp_path), **rest),
        }
        info = infos[backend](rank=0, bucket_bytes=64, deadline=60.0, commit="atomic")
        made.append(TRAINERS[backend].trainer_init(info, client=Client(engine), source=source))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()


@pytest.mark.parametrize("when", ["after its start", "in its middle"])
@pytest.mark.parametrize("backend", ENGINES)
def test_a_trainer_that_was_given_up_takes_nothing_from_its_successor(
    backend, when, monkeypatch, meet
):
    """Whatever it has on its lips when it wakes, and the abort that it sends then, is its own affair."""
    engine = engine_of(backend, monkeypatch)
    asleep, wake = threading.Event(), threading.Event()

    def sleep():
        asleep.set()
        assert wake.wait(60)

    first = meet(engine, backend, Source(1.0, sleep))
    raised = []

    def run():
        try:
            first.send_weights()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert asleep.wait(60)
    engine.weightload_deadline = 0.0  # it was silent for longer than that

    def awake():
        wake.set()
        thread.join(60)
        assert not thread.is_alive()
        first.source.pause = lambda: None
        run()  # and it tries again
        assert len(raised) == 2

    second = meet(engine, backend, Source(2.0))
    if when == "in its middle":
        second.source.pause = awake
    else:
        second.client.after = lambda method, _: awake() if method == "start" else None
    second.send_weights()
    assert holds(engine) == 2.0
    assert open_session(engine.model) is None
    assert "under way" in str(raised[0])
    assert "under way" in str(raised[1])


CALLS = {"shm": ["start", "opening", "bucket", "closing", "finish"],
         "gloo": ["start", "opening", "closing", "finish"],
         "file": ["start", "path", "finish"]}  # fmt: skip


@pytest.mark.parametrize("abort", ["told", "lost too"])
@pytest.mark.parametrize("lost", ["the call", "the answer"])
@pytest.mark.parametrize(
    ("backend", "method"), [(one, method) for one, every in CALLS.items() for method in every]
)
def test_after_a_call_that_was_lost_the_same_trainer_can_send_at_once(
    backend, method, lost, abort, monkeypatch, meet
):
    """It does not know whether the engine has an update open, and need not wait to be given up."""
    engine = engine_of(backend, monkeypatch)
    trainer = meet(engine, backend, Source(1.0))

    def lose(called, message):
        if called == method or (called == "abort" and abort == "lost too"):
            raise TransportError("the line is dead")

    setattr(trainer.client, "before" if lost == "the call" else "after", lose)
    with pytest.raises(TransportError, match="the line is dead"):
        trainer.send_weights()
    finished = (method, lost) == ("finish", "the answer")
    if abort == "told" or finished:
        assert open_session(engine.model) is None
        assert holds(engine) == (1.0 if finished else 0.0)
    trainer.client.before = trainer.client.after = lambda method, message: None
    trainer.source = Source(2.0)
    trainer.send_weights()
    assert holds(engine) == 2.0
    assert open_session(engine.model) is None


def test_a_start_that_is_late_costs_one_attempt(monkeypatch, meet):
    """The abort came before it, and ended nothing."""
    engine = engine_of("shm", monkeypatch)
    trainer = meet(engine, "shm", Source(1.0))

    def late(called, message):
        if called == "start":
            raise TransportError("no answer yet")

    trainer.client.before = late
    with pytest.raises(TransportError, match="no answer yet"):
        trainer.send_weights()
    trainer.client.before = lambda *_: None
    engine.start_weight_update()
    with pytest.raises(UsageError, match="under way"):
        trainer.send_weights()
    trainer.send_weights()
    assert holds(engine) == 1.0


@pytest.mark.parametrize("backend", ENGINES)
def test_an_abort_ends_only_the_update_that_it_names(backend, monkeypatch, meet):
    engine = engine_of(backend, monkeypatch)
    trainer = meet(engine, backend, Source(1.0))
    seen = []

    def interrupt(called, message):
        if called in ("bucket", "path") and not seen:
            seen.append(message)
            update = message["update"] if called == "path" else message["bucket"]["update"]
            for other in (
                {"met": "another", "update": update},
                {"met": engine.met, "update": "another"},
                {"met": engine.met},
                {"update": update},
                {},
            ):
                engine.update_weights({"abort": "not mine", **other})
                assert open_session(engine.model) is not None, other
            if ends:
                engine.update_weights({"abort": "mine", "met": engine.met, "update": update})
                assert open_session(engine.model) is None

    ends = False
    trainer.client.before = lambda *_: None
    trainer.client.after = interrupt
    trainer.send_weights()
    assert len(seen) == 1
    assert holds(engine) == 1.0
    seen.clear()
    ends = True
    trainer.source = Source(2.0)
    with pytest.raises(UsageError, match="No update is active"):
        trainer.send_weights()
    assert holds(engine) == 1.0


def test_a_bucket_after_the_closing_ends_the_update(monkeypatch, meet):
    engine = engine_of("shm", monkeypatch)
    trainer = meet(engine, "shm", Source(1.0))
    buckets = []

    def again(called, message):
        if called == "bucket":
            buckets.append(message)
        if called == "closing":
            late = {**buckets[-1]["bucket"], "index": len(buckets)}
            engine.update_weights({**buckets[-1], "bucket": late})

    trainer.client.after = again
    with pytest.raises(TransportError, match=r"Bucket 2 came after the closing"):
        trainer.send_weights()
    assert open_session(engine.model) is None
    assert holds(engine) == 0.0


def test_a_worker_that_the_trainer_did_not_count_is_told_so(monkeypatch):
    """Two replicas and the default of one worker: the trainer itself is well."""
    engine = engine_of("gloo", monkeypatch, replica=1)
    told = {"address": "127.0.0.1", "port": 9, "world_size": 2, "bucket_bytes": 64, "deadline": 0.5}
    with pytest.raises(TransportError, match=r"counted 1 worker.*this is worker 2.*world_size"):
        engine.init_transfer_engine(engine.parse_init_info(told))
    assert engine.met is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("bucket_bytes", value) for value in (0, -64, 1.5, "64", None, True)],
        *[("deadline", value) for value in (0, -1, float("nan"), float("inf"), "5", None, True)],
        *[("commit", value) for value in ("now", None, 1, ["stream"])],
        *[("world_size", value) for value in (0, 1, -2, 2.0, "2", None, True)],
    ],
)
def test_what_cannot_be_agreed_on_is_refused_where_it_is_said(option, value, monkeypatch):
    """And not in the middle of an update, or by the engine, or never."""
    makes = [lambda **rest: transfer.GlooTrainerInitInfo(rank=0, **rest)]
    if option != "world_size":
        makes += [
            lambda **rest: transfer.ShmTrainerInitInfo(rank=0, **rest),
            lambda **rest: transfer.FileTrainerInitInfo(rank=0, folder="x", **rest),
        ]
    if option in ("deadline", "commit"):
        makes.append(lambda **rest: engine_of("shm", monkeypatch).parse_init_info(rest))
    for make in makes:
        with pytest.raises(UsageError, match=option):
            make(**{option: value})


class Told(Source):
    """Says when everything was taken from it; ``fault`` is raised then."""

    def __init__(self, value, fault=None):
        super().__init__(value)
        self.taken, self.fault = threading.Event(), fault

    def __iter__(self):
        yield from self.weights.items()
        self.taken.set()
        if self.fault is not None:
            raise self.fault


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_next_bucket_is_packed_while_the_last_one_is_loaded(backend, monkeypatch, meet):
    """The engine answers the first bucket when all of the second is there, or never."""
    engine = engine_of(backend, monkeypatch)
    source, came = Told(1.0), []
    trainer = meet(engine, backend, source)

    def after(method, message):
        if method == "bucket":
            came.append(message["bucket"]["index"])
            assert source.taken.wait(20)

    trainer.client.after = after
    trainer.send_weights()
    assert came == [0, 1]
    assert holds(engine) == 1.0


def test_a_bucket_stays_as_it_is_until_it_is_loaded(monkeypatch, meet):
    """It is looked at only when the next one has been packed into the same memory, or another."""
    engine = engine_of("shm", monkeypatch)
    source = Told(1.0)
    trainer = meet(engine, "shm", source)
    trainer.client.before = lambda method, _: method != "bucket" or source.taken.wait(20)
    for value in (1.0, 2.0):
        trainer.source = source = Told(value)
        trainer.send_weights()
        assert source.taken.is_set()
        assert holds(engine) == value


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_abort_waits_for_the_bucket_that_is_being_loaded(backend, monkeypatch, meet):
    engine = engine_of(backend, monkeypatch)
    source = Told(1.0, fault=ValueError("the trainer's own"))
    trainer = meet(engine, backend, source)
    calls = []

    def after(method, _):
        if method == "bucket":
            assert source.taken.wait(20)
            threading.Event().wait(0.2)
        calls.append(f"{method} ends")

    trainer.client.before = lambda method, _: calls.append(f"{method} begins")
    trainer.client.after = after
    with pytest.raises(ValueError, match="the trainer's own"):
        trainer.send_weights()
    assert calls[-4:] == ["bucket begins", "bucket ends", "abort begins", "abort ends"]
    assert open_session(engine.model) is None
    assert holds(engine) == 0.0
    trainer.client.before = trainer.client.after = lambda method, message: None
    trainer.source = Source(2.0)
    trainer.send_weights()
    assert holds(engine) == 2.0
