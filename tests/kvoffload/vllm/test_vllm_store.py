"""The vLLM adapter: refused arguments, then pages that come back to a real engine."""

import dataclasses
import hashlib
import importlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.testing import tiny_models
from tests.engine_job import KV_BYTES, call
from tests.kvoffload.vllm.patience import be_patient

PAGE_TOKENS = 32
PROMPT, WHOLE = 100, 96  # tokens, and those in whole pages
PAGE_BYTES = 4 * 2 * 2 * 32 * PAGE_TOKENS * 4  # layers, k and v, heads, width, tokens, float32
CLOSE = 1e-5  # float32 log-probabilities, prefill in other batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kvoffload")
    tiny_models.save("qwen3_moe", folder / "model", seed=0, dtype="float32", init_std=0.06)
    return call(_run, folder)


def _run(folder: Path) -> dict[str, Any]:
    """Caches far smaller than the prompts; what came of each phase, and the store's statistics."""
    generator = np.random.default_rng(0)
    asked, flood = (generator.integers(4, 512, (n, PROMPT)).tolist() for n in (6, 20))
    _plant(folder)
    planted = _bytes_in(folder)
    be_patient()
    engine = _start(folder)
    phases = Phases(engine)
    phases.results |= {"planted": planted, "adopted": _bytes_in(folder)}
    engine_id = engine.llm_engine.vllm_config.kv_transfer_config.engine_id
    pools = [each.name for each in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*")]
    for version in range(3):
        phases.run(f"cold {version}", asked, version=version)
        phases.run(f"flood {version}", flood, version=version)
        phases.run(f"warm {version}", asked, version=version)
    phases.run("flood again", flood, version=2)
    phases.results["corrupted"] = _corrupt(folder)
    phases.run("damaged", asked, version=2)
    phases.run("flood a last time", flood, version=2)
    phases.run("repaired", asked, version=2)
    assert engine.reset_prefix_cache(reset_connector=True)
    phases.run("reset", asked, version=2)
    engine.llm_engine.engine_core.shutdown()
    phases.results["left"] = _bytes_in(folder)
    phases.results["pools"] = pools
    return phases.results


def _start(folder: Path) -> Any:
    import vllm

    from primeblocks.kvoffload.adapters.vllm import engine_args

    return vllm.LLM(
        str(folder / "model"),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        block_size=PAGE_TOKENS,
        num_gpu_blocks_override=32,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=False,
        logprobs_mode="processed_logprobs",
        enable_return_routed_experts=True,
        aux_output_config={"max_bytes": 64 << 20},
        **engine_args(
            primary_bytes=24 * PAGE_BYTES,
            host_bytes=8 * PAGE_BYTES,
            disk_path=folder / "pages",
            disk_bytes=1024 * PAGE_BYTES,
            max_staleness=1,
        ),
    )


class Phases:
    """Runs prompts on one engine and writes down what came of them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.results: dict[str, Any] = {}

    def run(self, name: str, prompts: list[list[int]], *, version: int) -> None:
        import vllm

        from primeblocks.kvoffload.adapters.vllm import engine_statistics, request_args

        parameters = vllm.SamplingParams(
            max_tokens=16,
            temperature=0.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            extra_args=request_args(version),
        )
        salted = [{"prompt_token_ids": ids, "cache_salt": f"run/{version}"} for ids in prompts]
        requests = self.engine.generate(salted, parameters, use_tqdm=False)
        self.results[name] = {
            "requests": [self.describe(request) for request in requests],
            "statistics": dataclasses.asdict(engine_statistics()),
        }

    @staticmethod
    def describe(request: Any) -> dict[str, Any]:
        output = request.outputs[0]
        chosen = zip(output.logprobs, output.token_ids, strict=True)
        return {
            "tokens": list(output.token_ids),
            "logprobs": [at[token].logprob for at, token in chosen],
            "cached": request.num_cached_tokens,
            "routes": hashlib.sha256(np.ascontiguousarray(output.routed_experts)).hexdigest(),
        }


def _plant(folder: Path) -> None:
    """Leave a page behind, as an engine that was killed does."""
    from primeblocks.kvoffload import DiskTier, PageKey, Record
    from primeblocks.kvoffload.page import checksum

    path = folder / "pages" / "engine-0"
    disk = DiskTier(path, capacity_bytes=PAGE_BYTES, page_bytes=PAGE_BYTES)
    key, page = PageKey("0", b"old"), np.zeros(PAGE_BYTES, np.uint8)
    assert disk.put([Record(key, page, checksum(key, page))]) == [None]
    disk.close()


def _bytes_in(folder: Path) -> int:
    return (folder / "pages" / "engine-0" / "pages").stat().st_size


def _corrupt(folder: Path) -> int:
    """Change one bit of every page on disk."""
    file = folder / "pages" / "engine-0" / "pages"
    content = np.fromfile(file, np.uint8)
    content[PAGE_BYTES // 2 :: PAGE_BYTES] ^= 1
    content.tofile(file)
    return len(content) // PAGE_BYTES


def cached(phase):
    return [request["cached"] for request in phase["requests"]]


def assert_same(phase, other):
    for mine, theirs in zip(phase["requests"], other["requests"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["routes"] == theirs["routes"]
        np.testing.assert_allclose(mine["logprobs"], theirs["logprobs"], atol=CLOSE)


@pytest.mark.vllm
@pytest.mark.parametrize("version", [0, 1, 2])
def test_evicted_pages_come_back_with_the_same_outputs(results, version):
    cold, warm = results[f"cold {version}"], results[f"warm {version}"]
    assert cached(cold) == [0] * 6, "another salt's pages were found"
    assert cached(warm) == [WHOLE] * 6
    assert_same(warm, cold)
    before = results[f"flood {version}"]["statistics"]
    after = warm["statistics"]
    assert after["hits"] - before["hits"] == 6 * 3
    assert after["tokens"] - before["tokens"] == 6 * WHOLE
    assert after["tiers"]["disk"]["hits"] > 0
    assert after["tiers"]["disk"]["checksum_failures"] == 0


@pytest.mark.vllm
def test_damaged_pages_are_computed_again(results):
    assert results["corrupted"] > 6 * 3
    damaged, cold = results["damaged"], results["cold 2"]
    assert cached(damaged) == [0] * 6
    assert_same(damaged, cold)
    assert damaged["statistics"]["tiers"]["disk"]["checksum_failures"] == 6 * 3
    assert damaged["statistics"]["hits"] == results["flood again"]["statistics"]["hits"]


@pytest.mark.vllm
def test_pages_saved_again_after_damage_are_used(results):
    assert cached(results["repaired"]) == [WHOLE] * 6
    assert_same(results["repaired"], results["cold 2"])


@pytest.mark.vllm
def test_a_reset_of_the_connector_reaches_our_tiers(results):
    assert cached(results["reset"]) == [0] * 6
    assert_same(results["reset"], results["cold 2"])


@pytest.mark.vllm
def test_an_engine_starts_empty_and_leaves_nothing_behind(results):
    assert results["planted"] > 0
    assert results["adopted"] == 0
    assert results["left"] == 0
    assert results["pools"] == []  # nameless while it runs: a kill cannot leave it either


@pytest.fixture(scope="module")
def adapter():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        return importlib.import_module("primeblocks.kvoffload.adapters.vllm")


@pytest.mark.vllm
def test_arguments_for_an_engine(tmp_path, adapter):
    how = {"disk_path": tmp_path, "disk_bytes": 3, "max_staleness": 8}
    arguments = adapter.engine_args(primary_bytes=1, host_bytes=2, **how)
    transfer = arguments["kv_transfer_config"]
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_role == "kv_both"
    extra = transfer.kv_connector_extra_config
    assert extra["cpu_bytes_to_use"] == 1
    assert extra["offload_prompt_only"] is False
    (tier,) = extra["secondary_tiers"]
    assert tier["host_bytes"] == 2
    assert tier["disk_path"] == str(tmp_path)
    assert json.dumps(extra)  # it travels to the engine's process
    assert arguments["enable_prefix_caching"] is True
    assert tier["persist"] is None


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"host_bytes": 0, "disk_path": "d", "disk_bytes": 1}, UnsupportedError, "disk alone"),
        ({"primary_bytes": 0}, PlanError, "primary_bytes must be positive; got 0"),
        ({"disk_path": "d"}, PlanError, "both or neither"),
        ({"disk_bytes": 1}, PlanError, "both or neither"),
        ({"disk_path": "d", "disk_bytes": -1}, PlanError, "-1"),
        ({"persist": "run"}, PlanError, "persist='run' needs a disk"),
        ({"routes_bytes_per_token": -1}, PlanError, "must not be negative; got -1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(wrong, error, message, adapter):
    with pytest.raises(error, match=message):
        adapter.engine_args(**{"primary_bytes": 1, "host_bytes": 1, **wrong})


@pytest.mark.vllm
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_host_copies_equal_a_loop(adapter, blocks_per_chunk):
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    # Two groups of layers; the rows of the second tensor are padded.
    sizes, padded, blocks, chunks = (12, 20), (12, 24), 16, 8
    generator = torch.Generator().manual_seed(0)
    device = [
        torch.randint(-99, 99, (blocks, size), dtype=torch.int8, generator=generator)
        for size in padded
    ]
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(each, each.shape[1]) for each in device],
        [[base.CanonicalKVCacheRef(i, size)] for i, size in enumerate(sizes)],
    )
    chunk_bytes = 4096
    region = adapter.spec.UnlinkedRegion(
        engine_id=f"test-{os.getpid()}-{blocks_per_chunk}",
        num_chunks=chunks,
        rank=0,
        kv_bytes_per_chunk=chunk_bytes,
        cpu_page_size=sum(padded) * blocks_per_chunk,
    )
    worker = adapter.spec.HostCopyWorker(caches, blocks_per_chunk=blocks_per_chunk, region=region)
    before = [each.clone() for each in device]

    # Blocks first..first+count of a request; each group starts inside its first chunk.
    counts, first, targets = (5, 3), (blocks_per_chunk - 1, 0), (range(9, 14), range(2, 5))
    host_ids = iter((6, 1, 4, 0, 7, 2, 3, 5))
    used = []
    for count, start in zip(counts, first, strict=True):
        spanned = (start % blocks_per_chunk + count - 1) // blocks_per_chunk + 1
        used += [next(host_ids) for _ in range(spanned)]
    gpu = base.GPULoadStoreSpec([7, 3, 5, 1, 0, 8, 2, 6], counts, first)
    back = base.GPULoadStoreSpec([*targets[0], *targets[1]], counts, first)
    assert worker.submit_store(1, gpu, CPULoadStoreSpec(used))
    assert worker.submit_load(2, CPULoadStoreSpec(used), back)
    assert [(job.job_id, job.success) for job in worker.get_finished()] == [(1, True), (2, True)]
    assert worker.get_finished() == []

    for tensor, group, sources in ((0, targets[0], (7, 3, 5, 1, 0)), (1, targets[1], (8, 2, 6))):
        expected = before[tensor].clone()
        for source, target in zip(sources, group, strict=True):
            expected[target, : sizes[tensor]] = before[tensor][source, : sizes[tensor]]
        assert torch.equal(device[tensor], expected)
    worker.shutdown()
    assert not Path(region.mmap_path).exists()
