import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from primeblocks.errors import PlanError
from primeblocks.layout import layout_of
from primeblocks.parallel import (
    check_optimizer,
    clip_grad_norm_,
    fully_shard_moe,
    global_token_count,
)
from primeblocks.parallel.experts import AllToAllDispatcher, GroupedExperts, LocalDispatcher
from primeblocks.testing import ranks
from tests.parallel.bodies import each, meshes_of

TOKENS = (5, 0, 3, 8)  # By rank: ragged, one without any.


class Layer(nn.Module):
    def __init__(self, experts, hidden, intermediate):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False, dtype=torch.float64)
        self.experts = GroupedExperts(
            experts, hidden, intermediate, dispatcher=LocalDispatcher(), dtype=torch.float64
        )

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, ids, scores)


class Model(nn.Module):
    def __init__(self, experts=8, hidden=6, intermediate=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts, hidden, intermediate) for _ in range(2))
        self.head = nn.Linear(hidden, 3, dtype=torch.float64)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _pair(degrees, sizes, **how):
    """A sharded model and the same model whole."""
    torch.manual_seed(0)
    whole = Model(**sizes)
    model = copy.deepcopy(whole)
    meshes = meshes_of(**degrees)
    _shard(model, meshes, **how)
    return model, whole, meshes


def _shard(model, meshes, **how):
    experts = [layer.experts for layer in model.layers]
    for module in experts:
        module.dispatcher = AllToAllDispatcher(meshes.expert.get_group())
    fully_shard_moe(model, meshes, layers=model.layers, experts=experts, **how)


def _input(rank, hidden):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(TOKENS[rank], hidden, generator=g, dtype=torch.float64)


def _loss(model, rank, count):
    return model(_input(rank, model.head.in_features)).square().sum() / count


def _backward(model, whole, meshes):
    count = global_token_count(TOKENS[dist.get_rank()], meshes)
    assert count == sum(TOKENS[: dist.get_world_size()])
    _loss(model, dist.get_rank(), count).backward()
    sum(_loss(whole, rank, count) for rank in range(dist.get_world_size())).backward()


def _error(model, whole, tensor_of):
    """The largest relative error of a parameter; every shard must sit where layout_of says."""
    worst = 0.0
    for (name, ours), (same, theirs) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert name == same
        got, want = tensor_of(ours).detach(), tensor_of(theirs).detach()
        shard = layout_of(got).shard
        assert torch.equal(got.to_local(), got.full_tensor()[shard.slices]), (name, shard)
        worst = max(worst, float((got.full_tensor() - want).norm() / want.norm()))
    return worst


def _train(degrees, sizes):
    model, whole, meshes = _pair(degrees, sizes)
    errors = {"weights": _error(model, whole, lambda p: p)}
    _backward(model, whole, meshes)
    errors["gradients"] = _error(model, whole, lambda p: p.grad)
    got = clip_grad_norm_(model.parameters(), 0.1, meshes=meshes)
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    assert want > 0.2
    errors["norm"] = abs(float(got / want) - 1)
    for m in (model, whole):
        torch.optim.AdamW(m.parameters(), lr=1e-2).step()
    errors["step"] = _error(model, whole, lambda p: p)
    placements = [str(p.placements) for p in model.layers[0].experts.parameters()]
    return errors, placements


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (3, [({"expert": 3}, {"experts": 6}), ({}, {"experts": 2})]),
        (
            4,
            [
                ({"expert": 2, "replicate": 2}, {}),
                ({"expert": 4, "context": 2}, {}),
                ({"expert": 2}, {"experts": 6, "hidden": 5}),
            ],
        ),
    ],
    ids=str,
)
def test_a_step_equals_one_rank(world_size, cases):
    for found in ranks.run(each, _train, cases, world_size=world_size):
        for case, (errors, placements) in zip(cases, found, strict=True):
            assert max(errors.values()) < 1e-12, (case, errors)
            if case == ({}, {"experts": 2}):
                # Over 3 ranks dim 1 of both (6 and 6) splits evenly. Dim 0 leaves a rank empty.
                assert placements == ["(Shard(dim=1), Shard(dim=0))"] * 2


def _low_precision_sum(dtype, reduce_dtype):
    """Gradients of a router and of another layer: 1 on rank 0, 2^-12 on rank 1."""
    router, other = layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    model = nn.Sequential(*layers)
    meshes = meshes_of()
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    fully_shard_moe(
        model, meshes, layers=[other], experts=[], routers=[router], precision=precision
    )
    with torch.no_grad():
        router.weight.fill_(1.0)
        other.weight.fill_(1.0)
    model(torch.tensor([[(1.0, 2.0**-12)[dist.get_rank()]]])).float().sum().backward()
    return [float(layer.weight.grad.full_tensor()) for layer in layers]


