"""The vLLM adapter: refused arguments, then pages that come back to a real engine."""

import importlib
import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_store_job.py")
WHOLE = 96  # prompt tokens in whole pages
CLOSE = 1e-5  # float32 log-probabilities, prefill in other batches


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kvoffload")
    tiny_models.save("qwen3_moe", folder / "model", seed=0, dtype="float32", init_std=0.06)
    fork_job(JOB, str(folder))
    return json.loads((folder / "results.json").read_text())


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
        ({"eviction_policy": "fifo"}, PlanError, "fifo"),
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
