"""The arithmetic of the split, then twelve faults of real models whose cause must be named."""

from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UsageError
from primeblocks.fp8 import Tile, quantize
from primeblocks.replay import KeptTokens, Routes, attribute, impose, record
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.sampling import kept_logprobs, kept_tokens
from primeblocks.testing import tiny_models


def k3_of(log_ratio):
    return torch.expm1(log_ratio) - log_ratio


def offsets(effects, tokens=50):
    """An `evaluate` whose log-ratio is a sum of effects, and a product of two of them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(tokens, dtype=torch.float64, generator=generator)

    def evaluate(removed):
        present = {name: size for name, size in effects.items() if name not in removed}
        together = 0.3 if {"a", "b"} <= present.keys() else 0.0
        return (sum(present.values()) + together) * noise - 2.0

    return evaluate, torch.full((tokens,), -2.0, dtype=torch.float64)


def test_shares_and_residual_add_up_to_the_total():
    evaluate, rollout = offsets({"a": 0.5, "b": 0.2, "c": 0.0})
    report = attribute(evaluate, rollout, causes=["a", "b", "c"])
    assert report.evaluations == 8
    assert report.residual == 0
    assert sum(c.share for c in report.causes) == pytest.approx(report.total - report.residual)
    assert report.total == pytest.approx(k3_of(evaluate(frozenset()) - rollout).mean().item())
    assert [cause.name for cause in report.causes] == ["a", "b", "c"]
    assert report.causes[-1].share == report.causes[-1].alone == 0
    assert report.dominant == "a"


def test_shares_are_the_mean_over_all_orders():
    evaluate, rollout = offsets({"a": 0.5, "b": 0.2, "c": -0.1})
    report = attribute(evaluate, rollout, causes=["a", "b", "c"])

    def value(removed):
        return k3_of(evaluate(frozenset(removed)) - rollout).mean().item()

    for cause in report.causes:
        gains = []
        for order in permutations("abc"):
            before = order[: order.index(cause.name)]
            gains.append(value(before) - value((*before, cause.name)))
        assert cause.share == pytest.approx(sum(gains) / 6)
        assert cause.alone == pytest.approx(value(()) - value(cause.name))
        assert cause.last == pytest.approx(value(set("abc") - {cause.name}) - value("abc"))


def test_what_no_cause_explains_is_the_residual():
    evaluate, rollout = offsets({"a": 0.05, "hidden": 0.5})
    report = attribute(evaluate, rollout, causes=["a"])
    assert report.residual > report.causes[0].share
    assert report.dominant is None
    assert "residual" in report.table()
    assert "100.0%" in report.table()


def test_masked_tokens_do_not_count():
    evaluate, rollout = offsets({"a": 0.5})
    mask = torch.arange(50) < 10
    report = attribute(evaluate, rollout, causes=["a"], mask=mask)
    part = attribute(lambda removed: evaluate(removed)[:10], rollout[:10], causes=["a"])
    assert report == part
    assert report.tokens == 10


def test_bad_input_is_refused():
    evaluate, rollout = offsets({"a": 0.5})
    for causes in ([], ["a", "a"]):
        with pytest.raises(UsageError, match="distinct and not empty"):
            attribute(evaluate, rollout, causes=causes)
    with pytest.raises(UsageError, match="8192 evaluations"):
        attribute(evaluate, rollout, causes=[str(i) for i in range(13)])
    with pytest.raises(ShapeError, match=r"returned \[49\] for \[50\]"):
        attribute(lambda removed: evaluate(removed)[1:], rollout, causes=["a"])
    with pytest.raises(ShapeError, match="at least one.*0 kept"):
        attribute(evaluate, rollout, causes=["a"], mask=torch.zeros(50))
    with pytest.raises(UsageError, match=r"\['a'\] removed .* not finite"):
        attribute(lambda removed: evaluate(removed) / (0 if removed else 1), rollout, causes=["a"])


# --- twelve faults -------------------------------------------------------------------------------

SEQUENCES, LENGTH, PREFIX = 8, 40, 16
SIZES = {"num_layers": 3, "hidden": 64, "num_experts": 16, "top_k": 2, "vocab": 128}
TOKENS = torch.randint(4, 128, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))


def power_of_two_scales(x):
    """1 x 128 tiles whose scales are powers of two (UE8M0), rounded up."""
    flat = x.float().reshape(-1, x.shape[-1])
    out = []
    for tile in flat.split(128, dim=1):
        scale = torch.exp2((tile.abs().amax(1, keepdim=True) / 448).log2().ceil())
        out.append((tile / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(out, 1).reshape(x.shape).to(x.dtype)


def by_tile(tile):
    return lambda x: (
        quantize(x.reshape(-1, x.shape[-1]), tile).dequantize().to(x.dtype).reshape(x.shape)
    )


RECIPES = {
    "1x128": by_tile(Tile(1, 128)),
    "128x128": by_tile(Tile(128, 128)),
    "ue8m0": power_of_two_scales,
}


@dataclass(frozen=True, eq=False)
class Side:
    """How one side computes. Each field is a cause; removing it takes the engine's value."""

    weights: int = 4  # version
    prefix: int | None = None  # version that computed the prefix's KV, if another
    recipe: str = "1x128"
    dtype: torch.dtype = torch.float32
    router_dtype: torch.dtype | None = None
    head_dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # of the prefix's KV, where narrower
    temperature: float = 1.0
    kept: KeptTokens | None = None
    routes: Routes | None = None


