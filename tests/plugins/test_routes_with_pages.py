"""The patch `routes_with_pages`: rows of captured routes lie beside the pages they belong to."""

import inspect
import warnings
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from primeblocks.plugins.vllm import missing_routes
from primeblocks.plugins.vllm.routes_with_pages import CONNECTOR, PATCH
from primeblocks.plugins.vllm.scheduled_blocks import Assigned, build_with_blocks, watch_loads

pytestmark = pytest.mark.vllm

PAGE = 4  # tokens of a page, and bytes of its rows
GONE = 255


def made(*, kind="ours", block_tokens=PAGE, alone=True):
    """A connector without a model, over vLLM's store or ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        from vllm.distributed.aux_output_connector import routed_experts, store, worker

    store_type = store.BlockObjectStore
    if kind == "ours":
        (made_of,) = missing_routes.PATCH.replacements.values()
        store_type = made_of(store_type)
    stock = getattr(
        worker.AuxOutputWorkerConnector, "primeblocks_stock", worker.AuxOutputWorkerConnector
    )
    it = object.__new__(PATCH.replacements[CONNECTOR](stock))
    it._store = store.BackgroundBlockObjectStore(
        store_type(max_bytes=8 * PAGE, object_nbytes=PAGE), max_pending_batches=2
    )
    sizes = {"block_size": PAGE, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    it._buffer = routed_experts.RoutedExpertsBuffer(
        np.dtype(np.uint8), (1, 1), max_concurrent_batches=2, **sizes
    )
    it._requests, it._pending_outputs, it._generation = {}, [], 0
    it._lock, it._max_concurrent_batches = Lock(), 2
    it._capturer = SimpleNamespace(snapshot_routing_data=lambda count: None)
    it._lay_table(0, 16, block_tokens, alone=alone)
    return it


@pytest.fixture
def connector():
    it = made()
    yield it
    it.close()


def test_the_connector_has_what_our_tier_asks_of_it(connector):
    """Neither of the two imports the other: the tier declares what it calls."""
    from primeblocks.kvoffload.adapters.vllm.routes import CapturedRows, PendingRows

    calls = {name for name in vars(CapturedRows) if not name.startswith("_")}
    assert calls == {"page_nbytes", "carry", "rows_of", "offer"}
    for name in calls:
        declared, there = getattr(CapturedRows, name), getattr(type(connector), name)
        assert inspect.signature(declared).parameters == inspect.signature(there).parameters
    assert {*CapturedRows.__annotations__} <= {*vars(connector)}
    assert {*PendingRows.__annotations__} <= {*vars(connector.rows_of([1]))}
    assert hasattr(type(connector), "primeblocks_live")


class Stock:
    def __init__(self, **given):
        self._store = object()
        self._buffer = SimpleNamespace(block_size=16, shape_per_token=(1, 1), dtype=np.dtype("u1"))


@pytest.mark.parametrize(("block_tokens", "by_place"), [(8, False), (24, False), (32, True)])
def test_blocks_that_hold_no_whole_pages_are_left_to_vllm(block_tokens, by_place):
    """Beside layers of state vLLM may hash more tokens at a time than a block holds."""
    spec = type("FullAttentionSpec", (), {"block_size": block_tokens})()
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    it = PATCH.replacements[CONNECTOR](Stock)(
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        model=None,
        kv_cache_config=SimpleNamespace(num_blocks=4, kv_cache_groups=groups),
    )
    assert (it._table is not None) is by_place


def begin(
    connector,
    started=(),
    grown=(),
    *,
    pages=(),
    generation=0,
    finished=(),
    copied=(),
    loading=(),
):
    """Begin a step. `started`: (name, blocks, tokens they hold); `grown`: (name, blocks)."""
    from vllm.distributed.aux_output_connector import connector as control

    names = [name for name, *_ in (*started, *grown)]
    hashes = {names[0]: control.PackedBlockHashes(b"".join(pages), 1)} if pages else {}
    metadata = control.AuxOutputConnectorMetadata(
        generation, dict.fromkeys(names, 0), hashes, tuple(finished)
    )
    metadata.primeblocks_blocks = Assigned(
        {name: ([blocks], held) for name, blocks, held in started},
        {name: [blocks] for name, blocks in grown},
        list(copied),
        [[blocks] for blocks in loading],
    )
    connector.begin_step(metadata)


def compute(connector, *parts):
    """The forward of a step. Each part: (name, first token, experts)."""
    bounds = np.cumsum([0, *(len(experts) for _, _, experts in parts)])
    view = SimpleNamespace(
        req_ids=[name for name, *_ in parts],
        query_start_loc_np=bounds,
        num_computed_tokens_np=np.array([start for _, start, _ in parts]),
    )
    pending = connector.prepare_output(view)
    rows = [each for *_, experts in parts for each in experts]
    pending.routed_experts = np.array(rows, np.uint8).reshape(-1, 1, 1)
    pending.num_sampled, pending.num_rejected = np.ones((2, len(parts)), int) * [[1], [0]]
    return pending


def handed(pending):
    """What arrives with the rows of a step."""
    return {name: out.rows.ravel().tolist() for name, out in pending.process_output().items()}


def run(connector, name, blocks, start, experts, **more):
    """One request's step: begun, computed, arrived."""
    begin(connector, [(name, blocks, start)], **more)
    return handed(compute(connector, (name, start, experts)))[name]


