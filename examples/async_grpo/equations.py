"""A task of `reasoning-gym`: equations, a calculator tool, and demonstrations.

The remaining files of the example use only questions, answers and scores. For another data set,
change `DATASET` and `SETTINGS`, and replace `teacher`. If your checkpoint can already use tools,
you do not need `teacher`.
"""

import json
import re
import tempfile
from pathlib import Path

import mistral_common
import reasoning_gym
from transformers import PreTrainedTokenizerFast
from transformers.integrations.mistral.tokenizer import MistralConverter

DATASET = "simple_equations"
SETTINGS = {"min_terms": 2, "max_terms": 2, "max_value": 12}
SIZE, HELD_OUT = 8000, 128  # questions
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
# ChatML, with tool calls as in Qwen and Hermes. A tiny model needs no description of its tool.
TEMPLATE = """
{%- for m in messages %}{{- "<|im_start|>" + m.role + "\\n" + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + "}</tool_call>" }}
    {%- endfor %}{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
WORDS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
FORM = re.compile(r"(?:(\d+) - )?(?:(\d+)\*)?[a-z](?: ([+-]) (\d+))? = (-?\d+)")


class Questions:
    """The data set, with the indices of training questions and of held-out questions."""

    def __init__(self, seed: int) -> None:
        self.dataset = reasoning_gym.create_dataset(DATASET, seed=seed, size=SIZE, **SETTINGS)
        self.entries = list(self.dataset)
        held_out = {entry["question"] for entry in self.entries[:HELD_OUT]}
        self.held_out = range(HELD_OUT)
        self.training = [
            i for i, entry in enumerate(self.entries) if entry["question"] not in held_out
        ]

    def score(self, index: int, answer: str) -> float:
        """Return the score that the data set gives to an answer."""
        return self.dataset.score_answer(answer, self.entries[index])


def teacher(entry: dict, heard: list[str], *, wrong: bool) -> str:
    """Return the next text of a demonstration: a call of the calculator, or the final answer.

    For the equation `x + 12 = 92`, a wrong demonstration computes `92 + 12`.
    """
    before, factor, sign, after, right = FORM.fullmatch(entry["metadata"]["equation"]).groups()
    expressions = []
    if before:
        expressions.append(f"{before} {'+' if wrong else '-'} {right}")
    if after:
        expressions.append(f"{right} {'-' if (sign == '+') != wrong else '+'} {after}")
    if factor:
        operation = "*" if wrong and not expressions else "/"
        expressions.append(f"{heard[-1] if heard else right} {operation} {factor}")
    if len(heard) == len(expressions):
        return heard[-1] if heard else right
    call = {"name": "calculator", "arguments": {"expression": expressions[len(heard)]}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the first tokens of Mistral's Tekken of 2024 (`mistral_common`)."""
    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    cut = json.loads(data.read_text())
    cut["config"] |= {"default_vocab_size": vocab - len(WORDS), "default_num_special_tokens": 20}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(cut, file)
        file.flush()
        made = MistralConverter(file.name).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS})
    return tokenizer