@cache
def version(number):
    """Weights after so many updates, each a small random step."""
    model = tiny_models.build("qwen3_moe", dtype="float32", init_std=0.08, **SIZES)
    generator = torch.Generator().manual_seed(7)
    for _ in range(number):
        for parameter in model.parameters():
            step = torch.randn(parameter.shape, generator=generator)
            parameter.data += 0.004 * step
    return model.state_dict()


@cache
def built(number, recipe, dtype, router_dtype):
    model = tiny_models.build("qwen3_moe", dtype="float32", **SIZES)
    model.load_state_dict(version(number))
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "proj" in name:
            parameter.data = RECIPES[recipe](parameter.data)
        if router_dtype is not None and name.endswith("gate.weight"):
            parameter.data = parameter.data.to(router_dtype).float()
    return model.to(dtype)


def part(routes, begin, end):
    rows = torch.arange(SEQUENCES * LENGTH).reshape(SEQUENCES, LENGTH)[:, begin:end]
    return routes.take(rows.flatten().numpy())


@torch.no_grad()
def logits_of(side):
    """Logits of every position after the prefix, and the routes of all."""
    older = side.weights if side.prefix is None else side.prefix
    settings = side.recipe, side.dtype, side.router_dtype
    first, second = built(older, *settings), built(side.weights, *settings)
    tapes, cache_of_prefix = [], None
    for model, begin, end in ((first, 0, PREFIX), (second, PREFIX, LENGTH)):
        ids = TOKENS[:, begin:end]
        found = routers(model)
        given = None if side.routes is None else part(side.routes, begin, end)
        with record(found) as tape:
            if given is None:
                out = model.model(ids, past_key_values=cache_of_prefix, use_cache=True)
            else:
                with impose(found, given):
                    out = model.model(ids, past_key_values=cache_of_prefix, use_cache=True)
        cache_of_prefix = narrowed(out.past_key_values, side.kv_dtype)
        tapes.append(tape.routes)
    computed_in = torch.float32 if side.head_dtype == torch.float32 else torch.bfloat16
    head = second.lm_head.weight.to(side.head_dtype).to(computed_in)
    logits = (out.last_hidden_state.to(computed_in) @ head.T).float()
    return logits.flatten(0, 1), whole(tapes)


def narrowed(cache, dtype):
    for layer in cache.layers if dtype is not None else ():
        layer.keys, layer.values = (x.to(dtype).to(x.dtype) for x in (layer.keys, layer.values))
    return cache


def whole(tapes):
    """Routes in the order of TOKENS, from those of the prefixes and those of the rest."""
    lengths = (PREFIX, LENGTH - PREFIX)
    each = [tape.split([n] * SEQUENCES) for tape, n in zip(tapes, lengths, strict=True)]
    return Routes.join([piece for pair in zip(*each, strict=True) for piece in pair])


def logprobs_of(side, targets):
    logits, _ = logits_of(side)
    kept = side.kept
    if kept is None:
        kept = KeptTokens.from_lists([[]] * len(targets), vocab_size=128)
    return kept_logprobs(logits, targets, kept, temperature=side.temperature)


def shifted(routes):
    """The second layer's rows, one token late."""
    experts = routes.experts.copy()
    experts[1:, 1] = experts[:-1, 1]
    return replace(routes, experts=experts)


