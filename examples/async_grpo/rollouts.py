"""Sample rollouts with rewards, and make the engine's arguments.

Only processes with an engine use this file.
"""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from primeblocks.async_loop import Rollout, cache_salt
from primeblocks.async_loop.adapters.vllm import (
    Completion,
    VllmEngine,
    base_engine_args,
    generate_in_parts,
)
from primeblocks.async_loop.ledger import Draft
from primeblocks.exact.adapters.vllm import ARCHITECTURE as EXACT
from primeblocks.kvoffload.adapters import vllm as kvoffload_vllm
from primeblocks.replay.adapters import vllm as replay_vllm
from primeblocks.weightsync.adapters import vllm as weightsync_vllm

from .task import EOS, SNIPPET, prompt_of, reward_of

# The device cache is too small for all requests at a time. vLLM's own pool in host memory is small
# too, because pages only pass through this pool on their way to our store.
PAGE_TOKENS, DEVICE_PAGES, PASSAGE_PAGES, HOST_PAGES, DISK_PAGES = 32, 48, 4, 128, 256
ENGINE_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PART_TOKENS = 5  # of an answer, after which a run with a journal saves the answer
TIMEOUT_S = 120.0


def engine_arguments(
    checkpoint: Path,
    config: Any,
    *,
    max_requests: int,
    max_off_policy_steps: int,
    use_exact: bool = False,
) -> dict[str, Any]:
    """Return the engine's arguments. The adapters of several blocks add arguments."""
    element_bytes = 4 if use_exact else 2
    key_or_value = config.num_key_value_heads * config.head_dim * element_bytes
    page_bytes = PAGE_TOKENS * config.num_hidden_layers * 2 * key_or_value
    capture_bytes = replay_vllm.plan_capture_bytes(
        replay_vllm.RouterShape.from_config(config),
        page_tokens=PAGE_TOKENS,
        device_pages=DEVICE_PAGES,
        offloaded_pages=PASSAGE_PAGES + HOST_PAGES + DISK_PAGES,
    )
    arguments = base_engine_args(
        checkpoint,
        dtype="float32" if use_exact else "bfloat16",
        max_model_len=128,
        max_num_seqs=max_requests,
        kv_bytes=DEVICE_PAGES * page_bytes,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=DEVICE_PAGES,
        disable_log_stats=False,  # the page store reports through vLLM's metrics
    )
    return (
        arguments
        | weightsync_vllm.engine_args()
        | (
            {"hf_overrides": EXACT}
            if use_exact
            else replay_vllm.engine_args(max_bytes=capture_bytes, device=ENGINE_DEVICE)
        )
        | kvoffload_vllm.engine_args(
            primary_bytes=PASSAGE_PAGES * page_bytes,
            host_bytes=HOST_PAGES * page_bytes,
            disk_path=checkpoint.parent / "pages",
            disk_bytes=2 * DISK_PAGES * page_bytes,
            max_staleness=max_off_policy_steps,
        )
    )


class Rollouts:
    """Samples rollouts: encodes texts, calls the engine, and computes rewards."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.tokens = 0

    async def one(
        self, text: str, *, version: int, sample: int = 0, draft: Draft | None = None
    ) -> Rollout:
        """Sample a rollout, or continue a saved `draft`. `version` selects the cache salt."""
        answer = await self.ask(text, version=version, temperature=1.0, sample=sample, draft=draft)
        self.tokens += len(answer.token_ids)
        return answer.to_rollout(prompt_id=text, reward=reward_of(text, answer.token_ids))

    async def each(self, texts: Sequence[str], *, version: int) -> list[Rollout]:
        """Sample one rollout for each text."""
        return await asyncio.gather(*(self.one(text, version=version) for text in texts))

    async def greedy_reward(self, texts: Sequence[str], *, version: int) -> float:
        asked = [self.ask(text, version=version, temperature=0.0) for text in texts]
        answers = zip(texts, await asyncio.gather(*asked), strict=True)
        return statistics.mean(reward_of(text, answer.token_ids) for text, answer in answers)

    async def ask(
        self,
        text: str,
        *,
        version: int,
        temperature: float,
        sample: int = 0,
        draft: Draft | None = None,
    ) -> Completion:
        options: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": SNIPPET[1] + 4,
            "stop_token_ids": [EOS],
            "cache_salt": cache_salt(version),
            "extra_args": kvoffload_vllm.request_args(version),
            "timeout_s": TIMEOUT_S,
        }
        prompt = prompt_of(text)
        if draft is None:
            (answer,) = await self.engine.generate(prompt, **options)
            return answer
        return await generate_in_parts(
            self.engine, prompt, draft=draft, sample=sample, part_tokens=PART_TOKENS, **options
        )
