"""Conversions in plain torch, recorded: what moves, shard by shard, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.layout import Layout, Shard
from primeblocks.weightsync import describe
from primeblocks.weightsync.convert import record_wiring
from primeblocks.weightsync.convert.conversion import record_reads
from primeblocks.weightsync.manifest import Manifest, TensorSpec
from tests.weightsync.test_recorded import loads
from tests.weightsync.toy_engine import moved


@st.composite
def shards(draw, shape):
    """Boxes that tile a shape: cut along up to two dims."""
    boxes = [Shard((0,) * len(shape), shape)]
    for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)) if shape else []:
        boxes = [half for box in boxes for half in draw(halves(box, dim))]
    return boxes


@st.composite
def halves(draw, box, dim):
    first = draw(st.integers(0, box.sizes[dim]))

    def change(values, value):
        return (*values[:dim], value, *values[dim + 1 :])

    return [
        Shard(box.offsets, change(box.sizes, first)),
        Shard(
            change(box.offsets, box.offsets[dim] + first),
            change(box.sizes, box.sizes[dim] - first),
        ),
    ]


def assert_same(got, wanted):
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@given(loads(), st.data())
def test_shards_land_where_the_whole_lands_and_fill_a_box_of_it_alone(case, data):
    sources, loader = case
    wiring = record_reads(loader.load, describe(sources), into=dict(loader.params)).into
    wanted = moved(wiring, sources)
    made = {name: torch.zeros_like(x) for name, x in wanted.items()}
    filled = {name: torch.zeros_like(x) for name, x in wanted.items()}
    for name, whole in sources.items():
        for box in data.draw(shards(tuple(whole.shape))):
            held = Manifest(((name, TensorSpec(whole.dtype, Layout(tuple(whole.shape), box))),))
            local = whole[box.slices].clone()
            for piece in wiring.map(held):
                view = piece.view(local, box)
                assert view.numel()
                assert view.untyped_storage().data_ptr() == local.data_ptr()
                made[piece.target][piece.target_box.slices] = view
                filled[piece.target][piece.target_box.slices] += 1
    assert_same(made, wanted)
    assert_same(filled, moved(wiring, {name: torch.ones_like(x) for name, x in sources.items()}))
    for name, whole in wanted.items():
        box = data.draw(shards(tuple(whole.shape)))[-1]
        made = torch.zeros_like(whole[box.slices])
        for piece in wiring.by_target[name]:
            if (part := piece.to_target(box)) is not None:
                held = wiring.sources[part.source].layout.shard
                made[part.target_box.within(box).slices] = part.view(sources[part.source], held)
        assert torch.equal(made, whole[box.slices])


def test_every_bit_pattern_survives():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensors = {"a": bits.view(torch.bfloat16).reshape(256, 256)}

    def halves(tensors):
        return dict(zip("bc", tensors["a"].T.chunk(2), strict=True))

    wiring = record_wiring(halves, describe(tensors))
    made = moved(wiring, tensors)
    assert all(
        made[n].view(torch.int16).equal(t.view(torch.int16)) for n, t in halves(tensors).items()
    )


def apart(tensors):
    """A matrix for each expert, of those that are fused and stacked."""
    return {
        f"l.{expert}.{part}": matrix
        for part, matrices in zip(("gate", "up"), tensors["l.gate_up"].chunk(2, 1), strict=True)
        for expert, matrix in enumerate(matrices)
    }


def test_experts_taken_apart_and_put_together_are_one_piece():
    def again(tensors):
        made = apart(tensors)
        both = [torch.stack([made[f"l.{e}.{part}"] for e in range(5)]) for part in ("gate", "up")]
        return {"l.w13": torch.cat(both, 1)}

    wiring = record_wiring(again, describe({"l.gate_up": torch.randn(5, 6, 4)}))
    box = Shard((0, 0, 0), (5, 6, 4))
    assert [(p.source_box, p.target_box, p.dims) for p in wiring.pieces] == [(box, box, (0, 1, 2))]


def test_a_rank_with_some_experts_fills_those_alone():
    spec = TensorSpec(torch.bfloat16, Layout((8, 6, 4), Shard((2, 0, 0), (2, 6, 4))))
    held = Manifest((("l.gate_up", spec),))
    wiring = record_wiring(apart, held)
    assert len(wiring.targets) == 16
    pieces = {piece.target: piece for piece in wiring.map(held)}
    assert set(pieces) == {"l.2.gate", "l.2.up", "l.3.gate", "l.3.up"}
    assert pieces["l.3.up"].source_box == Shard((3, 3, 0), (1, 3, 4))
    assert pieces["l.3.up"].target_box == Shard((0, 0), (3, 4))


def test_ranks_with_different_names_are_recorded_together():
    ranks = [describe({f"e.{i}": torch.zeros(2, 3)}) for i in range(3)]
    wiring = record_wiring(lambda t: {"e": torch.stack([t[f"e.{i}"] for i in range(3)])}, *ranks)
    assert wiring.targets["e"].shape == (3, 2, 3)
    (piece,) = wiring.map(ranks[2])
    assert piece.target_box == Shard((2, 0, 0), (1, 2, 3))


@pytest.mark.parametrize(
    ("convert", "why"),
    [
        (lambda t: {"b": t["a"] * 2}, "'a': it is computed with"),
        (lambda t: {"b": t["a"].double()}, "'a': in 'b' it is repeated, or has another dtype"),
        (lambda t: {"b": t["a"].bfloat16().float()}, "'a': it is computed with"),
        (
            lambda t: {"b": t["a"].view(torch.float64).clone().view(torch.float32)},
            "'a': its elements are not read in boxes",
        ),
        (lambda t: {"b": t["a"].expand(3, 2, 2)}, "'a': in 'b' it is repeated"),
        (lambda t: {"b": t["a"][torch.tensor([1, 0])]}, "'a': its elements are mixed"),
        (
            lambda t: {"b": t["a"] if t["a"][0, 0].item() else t["n"]},
            "'a': its values are asked for",
        ),
        (lambda t: {"b": t["a"].zero_()}, "'a': it is computed with"),
        (lambda t: {"b": t["a"].flatten()[1:]}, "'a': its elements are not read in boxes"),
    ],
)
def test_what_is_more_than_a_move_is_refused(convert, why):
    manifest = describe({"a": torch.zeros(2, 2), "n": torch.zeros(2, 2)})
    with pytest.raises(PlanError, match=f"1 of 2 tensors are not just moved, such as {why}"):
        record_wiring(convert, manifest)


FUSED = {  # Codes of 256 x 200 in tiles of 128 x 128, and of 64 x 200.
    "split by rows": (lambda w, s, *_: [(w[:128], s[:1]), (w[128:], s[1:])], True),
    "split by columns": (lambda w, s, *_: [(w[:, :128], s[:, :1]), (w[:, 128:], s[:, 1:])], True),
    "turned": (lambda w, s, *_: [(w.T, s.T)], True),
    "cut at the end": (lambda w, s, *_: [(w[:150], s[:2])], True),
    "rows in another order": (lambda w, s, *_: [(w[:128].view(2, 64, 200).mT, s[:1])], False),
    "joined": (lambda w, s, v, t: [(torch.cat([w, v]), torch.cat([s, t]))], True),
    "joined inside a tile": (lambda w, s, v, t: [(torch.cat([v, w]), torch.cat([t, s]))], False),
    "cut inside a tile": (lambda w, s, *_: [(w[:64], s[:1]), (w[64:], s)], False),
    "exchanged scales": (lambda w, s, *_: [(w, torch.cat([s[1:], s[:1]]))], False),
    "without scales": (lambda w, *_: [(w, torch.zeros(1))], False),
    "a scale without its dims": (lambda w, s, v, t: [(v[:, :128], t[0, 0])], False),
}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_a_conversion_keeps_codes_with_the_scales_of_their_tiles(kind, suffix):
    change, is_kept = FUSED[kind]
    codes, scales = torch.zeros(256, 200, dtype=torch.float8_e4m3fn), torch.zeros(2, 2)
    held = {"w": codes, "w_scale_inv": scales, "v": codes[:64], "v_scale_inv": scales[:1]}

    def convert(tensors):
        made = enumerate(change(*tensors.values()))
        return {
            f"e.{i}{end}": one
            for i, two in made
            for end, one in zip(["", suffix], two, strict=True)
        }

    if is_kept:
        assert record_wiring(convert, describe(held)).pieces
    else:
        with pytest.raises(
            PlanError, match=r"[vw]: the conversion to .* separates codes from the scales"
        ):
            record_wiring(convert, describe(held))


def test_scales_that_are_not_of_tiles_are_moved_freely():
    codes = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
    held = describe({"w": codes, "w_scale_inv": torch.zeros(()), "n": codes.float()})
    assert record_wiring(lambda t: {"a": t["w"][:3], "s": t["w_scale_inv"]}, held).pieces


def test_other_tensors_than_those_recorded_are_refused():
    wiring = record_wiring(lambda t: {"b": t["a"]}, describe({"a": torch.zeros(2, 2)}))
    with pytest.raises(PlanError, match=r"'a' is .* \(3,\), but .* recorded for .* \(2, 2\)"):
        wiring.map(describe({"a": torch.zeros(3)}))
    with pytest.raises(PlanError, match=r"'z' is .* \(3,\), .* recorded for no such tensor"):
        wiring.map(describe({"z": torch.zeros(3)}))
    other = describe({"a": torch.zeros(2, 2, dtype=torch.bfloat16)})
    with pytest.raises(
        PlanError, match="'a' is torch.bfloat16 .* on one rank or reader, and torch.float32"
    ):
        record_wiring(dict, wiring.sources, other)


def test_tensors_are_not_a_manifest():
    with pytest.raises(PlanError, match=r"expected a manifest from describe\(\); got Linear"):
        record_wiring(dict, torch.nn.Linear(2, 2))
