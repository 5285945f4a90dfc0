"""Engines of other processes are reached through a store of ``torch.distributed``.

Damage shown: a fleet that waits for ever for a process that is gone, or an engine that does what
was asked of the one before it.
"""

import contextlib
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from fleets import BUCKET, PROCESSES, STATES, ToyReplica
from torch.distributed import HashStore, TCPStore

from weightload import (
    Fleet,
    FleetError,
    StoreReplica,
    UsageError,
    WeightLoadError,
    mailbox,
    serve_replica,
)


@pytest.fixture
def serving():
    """Serve engines in threads; what is returned reaches them."""
    store, stop, threads = HashStore(), threading.Event(), []

    def serve(replica):
        thread = threading.Thread(
            target=serve_replica, args=(replica, store), kwargs={"stop": stop}
        )
        thread.start()
        threads.append(thread)
        return StoreReplica(replica.name, store)

    serve.store = store
    yield serve
    stop.set()
    for thread in threads:
        thread.join()


def test_engines_behind_a_store_are_updated_together(serving):
    engines = [ToyReplica("a"), ToyReplica("b")]
    fleet = Fleet([serving(engine) for engine in engines], deadline=60, bucket_bytes=BUCKET)
    for number in (2, 3):
        receipt = fleet.update(STATES[number], version=number)
        assert [engine.serves() for engine in engines] == [number, number]
        assert [one.rank for one in receipt.replicas["b"]] == [0, 1]


@pytest.mark.long_way("loaders of a rank fail")
@pytest.mark.parametrize(("step", "then"), [("start", 1), ("load_bucket", 1), ("finish", None)])
def test_what_goes_wrong_there_is_known_here(step, then, serving):
    engines = [ToyReplica("a"), ToyReplica("b")]
    fleet = Fleet([serving(engine) for engine in engines], deadline=60, bucket_bytes=BUCKET)
    engines[1].plan(step, "fails")
    with pytest.raises(FleetError) as caught:
        fleet.update(STATES[2], version=2)
    assert "'b'" in "".join(caught.value.__cause__.__notes__) or then is None
    assert engines[1].serves() == then
    engines[1].mend()
    fleet.update(STATES[3], version=3)
    assert [engine.serves() for engine in engines] == [3, 3]


def test_an_error_keeps_its_class_on_the_way(serving):
    engine = ToyReplica("a")

    def refuse():
        raise UsageError("requests are unfinished")

    engine.pause = refuse
    with pytest.raises(UsageError, match="requests are unfinished"):
        serving(engine).pause()


def test_a_process_that_does_not_serve_is_given_up_in_time():
    replica = StoreReplica("nobody", HashStore(), timeout=0.1)
    with pytest.raises(TimeoutError, match="'nobody' is not there for 'pause'"):
        replica.pause()


def test_an_engine_does_not_do_what_was_asked_of_the_one_before():
    store, stop = HashStore(), threading.Event()
    store.set("weightload/a/serves", "by a process that was killed")
    with pytest.raises(TimeoutError, match="'a' has not answered 'pause'"):
        StoreReplica("a", store, timeout=0.1).pause()
    engine, stop = ToyReplica("a"), threading.Event()
    thread = threading.Thread(target=serve_replica, args=(engine, store), kwargs={"stop": stop})
    thread.start()
    try:
        while True:
            try:
                StoreReplica("a", store, timeout=1.0).call("status")
            except TimeoutError:  # it was asked before it had begun to look
                continue
            break
    finally:
        stop.set()
        thread.join()
    assert set(engine.log) == {"status"}
    assert not engine.paused


@pytest.mark.parametrize("killed", [1, 3])
def test_a_client_that_was_killed_as_it_asked_does_not_silence_the_engine(
    killed, serving, monkeypatch
):
    """It had taken a number, and did not come to say what it wanted."""
    monkeypatch.setattr(mailbox, "_PATIENCE", 0.1)
    replica = serving(ToyReplica("a"))
    replica.call("status")
    for _ in range(killed):
        serving.store.add("weightload/a/asked", 1)
    assert [one["rank"] for one in replica.call("status")] == [0, 1]


