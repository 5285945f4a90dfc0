"""An engine whose worker is guarded: vLLM's own reload calls go through sessions, and no mixture runs.

The same steps in one process, and on two ranks whose workers are processes of their own. Nothing of
weightload's own ``reload`` is used but to recover.
"""

import functools

from common import checkpoints, fresh, main, start
from safetensors import safe_open

from weightload.vllm import reload
from weightload.vllm.guarded import guarded, platform_worker
from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import DEFAULT_PROMPTS, describe_difference, observe, stop_engine
from weightload.vllm.testing.sources import read_checkpoint

NORM = "model.layers.1.input_layernorm.weight"


class FileTransfer:
    """A transfer engine, reduced to what a worker asks of one: chunks come from a file.

    Its chunks lie in one buffer that is used again, as those of a packed transport do.
    """

    weightload_checkpoint_format = True
    supports_draft_weight_update = False

    def __init__(self, worker):
        self.model, self.model_config = worker.get_model(), worker.model_config
        self.vllm_config, self.device = worker.vllm_config, worker.device

    def update_weights(self, info):
        with safe_open(info["path"], framework="pt") as file:
            names = [name for name in info["names"] if name != info.get("without")]
            if info.get("break_after") is not None:
                names = names[: info["break_after"]]
            self.model.load_weights((name, file.get_tensor(name)) for name in names)
        if info.get("break_after") is not None:
            raise ConnectionError("the trainer is gone")

    def drain_pending(self):
        pass

    def set_weight_update_target(self, model, model_config):
        pass

    def reset_weight_update_target(self):
        pass

    def shutdown(self):
        pass


class DirectTransfer(FileTransfer):
    """Writes into live tensors: refused."""

    weightload_checkpoint_format = False

    def start_weight_update(self):
        raise AssertionError("must not be called")


class Worker(guarded(platform_worker())):
    """Also lets a test choose the transfer engine, and lets the loaders of a rank fail."""

    def use(self, kind):
        cls = {"file": FileTransfer, "direct": DirectTransfer}[kind]
        self.weight_transfer_engine = cls(self)

    def break_caches(self):
        """Let the last rank's side of a cache fail."""
        if self.rank == self.vllm_config.parallel_config.world_size - 1:
            self.model_runner.reset_mm_cache = self._fail

    def _fail(self):
        raise OSError("the cache does not answer")

    def mend_caches(self):
        vars(self.model_runner).pop("reset_mm_cache", None)

    def break_rank(self, rank):
        if self.rank == rank:
            model = self.get_model()
            whole = model.load_weights

            def some(weights):
                for index, pair in enumerate(weights):
                    if index == 12:
                        raise RuntimeError("this rank is broken")
                    yield pair

            model.load_weights = lambda weights: whole(some(weights))

    def mend(self):
        vars(self.get_model()).pop("load_weights", None)


def run(family, folder, ranks):
    register()
    options = {}
    if ranks == 2:
        options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    a_path, b_path = checkpoints(family, folder)
    a, b = fresh(family, a_path, **options), fresh(family, b_path, **options)
    names = list(read_checkpoint(b_path))
    files = {name: str(b_path / "model.safetensors") for name in names}
    llm = start(family, a_path, worker_cls="guarded.Worker", **options)
    engine = llm.llm_engine
    result = {
        "A against B": describe_difference(a, b),
        "fresh": describe_difference(a, observe(llm)),
    }

    def attempt(label, act, then=None):
        found = {"error": None, "text": ""}
        try:
            act()
        except Exception as error:
            found = {"error": type(error).__name__, "text": str(error)}
        states = [one["value"] for one in llm.collective_rpc("weightload_status")]
        found["poisoned"] = [bool(state["poison"]) for state in states]
        found["open"] = [state["session"] is not None for state in states]
        if not any(found["poisoned"]) and not any(found["open"]):
            seen = observe(llm)
            found["serves"] = {describe_difference(a, seen): "A", describe_difference(b, seen): "B"}
            found["serves"] = found["serves"].get("same", "neither")
        result[label] = found

    def rpc(method, *args, **kwargs):
        return llm.collective_rpc(method, args=args, kwargs=kwargs)

    def chunk(first, last, **more):
        info = {"path": files[names[0]], "names": names[first:last], **more}
        rpc("update_weights", update_info=info)

    def recover(path):
        llm.collective_rpc("mend")
        reload(llm, path)

    def run_a_step():
        """Take a request past the door, to where only the worker can refuse it."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        engine.add_request("probe", {"prompt_token_ids": list(DEFAULT_PROMPTS[0])}, sampling)
        try:
            engine.step()
        finally:
            engine.abort_request(["probe"])

    def update(*chunks):
        rpc("start_weight_update")
        for make in chunks:
            make()
        rpc("finish_weight_update")

    half = len(names) // 2
    halves = [functools.partial(chunk, 0, half), functools.partial(chunk, half, None)]

    attempt("reload_weights from a path", lambda: rpc("reload_weights", weights_path=str(b_path)))
    attempt("reload_weights of the checkpoint it started on", lambda: recover(a_path))
    if ranks == 1:
        weights = read_checkpoint(b_path)
        attempt(
            "reload_weights from tensors",
            lambda: rpc("reload_weights", weights_iterator=iter(weights.items())),
        )
        recover(a_path)
        short = [pair for pair in weights.items() if pair[0] != NORM]
        attempt("reload_weights without a norm", lambda: rpc("reload_weights", iter(short)))
        attempt("a step of a poisoned engine", run_a_step)
        recover(a_path)
        attempt("recovered", lambda: None)
    attempt(
        "kernel format",
        lambda: rpc("reload_weights", weights_path=str(b_path), is_checkpoint_format=False),
    )
    rpc("use", "direct")
    attempt("a transport past the loaders", lambda: rpc("start_weight_update"))
    rpc("use", "file")
    attempt("an update in two chunks", lambda: update(*halves))
    recover(a_path)
    rpc("start_weight_update")
    attempt("an update that is started twice", lambda: rpc("start_weight_update"))
    halves[0]()
    halves[1]()
    attempt("and the first of them finished", lambda: rpc("finish_weight_update"))
    recover(a_path)
    rpc("break_caches")
    attempt("a cache that cannot be reset", lambda: rpc("reload_weights", weights_path=str(b_path)))
    rpc("mend_caches")
    recover(a_path)
    if ranks == 1:
        rpc("start_weight_update")
        attempt("a step while an update is open", run_a_step)
        halves[0]()
        halves[1]()
        attempt("finished after that", lambda: rpc("finish_weight_update"))
        recover(a_path)
    attempt("an update that lacks a chunk", lambda: update(halves[0]))
    recover(a_path)
    attempt("a finish without a start", lambda: rpc("finish_weight_update"))
    broken = functools.partial(chunk, half, None, break_after=3)
    attempt("an update whose trainer dies", lambda: update(halves[0], broken))
    attempt("a finish after that", lambda: rpc("finish_weight_update"))
    attempt("and a complete update", lambda: update(*halves))
    recover(a_path)
    if ranks == 2:
        rpc("break_rank", 0)
        attempt("rank 0 alone fails", lambda: rpc("reload_weights", weights_path=str(b_path)))
        recover(a_path)
        rpc("break_rank", 1)
        attempt("rank 1 alone fails", lambda: rpc("reload_weights", weights_path=str(b_path)))
        recover(a_path)
    attempt("at the end", lambda: None)
    stop_engine(llm)
    return result


if __name__ == "__main__":
    main(run)
