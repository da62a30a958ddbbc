"""Shared experts computed while rows travel: the same results, in another order of events."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from primeblocks.parallel import reference
from primeblocks.parallel.experts import AllToAllDispatcher, OncePerRankDispatcher, grouped_swiglu
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import StepCounter, assert_close_float64, assert_same_bits
from tests.parallel.bodies import each, meshes_of
from tests.parallel.float64 import Float64

EXPERTS, TOP_K, HIDDEN = 12, 2, 5
# No other size is one of these.
INTERMEDIATE, SHARED = 89, 97
KINDS = {
    "all_to_all": (AllToAllDispatcher, {}),
    "once_per_rank": (OncePerRankDispatcher, {}),
    "capacity": (AllToAllDispatcher, {"capacity_rows": 20}),
}


def _drawn(seed, *shape):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64) * shape[-1] ** -0.5


def _tokens(tokens, rank):
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(EXPERTS, (tokens, TOP_K), generator=g)
    return _drawn(rank, tokens, HIDDEN), _drawn(50 + rank, tokens, TOP_K).sigmoid(), ids


def _weights():
    """Of the experts, and of a shared one."""
    return (
        _drawn(1, EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        _drawn(2, EXPERTS, HIDDEN, INTERMEDIATE),
        _drawn(3, SHARED, HIDDEN),
    )


def _shared(x, weight):
    return F.linear(F.silu(F.linear(x, weight)), weight.t())


def _layer(dispatcher, ids, x, scores, gate_up, down, shared):
    found = []
    sent = dispatcher.dispatch(
        x, scores, ids, num_experts=EXPERTS, meanwhile=lambda: found.append(_shared(x, shared))
    )
    y = grouped_swiglu(sent.tokens, sent.counts, gate_up, down)
    return dispatcher.combine(y, sent) + sum(found)


def _gradients(function, inputs, again=None, seed=0):
    leaves = [x.clone().requires_grad_() for x in inputs]
    # Leaves of a layer in the midst of a model are none.
    given = [leaf * 1 for leaf in leaves]
    out = function(*given) if again is None else checkpoint(function, *given, use_reentrant=again)
    out.backward(_drawn(seed, *out.shape))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _ours(kind, tokens_by_rank):
    """Plain, recomputed, and recomputed by reentrant checkpoints."""
    make, rules = KINDS[kind]
    rank, size = dist.get_rank(), dist.get_world_size()
    x, scores, ids = _tokens(tokens_by_rank[rank], rank)
    gate_up, down, shared = _weights()
    mine = [w.chunk(size)[rank] for w in (gate_up, down)]
    dispatcher = make(dist.group.WORLD, **rules)

    def layer(*operands):
        return _layer(dispatcher, ids, *operands)

    operands = (x, scores, *mine, shared)
    return [_gradients(layer, operands, again, seed=90 + rank) for again in (None, False, True)]


def _alone(rank, tokens):
    x, scores, ids = _tokens(tokens, rank)

    def layer(x, scores, gate_up, down, shared):
        out = reference.experts(x, ids, scores, gate_up, down) + _shared(x, shared)
        # Without tokens the loops touch nothing, and autograd would find no gradient.
        return out + 0 * sum(w.sum() for w in (x, scores, gate_up, down, shared))

    return _gradients(layer, (x, scores, *_weights()), seed=90 + rank)


@pytest.mark.parametrize(
    ("kind", "tokens_by_rank"),
    [
        ("all_to_all", (4, 9)),
        ("once_per_rank", (5, 0, 2)),
        ("capacity", (3, 1, 0, 6)),
        ("all_to_all", (0, 0)),
    ],
    ids=str,
)
def test_results_are_those_of_one_rank(kind, tokens_by_rank):
    found = ranks.run(_ours, kind, tokens_by_rank, world_size=len(tokens_by_rank))
    each = [_alone(rank, tokens) for rank, tokens in enumerate(tokens_by_rank)]
    gate_up, down, shared = (sum(grads[i] for grads in each) for i in (3, 4, 5))
    for got in zip(*found, strict=True):
        for mine, want in zip(got, each, strict=True):
            assert_close_float64(mine[:3], want[:3])
        assert_close_float64(torch.cat([mine[3] for mine in got]), gate_up)
        assert_close_float64(torch.cat([mine[4] for mine in got]), down)
        assert_close_float64(sum(mine[5] for mine in got), shared)


class _Events(TorchDispatchMode):
    """When rows leave and land, and when the experts compute: runs of one kind are one."""

    def __init__(self):
        super().__init__()
        self.seen, self._send = [], dist.all_to_all_single
        self._patch = mock.patch.object(dist, "all_to_all_single", self._sent)

    def __enter__(self):
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *problem):
        super().__exit__(*problem)
        self._patch.stop()

    def _sent(self, out, rows, *rest, async_op=False, **named):
        work = self._send(out, rows, *rest, async_op=async_op, **named)
        if async_op:
            self.seen.append("leave")
            return mock.Mock(wait=lambda: (self.seen.append("land"), work.wait()))
        if rows.is_floating_point() and rows.shape[1:] != (TOP_K,):
            self.seen.append("exchange")
        return work

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        sizes = {
            n for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) for n in x.shape
        }
        for name, size in (("shared", SHARED), ("experts", INTERMEDIATE)):
            if size in sizes and self.seen[-1:] != [name]:
                self.seen.append(name)
        return function(*args, **(kwargs or {}))


def _order(kind):
    make, rules = KINDS[kind]
    x, scores, ids = _tokens(8, dist.get_rank())
    gate_up, down, shared = _weights()
    mine = [w.chunk(dist.get_world_size())[dist.get_rank()] for w in (gate_up, down)]
    leaves = [x.clone().requires_grad_() for x in (x, scores, *mine, shared)]
    dispatcher = make(dist.group.WORLD, **rules)
    with _Events() as forward:
        out = _layer(dispatcher, ids, *leaves)
    with _Events() as backward:
        out.sum().backward()
    return forward.seen, backward.seen


THERE = ["leave", "shared", "land"]


def test_shared_experts_are_computed_while_rows_travel():
    """In backward too, where the shared experts are differentiated while gradients travel."""
    for found in ranks.run(each, _order, [(kind,) for kind in KINDS]):
        for kind, (forward, backward) in zip(KINDS, found, strict=True):
            assert forward == [*THERE, "experts", "exchange"], kind
            assert backward == ["exchange", "experts", *THERE], kind


def _counted():
    """Reads and most bytes of a dispatch, a combine and their backward; without work between."""
    from tests.pretend import Device

    found = {}
    for kind, (make, rules) in KINDS.items():
        for check in (True, False):
            dispatcher = make(dist.group.WORLD, check=check, **rules)
            for more in ({}, {"meanwhile": lambda: None}):
                x, scores, ids = _tokens(8, dist.get_rank())
                with Device():
                    x, scores = (t.to("pretend").requires_grad_() for t in (x, scores))
                    ids = ids.to("pretend")
                    steps = [StepCounter(device="pretend") for _ in range(3)]
                    with steps[0]:
                        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS, **more)
                    with steps[1]:
                        out = dispatcher.combine(sent.tokens, sent)
                    with steps[2]:
                        out.backward(out)
                counts = [(s.host_reads.total(), s.peak_bytes, s.received_bytes) for s in steps]
                found.setdefault((kind, check), []).append(counts)
    return found


def test_it_costs_no_read_no_byte_and_no_memory():
    for found in ranks.run(_counted):
        for (kind, check), (plain, overlapped) in found.items():
            assert overlapped == plain, (kind, check)
            assert overlapped[0][0] == (0 if kind == "capacity" and not check else 1)


def _raising():
    x, scores, ids = _tokens(4, dist.get_rank())
    dispatcher = AllToAllDispatcher(dist.group.WORLD)
    with _Events() as events, pytest.raises(ZeroDivisionError):
        dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS, meanwhile=lambda: 1 / 0)
    assert events.seen == ["leave", "land"]
    sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
    out = dispatcher.combine(sent.tokens, sent)
    assert_close_float64(out, x * scores.sum(1, keepdim=True))


def test_rows_land_although_the_work_fails():
    ranks.run(_raising)


def _in_float8():
    x, scores, ids = _tokens(8, dist.get_rank())
    x, dispatcher = x.to(torch.float8_e4m3fn), AllToAllDispatcher(dist.group.WORLD)
    sent = [
        dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS, **more).tokens
        for more in ({}, {"meanwhile": lambda: None})
    ]
    assert_same_bits(*sent)


def test_float8_travels_too():
    ranks.run(_in_float8)


SHARED_LAST = (
    "axk2", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "hy_v4", "nemotron_h", "solar_open",
)  # fmt: skip
SHARED_FIRST = {"afmoe": ["shared", "leave", "land"], "laguna": ["shared", "leave", "land"]}


def _blocks(model):
    names = ("shared_experts", "shared_expert")
    found = [(m, getattr(m, n, None)) for m in model.modules() for n in names]
    return [(block, shared) for block, shared in found if isinstance(shared, torch.nn.Module)]


def _of_model(family, checkpointing):
    from primeblocks.parallel.adapters.transformers import parallelize

    layers = 4 if family == "nemotron_h" else 2
    model = tiny_models.build(family, dtype="float32", num_layers=layers, hidden=64, vocab=32)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parallelize(model, meshes_of(expert=2))
    blocks, events = _blocks(model), _Events()

    def seen(module, args, output):
        events.seen.append("shared")
        output.register_hook(lambda grad: events.seen.append("shared"))

    for _, shared in blocks:
        shared.down_proj.register_forward_hook(seen)
    tokens = torch.arange(8)[None] + dist.get_rank()
    with events:
        loss = model(input_ids=tokens, use_cache=False).logits.square().mean()
        forward = [name for name in events.seen if name in THERE]
        events.seen.clear()
        loss.backward()
    backward = [name for name in events.seen if name in THERE]
    for block, _ in blocks:
        state = block.experts.shared
        assert state is None or (state._given, state._found) == (None, None)
    return len(blocks), forward, backward


def test_a_model_computes_them_once_and_keeps_nothing():
    for found in ranks.run(each, _of_model, [("deepseek_v3", True), ("nemotron_h", True)]):
        for blocks, forward, backward in found:
            assert forward == THERE * blocks != []
            assert backward == THERE * blocks * 2  # Computed again, and differentiated.


def test_the_order_of_every_family(full):
    """Where transformers calls them first nothing is left to be done meanwhile."""
    families = (*SHARED_LAST, *SHARED_FIRST, "qwen2_moe", "qwen3_next", "qwen3_5_moe")
    families = families if full else ("deepseek_v3", "nemotron_h", "afmoe", "qwen2_moe")
    for found in ranks.run(each, _of_model, [(family, False) for family in families]):
        for family, (blocks, forward, backward) in zip(families, found, strict=True):
            wanted = THERE if family in SHARED_LAST else SHARED_FIRST.get(family, ["shared"])
            assert (family, forward) == (family, wanted * blocks)
            assert family not in SHARED_LAST or backward == THERE * blocks
            assert blocks


def _hooked():
    """A hook of a user on the shared experts changes what they are given, as without ranks."""
    from primeblocks.parallel.adapters.transformers import parallelize

    sizes = {"dtype": "float64", "num_layers": 2, "hidden": 64, "vocab": 32}
    ours, theirs, plain = (tiny_models.build("deepseek_v3", **sizes) for _ in range(3))
    for model in (theirs, plain):
        model.set_experts_implementation("eager")
    parallelize(ours, meshes_of(expert=2))
    for model in (ours, theirs):
        for _, shared in _blocks(model):
            shared.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with Float64():
        got, want, without = (
            model(input_ids=torch.arange(8)[None], use_cache=False).logits.detach()
            for model in (ours, theirs, plain)
        )
    assert_close_float64(got, want)
    assert (want - without).abs().max() > 1e-2 * want.abs().max()


def test_other_inputs_of_shared_experts_are_honoured():
    ranks.run(_hooked)