def of_another_sequence(routes):
    """The second layer's rows, of the sequence before."""
    experts = routes.experts.copy()
    experts[:, 1] = np.roll(experts[:, 1], LENGTH, axis=0)
    return replace(routes, experts=experts)


# What the engine does that the trainer does not know of, and its name; or a damaged payload.
FAULTS = {
    "a version behind": ("weights", {"weights": 3}),
    "four versions behind": ("weights", {"weights": 0}),
    "prefix KV of an older policy": ("prefix", {"prefix": 0}),
    "power-of-two scales": ("recipe", {"recipe": "ue8m0"}),
    "another tile": ("recipe", {"recipe": "128x128"}),
    "KV cache in float8": ("kv_dtype", {"kv_dtype": torch.float8_e4m3fn}),
    "lm_head in float8": ("head_dtype", {"head_dtype": torch.float8_e4m3fn}),
    "temperature": ("temperature", {"temperature": 0.8}),
    "top-p": ("kept", {"top_p": 0.8}),
    "no replay": ("routes", {"router_dtype": torch.float8_e4m3fn}),
    "a layer's routes a token late": ("routes", {}),
    "a layer's routes of another sequence": ("routes", {}),
}
# What always differs: the engine computes in bfloat16, with kernels of its own.
BACKGROUND = {"dtype": torch.bfloat16, "head_dtype": torch.bfloat16}
CAUSES = [field.name for field in fields(Side) if field.name != "router_dtype"]


def find_causes(how, *, payload=lambda routes: routes):
    """Run an engine that computes so, and split the mismatch that follows.

    Args:
        payload: what the trainer gets to replay, from what the engine did.
    """
    top_p = how.get("top_p", 1.0)
    engine = replace(Side(), **BACKGROUND | {k: v for k, v in how.items() if k != "top_p"})
    logits, captured = logits_of(engine)
    noise = torch.Generator().manual_seed(11)
    logits = logits + 0.003 * torch.randn(logits.shape, generator=noise)
    kept = kept_tokens(logits, temperature=engine.temperature, top_p=top_p)
    engine = replace(engine, kept=kept if top_p < 1 else None, routes=captured)
    chances = (logits / engine.temperature).softmax(-1)
    if engine.kept is not None:
        mask = torch.zeros_like(chances)
        rows = torch.repeat_interleave(torch.from_numpy(kept.counts))
        mask[rows, torch.from_numpy(kept.ids.astype("int64"))] = 1
        chances = chances * mask
    targets = torch.multinomial(chances, 1, generator=noise)[:, 0]
    rollout = (chances / chances.sum(-1, keepdim=True)).gather(1, targets[:, None]).log()[:, 0]

    trainer, seen = replace(Side(), routes=payload(captured)), {}
    unlike = frozenset(n for n in CAUSES if getattr(trainer, n) != getattr(engine, n))

    def evaluate(removed):
        removed &= unlike  # Of the other causes both sides have the same.
        if removed not in seen:
            as_engine = {name: getattr(engine, name) for name in removed}
            seen[removed] = logprobs_of(replace(trainer, **as_engine), targets)
        return seen[removed]

    return attribute(evaluate, rollout, causes=CAUSES)


PAYLOADS = {
    "no replay": lambda routes: None,
    "a layer's routes a token late": shifted,
    "a layer's routes of another sequence": of_another_sequence,
}


def test_injected_faults_are_named():
    """One set of causes and one rule for all."""
    reports = {
        fault: find_causes(how, payload=PAYLOADS.get(fault, lambda routes: routes))
        for fault, (_, how) in FAULTS.items()
    }
    print("\n\n".join(f"{fault}\n{report.table()}" for fault, report in reports.items()))
    named = {fault: report.dominant for fault, report in reports.items()}
    wrong = {fault for fault, (cause, _) in FAULTS.items() if named[fault] != cause}
    assert len(FAULTS) == 12
    assert len(wrong) <= 1, {fault: named[fault] for fault in wrong}


def test_without_a_fault_the_background_is_small():
    report = find_causes({})
    print(report.table())
    assert report.total < 2e-4
    assert report.dominant in {"dtype", "head_dtype", None}


def test_two_faults_are_the_two_largest_shares():
    report = find_causes({"top_p": 0.9, "weights": 0})
    assert {cause.name for cause in report.causes[:2]} == {"kept", "weights"}
