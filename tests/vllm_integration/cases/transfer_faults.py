"""One engine, and trainers that lie, die, repeat themselves or come at the same time."""

import contextlib
import functools
import os
import signal
import time

from common import checkpoints, fresh, main, start
from transfer import Sender, Switch

from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import describe_difference, observe, stop_engine
from weightload.vllm.worker import WorkerExtension

SMALL = 4096
MIDDLE = 100
"""A bucket after some layers are complete; there are about 180."""
DEADLINE = 20.0


class Faults(Switch):
    """Also lets the loaders of a rank fail, and tells the process of each."""

    def break_rank(self, rank):
        if self.rank == rank:
            model = self.get_model()
            whole = model.load_weights
            calls = []

            def load_weights(weights):
                calls.append(weights)
                if len(calls) == 12:
                    raise RuntimeError("this rank is broken")
                return whole(weights)

            model.load_weights = load_weights

    def mend(self):
        vars(self.get_model()).pop("load_weights", None)

    def process(self):
        return os.getpid()


class Extension(Faults, WorkerExtension):
    """For vLLM's own worker; the guarded one has these methods."""


def lies(kind):
    """Return what changes the messages of a trainer on their way, so that they lie."""
    seen = []

    def change(message):
        seen.append(message)
        bucket, closing = message.get("bucket"), message.get("closing")
        if kind == "count" and closing:
            closing["tensors"] += 1
        if bucket is None or bucket["index"] != MIDDLE:
            return [message]
        row = bucket["rows"][0]
        if kind == "shape":
            row[2] = [size + 1 for size in row[2]]
        elif kind == "dtype":
            row[1] = "float32"
        elif kind == "digest":
            bucket["digest"] = "0" * 16
        elif kind == "order":
            bucket["index"] = MIDDLE + 5
        elif kind == "twice":
            return [message, message]
        elif kind == "left out":
            return []
        return [message]

    return change


