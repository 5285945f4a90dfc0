"""Start a vLLM engine, record exactly what it computes, and stop it again.

Everything runs in this process. vLLM is imported when the first engine is started, not before.
"""

import gc
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from vllm import LLM

ENGINE_ENVIRONMENT: dict[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables that `start_engine` sets unless they are set already."""

ENGINE_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_logprobs": 20,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}
"""Keyword arguments that `start_engine` passes on unless it is told otherwise."""

DEFAULT_PROMPTS: tuple[tuple[int, ...], ...] = (
    tuple(3 + (7 * i + 5) % 300 for i in range(24)),
    tuple(3 + (i * i + 11 * i + 2) % 300 for i in range(9)),
    (301, 17, 17, 250),
)
"""Token ids below 320, which the vocabulary of every family holds."""


def start_engine(path: str | Path, *, threads: int | None = 1, **overrides: Any) -> "LLM":
    """Return an engine on the checkpoint at `path`, with `overrides` on top of `ENGINE_DEFAULTS`.

    Three costs that have nothing to do with a small model are avoided. The kernels run on one
    thread, because on a busy machine the barriers of several take many times longer than the work;
    `threads` sets another number, None leaves it as it is, and the first engine of a process fixes
    it for all, because vLLM then switches `torch.set_num_threads` off. An engine with
    `enforce_eager` makes the process run functions under `torch.compile` as they are, because vLLM
    otherwise compiles the ranking of log-probabilities at the first token, for ten seconds or more.
    And every object that exists by now is taken out of the garbage collector's sight, as vLLM
    itself does a moment later, because it collects three times while it starts.
    """
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import torch
    from vllm import LLM

    options = {**ENGINE_DEFAULTS, **overrides}
    torch.compiler.set_stance("force_eager" if options["enforce_eager"] else "default")
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()
    return LLM(model=str(path), **options)


def stop_engine(llm: "LLM") -> None:
    """Shut the engine down, so that the next one in this process starts as the first one did.

    This ends the distributed groups, which all engines of a process share: stop one before another
    is started, or all of them at the end. It also lets the garbage collector see all objects again.
    The memory is freed when the caller has dropped its own references and garbage is collected, at
    the latest when the next engine is started.
    """
    llm.llm_engine.engine_core.shutdown()


Ranked = tuple[tuple[int, float], ...]
"""Token ids and log-probabilities, in the order of the token ids."""


def _bits(value: Any) -> Any:
    """Return `value` with floats replaced by their bits, so that NaN equals NaN and -0 is not 0."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, tuple):
        return tuple(_bits(item) for item in value)
    return value


@attrs.frozen(kw_only=True, eq=False)
class Observation:
    """What an engine computed for some prompts; two are equal if every number is, bit for bit.

    `tokens[p]` are the greedy tokens after prompt p, `logprobs[p][s]` the highest log-probabilities
    at step s, and `prompt_logprobs[p][i]` those at position i + 1 of the prompt, with that of the
    token that stands there.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[Ranked, ...], ...]
    prompt_logprobs: tuple[tuple[Ranked, ...], ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Observation):
            return NotImplemented
        return _bits(attrs.astuple(self, recurse=False)) == _bits(
            attrs.astuple(other, recurse=False)
        )

    def __hash__(self) -> int:
        return hash(_bits(attrs.astuple(self, recurse=False)))

    @property
    def values(self) -> list[float]:
        """Every log-probability of the observation, prompts first."""
        return [
            value
            for part in (self.prompt_logprobs, self.logprobs)
            for sequence in part
            for ranked in sequence
            for _, value in ranked
        ]

    @property
    def finite(self) -> bool:
        """Whether there are log-probabilities and all of them are finite."""
        values = self.values
        return bool(values) and all(math.isfinite(value) for value in values)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers that `json` takes; floats survive exactly."""
        return {
            "tokens": [list(sequence) for sequence in self.tokens],
            "logprobs": _listed(self.logprobs),
            "prompt_logprobs": _listed(self.prompt_logprobs),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Observation":
        """Return the observation that `to_json` gave this data for."""
        return cls(
            tokens=tuple(tuple(sequence) for sequence in data["tokens"]),
            logprobs=_tupled(data["logprobs"]),
            prompt_logprobs=_tupled(data["prompt_logprobs"]),
        )


def _listed(part: tuple[tuple[Ranked, ...], ...]) -> list[list[list[list[Any]]]]:
    return [[[list(pair) for pair in ranked] for ranked in sequence] for sequence in part]


def _tupled(part: Any) -> tuple[tuple[Ranked, ...], ...]:
    return tuple(
        tuple(tuple((int(token), float(value)) for token, value in ranked) for ranked in sequence)
        for sequence in part
    )


def _ranked(position: Any) -> Ranked:
    return tuple(sorted((token, float(entry.logprob)) for token, entry in position.items()))


def observe(
    llm: "LLM",
    prompts: Sequence[Sequence[int]] = DEFAULT_PROMPTS,
    max_tokens: int = 8,
    *,
    top_k: int = 8,
    prompt_logprobs: bool = True,
) -> Observation:
    """Generate greedily after each prompt and return what the engine computed.

    The prompts run one after the other, so the batch has the same shape every time. `top_k`
    log-probabilities are kept per position; set `prompt_logprobs` to False for engines that cannot
    give those of a prompt.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=top_k,
        prompt_logprobs=top_k if prompt_logprobs else None,
    )
    tokens, logprobs, before = [], [], []
    for prompt in prompts:
        [result] = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
        [completion] = result.outputs
        tokens.append(tuple(completion.token_ids))
        logprobs.append(tuple(_ranked(position) for position in completion.logprobs))
        before.append(
            tuple(_ranked(position) for position in result.prompt_logprobs or () if position)
        )
    return Observation(
        tokens=tuple(tokens), logprobs=tuple(logprobs), prompt_logprobs=tuple(before)
    )


def describe_difference(a: Observation, b: Observation) -> str:
    """Return one line that says how `b` differs from `a`, or "same".

    The first thing that is wrong is named: values that are not finite, tokens, then
    log-probabilities.
    """
    if not b.finite:
        return "not finite"
    if not a.finite:
        return "the reference is not finite"
    if a == b:
        return "same"
    if len(a.tokens) != len(b.tokens):
        return f"{len(a.tokens)} prompts against {len(b.tokens)}"
    for index, (left, right) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        if left != right:
            step = next(
                (s for s, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
                min(len(left), len(right)),
            )
            return f"tokens differ at prompt {index} step {step}"
    gap = _largest_gap(a, b)
    if gap == 0.0:
        return "log-probabilities differ in which tokens they are given for, or in the sign of zero"
    return f"log-probabilities differ by up to {gap:.3g}"


def _largest_gap(a: Observation, b: Observation) -> float:
    """Return the largest difference of two log-probabilities of one token at one place."""
    gap = 0.0
    for ours, theirs in ((a.prompt_logprobs, b.prompt_logprobs), (a.logprobs, b.logprobs)):
        for left, right in zip(ours, theirs, strict=False):
            for x, y in zip(left, right, strict=False):
                other = dict(y)
                gap = max([gap, *(abs(v - other[token]) for token, v in x if token in other)])
    return gap


def hooks_agree(
    ran: Mapping[str, int], fresh: Mapping[str, int], receipt: Mapping[str, Any]
) -> bool:
    """Whether every hook ran as often as in a fresh load, but for those that need not be called.

    A hook that is not called does not call the hooks of its own strategy objects either.

    Args:
        ran: how often each hook ran.
        fresh: the same in a fresh load.
        receipt: says how many hooks were spared, and what of how many was done in pieces.
    """
    spared = receipt["hooks_spared"] + receipt["hooks_in_pieces"]
    within = all(count <= fresh.get(name, 0) for name, count in ran.items())
    absent = sum(fresh.values()) - sum(ran.values())
    return within and (absent >= spared if spared else absent == 0)
