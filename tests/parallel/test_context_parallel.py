"""Layers that call torch's attention and know no plan, against one rank, document by document."""

import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from primeblocks.errors import PlanError, RankError, ShapeError, UnsupportedError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import (
    ContextParallel,
    FlexKernel,
    ring_attention,
    ulysses_attention,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64, max_relative_error
from tests.parallel.bodies import each

ORDERS = ["balanced", "contiguous", "zigzag"]
PACKINGS = [[7, 1, 0, 9, 4], [2]]  # The second leaves ranks without tokens.
BATCH, HIDDEN, HEADS, KEY_HEADS = 2, 12, 4, 2
ATTENTIONS = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "flex": partial(ring_attention, kernel=FlexKernel(tile_tokens=4)),
}
CONTEXTS = {"use_reentrant": False, "context_fn": ContextParallel.checkpoint_contexts}


class _Layer(nn.Module):
    """Attention and a network behind it, as anybody would write them."""

    def __init__(self, causal):
        super().__init__()
        self.causal, self.norm = causal, nn.LayerNorm(HIDDEN)
        self.q, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.kv = nn.Linear(HIDDEN, 2 * HIDDEN * KEY_HEADS // HEADS)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))

    def forward(self, x):
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, KEY_HEADS, -1)).permute(2, 0, 3, 1, 4)
        rules = {"is_causal": self.causal, "scale": 0.4, "enable_gqa": True}
        y = F.scaled_dot_product_attention(q, k, v, **rules)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class _Model(nn.Module):
    def __init__(self, *, causal=True, recompute=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer(causal) for _ in range(2)).double()
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, **self.recompute)
        return x


