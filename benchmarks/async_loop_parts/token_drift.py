"""Random conversations of agents that know text alone, recorded token by token, and tokenised anew.

A real tokenizer (mistral-common's tekken of 131,072 tokens) and a ChatML template; an engine that
answers with words, code, numbers, signs and reasoning, a given fraction of its merges left out, for
a model need not sample what its tokenizer would write; one answer in ten is cut anywhere. Agents
call tools, strip blanks, leave reasoning out, change what they had said, drop the oldest turns, ask
again; weights are updated in between.

Recorded: each trained token must be what the engine sampled behind exactly the tokens before it in
its rollout, with that log-probability and version, once. Tokenised anew, as a trainer does that is
given the messages: ids of each assistant's message are compared with those that were sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.integrations.mistral.tokenizer import MistralConverter

from primeblocks.async_loop import Rollout
from primeblocks.capture import Recorder
from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.capture.request import read_request

__all__ = ["Tokens", "converse", "figures"]

CONVERSATIONS = 10_000
DROPOUT = (0.0, 0.01, 0.05)  # fraction of merges that the engine leaves out
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PIECES = (
    "the answer is therefore", " we compute ", "Überprüfung", "  \n", "x_1 = foo(bar[3:-1])\n",
    "3.14159", " 1234567", "naïve façade", "数据集", "🙂🙂", "\t\tif n % 2 == 0:", "\n\n- item",
    "http://a.example/q?x=1&y=2", " indistinguishable", '{"key": [1, 2, 3], "ok": true}', "'s",
    "  trailing  ",
)  # fmt: skip


class Tokens:
    """The tokenizer, its template, and the same tokenizer with some merges left out."""

    def __init__(self) -> None:
        file = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
        backend = MistralConverter(str(file)).converted()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
        self.tokenizer.add_special_tokens({"additional_special_tokens": [START, END]})
        self.tokenizer.chat_template = TEMPLATE
        self.template = ChatTemplate(self.tokenizer)
        self.engine = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        self.end = self.tokenizer.convert_tokens_to_ids(END)


class Engine:
    """Answers at random, and remembers what each token was sampled behind."""

    def __init__(self, tokens: Tokens, g: np.random.Generator) -> None:
        self.tokens, self.g, self.version = tokens, g, 0
        self.calls: list[tuple[list[int], list[int], int]] = []

    async def __call__(self, prompt: Sequence[int], **_: Any) -> Any:
        g = self.g
        text = "".join(PIECES[i] for i in g.integers(len(PIECES), size=g.integers(1, 12)))
        if g.random() < 0.2:
            text = f"<think>{text[::-1]}</think>{text}"
        ids = self.tokens.engine.encode(text, add_special_tokens=False).ids
        ids = (
            ids[: int(g.integers(1, len(ids) + 1))] if g.random() < 0.1 else [*ids, self.tokens.end]
        )
        call = len(self.calls)
        self.calls.append((list(prompt), ids, self.version))
        return SimpleNamespace(
            token_ids=ids,
            logprobs=-1.0 - call - np.arange(len(ids)) / 65536,  # Of this token alone.
            versions=np.full(len(ids), self.version),
            finish_reason="stop" if ids[-1] == self.tokens.end else "length",
            routed_experts=None,
        )

    def wrong(self, rollouts: Sequence[Rollout]) -> Counter[str]:
        """Count trained tokens, and those that were not sampled there or are not their own."""
        found: Counter[str] = Counter()
        seen: Counter[float] = Counter()
        for rollout in rollouts:
            places = np.flatnonzero(rollout.loss_mask)
            for i, logprob in zip(places.tolist(), rollout.logprobs[places].tolist(), strict=True):
                call = int(-1.0 - logprob)
                place = round((-1.0 - logprob - call) * 65536)
                prompt, ids, version = self.calls[call]
                at, tokens = rollout.prompt_length + i, rollout.tokens
                is_sampled = ids[place] == tokens[at] and at == len(prompt) + place
                if is_sampled and (place == 0 or i == places[0]):  # Then the others follow.
                    is_sampled = tokens[:at].tolist() == prompt + ids[:place]
                found["trained"] += 1
                found["not sampled"] += not is_sampled
                found["of another version"] += int(rollout.versions[i]) != version
                seen[logprob] += 1
        found["trained twice"] = sum(count - 1 for count in seen.values())
        found["sampled"] = sum(len(ids) for _, ids, _ in self.calls)
        return found


def _react(messages: list[dict], answer: str, g: np.random.Generator) -> list[dict]:
    """What the agent asks next: mostly, what was said, its answer, and something new."""
    kind = g.random()
    if kind < 0.04:
        return messages  # Asks again.
    said = answer
    if kind < 0.14:
        said = answer.strip()
    elif kind < 0.22:
        said = answer.partition("</think>")[2] or answer
    role = "user" if g.random() < 0.6 else "tool"
    new = [*messages, {"role": "assistant", "content": said}]
    new.append(
        {"role": role, "content": PIECES[int(g.integers(len(PIECES)))] * int(g.integers(1, 4))}
    )
    if 0.22 <= kind < 0.26 and len(new) > 3:
        new[int(g.integers(1, len(new) - 2))]["content"] += " (changed)"
    elif 0.26 <= kind < 0.29 and len(new) > 5:
        del new[1:3]
    return [dict(each) for each in new]


def _anew(tokens: Tokens, asked: list[dict], ids: list[int]) -> tuple[int, int]:
    """Ids of an answer's message in a chat that is tokenised whole: how many, how many differ."""
    text = tokens.tokenizer.decode([x for x in ids if x != tokens.end])
    chat = [*asked, {"role": "assistant", "content": text}]
    before = tokens.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokens.tokenizer.apply_chat_template(chat, tokenize=False)
    encoded = tokens.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    stop = whole.rindex(END) + len(END)
    offsets = encoded["offset_mapping"]
    new = [
        x
        for x, (_, end) in zip(encoded.input_ids, offsets, strict=True)
        if len(before) < end <= stop
    ]
    same = 0
    while same < min(len(new), len(ids)) and new[same] == ids[same]:
        same += 1
    tail = 0
    while tail < min(len(new), len(ids)) - same and new[-1 - tail] == ids[-1 - tail]:
        tail += 1
    return len(new), len(new) - same - tail


