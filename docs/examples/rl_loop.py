"""A small reinforcement learning loop: train, update the engine, sample, and see that it is right.

The trainer is a small transformers model in this process. The engine is vLLM in a process of its
own; its weights are replaced by ``weightload.vllm.reload``. Each step prints how far the engine's
log-probabilities are from the trainer's own, for the same tokens: with this update, with this
update left out, and as it would be if the engine had never been updated::

    python docs/examples/rl_loop.py --dtype bfloat16 --steps 5
"""

import argparse
import json
import os
import tempfile

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # the engine gets a process of its own
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, PROMPT, COMPLETION = 320, 4, 12


def make_model():
    """Return a language model that nobody has trained yet."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def start_engine(model, dtype):
    """Start an engine on the weights that the model has now."""
    from vllm import LLM

    with tempfile.TemporaryDirectory(prefix="rl-loop-") as folder:
        model.to(dtype).save_pretrained(folder)
        model.float()
        return LLM(
            folder,
            dtype=str(dtype).removeprefix("torch."),
            load_format="weightload",
            worker_extension_cls="weightload.vllm.WorkerExtension",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=32,
            seed=0,
        )


def sample(engine, prompts, step):
    """Let the engine go on after each prompt; return the tokens, ``[prompts, length]``."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=COMPLETION,
            ignore_eos=True,
            detokenize=False,
            seed=step * 1000 + index,
        )
        for index in range(len(prompts))
    ]
    results = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return torch.tensor([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in results])


def engine_logprobs(engine, tokens):
    """Return what the engine thinks of each token but the first, ``[sequences, length - 1]``."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    results = engine.generate(
        [{"prompt_token_ids": row} for row in tokens.tolist()], params, use_tqdm=False
    )
    found = []
    for row, result in zip(tokens.tolist(), results, strict=True):
        places = zip(row[1:], result.prompt_logprobs[1:], strict=True)
        found.append([place[token].logprob for token, place in places])
    return torch.tensor(found)


def trainer_logprobs(model, tokens):
    """Return what the trainer's model thinks of the same tokens."""
    logprobs = model(tokens).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None])[..., 0]


def train(model, optimizer, tokens):
    """Make one step of REINFORCE towards even tokens; return the reward before it."""
    reward = (tokens[:, PROMPT:] % 2 == 0).float().mean(-1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    logprobs = trainer_logprobs(model, tokens)[:, PROMPT - 1 :]
    loss = -(advantage[:, None] * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return reward.mean().item()


def run(dtype, steps, samples):
    """Run the loop and return the figures of each step."""
    from weightload.vllm import reload

    model = make_model()
    engine = start_engine(model, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    shape = samples, PROMPT
    prompts = torch.randint(VOCABULARY, shape, generator=generator).tolist()
    judged = sample(engine, prompts, step=0)  # the same ones after each step
    never = before = engine_logprobs(engine, judged)

    # The trainer keeps its weights in float32, and sends them in the type of the engine. What it
    # is compared with computes in that type too.
    sent = make_model().to(dtype).requires_grad_(False)
    rows = []
    print(f"{dtype}: mean |trainer - engine| of log-probabilities")
    print("step  reward  updated    update left out  never updated")
    for step in range(1, steps + 1):
        tokens = sample(engine, prompts, step)
        reward = train(model, optimizer, tokens)
        sent.load_state_dict(model.state_dict())
        reload(engine, sent.state_dict(), version=step)

        mine, now = trainer_logprobs(sent, judged), engine_logprobs(engine, judged)
        row = {
            "step": step,
            "reward": reward,
            "updated": (mine - now).abs().mean().item(),
            "left out": (mine - before).abs().mean().item(),
            "never": (mine - never).abs().mean().item(),
        }
        before = now
        rows.append(row)
        print(
            f"{step:4}  {reward:6.3f}  {row['updated']:9.2e}  {row['left out']:15.2e}  "
            f"{row['never']:13.2e}"
        )
    engine.llm_engine.engine_core.shutdown()
    return rows


def main():
    """Run the loop as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    rows = {
        dtype: run(getattr(torch, dtype), options.steps, options.samples) for dtype in options.dtype
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
