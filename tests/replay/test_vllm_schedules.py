"""Random schedules through what vLLM really runs, with a model that never computes alike twice.

vLLM's scheduler, prefix cache and offloading connector, our tiers and the patched capture run as in
an engine; only the forward is ours. It gives every computed token a number of its own, writes it to
the token's place in the KV cache, and captures it as the token's row. So the row that a request is
handed says which computation it belongs to, and the KV cache says which one was there.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import call

PAGE, LAYERS, TOP_K = 4, 2, 2
TOKEN_BYTES = 8
VOCAB = 3  # few, so that prompts share pages
ROW_BYTES = LAYERS * TOP_K

pytestmark = pytest.mark.vllm


def vllm_release() -> str:
    return call(_release)


def _release() -> str:
    import vllm

    return vllm.__version__[:4]


def schedules(folder: Path, mode: str, count: int) -> Counter[str]:
    if not (folder / "model").exists():
        tiny_models.save("qwen3_moe", folder / "model", num_layers=LAYERS)
    return call(_schedules, mode, str(folder / "model"), count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@pytest.mark.parametrize("mode", ["alone", "carried"])
def test_every_row_is_that_of_the_kv_that_is_there(folder, mode, full):
    """Without tiers, and with tiers that carry rows: nothing is wrong and nothing is missing."""
    counts = schedules(folder, mode, 1000 if full else 24)
    print(dict(counts))
    assert counts["wrong"] == counts["missing"] == 0
    assert counts["computed twice"] > 100
    assert counts["known"] > counts["cached"] > 1000
    assert counts["preemptions"] > 10
    assert (counts["from tiers"] > 50) == (mode == "carried")


def test_tiers_without_rows_bring_missing_ones_at_worst(folder, full):
    """Pages of such a tier are known by their hash alone: missing where it was computed twice."""
    if vllm_release() == "0.33":
        pytest.skip("the plug-in leaves engines of 0.33 alone that have no tier which carries rows")
    counts = schedules(folder, "hashed", 1000 if full else 24)
    print(dict(counts))
    assert counts["wrong"] == 0
    assert counts["from tiers"] > 50
    assert counts["known"] > 5 * counts["missing"] > 0


class Engine:
    """One engine without a model. A step is noted in full before the next one is scheduled, or the
    next one is scheduled first, as on a GPU.
    """

    def __init__(self, config: Any, seed: int, mode: str, *, blocks: int = 0) -> None:
        import torch
        import vllm
        from vllm.distributed.aux_output_connector import worker
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        self.random = random = np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        # With a tier 0.33 keeps wrong pages then, its own doing: docs/kvoffload_vllm.md, versions.
        can_be_async = mode == "alone" or vllm.__version__.startswith("0.32.")
        self.is_async = bool(random.random() < 0.5) and can_be_async
        blocks, page_bytes = blocks or int(random.integers(12, 28)), PAGE * TOKEN_BYTES
        config.cache_config.num_gpu_blocks = blocks
        self.kv = torch.zeros((blocks, PAGE), dtype=torch.int64)
        spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        assert spec.page_size_bytes == page_bytes
        layout = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.offload = None
        if config.kv_transfer_config is not None:
            config.kv_transfer_config.engine_id = f"schedule-{os.getpid()}-{mode}-{seed}"
            self.offload = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, layout
            )
            self.offload.connector_worker._init_worker(
                CanonicalKVCaches(
                    [CanonicalKVCacheTensor(self.kv.view(torch.int8), page_bytes)],
                    [[CanonicalKVCacheRef(0, page_bytes)]],
                )
            )
        self.scheduler = (AsyncScheduler if self.is_async else Scheduler)(
            config,
            layout,
            StructuredOutputManager(config),
            block_size=PAGE,
            hash_block_size=PAGE,
            log_stats=True,
        )
        self.capture = worker.AuxOutputWorkerConnector(
            vllm_config=config, model=None, kv_cache_config=layout
        )
        self.capture._capturer = SimpleNamespace(snapshot_routing_data=lambda count: None)
        self.capture._max_concurrent_batches = 2
        self.tables: dict[str, list[int]] = {}
        self.running: deque[tuple[Any, Any, Any]] = deque()
        self.computed = 0
        self.texts: dict[str, list[int]] = {}
        self.used: dict[str, list[int]] = {}
        self.rows: dict[str, list[np.ndarray]] = {}
        self.seen: set[tuple[int, ...]] = set()

    # --- requests

    def ask(self, prompt: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        name = f"r{len(self.texts)}"
        wanted = int(self.random.integers(1, 14))
        sampling = SamplingParams(max_tokens=wanted, ignore_eos=True)
        hasher = get_request_block_hasher(PAGE, sha256)
        self.texts[name], self.used[name], self.rows[name] = list(prompt), [], []
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=hasher))

    def abort(self) -> None:
        from vllm.v1.request import RequestStatus

        if alive := list(self.scheduler.requests):
            name = alive[int(self.random.integers(len(alive)))]
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.counts["aborts"] += 1

    # --- a step

    def step(self) -> None:
        planned = self.scheduler.schedule()
        self.running.append((planned, *self.execute(planned)))
        while len(self.running) > self.is_async:
            self.finish(*self.running.popleft())

    def drain(self) -> None:
        while self.running:
            self.finish(*self.running.popleft())

    def execute(self, planned: Any) -> tuple[Any, Any]:
        """What a worker does with a step: transfers, the forward, the capture of its rows."""
        self.capture.begin_step(planned.aux_output_connector_metadata)
        if self.offload is not None:
            self.offload.bind_connector_metadata(planned.kv_connector_metadata)
            self.offload.handle_preemptions(planned.kv_connector_metadata)
            if early := bool(self.random.random() < 0.5):
                self.offload.start_load_kv(None)
        batch = self.forward(planned)
        moved = None
        if self.offload is not None:
            if not early:
                self.offload.start_load_kv(None)
            self.offload.wait_for_save()
            moved = self.transfers(planned)
        return batch, moved

    def forward(self, planned: Any) -> Any:
        for new in planned.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        known = planned.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        for name, ids, start in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            starts[name] = start
            if name in known.resumed_req_ids:
                self.tables[name] = []
                self.counts["preemptions"] += 1
            self.tables[name] = self.tables[name] + list(ids[0] if ids else ())
        names = list(planned.num_scheduled_tokens)
        if not names:
            return None
        numbers, bounds = [], [0]
        for name in names:
            start, count = starts[name], planned.num_scheduled_tokens[name]
            for position in range(start, start + count):
                self.computed += 1
                self.kv[self.tables[name][position // PAGE], position % PAGE] = self.computed
                numbers.append(self.computed)
            bounds.append(len(numbers))
        used = {
            name: self.kv[self.tables[name]]
            .flatten()
            .tolist()[: starts[name] + planned.num_scheduled_tokens[name]]
            for name in names
        }
        view = SimpleNamespace(
            req_ids=names,
            query_start_loc_np=np.array(bounds),
            num_computed_tokens_np=np.array([starts[name] for name in names]),
        )
        pending = self.capture.prepare_output(view)
        pending.routed_experts = np.array(numbers, "<u4").view(np.uint8).reshape(-1, LAYERS, TOP_K)
        return SimpleNamespace(names=names, starts=starts, used=used, pending=pending)

    def transfers(self, planned: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        results = self.offload.get_transfer_results(planned.finished_req_ids)
        moved = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.offload.build_connector_worker_meta(),
        )
        self.offload.clear_connector_metadata()
        return moved

    def finish(self, planned: Any, batch: Any, moved: Any) -> None:
        """The output of a step, in the order of the steps."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = ModelRunnerOutput([], {}, kv_connector_output=moved)
        if batch is not None:
            sampled = []
            for name in batch.names:
                # A chunk of a prompt samples nothing; a request that is over may still run.
                length = len(self.texts[name])
                whole = len(batch.used[name]) >= length
                sampled.append([int(self.random.integers(VOCAB))] if whole else [])
            pending = batch.pending
            pending.num_sampled = np.array([len(each) for each in sampled])
            pending.num_rejected = np.zeros_like(pending.num_sampled)
            output = ModelRunnerOutput(
                batch.names,
                {name: i for i, name in enumerate(batch.names)},
                sampled_token_ids=sampled,
                kv_connector_output=moved,
                aux_output_connector_output=pending.process_output(),
            )
        answers = self.scheduler.update_from_output(planned, output)
        for answer in (each for group in answers.values() for each in group.outputs):
            self.take(answer, batch)

    def take(self, answer: Any, batch: Any) -> None:
        name = answer.request_id
        self.texts[name] += answer.new_token_ids
        if answer.prefill_stats is not None:
            self.counts["cached"] += answer.prefill_stats.num_cached_tokens
            self.counts["from tiers"] += answer.prefill_stats.num_external_cached_tokens
        if answer.routed_experts is None:
            return
        begin = len(self.rows[name])
        self.rows[name] += list(answer.routed_experts)
        self.used[name] += batch.used[name][begin : len(self.rows[name])]

    def judge(self) -> None:
        """Every row is the number that the KV cache had at its position when it was used."""
        for name, rows in self.rows.items():
            assert len(rows) == len(self.used[name])
            for row, number in zip(rows, self.used[name], strict=True):
                if (row == 0xFF).all():
                    self.counts["missing"] += 1
                elif row.tobytes() == np.uint32(number).tobytes():
                    self.counts["known"] += 1
                else:
                    self.counts["wrong"] += 1
            texts = [tuple(self.texts[name][: i + 1]) for i in range(len(rows))]
            for text, number in zip(texts, self.used[name], strict=True):
                self.seen.add((number, *text))
        distinct = {text[1:] for text in self.seen}
        self.counts["computed twice"] += len(self.seen) - len(distinct)

    def close(self) -> None:
        self.drain()
        self.capture.close()
        self.scheduler.shutdown()
        if self.offload is not None:
            self.offload.shutdown()


