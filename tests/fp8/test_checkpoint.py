"""Codes and scales as DeepSeek-V3's checkpoints name them, and weights encoded for transfer."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from primeblocks.errors import PlanError, ShapeError, UnsupportedError, UsageError
from primeblocks.fp8 import Quantized, Recipe, Tile, audit, encode_weights
from primeblocks.fp8.checkpoint import config, pack_weight, unpack_weights
from primeblocks.layout import Layout, Shard, layout_of
from primeblocks.testing import ranks
from primeblocks.weightsync import describe

ranks.preload(__name__)  # With all that it imports.

RECIPE = Recipe(activations=Tile(1, 32), weights=Tile(16, 32))
NAME = "layers.0.self_attn.q_proj.weight"
EXPERTS = "layers.0.mlp.experts.gate_up_proj"
SIDES = st.integers(0, 70)
SHAPES = st.builds(
    lambda batch, *sides: (*batch, *sides), st.lists(st.integers(0, 3), max_size=2), SIDES, SIDES
)
TILES = st.tuples(st.sampled_from([1, 16]), st.just(32)).map(lambda sides: Tile(*sides))
KINDS = st.builds(
    lambda tile, **how: Recipe(Tile(1, 32), tile, **how),
    TILES,
    scale=st.sampled_from(["float32", "ue8m0"]),
    source=st.sampled_from(["bfloat16", "float32"]),
)


def matrix(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(some, other):
    bits = some.shape == other.shape and some.dtype == other.dtype
    return bits and torch.equal(some.view(torch.uint8), other.view(torch.uint8))


def packed(recipe=RECIPE, **others):
    state = {"norm.weight": matrix(40), "embed.weight": matrix(50, 40).bfloat16()}
    for name, x in {NAME: matrix(40, 70), EXPERTS: matrix(3, 33, 32)}.items():
        state |= pack_weight(name, recipe.quantize_weight(x))
    return state | others


# --- weights and their scales --------------------------------------------------------------------


@given(KINDS, SHAPES)
def test_what_was_packed_is_unpacked_bit_for_bit(recipe, shape):
    made, plain = recipe.quantize_weight(matrix(*shape)), matrix(3)
    state = pack_weight("a.weight", made)
    assert list(state) == ["a.weight", "a.weight_scale_inv"]
    found = unpack_weights({"b": plain} | state, recipe)
    assert list(found) == ["b", "a.weight"]
    assert found["b"] is plain
    assert same(found["a.weight"].codes, made.codes)
    assert same(found["a.weight"].scales, made.scales)
    assert found["a.weight"].tile == recipe.weights


def test_a_file_holds_them(tmp_path):
    state = packed()
    save_file(state, tmp_path / "model.safetensors")
    held = load_file(tmp_path / "model.safetensors")
    assert held.keys() == state.keys()
    assert all(same(held[name], state[name]) for name in state)
    assert [n for n, x in unpack_weights(held, RECIPE).items() if isinstance(x, Quantized)] == [
        n for n in held if n in (NAME, EXPERTS)
    ]


def test_scales_of_one_byte_are_read():
    recipe = Recipe(Tile(1, 32), Tile(16, 32), scale="ue8m0")
    state = packed(recipe)
    short = {
        name: x.to(torch.float8_e8m0fnu) if name.endswith("_scale_inv") else x
        for name, x in state.items()
    }
    assert same(unpack_weights(short, recipe)[NAME].scales, state[f"{NAME}_scale_inv"])


SCALES = f"{NAME}_scale_inv"
FAULTS = {
    "no scales": ({SCALES: None}, PlanError, f"{NAME} contains codes, but {SCALES} is missing"),
    "no codes": ({NAME: None}, PlanError, f"{SCALES} contains scales, but {NAME} is missing"),
    "plain weight": (
        {NAME: matrix(40, 70)},
        ShapeError,
        f"{NAME} has scales, so it must be a float8_e4m3fn matrix; got torch.float32",
    ),
    "too few scales": ({SCALES: matrix(2, 3)}, ShapeError, f"{SCALES} is torch.float32 [2, 3]; "),
    "one scale": ({SCALES: matrix()}, ShapeError, "needs float32 [3, 3]"),
    "half scales": ({SCALES: matrix(3, 3).bfloat16()}, ShapeError, f"{SCALES} is torch.bfloat16"),
    "a vector": (
        {"b": matrix(4).to(torch.float8_e4m3fn), "b_scale_inv": matrix(1)},
        ShapeError,
        "b ",
    ),
    "other codes": (
        {NAME: matrix(40, 70).to(torch.float8_e5m2)},
        ShapeError,
        f"{NAME} has scales, so it must be a float8_e4m3fn matrix; got torch.float8_e5m2",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named(case):
    others, kind, reason = FAULTS[case]
    state = {name: x for name, x in packed(**others).items() if x is not None}
    with pytest.raises(kind, match=re.escape(reason)):
        unpack_weights(state, RECIPE)


def test_scales_of_another_kind_are_refused():
    with pytest.raises(PlanError, match=f"{SCALES} holds scales that are not powers of two"):
        unpack_weights(packed(), Recipe(RECIPE.activations, RECIPE.weights, scale="ue8m0"))


def test_only_what_was_quantized_is_packed():
    made = RECIPE.quantize_weight(matrix(40, 70))
    with pytest.raises(UsageError, match="is the name of scales"):
        pack_weight(SCALES, made)
    with pytest.raises(ShapeError, match="needs float32"):
        pack_weight(NAME, Quantized(made.codes, made.scales, Tile(16, 16)))


# --- the configuration ---------------------------------------------------------------------------

SQUARE = Recipe(Tile(1, 32), Tile(32, 32))


def test_the_configuration_names_what_stays():
    state = packed(SQUARE, **{"lm_head.weight": matrix(50, 40)})
    expected = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "modules_to_not_convert": ["embed", "lm_head"],
    }
    assert config(SQUARE, state) == expected
    ue8m0 = Recipe(Tile(1, 32), Tile(32, 32), scale="ue8m0")
    assert config(ue8m0, packed(ue8m0))["scale_fmt"] == "ue8m0"
    on_meta = {name: x.to("meta") for name, x in state.items()}
    assert config(SQUARE, on_meta) == expected


def test_a_configuration_that_readers_would_not_share_is_refused():
    state = pack_weight("ab.weight", SQUARE.quantize_weight(matrix(32, 32)))
    with pytest.raises(PlanError, match="a is not quantized, but ab is"):
        config(SQUARE, state | {"a.weight": matrix(32, 32)})
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.experts is not quantized, but"):
        config(SQUARE, packed(SQUARE, **{"layers.0.mlp.experts.down_proj": matrix(3, 4, 5)}))
    with pytest.raises(PlanError, match="none of 1 tensors .* check only= of encode_weights"):
        config(SQUARE, {"a.weight": matrix(32, 32)})
    with pytest.raises(UnsupportedError, match="square tiles"):
        config(Recipe.mxfp8(), packed(SQUARE))


def test_transformers_reads_it():
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import FineGrainedFP8Config

    state = packed(SQUARE, **{NAME: matrix(1), SCALES: matrix(1)})
    for name, x in {NAME: matrix(64, 96), EXPERTS: matrix(3, 64, 32)}.items():
        state |= pack_weight(name, SQUARE.quantize_weight(x))
        dequantize = integration.Fp8Dequantize(None)._dequantize_one
        read = dequantize(state[name], state[f"{name}_scale_inv"])
        assert same(read, unpack_weights(state, SQUARE)[name].dequantize())
    read = FineGrainedFP8Config.from_dict(config(SQUARE, state))
    assert tuple(read.weight_block_size) == (32, 32)
    left = [n for n in state if not should_convert_module(n, read.modules_to_not_convert)]
    assert left == ["embed.weight"]


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_the_quantizer_of_transformers_makes_the_same(scale):
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    kinds = {"float32": "float", "ue8m0": "ue8m0"}
    how = SimpleNamespace(weight_block_size=(32, 32), scale_fmt=kinds[scale])
    theirs = integration.Fp8Quantize(SimpleNamespace(quantization_config=how))
    recipe = Recipe(Tile(1, 32), Tile(32, 32), scale=scale, quotient="amax", source="float32")
    for name, x in {NAME: matrix(64, 96), EXPERTS: matrix(3, 64, 32)}.items():
        made, mine = theirs._quantize_one(name, x), pack_weight(name, recipe.quantize_weight(x))
        assert list(made) == list(mine)
        assert same(made[name], mine[name])
        # Theirs is 1 / (448 / amax): each division rounds by half an ulp, ours once.
        apart = made[name + "_scale_inv"].float() / mine[name + "_scale_inv"] - 1
        assert apart.abs().max() <= (2**-22 if scale == "float32" else 0)


@pytest.mark.vllm
def test_vllm_reads_it():
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    made = config(SQUARE, packed(SQUARE, **{"layers.0.mlp.gate.weight": matrix(4, 40)}))
    read = fp8.Fp8Config.from_config(made)
    assert read.is_checkpoint_fp8_serialized
    assert read.weight_block_size == [32, 32]
    assert read.activation_scheme == "dynamic"
    names = ["embed", "layers.0.mlp.gate", "layers.0.mlp.experts", "layers.0.self_attn.q_proj"]
    skipped = [name for name in names if is_layer_skipped(name, read.ignored_layers)]
    assert skipped == ["embed", "layers.0.mlp.gate"]


# --- weights on their way ------------------------------------------------------------------------


@given(KINDS, SHAPES.filter(lambda shape: len(shape) < 4))
def test_both_forms_are_what_training_multiplies_with(recipe, shape):
    x = matrix(*shape)
    made = recipe.quantize_weight(x)
    codes = encode_weights(recipe, only="a", layouts=None)("a.weight", x)
    assert list(codes) == ["a.weight", "a.weight_scale_inv"]
    assert same(codes["a.weight"], made.codes)
    assert same(codes["a.weight_scale_inv"], made.scales)
    simulate = encode_weights(recipe, only="a", layouts=None, form="simulated")
    (numbers,) = simulate("a.weight", x).values()
    assert same(numbers, made.dequantize())
    if recipe.source == "bfloat16":
        (numbers,) = simulate("a.weight", x.bfloat16()).values()
        assert same(numbers, made.dequantize().bfloat16())


@given(TILES, SHAPES)
def test_an_engine_that_quantizes_simulated_numbers_gets_the_codes(tile, shape):
    recipe = Recipe(Tile(1, 32), tile)
    simulate = encode_weights(recipe, only="a", layouts=None, form="simulated")
    (sent,) = simulate("a", matrix(*shape)).values()
    once, again = recipe.quantize_weight(matrix(*shape)), recipe.quantize_weight(sent.bfloat16())
    assert same(once.codes, again.codes)
    assert same(once.scales, again.scales)


@pytest.mark.parametrize("form", ["float8", "simulated"])
def test_only_matrices_that_are_named_are_encoded(form):
    encode = encode_weights(RECIPE, only=r"[ab]\.proj", exclude="b", layouts=None, form=form)
    x, whole = matrix(16, 32), torch.ones(16, 32, dtype=torch.int64)
    left = {"a.norm": x, "b.proj.weight": x, "a.proj.bias": x, "a.proj.count": whole}
    sent = encode("a.proj.weight", x) | left
    assert sent["a.proj.weight"] is not x
    for name, tensor in left.items():
        assert list(encode(name, tensor)) == [name]
        assert encode(name, tensor)[name] is tensor
    held = encode.describe(describe({"a.proj.weight": x} | left))
    assert dict(held.items()) == dict(describe(sent).items())
    with pytest.raises(UsageError, match="is found inside 'a.projector'"):
        encode("a.projector", x)
    with pytest.raises(UsageError, match="holds float8 codes already"):
        encode("a.proj", x.to(torch.float8_e4m3fn))


def test_a_recipe_of_masters_refuses_less():
    encode = encode_weights(Recipe(source="float32"), only="a", layouts=None)
    with pytest.raises(UsageError, match="quantizes master weights"):
        encode("a", matrix(4, 4).bfloat16())


CUTS = [
    ((40, 64), (0, 0), (16, 64), True),
    ((40, 64), (16, 32), (24, 32), True),
    ((40, 64), (40, 0), (0, 64), True),
    ((40, 64), (0, 0), (24, 64), False),
    ((40, 64), (0, 0), (40, 48), False),
    ((3, 40, 64), (1, 16, 0), (1, 24, 64), True),
    ((3, 40, 64), (1, 8, 0), (1, 32, 64), False),
]


@pytest.mark.parametrize("form", ["float8", "simulated"])
@pytest.mark.parametrize(("shape", "offsets", "sizes", "fits"), CUTS)
def test_shards_cut_through_a_tile_are_refused(shape, offsets, sizes, fits, form):
    box = Shard(offsets, sizes)
    layouts = {"a.proj": Layout(shape, box), "a.norm": Layout((7,), Shard((1,), (2,)))}
    if not fits:
        with pytest.raises(PlanError, match="a.proj: this rank holds .* cuts through tiles of"):
            encode_weights(RECIPE, only="a", layouts=layouts, form=form)
        return
    encode = encode_weights(RECIPE, only="a", layouts=layouts, form=form)
    whole = RECIPE.quantize_weight(matrix(*shape))
    made = encode("a.proj", matrix(*shape)[box.slices])
    if form == "float8":
        assert same(made["a.proj"], whole.codes[box.slices].clone())
        rows, columns = (
            slice(-(-o // n), -(-(o + k) // n))
            for o, k, n in zip(offsets[-2:], sizes[-2:], (16, 32), strict=True)
        )
        assert same(
            made["a.proj_scale_inv"], whole.scales[(*box.slices[:-2], rows, columns)].clone()
        )
    else:
        assert same(made["a.proj"], whole.dequantize()[box.slices].clone())


def test_layouts_must_be_those_of_the_tensors():
    layouts = {"a": Layout.whole((16, 32))}
    encode = encode_weights(RECIPE, only="a", layouts=layouts)
    with pytest.raises(PlanError, match=r"a is \[8, 32\]"):
        encode("a", matrix(8, 32))
    with pytest.raises(PlanError, match="layouts have None"):
        encode("a.b", matrix(16, 32))
    with pytest.raises(UsageError, match="matches none of 1 weights"):
        encode_weights(RECIPE, only="b", layouts=layouts)
    with pytest.raises(UsageError, match="is found inside"):
        encode_weights(RECIPE, only="a", layouts={"ab": layouts["a"]})


def sharded_on_this_rank():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = torch.nn.Linear(64, 64)
    with torch.no_grad():
        net.weight.copy_(matrix(64, 64))
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    weight = net.weight
    layouts = {"weight": layout_of(weight)}
    parts = {}
    for form in ("float8", "simulated"):
        encode = encode_weights(RECIPE, only="weight", layouts=layouts, form=form)
        made = encode("weight", weight.to_local().detach())
        parts |= {(form, name): x.float().numpy() for name, x in made.items()}
        with pytest.raises(UnsupportedError, match="is a DTensor"):
            encode("weight", weight.detach())
    with pytest.raises(PlanError, match="cuts through"):
        encode_weights(Recipe(), only="weight", layouts=layouts)
    with pytest.raises(UnsupportedError, match="weight is a DTensor. Pass whole tensors"):
        audit(net, {"weight": matrix(64, 64), "bias": matrix(64)}, RECIPE, only="weight")
    return parts


def test_shards_under_fsdp2_are_encoded_as_the_whole():
    first, second = ranks.run(sharded_on_this_rank, world_size=2)
    whole = RECIPE.quantize_weight(matrix(64, 64))
    expected = {
        ("float8", "weight"): whole.codes.float(),
        ("float8", "weight_scale_inv"): whole.scales,
        ("simulated", "weight"): whole.dequantize(),
    }
    assert first.keys() == expected.keys()
    for key, x in expected.items():
        joined = torch.cat([torch.from_numpy(part[key]) for part in (first, second)])
        assert torch.equal(joined, x)
