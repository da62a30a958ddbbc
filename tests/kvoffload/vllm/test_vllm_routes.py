"""Rows of captured routes on their way between the engine and its pool; no engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from primeblocks.errors import UnsupportedError
from tests.kvoffload.vllm.named_pages import ROWS, hash_of, keys_of, routes_of

pytestmark = pytest.mark.vllm

PAGE, ROW = 8000, 12288  # bytes of keys and values, of a row of the pool
CHUNKS = 8


class Capture:
    """A fake of the engine's capture: rows that arrive when the test says so."""

    group = 0

    def __init__(self):
        self.known, self.offered, self.asked = {}, {}, []

    def page_nbytes(self):
        return ROWS

    def carry(self): ...

    def rows_of(self, blocks):
        self.asked.append(SimpleNamespace(blocks=blocks, rows=None))
        return self.asked[-1]

    def arrive(self, index):
        later = self.asked[index]
        later.rows = {block: self.known.get(block) for block in later.blocks}

    def offer(self, rows):
        self.offered |= rows


def _fake_copies():
    from vllm.v1.kv_offload import base

    class Copies(base.OffloadingWorker):
        """A fake copy worker: what was submitted is finished at the next poll."""

        submitted = ()

        def submit_store(self, job_id, src, dst):
            self.submitted = (*self.submitted, job_id)
            return True

        submit_load = submit_store

        def get_finished(self):
            done, self.submitted = self.submitted, ()
            return [base.TransferResult(job_id, True) for job_id in done]

        def wait(self, job_ids): ...

    return Copies()


@pytest.fixture
def worker(adapter, monkeypatch):
    """A worker over a pool, and the capture of its engine."""
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    capture = Capture()
    monkeypatch.setattr(AuxOutputWorkerConnector, "primeblocks_live", {"e": capture}, raising=False)
    pool, tail = np.zeros((CHUNKS, ROW), np.int8), adapter.routes.Tail(PAGE, ROWS)
    made = adapter.routes.RoutesWorker(_fake_copies(), pool=pool, tail=tail, engine_id="e")
    return SimpleNamespace(it=made, pool=pool, tail=tail, capture=capture)


def chunks(adapter, ids, numbers):
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    return adapter.routes.NamedChunks(CPULoadStoreSpec(ids), keys_of(numbers))


def blocks(*ids):
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

    return GPULoadStoreSpec(list(ids), (len(ids),), (0,))


def finished(worker):
    return [result.job_id for result in worker.it.get_finished()]


def test_a_store_waits_for_the_rows_of_its_step(adapter, worker):
    worker.capture.known = {20: routes_of(1), 21: routes_of(2)}
    worker.it.submit_store(0, blocks(20), chunks(adapter, [3], [1]))
    worker.it.submit_store(1, blocks(20, 21), chunks(adapter, [5, 6], [1, 2]))
    assert finished(worker) == []
    worker.capture.arrive(1)
    assert finished(worker) == [1]
    worker.capture.arrive(0)
    assert finished(worker) == [0]
    found = [worker.tail.read(worker.pool[c], hash_of(n)) for c, n in ((3, 1), (5, 1), (6, 2))]
    assert found == [routes_of(1), routes_of(1), routes_of(2)]


def test_rows_of_an_earlier_computation_do_not_stay_in_the_pool(adapter, worker):
    worker.tail.write(worker.pool[3], hash_of(1), routes_of(1))
    worker.it.submit_store(0, blocks(20), chunks(adapter, [3], [1]))
    worker.capture.arrive(0)  # the page was computed again, and its rows are not known
    assert finished(worker) == [0]
    assert worker.tail.read(worker.pool[3], hash_of(1)) is None


def test_a_rank_without_the_capture_leaves_the_rows_of_the_rank_with_it(adapter, worker):
    """Ranks of an engine share the pool, and each copies its own part of a page."""
    other = adapter.routes.RoutesWorker(
        _fake_copies(), pool=worker.pool, tail=worker.tail, engine_id="of another process"
    )
    worker.capture.known = {20: routes_of(1)}
    worker.it.submit_store(0, blocks(20), chunks(adapter, [3], [1]))
    worker.capture.arrive(0)
    assert finished(worker) == [0]
    other.submit_store(0, blocks(20), chunks(adapter, [3], [1]))
    assert worker.tail.read(worker.pool[3], hash_of(1)) == routes_of(1)


def test_what_was_loaded_is_offered_by_block_known_or_not(adapter, worker):
    worker.tail.write(worker.pool[3], hash_of(1), routes_of(1))
    worker.tail.write(worker.pool[4], hash_of(9), routes_of(9))  # of the chunk's last page
    worker.it.submit_load(0, chunks(adapter, [3, 4], [1, 2]), blocks(20, 21))
    assert worker.capture.offered == {}
    assert finished(worker) == [0]
    assert worker.capture.offered == {20: routes_of(1), 21: None}


def test_routes_go_with_the_group_of_layers_that_the_capture_follows(adapter, worker):
    worker.capture.group = 1  # the keys of these pages are of group 0
    worker.it.submit_store(0, blocks(20), chunks(adapter, [3], [1]))
    worker.it.submit_load(1, chunks(adapter, [4], [2]), blocks(21))
    assert worker.capture.asked[0].blocks == []
    worker.capture.arrive(0)
    assert finished(worker) == [1, 0]
    assert worker.capture.offered == {}


def test_a_worker_without_the_patch_is_refused(adapter, monkeypatch, worker):
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    monkeypatch.delattr(AuxOutputWorkerConnector, "primeblocks_live")
    with pytest.raises(UnsupportedError, match="routes_with_pages"):
        adapter.routes.RoutesWorker(
            _fake_copies(), pool=worker.pool, tail=worker.tail, engine_id="e"
        )
