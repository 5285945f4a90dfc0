"""Two engines in Ray actors, and a trainer that updates both through vLLM's own client."""

import tempfile

import ray
from common import checkpoints, fresh, main, start
from sender import Checkpoint
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import Observation, describe_difference, observe
from weightload.vllm.transfer import ShmTrainerInitInfo


class Engine:
    """An engine as an actor; what it is asked goes to vLLM's ``LLM``."""

    def __init__(self, path):
        register()
        self._llm = start("llama", path, weight_transfer_config={"backend": "weightload_shm"})

    def init_weight_transfer_engine(self, request):
        self._llm.init_weight_transfer_engine(request)

    def start_weight_update(self):
        self._llm.start_weight_update()

    def update_weights(self, request):
        self._llm.update_weights(request)

    def finish_weight_update(self):
        self._llm.finish_weight_update()

    def update_weight_version(self, version):
        self._llm.update_weight_version(version)

    def look(self):
        return observe(self._llm).to_json(), self._llm.get_weight_version()


def run(folder):
    register()
    a_path, b_path = checkpoints("llama", folder)
    known = {"A": fresh("llama", a_path), "B": fresh("llama", b_path)}
    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        # Paths of sockets are short by law, so the folder of a test may be too long.
        _temp_dir=tempfile.mkdtemp(prefix="wl-ray-"),
    )
    actor = ray.remote(num_cpus=1)(Engine)
    engines = [actor.remote(str(a_path)) for _ in range(2)]

    def seen():
        found = []
        for looked, version in ray.get([engine.look.remote() for engine in engines]):
            now = Observation.from_json(looked)
            same = [label for label, want in known.items() if want == now]
            found.append([*same, version])
        return found

    result = {"A against B": describe_difference(known["A"], known["B"]), "at first": seen()}
    trainer = WeightTransferTrainerFactory.trainer_init(
        ShmTrainerInitInfo(rank=0, bucket_bytes=20_000, commit="atomic", deadline=60),
        client=RayVLLMWeightSyncClient(engines),
        source=Checkpoint(b_path),
    )
    trainer.send_weights("seven")
    result["updated"] = seen()
    short = Checkpoint(a_path)
    del short.weights["model.norm.weight"]
    trainer.source = short
    try:
        trainer.send_weights("eight")
        result["refused"] = None
    except Exception as error:
        result["refused"] = str(error)
    result["after it"] = seen()
    trainer.source = Checkpoint(a_path)
    trainer.send_weights("nine")
    result["and again"] = seen()
    trainer.shutdown()
    ray.shutdown()
    return result


if __name__ == "__main__":
    main(run)
