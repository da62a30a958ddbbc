import copy
import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from primeblocks.errors import PlanError
from primeblocks.testing import ranks
from primeblocks.weightsync import Plan, describe, plan_sync
from primeblocks.weightsync.manifest import Manifest, gather_manifests


class Odd(nn.Module):
    """Names that look like wrappers', and buffers of both kinds."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.ModuleDict({"module": nn.Linear(2, 2)}))
        self.register_buffer("cache", torch.zeros(9), persistent=False)


compiled = partial(torch.compile, backend="eager")


def _wrapped():
    """Wrap modules in all ways, at the root and inside; compare with torch's own clean names."""
    mesh, wanted = init_device_mesh("cpu", (1,)), list(describe(Odd()))
    whole = Odd()
    inside = Odd()
    inside.layers[0] = compiled(checkpoint_wrapper(inside.layers[0]))
    inside.module = DistributedDataParallel(inside.module)
    deep = Odd()
    deep.layers = checkpoint_wrapper(compiled(deep.layers))
    for model in (
        compiled(whole),
        DistributedDataParallel(compiled(Odd())),
        compiled(DistributedDataParallel(Odd())),
        checkpoint_wrapper(Odd()),
        offload_wrapper(compiled(Odd())),
        inside,
        fully_shard(deep, mesh=mesh),
    ):
        raw = [name for name, _ in model.named_parameters()]
        assert list(describe(model)) == wanted, raw
        # torch forgets to look through a checkpoint wrapper into what was compiled.
        theirs = {name.replace("_orig_mod.", "") for name in get_model_state_dict(model)}
        assert theirs == set(wanted), raw
    flat = Odd()
    flat.layers = FullyShardedDataParallel(
        flat.layers, use_orig_params=True, device_id=torch.device("cpu")
    )
    assert "layers._fsdp_wrapped_module.0.weight" in dict(flat.named_parameters())
    assert list(describe(flat)) == wanted


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning", "ignore:.*FSDP:FutureWarning")
def test_wrappers_leave_no_trace_in_names():
    ranks.run(_wrapped, world_size=1)


def _flattened_or_partial():
    with pytest.raises(PlanError, match="FSDP1 has flattened the parameters. Use .*fully_shard"):
        describe(
            FullyShardedDataParallel(Odd(), use_orig_params=True, device_id=torch.device("cpu"))
        )
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(PlanError, match="partial"):
        describe({"a": DTensor.from_local(torch.ones(3), mesh, [Partial()])})