def test_a_page_brings_the_rows_of_the_block_it_lies_in(connector):
    assert run(connector, "a", [1, 2], 0, [1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5]
    assert run(connector, "b", [3, 4], 0, [9, 8, 7, 6, 5]) == [9, 8, 7, 6, 5]  # the same tokens
    assert run(connector, "c", [1, 5], 4, [0]) == [1, 2, 3, 4, 0]
    assert run(connector, "d", [3, 6], 4, [0]) == [9, 8, 7, 6, 0]


def test_a_request_may_use_a_page_that_another_computes_in_the_same_step(connector):
    begin(connector, [("a", [1, 2], 0), ("b", [1, 3], 4)])
    rows = handed(compute(connector, ("b", 4, [7]), ("a", 0, [1, 2, 3, 4, 5])))
    assert rows == {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 4, 7]}


def test_rows_go_on_over_chunks_and_new_blocks(connector):
    begin(connector, [("a", [1], 0)])
    pending = compute(connector, ("a", 0, [1, 2, 3]))
    pending.num_sampled = np.array([0])  # the prompt is not over
    assert handed(pending) == {}
    begin(connector, grown=[("a", [7])])
    assert handed(compute(connector, ("a", 3, [4, 5])))["a"] == [1, 2, 3, 4, 5]
    begin(connector, grown=[("a", [])])
    assert handed(compute(connector, ("a", 5, [6])))["a"] == [6]
    assert run(connector, "b", [1, 7, 8], 6, [9]) == [1, 2, 3, 4, 5, 6, 9]


def test_what_was_loaded_brings_its_rows(connector):
    run(connector, "x", [1, 2], 0, [1] * 8)  # had these blocks before
    connector.offer({1: b"\1\2\3\4", 2: b"\5\6\7\10"})
    assert run(connector, "a", [1, 2], 7, [9]) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert run(connector, "b", [1, 2, 3], 8, [0]) == [1, 2, 3, 4, 5, 6, 7, 9, 0]


def test_what_was_loaded_without_rows_is_missing(connector):
    run(connector, "x", [1, 2], 0, [1] * 8)
    connector.offer({1: None, 2: b"\5\377\7\10"})
    assert run(connector, "a", [1, 2], 7, [9]) == [GONE] * 4 + [5, GONE, 7, 9]


def test_what_another_connector_loaded_has_no_rows_of_the_block_before():
    connector = made(alone=False)
    connector.carry()
    run(connector, "x", [1, 2], 0, [1, 2, 3, 4, 5, 6, 7, 8])
    begin(connector, [("y", [5], 0)], loading=[[1]])
    handed(compute(connector, ("y", 0, [3])))
    assert run(connector, "a", [1, 3], 4, [9]) == [GONE] * 4 + [9]
    connector.close()


def test_another_may_use_a_loaded_page_before_the_one_that_asked_for_it(connector):
    connector.offer({1: b"\1\2\3\4"})
    assert run(connector, "b", [1, 2], 4, [9]) == [1, 2, 3, 4, 9]
    assert run(connector, "a", [1, 3], 4, [8]) == [1, 2, 3, 4, 8]


def test_a_load_that_nobody_used_does_not_come_up_in_its_block_later(connector):
    connector.offer({1: b"\1\2\3\4"})
    run(connector, "a", [1, 2], 0, [5, 6, 7, 8, 9])
    assert run(connector, "b", [1, 3], 4, [0]) == [5, 6, 7, 8, 0]


def test_late_rows_of_an_owner_before_do_not_reach_the_new_one(connector):
    """As on a GPU: the next step begins before the rows of the last one are there."""
    begin(connector, [("a", [1], 0)])
    first = compute(connector, ("a", 0, [1, 2, 3, 4]))
    connector.offer({1: b"\5\6\7\10"})  # "a" was aborted, its block was loaded into
    begin(connector, [("b", [1, 2], 4)], finished=["a"])
    second = compute(connector, ("b", 4, [9]))
    handed(first)
    assert handed(second)["b"] == [5, 6, 7, 8, 9]


