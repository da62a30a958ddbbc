import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from primeblocks import fp8
from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.testing import ranks, tiny_models
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.adapters.transformers import to_checkpoint
from primeblocks.weightsync.manifest import Manifest, gather_manifests, named_tensors
from primeblocks.weightsync.observed import observe
from tests.weightsync.toy_engine import moved, wirings

pytest.importorskip("transformers")

SIZES = {"num_layers": 4, "hidden": 64, "num_experts": 3, "top_k": 1, "vocab": 72}
# With sinks and biases; with corrections of routers and latent attention; linear attention; plain.
FEW = ("gpt_oss", "deepseek_v3", "qwen3_5_moe", "qwen3_moe")
TINY = (*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES)


def assert_same(got, wanted):
    assert set(got) == set(wanted)
    different = [
        name
        for name, tensor in wanted.items()
        if got[name].dtype != tensor.dtype or not torch.equal(got[name], tensor)
    ]
    assert not different


@pytest.mark.parametrize("family", TINY)
def test_the_wiring_makes_what_save_pretrained_writes(family, tmp_path):
    model = tiny_models.build(family, **SIZES)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    module = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    wiring = to_checkpoint(model)
    assert_same(moved(wiring, module), saved)


def encoded(hidden, rows=128, *, family="qwen3_moe"):
    model = tiny_models.build(family, **SIZES | {"num_layers": 1, "hidden": hidden})
    recipe = fp8.Recipe(weights=fp8.Tile(rows, 128))
    encode = fp8.encode_weights(recipe, only=r"mlp\.experts", layouts=None)
    return recipe, model, encode, to_checkpoint(model, encode.describe(describe(model)))


