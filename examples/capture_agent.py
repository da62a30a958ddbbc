"""Record the tokens of an agent that does not know about the training.

    python examples/capture_agent.py

The agent uses only the `openai` client, with a base URL and a key. The agent asks a model, runs the
tools that the model calls, and asks the model again. `CaptureServer` receives the agent's requests,
renders the messages and asks vLLM for an answer. For each turn, `CaptureServer` stores the ids,
log-probabilities, versions and routes that vLLM returned. The tiny model learns within seconds to
call a tool with the name of an article, and to repeat the tool's result. In the middle of the
conversation, the engine's weights get a new version number. The script prints the conversation and
the rollouts. The script also prints whether the trained tokens and their log-probabilities are
exactly those that the engine returned.
"""

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

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
import openai
import torch
from tokenizers import AddedToken, ByteLevelBPETokenizer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from primeblocks.async_loop import cache_salt
from primeblocks.async_loop.adapters.vllm import VllmEngine, base_engine_args
from primeblocks.capture.adapters.transformers import ChatTemplate
from primeblocks.capture.adapters.uvicorn import CaptureServer
from primeblocks.replay.adapters.vllm import engine_args
from primeblocks.testing import tiny_models

QUESTIONS = 3
STEPS, BATCH, LR = 150, 8, 3e-3
TIMEOUT_S, START_S = 120.0, 600.0
TEMPLATE = """
{%- if tools %}{{- "<|im_start|>system\\n" }}
    {%- for tool in tools %}{{- tool.function.name + "\\n" }}{%- endfor %}{{- "<|im_end|>\\n" }}
{%- endif %}
{%- for m in messages %}{{- "<|im_start|>" + m.role + "\\n" + m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + "}</tool_call>" }}
    {%- endfor %}{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up the price of an article.",
        "parameters": {"type": "object", "properties": {"article": {"type": "string"}}},
    },
}
PRICES = {"tea": "3", "milk": "2", "bread": "4"}


# ---- The agent ----------------------------------------------------------------------------------


async def agent(client: openai.AsyncOpenAI, articles: list[str]) -> list[dict[str, Any]]:
    """Ask for the price of each article. Return the messages."""
    messages: list[Any] = []
    for article in articles:
        messages.append({"role": "user", "content": f"{article}?"})
        while True:
            ask = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 60}
            ask |= {"temperature": 0}  # The model was taught its greedy answers.
            async with client.chat.completions.stream(**ask) as events:
                async for _ in events:
                    pass
                message = (await events.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                asked = json.loads(call.function.arguments).get("article")
                said = PRICES.get(str(asked), "unknown")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return messages


# ---- The model ----------------------------------------------------------------------------------


def conversation(articles: list[str]) -> list[dict[str, Any]]:
    """Return a conversation that the model must learn to write."""
    messages: list[dict[str, Any]] = []
    for article in articles:
        call = {"name": "price", "arguments": {"article": article}}
        messages += [
            {"role": "user", "content": f"{article}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": PRICES[article]},
            {"role": "assistant", "content": f"{article}: {PRICES[article]}"},
        ]
    return messages


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on this file, and add ChatML's special tokens."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator([Path(__file__).read_text()], vocab_size=600, show_progress=False)
    words = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
    made.add_tokens([AddedToken(word, special=True) for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, chat_template=TEMPLATE)


def teach(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast) -> float:
    """Train the model on conversations about prices. Return the last loss."""
    draw = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for _ in tqdm(range(STEPS), desc="teach"):
        texts = [
            tokenizer.apply_chat_template(
                conversation(draw.choice([*PRICES], QUESTIONS).tolist()),
                tools=[TOOL],
                tokenize=False,
            )
            for _ in range(BATCH)
        ]
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        length = max(map(len, ids))
        tokens = torch.tensor([each + [end] * (length - len(each)) for each in ids])
        logits = model(tokens).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


# ---- The recording ------------------------------------------------------------------------------


async def record(path: Path, template: ChatTemplate) -> None:
    returned: list[Any] = []
    arguments = base_engine_args(
        path, seed=0, dtype="float32", max_model_len=1024, max_num_seqs=4, kv_bytes=32 << 20
    )
    arguments |= engine_args(max_bytes=16 << 20, device="cpu")
    async with await VllmEngine.start(arguments, timeout_s=START_S) as engine:

        async def generate(prompt: list[int], **options: Any) -> Any:
            version = int(len(returned) >= QUESTIONS)
            if len(returned) == QUESTIONS:  # A trainer would publish new weights here.
                await engine.call(engine.llm.update_weight_version("1"), timeout_s=TIMEOUT_S)
            salt = cache_salt(version)
            (completion,) = await engine.generate(prompt, cache_salt=salt, **options)
            returned.append(completion)
            return completion

        async with (
            CaptureServer(generate, template) as server,
            server.session(prompt_id="prices") as session,
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client,
        ):
            messages = await agent(client, [*PRICES][:QUESTIONS])
    for message in messages:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        print(f"{message['role']:>10}: {message.get('content') or ''}{' '.join(calls)}")
    answers = [each["content"] for each in messages if each["role"] == "assistant"][1::2]
    right = sum(map(str.endswith, answers, PRICES.values()))
    rollouts = session.rollouts(reward=right / QUESTIONS)
    report(session, rollouts, returned)


def report(session: Any, rollouts: Any, returned: list[Any]) -> None:
    print("\nturns:", ", ".join(f"{n} {each}" for each, n in session.conversation.counts.items()))
    sampled = [token for completion in returned for token in completion.token_ids]
    logprobs = [each for completion in returned for each in completion.logprobs]
    trained, kept = [], []
    for rollout in rollouts:
        mask = rollout.loss_mask
        trained += rollout.completion[mask].tolist()
        kept += rollout.logprobs[mask].tolist()
        rows = rollout.attachments["routed_experts"]
        print(
            f"rollout: {len(rollout.tokens)} tokens, {mask.sum()} of them sampled, by versions "
            f"{np.unique(rollout.versions[mask]).tolist()}; routes {rows.value.shape}; "
            f"reward {rollout.reward:.2f}"
        )
    print("tokens and log-probabilities are the engine's:", (trained, kept) == (sampled, logprobs))


def main() -> None:
    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        sizes = {"num_layers": 2, "hidden": 128, "num_experts": 8, "vocab": len(tokenizer)}
        model = tiny_models.build("qwen3_moe", dtype="float32", **sizes).train()
        print(f"loss after {STEPS} steps: {teach(model, tokenizer):.3f}\n")
        model.save_pretrained(folder)
        asyncio.run(record(Path(folder), ChatTemplate(tokenizer)))


if __name__ == "__main__":
    main()
