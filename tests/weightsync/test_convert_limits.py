"""What conversions refuse, and how quantized weights travel through them."""

import pytest
import torch

from primeblocks.errors import PlanError, ShapeError
from primeblocks.layout import Layout, Shard
from primeblocks.weightsync import describe
from primeblocks.weightsync.convert.conversion import Conversion
from primeblocks.weightsync.convert.quantize import Quantize
from primeblocks.weightsync.convert.rules import (
    crop,
    fuse,
    pad,
    rename,
    round_up,
    share,
    split,
    stack,
    transpose,
    unstack,
)
from primeblocks.weightsync.manifest import Manifest, TensorSpec

SIX = {"m.0.a": (4, 2), "m.1.a": (4, 2), "m.0.b": (4, 3), "n": (5,)}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (rename("x.{i}", "y.{i}"), r"x.\{i\} matches none of 4 names, such as m.0.a.*optional"),
        (rename("m.0.a", "n"), "'n' is there already.*narrower"),
        (rename("m.{i}.a", "m.{i}.b"), "'m.0.b' is there already.*the way back would change it"),
        (rename("{*x}.{*y}", "{*y}.{*x}"), "'m.0.a' becomes 'a.m.0', which does not lead back"),
        (split("m.0.a", ["b", "b"]), "two tensors would both be named 'b'"),
        (split("n", ["x", "y"]), r"'n': dim 0 of \(5,\) does not divide.*5 is no multiple of 2"),
        (split("n", ["x", "y"], dim=1), r"'n': shape \(5,\) has no dim 1"),
        (unstack("n", "x.{i}", index="i", dim=-1), r"shape \(5,\) has no dim -1"),
        (transpose("n", (1, 0)), r"'n': dims \(1, 0\) of a transpose do not fit shape \(5,\)"),
        (
            fuse(["m.{i}.a", "m.{i}.b"], "m.{i}.c", dim=1, parts=(2, 3)),
            "'m.1.c' is made of 2 tensors; 1 are missing, first 'm.1.b'",
        ),
        (fuse(["m.0.a", "m.0.b"], "c"), r"'c' needs 'm.0.b' of shape \(4, 2\); got \(4, 3\)"),
        (fuse(["m.0.a", "m.0.b"], "c", dim=1), r"dim 1 of \(4, 5\) does not divide.*parts="),
        (fuse(["m.0.a", "n"], "c", parts=None), r"'c' needs 'n' of shape \(5, 2\); got \(5,\)"),
        (
            fuse(["m.0.a", "k"], "c", parts=None),
            "'c' is made of 2 tensors; 1 are missing, first 'k'",
        ),
        (pad("n", dim=0, size=4, padded=8), r"'n' needs 'n' of shape \(4,\); got \(5,\)"),
        (share("n", dim=0, rank=1, ranks=2), r"'n': dim 0 of \(5,\) does not divide into 2 ranks"),
        (crop("n", dim=0, size=4, padded=8), r"dim 0 of \(5,\) is not 8 long"),
    ],
)
def test_rules_that_do_not_fit_are_refused_by_name(rule, message):
    manifest = describe({name: torch.zeros(shape) for name, shape in SIX.items()})
    with pytest.raises(PlanError, match=message):
        Conversion((rule,)).bind(manifest)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rename("a.{i}", "b.{k}"), "need the same fields"),
        (lambda: rename("a.{i}.{i}", "b.{i}"), "a field stands twice"),
        (lambda: stack("a.{i}", "b", index="k"), "need the same fields"),
        (lambda: stack("a", "b", index="k"), "lacks the field {k}"),
        (lambda: transpose("a", (0, 2)), r"0 to n-1 in some order; got \(0, 2\)"),
        (lambda: split("a", ["b", "c"], parts=(1, 0)), r"positive part for each.*parts=\(1, 0\)"),
        (lambda: split("a", ["b", "c"], parts=(1,)), r"parts=\(1,\)"),
        (lambda: pad("a", dim=0, size=4, padded=5, at=2), "4 elements from 2 on do not fit into 5"),
        (lambda: share("a", dim=0, rank=2, ranks=2), "rank must be 0 to 1; got 2"),
        (lambda: round_up("a", dim=0, multiple=0), "must be positive; got 0"),
    ],
)
def test_rules_that_make_no_sense_are_refused_at_once(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_dtypes_do_not_mix():
    mixed = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(PlanError, match="'c' would mix torch.bfloat16, torch.float32"):
        Conversion((fuse(["a", "b"], "c"),)).bind(describe(mixed))


def test_other_tensors_than_those_bound_are_refused():
    wiring = Conversion((rename("a", "b"),)).bind(describe({"a": torch.zeros(2, 2)}))
    with pytest.raises(PlanError, match=r"'a' is \(3,\); bound was \(2, 2\)"):
        wiring.map(describe({"a": torch.zeros(3)}))
    with pytest.raises(PlanError, match=r"'z' is \(3,\); bound was not there"):
        wiring.map(describe({"z": torch.zeros(3)}))
    with pytest.raises(PlanError, match="1 tensors are missing and 0 sharded, first 'a'"):
        wiring.move({})
    other = describe({"a": torch.zeros(2, 2, dtype=torch.bfloat16)})
    with pytest.raises(PlanError, match="'a' is torch.bfloat16 .* on one rank and torch.float32"):
        Conversion(()).bind(wiring.sources, other)


FP8 = Quantize("{*m}.weight", "{*m}.weight_scale_inv", tile=(4, 4), codes_dtype=torch.float8_e4m3fn)


def encode(x):
    """Codes and scales of the right shapes."""
    return x.to(torch.float8_e4m3fn), torch.ones(-(-x.shape[0] // 4), -(-x.shape[1] // 4))


def test_quantized_weights_travel_as_codes_and_scales():
    held = describe({"a.weight": torch.zeros(8, 6), "n": torch.zeros(3)})
    after = FP8.describe(held)
    assert {n: (s.dtype, s.shape) for n, s in after.items()} == {
        "a.weight": (torch.float8_e4m3fn, (8, 6)),
        "a.weight_scale_inv": (torch.float32, (2, 2)),
        "n": (torch.float32, (3,)),
    }
    coded = FP8.apply({"a.weight": torch.ones(8, 6), "n": torch.zeros(3)}, encode)
    assert describe(coded) == after
    # Codes and scales go on through the same rules.
    rule = split("{*m}.{kind}", ["{*m}.top.{kind}", "{*m}.low.{kind}"])
    got = Conversion((rule,)).forward(
        {n: x.view(torch.uint8) for n, x in coded.items() if n != "n"}
    )
    assert got["a.low.weight"].shape == (4, 6)


def test_a_shard_of_whole_tiles_has_their_scales():
    def part(start, size):
        box = Shard((start, 0), (size, 6))
        return Manifest((("a.weight", TensorSpec(torch.float32, Layout((10, 6), box))),))

    assert FP8.describe(part(4, 6))["a.weight_scale_inv"].layout == Layout(
        (3, 2), Shard((1, 0), (2, 2))
    )
    for start, size in ((2, 8), (0, 6)):
        with pytest.raises(PlanError, match=r"'a.weight': .* cuts through tiles of \(4, 4\)"):
            FP8.describe(part(start, size))


def test_what_was_not_declared_is_refused():
    with pytest.raises(PlanError, match="matches none of 1 names"):
        FP8.describe(describe({"n": torch.zeros(3)}))
    with pytest.raises(PlanError, match="fewer dims than tile"):
        FP8.describe(describe({"n.weight": torch.zeros(3)}))
    with pytest.raises(ShapeError, match="encode gave 'a.weight' as torch.float32"):
        FP8.apply({"a.weight": torch.zeros(4, 4)}, lambda x: (x, torch.ones(1, 1)))
    with pytest.raises(
        ShapeError, match=r"'a.weight_scale_inv'.*declared was torch.float32 \(1, 1\)"
    ):
        FP8.apply({"a.weight": torch.zeros(4, 4)}, lambda x: (encode(x)[0], torch.ones(1)))
    with pytest.raises(PlanError, match="equal fields and positive tiles"):
        Quantize("{a}.w", "{b}.s", (4,), torch.float8_e4m3fn)
