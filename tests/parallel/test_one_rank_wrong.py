"""One rank calls otherwise than the others: every collective call of parallel, every operand."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from primeblocks.contrib import dsa_rules
from primeblocks.contrib.dsa_rules import entries
from primeblocks.parallel import (
    MeshPlan,
    SequencePlan,
    clip_grad_norm_,
    global_token_count,
    plan_mesh,
    plan_sequence,
)
from primeblocks.parallel.attention import (
    dsa,
    latent_ring_attention,
    latent_ulysses_attention,
    ring_attention,
    ulysses_attention,
)
from primeblocks.parallel.experts import AllToAllDispatcher, OncePerRankDispatcher
from primeblocks.parallel.linear import (
    causal_conv1d,
    gated_delta_rule,
    state_space,
)
from primeblocks.testing import ranks
from tests.parallel.bodies import each, meshes_of

# One document lies on both ranks: every call has something to exchange.
PLAN = plan_sequence([7, 3], ranks=2, order="contiguous")
TYPED = ("PlanError: ", "RankError: ", "ShapeError: ")
CALLS = [
    "ring",
    "ulysses",
    "latent ring",
    "latent ulysses",
    "dsa",
    "sparse",
    "loss",
    "windows",
    "delta",
    "space",
    "conv",
    "join",
    "clip",
    "count",
    "build",
    "all-to-all dispatch",
    "all-to-all combine",
    "once dispatch",
    "once combine",
]
# What is no mistake, or is made before our code runs.
FINE = {
    ("count", "local", "no tensor"),
    ("count", "local", "numpy"),
    ("count", "local", "a dim more"),
    ("join", "sequence", "lengths"),
    ("join", "sequence", "None"),
    # A rank's own affair: how wide its lists are, and in what its indexer weighs.
    ("sparse", "indices", "less in dim 2"),
    ("sparse", "indices", "more in dim 2"),
    ("loss", "indices", "less in dim 2"),
    ("loss", "indices", "more in dim 2"),
    *(("dsa", "weights", f"torch.{dtype}") for dtype in ("bfloat16", "float16", "float64")),
    *(("dsa", name, "gradient") for name in ("index_q", "index_k", "weights")),
}
ROWS = dsa.Rows.latent(4, 4)


def _drawn(*shape: int, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


_meshes = cache(meshes_of)


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By name: a collective call and what this rank passes to it. Tensors lead."""
    group, rank = dist.group.WORLD, dist.get_rank()
    tokens = PLAN.counts[rank]
    meshes = _meshes()
    where = {"sequence": PLAN, "group": group}
    heads = {"q": _drawn(tokens, 4, 8, grad=True), "k": _drawn(tokens, 2, 8, grad=True)}
    heads |= {"v": _drawn(tokens, 2, 8, grad=True), "sinks": _drawn(4)}
    rules = {"scale": 0.5, "window": 2, "causal": True}
    sparse = {"q": heads["q"], "kv": _drawn(tokens, 8, grad=True), "sinks": _drawn(4)}
    latent = {"q": heads["q"], "latents": _drawn(tokens, 6, grad=True)}
    latent |= {"up": _drawn(4, 9, 4, grad=True), "scale": 0.5, "causal": True}
    indexer = {"index_q": _drawn(tokens, 2, 4), "index_k": _drawn(tokens, 4)}
    indexer |= {"weights": _drawn(tokens, 2)}
    indices = torch.arange(2, dtype=torch.int32).expand(tokens, 1, 2).contiguous()
    delta = {name: _drawn(tokens, 2, 3, grad=True) for name in "qkv"}
    delta |= {"g": -_drawn(tokens, 2).abs(), "beta": _drawn(tokens, 2).sigmoid()}
    space = {"x": _drawn(tokens, 2, 3, grad=True), "dt": _drawn(tokens, 2).abs()}
    space |= {"A": -_drawn(2).abs(), "B": _drawn(tokens, 2, 3), "C": _drawn(tokens, 2, 3)}
    conv = {"x": _drawn(tokens, 3), "weight": _drawn(3, 4, grad=True), "bias": _drawn(3)}
    slots = {"x": _drawn(3, 8, grad=True), "scores": _drawn(3, 2).abs()}
    slots |= {"expert_ids": torch.arange(6).view(3, 2) % 4, "num_experts": 4}
    found = {
        "ring": (ring_attention, {**heads, **where, **rules}),
        "ulysses": (ulysses_attention, {**heads, **where, **rules}),
        "latent ring": (latent_ring_attention, {**latent, **where}),
        "latent ulysses": (latent_ulysses_attention, {**latent, **where}),
        "dsa": (_dsa, {**sparse, **indexer, "scale": 0.5, **where}),
        "sparse": (_sparse, {**sparse, "indices": indices, "scale": 0.5, **where}),
        "loss": (_loss, {**sparse, **indexer, "indices": indices, "scale": 0.5, **where}),
        "windows": (
            entries.windows,
            {"x": _drawn(tokens, 3, grad=True), "ratio": 4, "overlap": 4, **where},
        ),
        "delta": (gated_delta_rule, {**delta, **where}),
        "space": (state_space, {**space, "D": _drawn(2), **where}),
        "conv": (causal_conv1d, {**conv, **where}),
        "join": (_join, {"local": _drawn(tokens, 3, grad=True), "dim": 0, **where}),
        "clip": (_clip, {"max_norm": 1.0, "meshes": meshes}),
        "count": (global_token_count, {"local": torch.tensor(3), "meshes": meshes}),
        "build": (_build, {"plan": plan_mesh(world_size=2)}),
    }
    for kind, by in (("all-to-all", AllToAllDispatcher), ("once", OncePerRankDispatcher)):
        dispatcher = by(group)
        sent = dispatcher.dispatch(**slots)
        found[f"{kind} dispatch"] = (_dispatch, {"by": dispatcher, **slots})
        y = _drawn(len(sent.tokens), 8, grad=True)
        found[f"{kind} combine"] = (_combine, {"by": dispatcher, "y": y, "sent": sent})
    return found


