"""A real server, and a trainer that updates it over HTTP, also while it generates."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import requests
from common import checkpoints, fresh, main
from sender import Checkpoint
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightload.vllm.plugin import register
from weightload.vllm.testing.probe import DEFAULT_PROMPTS
from weightload.vllm.transfer import ShmTrainerInitInfo

LONG = 512
"""Tokens of a sequence: a request of nearly so many is still under way when the pause comes."""

OPTIONS = [
    "--dtype=bfloat16",
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--no-enable-prefix-caching",
    "--no-async-scheduling",
    f"--max-model-len={LONG}",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=128",
    "--max-logprobs=20",
    f"--kv-cache-memory-bytes={64 << 20}",
    "--seed=0",
    "--tokens-only",
    "--worker-cls=weightload.vllm.GuardedWorker",
    "--weight-transfer-config=" + json.dumps({"backend": "weightload_shm"}),
]


class Server:
    """``vllm serve`` on a checkpoint."""

    def __init__(self, path, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # What `vllm serve` runs; the command itself asks for the metadata of a package named vllm.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
        self._process = subprocess.Popen(
            [*command, "--host=127.0.0.1", f"--port={port}", *OPTIONS],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + 200
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            try:
                requests.get(f"{self.url}/health", timeout=5).raise_for_status()
                return
            except requests.RequestException:
                time.sleep(0.5)
        raise TimeoutError("the server did not start")

    def post(self, path, **body):
        answer = requests.post(f"{self.url}/{path}", timeout=120, **body)
        answer.raise_for_status()
        return answer.json()

    def generate(self, prompt, tokens):
        sampling = {
            "temperature": 0.0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 8,
        }
        body = {"token_ids": list(prompt), "sampling_params": sampling}
        [choice] = self.post("inference/v1/generate", json=body)["choices"]
        return choice

    def observe(self):
        """Return greedy tokens and the log-probability of each, after each prompt."""
        seen = []
        for prompt in DEFAULT_PROMPTS:
            choice = self.generate(prompt, 8)
            content = choice["logprobs"]["content"]
            tokens = list(choice["token_ids"])
            seen.append([tokens, [entry["logprob"] for entry in content]])
        return seen

    def version(self):
        return requests.get(f"{self.url}/weight_info", timeout=20).json()["weight_version"]

    def stop(self):
        self._process.terminate()
        self._process.wait(60)


def plain(observation):
    """Return what an engine in this process gave in the form of :meth:`Server.observe`."""
    return [
        [list(tokens), [dict(ranked)[token] for token, ranked in zip(tokens, steps, strict=True)]]
        for tokens, steps in zip(observation.tokens, observation.logprobs, strict=True)
    ]


def run(folder):
    register()
    a_path, b_path = checkpoints("llama", folder)
    a, b = (plain(fresh("llama", path, max_model_len=LONG)) for path in (a_path, b_path))
    server = Server(a_path, sys.stdout)
    known = {json.dumps(a): "A", json.dumps(b): "B"}

    def serves():
        return known.get(json.dumps(server.observe()), "neither")

    result = {"A is not B": a != b, "at first": serves(), "steps": {}}
    client = HTTPVLLMWeightSyncClient(server.url)

    def trainer(**options):
        info = ShmTrainerInitInfo(rank=0, deadline=60, **options)
        return WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=Checkpoint(a_path)
        )

    def step(label, one, path):
        one.source = Checkpoint(path)
        try:
            one.send_weights(label)
            raised = None
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        result["steps"][label] = [raised, serves(), server.version()]

    large = trainer(bucket_bytes=1 << 20)
    small = trainer(bucket_bytes=4096, commit="atomic")
    step("refused: met before another", large, b_path)
    large = trainer(bucket_bytes=1 << 20)
    step("B", large, b_path)
    small = trainer(bucket_bytes=4096, commit="atomic")
    step("A in small buckets, atomic", small, a_path)

    for mode, path in (("abort", b_path), ("wait", a_path), ("keep", b_path)):
        ended = []
        request = threading.Thread(
            target=lambda ended=ended: ended.append(server.generate(DEFAULT_PROMPTS[0], LONG - 100))
        )
        request.start()
        time.sleep(0.15)
        server.post("pause", params={"mode": mode})
        # What "abort" and "wait" end is answered, over another connection than the pause's own.
        request.join(1 if mode == "keep" else 60)
        under_way = request.is_alive()
        small.source = Checkpoint(path)
        small.send_weights(f"paused by {mode}")
        server.post("resume")
        request.join(60)
        [choice] = ended
        result["steps"][f"paused by {mode}"] = [None, serves(), server.version()]
        count = len(choice["token_ids"])
        result[f"request, {mode}"] = [choice["finish_reason"], count, under_way]

    whole = client.update_weights

    def lie(message):
        bucket = message.get("bucket")
        if bucket is not None and bucket["index"] == 20:
            bucket["rows"][0][2] = [1]
        whole(message)

    client.update_weights = lie
    step("refused: a lie", small, a_path)
    client.update_weights = whole
    step("A after it", small, a_path)
    server.stop()
    return result


if __name__ == "__main__":
    main(run)