def test_rows_of_a_store_are_those_of_the_steps_before_it(connector):
    begin(connector, [("a", [1], 0)])
    first = compute(connector, ("a", 0, [1, 2, 3, 4]))
    later = connector.rows_of([1, 2])
    assert later.rows is None
    begin(connector, [("b", [1], 0)], finished=["a"])  # takes the block while it is stored
    second = compute(connector, ("b", 0, [5, 6, 7, 8]))
    handed(first)
    assert later.rows == {1: b"\1\2\3\4", 2: None}
    handed(second)
    assert later.rows == {1: b"\1\2\3\4", 2: None}
    assert connector.rows_of([1]).rows == {1: b"\5\6\7\10"}
    assert connector.page_nbytes() == PAGE


def test_blocks_that_the_engine_copies_take_their_rows_along(connector):
    run(connector, "a", [1], 0, [1, 2, 3, 4])
    begin(connector, [("b", [2], 2)], copied=[(1, 2)])
    assert handed(compute(connector, ("b", 2, [9])))["b"] == [1, 2, 9]


def test_rejected_tokens_of_speculation_are_written_over(connector):
    begin(connector, [("a", [1, 2], 0)])
    first = compute(connector, ("a", 0, [1, 2, 3, 4]))
    first.num_rejected = np.array([2])
    begin(connector, grown=[("a", [])])
    second = compute(connector, ("a", 4, [7, 8]))  # scheduled as if none had been
    assert handed(first)["a"] == [1, 2]
    assert handed(second)["a"] == [7, 8]
    begin(connector, grown=[("a", [])])
    handed(compute(connector, ("a", 4, [9])))
    assert connector.rows_of([1]).rows == {1: b"\1\2\7\10"}


def test_a_block_of_several_hashed_pages_has_a_place_for_each():
    connector = made(block_tokens=2 * PAGE)
    run(connector, "a", [1, 2], 0, list(range(1, 10)))
    assert run(connector, "b", [1, 3], 8, [0]) == [*range(1, 9), 0]
    connector.close()


def test_a_reset_of_the_prefix_cache_starts_anew(connector):
    run(connector, "a", [1, 2], 0, [1, 2, 3, 4, 5])
    assert run(connector, "a", [1, 2], 0, [5, 6, 7, 8, 9], generation=1) == [5, 6, 7, 8, 9]
    connector.begin_step(None)
    assert connector._lives.keys() == {"a"}


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_pages_of_a_tier_without_rows_are_found_by_hash(kind):
    connector = made(kind=kind, alone=False)
    run(connector, "a", [1, 2], 0, [1, 2, 3, 4, 5, 6, 7, 8], pages=[b"p", b"q"])
    run(connector, "x", [1, 2], 0, [9] * 8, pages=[b"x", b"y"])  # takes the blocks
    found = run(connector, "b", [1, 2], 7, [0], pages=[b"p", b"q"])  # loaded from somewhere
    assert found == [1, 2, 3, 4, 5, 6, 7, 0]
    assert run(connector, "c", [1, 2, 3], 8, [0], pages=[b"p", b"q"]) == [1, 2, 3, 4, 5, 6, 7, 0, 0]
    assert run(connector, "d", [4, 5], 4, [8], pages=[b"?"]) == [GONE] * 4 + [8]
    connector.close()


def test_a_page_that_was_computed_twice_is_missing_from_a_tier_without_rows_alone():
    connector = made(alone=False)
    run(connector, "a", [1, 2], 0, [1, 2, 3, 4, 5], pages=[b"p"])
    run(connector, "b", [3, 4], 0, [9, 8, 7, 6, 5], pages=[b"p"])
    assert run(connector, "c", [1, 5], 4, [0], pages=[b"p"]) == [1, 2, 3, 4, 0]
    assert run(connector, "d", [3, 6], 4, [0], pages=[b"p"]) == [9, 8, 7, 6, 0]
    assert run(connector, "e", [7, 8], 4, [0], pages=[b"p"]) == [GONE] * 4 + [0]
    connector.close()


def test_a_page_that_was_loaded_over_another_computation_of_it_has_not_its_rows():
    connector = made(alone=False)
    run(connector, "a", [1, 2], 0, [1, 2, 3, 4, 5], pages=[b"p"])
    run(connector, "b", [3, 4], 0, [9, 8, 7, 6, 5], pages=[b"p"])
    # A tier loads a's page to where b's was: which computation it is nobody can tell.
    begin(connector, [("c", [3, 6], 4)], pages=[b"p"], loading=[[3]])
    assert handed(compute(connector, ("c", 4, [0])))["c"] == [GONE] * 4 + [0]
    assert run(connector, "d", [1, 5], 4, [0], pages=[b"p"]) == [1, 2, 3, 4, 0]
    connector.close()