def _dsa(q, kv, *, index_q, index_k, weights, **rules):
    indexer = dsa.IndexerInputs(index_q, index_k, weights)
    return dsa.dsa_attention(q, kv, indexer, rows=ROWS, selector=dsa.TopK(2), **rules)


def _sparse(q, kv, *, indices, **rules):
    return dsa.sparse_attention(q, kv, indices, rows=ROWS, **rules)


def _loss(q, kv, *, index_q, index_k, weights, indices, **rules):
    indexer = dsa.IndexerInputs(index_q, index_k, weights)
    return dsa_rules.indexer_loss(q, kv, indexer, indices, rows=ROWS, **rules)


def _join(local, *, sequence, **where):
    return sequence.join(local, **where)


def _dispatch(by, **slots):
    sent = by.dispatch(**slots)
    return sent.tokens, sent.counts


def _combine(by, y, sent):
    return by.combine(y, sent)


def _clip(max_norm, meshes):
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    return clip_grad_norm_([parameter], max_norm, meshes=meshes)


def _build(plan):
    return str(plan.build("cpu").plan)


def _mistakes(value: Any) -> Iterator[tuple[str, Any]]:
    """What a caller may pass for `value` by mistake."""
    if isinstance(value, Tensor):
        grad = value.requires_grad
        yield from (
            (str(dtype), value.detach().to(dtype).requires_grad_(grad))
            for dtype in (torch.bfloat16, torch.float16, torch.float64)
            if value.is_floating_point()
        )
        yield "no tensor", value.tolist()
        yield "numpy", value.detach().numpy()
        yield "None", None
        yield "no dims" if value.ndim else "a dim", value.new_zeros(() if value.ndim else (2,))
        yield "a dim more", value.unsqueeze(0)
        if value.is_floating_point():
            yield "integers", value.long()
            yield "gradient", value.detach().requires_grad_(not grad)
        for dim, size in enumerate(value.shape):
            yield f"less in dim {dim}", value.narrow(dim, 0, size - 1).detach().requires_grad_(grad)
            more = value.narrow(dim, 0, 1)
            yield f"more in dim {dim}", torch.cat([value, more], dim).detach().requires_grad_(grad)
    elif isinstance(value, SequencePlan):
        yield "other lengths", plan_sequence([6, 4], ranks=2, order="contiguous")
        yield "other order", plan_sequence([7, 3], ranks=2, order="zigzag")
        yield "of three ranks", plan_sequence([7, 3], ranks=3)
        yield "lengths", [7, 3]
        yield "None", None
    elif isinstance(value, MeshPlan):
        yield "other degrees", plan_mesh(world_size=2, expert=2)
        yield "of three ranks", plan_mesh(world_size=3)
    elif isinstance(value, bool):
        yield "other", not value
    elif isinstance(value, int | float):
        yield "other", value + 1
        yield "text", str(value)
        yield "None", None