def test_what_cannot_be_said_takes_no_number(serving):
    replica = serving(ToyReplica("a"))
    with pytest.raises(TypeError, match="JSON"):
        replica.call("start", version=object())
    assert serving.store.add("weightload/a/asked", 0) == 0
    assert len(replica.call("status")) == 2


def test_an_answer_that_cannot_be_told_is_an_error_and_not_the_end(serving):
    engine = ToyReplica("a")
    whole = engine.call

    def call(operation, **arguments):
        outcomes = whole(operation, **arguments)
        return [{**one, "value": torch.ones(1)} for one in outcomes] if arguments else outcomes

    engine.call = call
    replica = serving(engine)
    with pytest.raises(WeightLoadError, match="Tensor is not JSON"):
        replica.call("abort", opener="nobody")
    assert len(replica.call("status")) == 2


@pytest.mark.parametrize("end", ["stop", "error"])
def test_an_engine_that_is_served_no_longer_is_not_waited_for(end):
    store, stop, engine = HashStore(), threading.Event(), ToyReplica("a")

    def ended():
        if end == "stop":
            stop.set()
        else:
            raise KeyboardInterrupt

    engine.pause = ended
    store.set("weightload/a/ask/1", '["pause", {}]')
    with contextlib.suppress(KeyboardInterrupt):
        serve_replica(engine, store, stop=stop)
    with pytest.raises(TimeoutError, match="'a' is not there for 'pause'"):
        StoreReplica("a", store, timeout=0.1).pause()


def test_a_server_that_ends_late_does_not_take_away_the_one_after_it():
    store, stops = HashStore(), [threading.Event(), threading.Event()]
    threads = []
    for stop in stops:
        threads.append(
            threading.Thread(
                target=serve_replica, args=(ToyReplica("a"), store), kwargs={"stop": stop}
            )
        )
        threads[-1].start()
        time.sleep(0.1)
    try:
        stops[0].set()
        threads[0].join()
        assert len(StoreReplica("a", store, timeout=10).call("status")) == 2
    finally:
        stops[1].set()
        threads[1].join()


def _serve_in_process(port, name):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    serve_replica(ToyReplica(name), store)


def test_processes_that_share_a_tcp_store_are_a_fleet():
    """One of them is killed: the other goes back, in time."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        PROCESSES.Process(target=_serve_in_process, args=(store.port, name), daemon=True)
        for name in ("a", "b")
    ]
    for process in processes:
        process.start()
    try:
        replicas = [StoreReplica(name, store) for name in ("a", "b")]
        fleet = Fleet(replicas, deadline=60, bucket_bytes=BUCKET)
        fleet.update(STATES[2], version=2)
        assert {one.version for one in fleet.status().values()} == {2}

        def deadly():
            for index, pair in enumerate(STATES[3].items()):
                if index == 1:
                    processes[1].kill()
                    processes[1].join()
                    fleet.deadline = 5.0
                yield pair

        with pytest.raises(FleetError) as caught:
            fleet.update(deadly(), version=3)
        states = {name: one["state"] for name, one in caught.value.facts["replicas"].items()}
        assert states == {"a": "serves", "b": "lost"}
        assert caught.value.facts["replicas"]["a"]["version"] == 2
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_call_that_nobody_answers_does_not_keep_a_process_from_its_end():
    """Nor take it down: a thread that is in the store's C++ code at that moment would."""
    program = """
import subprocess
import sys
from torch.distributed import TCPStore
from weightload import StoreReplica
from weightload.calling import Lane

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("weightload/a/serves", "")
for _ in range(100):
    Lane("a").ask(StoreReplica("a", store).pause)
while store.add("weightload/a/asked", 0) < 100:
    pass
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
