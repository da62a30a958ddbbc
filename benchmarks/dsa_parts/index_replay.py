"""Bytes of replayed selections, and what they buy, on a small GLM-5 model with a trained indexer.

The model sees 64 times as many tokens as a query selects, as GLM-5.2 at 131,072. It learns phrases
that come again, and its indexers learn by the divergence from attention, as in DeepSeek-V3.2's
sparse stage. The engine is a copy in bfloat16, the trainer one in float32.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from primeblocks.contrib.adapters.transformers import indexers
from primeblocks.contrib.index_replay import Indices, compare, impose, record
from primeblocks.testing import tiny_models

__all__ = ["figures"]

TOKENS, TOP_K, VOCABULARY, STEPS, BATCHES = 1024, 16, 128, 60, 4
KEPT = (0.0, 0.25, 0.5, 0.75, 1.0)


def build() -> Any:
    model = tiny_models.build(
        "glm_moe_dsa", num_layers=6, hidden=64, num_experts=4, top_k=2, vocab=VOCABULARY,
        dtype="float32", seed=0,
    )  # fmt: skip
    for indexer in indexers(model):
        chooser: Any = indexer.module
        chooser.index_topk = TOP_K
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    return model


def text(generator: torch.Generator) -> Tensor:
    """Draw a document of phrases that come again."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    phrases = [
        torch.randint(4, VOCABULARY, (number(8, 40),), generator=generator) for _ in range(12)
    ]
    parts: list[Tensor] = []
    while sum(map(len, parts)) <= TOKENS:
        parts.append(phrases[number(0, len(phrases))])
    return torch.cat(parts)[: TOKENS + 1]


class _Seen:
    """What indexers are given in a forward, and what attention gave to keys."""

    def __init__(self, model: Any) -> None:
        self.given: dict[int, Any] = {}
        self.attended: dict[int, Tensor] = {}
        self.handles = []
        for place, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            if attention.indexer is None:  # It shares the selection of the layer before.
                continue

            def keep_given(module: Any, args: Any, kwargs: Any, place: int = place) -> None:
                self.given[place] = module, args

            def keep_attended(module: Any, args: Any, out: Any, place: int = place) -> None:
                self.attended[place] = out[1][0].detach().sum(0)

            self.handles += [
                attention.indexer.register_forward_pre_hook(keep_given, with_kwargs=True),
                attention.register_forward_hook(keep_attended),
            ]

    def divergence(self) -> Tensor:
        """KL of attention's probabilities from the indexers' scores, over selected tokens."""
        total = torch.zeros(())
        for place, (module, args) in self.given.items():
            scores = _scores(module, *(x.detach() for x in args[:2]), args[2])
            p = self.attended[place]
            chosen, p = p > 0, p / p.sum(-1, keepdim=True)
            told = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1)
            each = torch.where(chosen, p * (p.clamp_min(1e-9).log() - told), torch.zeros(()))
            total = total + each.sum() / TOKENS
        return total


def _scores(module: Any, hidden: Tensor, q_latent: Tensor, rotary: Any) -> Tensor:
    """The scores of an indexer of transformers, with gradients: its own forward has none."""
    width = module.qk_rope_head_dim
    q = module.wq_b(q_latent).unflatten(-1, (module.n_heads, module.head_dim))[0]
    k = module.k_norm(module.wk(hidden))[0]
    cos, sin = (x[0, :, : width // 2] for x in rotary)

    def rotate(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        a, b, rest = x[..., 0:width:2], x[..., 1:width:2], x[..., width:]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

    q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos, sin)
    weights = module.weights_proj(hidden)[0] * (module.n_heads * module.head_dim) ** -0.5
    return (torch.einsum("thd,sd->ths", q, k).relu() * weights[..., None]).sum(1)


def train(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        tokens = text(generator)
        seen = _Seen(model)
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        for handle in seen.handles:
            handle.remove()
        (cross_entropy(logits, tokens[1:]) + seen.divergence()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def selection(model: Any, tokens: Tensor) -> tuple[Indices, Tensor]:
    """What a model selects, and its log-probabilities of the tokens."""
    with record(indexers(model)) as tape, torch.no_grad():
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
    return tape.indices, _chosen(logits, tokens)


def _chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def ratio(indices: Indices) -> float:
    """Packed bytes over those of an int32 for each place of `top_k`, in layers that select."""
    back = Indices.unpack(bytes(indices.pack()))
    assert back == indices, "what is unpacked is not what was packed"
    return len(indices.pack()) / (4 * indices.ids.size)


def independent() -> tuple[float, float]:
    """Sets without anything in common: the ratio, and the least that any code could have."""
    chance = np.random.default_rng(0)
    rows = np.full((TOKENS, 1, TOP_K), -1)
    least = 0.0
    for place in range(TOKENS):
        size = min(TOP_K, place + 1)
        rows[place, 0, :size] = chance.choice(place + 1, size, replace=False)
        least += math.log2(math.comb(place + 1, size)) / 8
    return ratio(Indices.from_array(rows, layer_ids=[0])), least / (4 * rows.size)


def figures() -> dict[str, tuple[float, str, str]]:
    model = build()
    generator = torch.Generator().manual_seed(2)
    fresh = [text(generator) for _ in range(BATCHES)]
    untrained = float(np.mean([ratio(selection(model, tokens)[0]) for tokens in fresh]))
    train(model)
    engine = copy.deepcopy(model).bfloat16()
    found: dict[str, list[float]] = {}
    for tokens in fresh:
        theirs, _ = selection(engine, tokens)
        own, _ = selection(model, tokens)
        found.setdefault("ratio", []).append(ratio(theirs))
        agreement = compare(theirs, own)
        found.setdefault("overlap", []).append(float(np.mean([*agreement.overlap.values()])))
        wanted: Any = None
        for kept in reversed(KEPT):
            chance = np.random.default_rng(0).random(TOKENS) >= kept
            unknown = np.broadcast_to(chance[:, None], theirs.missing.shape)
            part = Indices.from_array(
                theirs.ids, layer_ids=theirs.layer_ids, missing=unknown.copy()
            )
            with impose(indexers(model), part), torch.no_grad():
                logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            logprobs = _chosen(logits, tokens)
            wanted = logprobs if wanted is None else wanted
            error = float((logprobs - wanted).abs().mean())
            found.setdefault(f"error {kept}", []).append(error)
            found.setdefault(f"bytes {kept}", []).append(ratio(part))
    mean = {name: float(np.mean(values)) for name, values in found.items()}
    code, least = independent()
    curve = {}
    for kept in KEPT:
        prefix = f"dsa.index_replay.rows_{kept:g}"
        curve[f"{prefix}.bytes_ratio"] = (mean[f"bytes {kept}"], "ratio", "int32 ids")
        curve[f"{prefix}.mean_logprob_error"] = (mean[f"error {kept}"], "nats", "all rows")
    return {
        "dsa.index_replay.bytes_ratio": (mean["ratio"], "ratio", "int32 ids"),
        "dsa.index_replay.untrained.bytes_ratio": (untrained, "ratio", "int32 ids"),
        "dsa.index_replay.independent.bytes_ratio": (code, "ratio", "int32 ids"),
        "dsa.index_replay.independent.least_possible": (least, "ratio", "int32 ids"),
        "dsa.index_replay.overlap_without_replay": (mean["overlap"], "ratio", ""),
        **curve,
    }