def _mistakes_of_all(right: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a caller may do to all tensors alike."""
    tensors = {n: x for n, x in right.items() if isinstance(x, Tensor) and x.is_floating_point()}
    if tensors:
        yield "float64", {name: x.double() for name, x in tensors.items()}
    if "sequence" in right:
        tokens = PLAN.counts[dist.get_rank()]
        fewer = {n: x[1:] for n, x in right.items() if isinstance(x, Tensor) and len(x) == tokens}
        yield "one token fewer", fewer
    if "expert_ids" in right:
        yield "an id beyond", {"expert_ids": right["expert_ids"] + 1}
        yield "an id below", {"expert_ids": right["expert_ids"] - 1}
        yield "no number", {"scores": torch.full_like(right["scores"], torch.nan)}
        yield "more choices", {name: right[name].repeat(1, 2) for name in ("expert_ids", "scores")}


def _said(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    try:
        call(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _every_mistake(call: str) -> list[tuple[str, str, str]]:
    """What each rank is told; rank 1 alone makes the mistakes, one after the other."""
    calls, wrongly = _calls(), dist.get_rank() == 1
    function, right = calls[call]
    made = [(other, *calls[other]) for other in calls if other != call]
    for name, value in right.items():
        for mistake, wrong in _mistakes(value):
            if (call, name, mistake) not in FINE:
                made.append((f"{name}: {mistake}", function, right | {name: wrong}))
    made += [(what, function, right | wrong) for what, wrong in _mistakes_of_all(right)]
    found = []
    for what, other, wrong in made:
        said = _said(other, wrong) if wrongly else _said(function, right)
        found.append((what, said, _said(function, right)))
    return found


_HEADS = {
    "one token fewer": "ShapeError: the plan gives this rank 5 tokens",
    "q: torch.float64": "ShapeError: q, k and v need one floating dtype; got torch.float64",
    "float64": r"PlanError: sinks dtype must be equal on all ranks; .*float32, torch.float64\]",
    "q: less in dim 1": "ShapeError: q and k need equal head_dim",
    "v: less in dim 1": "ShapeError: q and k need equal head_dim",
    "k: less in dim 2": "ShapeError: q and k need equal head_dim",
    "q: no dims": r"ShapeError: q, k and v must be \[local_tokens, heads, head_dim\]",
    "k: gradient": r"PlanError: k requires_grad must be equal on all ranks; .* \[1, 0\]",
    "window: other": r"PlanError: window must be equal on all ranks; .* \[2, 3\]",
    "window: None": r"PlanError: window must be equal on all ranks; .* \[2, None\]",
    "causal: other": "PlanError: a window needs causal=True",
    "sinks: None": r"PlanError: sinks must be equal on all ranks; .* \[True, False\]",
    "sinks: less in dim 0": r"ShapeError: sinks must have one number per head, \[4\]; got \(3,\)",
    "scale: text": "PlanError: scale must be a finite number over 0",
}
_LATENTS = {
    "one token fewer": "ShapeError: the plan gives this rank 5 tokens",
    "latents: no dims": r"ShapeError: q must be \[local_tokens",
    "q: less in dim 1": "ShapeError: q and up need equal numbers of heads",
    "up: torch.float64": "ShapeError: q, latents and up need one floating dtype",
    "causal: other": "PlanError: causal must be equal on all ranks",
    "scale: text": "PlanError: scale must be a finite number over 0",
}
_SPARSE = {
    "q: no dims": r"ShapeError: q must be \[local_tokens",
    "q: less in dim 0": "ShapeError: the plan gives this rank 5 tokens",
    "kv: less in dim 0": "ShapeError: the plan gives this rank 5 rows",
    "kv: less in dim 1": "ShapeError: .* needs q of 8 columns and kv of 8",
    "kv: torch.float64": "ShapeError: .* one floating dtype",
    "sinks: less in dim 0": r"ShapeError: sinks must have one number per head, \[4\]",
    "scale: text": "PlanError: scale must be a finite number over 0",
}
_SLOTS = {
    "an id beyond": "ShapeError: expert_ids are between 1 and 4, but the layer has experts 0 to 3",
    "an id below": "ShapeError: expert_ids are between -1 and 2",
    "no number": "ShapeError: 6 of 6 scores are NaN",
    "more choices": r"PlanError: top_k must be equal on all ranks; .* \[2, 4\]",
    "num_experts: other": "PlanError: 5 experts cannot be shared equally by 2 ranks",
    "scores: torch.float64": r"PlanError: scores dtype must be equal .*float32, torch.float64\]",
    "scores: gradient": r"PlanError: scores requires_grad must be equal .* \[0, 1\]",
    "x: less in dim 1": r"PlanError: x dim 1 must be equal on all ranks; .* \[8, 7\]",
}
# By call and mistake: what the rank that makes the mistake is told.
TOLD = {
    "all-to-all dispatch": _SLOTS,
    "once dispatch": _SLOTS,
    "ring": _HEADS,
    "ulysses": _HEADS,
    "latent ring": _LATENTS,
    "latent ulysses": _LATENTS,
    "sparse": _SPARSE | {"indices: less in dim 1": r"ShapeError: .*\[5, 1, k\] of torch.int32"},
    "dsa": _SPARSE
    | {
        "index_k: less in dim 0": "ShapeError: the indexer's .* do not fit this rank's 5 tokens",
        "index_q: no dims": "ShapeError: an indexer's q must be",
        "index_q: torch.float64": "ShapeError: .* one dtype and one device",
        "weights: integers": "ShapeError: .* must be floating point",
    },
    "conv": {
        "one token fewer": r"ShapeError: .* this rank 5 tokens; got x \(4,",
        "x: a dim more": r"ShapeError: causal_conv1d needs .*; got \(1, 5, 3\), \(3, 4\)",
        "weight: more in dim 1": r"PlanError: weight dim 1 must be equal .*\[4, 5\]",
    },
    "delta": {
        "one token fewer": r"ShapeError: .* this rank 5 tokens; got v \(4,",
        "q: a dim more": r"ShapeError: gated_delta_rule needs .*; got \(1, 5, 2, 3\)",
        "float64": "PlanError: q dtype must be equal .*torch.float32, torch.float64",
    },
    "space": {
        "one token fewer": r"ShapeError: .* this rank 5 tokens; got x \(4,",
        "x: a dim more": r"ShapeError: state_space needs .*; got \(1, 5, 2, 3\)",
        "dt: more in dim 1": "ShapeError: state_space needs x",
    },
}


@pytest.mark.parametrize("part", range(4))
def test_one_ranks_mistake_is_an_error_on_all(part):
    calls = CALLS[part::4]
    told = ranks.run(each, _every_mistake, [(call,) for call in calls])
    for call, *found in zip(calls, *told, strict=True):
        _assert_told(call, *found)


def _assert_told(call, there, here):
    for (what, *told), (_, *telling) in zip(there, here, strict=True):
        for said, afterwards in (told, telling):
            assert said.startswith(TYPED), (what, said)
            assert afterwards == "nothing", (what, afterwards)
        if told[0] != telling[0]:
            assert told[0].startswith("RankError: rank 1 of the group refused its arguments"), what
            assert telling[0][:300] in told[0], (what, told)
    by_mistake = {what: said for what, said, _ in here}
    for mistake, said in TOLD.get(call, {}).items():
        assert re.match(said, by_mistake[mistake]), (mistake, by_mistake[mistake])
    assert len(there) >= len(CALLS)
