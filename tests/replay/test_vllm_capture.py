"""The vLLM adapter: its arithmetic and refusals, then captured routes against transformers."""

import base64
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from primeblocks.replay import Routes, compare, impose, measure_mismatch, record
from primeblocks.replay.adapters.vllm import (
    RouterShape,
    engine_args,
    plan_capture_bytes,
    routes_from_base64,
    routes_from_output,
    server_args,
)
from primeblocks.replay.adapters.vllm.rows import read_npy
from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

SHAPE = RouterShape(num_layers=3, moe_layers=(1, 2), num_experts=8, top_k=2)
EXACT_K3 = 1e-11
PROMPT_START = 20  # as in the job
JOB = Path(__file__).with_name("vllm_capture_job.py")


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
    with pytest.raises(UsageError, match=r"layers \[0\] route, but moe_layers is \(1, 2\)"):
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
    with pytest.raises(UsageError, match=r"rise within 0\.\.2"):
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


# --- on a real engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("capture")
    # One dense layer, three that route, sigmoid scores.
    tiny_models.save("glm4_moe", folder / "exact", dtype="float32", init_std=0.08)
    sizes = {"num_layers": 8, "hidden": 256, "num_experts": 32, "top_k": 4, "vocab": 2048}
    tiny_models.save("qwen3_moe", folder / "bf16", dtype="bfloat16", init_std=0.06, **sizes)
    return folder


@pytest.fixture(scope="module")
def results(models: Path) -> Mapping[str, np.ndarray]:
    """Requests served by a real engine, in its own process: vLLM alters a process for good."""
    fork_job(JOB, str(models))
    return dict(np.load(models / "results.npz"))


def load(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    """log p(token | tokens before it), for every token but the first."""
    ids = torch.from_numpy(tokens)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def requests(results: Mapping[str, np.ndarray], case: str) -> Iterator[tuple[Any, ...]]:
    for index in range(sum(key.startswith(f"{case}/") for key in results) // 4):
        fields = (results[f"{case}/{index}/{name}"] for name in ("tokens", "logprobs", "cached"))
        yield *fields, Routes.unpack(results[f"{case}/{index}/routes"].tobytes())


@pytest.mark.vllm
@pytest.mark.parametrize("case", ["plain", "chunked", "prefix_hit", "prompt_start"])
def test_captured_routes_equal_a_recomputation(models, results, case):
    """float32: every (token, layer) pair, cached positions included."""
    from primeblocks.replay.adapters.transformers import routers

    model = load(models / "exact", torch.float32)
    served = list(requests(results, case))
    assert served
    k3 = []
    for tokens, rollout, cached, routes in served:
        with record(routers(model)) as tape:
            trainer = logprobs_of(model, tokens)[-len(rollout) :]
        before = PROMPT_START if case == "prompt_start" else 0
        assert routes.missing.nonzero()[0].tolist() == [*range(before), len(tokens) - 1]
        agreement = compare(routes, tape.routes)
        assert agreement.tokens == len(tokens) - 1 - before
        assert agreement.by_layer == {1: 1.0, 2: 1.0, 3: 1.0}
        k3.append(measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout).k3)
        assert (cached > 0) == (case in {"prefix_hit", "prompt_start"})
    assert max(k3) < EXACT_K3


@pytest.mark.vllm
def test_http_encoding_of_vllm_is_read(results):
    (_, _, _, routes), *_ = requests(results, "plain")
    assert Routes.unpack(results["http"].tobytes()) == routes


@pytest.mark.vllm
def test_planned_bytes_are_what_the_engine_allots(results):
    """A page of rows is as large as planned, and as many fit."""
    shape = RouterShape(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)
    assert results["store"].tolist() == [32 * shape.bytes_per_token, 64]


@pytest.mark.vllm
def test_replay_lowers_the_mismatch_in_bfloat16(models, results):
    """8 layers of 32 experts, top 4: a fifth of the routings differ; imposing them removes nearly
    all of the mismatch (docs/replay_factor.md has more seeds and other settings)."""
    from primeblocks.replay.adapters.transformers import routers

    model = load(models / "bf16", torch.float32)  # the same weights, widened
    without, with_replay, rollouts, agreements = [], [], [], []
    for tokens, rollout, _, routes in requests(results, "bf16"):
        rollouts.append(torch.from_numpy(rollout))
        with torch.no_grad(), record(routers(model)) as tape:
            without.append(logprobs_of(model, tokens)[-len(rollout) :])
        with torch.no_grad(), impose(routers(model), routes):
            with_replay.append(logprobs_of(model, tokens)[-len(rollout) :])
        agreements.append(compare(routes, tape.routes).overall)
    rollout = torch.cat(rollouts)
    before = measure_mismatch(trainer_logprobs=torch.cat(without), rollout_logprobs=rollout)
    after = measure_mismatch(trainer_logprobs=torch.cat(with_replay), rollout_logprobs=rollout)
    assert before.tokens == 2048
    assert 0.5 < np.mean(agreements) < 0.95
    print(f"k3 {before.k3:.2e} without, {after.k3:.2e} with replay")
    assert after.k3 < before.k3 / 50
    assert after.ratio_tail < before.ratio_tail
