"""Run by vllm_ttft.py in its own process: `vllm_ttft_job.py FOLDER TOKENS host|disk ROUNDS`.

Serves one prompt at a time to one real engine with our tiers behind it, and asks for one token. In
turn: a prompt under a new salt, which is computed, and one whose pages have left the engine and
vLLM's pool and lie in the tier named; the latter alone, or in the queue behind a request that the
engine has room for alone. Prints JSON: seconds of each, from the call or from the last token of the
request in front, after checking that tokens, log-probabilities and routes equal the first run of
the prompt and that all pages came from there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PAGE_TOKENS, PROMPTS = 32, 5
FRONT_TOKENS = 24  # that the request in front writes
WARM = 1
CLOSE = 1e-4  # float32 log-probabilities, prefill of one page or of all


class Server:
    """An engine, and the arguments of its requests."""

    def __init__(self, folder: Path, tokens: int, tier: str) -> None:
        import vllm

        from primeblocks.kvoffload.adapters.vllm import engine_args

        model = json.loads((folder / "model" / "config.json").read_text())
        layers, heads = model["num_hidden_layers"], model["num_key_value_heads"]
        routes_bytes = layers * model["num_experts_per_tok"]
        self.pages = tokens // PAGE_TOKENS
        # Keys and values of 32 float32 each a head, then the routes, rounded up.
        frame_bytes = layers * 2 * heads * 32 * PAGE_TOKENS * 4 + 4096 * (
            1 + PAGE_TOKENS * routes_bytes // 4096
        )
        room = {"host": (PROMPTS + 1) * self.pages, "disk": self.pages // 2}[tier]
        self.engine = vllm.LLM(
            str(folder / "model"),
            dtype="float32",
            max_model_len=tokens + PAGE_TOKENS,
            max_num_batched_tokens=tokens + PAGE_TOKENS,
            max_num_seqs=1,
            block_size=PAGE_TOKENS,
            num_gpu_blocks_override=self.pages + 8,
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            logprobs_mode="processed_logprobs",
            enable_return_routed_experts=True,
            **engine_args(
                primary_bytes=3 * (self.pages + 4) * frame_bytes,
                host_bytes=room * frame_bytes,
                disk_path=folder / f"pages-{tier}",
                disk_bytes=(PROMPTS + 1) * self.pages * frame_bytes,
                routes_bytes_per_token=routes_bytes,
            ),
        )

    def ask(self, prompt: list[int], salt: str, *, offload: bool) -> tuple[float, Any]:
        start = time.perf_counter()
        (answer,) = self._serve([(prompt, salt)], [_parameters(1, offload=offload)])
        return time.perf_counter() - start, answer

    def ask_behind(self, front: list[int], prompt: list[int], salt: str) -> tuple[float, Any]:
        """Ask while another request runs; the time is that from its end."""
        parameters = [_parameters(FRONT_TOKENS, offload=False), _parameters(1, offload=True)]
        one, other = self._serve([(front, "front"), (prompt, salt)], parameters)
        return other.metrics.first_token_ts - one.metrics.last_token_ts, other

    def _serve(self, prompts: list[tuple[list[int], str]], parameters: list[Any]) -> list[Any]:
        asked = [{"prompt_token_ids": ids, "cache_salt": salt} for ids, salt in prompts]
        return self.engine.generate(asked, parameters, use_tqdm=False)

    def hits(self, tier: str) -> int:
        from primeblocks.kvoffload.adapters.vllm import engine_statistics

        return engine_statistics().tiers.get(tier, {}).get("hits", 0)


def _parameters(max_tokens: int, *, offload: bool) -> Any:
    import vllm

    return vllm.SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args=None if offload else {"kv_transfer_params": {"max_offload_tokens": 0}},
    )


def must_equal(answer: Any, first: Any) -> None:
    one, other = answer.outputs[0], first.outputs[0]
    assert one.token_ids == other.token_ids
    assert np.array_equal(one.routed_experts, other.routed_experts)
    token = one.token_ids[0]
    assert abs(one.logprobs[0][token].logprob - other.logprobs[0][token].logprob) < CLOSE


def main(folder: Path, tokens: int, tier: str, rounds: int) -> None:
    server = Server(folder, tokens, tier)
    prompts = np.random.default_rng(0).integers(4, 2048, (PROMPTS, tokens + 1)).tolist()
    first = [server.ask(prompt, "kept", offload=True)[1] for prompt in prompts]
    times: dict[str, list[float]] = {"computed": [], "hit": [], "queued": []}
    for turn in range(WARM * PROMPTS + 2 * rounds):
        index, name = turn % PROMPTS, ("hit", "queued")[turn % 2]
        computed_s, computed = server.ask(prompts[index], f"new {turn}", offload=False)
        before = server.hits(tier)
        if name == "hit":
            hit_s, hit = server.ask(prompts[index], "kept", offload=True)
        else:
            hit_s, hit = server.ask_behind(prompts[index - 1][:2], prompts[index], "kept")
        assert computed.num_cached_tokens == 0
        assert hit.num_cached_tokens == server.pages * PAGE_TOKENS
        must_equal(computed, first[index])
        must_equal(hit, first[index])
        if turn >= WARM * PROMPTS:
            assert server.hits(tier) - before == server.pages
            times["computed"].append(computed_s)
            times[name].append(hit_s)
    print(json.dumps(times))
    server.engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
