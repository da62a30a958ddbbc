"""Our dispatchers in torchtitan's experts, its dispatchers behind our protocol."""

import copy
import importlib
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint as recompute

from primeblocks.parallel import reference
from primeblocks.parallel.experts import (
    AllToAllDispatcher,
    LocalDispatcher,
    OncePerRankDispatcher,
    TokenDispatcher,
)
from primeblocks.testing import ranks
from primeblocks.testing.oracles import gradients_of, max_relative_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    try:
        from tests.parallel.torchtitan_on_cpu import moe, parallel_dims
        from tests.parallel.torchtitan_on_cpu import token_dispatcher as titan
    except ImportError as error:
        pytest.skip(
            f"torchtitan's MoE module cannot be imported ({error})", allow_module_level=True
        )
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    from primeblocks.parallel.adapters.torchtitan import (
        ForTorchtitan,
        FromTorchtitan,
        dispatcher_for,
        join_weights,
        split_weights,
        use_dispatcher,
    )

# The router asks for float32 autocast, which CPUs do not have: it runs in the dtype given.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 3, 16, 32
SIZES = {"num_experts": EXPERTS, "top_k": TOP_K}
WEIGHTS = ("w1_EFD", "w2_EDF", "w3_EFD")
TOKENS = (5, 0, 11, 2)  # By rank: ragged, one without any.


def batch(tokens, *, seed, top_k=TOP_K, experts=EXPERTS):
    """Small dyadic numbers in float64: every sum is exact in float32, whatever its order."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (tokens, HIDDEN), generator=g).double()
    scores = torch.randint(1, 9, (tokens, top_k), generator=g).double() / 8
    ids = torch.rand(tokens, EXPERTS, generator=g)[:, :experts].topk(top_k).indices
    return x, scores, ids


def _counts(ids):
    return torch.bincount(ids.flatten(), minlength=EXPERTS)


def _weigh(tokens, counts, first):
    """Experts that tell who they are: each multiplies its rows by its number."""
    numbers = torch.arange(first, first + len(counts), dtype=tokens.dtype)
    return tokens * (1 + numbers).repeat_interleave(counts.to("cpu")).unsqueeze(1)


def _through_titan(dispatcher, x, scores, ids, *, first=0):
    """Output, gradients, rows and counts through torchtitan's three calls."""
    seen = []

    def run(x, scores):
        rows, counts, metadata = dispatcher.dispatch(x, scores, ids, _counts(ids))
        seen.extend((rows.detach(), counts))
        return dispatcher.combine(_weigh(rows, counts, first), metadata, x)

    out = gradients_of(run, x, scores, cotangent=batch(len(x), seed=99)[0])
    return [out.output, *out.gradients, *seen]


def through_ours(dispatcher, x, scores, ids, *, first=0):
    """The same through our two calls."""
    seen = []

    def run(x, scores):
        sent = dispatcher.dispatch(x, scores, ids, num_experts=EXPERTS)
        seen.extend((sent.tokens.detach(), sent.counts))
        return dispatcher.combine(_weigh(sent.tokens, sent.counts, first), sent)

    out = gradients_of(run, x, scores, cotangent=batch(len(x), seed=99)[0])
    return [out.output, *out.gradients, *seen]


def _all_agree(theirs, ours, hosted, x, scores, ids, *, first=0):
    """All dispatchers under both protocols. Bit for bit the same, and not trivially."""
    want = _through_titan(theirs, x, scores, ids, first=first)
    others = (
        *(_through_titan(one, x, scores, ids, first=first) for one in hosted),
        through_ours(ours, x, scores, ids, first=first),
        through_ours(FromTorchtitan(theirs), x, scores, ids, first=first),
    )
    for other in others:
        for got, wanted in zip(other, want, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)
    owners = (1 + ids).unsqueeze(2) * scores.unsqueeze(2)
    assert torch.equal(want[0], (owners * x.unsqueeze(1)).sum(1))
    cotangent = batch(len(x), seed=99)[0]
    assert torch.equal(want[1], (owners * cotangent.unsqueeze(1)).sum(1))
    assert torch.equal(want[2], (1 + ids) * (x * cotangent).sum(1, keepdim=True))


@given(tokens=st.integers(0, 9), top_k=st.integers(1, 4), seed=st.integers(0, 999))
def test_local_dispatchers_agree_bit_for_bit(tokens, top_k, seed):
    sizes = {"num_experts": EXPERTS, "top_k": top_k}
    x, scores, ids = batch(tokens, seed=seed, top_k=top_k)
    hosted = ForTorchtitan.Config(**sizes).build()
    for kind in (titan.LocalTokenDispatcher, titan.AllToAllTokenDispatcher):
        _all_agree(kind.Config(**sizes).build(), LocalDispatcher(), [hosted], x, scores, ids)


def _once(group):
    return LocalDispatcher() if group is None else OncePerRankDispatcher(group)


def _all_shared(experts):
    for seed in range(2):
        _shared(seed, experts)


def _shared(seed, experts):
    mesh = parallel_dims(dist.get_world_size(), expert=dist.get_world_size()).get_mesh("ep")
    theirs = titan.AllToAllTokenDispatcher.Config(**SIZES).build()
    hosted = [ForTorchtitan.Config(**SIZES, make=make).build() for make in (dispatcher_for, _once)]
    for dispatcher in (theirs, *hosted):
        dispatcher.wire_meshes(ep_mesh=mesh)
    tokens = TOKENS[(dist.get_rank() + seed) % len(TOKENS)]
    own = batch(tokens, seed=10 * seed + dist.get_rank(), experts=experts)
    first = EXPERTS // dist.get_world_size() * dist.get_rank()
    _all_agree(theirs, AllToAllDispatcher(mesh.get_group()), hosted, *own, first=first)