@pytest.mark.parametrize(("hidden", "rows"), [(256, 128), (384, 128), (192, 64), (192, 96)])
def test_experts_of_whole_tiles_are_the_codes_of_the_checkpoint(hidden, rows, tmp_path):
    recipe, model, encode, wiring = encoded(hidden, rows)
    made = {}
    for name, tensor in named_tensors(model).items():
        made |= encode(name, tensor.detach())
    got = moved(wiring, made)
    model.save_pretrained(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if ".experts." in name:
            alone = recipe.quantize_weight(tensor)
            assert got[name].view(torch.uint8).equal(alone.codes.view(torch.uint8))
            assert got[f"{name}_scale_inv"].equal(alone.scales)


@pytest.mark.parametrize("hidden", [96, 128, 192, 320])
def test_experts_that_would_cut_a_tile_are_refused(hidden):
    """A width of 128 is one tile, whose scale would lose its dims."""
    with pytest.raises(
        PlanError, match=r"gate_up_proj: the conversion to .* separates codes .*simulated"
    ):
        encoded(hidden)


@pytest.mark.parametrize(("family", "hidden"), [("qwen3_moe", 64), ("qwen3_vl_moe", 256)])
def test_scales_that_transformers_cannot_convert_are_refused(family, hidden):
    """Less than one tile; and a conversion that looks up each name in the module."""
    with pytest.raises(PlanError, match="cannot convert the tensors of Qwen3.*Error.*simulated"):
        encoded(hidden, family=family)


@pytest.mark.parametrize("family", TINY)
def test_a_sink_a_bias_or_a_norm_that_changed_alone_arrives_and_is_named(family, full, tmp_path):
    if family not in FEW and not full:
        pytest.skip("runs under --full")
    model = tiny_models.build(family, **SIZES)
    convert, vectors = to_checkpoint(model), {}
    for name, tensor in named_tensors(model).items():
        if tensor.ndim == 1 or name.endswith("bias"):
            vectors[re.sub(r"\d+", "N", name)] = name, tensor  # The last layer's.
    assert any("norm" in kind for kind in vectors)
    leads = {
        name: sorted({p.target for p in convert.by_source[name]}) for name, _ in vectors.values()
    }
    sent = {target for row in leads.values() for target in row}
    checkpoint = Manifest(tuple((n, spec) for n, spec in convert.targets.items() if n in sent))
    plan = plan_sync([describe(model)], checkpoint, bucket_bytes=1 << 16, convert=convert)
    ways, got = wirings(checkpoint, 2), {}

    def found():
        held = [(moved(way, got), way) for way in ways]
        seen = [observe(plan, parameters, convert=way) for parameters, way in held]
        return verify_engine(model, seen, plan=plan, convert=convert)

    load = lambda tensors: got.update({name: tensor.clone() for name, tensor in tensors})  # noqa: E731
    with (
        SharedMemoryTransport("policy", owner=True, root=str(tmp_path)) as transport,
        Publisher(plan, model, transport, convert=convert) as publisher,
        Subscriber(plan, load, transport) as subscriber,
    ):
        publisher.publish(0, timeout_s=120)
        subscriber.receive(timeout_s=120)
        for version, (name, tensor) in enumerate(vectors.values(), 1):
            with torch.no_grad():
                tensor.add_(1)
            assert list(found().differing) == leads[name]
            publisher.publish(version, timeout_s=120)
            subscriber.receive(timeout_s=120)
            assert found().is_proved


def _shards(folder):
    """Write the checkpoint of a model whose class FSDP2 changed, from its gathered tensors."""
    model = tiny_models.build("mixtral", **SIZES)
    whole = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    for part in (model.model, model):
        fully_shard(part)
    wiring = to_checkpoint(model, *gather_manifests(describe(model)))
    dist.barrier()
    assert_same(moved(wiring, whole), load_file(folder / "model.safetensors"))


def test_a_sharded_model_has_the_checkpoint_of_the_whole_one(tmp_path):
    ranks.run(_shards, tmp_path, world_size=2)


def test_a_compiled_model_has_the_checkpoint_of_the_plain_one():
    model = tiny_models.build("mixtral", **SIZES)
    assert to_checkpoint(torch.compile(model, backend="eager")) == to_checkpoint(model)


def doubled(of):
    class Doubled(of.ConversionOps):
        reverse_op = property(lambda self: self)

        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            (tensor,) = input_dict.values()
            return {target_patterns[0]: tensor[0] * 2}

    return of.WeightConverter("q_proj", "q_proj", [Doubled()])


def converted(transform, monkeypatch):
    """A model whose family is converted like this."""
    from transformers import conversion_mapping, core_model_loading

    model = tiny_models.build("qwen3", **SIZES)
    known = {"Qwen3ForCausalLM": [transform(core_model_loading)]}
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", known.get)
    return model


def test_a_model_with_adapters_is_refused():
    model = tiny_models.build("llama")
    merged = describe(model)
    model.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(2)))
    assert to_checkpoint(model, merged).targets
    with pytest.raises(UnsupportedError, match=r"has adapters \(lora_A\)"):
        to_checkpoint(model)


@pytest.mark.parametrize(
    ("transform", "error", "match"),
    [
        (doubled, PlanError, "4 of .* not just moved, such as '.*q_proj.weight': it is computed"),
        (
            lambda of: of.WeightRenaming("q_proj", "k_proj"),
            UnsupportedError,
            "has .* elements, but .*record_wiring",
        ),
    ],
)
def test_what_is_computed_or_lost_is_refused(transform, error, match, monkeypatch):
    model = converted(transform, monkeypatch)
    with pytest.raises(error, match=match):
        to_checkpoint(model)


def test_rows_in_another_order_are_followed(monkeypatch, tmp_path):
    interleaved = lambda of: of.WeightConverter("q_proj", "q_proj", [of.Interleave(0)])  # noqa: E731
    model = converted(interleaved, monkeypatch)
    model.save_pretrained(tmp_path)
    module = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    saved = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(saved[name], module[name])
    assert_same(moved(to_checkpoint(model), module), saved)