def test_gradients_of_routers_are_reduced_in_float32():
    low, half = torch.bfloat16, torch.float16
    kinds = [(low, low), (half, half), (torch.float32, low), (None, low)]
    assert ranks.run(each, _low_precision_sum, kinds) == [[[1 + 2.0**-12, 1.0]] * 4] * 2


class Gated(nn.Module):
    """A router and experts; remembers what the experts are called with."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 8, bias=False)
        self.experts = GroupedExperts(8, 16, 32, dispatcher=LocalDispatcher())

    def forward(self, x):
        scores, ids = self.gate(x.to(self.gate.weight.dtype)).float().softmax(-1).topk(2, dim=-1)
        self.seen = scores.dtype
        return self.experts(x, ids, scores)


def _router_gradient(dtype, output_dtype):
    """The router's gradient sharded and on one rank, where nothing but the experts is rounded."""
    torch.manual_seed(0)
    alone = Gated()
    model = copy.deepcopy(alone)
    x = torch.randn(64, 16).to(dtype)
    meshes = meshes_of(expert=2)
    model.experts.dispatcher = AllToAllDispatcher(meshes.expert.get_group())
    arrived = []
    dispatch = model.experts.dispatcher.dispatch
    model.experts.dispatcher.dispatch = lambda x, scores, ids, **rest: (
        arrived.append((x.dtype, scores.dtype)) or dispatch(x, scores, ids, **rest)
    )
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=output_dtype
    )
    fully_shard_moe(
        model, meshes, layers=[], experts=[model.experts], routers=[model.gate],
        precision=precision,
    )  # fmt: skip
    alone.experts.to(dtype)
    for module in (model, alone):
        module(x).float().square().sum().backward()
    want = 2 * alone.gate.weight.grad  # Both ranks hold the same tokens.
    got = model.gate.weight.grad.full_tensor()
    return arrived, float((got - want).norm() / want.norm())


def test_routers_stay_in_float32_to_the_experts():
    kinds = [(torch.bfloat16, None), (torch.float16, torch.float16)]
    for found in ranks.run(each, _router_gradient, kinds):
        for (dtype, _), (arrived, error) in zip(kinds, found, strict=True):
            assert arrived == [(dtype, torch.float32)]
            # Sums of 64 tokens in float32, in another order.
            assert error < 64 * torch.finfo(torch.float32).eps


def _frozen():
    """What does not train stays so, and each layer is gathered by itself."""
    torch.manual_seed(0)
    model = Model().requires_grad_(False)
    model.layers[1].experts.down_proj.requires_grad_()
    meshes = meshes_of(expert=2)
    _shard(model, meshes)
    assert all(isinstance(layer, FSDPModule) for layer in model.layers)
    _loss(model, dist.get_rank(), 1).backward()
    return [n for n, p in model.named_parameters() if p.requires_grad and p.grad is not None]


def test_frozen_experts_stay_frozen():
    assert ranks.run(_frozen) == [["layers.1.experts.down_proj"]] * 2


def _count_twice():
    meshes = meshes_of()
    own = torch.tensor(dist.get_rank() + 1)
    return [global_token_count(own, meshes) for _ in range(2)], global_token_count(0, meshes)


def test_counting_leaves_the_local_count_alone():
    assert ranks.run(_count_twice, world_size=3) == [([6, 6], 0)] * 3


def _accumulate():
    model, whole, meshes = _pair({"expert": 2}, {})
    for _ in range(2):
        _backward(model, whole, meshes)
    return _error(model, whole, lambda p: p.grad)


def test_micro_batches_add_up():
    assert max(ranks.run(_accumulate, world_size=2)) < 1e-12


def _clip_mixed():
    """A sharded, a replicated and a plain gradient: 3 x 1, 2 x 1, 1 x 1 ones and a None."""
    meshes = meshes_of()
    placed = [
        DTensor.from_local(torch.ones(1), meshes.fsdp, [Shard(0)]),
        DTensor.from_local(torch.ones(2), meshes.fsdp, [Replicate()]),
        torch.ones(1),
        None,
    ]
    parameters = [nn.Parameter(torch.zeros(1) if p is None else p.clone()) for p in placed]
    for parameter, grad in zip(parameters, placed, strict=True):
        parameter.grad = grad
    loose = clip_grad_norm_(parameters, 10.0, meshes=meshes)
    kept = [float(g.sum()) for g in (_local(p.grad) for p in parameters[:3])]
    norm = clip_grad_norm_(parameters, 1.0, meshes=meshes)
    clipped = clip_grad_norm_(iter(parameters), 1.0, meshes=meshes)
    parameters[2].grad.fill_(math.inf)
    bad = clip_grad_norm_(parameters, 1.0, meshes=meshes)
    parameters[2].grad.fill_(1e30)  # Its square is no float32.
    parameters[0].grad, parameters[1].grad = None, None
    assert float(clip_grad_norm_(parameters, 1.0, meshes=meshes)) == pytest.approx(1e30)
    half = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    half.grad = torch.full_like(half, 50_000.0)
    clip_grad_norm_([half], 1.0, meshes=meshes)  # By a factor that float16 holds in 2 bits.
    assert float(half.grad.double().norm()) == pytest.approx(1, rel=2**-11 + 1e-6)
    return float(loose), kept, float(norm), float(clipped), float(bad)


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def test_norms_count_every_element_once():
    for loose, kept, norm, clipped, bad in ranks.run(_clip_mixed, world_size=3):
        assert loose == norm == pytest.approx(math.sqrt(6), abs=1e-12)
        assert kept == [1, 2, 1]
        assert clipped == pytest.approx(1, abs=1e-5)
        assert bad == math.inf