def run(folder, ranks, worker="auto"):
    register()
    options = {}
    if ranks == 2:
        options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    a_path, b_path = checkpoints("llama", folder)
    a, b = fresh("llama", a_path, **options), fresh("llama", b_path, **options)
    llm = start(
        "llama",
        a_path,
        load_format="weightload",
        weight_transfer_config={"backend": "weightload_shm"},
        worker_extension_cls=f"transfer_faults.{'Extension' if worker == 'auto' else 'Faults'}",
        worker_cls=worker,
        **options,
    )
    result = {"A against B": describe_difference(a, b)}
    ways = {
        "shm": {"backend": "shm", "bucket_bytes": SMALL, "deadline": DEADLINE},
        "gloo": {
            "backend": "gloo",
            "bucket_bytes": SMALL,
            "deadline": DEADLINE,
            "world_size": 1 + ranks,
        },
    }
    senders = {}

    def sender(name="first"):
        if name not in senders or senders[name].process.poll() is not None:
            senders[name] = Sender(llm, a_path, b_path)
        senders[name].on_message = lambda message: [message]
        return senders[name]

    def send(way, path, version, name="first", **more):
        one = sender(name)
        raised = one.do("meet", **{**way, **more}) or one.do(
            "send", path=str(path), version=version
        )
        return raised

    def attempt(label, way, act, *, finish=True):
        """Do something that fails, look at what is served, and see whether the next update works."""
        began = time.monotonic()
        found = {"raised": act()}
        found["seconds"] = time.monotonic() - began
        before = llm.get_weight_version()
        try:
            if finish:
                llm.finish_weight_update("never")
            found["finish"] = None
        except Exception as error:
            found["finish"] = str(error)
        found["published"] = llm.get_weight_version() != before
        states = [one["value"] for one in llm.collective_rpc("weightload_status")]
        found["poisoned"] = [bool(state["poison"]) for state in states]
        found["open"] = [state["session"] is not None for state in states]
        if not any(found["poisoned"]) and not any(found["open"]):
            seen = observe(llm)
            found["serves"] = {describe_difference(a, seen): "A", describe_difference(b, seen): "B"}
            found["serves"] = found["serves"].get("same", "neither")
        for path, want in ((b_path, b), (a_path, a)):
            again = send(way, path, str(path)) or describe_difference(want, observe(llm))
            found[f"then {path.name}"] = again
        result[label] = found

    def with_lies(way, kind, commit):
        one = sender()
        raised = one.do("meet", **way, commit=commit)
        one.on_message = lies(kind)
        raised = raised or one.do("send", path=str(b_path), version="lie")
        one.on_message = lambda message: [message]
        return raised

    def killed(way, commit, when):
        """Kill the trainer while it has a bucket under way, or between two."""
        one = sender()
        raised = one.do("meet", **way, commit=commit)
        calls = []

        def kill(message):
            calls.append(message)
            if len(calls) == MIDDLE:
                os.kill(one.process.pid, signal.SIGKILL)
                one.process.wait()
                if when == "between":
                    raise EOFError
            return [message]

        one.on_message = kill
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            raised = raised or one.do("send", path=str(b_path), version="killed")
        return raised or one.last_error

    def killed_in_broadcast(way):
        one = sender()
        raised = one.do("meet", **way, commit="atomic")
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            raised = raised or one.do("send", path=str(b_path), version="killed", die_at=MIDDLE)
        one.process.wait(10)
        return raised or one.last_error

    def two_at_once(way):
        one = sender()
        raised = one.do("meet", **way)
        others, told = [], []

        def interrupt(message):
            told.append(message)
            if len(told) == MIDDLE:
                two = sender("second")
                others.append(two.do("meet", **way))
                with contextlib.suppress(Exception):
                    others.append(attempt_start())
                others.append(foreign(message))
            return [message]

        def attempt_start():
            try:
                llm.start_weight_update()
            except Exception as error:
                return str(error)

        def foreign(message):
            strange = {"bucket": {**message["bucket"], "update": "another"}, "turn": 1000}
            try:
                llm.update_weights({"update_info": strange})
            except Exception as error:
                return str(error)

        one.on_message = interrupt
        raised = raised or one.do("send", path=str(b_path), version="first of two")
        one.on_message = lambda message: [message]
        result["two at once"] = {
            "first": raised,
            "others": others,
            "verdict": describe_difference(b, observe(llm)),
            "version": llm.get_weight_version(),
        }
        senders["second"].close()

    def broken(way):
        llm.collective_rpc("break_rank", args=(1,))
        raised = send(way, b_path, "broken")
        llm.collective_rpc("mend")
        return raised

    def silent(way):
        """Begin an update and bring nothing; whoever comes next waits until it is given up."""
        one = sender()
        raised = one.do("meet", **{**way, "deadline": 2.0})
        llm.start_weight_update()
        early = one.do("send", path=str(b_path), version="silent")
        time.sleep(2.5)
        return raised or early

    def ended(way):
        """Begin an update, and end it as an operator would."""
        raised = sender().do("meet", **way)
        llm.start_weight_update()
        llm.shutdown_weight_transfer_engine()
        return raised

    def faults(name, way):
        llm.collective_rpc("switch", args=(f"weightload_{name}",))
        kinds = ["shape", "dtype", "digest", "count", "order", "twice", "left out"]
        if ranks == 2:
            kinds = ["shape", "left out"] if name == "gloo" else []
        for kind in kinds:
            commit = "atomic" if kind in ("shape", "twice", "count") else "stream"
            act = functools.partial(with_lies, way, kind, commit)
            attempt(f"{name}, {kind}, {commit}", way, act)
        attempt(f"{name}, killed in a bucket, atomic", way, lambda: killed(way, "atomic", "in"))
        if name == "gloo":
            attempt("gloo, killed in a broadcast, atomic", way, lambda: killed_in_broadcast(way))
        attempt(
            f"{name}, killed between buckets, stream",
            way,
            lambda: killed(way, "stream", "between"),
            finish=False,
        )
        if ranks == 2:
            attempt(f"{name}, rank 1 alone fails, stream", way, lambda: broken(way))
        else:
            attempt(f"{name}, silent, stream", way, lambda: silent(way), finish=False)
            attempt(f"{name}, ended from outside, stream", way, lambda: ended(way))

    for name, way in ways.items():
        faults(name, way)
    result["files left"] = [path for path in Sender.arenas if os.path.exists(path)]
    result["files seen"] = len(Sender.arenas)
    two_at_once(ways["gloo"])
    if ranks == 2:
        result["receiver killed"] = receiver_killed(llm, sender(), ways["gloo"], b_path)
    else:
        stop_engine(llm)
    return result


def receiver_killed(llm, one, way, path):
    """End a worker as by ``kill -9`` when a bucket is under way."""
    pids = llm.collective_rpc("process")
    raised = one.do("meet", **way)
    told = []

    def kill(message):
        told.append(message)
        if len(told) == MIDDLE:
            os.kill(pids[1], signal.SIGKILL)
        return [message]

    one.on_message = kill
    began = time.monotonic()
    raised = raised or one.do("send", path=str(path), version="killed")
    return {"raised": raised, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main(run)
