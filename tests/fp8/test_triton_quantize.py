"""Quantizing in Triton against the definition: interpreted, or compiled on a CUDA device."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from primeblocks.errors import UsageError
from primeblocks.fp8 import Quantized, Tile, quantize
from primeblocks.fp8.quantize import swiglu
from tests.fp8.on_triton import (
    DEVICE,
    INTERPRETED,
    MARKS,
    MX,
    QUANTIZER,
    ROW,
    SQUARE,
    assert_same,
    matrix,
    on_cpu,
)

pytestmark = MARKS
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
QUOTIENTS = ("reciprocal", "division", "amax")


@settings(max_examples=30)
@given(
    st.tuples(st.integers(0, 140), st.integers(1, 140)),
    st.sampled_from([ROW, SQUARE, MX, Tile(128, 1), Tile(2, 64)]),
    st.sampled_from(["float32", "ue8m0"]),
    st.sampled_from(QUOTIENTS),
    st.sampled_from(DTYPES),
    st.integers(-30, 30),
    st.integers(0, 9),
)
def test_both_layouts_have_the_bits_of_the_definition(
    shape, tile, scale, quotient, dtype, exponent, seed
):
    x = matrix(*shape, seed=seed, scale=10.0**exponent).to(dtype)
    x[::3, ::2] = 0
    x[1::5] = 0
    how = {"scale": scale, "quotient": quotient, "nonfinite": "nan"}
    rows, columns = QUANTIZER.both(x.to(DEVICE), tile, **how)
    assert_same(rows, quantize(x, tile, **how))
    assert_same(columns, quantize(x.mT, tile, **how))
    assert rows.codes.is_contiguous()
    assert columns.codes.is_contiguous()


def _steps(*numbers):
    """Float32 numbers and their neighbours on both sides."""
    x = torch.tensor(numbers, dtype=torch.float32)
    bits = x.view(torch.int32)
    return torch.cat([(bits + near).view(torch.float32) for near in (-1, 0, 1)])


def _adversarial():
    """Tiles whose scale is 1 (a value is 448) full of ties, and tiles beside powers of two."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([_steps(*ties.tolist()), _steps(*codes[1:].tolist()), -ties, -codes])
    values = values.clamp(-448, 448)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    rows = torch.cat([torch.full((len(rows), 1), 448.0), rows], 1)
    tiny = 2.0**-126
    largest = _steps(
        *(448 * 2.0**e for e in (-126, -100, -8, 0, 1, 90)), 1e-45, tiny, 3.4e38, 448.5
    )
    return torch.cat([rows, largest[:, None] * torch.linspace(-1, 1, 128)])


@pytest.mark.parametrize("quotient", QUOTIENTS)
@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_ties_subnormals_edges_and_neighbours_of_powers_of_two(scale, quotient):
    x = _adversarial()
    how = {"scale": scale, "quotient": quotient}
    found = QUANTIZER(x.to(DEVICE), ROW, **how)
    assert_same(found, quantize(x, ROW, **how))
    if scale == "ue8m0":
        assert (found.scales.view(torch.int32) & 0x7FFFFF == 0).all()


def test_batches_and_strides_are_taken_as_they_come():
    x = matrix(2, 3, 70, 260).to(DEVICE)
    for view in (x, x.mT, x[..., 5:200], x[:, :2, ::3], x[0, 0].t()):
        for tile in (ROW, SQUARE):
            assert_same(QUANTIZER(view, tile), quantize(view.cpu(), tile))


def test_nothing_is_launched_for_nothing():
    for shape in ((0, 128), (3, 0), (0, 5, 7)):
        q, t = QUANTIZER.both(torch.empty(shape, device=DEVICE), ROW)
        assert q.codes.shape == shape
        assert t.codes.shape == (*shape[:-2], shape[-1], shape[-2])


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("quotient", QUOTIENTS)
def test_a_value_that_is_not_finite_spoils_its_tile_alone(bad, quotient):
    x = matrix(70, 300)
    x[3, 140] = bad
    how = {"quotient": quotient, "nonfinite": "nan"}
    for tile in (ROW, SQUARE):
        found = QUANTIZER(x.to(DEVICE), tile, **how)
        spoilt = found.codes.view(torch.uint8) == 0x7F
        expected = quantize(x, tile, **how)
        assert torch.equal(found.scales.isnan().cpu(), expected.scales.isnan())
        assert torch.equal(spoilt.cpu(), expected.codes.float().isnan())
        assert torch.equal(found.scales.nan_to_num(0).cpu(), expected.scales.nan_to_num(0))
        with pytest.raises(UsageError, match="1 of 21000 values"):
            QUANTIZER(x.to(DEVICE), tile, quotient=quotient)


