"""torchtitan's own MoE modules. Skipped, with the reason, where it cannot be imported."""

import importlib
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from primeblocks.errors import MissingPackageError, UnsupportedError
from primeblocks.replay import Routes, allow_compile, impose, record
from primeblocks.testing import ranks
from tests.replay.reference import sigmoid_router, softmax_router

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    try:
        from torchtitan.models.common import moe as titan
        from torchtitan.models.common.linear import Linear
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    except ImportError as error:
        pytest.skip(
            f"torchtitan's MoE module cannot be imported ({error})", allow_module_level=True
        )

from primeblocks.replay.adapters import torchtitan as adapter
from primeblocks.replay.adapters.torchtitan import routers

# The router asks for float32 autocast, which CPUs do not have: it runs in the dtype given.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")

EXPERTS, TOP_K, HIDDEN, LAYERS = 8, 3, 16, (1, 2)
SETTINGS = {
    "softmax": {"score_func": "softmax"},
    "softmax, normalised": {"score_func": "softmax", "route_norm": True},
    "sigmoid, normalised, scaled": {
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
    },
    "groups": {
        "score_func": "sigmoid",
        "route_norm": True,
        "num_expert_groups": 4,
        "num_limited_groups": 2,
    },
    "forced balance": {"score_func": "softmax", "_debug_force_load_balance": True},
}