def _run(config: Any, seed: int, mode: str, events: int = 80) -> Counter[str]:
    engine = Engine(config, seed, mode)
    random = engine.random
    prompts = [random.integers(VOCAB, size=n).tolist() for n in random.integers(1, 30, 3)]
    for _ in range(events):
        match int(random.integers(10)):
            case 0 | 1:
                text = prompts[int(random.integers(len(prompts)))]
                engine.ask(
                    text + random.integers(VOCAB, size=random.integers(0, 3)).tolist() or [1]
                )
            case 2 if engine.texts:
                name = list(engine.texts)[int(random.integers(len(engine.texts)))]
                if len(engine.texts[name]) < 60:
                    engine.ask(engine.texts[name] + random.integers(VOCAB, size=2).tolist())
                    engine.counts["turns"] += 1
            case 3 if random.random() < 0.3:
                engine.abort()
            case _:
                for _ in range(3):
                    engine.step()
    for _ in range(2000):
        if not engine.scheduler.has_requests():
            break
        engine.step()
    engine.drain()
    engine.judge()
    engine.close()
    return engine.counts


def configuration(model: str, mode: str, *, primary_pages: int = 12, host_pages: int = 2) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from primeblocks.replay.adapters.vllm import engine_args

    more = {}
    if mode != "alone":
        from primeblocks.kvoffload.adapters.vllm import engine_args as offload_args

        rows = ROW_BYTES if mode == "carried" else 0
        sizes = {"primary_bytes": primary_pages * 4096, "host_bytes": host_pages * 4096}
        more = offload_args(**sizes, routes_bytes_per_token=rows)
    capture = engine_args(max_bytes=4096 * PAGE * ROW_BYTES, device="cpu")
    config = EngineArgs(
        model, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, **capture, **more
    ).create_engine_config()
    config.cache_config.block_size = PAGE
    return config


