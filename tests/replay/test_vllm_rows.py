"""The vLLM adapter without an engine: its arithmetic, what it reads and what it refuses."""

import base64
import io
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from primeblocks.replay import Routes
from primeblocks.replay.adapters.vllm import (
    RouterShape,
    engine_args,
    join_prefill,
    plan_capture_bytes,
    routes_from_base64,
    routes_from_output,
    server_args,
)
from primeblocks.replay.adapters.vllm.rows import read_npy

SHAPE = RouterShape(num_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)


def rows(count: int, shape: RouterShape = SHAPE) -> np.ndarray:
    """What vLLM would return: distinct ids in router order, zeros for dense layers."""
    generator = np.random.default_rng(0)
    size = (count, shape.num_layers, shape.num_experts)
    ids = generator.random(size).argsort(-1)[..., : shape.top_k]
    ids[:, [i for i in range(shape.num_layers) if i not in shape.moe_layers]] = 0
    return ids.astype(shape.dtype)


def output(array: np.ndarray | None, generated: int) -> Any:
    return SimpleNamespace(token_ids=[7] * generated, routed_experts=array)


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def test_the_last_sampled_token_is_missing():
    array = rows(9)
    routes = routes_from_output(output(array, 4), SHAPE, prompt_tokens=6)
    assert routes.tokens == 10
    assert routes.layer_ids == (1, 2)
    assert routes.missing.nonzero()[0].tolist() == [9]
    np.testing.assert_array_equal(routes.experts[:9], array[:, 1:])


def test_a_late_prompt_start_leaves_the_prompt_before_it_missing():
    array = rows(6)
    routes = routes_from_output(output(array, 4), SHAPE, prompt_tokens=6, prompt_start=3)
    assert routes.missing.nonzero()[0].tolist() == [0, 1, 2, 9]
    np.testing.assert_array_equal(routes.experts[3:9], array[:, 1:])


def test_aborted_before_the_first_token_is_all_missing():
    routes = routes_from_output(output(None, 0), SHAPE, prompt_tokens=5)
    assert routes.tokens == 5
    assert routes.missing.all()


def test_no_rows_for_generated_tokens_is_refused():
    with pytest.raises(UnsupportedError, match=r"4 generated tokens .* engine_args"):
        routes_from_output(output(None, 4), SHAPE, prompt_tokens=5)


@pytest.mark.parametrize(
    "wrong",
    [rows(8), rows(10), rows(9)[:, :2], rows(9)[..., :1], rows(9).astype(np.uint16), rows(9)[0]],
    ids=["short", "long", "layers", "top_k", "dtype", "rank"],
)
def test_rows_of_another_shape_or_dtype_are_refused_with_both(wrong):
    with pytest.raises(ShapeError, match=r"uint8 \[9, 3, 2\]") as caught:
        routes_from_output(output(wrong, 4), SHAPE, prompt_tokens=6)
    assert str(list(wrong.shape)) in str(caught.value)


def test_a_routing_layer_that_was_called_dense_is_named():
    array = rows(9)
    array[4, 0, 1] = 3
    with pytest.raises(UsageError, match=r"layers \[0\] have experts, but moe_layers is \(1, 2\)"):
        routes_from_output(output(array, 4), SHAPE, prompt_tokens=6)


def test_rows_captured_under_compilation_are_refused():
    zeros = np.zeros_like(rows(9))
    with pytest.raises(UsageError, match="twice"):
        routes_from_output(output(zeros, 4), SHAPE, prompt_tokens=6)


def test_an_id_out_of_range_is_refused():
    array = rows(9)
    array[4, 1] = [8, 1]
    with pytest.raises(UsageError, match="expert 8"):
        routes_from_output(output(array, 4), SHAPE, prompt_tokens=6)


def test_many_experts_take_two_bytes():
    shape = RouterShape(num_layers=2, moe_layers=(0, 1), num_experts=384, top_k=8)
    array = rows(5, shape)
    assert array.dtype == np.uint16
    routes = routes_from_base64(npy(array), shape, tokens=6)
    np.testing.assert_array_equal(routes.experts[:5], array)
    assert shape.bytes_per_token == 2 * 8 * 2