async def converse(
    tokens: Tokens, seed: int, *, dropout: float, realigned: int = 0
) -> Counter[str]:
    """Play one conversation; return what was trained, wrong, and how turns went on."""
    g = np.random.default_rng(seed)
    tokens.engine.model.dropout = dropout or None
    engine = Engine(tokens, g)
    recorder = Recorder(engine, tokens.template, max_realigned_tokens=realigned)
    messages: list[dict] = [{"role": "system", "content": "Be brief."}]
    messages.append({"role": "user", "content": PIECES[int(g.integers(len(PIECES)))]})
    found: Counter[str] = Counter()
    async with recorder.session() as session:
        for _ in range(int(g.integers(2, 9))):
            body: Mapping[str, Any] = {"model": "policy", "messages": messages}
            answer = await session.ask(read_request(json.dumps(body).encode(), is_chat=True))
            count, differ = _anew(tokens, messages, engine.calls[-1][1])
            found["anew"] += count
            found["anew, not sampled"] += differ
            found["answers"] += 1
            found["answers that differ"] += differ > 0
            engine.version += int(g.random() < 0.3)
            messages = _react(messages, answer.content, g)
        found += engine.wrong(session.rollouts())
        found["dropped"] += sum(turn.dropped for turn in session.conversation.turns)
        found["conversations that differ"] += found["anew, not sampled"] > 0
        found.update({str(kind): n for kind, n in session.conversation.counts.items()})
    return found


def figures() -> dict[str, tuple[float, str, str]]:
    tokens = Tokens()
    shown: dict[str, tuple[float, str, str]] = {}
    for dropout in DROPOUT:
        found: Counter[str] = Counter()
        for seed in range(CONVERSATIONS):
            found += asyncio.run(converse(tokens, seed, dropout=dropout))
        assert found["trained"] == found["sampled"], found
        name = f"async_loop.token_drift.{dropout:g}"
        for what in ("not sampled", "of another version", "trained twice"):
            shown[f"{name}.recorded.{what.replace(' ', '_')}"] = (found[what], "tokens", "")
        wrong = found["anew, not sampled"] / found["anew"]
        shown[f"{name}.trained_tokens"] = (found["trained"], "tokens", "")
        shown[f"{name}.tokenised_anew.wrong_tokens"] = (wrong, "of trained", "")
        wrong = found["conversations that differ"] / CONVERSATIONS
        shown[f"{name}.tokenised_anew.wrong_conversations"] = (wrong, "of all", "")
        turns = found["answers"]
        shown[f"{name}.turns"] = (turns, "turns", "")
        for kind in ("clean", "fork"):
            shown[f"{name}.{kind}"] = (found[kind] / turns, "of turns", "")
    return shown
