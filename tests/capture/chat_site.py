"""A real byte-level BPE with a chat template, and an engine that writes what it is told to."""

import base64
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mistral_common
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from primeblocks.capture.adapters.transformers import ChatTemplate

# ChatML with calls as Qwen and Hermes write them. With `strip`, as some models do, reasoning is
# left out of every answer but the last.
TEMPLATE = """
{%- if tools or messages[0].role == "system" %}
    {{- "<|im_start|>system\\n" }}
    {%- if messages[0].role == "system" %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}{{- "\\n<tools>" }}
        {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
        {{- "\\n</tools>" }}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if strip and not loop.last %}
            {%- set content = content.split("</think>")[-1] %}
        {%- endif %}
        {{- "<|im_start|>assistant\\n" + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- "<|im_start|>user" }}
        {%- endif %}
        {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- "<|im_end|>\\n" }}
        {%- endif %}
    {%- elif message.role == "user" %}
        {{- "<|im_start|>user\\n" + message.content + "<|im_end|>\\n" }}
    {%- elif message.role == "system" and not loop.first %}
        {{- raise_exception("only the first message may be the system's") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


@cache
def tokenizer(size=20_000):
    """Return the first tokens of Tekken, Mistral's vocabulary of 2024, with ChatML's own."""
    path = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    data = json.loads(path.read_text())
    shown = _shown_bytes()
    words = [base64.b64decode(each["token_bytes"]) for each in data["vocab"][:size]]
    ranks = {word: rank for rank, word in enumerate(words)}
    merges = []
    for word in words[256:]:
        parts = ((word[:i], word[i:]) for i in range(1, len(word)))
        known = [(a, b) for a, b in parts if a in ranks and b in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    show = lambda word: "".join(shown[byte] for byte in word)  # noqa: E731
    made = Tokenizer(
        models.BPE(
            {show(word): rank for word, rank in ranks.items()},
            [(show(a), show(b)) for a, b in merges],
        )
    )
    pattern = Regex(data["config"]["pattern"])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = ByteLevel()
    made.add_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, chat_template=TEMPLATE, model_max_length=1 << 20
    )


def _shown_bytes():
    """Return the characters by which byte-level vocabularies show bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in shown]
    return shown | {byte: chr(256 + i) for i, byte in enumerate(others)}


@cache
def template(**options):
    return ChatTemplate(tokenizer(), **options)


def spelled(text, rng):
    """Return ids of a text, some words of which are written byte by byte, as models may."""
    ids = []
    for token in template().encode(text):
        word = template().parse([token], calls=False)[0]
        split = "\ufffd" not in word and token < 20_000 and rng.random() < 0.5
        ids += [*word.encode()] if split else [token]
    return ids


class Engine:
    """Answers with the texts that it is given, and keeps what preceded each token.

    `write` gives a text for a prompt as text; `end=False` cuts the answer. Weights change with
    every answer, in its midst.
    """

    def __init__(self, write, seed=0):
        self.write, self.rng = write, np.random.default_rng(seed)
        self.seen, self.version, self.calls, self.options = {}, 0, 0, []

    async def __call__(self, prompt, **options):
        self.calls += 1
        self.options.append(options)
        text = self.write(template().parse(prompt, calls=False)[0])
        ids = spelled(text, self.rng)
        finish = "length" if len(ids) >= options["max_tokens"] else "stop"
        ids = (
            ids[: options["max_tokens"]]
            if finish == "length"
            else [*ids, template().stop_token_ids[0]]
        )
        before, logprobs = tuple(prompt), []
        for i, token in enumerate(ids):
            logprobs.append(-1.0 - len(self.seen))
            version = self.version + (2 * i >= len(ids))
            self.seen[logprobs[-1]] = (before, token, version)
            before += (token,)
        versions = np.array([self.seen[each][2] for each in logprobs])
        self.version += 1
        rows = np.array([[token % 7] for token in before[:-1]], np.uint8)
        return SimpleNamespace(
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=finish,
            routed_experts=rows,
        )

    def check(self, rollouts):
        """Assert that every token sampled is trained once, behind those it was sampled behind."""
        trained = []
        for rollout in rollouts:
            tokens, start = tuple(rollout.tokens.tolist()), rollout.prompt_length
            for i in np.flatnonzero(rollout.loss_mask).tolist():
                logprob = float(rollout.logprobs[i])
                assert self.seen[logprob] == (
                    tokens[: start + i],
                    tokens[start + i],
                    rollout.versions[i],
                )
                trained.append(logprob)
            rows = rollout.attachments["routed_experts"]
            assert (rows.start, rows.stop) == (0, len(tokens) - 1)
            assert rows.value[:, 0].tolist() == [token % 7 for token in tokens[:-1]]
        assert sorted(trained) == sorted(self.seen)
