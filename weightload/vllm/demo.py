"""Shows, on real engines, what a reload does without weightload and with it.

Run as ``python -m weightload.vllm.demo``. Small random checkpoints A and B of a few model families
are made; engines are started on A and updated to B, once by vLLM's own reload and once through
weightload; both are compared with an engine that was started on B. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main", "run_family"]

FAMILIES = {
    "llama": "Llama, untied head",
    "qwen2-tied": "Qwen2, tied head",
    "mixtral": "Mixtral, mixture of experts",
}


def run_family(family: str, folder: Path) -> dict[str, Any]:
    """Update engines of one family from A to B in both ways.

    Args:
        family: a key of :data:`weightload.vllm.testing.families.FAMILIES`.
        folder: where the checkpoints are made.

    Returns:
        The greedy tokens of the first prompt from a fresh engine on A and on B and after each
        update, a verdict and the seconds of each update, and how many live tensors moved.
    """
    from weightload.vllm.engine import reload
    from weightload.vllm.plugin import register
    from weightload.vllm.testing.families import make_checkpoint
    from weightload.vllm.testing.probe import observe, start_engine, stop_engine

    register()
    old = make_checkpoint(family, folder / f"{family}-a", seed=1)
    new = make_checkpoint(family, folder / f"{family}-b", seed=2)

    llm = start_engine(new)
    fresh = observe(llm)
    stop_engine(llm)
    del llm

    def native(llm: Any) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})

    def through_weightload(llm: Any) -> None:
        reload(llm, new, version="B")

    found: dict[str, Any] = {"family": family, "fresh": fresh.tokens[0]}
    found["native"] = _updated(start_engine(old), native, fresh, found)
    found["weightload"] = _updated(
        start_engine(old, load_format="weightload"), through_weightload, fresh, found
    )
    return found


def _updated(
    llm: Any, update: Callable[[Any], None], fresh: Any, found: dict[str, Any]
) -> dict[str, Any]:
    from weightload.vllm.testing.probe import describe_difference, observe, stop_engine

    found["old"] = observe(llm).tokens[0]
    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    started = time.perf_counter()
    try:
        update(llm)
        seconds = time.perf_counter() - started
        seen = observe(llm)
    except Exception as error:
        return {"verdict": f"{type(error).__name__}: {error}"[:60], "right": False, "tokens": []}
    moved = sum(tensor.data_ptr() != places.get(name) for name, tensor in model.named_parameters())
    stop_engine(llm)
    return {
        "verdict": describe_difference(fresh, seen),
        "right": seen == fresh,
        "tokens": seen.tokens[0],
        "seconds": seconds,
        "moved": moved,
    }


def _print_table(results: list[dict[str, Any]]) -> None:
    print()
    print(
        "An engine that runs on weights A is updated to weights B. Right means: greedy tokens and"
    )
    print("all log-probabilities equal those of an engine that was started on B, bit for bit.")
    print()
    print(f"{'model':30} {'vLLM reload_weights':24} {'weightload':24}")
    print(f"{'-' * 30} {'-' * 24} {'-' * 24}")
    for result in results:
        row = f"{FAMILIES[result['family']]:30}"
        for arm in ("native", "weightload"):
            cell = result[arm]
            word = "right" if cell["right"] else "WRONG"
            time_text = f" ({cell['seconds'] * 1e3:.0f} ms)" if "seconds" in cell else ""
            row += f" {word + time_text:24}"
        print(row)
    for result in results:
        if result["native"]["right"] and result["weightload"]["right"]:
            continue
        print()
        print(f"{FAMILIES[result['family']]}: the first tokens after one prompt")
        print(f"  fresh engine on A      {_tokens(result['old'])}")
        print(f"  fresh engine on B      {_tokens(result['fresh'])}")
        for arm, label in (("native", "vLLM reload_weights"), ("weightload", "weightload")):
            cell = result[arm]
            print(f"  {label:22} {_tokens(cell['tokens'])}  {cell['verdict']}")
    print()


def _tokens(tokens: list[int]) -> str:
    return " ".join(f"{token:>4}" for token in tokens[:8]) if tokens else "(no answer)"


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns 0 if weightload was right for every family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", help="run one family in this process and print JSON")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made")
    options = parser.parse_args(argv)
    if options.family:
        print("\n" + json.dumps(run_family(options.family, options.folder)))
        return 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="weightload-demo-") as folder:
        command = [sys.executable, "-m", "weightload.vllm.demo", "--folder", folder, "--family"]
        results = []
        for family in FAMILIES:
            print(f"{FAMILIES[family]}: three engines ...", flush=True)
            # An engine that raised cannot be cleaned up, so every family has its own process.
            done = subprocess.run(
                [*command, family], capture_output=True, text=True, check=False, timeout=900
            )
            if done.returncode != 0:
                print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
                print(f"The engines of {family!r} did not run; see above.", file=sys.stderr)
                return 1
            results.append(json.loads(done.stdout.splitlines()[-1]))
    _print_table(results)
    print(f"{len(results)} families, {time.perf_counter() - started:.0f} s.")
    return 0 if all(result["weightload"]["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
