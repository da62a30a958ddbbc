"""Run episodes in which the model calls a calculator. Only rank 0 uses this file.

An episode ends with the first text that does not call the calculator. Limits of turns and tokens
also end an episode. The data set scores the last text of the model as its answer. If the last text
is a call, the answer is empty. In each turn, the template renders only new messages, so each turn
begins with exactly the tokens of earlier turns. One rollout contains a whole episode.
"""

import asyncio
import json
import statistics
import sys
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from primeblocks.async_loop import Rollout, cache_salt
from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
from primeblocks.attachments import Aligned
from primeblocks.capture import Conversation
from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.replay.adapters import vllm as replay_vllm
from primeblocks.weightsync.adapters import vllm as weightsync_vllm

from .calculator import Calculator
from .equations import TOOL, Questions, teacher

PAGE_TOKENS = 32
TIMEOUT_S = 120.0
Speak = Callable[[list[int], list[str]], Awaitable[dict[str, Any]]]


def engine_arguments(
    checkpoint: Path, config: Any, *, max_length: int, max_requests: int, kv_bytes: int
) -> dict[str, Any]:
    """Return the engine's arguments. The adapters of several blocks add arguments."""
    heads = config.num_key_value_heads * config.head_dim
    page_bytes = PAGE_TOKENS * config.num_hidden_layers * 2 * heads * 2
    capture_bytes = replay_vllm.plan_capture_bytes(
        replay_vllm.RouterShape.from_config(config),
        page_tokens=PAGE_TOKENS,
        device_pages=kv_bytes // page_bytes,
    )
    arguments = base_engine_args(
        checkpoint,
        seed=0,
        dtype="bfloat16",
        max_model_len=max_length,
        max_num_seqs=max_requests,
        kv_bytes=kv_bytes,
        block_size=PAGE_TOKENS,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        arguments
        | weightsync_vllm.engine_args()
        | replay_vllm.engine_args(max_bytes=capture_bytes, device=device)
    )


class Episodes:
    """Runs whole episodes: renders texts, calls engine and calculator, and scores answers.

    Set `engine` before you call `one`. The method `demonstration` does not need an engine.
    """

    def __init__(
        self,
        questions: Questions,
        template: ChatTemplate,
        calculator: Calculator,
        *,
        max_turns: int,
        max_tokens: int,
        max_length: int,
    ) -> None:
        self.questions, self.template, self.calculator = questions, template, calculator
        self.max_turns, self.max_tokens, self.max_length = max_turns, max_tokens, max_length
        self.engine: VllmEngine | None = None
        call = {"name": TOOL["function"]["name"], "arguments": {"expression": "1 + 1"}}
        asked = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "So:"}]
        asked[1]["tool_calls"] = [{"type": "function", "function": call}]
        result, last_id = {"role": "tool", "content": "2"}, template.stop_token_ids[0]
        if template.go_on(asked, [result], [TOOL], last_id=last_id) is None:
            sys.exit("This chat template rewrites earlier answers. Choose another checkpoint.")

    async def one(
        self,
        index: int,
        *,
        version: int,
        sample: int = 0,
        draft: object = None,
        temperature: float = 1.0,
    ) -> Rollout:
        """Run an episode. `version` selects the cache salt of all turns.

        A killed run keeps its finished groups. After a kill, an unfinished episode starts again
        from the question, so `draft` is not used.
        """

        async def speak(prompt: list[int], _heard: list[str]) -> dict[str, Any]:
            (made,) = await self.engine.generate(
                prompt,
                max_tokens=min(self.max_tokens, self.max_length - len(prompt)),
                temperature=temperature,
                stop_token_ids=self.template.stop_token_ids,
                cache_salt=cache_salt(version),
                timeout_s=TIMEOUT_S,
            )
            return {
                "sampled": made.token_ids,
                "logprobs": made.logprobs,
                "versions": made.versions,
                "finish_reason": made.finish_reason,
                "attachments": {"routed_experts": Aligned.rows(made.routed_experts)},
            }

        rollout = await self._play(index, speak)
        rows = rollout.attachments["routed_experts"].value
        return replace(rollout, attachments={**rollout.attachments, "routed_experts": rows})

    async def each(self, indices: Sequence[int], *, version: int) -> list[Rollout]:
        """Run one episode for each question."""
        return await asyncio.gather(*(self.one(i, version=version) for i in indices))

    async def solved_greedily(self, *, version: int) -> float:
        """Return the share of held-out questions that are solved at temperature 0."""
        played = (self.one(i, version=version, temperature=0.0) for i in self.questions.held_out)
        return statistics.mean(each.reward == 1.0 for each in await asyncio.gather(*played))

    async def demonstration(self, index: int, *, wrong: bool) -> Rollout:
        """Run an episode in which `teacher` writes the texts of the model."""

        async def speak(_prompt: list[int], heard: list[str]) -> dict[str, Any]:
            said = teacher(self.questions.entries[index], heard, wrong=wrong)
            ids = [*self.template.encode(said), self.template.stop_token_ids[0]]
            return {"sampled": ids, "logprobs": [0.0] * len(ids), "versions": [0] * len(ids)}

        return await self._play(index, speak)

    async def _play(self, index: int, speak: Speak) -> Rollout:
        """Alternate `speak` and the calculator until the model makes no call. Return a rollout."""
        conversation, heard, tools = Conversation(), [], [TOOL]
        messages = [{"role": "user", "content": self.questions.entries[index]["question"]}]
        prompt, answer = self.template.render(messages, tools), ""
        for _ in range(self.max_turns):
            if len(prompt) >= self.max_length:
                break
            said = await speak(prompt, heard)
            conversation.append(prompt, **said)
            ids = [*said["sampled"]]
            has_ended = ids[-1] in self.template.stop_token_ids
            text, calls = self.template.parse(ids[: len(ids) - has_ended], calls=True)
            if not (calls and has_ended):
                answer = text
                break
            made = [{"name": name, "arguments": json.loads(each)} for name, each in calls]
            results = [
                await self.calculator(str(each["arguments"].get("expression"))) for each in made
            ]
            heard += results
            said_so = [{"type": "function", "function": each} for each in made]
            before = [*messages, {"role": "assistant", "content": text, "tool_calls": said_so}]
            added = [{"role": "tool", "content": result} for result in results]
            more = self.template.go_on(before, added, tools, last_id=ids[-1])
            if more is None:  # For instance because the answer has two </think>.
                warnings.warn(
                    "The chat template rewrites an answer: the episode ends.", stacklevel=1
                )
                break
            messages, prompt = [*before, *added], [*prompt, *ids, *more]
        score = self.questions.score(index, answer)
        (rollout,) = conversation.rollouts(prompt_id=index, reward=score)
        return replace(rollout, attachments={**rollout.attachments, "calls": len(heard)})
