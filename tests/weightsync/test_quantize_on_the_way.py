"""What Quantize declares, and what it refuses."""

import pytest
import torch

from primeblocks.errors import PlanError, ShapeError, UsageError
from primeblocks.layout import Layout, Shard
from primeblocks.weightsync import describe
from primeblocks.weightsync.convert import Quantize
from primeblocks.weightsync.manifest import Manifest, TensorSpec

FP8 = Quantize(
    r"(.+)\.weight", r"\1.weight_scale_inv", tile=(4, 4), codes_dtype=torch.float8_e4m3fn
)

HELD = {"a.weight": torch.zeros(8, 6), "n": torch.zeros(3)}


def encode(x):
    """Codes and scales of the right shapes."""
    return x.to(torch.float8_e4m3fn), torch.ones(-(-x.shape[0] // 4), -(-x.shape[1] // 4))


def test_quantized_weights_travel_as_codes_and_scales():
    after = FP8.describe(describe(HELD))
    assert {n: (s.dtype, s.shape) for n, s in after.items()} == {
        "a.weight": (torch.float8_e4m3fn, (8, 6)),
        "a.weight_scale_inv": (torch.float32, (2, 2)),
        "n": (torch.float32, (3,)),
    }
    by = FP8.by(encode)
    coded = by("a.weight", torch.ones(8, 6)) | by("n", torch.zeros(3))
    assert describe(coded) == after


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
        FP8.by(lambda x: (x, torch.ones(1, 1)))("a.weight", torch.zeros(4, 4))
    with pytest.raises(
        ShapeError, match=r"'a.weight_scale_inv'.*declared was torch.float32 \(1, 1\)"
    ):
        FP8.by(lambda x: (encode(x)[0], torch.ones(1)))("a.weight", torch.zeros(4, 4))
    with pytest.raises(UsageError, match=r"nothing encodes 'a.weight'. Pass .*by\(encode\)"):
        FP8("a.weight", torch.zeros(4, 4))
    with pytest.raises(PlanError, match=r"needs positive tiles; got tile=\(0,\)"):
        Quantize(r"(.+)\.w", r"\1.s", (0,), torch.float8_e4m3fn)
    for names, scales in ((r".+\.weight", r"\1.s"), (r"(.+\.weight", r"\1.s"), (".+", r"\g<m>.s")):
        with pytest.raises(PlanError, match="is no substitution of names: .*group"):
            Quantize(names, scales, (4,), torch.float8_e4m3fn).describe(describe(HELD))
