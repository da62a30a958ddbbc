"""Weight updates of one real engine whose pages and routes lie in our tiers; then damage."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeblocks.replay import record
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call
from tests.kvoffload.vllm.patience import be_patient

PAGE_TOKENS, ENGINE_PAGES = 32, 32
LAYERS, TOP_K = 4, 2
PROMPT, ANSWER, TOOL, ALIGNED = 100, 16, 24, 128
ROLLOUTS, CROWD = 6, 20
PAGE_BYTES = LAYERS * 2 * 2 * 32 * PAGE_TOKENS * 4  # k and v, heads, width, tokens, float32
ROUTES_BYTES = LAYERS * TOP_K
FRAME_BYTES = PAGE_BYTES + 4096  # a page, its routes, and what rounding adds
POOL_PAGES, HOST_PAGES, DISK_PAGES = 40, 16, 160
WHOLE = 96  # tokens in whole pages, of the prompt and of what the second turn finds
PAGES = ROLLOUTS * WHOLE // PAGE_TOKENS
CLOSE = 1e-5  # float32 log-probabilities, prefill in other batches

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("versions")


@pytest.fixture(scope="module")
def results(folder, request):
    count = 10 if request.config.getoption("--full") else 3
    for version in range(count):
        path = folder / f"model-{version}"
        tiny_models.save("qwen3_moe", path, seed=version, dtype="float32", init_std=0.06)
    return call(_run, folder, count)


def _run(folder: Path, count: int) -> dict[str, Any]:
    """Train, as far as an engine with our tiers can see: checkpoints, one after another."""
    from primeblocks.kvoffload.adapters.vllm import request_args

    be_patient()
    _plant(folder)
    planted = _bytes_on_disk(folder)["pages"]
    engine = _start(folder)
    run = Run(folder, engine)
    results: dict[str, Any] = {"asked": run.asked, "versions": []}
    results["pages"] = {"planted": planted, "adopted": _bytes_on_disk(folder)["pages"]}
    engine_id = engine.llm_engine.vllm_config.kv_transfer_config.engine_id
    results["pools"] = [each.name for each in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*")]
    for version in range(count):
        _load(engine, folder, version)
        results["versions"].append(run.version(version, salt=f"run/{version}"))
    results["whole"] = _whole_pages(run, count - 1)
    results |= _damaged(run, count - 1)
    _load(engine, folder, 0)
    # With the new version's salt, and what goes wrong without: the comparisons must notice it.
    for name, version in (("salted", count), ("unsalted", count - 1)):
        said = [request_args(version)] * ROLLOUTS
        answers = _generate(engine, run.whole, salt=f"run/{version}", said=said)
        results[name] = [_describe(answer) for answer in answers]
    assert engine.reset_prefix_cache(reset_connector=True)
    answers = _generate(engine, run.whole, salt=f"run/{count - 1}", said=said)
    results["reset"] = [_describe(answer) for answer in answers]
    engine.llm_engine.engine_core.shutdown()
    results["pages"]["left"] = _bytes_on_disk(folder)["pages"]
    return results


def _plant(folder: Path) -> None:
    """Leave a page behind, as an engine that was killed does."""
    from primeblocks.kvoffload import DiskTier, PageKey, Record
    from primeblocks.kvoffload.page import checksum

    path = folder / "pages" / "engine-0"
    disk = DiskTier(path, capacity_bytes=PAGE_BYTES, page_bytes=PAGE_BYTES, io="buffered")
    key, page = PageKey("0", b"old"), np.zeros(PAGE_BYTES, np.uint8)
    assert disk.put([Record(key, page, checksum(key, page), page)]) == [None]
    disk.close()


def _start(folder: Path) -> Any:
    """Tiers in host memory and on disk, capture on, and room for the routes of its own pages."""
    import vllm

    from primeblocks.kvoffload.adapters.vllm import engine_args

    return vllm.LLM(
        str(folder / "model-0"),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=ENGINE_PAGES,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
        aux_output_config={"max_bytes": ENGINE_PAGES * PAGE_TOKENS * ROUTES_BYTES},
        **engine_args(
            primary_bytes=POOL_PAGES * FRAME_BYTES,
            host_bytes=HOST_PAGES * FRAME_BYTES,
            disk_path=folder / "pages",
            disk_bytes=DISK_PAGES * FRAME_BYTES,
            max_staleness=1,
            routes_bytes_per_token=ROUTES_BYTES,
        ),
    )


def _load(engine: Any, folder: Path, version: int) -> None:
    path = str(folder / f"model-{version}")
    engine.collective_rpc("reload_weights", kwargs={"weights_path": path})


def _generate(
    engine: Any, prompts: list[list[int]], *, salt: str, said: list[dict[str, Any]]
) -> list[Any]:
    import vllm

    parameters = [
        vllm.SamplingParams(
            max_tokens=ANSWER,
            temperature=0.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=each,
        )
        for each in said
    ]
    salted = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in prompts]
    return engine.generate(salted, parameters, use_tqdm=False)


def _describe(request: Any) -> dict[str, Any]:
    output = request.outputs[0]
    chosen = zip(output.logprobs, output.token_ids, strict=True)
    missing = (output.routed_experts == 0xFF).all(axis=(1, 2))
    return {
        "tokens": list(output.token_ids),
        "logprobs": [at[token].logprob for at, token in chosen],
        "cached": request.num_cached_tokens,
        "routes": output.routed_experts,
        "missing_routes": int(missing.sum()),
    }


def _bytes_on_disk(folder: Path) -> dict[str, int]:
    files = [each for each in (folder / "pages").rglob("*") if each.is_file()]
    # Blocks hold what the file system notes of a file in pieces, too; a size counts holes.
    stats = {each.name: each.stat() for each in files}
    return {name: min(each.st_size, each.st_blocks * 512) for name, each in stats.items()}


class Run:
    """One engine, and what came of its requests.

    In each version rollouts ask, others flood all caches, the rollouts ask the same again, others
    flood again, and the rollouts take a second turn, their last.
    """

    def __init__(self, folder: Path, engine: Any) -> None:
        generator = np.random.default_rng(0)
        self.folder, self.engine = folder, engine
        self.asked = generator.integers(4, 512, (ROLLOUTS, PROMPT)).tolist()
        self.crowds = generator.integers(4, 512, (2, CROWD, PROMPT)).tolist()
        self.tool = generator.integers(4, 512, (ROLLOUTS, TOOL)).tolist()
        self.whole = generator.integers(4, 512, (ROLLOUTS, ALIGNED)).tolist()

    def version(self, version: int, *, salt: str) -> dict[str, Any]:
        from primeblocks.kvoffload.adapters.vllm import engine_statistics, request_args

        names = [f"{salt}/{index}" for index in range(ROLLOUTS)]
        first = [request_args(version, rollout=name) for name in names]
        cold = _generate(self.engine, self.asked, salt=salt, said=first)
        _generate(self.engine, self.crowds[0], salt=salt, said=[request_args(version)] * CROWD)
        before = engine_statistics()
        warm = _generate(self.engine, self.asked, salt=salt, said=first)
        grown = [
            prompt + list(request.outputs[0].token_ids) + tool
            for prompt, request, tool in zip(self.asked, warm, self.tool, strict=True)
        ]
        _generate(self.engine, self.crowds[1], salt=salt, said=[request_args(version)] * CROWD)
        between = engine_statistics()
        last = [request_args(version, rollout=name, ends=[name]) for name in names]
        turn = _generate(self.engine, grown, salt=salt, said=last)
        after = engine_statistics()
        return {
            "cold": [_describe(request) for request in cold],
            "warm": [_describe(request) for request in warm],
            "turn": [_describe(request) for request in turn],
            "warm_hits": [between.hits - before.hits, between.tokens - before.tokens],
            "turn_hits": [after.hits - between.hits, after.tokens - between.tokens],
            "tiers": dataclasses.asdict(after)["tiers"],
            "disk_bytes": _bytes_on_disk(self.folder),
        }


def _whole_pages(run: Run, version: int) -> list[list[dict[str, Any]]]:
    """Prompts of whole pages, first computed, then out of the tiers to the last page."""
    from primeblocks.kvoffload.adapters.vllm import request_args

    salt, said = f"run/{version}", [request_args(version)] * CROWD
    found = []
    for asked in (run.whole, run.crowds[0], run.whole):
        answers = _generate(run.engine, asked, salt=salt, said=said[: len(asked)])
        found.append([_describe(answer) for answer in answers])
    return [found[0], found[2]]


def _damaged(run: Run, version: int) -> dict[str, Any]:
    """Ask when one bit of every page on disk has changed, and again; our hits and failures."""
    from primeblocks.kvoffload.adapters.vllm import engine_statistics, request_args

    salt, said = f"run/{version}", [request_args(version)] * CROWD
    _generate(run.engine, run.crowds[0], salt=salt, said=said)
    file = run.folder / "pages" / "engine-0" / "pages"
    content = np.fromfile(file, np.uint8)
    content[PAGE_BYTES // 2 :: FRAME_BYTES] ^= 1
    content.tofile(file)
    before, found = engine_statistics(), {}
    for name, asked in ("damaged", run.whole), ("", run.crowds[1]), ("repaired", run.whole):
        answers = _generate(run.engine, asked, salt=salt, said=said[: len(asked)])
        found[name] = [_describe(answer) for answer in answers]
        if name == "damaged":
            after = engine_statistics()
    failures = [each.tiers["disk"]["checksum_failures"] for each in (before, after)]
    found["counts"] = [after.hits - before.hits, failures[1] - failures[0]]
    return found


def column(requests, name):
    return [request[name] for request in requests]


def are_equal(requests, others):
    return [
        one["tokens"] == other["tokens"]
        and np.array_equal(one["routes"], other["routes"])
        and np.allclose(one["logprobs"], other["logprobs"], rtol=0, atol=CLOSE)
        for one, other in zip(requests, others, strict=True)
    ]


def test_pages_and_routes_of_a_version_come_back_and_no_others_do(results):
    for version, found in enumerate(results["versions"]):
        cached = [column(found[phase], "cached") for phase in ("cold", "warm", "turn")]
        assert cached == [[0] * ROLLOUTS, [WHOLE] * ROLLOUTS, [WHOLE] * ROLLOUTS], version
        for phase in ("cold", "warm", "turn"):
            assert column(found[phase], "missing_routes") == [0] * ROLLOUTS
        assert all(are_equal(found["warm"], found["cold"]))
        for pages, tokens in (found["warm_hits"], found["turn_hits"]):
            # On a busy machine, a page may be taken twice, or found in the engine's own pool.
            assert 0 < tokens <= min(PAGES, pages) * PAGE_TOKENS


def test_pages_are_taken_once(results):
    found = [each[name] for each in results["versions"] for name in ("warm_hits", "turn_hits")]
    exact = sum(each == [PAGES, PAGES * PAGE_TOKENS] for each in found)
    assert exact >= len(found) / 2, found


def test_weights_differ_enough_to_notice(results):
    for before, after in zip(results["versions"], results["versions"][1:], strict=False):
        assert not any(are_equal(before["cold"], after["cold"]))
    assert column(results["salted"], "cached") == [0] * ROLLOUTS
    assert min(column(results["unsalted"], "cached")) >= WHOLE
    assert not any(are_equal(results["unsalted"], results["salted"]))


@torch.no_grad()
def test_transformers_says_the_same(results, folder):
    """The last weights, without an engine: every token, log-probability and choice of experts."""
    from transformers import AutoModelForCausalLM

    from primeblocks.replay.adapters.transformers import routers

    model = AutoModelForCausalLM.from_pretrained(
        folder / f"model-{len(results['versions']) - 1}",
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    for prompt, said in zip(results["asked"], results["versions"][-1]["cold"], strict=True):
        with record(routers(model)) as tape:
            logits = model(torch.tensor([prompt + said["tokens"]]), use_cache=False).logits
        best = logits[0, PROMPT - 1 : -1].log_softmax(-1).max(-1)
        assert best.indices.tolist() == said["tokens"]
        np.testing.assert_allclose(said["logprobs"], best.values, rtol=0, atol=CLOSE)
        np.testing.assert_array_equal(said["routes"], tape.routes.experts[:-1])


def test_a_prompt_may_come_back_to_its_last_page(results):
    """Stock vLLM ends the engine here, if it captures routes."""
    first, again = results["whole"]
    assert column(again, "cached") == [ALIGNED] * ROLLOUTS
    assert column(again, "missing_routes") == [0] * ROLLOUTS
    assert all(are_equal(first, again))


def test_damaged_pages_are_computed_again_and_used_once_saved(results):
    first, _ = results["whole"]
    assert column(results["damaged"], "cached") == [0] * ROLLOUTS
    assert results["counts"] == [0, ROLLOUTS * ALIGNED // PAGE_TOKENS]
    assert column(results["repaired"], "cached") == [ALIGNED] * ROLLOUTS
    assert all(are_equal(results["damaged"], first))
    assert all(are_equal(results["repaired"], first))


def test_a_reset_of_the_connector_reaches_our_tiers(results):
    """The prompts were asked under this salt, just before."""
    assert column(results["reset"], "cached") == [0] * ROLLOUTS
    assert all(are_equal(results["reset"], results["salted"]))


def test_an_engine_starts_empty_and_leaves_nothing_behind(results):
    assert results["pages"]["planted"] > 0
    assert results["pages"]["adopted"] == results["pages"]["left"] == 0
    assert results["pools"] == []  # nameless while it runs: a kill cannot leave it either


def test_the_disk_is_full_and_bounded(results):
    quota = DISK_PAGES * FRAME_BYTES
    used = column(results["versions"], "disk_bytes")
    assert max(each["pages"] for each in used) <= quota
    assert min(each["pages"] for each in used[2:]) > 0.95 * quota
    index = 2 * DISK_PAGES * (50 + 128) + (16 << 10)  # with keys below 128 bytes
    log = max(4, quota >> 18) * 4120 + (256 << 10)
    assert max(sum(each.values()) for each in used) <= quota + index + log
    disk = results["versions"][-1]["tiers"]["disk"]
    assert disk["evictions"] > 0
    assert disk["checksum_failures"] == disk["failures"] == 0
