"""A server behind HTTP and an engine in this process are updated together, until one is killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from common import Buckets, checkpoints, fresh, main, start

from weightload import Fleet, FleetError
from weightload.vllm import HTTPReplica, LocalReplica
from weightload.vllm.plugin import register
from weightload.vllm.testing import families, probe
from weightload.vllm.testing.probe import observe
from weightload.vllm.testing.sources import read_checkpoint

SKIPPED = ("model", "kv_cache_memory_bytes")


def flags(options):
    for key, value in options.items():
        name = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            yield name if value else "--no-" + key.replace("_", "-")
        else:
            yield from (name, str(value))


def serve(family, path, folder, port):
    """Start a server on a checkpoint, and return its process."""
    options = {**probe.ENGINE_DEFAULTS, **families.get_family(family).engine}
    options = {key: value for key, value in options.items() if key not in SKIPPED}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "toy",
        "--load-format", "weightload",
        "--worker-extension-cls", "weightload.vllm.WorkerExtension", *flags(options),
    ]  # fmt: skip
    log = (Path(folder) / f"serve-{port}.txt").open("w")
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", **probe.ENGINE_ENVIRONMENT},
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ask(url, path, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def ready(url, process):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with {process.returncode}")
        with contextlib.suppress(OSError):
            ask(url, "/health", timeout=5)
            return
        time.sleep(0.5)
    raise TimeoutError("a server does not come up")


def completions(url):
    """Return greedy tokens and their log-probabilities after each prompt of the probe."""
    found = []
    for prompt in probe.DEFAULT_PROMPTS:
        body = {
            "model": "toy",
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        [choice] = ask(url, "/v1/completions", body)["choices"]
        found.append([choice["token_ids"], choice["logprobs"]["token_logprobs"]])
    return found


def chosen(seen):
    """Return the same of what an engine in this process computed."""
    return [
        [list(tokens), [dict(step)[token] for token, step in zip(tokens, logprobs, strict=True)]]
        for tokens, logprobs in zip(seen.tokens, seen.logprobs, strict=True)
    ]


def run(family, folder):
    register()
    a_path, b_path = checkpoints(family, folder)
    a_weights, b_weights = read_checkpoint(a_path), read_checkpoint(b_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = serve(family, a_path, folder, port)
    want = {"A": chosen(fresh(family, a_path)), "B": chosen(fresh(family, b_path))}
    llm = start(family, a_path, load_format="weightload")
    ready(url, process)
    buckets = Buckets()
    result = {"A against B": "same" if want["A"] == want["B"] else "differ", "steps": {}}
    fleet = Fleet([HTTPReplica(url), LocalReplica("here", llm)], deadline=120, bucket_bytes=20_000)

    def which(seen):
        return next((key for key, one in want.items() if one == seen), "something else")

    def served():
        try:
            there = which(completions(url))
        except OSError:
            there = "lost"
        return [there, which(chosen(observe(llm)))]

    def step(label, weights, version):
        found = {"error": None}
        try:
            fleet.update(weights, version=version)
        except FleetError as error:
            found = {"error": str(error)}
            found["states"] = [one["state"] for one in error.facts["replicas"].values()]
        found["serves"] = served()
        result["steps"][label] = found

    result["before"] = served()
    step("to B", b_weights, 1)
    result["version"] = ask(url, "/weight_info")["weight_version"]
    step("to A, from a folder", a_path, 2)
    step("without a tensor", iter(list(b_weights.items())[:-1]), 3)

    # A request that comes while the engines are paused is answered afterwards, by new weights.
    answers = []
    thread = threading.Thread(target=lambda: answers.append(which(completions(url))))

    def slowly():
        for index, pair in enumerate(b_weights.items()):
            if index == 5:
                thread.start()
                time.sleep(0.5)
                result["paused"] = ask(url, "/is_paused")["is_paused"]
                result["answered in the middle"] = list(answers)
            yield pair

    step("to B, with a request in the middle", slowly(), 4)
    thread.join(60)
    result["answers"] = answers

    def deadly():
        for index, pair in enumerate(a_weights.items()):
            if index == 5:
                process.send_signal(signal.SIGKILL)
                process.wait()
            yield pair

    step("the server is killed", deadly(), 5)
    result["files left"] = buckets.left()
    return result


if __name__ == "__main__":
    main(run)