def test_http_rows_equal_those_in_process():
    array = rows(9)
    inside = routes_from_output(output(array, 4), SHAPE, prompt_tokens=6)
    assert routes_from_base64(npy(array), SHAPE, tokens=10) == inside


@pytest.mark.parametrize(
    "text",
    [
        "not base64!",
        base64.b64encode(b"not npy").decode(),
        npy(rows(9))[:-8],
        npy(np.asfortranarray(rows(9))),
        npy(np.array([{}], dtype=object)),
    ],
    ids=["base64", "npy", "truncated", "fortran", "pickle"],
)
def test_damaged_http_rows_are_corruption(text):
    with pytest.raises(CorruptionError, match=r"\d+ (characters|bytes) of routed experts are no"):
        routes_from_base64(text, SHAPE, tokens=10)


PIECES = [b"(", b")", b"{", b"'", b"-1", b"9" * 30, b"007", b"'|O'", b"'V0'", b"\n", b"\xff", b","]


@given(
    kind=st.sampled_from(["u1", "<u2", ">u2", "i8", "f4", "S3", "?"]),
    place=st.integers(0, 127),
    cut=st.integers(0, 9),
    piece=st.sampled_from(PIECES) | st.binary(max_size=2),
)
def test_any_bytes_are_an_array_or_corruption(kind, place, cut, piece):
    file = bytearray(base64.b64decode(npy(rows(9).astype(kind))))
    wanted = bytes(file)
    file[place : place + cut] = piece
    try:
        array = read_npy(bytes(file))
    except CorruptionError:
        assert bytes(file) != wanted or kind in ("f4", "S3", "?")
        return
    assert array.dtype.kind in "iu"
    assert array.nbytes == len(file) - 128


@pytest.mark.parametrize("shape", [(0, 3, 2), (5,), (2, 3, 4, 5)])
def test_arrays_of_any_shape_are_views(shape):
    array = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    file = base64.b64decode(npy(array))
    again = read_npy(memoryview(file))
    np.testing.assert_array_equal(again, array)
    assert array.size == 0 or np.shares_memory(again, np.frombuffer(file, np.uint8))


@pytest.mark.parametrize("layers", [(), (0, 0), (2, 1), (3,), (-1,)])
def test_a_router_shape_has_rising_layers_in_range(layers):
    with pytest.raises(UsageError, match=r"between 0 and 2"):
        RouterShape(num_layers=3, moe_layers=layers, num_experts=8, top_k=2)


def test_a_router_shape_has_at_least_top_k_experts():
    with pytest.raises(UsageError, match=r"1\.\.8; got 9"):
        RouterShape(num_layers=3, moe_layers=(1,), num_experts=8, top_k=9)


def test_capture_bytes_count_every_tier_and_all_layers():
    # 16 tokens x 3 layers x 2 choices x 1 byte a page.
    assert plan_capture_bytes(SHAPE, page_tokens=16, device_pages=10) == 10 * 96
    tiers = {"page_tokens": 16, "device_pages": 10, "offloaded_pages": 5}
    assert plan_capture_bytes(SHAPE, **tiers) == 20 * 96
    assert plan_capture_bytes(SHAPE, **tiers, slack=1.1) == 16 * 96


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_tokens": 0},
        {"device_pages": 0},
        {"offloaded_pages": -1},
        {"slack": 0.5},
        {"slack": float("nan")},
    ],
)
def test_capture_bytes_refuse_impossible_sizes(wrong):
    with pytest.raises(UsageError, match="got"):
        plan_capture_bytes(SHAPE, **{"page_tokens": 16, "device_pages": 10} | wrong)


def test_a_server_gets_the_same_in_words():
    words = ["--enable-return-routed-experts", "--aux-output-config", '{"max_bytes": 96}']
    middleware = ["--middleware", "primeblocks.replay.adapters.vllm.RoutesMiddleware"]
    assert server_args(max_bytes=96, device="cuda") == [*words, *middleware]
    assert server_args(max_bytes=96, device="cpu") == [*words, "--enforce-eager", *middleware]
    with pytest.raises(UsageError, match="max_bytes"):
        server_args(max_bytes=0, device="cpu")


