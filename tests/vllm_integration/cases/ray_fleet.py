"""Two engines in Ray actors that are updated together, while one of them fails or is killed."""

import os
import shutil
import signal
import tempfile
import time

import ray
from common import Buckets, checkpoints, fresh, main, start

from weightload import Fleet, FleetError
from weightload.vllm import FleetMember, RayReplica
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import Observation, describe_difference, observe
from weightload.vllm.testing.sources import read_checkpoint


class Engine(FleetMember):
    """An engine that can be told to fail."""

    def __init__(self, family, path):
        register()
        self.llm = start(family, path, load_format="weightload")
        self.die_at = None

    def observe(self):
        return observe(self.llm).to_json()

    def weightload(self, step, **arguments):
        operation = arguments.get("operation", step)
        if self.die_at is not None and operation == self.die_at[0]:
            if self.die_at[1] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.die_at = operation, self.die_at[1] - 1
        return super().weightload(step, **arguments)

    def plan_death(self, operation, countdown):
        self.die_at = operation, countdown

    def break_loader(self, name):
        """Let the loaders of the model raise when they come to one tensor."""
        [model] = self.llm.collective_rpc(lambda worker: worker.get_model())
        whole = model.load_weights

        def some(weights):
            for pair in weights:
                if pair[0] == name:
                    raise RuntimeError("this engine is broken")
                yield pair

        model.load_weights = lambda weights: whole(some(weights))

    def mend(self):
        [model] = self.llm.collective_rpc(lambda worker: worker.get_model())
        vars(model).pop("load_weights", None)


def run(family, folder):
    register()
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path), fresh(family, b_path)
    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)
    last = [name for name in b_weights if ".layers.1." in name][-1]
    buckets = Buckets()
    # Paths of sockets are short by law, so the folder of a test may be too long.
    ray_folder = tempfile.mkdtemp(prefix="weightload-ray-")

    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _temp_dir=ray_folder,
    )
    actor_class = ray.remote(num_cpus=1, max_restarts=0)(Engine)
    actors = {name: actor_class.remote(family, str(a_path)) for name in ("first", "second")}
    ray.get([actor.mend.remote() for actor in actors.values()])  # they are up
    result = {"A against B": describe_difference(a, b), "steps": {}}

    def fleet():
        every = [RayReplica(name, actor) for name, actor in actors.items()]
        return Fleet(every, deadline=120, bucket_bytes=20_000)

    def seen():
        """Say which checkpoint each engine computes with, bit for bit."""
        found = {}
        for name, actor in actors.items():
            try:
                now = Observation.from_json(ray.get(actor.observe.remote()))
            except ray.exceptions.RayActorError:
                found[name] = "lost"
            else:
                same = [key for key, want in (("A", a), ("B", b)) if want == now]
                found[name] = same[0] if same else describe_difference(b, now)
        return found

    def step(label, weights, version):
        found = {"error": None}
        began = time.monotonic()
        try:
            receipt = fleet().update(weights, version=version)
            found["receipts"] = {
                name: [[one.rank, one.outcome, one.version] for one in ranks]
                for name, ranks in receipt.replicas.items()
            }
            found["before"] = receipt.before
        except FleetError as error:
            found |= {"error": str(error), "cause": repr(error.__cause__)}
            found |= {"model_intact": error.model_intact, "replicas": error.facts["replicas"]}
        found["seconds"] = time.monotonic() - began
        found["serves"] = seen()
        result["steps"][label] = found

    step("to B", b_weights, "B")
    step("to A, as a stream", iter(a_weights.items()), "A")
    step("to B, from a folder", b_path, "B")
    step("to A, from a folder", a_path, "A")

    ray.get(actors["second"].break_loader.remote(last))
    step("one fails in its last layer", b_weights, "B")
    ray.get(actors["second"].mend.remote())
    step("and then to B", b_weights, "B")
    step("and back to A", a_weights, "A")

    ray.get(actors["second"].plan_death.remote("load_bucket", 5))
    step("one is killed in mid-load", b_weights, "B")
    step("the fleet as it is", b_weights, "B")
    actors["second"] = actor_class.remote(family, str(a_path))
    result["started anew"] = seen()
    step("both to B", b_weights, "B")
    step("both back to A", a_weights, "A")

    ray.get(actors["second"].plan_death.remote("finish", 0))
    step("one is killed after the decision", b_weights, "B")
    actors["second"] = actor_class.remote(family, str(a_path))
    step("both to B again", b_weights, "B")
    result["files left"] = buckets.left()
    ray.shutdown()
    shutil.rmtree(ray_folder, ignore_errors=True)
    return result


if __name__ == "__main__":
    main(run)
