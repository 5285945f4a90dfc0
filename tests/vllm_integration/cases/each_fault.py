"""Faults by vLLM's own reload and through weightload, each in an engine and a process of its own.

This process only imports, and forks another for each engine: it may die or hang, so it writes
what is known after every stage.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from common import fresh, main, model_of, start
from faults import NORM, failing, without

from weightload.vllm import reload
from weightload.vllm.plugin import register
from weightload.vllm.testing import families, probe
from weightload.vllm.testing.sources import chunks, read_checkpoint

CHUNK = 8
"""Tensors that get a lifecycle of their own."""

STAGES = ("raised", "serves", "reload", "then")
NUMBERS = ("A", "B", "neither", "NaN")
"""What an engine may serve; everything else is how it failed to."""

NOT_READY = 70
"""Exit status where it is not the fault that failed."""

GUARDED = {"load_format": "weightload", "worker_cls": "weightload.vllm.GuardedWorker"}


def native(llm):
    """Return vLLM's own reload."""

    def give(weights, **options):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    return give


def through_weightload(llm, commit):
    """Return a load through weightload."""

    def give(weights, **options):
        reload(llm, iter(weights), commit=commit, **options)

    return give


def changed(weights, name, tensor):
    """Return all weights, one of them replaced."""
    return {**weights, name: tensor}.items()


def doubled(tensor):
    return torch.cat([tensor, tensor])


def holed(tensor):
    """Return a copy with one NaN."""
    found = tensor.clone()
    found.view(-1)[3] = float("nan")
    return found


def nested(weights, position, give):
    """Yield weights, and reload the engine in the middle."""
    return failing(weights, position, lambda: give(weights.items()))


def each_chunk(weights, give):
    for chunk in chunks(weights, CHUNK):
        give(chunk)


def far(name):
    return name.replace(".1.", ".7.")


FAULTS = {
    "none": lambda t: t.give(t.b.items()),
    "a norm is missing": lambda t: t.give(without(t.b, NORM).items()),
    "the k of q, k and v is missing": lambda t: t.give(without(t.b, t.key).items()),
    "a norm comes again, with A's values": lambda t: t.give([*t.b.items(), (NORM, t.a[NORM])]),
    "a norm of one element": lambda t: t.give(changed(t.b, NORM, t.b[NORM][:1].clone())),
    "a norm of twice the size": lambda t: t.give(changed(t.b, NORM, doubled(t.b[NORM]))),
    "a projection of twice the rows": lambda t: t.give(changed(t.b, t.o, doubled(t.b[t.o]))),
    "a norm as int64": lambda t: t.give(changed(t.b, NORM, t.b[NORM].to(torch.int64))),
    "NaN in a norm": lambda t: t.give(changed(t.b, NORM, holed(t.b[NORM])), check_finite=True),
    "an unknown name": lambda t: t.give(changed(t.b, "model.layers.0.no.weight", t.b[NORM])),
    "a layer that does not exist": lambda t: t.give(changed(t.b, far(NORM), t.b[NORM])),
    "the source raises at the first tensor": lambda t: t.give(failing(t.b, 0)),
    "the source raises inside a fused layer": lambda t: t.give(failing(t.b, t.inside)),
    "the source raises at the last tensor": lambda t: t.give(failing(t.b, len(t.b) - 1)),
    "a reload inside the source": lambda t: t.give(nested(t.b, t.inside, t.give)),
    "another architecture": lambda t: t.give(t.other_architecture.items()),
    "the parameters of a live engine": lambda t: t.give(t.live_parameters.items()),
    f"a lifecycle for every {CHUNK} tensors": lambda t: each_chunk(t.b, t.give),
}
"""What the engine is given; each takes a `Trial`."""