def test_a_loaded_page_whose_last_token_is_computed_again_is_another_page():
    connector = made(alone=False)
    run(connector, "a", [1, 2], 0, [1, 2, 3, 4, 5], pages=[b"p"])
    begin(connector, [("b", [3], 3)], pages=[b"p"], loading=[[3]])
    assert handed(compute(connector, ("b", 3, [9])))["b"] == [1, 2, 3, 9]
    # A tier brings one of the two.
    begin(connector, [("c", [6, 7], 4)], pages=[b"p"], loading=[[6]])
    assert handed(compute(connector, ("c", 4, [0])))["c"] == [GONE] * 4 + [0]
    connector.close()


def test_the_scheduler_tells_which_blocks_a_tier_loads_into():
    """Two groups, of blocks of 4 and 8 tokens; 8 tokens are there, and 5 more come."""
    calls = []
    connector = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, found: (5, True),
        update_state_after_alloc=lambda *arguments: calls.append(arguments),
    )
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in (4, 8)]
    scheduler = SimpleNamespace(
        connector=connector,
        aux_output_connector=SimpleNamespace(),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    watch_loads(scheduler)
    request = SimpleNamespace(request_id="a")
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5], [6, 7, 8]))
    assert connector.get_num_new_matched_tokens(request, 8) == (5, True)
    connector.update_state_after_alloc(request, blocks, 5)
    connector.update_state_after_alloc(request, blocks, 0)  # once they are there
    assert [external for *_, external in calls] == [5, 0]
    empty = SimpleNamespace(
        kv_cache_block_copies=(), scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
    )  # fmt: skip
    build = build_with_blocks(lambda *_: SimpleNamespace())
    metadata = [build(scheduler.aux_output_connector, empty, {}) for _ in range(2)]
    assert [each.primeblocks_blocks.loading for each in metadata] == [[[[3, 4], [7]]], []]


def patched_store():
    import vllm
    from vllm.distributed.aux_output_connector import store

    if vllm.__version__ not in SpecifierSet(missing_routes.PATCH.tested.removeprefix("vllm")):
        pytest.skip(f"the patch leaves vLLM {vllm.__version__} alone")
    return store


def test_pages_come_back_as_they_were_and_forgotten_ones_hold_the_largest_number():
    store = patched_store()

    def put(*pages, **keys):
        objects = [store.BlockObject(page[:1].decode(), page) for page in pages]
        pages_by_hash.put(objects, **keys)

    (made_of,) = missing_routes.PATCH.replacements.values()
    pages_by_hash = made_of(store.BlockObjectStore)(max_bytes=9, object_nbytes=4)
    assert pages_by_hash.num_slots == 2
    put(b"aaaa", b"bbbb", retain_keys=["a"])
    put(b"cccc")  # In the place of b, the older one that is not retained.
    assert pages_by_hash.get_concatenated(["c", "b", "a"]) == b"cccc\xff\xff\xff\xffaaaa"
    put(b"cccd", b"dddd", b"eeee", release_keys=["a"])  # c was computed twice, differently.
    assert pages_by_hash.get_concatenated(["c"]) == b"\xff" * 4
    assert pages_by_hash.get_concatenated(["d", "e"]) == b"ddddeeee"
    put(b"cccc")
    assert pages_by_hash.get_concatenated(["c"]) == b"\xff" * 4
    put(b"ffff", retain_keys=["f", "g", "h"])
    put(b"gggg", b"hhhh")  # Without room for the last one.
    assert pages_by_hash.get_concatenated(["f", "g", "h"]) == b"ffffgggg" + b"\xff" * 4
    pages_by_hash.close()


def test_a_digest_that_was_forgotten_leaves_its_page_missing():
    store = patched_store()
    (made_of,) = missing_routes.PATCH.replacements.values()
    pages = made_of(store.BlockObjectStore)(max_bytes=8, object_nbytes=4)
    pages._remembered = 2
    pages.put([store.BlockObject("a", b"aaaa")], retain_keys=["a"])
    for key in ("b", "c", "d"):
        pages.put([store.BlockObject(key, 4 * key.encode())])
    assert pages.get_concatenated(["a"]) == b"\xff" * 4
    pages.put([store.BlockObject("a", b"aaab")])  # another computation, and the first is stored
    assert pages.get_concatenated(["a", "d"]) == b"\xff" * 4 + b"dddd"
    pages.close()
