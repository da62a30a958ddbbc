"""An audit names each tensor that differs, with the cause if one gives the engine's bits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, UsageError
from primeblocks.fp8 import Recipe, Tile, audit, encode_weights
from primeblocks.fp8.quantize import quantize
from primeblocks.testing import tiny_models

ONLY = r"(self_attn\.[qkvo]_proj|mlp\.gate_up_proj|experts)"
RECIPE = Recipe()
MASTER = Recipe(source="float32")
Q = "layers.0.self_attn.q_proj.weight"
GATE_UP = "layers.0.mlp.gate_up_proj.weight"
EXPERTS = "layers.1.mlp.experts.gate_up_proj"
ROUTER = "layers.0.mlp.gate.weight"
HEAD = "lm_head.weight"


def weights(seed=0):
    """Masters in float32, of which no rounding is exact."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        Q: (256, 200),
        GATE_UP: (384, 128),
        EXPERTS: (3, 256, 130),
        ROUTER: (8, 128),
        HEAD: (300, 128),
        "norm.weight": (128,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def served(state, recipe=RECIPE, only=ONLY, form="float8"):
    """What an engine holds: codes and scales, and the rest in bfloat16."""
    encode = encode_weights(recipe, only=only, layouts=None, form=form)
    made = {key: value for name, x in state.items() for key, value in encode(name, x).items()}
    return {
        name: x.bfloat16() if x.dtype == torch.float32 and not name.endswith("_scale_inv") else x
        for name, x in made.items()
    }


def findings(engine, state=None, recipe=RECIPE, **how):
    state = weights() if state is None else state
    return {f.name: f.reason for f in audit(state, engine, recipe, only=ONLY, **how).findings}


# --- nothing to find -----------------------------------------------------------------------------

RECIPES = st.builds(
    lambda rows, columns, **how: Recipe(Tile(1, columns), Tile(rows, columns), **how),
    st.sampled_from([1, 16, 128]),
    st.sampled_from([32, 128]),
    scale=st.sampled_from(["float32", "ue8m0"]),
    quotient=st.sampled_from(["reciprocal", "division", "amax"]),
    source=st.sampled_from(["bfloat16", "float32"]),
)


@given(
    RECIPES,
    st.tuples(st.integers(0, 70), st.integers(0, 70)) | st.just((3, 40, 33)),
    st.sampled_from(["float8", "simulated"]),
    st.sampled_from([1e-30, 1.0]),
    st.booleans(),
)
def test_equal_sides_have_no_findings(recipe, shape, form, scale, is_export):
    state = {"a.proj": torch.randn(shape) * scale, "a.norm": torch.randn(shape), "b": torch.ones(2)}
    if is_export and recipe.source == "bfloat16":
        state = {name: tensor.bfloat16() for name, tensor in state.items()}
    engine = served(state, recipe, r"a\.proj", form)
    found = audit(state, engine, recipe, only=r"a\.proj")
    assert found.findings == ()
    assert found.compared == 3
    found.check()


def test_modules_are_read_by_their_state():
    net = tiny_models.build("qwen3_moe", dtype=torch.float32, num_layers=2, hidden=64)
    only = r"(self_attn\.[qkvo]_proj|experts)"
    engine = served(net.state_dict(), RECIPE, only)
    assert len([name for name in engine if name.endswith("_scale_inv")]) == 2 * (4 + 2)
    assert audit(net, engine, RECIPE, only=only).findings == ()


def test_scales_in_the_engines_own_dtype_are_equal():
    recipe = Recipe(scale="ue8m0")
    engine = served(weights(), recipe)
    for name in [name for name in engine if name.endswith("_scale_inv")]:
        engine[name] = engine[name].to(torch.float8_e8m0fnu)
    assert findings(engine, recipe=recipe) == {}


def test_values_that_are_not_finite_are_equal_where_they_are():
    state = weights()
    state[Q][0, 0] = torch.inf
    assert findings(served(state), state) == {}
    assert set(findings(served(weights()), state)) == {Q}


# --- one cause -----------------------------------------------------------------------------------

CAUSES = {
    "export for master": (MASTER, RECIPE, "quantized from the bfloat16 export"),
    "master for export": (RECIPE, MASTER, "quantized from the float32 master"),
    "UE8M0 for float32": (RECIPE, Recipe(scale="ue8m0"), "UE8M0 scales, the recipe's are float32"),
    "float32 for UE8M0": (Recipe(scale="ue8m0"), RECIPE, "float32 scales, the recipe's are UE8M0"),
    "two causes": (
        MASTER,
        Recipe(scale="ue8m0"),
        "from the float32 master, and UE8M0 scales, the recipe's are float32",
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_a_cause_is_named_in_each_tensor(case):
    recipe, engine, reason = CAUSES[case]
    found = findings(served(weights(), engine), recipe=recipe)
    assert set(found) == {Q, GATE_UP, EXPERTS}
    assert all(
        text.startswith(("quantized", reason[:4])) and reason in text for text in found.values()
    )
    assert not any(", or " in text or "other values" in text for text in found.values())


@pytest.mark.parametrize("case", ["export for master", "UE8M0 for float32"])
def test_a_cause_is_named_in_simulated_numbers(case):
    recipe, engine, reason = CAUSES[case]
    found = findings(served(weights(), engine, form="simulated"), recipe=recipe)
    assert set(found) == {Q, GATE_UP, EXPERTS}
    assert all(f"on the float8 grid, but {reason}" in text for text in found.values())


def test_codes_that_were_rounded_twice_are_told():
    # Of masters: with the export for a source the second rounding changes nothing.
    assert findings(served(served(weights(), form="simulated"))) == {}
    engine = served(served(weights(), MASTER, form="simulated"))
    found = findings(engine, recipe=MASTER)
    assert set(found) == {Q, GATE_UP, EXPERTS}
    assert all("quantized a second time" in text for text in found.values())


# --- rules that drifted --------------------------------------------------------------------------


def test_an_accidental_substring_is_named():
    engine = served(weights(), only=r"(self_attn\.[qkvo]_proj|experts)")
    ((name, reason),) = findings(engine).items()
    assert name == GATE_UP
    assert "not quantized by the engine" in reason
    assert "the name of 'layers.0.mlp.gate', which is not quantized, is found in this one" in reason
    reason = findings(engine, excluded=["lm_head", "mlp.gate"])[GATE_UP]
    assert "'mlp.gate' of its list is found in the name by accident" in reason


def test_a_drifted_list_is_named_on_both_sides():
    engine = served(weights(), only=r"(self_attn\.q_proj|mlp\.gate_up_proj|lm_head)")
    found = findings(engine, exclude="lm_head", excluded=["layers.1.mlp.experts"])
    assert set(found) == {EXPERTS, HEAD}
    assert "is outdated: 'layers.1.mlp.experts' names it" in found[EXPERTS]
    assert "quantized by the engine, though exclude='lm_head' names it" in found[HEAD]
    assert "is outdated, and no entry names it" in found[HEAD]
    found = findings(engine, excluded=[r"re:.*experts.*", "lm_head"])
    assert "is outdated: 're:.*experts.*' names it" in found[EXPERTS]
    assert "does not name it; 'lm_head' of its list of excluded modules was not" in found[HEAD]
    assert "no entry of its list is found" in findings(engine, excluded=[])[EXPERTS]


def test_a_weight_that_is_excluded_and_of_another_version_has_both_reasons():
    engine = served(weights(seed=1) | {GATE_UP: weights()[GATE_UP]}, only=r"lm_head")
    found = findings(engine)[HEAD]
    assert found.startswith("quantized by the engine")
    assert "; other values: " in found


# --- other values --------------------------------------------------------------------------------


def flipped(tensor, bit=0):
    flat = tensor.clone().view(torch.uint8).flatten()
    flat[5] ^= 1 << bit
    return flat.view(tensor.dtype).reshape(tensor.shape)


def test_one_bit_is_found_and_counted():
    engine = served(weights())
    engine[Q] = flipped(engine[Q])
    engine[f"{EXPERTS}_scale_inv"] = flipped(engine[f"{EXPERTS}_scale_inv"])
    engine["norm.weight"] = flipped(engine["norm.weight"])
    engine[ROUTER] = flipped(engine[ROUTER], bit=7)
    found = findings(engine)
    assert set(found) == {Q, EXPERTS, "norm.weight", ROUTER}
    assert found[Q].startswith(f"other values: 1 of {256 * 200} codes and 0 of 4 scales differ")
    assert f"0 of {3 * 256 * 130} codes and 1 of 12 scales differ" in found[EXPERTS]
    assert found["norm.weight"].startswith("other values: 1 of 128 values differ")
    assert found[ROUTER].startswith("other values: 1 of 1024 values differ")


def test_a_stale_tensor_is_other_values_and_no_cause():
    state, old = weights(), weights()
    old[Q] = old[Q] * (1 + 2.0**-10)
    old[EXPERTS] = weights(seed=1)[EXPERTS]
    old[HEAD] = old[HEAD] + 1
    found = findings(served(old), state)
    assert set(found) == {Q, EXPERTS, HEAD}
    assert all(text.startswith("other values: ") for text in found.values())
    assert all("largest difference" in text for text in found.values())


# --- two causes that fit, or none -----------------------------------------------------------------


def test_a_source_is_no_cause_where_its_rounding_is_exact():
    state = {name: tensor.bfloat16().float() for name, tensor in weights().items()}
    assert findings(served(state, MASTER), state) == {}
    found = findings(served(state, Recipe(source="float32", scale="ue8m0")), state)
    assert set(found) == {Q, GATE_UP, EXPERTS}
    assert all(text.startswith("UE8M0 scales") and "master" not in text for text in found.values())


def ties(largest):
    """Scaled, many of these lie between two codes, and a quotient's rounding decides."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-256, 257, (64, 64), generator=generator) * largest / 256
    x[0, 0] = largest
    return {"a.proj": x}


@pytest.mark.parametrize(
    ("largest", "reason"),
    [
        (13, "quotient 'division', the recipe's is 'reciprocal' ("),
        (19, "'reciprocal', or quotient 'amax', the recipe's is 'reciprocal'; the bits are the sa"),
    ],
)
def test_a_quotient_is_named_or_both_that_give_the_same_bits(largest, reason):
    engine = served(ties(largest), Recipe(quotient="division"), "a")
    (found,) = audit(ties(largest), engine, RECIPE, only="a").findings
    assert found.reason.startswith("quotient 'division'")
    assert reason in found.reason
    assert ("'amax'" in found.reason) == (largest == 19)


def test_numbers_on_another_grid_already_may_be_either():
    grid = {
        name: quantize(x.bfloat16(), Tile(128, 128), scale="ue8m0").dequantize()
        if x.ndim > 1
        else x
        for name, x in weights().items()
    }
    found = findings({name: x.bfloat16() for name, x in grid.items()}, grid)
    assert "not quantized by the engine" in found[Q]
    assert ", or on the float8 grid, but UE8M0 scales" in found[Q]
    assert "the bits are the same" in found[Q]


WORDS = {
    "source": ("quantized from", "quantized a second time"),
    "scale": ("scales,",),
    "quotient": ("quotient",),
}


# Of a handful of values another cause may give the bits, too.
LARGE = st.sampled_from([(6, 40), (130, 64), (2, 20, 33)])


# The export, and the export quantized twice, have the same bits here.
@example(
    Recipe(Tile(1, 32), Tile(1, 32), source="float32"),
    Recipe(Tile(1, 32), Tile(1, 32)),
    (6, 40),
    False,
    69,
)
@given(RECIPES, RECIPES, LARGE, st.booleans(), st.integers(0, 99))
def test_no_cause_is_named_that_is_none(recipe, other, shape, is_exact, seed):
    other = replace(other, activations=recipe.activations, weights=recipe.weights)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    state = {"a.proj": x.bfloat16().float() if is_exact else x}
    found = audit(state, served(state, other, "a"), recipe, only="a").findings
    changes = {field for field in WORDS if getattr(recipe, field) != getattr(other, field)}
    for finding in found:
        named = [
            {field for field, words in WORDS.items() if any(word in cause for word in words)}
            for cause in finding.reason.split(", or ")
        ]
        assert all(named)
        assert any(fields <= changes for fields in named)


def test_a_trainer_in_bfloat16_cannot_tell_of_a_master():
    state = weights()
    export = {name: tensor.bfloat16() for name, tensor in state.items()}
    found = findings(served(state, MASTER), export)
    assert set(found) == {Q, GATE_UP, EXPERTS}
    assert all(text.startswith("other values: ") for text in found.values())
    with pytest.raises(UsageError, match=f"{Q}.*quantizes master weights"):
        findings(served(state, MASTER), export, MASTER)


# --- names, shapes and kinds ----------------------------------------------------------------------


def test_missing_and_extra_tensors_are_named():
    engine = served(weights())
    del engine[Q], engine[f"{GATE_UP}_scale_inv"], engine["norm.weight"]
    engine["layers.0.extra.weight"] = torch.zeros(2)
    engine[EXPERTS] = weights()[EXPERTS]
    assert findings(engine) == {
        Q: "missing in the engine",
        GATE_UP: f"codes without scales: the engine has no {GATE_UP}_scale_inv",
        EXPERTS: "scales without codes: the engine holds the weight in torch.float32",
        "norm.weight": "missing in the engine",
        f"{Q}_scale_inv": f"scales of {Q}, which the engine lacks",
        "layers.0.extra.weight": "only in the engine",
    }


def test_shapes_and_dtypes_are_told():
    engine = served(weights())
    engine[HEAD] = engine[HEAD].mT
    engine[ROUTER] = engine[ROUTER].int()
    engine[f"{Q}_scale_inv"] = engine[f"{Q}_scale_inv"].bfloat16()
    engine[f"{EXPERTS}_scale_inv"] = engine[f"{EXPERTS}_scale_inv"][0]
    assert findings(engine) == {
        HEAD: "shape [128, 300] in the engine, [300, 128] in the trainer",
        ROUTER: "torch.int32 in the engine, torch.float32 in the trainer",
        Q: "codes in torch.float8_e4m3fn with scales in torch.bfloat16",
        EXPERTS: "scales of shape [2, 2] where the recipe has [3, 2, 2]",
    }


def test_unquantized_weights_are_compared_in_the_engines_dtype():
    engine = served(weights())
    engine[HEAD] = weights()[HEAD]
    assert findings(engine) == {}
    engine[HEAD] = engine[HEAD].bfloat16().float()
    engine[ROUTER] = RECIPE.quantize_weight(weights()[ROUTER]).dequantize().bfloat16()
    found = findings(engine)
    assert found[HEAD].startswith("the bfloat16 rounding, in torch.float32 (")
    assert found[ROUTER].startswith("rounded to the float8 grid, though the rule does not name it")


# --- the result, and what is refused --------------------------------------------------------------


def test_an_audit_is_neither_true_nor_false_and_refuses_by_name():
    engine = served(weights())
    good = audit(weights(), engine, RECIPE, only=ONLY)
    with pytest.raises(UsageError, match="neither true nor false"):
        bool(good)
    bad = audit(weights(), {}, RECIPE, only=ONLY)
    assert len(bad.table().splitlines()) == 1 + 6
    with pytest.raises(CorruptionError, match=r"tensors 6, findings 6(.|\n)*and 1 more") as error:
        bad.check()
    assert Q in str(error.value)


def test_no_experts_and_odd_scales_are_told():
    state = {"experts": torch.zeros(0, 40, 40)}
    engine = {"experts": torch.zeros(0, 40, 40).to(torch.float8_e4m3fn)}
    engine["experts_scale_inv"] = torch.zeros(0, 2, 1)
    (found,) = audit(state, engine, RECIPE, only="experts").findings
    assert found.reason == "scales of shape [0, 2, 1] where the recipe has [0, 1, 1]"


def test_misuse_is_refused():
    with pytest.raises(UsageError, match="matches none of 5 weights"):
        audit(weights(), {}, RECIPE, only="nothing")
    with pytest.raises(UsageError, match="does not name it"):
        audit(weights(), {}, RECIPE, only=r"mlp\.gate|self_attn", exclude="lm")