def test_flattened_parameters_and_partial_sums_are_refused():
    ranks.run(_flattened_or_partial, world_size=2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.zeros(3, dtype=torch.float32))
        self.register_buffer("cache", torch.zeros(9), persistent=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def test_a_module_is_its_parameters_once_and_its_persistent_buffers():
    manifest = describe(Tied(), dtype=torch.bfloat16)
    assert {name: (spec.dtype, spec.shape) for name, spec in manifest.items()} == {
        "embed.weight": (torch.bfloat16, (6, 4)),
        "bias": (torch.bfloat16, (3,)),
        "steps": (torch.int64, (2,)),
    }


KEPT = [
    "mlp.gate.e_score_correction_bias",
    "feed_forward.expert_bias",
    "moe.expert_bias_E",
    "router.balancing_biases",
    "3.ffn.gate.bias",
    "3.ffn.gate.bias_vl",
    "moe.router_bias",
    "model.layers.3.mlp.gate.weight",  # GLM-4-MoE, MiMo-V2, Ling, Ernie 4.5
    "mlp.router.gate.weight",  # AFMoE, HY-V3
    "block_sparse_moe.gate.weight",  # MiniMax-M2
    "layers.3.moe.gate.weight",  # Step-3.5
    "layers.3.mixer.gate.weight",  # Nemotron-H
    "mlp.router.classifier.weight",  # LongCat-Flash
]


@pytest.mark.parametrize("name", KEPT)
def test_biases_and_weights_that_choose_experts_are_not_rounded(name):
    other = "mlp.shared_expert_gate.weight"
    held = {name: torch.tensor([14.31]), other: torch.zeros(1)}
    want = {name: torch.float32, other: torch.bfloat16}
    for sent in (describe(held, dtype=torch.bfloat16), describe(held).whole(dtype=torch.bfloat16)):
        assert {each: spec.dtype for each, spec in sent.items()} == want
    narrow = describe({name: torch.zeros(1, dtype=torch.bfloat16)}, dtype=torch.float32)
    assert narrow[name].dtype == torch.float32


def test_whole_and_json_round_trip():
    tensors = {"a": torch.zeros(2, 3), "s": torch.tensor(1), "e": torch.zeros(0, 4)}
    manifest = describe(tensors)
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert manifest.whole(dtype=torch.float16) != manifest
    assert manifest.whole(dtype=torch.float16)["s"].dtype == torch.int64
    assert list(again) == ["a", "s", "e"]


def test_a_name_twice_is_refused():
    pairs = [("a", torch.zeros(1)), ("a", torch.zeros(2))]
    with pytest.raises(PlanError, match="1 names occur twice among 2"):
        describe(pairs)


def _experts_under_fsdp():
    """FSDP2 over the shards of expert parallelism: dim 0 is cut twice, experts first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "expert"))
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(8, 3, 5))
    model.norm = nn.Parameter(torch.randn(7))
    whole = copy.deepcopy(dict(model.named_parameters()))
    model.experts = nn.Parameter(
        distribute_tensor(whole["experts"].data, mesh["expert"], [Shard(0)])
    )
    model.norm = nn.Parameter(distribute_tensor(whole["norm"].data, mesh["expert"], [Replicate()]))
    fully_shard(model, mesh=mesh["fsdp"])
    return model, whole


def _describe_sharded():
    model, whole = _experts_under_fsdp()
    manifest = describe(model)
    placements = {type(p).__name__ for t in model.parameters() for p in t.placements}
    for name, tensor in model.named_parameters():
        box = manifest[name].layout.shard.slices
        torch.testing.assert_close(tensor.to_local(), whole[name][box], rtol=0, atol=0)
    model.unshard()  # As after a forward without a backward.
    assert describe(model) == manifest
    gathered = gather_manifests(manifest)
    assert gathered[dist.get_rank()] == manifest
    return [m.to_json() for m in gathered], sorted(placements)


def _described_in_a_forward():
    model = fully_shard(nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda module, args: describe(module))
    for _ in range(2):  # The first error leaves FSDP2 inside the forward.
        with pytest.raises(PlanError, match="FSDP2 is inside a forward"):
            model(torch.ones(2, 4))
    with pytest.raises(PlanError, match="an error ended one"):
        describe(model)


def test_a_model_inside_a_forward_is_not_resharded():
    ranks.run(_described_in_a_forward, world_size=2)


def test_fsdp_over_experts_is_described_by_rank():
    results = ranks.run(_describe_sharded, world_size=4)
    assert all(result == results[0] for result in results)
    manifests = [Manifest.from_json(text) for text in results[0][0]]
    assert "_StridedShard" in results[0][1]
    assert sorted(m["experts"].layout.shard.offsets[0] for m in manifests) == [0, 2, 4, 6]
    assert {m["experts"].shape for m in manifests} == {(8, 3, 5)}


GOOD = describe({"w": torch.zeros(4, 2)})


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "{}", '["",1]', '["",[["w","float32",[4]]]]',
     '["",[["w",3,[4],[0],[4]]]]',
     '["",[["w","float32",["a"],[0],[4]]]]', '["",[["w","float33",[4],[0],[4]]]]'],
)  # fmt: skip
def test_a_text_that_is_no_manifest_or_plan_is_refused(text):
    with pytest.raises(PlanError, match="describe a manifest|no dtype|a box cannot"):
        Manifest.from_json(text)
    with pytest.raises(PlanError, match="does not describe a plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("key", ["target", "world_size", "bucket_bytes", "wants", "buckets"])
@pytest.mark.parametrize("value", [None, "x", [[5]], {"a": 1}])
def test_a_plan_with_another_value_in_it_is_refused(key, value):
    head = json.loads(plan_sync([GOOD], GOOD.whole(), bucket_bytes=64).to_json())
    with pytest.raises(
        PlanError, match=r"(?s)does not describe a (plan|manifest): .*Pass on what to_json"
    ):
        Plan.from_json(json.dumps({**head, key: value}))


@pytest.mark.parametrize("view", [torch._neg_view, lambda w: torch.complex(w, w).conj()])
def test_a_tensor_whose_bits_are_not_stored_is_refused(view):
    with pytest.raises(PlanError, match=r"'w' is a negated or conjugated view.*resolve_neg\(\)"):
        describe({"w": view(torch.eye(3))})