class Float64Experts(nn.Module):
    """In the place of RoutedExperts, which computes in bfloat16 and combines in float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN)

    def forward(self, x, gates, ids, counts):
        assert counts.tolist() == torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        return torch.einsum("bld,blkdh,blk->blh", x, self.weight[ids], gates)


class Block(nn.Module):
    def __init__(self, settings, bias, float64):
        super().__init__()
        self.moe = titan.MoE.Config(
            num_experts=EXPERTS,
            load_balance_coeff=1e-3 if bias else None,
            router=titan.TokenChoiceTopKRouter.Config(
                num_experts=EXPERTS,
                top_k=TOP_K,
                gate=Linear.Config(in_features=HIDDEN, out_features=EXPERTS),
                **settings,
            ),
            routed_experts=titan.RoutedExperts.Config(
                inner_experts=titan.GroupedExperts.Config(
                    dim=HIDDEN, hidden_dim=2 * HIDDEN, num_experts=EXPERTS
                ),
                token_dispatcher=LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
            ),
        ).build()
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.3)
        if bias:
            nn.init.normal_(self.moe.expert_bias_E)
        if float64:
            self.moe.routed_experts = Float64Experts()

    def forward(self, x):
        return x + self.moe(x)


class Model(nn.Module):
    """Named as torchtitan names its layers; the first, dense one is left out."""

    def __init__(self, settings, *, bias=True, float64=False, checkpoint=None):
        super().__init__()
        torch.manual_seed(0)
        self.checkpoint = checkpoint
        self.layers = nn.ModuleDict({str(i): Block(settings, bias, float64) for i in LAYERS})

    def forward(self, x):
        for layer in self.layers.values():
            if self.checkpoint is None:
                x = layer(x)
            else:
                x = recompute(layer, x, use_reentrant=self.checkpoint)
        return x


def _inputs(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, HIDDEN, dtype=dtype, generator=generator)


def _foreign(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return Routes.from_array(
        torch.rand(10, len(LAYERS), EXPERTS, generator=generator).topk(TOP_K).indices.numpy(),
        num_experts=EXPERTS,
        layer_ids=LAYERS,
        missing=np.arange(10) % 5 == 2,
    )


def _step(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def _assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_own_routes_change_no_bit(name, bias, checkpoint):
    model = Model(SETTINGS[name], bias=bias, checkpoint=checkpoint)
    found = routers(model)
    with record(found, gates=True) as tape:
        own = _step(model, _inputs())
    with impose(found, tape.routes):
        _assert_equal(_step(model, _inputs()), own)
    with impose(found, tape.routes, gates=tape.gates):
        _assert_equal(_step(model, _inputs()), own)
    with impose(found, _foreign()):
        assert not torch.equal(_step(model, _inputs())[0], own[0])


def _reference(model, x, settings, routes):
    """Loops over tokens and slots, and the tokens that each expert of each layer got."""
    softmax = settings["score_func"] == "softmax"
    tokens, counts = x.reshape(-1, HIDDEN), []
    for column, layer in enumerate(model.layers.values()):
        moe, rows = layer.moe, routes.experts[:, column].tolist()
        options = {
            "top_k": TOP_K,
            "renormalise": settings.get("route_norm", False),
            "imposed": [None if m else r for r, m in zip(rows, routes.missing, strict=True)],
        }
        if not softmax:
            options |= {
                "scale": settings.get("route_scale", 1.0),
                "correction_bias": moe.expert_bias_E.double(),
            }
        router = softmax_router if softmax else sigmoid_router
        gates, ids = router(tokens, moe.router.gate.weight, **options)
        weight = moe.routed_experts.weight
        tokens = torch.stack(
            [
                token + sum(gates[t, k] * (token @ weight[e]) for k, e in enumerate(ids[t]))
                for t, token in enumerate(tokens)
            ]
        )
        counts.append(np.bincount(np.ravel(ids), minlength=EXPERTS))
    return tokens.reshape(x.shape), counts


@pytest.mark.parametrize("name", ["softmax", "softmax, normalised", "sigmoid, normalised, scaled"])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_foreign_routes_equal_plain_loops_and_are_what_balancing_counts(name, checkpoint):
    settings, x = SETTINGS[name], _inputs(torch.float64)
    bias = settings["score_func"] == "sigmoid"  # The loops know it there only.
    model = Model(settings, bias=bias, float64=True, checkpoint=checkpoint)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    with impose(routers(model), _foreign()):
        found = _step(model, x)
    recorded = [layer.moe.tokens_per_expert_E.clone() for layer in model.layers.values()]
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out, counts = _reference(model, leaf, settings, _foreign())
    out.square().sum().backward()
    wanted = [out.detach(), leaf.grad, *(p.grad for p in model.parameters())]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    # Recomputation runs the whole layer again, and torchtitan counts again.
    runs = 1 if checkpoint is None else 2
    for seen, count in zip(recorded, counts, strict=True):
        assert seen.tolist() == (runs * count).tolist()


def _compiled():
    """Each block compiled in full, as torchtitan does; checkpoints are inside, as there."""
    warnings.filterwarnings("ignore", message="In CPU autocast")
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for checkpoint in (False, None):
        eager = Model(SETTINGS["groups"])
        model = Model(SETTINGS["groups"])
        if checkpoint is not None:
            for name, block in model.layers.items():
                model.layers[name] = Recomputed(block)
        found = routers(model)
        allow_compile(found)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        for block in model.layers.values():
            block.compile(backend=counter, fullgraph=True)
        counts = []
        for seed in range(4):
            with impose(found, _foreign(seed)):
                seen = _step(model, _inputs(seed=seed))
            with impose(routers(eager), _foreign(seed)):
                _assert_equal(seen, _step(eager, _inputs(seed=seed)))
            counts.append(counter.frame_count)
        assert counts[1] == counts[-1], counts


class Recomputed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self._checkpoint_wrapped_module = block

    def forward(self, x):
        return recompute(self._checkpoint_wrapped_module, x, use_reentrant=False)


def test_compiled_blocks_follow_the_routes_without_compiling_again():
    ranks.run(_compiled, world_size=1)


def _sharded():
    from torch.distributed.fsdp import fully_shard

    model = Model(SETTINGS["sigmoid, normalised, scaled"], float64=True)
    for block in model.layers.values():
        fully_shard(block.moe.router)
        fully_shard(block)
    found = routers(model)
    with record(found) as tape:
        own = model(_inputs())
    with impose(found, tape.routes):
        assert torch.equal(model(_inputs()), own)


def test_fsdp_changes_the_class_and_nothing_else():
    ranks.run(_sharded, world_size=2)


class OtherRouter(titan.TokenChoiceTopKRouter):
    def forward(self, x, bias=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("family", "configs", "name", "layer_ids", "sizes"),
    [
        ("deepseek_v3", "deepseekv3_configs", "debugmodel", range(1, 6), (8, 3)),
        ("qwen3", "qwen3_configs", "debugmodel_moe", range(8), (64, 8)),
        ("gpt_oss", "gptoss_configs", "debugmodel", range(4), (8, 4)),
    ],
)
def test_the_routers_of_its_models_are_found(family, configs, name, layer_ids, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(f"torchtitan.models.{family}")
        config = getattr(module, configs)[name](attn_backend="flex", moe_comm_backend="standard")
        with torch.device("meta"):
            found = routers(config.build())
    assert [router.layer_id for router in found] == list(layer_ids)
    assert {(router.num_experts, router.top_k) for router in found} == {sizes}


def test_other_routers_are_refused():
    with pytest.raises(UnsupportedError, match=r"no module of Linear is a torchtitan\.models"):
        routers(nn.Linear(2, 2))
    model = Model(SETTINGS["softmax"])
    model.layers["1"].moe.router.__class__ = OtherRouter
    with pytest.raises(UnsupportedError, match=r"'layers\.1\.moe\.router', a OtherRouter, is not"):
        routers(model)
    with pytest.raises(UnsupportedError, match="not in a numbered layer"):
        routers(model.layers["2"])


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(adapter, "_RELEASE", "0.3.1")
    with pytest.raises(UnsupportedError, match=re.escape("pip install torchtitan==0.3.0")):
        routers(Model(SETTINGS["softmax"]))


def test_other_outputs_are_refused():
    (router, _) = routers(Model(SETTINGS["softmax"]))
    x = torch.zeros(2, 3)
    with pytest.raises(UnsupportedError, match=r"does not return \(gates, ids, scores\)"):
        router.experts((x, x, x))
    with pytest.raises(UnsupportedError, match="does not return"):
        router.experts(x)


def _tensor_parallel():
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    (router, _) = routers(Model(SETTINGS["softmax"]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    output = tuple(distribute_tensor(t, mesh, [Replicate()]) for t in torch.zeros(3, 2, 3, 4))
    with pytest.raises(UnsupportedError, match="tensor parallelism"):
        router.experts(output)


def test_tensor_parallel_routers_are_refused():
    ranks.run(_tensor_parallel, world_size=1)


def test_a_missing_package_is_named(monkeypatch):
    name = "primeblocks.replay.adapters.torchtitan"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[torchtitan\]'"):
        importlib.import_module(name)
