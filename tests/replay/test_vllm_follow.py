"""Routes of a real vLLM in float32, undisturbed, and of requests that are preempted, aborted, run
through an update of weights, or find their pages again without rows: every known row equals
transformers' choice.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from primeblocks.replay import Routes, impose, measure_mismatch
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.adapters.vllm import engine_args, plan_capture_bytes, routes_from_base64
from primeblocks.replay.sampling import kept_logprobs, kept_tokens
from primeblocks.testing import tiny_models
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.engine_job import KV_BYTES, call
from tests.kvoffload.vllm.patience import be_patient
from tests.replay.vllm_served import (
    EXACT,
    PAGE_TOKENS,
    logprobs_of,
    prompts,
    sampling,
    served,
    tokens_of,
)

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "block_size": PAGE_TOKENS,
    "kv_cache_memory_bytes": KV_BYTES,
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,
}
PAGES = 28  # 896 tokens, fewer than the crowd in flight needs
CHUNK = 64  # tokens of one step: longer prompts are prefilled in several
PROMPT_START = 20
EXACT_K3 = 1e-11
ROUNDING = 1e-5  # of scores: logits differ by the 4e-6 or so that the bound on k3 allows
NUCLEUS = {"temperature": 0.7, "top_k": 40, "top_p": 0.9}

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("follow")
    for seed, name in enumerate(["exact", "exact-1"]):
        # One dense layer, three that route, sigmoid scores.
        tiny_models.save("glm4_moe", path / name, dtype="float32", init_std=0.08, seed=seed)
    return path


@pytest.fixture(scope="module")
def flight(folder: Path) -> dict[str, Any]:
    return call(_run_flight, folder)


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Any]:
    return call(_follow, folder)


@pytest.fixture(scope="module")
def models(folder: Path) -> list[Any]:
    return [
        AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for name in ("exact", "exact-1")
    ]


def _run_flight(folder: Path) -> dict[str, Any]:
    return asyncio.run(_fly(folder))


class Flight:
    """An engine whose requests are disturbed while they run."""

    def __init__(self, folder: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        max_bytes = plan_capture_bytes(EXACT, page_tokens=PAGE_TOKENS, device_pages=PAGES)
        capture = engine_args(max_bytes=max_bytes, device="cpu")
        room = {"num_gpu_blocks_override": PAGES, "max_num_batched_tokens": CHUNK}
        arguments = AsyncEngineArgs(str(folder / "exact"), **room, **ENGINE, **capture)
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.progress: dict[str, int] = {}
        self.moved = asyncio.Condition()

    async def one(self, name: str, ids: list[int], tokens: int, **settings: Any) -> Any:
        output, asked = None, sampling(tokens, **settings)
        async for output in self.engine.generate({"prompt_token_ids": ids}, asked, name):
            async with self.moved:
                self.progress[name] = len(output.outputs[0].token_ids)
                self.moved.notify_all()
        return output

    async def all(
        self, case: str, texts: list[list[int]], tokens: int = 24, **settings: Any
    ) -> list[Any]:
        names = [f"{case}{i}" for i in range(len(texts))]
        each = zip(names, texts, strict=True)
        tasks = [self.one(name, ids, tokens, **settings) for name, ids in each]
        return await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)

    async def disturb(
        self, case: str, texts: list[list[int]], tokens: int, then: Callable[[list[str]], Any]
    ) -> list[Any]:
        """Run requests; once each has ten tokens, do `then`."""
        names = [f"{case}{i}" for i in range(len(texts))]
        running = asyncio.create_task(self.all(case, texts, tokens))
        async with self.moved:
            enough = self.moved.wait_for(
                lambda: all(self.progress.get(name, 0) >= 10 for name in names)
            )
            await asyncio.wait_for(enough, TIMEOUT_S)
        await then(names)
        return await running


async def _fly(folder: Path) -> dict[str, Any]:
    from vllm.utils.serial_utils import numpy2base64
    from vllm.v1.metrics.reader import get_metrics_snapshot

    generator = np.random.default_rng(1)
    flight = Flight(folder)
    engine = flight.engine
    results: dict[str, Any] = {}

    short = prompts(generator, 4, 40)
    plain = await flight.all("plain", short)
    late = await flight.all("late", short, routed_experts_prompt_start=PROMPT_START)
    chunked = await flight.all("chunked", prompts(generator, 3, 150))
    turns = [tokens_of(request) + prompts(generator, 1, 20)[0] for request in chunked]
    results["plain"], results["chunked"] = served(plain), served(chunked)
    results["prefix_hit"] = served(await flight.all("turn", turns))
    results["prompt_start"] = served(late, start=PROMPT_START)
    sent = numpy2base64(plain[0].outputs[0].routed_experts)
    results["http"] = routes_from_base64(sent, EXACT, tokens=len(tokens_of(plain[0])))

    results["preempted"] = served(await flight.all("crowd", prompts(generator, 8, 60), 120))
    counts = {metric.name: getattr(metric, "value", 0) for metric in get_metrics_snapshot()}
    results["preemptions"] = counts["vllm:num_preemptions"]

    async def abort(names: list[str]) -> None:
        for name in names:
            await engine.abort(name)

    aborted = await flight.disturb("aborted", prompts(generator, 3, 40), 150, abort)
    results["aborted"] = served(aborted)
    results["reasons"] = [request.outputs[0].finish_reason for request in aborted]
    results["continued"] = served(await flight.all("on", [tokens_of(r) for r in aborted], 20))

    async def update(names: list[str]) -> None:
        await engine.pause_generation(mode="keep", clear_cache=False)
        weights = {"weights_path": str(folder / "exact-1")}
        await engine.collective_rpc("reload_weights", kwargs=weights)
        await engine.update_weight_version("1")
        await engine.resume_generation()

    mixed = await flight.disturb("mixed", prompts(generator, 3, 40), 60, update)
    results["mixed"] = served(mixed)
    spans = [request.outputs[0].weight_versions for request in mixed]
    results["switches"] = [span[-1].start for span in spans]
    results["spans"] = [len(span) for span in spans]
    engine.shutdown()
    return results


def _follow(folder: Path) -> dict[str, Any]:
    """Pages that come back from tiers, and rows that do not."""
    import vllm

    from primeblocks.kvoffload.adapters.vllm import engine_args as offload_args
    from primeblocks.kvoffload.adapters.vllm import request_args

    be_patient()
    page_bytes = EXACT.num_layers * 2 * 2 * 32 * PAGE_TOKENS * 4
    # Rows of thirty pages: those in use, and few of the tiers'.
    max_bytes = plan_capture_bytes(EXACT, page_tokens=PAGE_TOKENS, device_pages=30)
    engine = vllm.LLM(
        str(folder / "exact"),
        num_gpu_blocks_override=32,
        **ENGINE,
        **engine_args(max_bytes=max_bytes, device="cpu"),
        **offload_args(
            primary_bytes=16 * page_bytes,
            host_bytes=64 * page_bytes,
            disk_path=folder / "pages",
            disk_bytes=1024 * page_bytes,
            max_staleness=1,
        ),
    )
    generator = np.random.default_rng(2)
    asked, flood = prompts(generator, 4, 100), prompts(generator, 24, 100)
    store = engine.collective_rpc(lambda worker: worker.model_runner.aux_output_connector._store)[0]
    results: dict[str, Any] = {"allotted": (store._store.object_nbytes, store._store.num_slots)}

    def run(case: str, texts: list[list[int]], **settings: Any) -> None:
        parameters = sampling(8, **settings)
        parameters.extra_args = request_args(0)
        salted = [{"prompt_token_ids": ids, "cache_salt": "0"} for ids in texts]
        results[case] = served(engine.generate(salted, parameters, use_tqdm=False))

    run("cold", asked)
    run("warm", asked)
    run("flood", flood)
    run("forgotten", asked)  # KV from the tiers, rows evicted
    run("known again", [ids[:70] + [9] * 30 for ids in asked])  # own rows of new tokens
    assert engine.reset_prefix_cache()  # the tiers keep their pages
    run("reset", flood[:4])
    run("alive", prompts(generator, 2, 50))
    run("nucleus", prompts(generator, 4, 50), **NUCLEUS)
    engine.llm_engine.engine_core.shutdown()
    assert store._closed  # The plug-in closes it with the runner.
    return results


@torch.no_grad()
def wrong(routes: Routes, models: list[Any], tokens: np.ndarray, cut: int | None = None) -> float:
    """The rate of known experts that transformers scores below its own, after the same choices.

    From `cut` on it is the next policy, over the old one's KV. Equal but for rounding is not below.
    """
    ids, cache, rates = torch.from_numpy(tokens)[None], None, []
    parts = [slice(0, cut)] if cut is None else [slice(0, cut), slice(cut, None)]
    for model, part in zip(models, parts, strict=False):
        with impose(routers(model), routes[part], min_score_ratio=1 - ROUNDING) as imposed:
            answer = model(input_ids=ids[:, part], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        rates.append(imposed.replacement_rate)
    return max(rates)


@pytest.mark.parametrize("case", ["plain", "chunked", "prefix_hit", "prompt_start"])
def test_captured_routes_equal_a_recomputation(flight, models, case):
    """Every (token, layer) pair, cached positions included."""
    assert flight[case]
    k3 = []
    for tokens, rollout, cached, routes in flight[case]:
        before = PROMPT_START if case == "prompt_start" else 0
        assert routes.missing.nonzero()[0].tolist() == [*range(before), len(tokens) - 1]
        assert wrong(routes, models, tokens) == 0
        with torch.no_grad(), impose(routers(models[0]), routes):
            trainer = logprobs_of(models[0], tokens)[-len(rollout) :]
        k3.append(measure_mismatch(trainer_logprobs=trainer, rollout_logprobs=rollout).k3)
        assert (cached > 0) == (case in {"prefix_hit", "prompt_start"})
    assert max(k3) < EXACT_K3


def test_http_encoding_of_vllm_is_read(flight):
    assert flight["http"] == flight["plain"][0].routes


@pytest.mark.parametrize("case", ["preempted", "aborted", "continued"])
def test_disturbed_requests_have_all_their_rows(flight, models, case):
    if case == "preempted":
        assert flight["preemptions"] >= 3
    elif case == "aborted":
        assert set(flight["reasons"]) == {"abort"}
    for tokens, _, cached, routes in flight[case]:
        assert (cached > 0) == (case == "continued")
        assert routes.missing.nonzero()[0].tolist() == [len(tokens) - 1]
        assert wrong(routes, models, tokens) == 0


def test_each_row_belongs_to_the_version_that_computed_it(flight, models):
    assert flight["spans"] == [2, 2, 2]
    for (tokens, _, _, routes), switch in zip(flight["mixed"], flight["switches"], strict=True):
        # The first new token was sampled from the position before it.
        cut = 40 + switch - 1
        assert 40 <= cut < len(tokens) - 10
        assert wrong(routes, models, tokens, cut) == 0
        assert wrong(routes, models, tokens) > 0.05


@pytest.mark.parametrize("case", ["cold", "warm", "flood", "forgotten", "known again", "reset"])
def test_pages_bring_their_rows_or_none(pages, models, case):
    """The engine that vLLM would have ended at the first page without rows answers on."""
    for tokens, _, cached, routes in pages[case]:
        assert wrong(routes, models, tokens) == 0
        missing = routes.missing.nonzero()[0]
        if case in {"forgotten", "reset"}:
            assert cached == 96
            assert missing.tolist() == [*range(96), len(tokens) - 1]
        elif case == "known again":
            assert cached == 64
            assert missing.tolist() == [*range(64), len(tokens) - 1]
        else:
            assert cached == (96 if case == "warm" else 0)
            assert missing.tolist() == [len(tokens) - 1]


def test_planned_bytes_are_what_the_engine_allots(pages):
    """A page of rows is as large as planned, and as many fit."""
    assert pages["allotted"] == (PAGE_TOKENS * EXACT.bytes_per_token, 30)


def test_the_engine_is_alive_after_all_that(pages, models):
    for tokens, _, _, routes in pages["alive"]:
        assert routes.missing.sum() == 1
        assert wrong(routes, models, tokens) == 0


@torch.no_grad()
def test_the_trainer_reaches_the_distribution_that_was_sampled(pages, models):
    """Temperature 0.7, top-k 40, top-p 0.9: vLLM's processed log-probabilities."""
    ours, plain, theirs = [], [], []
    for tokens, logprobs, _, _ in pages["nucleus"]:
        ids = torch.from_numpy(tokens)
        logits = models[0](input_ids=ids[None], use_cache=False).logits[0, -9:-1]
        kept = kept_tokens(logits, temperature=0.7, top_k=40, top_p=0.9)
        assert 0 < kept.counts.min() <= kept.counts.max() <= 40
        ours.append(kept_logprobs(logits, ids[-8:], kept, temperature=0.7))
        plain.append(logits.log_softmax(-1).gather(-1, ids[-8:, None])[:, 0])
        theirs.append(torch.from_numpy(logprobs))
    theirs = torch.cat(theirs)
    same = measure_mismatch(trainer_logprobs=torch.cat(ours), rollout_logprobs=theirs)
    other = measure_mismatch(trainer_logprobs=torch.cat(plain), rollout_logprobs=theirs)
    assert same.k3 < 1e-10
    assert other.k3 > 0.1
