"""The vLLM adapter: arguments of an engine, and copies between its cache and the pool."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import PlanError, UnsupportedError
from tests.kvoffload.vllm.specs import PAGE, make_spec

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"host_bytes": 0, "disk_path": "d", "disk_bytes": 1},
            UnsupportedError,
            "a disk needs host memory",
        ),
        ({"primary_bytes": 0}, PlanError, "primary_bytes must be at least 1; got 0"),
        ({"disk_path": "d"}, PlanError, "both or neither"),
        ({"disk_bytes": 1}, PlanError, "both or neither"),
        ({"disk_path": "d", "disk_bytes": -1}, PlanError, "-1"),
        ({"persist": "run"}, PlanError, "persist='run' needs a disk"),
        ({"routes_bytes_per_token": -1}, PlanError, "routes_bytes_per_token must be at least 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(wrong, error, message, adapter):
    with pytest.raises(error, match=message):
        adapter.engine_args(**{"primary_bytes": 1, "host_bytes": 1, **wrong})


def test_host_copies_equal_a_loop(adapter):
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
        engine_id=f"test-{os.getpid()}",
        num_chunks=chunks,
        rank=0,
        kv_bytes_per_chunk=chunk_bytes,
        cpu_page_size=sum(padded),
    )
    worker = adapter.spec.HostCopyWorker(caches, region=region)
    before = [each.clone() for each in device]

    counts, first, targets = (5, 3), (0, 0), (range(9, 14), range(2, 5))
    used = [6, 1, 4, 0, 7, 2, 3, 5]
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


@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_pool_has_no_name_once_the_scheduler_exists(adapter, monkeypatch, caplog, is_cpu):
    """A killed engine then leaves nothing behind."""
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    spec = make_spec(adapter, pool_pages=4)
    region = SharedOffloadRegion(spec._engine_id, 4, 0, PAGE, PAGE)
    stock = SimpleNamespace(_mmap_region=region)
    monkeypatch.setattr(adapter.spec.TieringOffloadingSpec, "get_worker", lambda *_: stock)
    monkeypatch.setattr(adapter.spec.current_platform, "is_cpu", lambda: is_cpu)
    if not is_cpu:
        assert spec.get_worker(None) is stock  # vLLM's own copy worker
    manager = spec.get_manager()
    assert not Path(region.mmap_path).exists()
    manager.shutdown()
    if not is_cpu:
        region.cleanup()
        assert "unlink" not in caplog.text