class Trial:
    """An engine on A, with what there is to give it."""

    def __init__(self, family, folder, way, fault):
        suffix = "weight_packed" if family == "w4a16" else "weight"
        self.key = f"model.layers.0.self_attn.k_proj.{suffix}"
        self.o = f"model.layers.1.self_attn.o_proj.{suffix}"
        self.a, self.b = (read_checkpoint(folder / name) for name in "AB")
        self.inside = list(self.b).index(self.key)
        if fault == "another architecture":
            path = families.make_checkpoint("opt", folder / f"other-{os.getpid()}", seed=1)
            self.other_architecture = read_checkpoint(path)
        if fault == "the parameters of a live engine":
            llm = start(family, folder / "B")
            live = model_of(llm).named_parameters()
            self.live_parameters = {name: one.detach().clone() for name, one in live}
            probe.stop_engine(llm)
        self.llm = start(family, folder / "A", **({} if way == "native" else GUARDED))
        self.give = native(self.llm) if way == "native" else through_weightload(self.llm, way)
        known = json.loads((folder / "fresh.json").read_text())
        self.right = {name: probe.Observation.from_json(one) for name, one in known.items()}

    def served(self):
        """Return what the engine computes, or what it raises."""
        seen = []
        raised = attempt(lambda: seen.append(probe.observe(self.llm)))
        if raised:
            return raised
        for name, one in self.right.items():
            if probe.describe_difference(one, seen[0]) == "same":
                return name
        return "neither" if seen[0].finite else "NaN"


def attempt(act):
    """Return the name of what was raised."""
    try:
        act()
    except BaseException as error:
        traceback.print_exc()
        return type(error).__name__
    return None


def prepare(family, folder, tell):
    """Write both checkpoints, and what a new engine computes on each."""
    paths = {name: families.make_checkpoint(family, folder / name, seed=ord(name)) for name in "AB"}
    seen = {name: fresh(family, path).to_json() for name, path in paths.items()}
    (folder / "fresh.json").write_text(json.dumps(seen))
    tell(then="prepared")


def try_one(family, folder, way, fault, look, tell):
    """With ``look`` false nothing is computed between the fault and the reload after it.

    An engine in which a request raised still holds that request, so it ends there.
    """
    trial = Trial(family, folder, way, fault)
    tell(raised=attempt(lambda: FAULTS[fault](trial)))
    if look:
        tell(serves=(serves := trial.served()))
        if serves not in NUMBERS:
            return
    tell(reload=attempt(lambda: trial.give(trial.b.items())))
    tell(then=trial.served())


def in_another_process(run, folder, timeout):
    """Run it in a fork and return what it told; the first stage that is missing is how it ended."""
    out = folder / "told.json"
    out.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        found = {}

        def tell(**more):
            found.update(more)
            partial = out.with_suffix(".tmp")
            partial.write_text(json.dumps(found))
            partial.rename(out)

        os.setsid()
        status = 0 if attempt(lambda: run(tell)) is None else NOT_READY
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    deadline, status = time.monotonic() + timeout, None
    while status is None and time.monotonic() < deadline:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = json.loads(out.read_text()) if out.exists() else {}
    if status is not None and os.waitstatus_to_exitcode(status) == NOT_READY:
        raise RuntimeError("The engine or what it is to be given could not be made; see above.")
    if status != 0:
        missing = next(stage for stage in STAGES if stage not in found)
        found[missing] = "hangs" if status is None else "dies"
    return found


def run(family, folder, trials, timeout):
    """Return what was seen for each ``(way, fault)``."""
    register()
    for module in ("vllm", "vllm.entrypoints.llm", "vllm.model_executor.models.llama"):
        importlib.import_module(module)
    folder = Path(folder)
    begun = in_another_process(lambda tell: prepare(family, folder, tell), folder, timeout)
    if begun != {"then": "prepared"}:
        raise RuntimeError(f"{family} could not be prepared.")
    result = []
    for way, fault in trials:

        def once(look, way=way, fault=fault):
            go = lambda tell: try_one(family, folder, way, fault, look, tell)  # noqa: E731
            return in_another_process(go, folder, timeout)

        found = once(look=True)
        if "serves" in found and found["serves"] not in NUMBERS:
            again = once(look=False)
            found = {"raised": found["raised"], "serves": found["serves"]}
            found |= {stage: again[stage] for stage in ("reload", "then") if stage in again}
        print(way, fault, found, sep=" | ", flush=True)
        result.append(found)
    return result


if __name__ == "__main__":
    main(run)