def _refusals():
    model = Model()
    before = dict(model.named_parameters())
    meshes = meshes_of(expert=2)
    with pytest.raises(PlanError, match="expert=2, but no experts were given. Use expert=1"):
        fully_shard_moe(model, meshes, layers=model.layers, experts=[])
    with pytest.raises(PlanError, match="reshard_after_forward must be True or False; got 2"):
        fully_shard_moe(model, meshes_of(), layers=[], experts=[], reshard_after_forward=2)
    mixed = Model()
    mixed.layers[1] = Layer(3, 6, 3)
    kept = list(mixed.parameters())
    with pytest.raises(PlanError, match=r"gate_up_proj has 3 experts, which expert=2"):
        _shard(mixed, meshes)
    assert all(a is b for a, b in zip(mixed.parameters(), kept, strict=True))
    partial = nn.Parameter(DTensor.from_local(torch.zeros(1), meshes.fsdp, [Replicate()]))
    partial.grad = DTensor.from_local(torch.ones(1), meshes.fsdp, [Partial()])
    with pytest.raises(PlanError, match="partial gradient"):
        clip_grad_norm_([partial], 1.0, meshes=meshes)
    return all(p is before[name] for name, p in model.named_parameters())


def test_what_cannot_work_is_refused_and_nothing_changes():
    assert ranks.run(_refusals, world_size=2) == [True, True]


def _forwards_before_one_backward(use_reentrant, forwards):
    model, whole, meshes = _pair({}, {})
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
    x = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(forwards)]
    sum(model(each).square().sum() for each in x).backward()
    try:
        clip_grad_norm_(model.parameters(), 1e9, meshes=meshes)
    except PlanError:
        model.zero_grad()
        sum(model(each).square().sum() for each in x[:1]).backward()
        _compare(model, whole, x[:1])
        raise
    _compare(model, whole, x)


def _compare(model, whole, x):
    sum(whole(each).square().sum() for each in x).backward()
    whole = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), dist.get_world_size() * whole[name], rtol=1e-9, atol=1e-9
        )


def test_checkpointed_forwards_have_the_gradients_of_plain_ones():
    ranks.run(each, _forwards_before_one_backward, [(False, 2), (True, 1)])


def test_reentrant_checkpoints_of_several_forwards_are_refused():
    """FSDP2 leaves what it gathered again, with gradients that no rank has reduced."""
    said = r"FSDP2 left \d+ parameters unsharded.*use_reentrant"
    with pytest.raises(ranks.RankError, match=said):
        ranks.run(_forwards_before_one_backward, True, 2, world_size=2)


def _early_optimizer():
    torch.manual_seed(0)
    model = Model()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    meshes = meshes_of()
    _shard(model, meshes)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    check_optimizer(model, late)
    check_optimizer(model, torch.optim.SGD(model.head.parameters(), lr=1.0))
    check_optimizer(
        nn.ModuleList([model, whole := nn.Linear(2, 2)]),
        torch.optim.SGD([*model.parameters(), *whole.parameters()], lr=1.0),
    )
    model(_input(0, 6)).square().sum().backward()
    clip_grad_norm_(model.parameters(), 1.0, meshes=meshes, optimizer=late)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    early.step()
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())
    with pytest.raises(PlanError, match="Make the optimizer after parallelize"):
        check_optimizer(model, early)
    with pytest.raises(PlanError, match=r"\d+ of \d+ tensors of the optimizer are not parameters"):
        clip_grad_norm_(model.parameters(), 1.0, meshes=meshes, optimizer=early)
    with pytest.raises(PlanError, match="sharded already"):
        _shard(model, meshes)


def test_an_optimizer_from_before_trains_nothing_and_is_refused():
    ranks.run(_early_optimizer, world_size=2)