def _inputs(tokens):
    generator = torch.Generator().manual_seed(tokens)
    x, grad = torch.randn(2, BATCH, tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return x, grad


def _whole(lengths, **options):
    """Output, and gradients of input and parameters: torch alone, each document by itself."""
    model = _Model(**options)
    x, grad = _inputs(sum(lengths))
    x.requires_grad_()
    out = torch.cat([model(part) for part in x.split(lengths, 1) if part.numel()], 1)
    out.backward(grad)
    return [out.detach(), x.grad], [p.grad for p in model.parameters()]


def _split(cases):
    """By case: the same of this rank's tokens, and gradients of parameters of all ranks."""
    found = []
    for name, lengths, order, options, *inside in cases:
        model = _Model(**options)
        plan = plan_sequence(lengths, ranks=dist.get_world_size(), order=order, chunk_tokens=3)
        own = plan.indices(dist.get_rank())
        x, grad = (part[:, own] for part in _inputs(plan.tokens))
        x.requires_grad_()
        rules = {"attention": ATTENTIONS[name], "causal": options.get("causal", True)}
        with ContextParallel(plan, group=dist.group.WORLD, **rules):
            out = model(x)
            if inside:
                out.backward(grad)
        if not inside:
            out.backward(grad)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        found.append(([out.detach(), x.grad], [p.grad for p in model.parameters()]))
    return found


def _assert_equal_one_rank(cases, world_size):
    found = ranks.run(_split, cases, world_size=world_size)
    for at, (_, lengths, order, options, *_) in enumerate(cases):
        plan = plan_sequence(lengths, ranks=world_size, order=order, chunk_tokens=3)
        tokens, parameters = _whole(lengths, **{**options, "recompute": None})
        for rank, by_case in enumerate(found):
            own = plan.indices(rank)
            assert_close_float64(by_case[at][0], [x[:, own] for x in tokens])
            assert_close_float64(by_case[at][1], parameters)


@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_to_one_rank(world_size):
    names = ("ring", "ulysses")
    cases = [(name, lengths, o, {}) for name in names for lengths in PACKINGS for o in ORDERS]
    cases += [(name, PACKINGS[0], "zigzag", {"causal": False}) for name in names]
    cases.append(("flex", PACKINGS[0], "zigzag", {}))
    _assert_equal_one_rank(cases, world_size)


def test_checkpoints_find_the_block_again():
    """In a backward after the block, and inside of it."""
    case = (PACKINGS[0], "zigzag", {"recompute": CONTEXTS})
    cases = [(n, *case, *inside) for n in ("ring", "ulysses") for inside in ([], ["inside"])]
    _assert_equal_one_rank(cases, 3)


PLAN = plan_sequence([6, 2], ranks=2, order="contiguous")


def _qkv(**options):
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(3, BATCH, HEADS, 4, 8, generator=generator, **options)
    return [*x]


def _forgotten():
    """A checkpoint that is not told of the block, with both of torch's implementations."""
    x = _inputs(8)[0][:, PLAN.indices(dist.get_rank())].requires_grad_()
    with ContextParallel(PLAN, group=dist.group.WORLD):
        out = _Model(recompute={"use_reentrant": False})(x)
        with pytest.raises(UnsupportedError, match="recompute attention without its plan"):
            _Model(recompute={"use_reentrant": True})(x)
        with torch.no_grad():  # No gradients, no recomputation.
            again = _Model()(x)
    assert torch.equal(out, again)
    with pytest.raises(CheckpointError):
        out.sum().backward()
    assert all(type(one) is nullcontext for one in ContextParallel.checkpoint_contexts())
    with torch.device("cpu"):  # A mode of torch's own, around nothing.
        assert all(type(one) is nullcontext for one in ContextParallel.checkpoint_contexts())


def test_a_checkpoint_without_the_block_is_an_error():
    ranks.run(_forgotten)


def _call(q, k, v, **rules):
    return F.scaled_dot_product_attention(q, k, v, **rules)


MASK = torch.ones(4, 4, dtype=torch.bool)
# By change: what rank 1 does alone, and what it is told.
CHANGES = {
    "mask": (lambda q, k, v: _call(q, k, v, attn_mask=MASK), "PlanError: the plan already masks"),
    "dropout": (
        lambda q, k, v: _call(q, k, v, dropout_p=0.1, is_causal=True),
        "PlanError: .* not support dropout; got 0.1",
    ),
    "not causal": (_call, "PlanError: got is_causal=False, but"),
    "no batch": (
        lambda q, k, v: _call(q[0], k[0], v[0], is_causal=True),
        "ShapeError: q, k and v must be .bat",
    ),
    "grouped": (
        lambda q, k, v: _call(q, k[:, :2], v[:, :2], is_causal=True),
        "ShapeError: fewer key heads",
    ),
    "one token": (
        lambda q, k, v: _call(q[..., :1, :], k, v, is_causal=True),
        "ShapeError: the plan gives this rank 4 tokens",
    ),
    "multi-head": (
        lambda q, k, v: nn.MultiheadAttention(8, 2)(*(x[:, 0] for x in (q, k, v))),
        "UnsupportedError: nn.MultiheadAttention",
    ),
    "encoder, fast": (
        lambda q, k, v: torch.no_grad()(nn.TransformerEncoderLayer(8, 2).eval())(q[0]),
        "UnsupportedError: nn.MultiheadAttention",
    ),
}


def _refusals(check):
    """By change: what this rank is told; afterwards torch's attention is as it was."""
    q, k, v = _qkv()
    group, own = dist.group.WORLD, _call(q, k, v, is_causal=True)
    found = {}
    for change, (made, _) in CHANGES.items():
        wrong = made if dist.get_rank() or not check else partial(_call, is_causal=True)
        try:
            with ContextParallel(PLAN, group=group, check=check):
                wrong(q, k, v)
        except (PlanError, RankError, ShapeError, UnsupportedError) as error:
            found[change] = f"{type(error).__name__}: {error}"
        assert torch.equal(_call(q, k, v, is_causal=True), own)
        total = torch.ones(1)
        dist.all_reduce(total)  # The group still works.
    return found


def test_what_does_not_fit_is_refused_on_all_ranks():
    by_check = zip(*ranks.run(each, _refusals, [(True,), (False,)]), strict=True)
    for check, (zero, one) in zip((True, False), by_check, strict=True):
        for change, (_, said) in CHANGES.items():
            assert re.match(said, one[change]), one[change]
            heard = "RankError: rank 1 of the group refused its arguments: " if check else ""
            assert re.match(heard + said, zero[change]), zero[change]
        assert len(zero) == len(one) == len(CHANGES)


def _nested():
    """Blocks in one another: the innermost is followed, and a block may be entered twice."""
    group, (q, k, v) = dist.group.WORLD, _qkv()
    other = plan_sequence([1] * 8, ranks=2, order="contiguous")  # A token sees itself alone.
    outer, inner = (ContextParallel(plan, group=group) for plan in (PLAN, other))
    found = []
    with outer:
        found.append(_call(q, k, v, is_causal=True))
        with inner, torch.device("cpu"):
            found.append(_call(q, k, v, is_causal=True))
        with outer:
            found.append(_call(q, k, v, is_causal=True))
        found.append(_call(q, k, v, is_causal=True))
    first, alone, *more = found
    assert torch.allclose(alone, v)
    assert not torch.allclose(first, v)
    assert all(torch.equal(first, one) for one in more)
    for wrong in (None, "ring", FlexKernel):
        with pytest.raises(PlanError, match="must be a function"):
            ContextParallel(PLAN, group=group, attention=wrong)
    with pytest.raises(PlanError, match="3"):
        ContextParallel(plan_sequence([4], ranks=3), group=group)


def test_the_innermost_block_is_followed():
    ranks.run(_nested)


def _compiled():
    """A compiled layer inside the block and outside of it: the graph ends before each call."""
    # In zigzag order every rank attends to other rows inside the block than outside of it.
    plan = plan_sequence([6, 2], ranks=2, order="zigzag")
    x = _inputs(8)[0][:, plan.indices(dist.get_rank())]
    model, block = _Model().layers[0], ContextParallel(plan, group=dist.group.WORLD)
    run = torch.compile(model, backend="aot_eager")

    def step(call):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        out.square().sum().backward()
        return [out.detach(), leaf.grad]

    outside = step(model)
    with block:
        inside = step(model)
    assert max_relative_error(inside[0], outside[0]) > 1e-3  # other operands, not rounding
    for _ in range(2):
        assert_close_float64(step(run), outside)
        with block:
            assert_close_float64(step(run), inside)
    whole = torch.compile(_call, backend="aot_eager", fullgraph=True)
    with block, pytest.raises(RuntimeError, match="should not be traced"):
        whole(*_qkv(), is_causal=True)


def test_compiled_layers_are_the_same():
    ranks.run(_compiled)