@pytest.mark.skipif(not INTERPRETED, reason="bytes are counted in the interpreter")
def test_bytes_are_those_of_the_operands(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder as builder

    moved = {"load": 0, "store": 0}
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(ptrs, mask, *rest):
        result = load(ptrs, mask, *rest)
        moved["load"] += int(mask.data.sum()) * result.data.itemsize
        return result

    def counted_store(ptrs, value, mask, *rest):
        moved["store"] += int(mask.data.sum()) * value.data.itemsize
        return store(ptrs, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    x = matrix(150, 256).bfloat16()
    QUANTIZER.both(x, ROW)
    assert moved == {"load": 2 * x.numel(), "store": 2 * x.numel() + 4 * (150 * 2 + 256 * 2)}
    moved.update(load=0, store=0)
    QUANTIZER.swiglu_both(x, x[:, 0], ROW)
    assert moved == {"load": 2 * x.numel() + 2 * 150, "store": x.numel() + 4 * (150 + 128 * 2)}


@pytest.mark.parametrize("rows", [1, 32, 64, 128])
def test_tiles_of_any_height_hold_a_swiglu(rows):
    gate_up = matrix(70, 256)
    found = on_cpu(QUANTIZER.swiglu(gate_up.to(DEVICE), None, Tile(rows, 64)))
    right = quantize(swiglu(gate_up, None), Tile(rows, 64)).dequantize(torch.float64)
    apart = (found.dequantize(torch.float64) - right).abs()
    assert (apart <= right.abs() / 8 + found.scales.double().amax() / 256).all()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # The interpreter.
def test_an_overflow_in_a_swiglu_is_named():
    with pytest.raises(UsageError, match="values of a SwiGLU are not finite"):
        QUANTIZER.swiglu(torch.full((4, 256), 300.0, device=DEVICE).half(), None, ROW)


@pytest.mark.skipif(INTERPRETED, reason="takes 10 GB and a device")
def test_places_beyond_two_to_the_31():
    x = torch.randn(1, 128, device=DEVICE).bfloat16().expand(1 << 24, 128).clone()
    x = torch.cat([x, x[:1000] * 3])  # 2**31 + 128,000 values
    q, t = QUANTIZER.both(x, ROW)
    assert_same(Quantized(q.codes[-1000:], q.scales[-1000:], ROW), quantize(x[-1000:].cpu(), ROW))
    end = x.shape[0] // 128 * 128 - 1024
    last = quantize(x[end:].mT.cpu(), ROW)
    assert_same(Quantized(t.codes[:, end:], t.scales[:, end // 128 :], ROW), last)


# Of a gate below -88 exp(-gate) is infinite and its sigmoid 0, of which NumPy warns.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@settings(max_examples=15)
@example((28, 134), torch.bfloat16, 20.0, False, 4)
@given(
    st.tuples(st.integers(1, 140), st.integers(1, 140)),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([0.01, 1.0, 20.0]),
    st.booleans(),
    st.integers(0, 9),
)
def test_swiglu_is_quantized_as_the_unfused_path_does(shape, dtype, scale, scored, seed):
    tokens, inner = shape
    gate_up = matrix(tokens, 2 * inner, seed=seed, scale=scale).to(dtype)
    scores = matrix(tokens, seed=seed + 1).abs() if scored else None
    on = [x if x is None else x.to(DEVICE) for x in (gate_up, scores)]
    rows, columns = QUANTIZER.swiglu_both(on[0], on[1], ROW)
    assert_same(
        QUANTIZER.swiglu(on[0], on[1], ROW),
        Quantized(rows.codes.cpu(), rows.scales.cpu(), ROW),
    )
    # Two exponentials, so two activations that differ by a part of (5 + |gate|) / 2**23: where
    # that leaves no choice between two numbers of the dtype, in a whole tile, codes are equal.
    h = swiglu(gate_up, scores)
    exact = swiglu(gate_up.double().float(), scores).double()
    slack = exact.abs() * (5 + gate_up[:, :inner].double().abs()) * 2.0**-23 + 2.0**-149
    certain = (exact - slack).to(dtype) == (exact + slack).to(dtype)
    for found, expected, sure in (
        (rows, quantize(h, ROW), certain),
        (columns, quantize(h.mT, ROW), certain.mT),
    ):
        whole = _tiles(sure).all(-1)
        assert torch.equal(found.scales.cpu()[whole], expected.scales[whole])
        same = found.codes.cpu().view(torch.uint8) == expected.codes.view(torch.uint8)
        assert (_tiles(same).all(-1) | ~whole).all()
        step = expected.dequantize(torch.float64).abs() / 8 + expected.scales.double().amax() / 512
        apart = (on_cpu(found).dequantize(torch.float64) - expected.dequantize(torch.float64)).abs()
        assert (apart <= step * (1 + 2.0**-6)).all()
    if dtype == torch.bfloat16:  # Of h, (5 + |gate|) / 16,384 are expected to be uncertain.
        expected = float((5 + gate_up[:, :inner].double().abs()).sum()) / 16_384
        assert int((~certain).sum()) <= 20 + 8 * expected


def _tiles(x):
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128), value=True)
    return padded.unflatten(1, (-1, 128))
