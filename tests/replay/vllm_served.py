"""What tests with a real vLLM share: the model that it serves, and what came of requests."""

from typing import Any, NamedTuple

import numpy as np
import torch

from primeblocks.replay import Routes
from primeblocks.replay.adapters.vllm import RouterShape, routes_from_output

PAGE_TOKENS = 32
# One dense layer, three that route, sigmoid scores.
EXACT = RouterShape(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)


class Served(NamedTuple):
    """Tokens of prompt and answer, log-probabilities of the answer, prompt tokens from a cache."""

    tokens: np.ndarray
    logprobs: np.ndarray
    cached: int
    routes: Routes


def served(requests: list[Any], shape: RouterShape = EXACT, start: int = 0) -> list[Served]:
    """Of each request; routes begin at prompt token `start`."""
    return [_served(request, shape, start) for request in requests]


def _served(request: Any, shape: RouterShape, start: int) -> Served:
    output, prompt = request.outputs[0], len(request.prompt_token_ids)
    pairs = zip(output.logprobs, output.token_ids, strict=True)
    return Served(
        np.array(tokens_of(request)),
        np.array([at[token].logprob for at, token in pairs]),
        request.num_cached_tokens,
        routes_from_output(output, shape, prompt_tokens=prompt, prompt_start=start),
    )


def tokens_of(request: Any) -> list[int]:
    return [*request.prompt_token_ids, *request.outputs[0].token_ids]


def sampling(tokens: int, **settings: Any) -> Any:
    import vllm

    settings = {"temperature": 1.0} | settings
    return vllm.SamplingParams(
        max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False, **settings
    )


def prompts(generator: np.random.Generator, count: int, length: int) -> list[list[int]]:
    return generator.integers(4, 512, (count, length)).tolist()


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """log p(token | tokens before it), for every token but the first."""
    ids = torch.from_numpy(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