@pytest.mark.parametrize("experts", [EXPERTS, TOP_K])  # The last: later ranks receive nothing.
@pytest.mark.parametrize("world_size", [2, 4])
def test_shared_experts_agree_bit_for_bit_on_ragged_ranks(world_size, experts):
    ranks.run(_all_shared, experts, world_size=world_size)


def config_of(kind=titan.AllToAllTokenDispatcher, *, shared=False):
    gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS)
    experts = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=EXPERTS)
    config = moe.MoE.Config(
        num_experts=EXPERTS,
        router=moe.TokenChoiceTopKRouter.Config(gate=gate, route_norm=True, **SIZES),
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=kind.Config(**SIZES)
        ),
    )
    if shared:
        layout = dict(zip(WEIGHTS, map(Shard, (1, 2, 1)), strict=True))
        set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    return config


def model_of(config):
    torch.manual_seed(0)
    model = config.build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _step(model, x, *, checkpoint=False):
    """Output and gradients by name, and the tokens that load balancing counts."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = recompute(model, x, use_reentrant=False) if checkpoint else model(x)
    out.backward(_input(x.shape[1], seed=7).to(out))
    found = {"out": out.detach(), "x": x.grad, "counts": model.tokens_per_expert_E}
    return found | {name: _local(p.grad) for name, p in model.named_parameters()}


def _input(tokens, seed=0):
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def _assert_near(got, want, *, tolerance):
    assert got.keys() == want.keys()
    errors = {name: max_relative_error(got[name], want[name]) for name in want}
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_experts_compute_the_same_on_activations_of_each_dtype(dtype):
    theirs = model_of(config_of()).routed_experts
    ours = copy.deepcopy(theirs)
    use_dispatcher(ours)
    x, scores, ids = batch(40, seed=3)
    routed = (scores[None].float(), ids[None], _counts(ids))
    found = []
    for model in (ours, theirs):
        out = gradients_of(
            lambda x, s, m=model: m(x, s, *routed[1:]), x[None].to(dtype) / 8, routed[0]
        )
        found.append([out.output, *out.gradients, *(p.grad for p in model.parameters())])
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        # Ours adds up a token's choices in float32, torchtitan in the dtype of the tokens.
        assert max_relative_error(got, want) <= (2**-7 if dtype == torch.bfloat16 else 1e-6)
    # A second opinion, and what the weights are in our layout.
    weights = join_weights(*(getattr(theirs.inner_experts, name) for name in WEIGHTS))
    exact = reference.experts(x / 8, ids, scores, *weights)
    assert (found[0][0][0] - exact).norm() / exact.norm() < 2**-6  # Theirs compute in bfloat16.
    for name, back in zip(WEIGHTS, split_weights(*weights), strict=True):
        assert torch.equal(back, getattr(theirs.inner_experts, name))


def _parallel_layers():
    """torchtitan parallelises its layer: with its dispatcher, with ours put in before and after."""
    dims = parallel_dims(dist.get_world_size(), expert=dist.get_world_size())
    configs = [config_of(shared=True) for _ in range(3)]
    assert use_dispatcher(configs[1]) == ("routed_experts",)
    theirs, before, after = models = [model_of(config) for config in configs]
    for model in models:
        model.parallelize(dims)
    use_dispatcher(after)
    x = _input(TOKENS[dist.get_rank()] + 1, seed=dist.get_rank())
    for model in (before, after):
        dispatcher = model.routed_experts.token_dispatcher
        assert isinstance(dispatcher.dispatcher, AllToAllDispatcher)
        assert model.routed_experts.inner_experts.w1_EFD.to_local().shape[0] < EXPERTS
        _assert_near(_step(model, x), _step(theirs, x), tolerance=1e-6)
        theirs.tokens_per_expert_E.zero_()


def test_its_parallel_layer_computes_the_same_with_our_dispatcher():
    ranks.run(_parallel_layers, world_size=4)


def test_its_model_is_built_with_our_dispatcher_in_every_layer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torchtitan.models.qwen3")
    config = module.qwen3_configs["debugmodel_moe"](
        attn_backend="flex", moe_comm_backend="standard"
    )
    names = use_dispatcher(config)
    with torch.device("meta"):
        model = config.build()
    modules = dict(model.named_modules())
    assert len(names) == len(model.layers) == 8
    assert names == tuple(n for n, m in modules.items() if isinstance(m, moe.RoutedExperts))
    for name in names:
        ours = modules[name].token_dispatcher
        assert (type(ours), ours.num_experts, ours.top_k) == (ForTorchtitan, 64, 8)


def _make(group):
    assert group is None
    return Named()


class Named(LocalDispatcher):
    pass


def test_any_dispatcher_of_ours_can_be_chosen():
    model = model_of(config_of())
    use_dispatcher(model)
    use_dispatcher(model, _make)
    assert isinstance(model.routed_experts.token_dispatcher.dispatcher, Named)
    theirs = titan.LocalTokenDispatcher.Config(**SIZES).build()
    assert isinstance(FromTorchtitan(theirs), TokenDispatcher)
