"""The patch `routes_with_pages`: rows of captured routes in and out of vLLM's connector."""

import warnings
from threading import Lock

import numpy as np
import pytest

from primeblocks.plugins.vllm.routes_with_pages import CONNECTOR, PATCH
from primeblocks.replay.adapters.vllm import CapturedPages

pytestmark = pytest.mark.vllm

PAGES, ROWS = 3, 4  # pages that fit, bytes of a page's rows


@pytest.fixture(params=["stock", "ours"])
def connector(request):
    """A connector without a model, over vLLM's store and over ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        from vllm.distributed.aux_output_connector import routed_experts, store, worker

    kind = store.BlockObjectStore if request.param == "stock" else CapturedPages
    stock = getattr(
        worker.AuxOutputWorkerConnector, "primeblocks_stock", worker.AuxOutputWorkerConnector
    )
    made = object.__new__(PATCH.replacements[CONNECTOR](stock))
    made._store = store.BackgroundBlockObjectStore(
        kind(max_bytes=PAGES * ROWS, object_nbytes=ROWS), max_pending_batches=2
    )
    sizes = {"block_size": ROWS, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    made._buffer = routed_experts.RoutedExpertsBuffer(
        np.dtype(np.uint8), (1, 1), max_concurrent_batches=1, **sizes
    )
    made._requests, made._pending_outputs, made._generation = {}, [], 0
    made._lock = Lock()
    made._hold_offers(PAGES)
    yield made
    made.close()


def step(connector, *pages, name="r", generation=0, finished=()):
    from vllm.distributed.aux_output_connector import connector as control

    hashes = {name: control.PackedBlockHashes(b"".join(pages), 1)} if pages else {}
    requests = {name: 0} if pages else {}
    connector.begin_step(control.AuxOutputConnectorMetadata(generation, requests, hashes, finished))


def rows(connector, *pages):
    return [connector.rows(page) for page in pages]


def test_offered_rows_are_there_once_a_request_has_the_page(connector):
    connector.offer({b"a": b"aaaa", b"b": b"bbbb"})
    assert rows(connector, b"a") == [None]
    step(connector, b"a", b"c")
    assert rows(connector, b"a", b"b", b"c") == [b"aaaa", None, None]
    assert connector.page_nbytes() == ROWS


def test_rows_of_a_request_are_not_evicted_by_later_offers(connector):
    connector.offer({b"a": b"aaaa"})
    step(connector, b"a")
    for page in (b"b", b"c", b"d", b"e"):
        connector.offer({page: page * ROWS})
        step(connector, page, name=page.decode())
        step(connector, finished=(page.decode(),))
    assert rows(connector, b"a", b"e") == [b"aaaa", b"eeee"]
    assert rows(connector, b"b") == [None]


def test_no_more_offers_are_held_than_the_engine_has_pages(connector):
    connector.offer({page: page * ROWS for page in (b"a", b"b", b"c")})
    connector.offer({b"a": b"aaaa", b"d": b"dddd"})
    step(connector, b"b", b"c", b"a")
    assert rows(connector, b"a", b"b", b"c") == [b"aaaa", None, b"cccc"]


def test_offers_do_not_outlive_a_reset_of_the_prefix_cache(connector):
    connector.offer({b"a": b"aaaa", b"b": b"bbbb"})
    step(connector, b"a")
    step(connector, finished=("r",))
    step(connector, b"a", b"b", name="s", generation=1)
    assert rows(connector, b"a", b"b") == [None, None]
    connector.offer({b"a": b"AAAA"})
    step(connector, finished=("s",), generation=1)
    step(connector, b"a", name="t", generation=1)
    assert rows(connector, b"a") == [b"AAAA"]


def test_steps_without_metadata_are_those_of_vllm(connector):
    connector.offer({b"a": b"aaaa"})
    connector.begin_step(None)
    step(connector, b"a")
    assert rows(connector, b"a") == [b"aaaa"]


def forward(connector, start, experts, name="r"):
    """What the engine does after computing tokens from `start` on; one sampled."""
    from vllm.distributed.aux_output_connector import worker

    connector._requests[name].pending_outputs += 1
    pending = worker.PendingAuxOutput(
        connector=connector,
        request_ids=[name],
        token_starts=np.array([start]),
        query_start_loc=np.array([0, len(experts)]),
        routed_experts_gpu=None,
        routed_experts=np.array(experts, np.uint8).reshape(-1, 1, 1),
        num_sampled=np.array([1]),
        num_rejected=np.array([0]),
    )
    connector._pending_outputs.append(pending)
    return connector.process_output(pending)[name].rows.ravel().tolist()


def test_a_prompt_of_loaded_pages_starts_inside_the_last(connector):
    connector.offer({b"a": b"\1\2\3\4", b"b": b"\5\6\7\10"})
    step(connector, b"a", b"b")
    assert forward(connector, 7, [8]) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert forward(connector, 8, [9, 10]) == [9, 10]
    assert rows(connector, b"b") == [b"\5\6\7\10"]


def test_without_its_rows_only_the_computed_token_is_known(connector):
    connector.offer({b"a": b"\1\2\3\4"})
    step(connector, b"a", b"b")
    assert forward(connector, 7, [8]) == [1, 2, 3, 4, 255, 255, 255, 8]


def test_a_request_that_starts_at_a_page_is_vllms(connector):
    connector.offer({b"a": b"\1\2\3\4"})
    step(connector, b"a", b"b")
    assert forward(connector, 4, [5, 6, 7, 8]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_its_own_test_sees_the_fault_and_the_repair():
    found = PATCH.self_test()
    assert found.needed
    assert found.effective == PATCH.applied()
