"""torchtitan's expert parallelism under imposed routes, against its own experts on one rank.

In a file of its own: torchtitan looks for a GPU when it is first imported, so each rank tells it
to use the CPU before it imports the rest.
"""

import importlib.util
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from primeblocks.replay import Routes, impose
from primeblocks.testing import ranks

_ABSENT = [n for n in ("torchtitan", "spmd_types", "triton") if importlib.util.find_spec(n) is None]
pytestmark = pytest.mark.skipif(bool(_ABSENT), reason=f"not installed: {', '.join(_ABSENT)}")

EXPERTS, TOP_K, HIDDEN = 8, 3, 16


def _parallel_dims(degree):
    import torch.testing._internal.distributed.fake_pg  # Meshes of one rank are built on it.
    import torchtitan.tools.utils as tools

    tools.device_type, tools.device_module = "cpu", torch.cpu
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    # The default one calls a collective that gloo lacks.
    set_spmd_backend("partial_dtensor")
    size = dist.get_world_size()
    degrees = {"dp_replicate": 1, "dp_shard": size, "cp": 1, "tp": 1, "pp": 1, "ep": degree}
    dims = ParallelDims(**degrees, world_size=size, spmd_backend="partial_dtensor")
    dims.build_mesh()
    return dims


class Model(nn.Module):
    """One layer; its experts on this rank, or dealt over `mesh`."""

    def __init__(self, mesh=None):
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor
        from torchtitan.models.common import moe as titan
        from torchtitan.models.common import token_dispatcher as dispatchers
        from torchtitan.models.common.linear import Linear

        torch.manual_seed(0)
        name = "LocalTokenDispatcher" if mesh is None else "AllToAllTokenDispatcher"
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K}
        gate = Linear.Config(in_features=HIDDEN, out_features=EXPERTS)
        experts = titan.GroupedExperts.Config(dim=HIDDEN, hidden_dim=32, num_experts=EXPERTS)
        moe = titan.MoE.Config(
            num_experts=EXPERTS,
            router=titan.TokenChoiceTopKRouter.Config(gate=gate, route_norm=True, **sizes),
            routed_experts=titan.RoutedExperts.Config(
                inner_experts=experts, token_dispatcher=getattr(dispatchers, name).Config(**sizes)
            ),
        ).build()
        for parameter in moe.parameters():
            nn.init.normal_(parameter, std=0.3)
        if mesh is not None:
            moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
            own = moe.routed_experts.inner_experts
            for name, parameter in list(own.named_parameters()):
                dealt = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                setattr(own, name, nn.Parameter(dealt))
        self.layers = nn.ModuleDict({"1": nn.ModuleDict({"moe": moe})})

    @property
    def moe(self):
        return self.layers["1"]["moe"]

    def forward(self, x):
        return x + self.moe(x)


def _step(model, x, routes):
    from primeblocks.replay.adapters.torchtitan import routers

    x = x.clone().requires_grad_()
    with impose(routers(model), routes):
        out = model(x)
    out.square().sum().backward()
    return out.detach(), x.grad, model.moe.router.gate.weight.grad, model.moe.tokens_per_expert_E


def _expert_parallel():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    mesh = _parallel_dims(2).get_optional_mesh("ep")
    tokens = 5 + 3 * dist.get_rank()
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1, tokens, HIDDEN, generator=generator)
    routes = Routes.from_array(
        torch.rand(tokens, 1, EXPERTS, generator=generator).topk(TOP_K).indices.numpy(),
        num_experts=EXPERTS,
        layer_ids=[1],
        missing=np.arange(tokens) % 5 == 4,
    )
    local, parallel = _step(Model(), x, routes), _step(Model(mesh), x, routes)
    known = torch.from_numpy(routes.experts[~routes.missing].astype(np.int64))
    at_least = torch.bincount(known.flatten(), minlength=EXPERTS)
    counted = bool((parallel[3] >= at_least).all()) and parallel[3].sum() == tokens * TOP_K
    return counted, [float((a - b).abs().max()) for a, b in zip(local, parallel, strict=True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_expert_parallelism_changes_no_bit_of_imposed_routes(world_size):
    for counted, differences in ranks.run(_expert_parallel, world_size=world_size):
        assert counted
        assert differences == [0, 0, 0, 0]