def test_engine_args_are_eager_on_cpu_only():
    on_cpu = engine_args(max_bytes=96, device="cpu")
    on_gpu = engine_args(max_bytes=96, device="cuda")
    assert on_cpu == on_gpu | {"enforce_eager": True}
    assert on_gpu == {
        "enable_return_routed_experts": True,
        "aux_output_config": {"max_bytes": 96},
    }
    with pytest.raises(UsageError, match="plan_capture_bytes"):
        engine_args(max_bytes=0, device="cpu")


# --- prefill and decode as two engines ------------------------------------------------------------


def known(array: np.ndarray, which: list[bool]) -> Routes:
    missing = ~np.array(which, np.bool_)
    return Routes.from_array(array, num_experts=8, layer_ids=(1, 2), missing=missing)


@st.composite
def halves(draw: Any) -> Any:
    """Rows of one sequence as two engines tell them, each with its own computation of a row."""
    prompt, completion = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    tokens = prompt + completion
    both = rows(2 * tokens)[:, 1:]
    of_prefill, of_decode = both[:tokens], both[tokens:]
    prefill_knows = draw(st.lists(st.booleans(), min_size=prompt, max_size=prompt))
    decode_knows = draw(st.lists(st.booleans(), min_size=prompt, max_size=prompt))
    sampled = draw(st.booleans())
    prefill = known(of_prefill[: prompt + sampled], prefill_knows + [False] * sampled)
    decode = known(of_decode, decode_knows + [True] * (completion - 1) + [False])
    return prompt, prefill, decode, draw(st.integers(0, prompt))


@given(halves())
def test_rows_of_two_engines_are_joined_or_the_gap_is_named(case):
    prompt, prefill, decode, start = case
    asked = {"prompt_tokens": prompt, "versions": (4, 4), "prompt_start": start}
    # Row by row, without masks.
    expected, gaps = [], []
    for token in range(decode.tokens):
        if not decode.missing[token]:
            expected.append(decode.experts[token].tolist())
        elif token < prompt and not prefill.missing[token]:
            expected.append(prefill.experts[token].tolist())
        else:
            expected.append(None)
            gaps += [token] * (start <= token < decode.tokens - 1)
    if gaps:
        with pytest.raises(
            ShapeError, match=f"^{len(gaps)} of .* first is that of token {gaps[0]}"
        ):
            join_prefill(prefill, decode, **asked)
        return
    joined = join_prefill(prefill, decode, **asked)
    pairs = zip(joined.experts.tolist(), joined.missing, strict=True)
    assert [None if missing else row for row, missing in pairs] == expected


def test_halves_that_are_no_halves_are_refused():
    array = rows(9)[:, 1:]
    prefill = known(array[:6], [True] * 5 + [False])
    decode = known(array, [False] * 4 + [True] * 4 + [False])
    asked = {"prompt_tokens": 5, "versions": (4, 4)}
    whole = join_prefill(prefill, decode, **asked)
    assert whole == known(array, [True] * 8 + [False])
    with pytest.raises(
        UsageError, match="version 3 computed the prompt, and version 4 continued it"
    ):
        join_prefill(prefill, decode, **asked | {"versions": (3, 4)})
    for wrong in (0, 4, 7):
        with pytest.raises(ShapeError, match=f"a prompt of {wrong} tokens, .* got 6 and 9"):
            join_prefill(prefill, decode, **asked | {"prompt_tokens": wrong})
    for wrong in (-1, 6):
        with pytest.raises(ShapeError, match=f"prompt_start {wrong}"):
            join_prefill(prefill, decode, **asked | {"prompt_start": wrong})
    with pytest.raises(ShapeError, match="got 6 and 4 tokens"):
        join_prefill(prefill, decode[:4], **asked)
    other = Routes.from_array(array[:6], num_experts=9, layer_ids=(1, 2))
    with pytest.raises(ShapeError, match="not of the same tokens and model"):
        join_prefill(other, decode, **asked)
