"""Run agents on a vLLM engine with a small KV cache, with and without our page store.

    python examples/kv_tiers_vllm.py

In each turn, an agent sends its whole conversation to the engine, and then calls a tool. Between
two turns of an agent, the engine evicts the agent's pages, because other agents use the cache.
Without a store, the engine computes the whole conversation again at every turn. With a store, the
engine loads the pages from host memory and disk. In a round, all agents use one version of the
weights. Before each round, the trainer makes a step and publishes a new version. All rounds begin
with the same prompts, and a `cache_salt` per version prevents requests from reading pages of old
weights. For each version, the script prints how many prompt tokens were not computed, the time to
the first token, and the page hits per tier. The engines with and without the store must return
equal answers. The model is tiny and random. To use another model, pass its path.
"""

import os
import sys
import tempfile
from dataclasses import dataclass, field

# What vLLM needs on a CPU: no model hub, no compilation, one thread.
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import numpy as np
import torch
import vllm
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from primeblocks import weightsync
from primeblocks.kvoffload.adapters import vllm as kv
from primeblocks.testing import tiny_models
from primeblocks.weightsync.adapters import vllm as into_vllm

MODEL = {"num_layers": 4, "hidden": 256, "num_experts": 16, "top_k": 4, "vocab": 2048}
VERSIONS, AGENTS, TURNS = 2, 5, 4
PROMPT, TOOL, GENERATED = 512, 96, 8
LR = 1e-4
CLOSE = 1e-4  # largest difference of log-probabilities, because the batches differ
TIMEOUT_S = 60.0
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 40,  # pages. One agent needs up to 26 pages
    "max_model_len": 1024,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,
}
# A page of this model has 64 KiB. vLLM's own pool, through which all pages pass, has room for 32
# pages.
STORE = {"primary_bytes": 2 << 20, "host_bytes": 6 << 20, "disk_bytes": 16 << 20}


@dataclass
class Round:
    """The answers to all agents for one version of the weights, with token counts and times."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    pages: dict[str, int] = field(default_factory=dict)


def play(llm: vllm.LLM, version: int, vocab: int) -> Round:
    """Run all turns of all agents.

    For all versions, the first prompts, the tool results and the order of the agents are equal.
    """
    round_, random = Round(), np.random.default_rng(0)
    contexts = random.integers(4, vocab, (AGENTS, PROMPT)).tolist()
    before = kv.engine_statistics().tiers
    for _ in range(TURNS):
        for agent in random.permutation(AGENTS):  # random order, because tools need different times
            context = contexts[agent]
            sampling = vllm.SamplingParams(
                max_tokens=GENERATED,
                temperature=0,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                extra_args=kv.request_args(version),
            )
            ask = {"prompt_token_ids": context, "cache_salt": f"example-{version}"}
            (told,) = llm.generate(ask, sampling, use_tqdm=False)
            answer = told.outputs[0]
            chosen = zip(answer.logprobs, answer.token_ids, strict=True)
            round_.tokens.append(list(answer.token_ids))
            round_.logprobs.append([at[token].logprob for at, token in chosen])
            round_.prompt_tokens += len(context)
            round_.cached_tokens += told.num_cached_tokens
            round_.first_token_s.append(told.metrics.first_token_latency)
            context += [*answer.token_ids, *random.integers(4, vocab, TOOL).tolist()]
    for name, counts in kv.engine_statistics().tiers.items():
        round_.pages[name] = counts["hits"] - before.get(name, {"hits": 0})["hits"]
    return round_


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.manual_seed(step))
    logits = model(tokens).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def rollouts(path: str, arguments: dict) -> list[Round]:
    """Run one engine with all versions of the weights. Return one `Round` per version."""
    llm = vllm.LLM(path, **ENGINE, **into_vllm.engine_args(), **arguments)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    source = weightsync.describe(model)
    plan = weightsync.plan_sync([source], source.whole(), bucket_bytes=1 << 20)
    rounds = []
    with weightsync.SharedMemoryTransport(f"tiers-{os.getpid()}", owner=True) as transport:
        publisher = weightsync.Publisher(plan, model, transport)
        into_vllm.attach_llm(llm, plan, transport)
        for version in tqdm(range(1, VERSIONS + 1), desc="versions"):
            train(model, optimizer, version)
            sent = publisher.publish(version, timeout_s=TIMEOUT_S)
            into_vllm.update_llm(llm, sent, timeout_s=TIMEOUT_S)
            rounds.append(play(llm, version, model.config.vocab_size))
    llm.llm_engine.engine_core.shutdown()
    return rounds


def main() -> None:
    folder = tempfile.TemporaryDirectory()
    path = sys.argv[1] if len(sys.argv) > 1 else f"{folder.name}/model"
    if len(sys.argv) == 1:
        tiny_models.save("qwen3_moe", path, **MODEL)
    store = kv.engine_args(**STORE, disk_path=f"{folder.name}/pages", max_staleness=1)
    tiered = rollouts(path, store)
    tiers = kv.engine_statistics().tiers
    alone = rollouts(path, {})

    print("         prompt  not computed   time to first token, ms    pages from")
    print("version  tokens  store  alone    store    alone   ratio   host   disk")
    for version, (ours, plain) in enumerate(zip(tiered, alone, strict=True), 1):
        assert ours.tokens == plain.tokens
        np.testing.assert_allclose(ours.logprobs, plain.logprobs, atol=CLOSE)
        with_ms, without_ms = (1e3 * np.median(each.first_token_s) for each in (ours, plain))
        print(
            f"{version:7} {ours.prompt_tokens:7,} {ours.cached_tokens:6,} {plain.cached_tokens:6,} "
            f"{with_ms:8.1f} {without_ms:8.1f} {without_ms / with_ms:7.2f} "
            f"{ours.pages['host']:6} {ours.pages['disk']:6}"
        )
    for name, counts in tiers.items():
        print(f"{name}:", ", ".join(f"{what} {count:,}" for what, count in counts.items()))
    print("the answers of both engines are equal, log-probabilities within", CLOSE)


if __name__ == "__main__":
    main()