def prepare() -> None:
    """Patch vLLM in this process, so that it needs no model."""
    import torch
    import vllm
    from vllm.distributed.aux_output_connector import worker
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from primeblocks.plugins import vllm as plugin

    plugin.register()
    plugin.require("routes_with_pages")
    if vllm.__version__.startswith("0.32."):
        plugin.require("missing_routes_survive")
    else:  # 0.33 unpacked: no CPU build, so nothing lets its CPU configuration have capture
        vllm.config.VllmConfig._verify_aux_output_compatibility = lambda self: None
    # The connector without a model: it asks for the shape of a row, and for its rank.
    shape = SimpleNamespace(shape_per_token=(LAYERS, TOP_K), output_dtype_name="uint8")
    worker.RoutedExpertsCapturer = lambda **_: shape
    worker.bind_routed_experts_capturer = lambda *_: None
    worker.get_tp_group = lambda: SimpleNamespace(is_first_rank=True)
    torch.set_num_threads(1)
    init_none_hash(sha256)


def _schedules(mode: str, model: str, count: int) -> Counter[str]:
    prepare()
    config, total = configuration(model, mode), Counter[str]()
    for seed in range(count):
        counts = _run(config, seed, mode)
        if counts["wrong"] or (counts["missing"] and mode != "hashed"):
            print(f"seed {seed}: {dict(counts)}", file=sys.stderr)
        total += counts
    return total
