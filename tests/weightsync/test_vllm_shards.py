"""Tensor-parallel vLLM: each worker reads its own boxes, and what it serves is a fresh engine's."""

import asyncio
from functools import partial

import pytest
import torch

from primeblocks.errors import PlanError
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    Subscriber,
    describe,
    fetched,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.marker import Receipt
from tests.engine_job import call
from tests.weightsync.vllm_site import (
    CARRIERS,
    ENGINE,
    SAID,
    SIZES,
    TIMEOUT_S,
    Requests,
    names,
    needs,
    spans_of,
    trainer_end,
)

pytestmark = needs("vllm")

RANKS, FULL_EVERY, BUCKET_BYTES = 2, 4, 1 << 16
# Without --full: from memory of the host, from buffers of another process, as messages.
FEW = ("shared_memory", "directory-handles", "group")
# Twice as wide, so that two ranks have a head of keys and values each.
WIDE = SIZES | {"hidden": 128}
# Room for requests that a fast engine does not finish while this process waits for the processor.
ROOMY, LONG = ENGINE | {"max_model_len": 4096}, 4000


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3", "gpt_oss"])
def saw(request, tmp_path_factory):
    # gpt_oss: its loader writes parameters itself.
    if request.param != "qwen3_moe" and not request.config.getoption("--full"):
        pytest.skip("two engines more: --full")
    folder = tmp_path_factory.mktemp("shards")
    tiny_models.save(request.param, folder / "even", dtype="float32", **WIDE)
    odd = tiny_models.build(request.param, dtype="float32", **WIDE)
    change(odd)
    odd.save_pretrained(folder / "odd")
    return call(run, folder, request.param, request.config.getoption("--full"))


def change(model):
    """Change one weight of 97, in every tensor; doing it again undoes it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::97] *= -1


class Counting(adapter.WorkerExtension):
    """A worker that notes, of each check of a version, bytes received, and digested if in full."""

    def count(self):
        digest, verify, pieces = fetched.bucket_digest, Subscriber.verify, []
        self.counts = []

        def digesting(chunks):
            def counted():
                for chunk in chunks:
                    pieces.append(chunk.numel() * chunk.element_size())
                    yield chunk

            return digest(counted())

        def verifying(subscriber, *args, **named):
            pieces.clear()
            receipt = verify(subscriber, *args, **named)
            self.counts.append((receipt.bytes, sum(pieces)))
            return receipt

        fetched.bucket_digest, Subscriber.verify = digesting, verifying

    def counted(self):
        """What was noted since the last call; the bytes of parameters before they are packed."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        counts, self.counts = self.counts, []
        layers = self.model_runner.get_model().modules()
        made = [p for each in layers for p in get_layerwise_info(each).restore_metadata[0].values()]
        return counts, sum(p.numel() * p.element_size() for p in made)


def run(folder, family, full):
    register()
    return asyncio.run(_sync(folder, family, full))


def _start(path):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = adapter.engine_args() | {"worker_extension_cls": f"{__name__}.Counting"}
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            str(path), dtype="float32", tensor_parallel_size=RANKS, **ROOMY, **arguments
        )
    )


async def _sync(folder, family, full):
    model = tiny_models.build(family, dtype="float32", **WIDE)
    source = describe(model)
    engine = _start(folder / "even")
    requests = Requests(engine)
    await engine.collective_rpc("count")
    saw = {"even": await requests.all("start", SAID), "syncs": {}}
    reads = await adapter.describe(engine, source.whole(), timeout_s=TIMEOUT_S)
    saw["described"] = await requests.all("described", SAID)
    plan = plan_sync([source], reads, bucket_bytes=BUCKET_BYTES)
    # Shared with an engine whose workers come first.
    shared = plan_sync([source], [*reads, *reads], bucket_bytes=BUCKET_BYTES)
    planned = [plan.read_bytes(reader) for reader in range(RANKS)]
    saw["reads"] = [dict(one.inexact) for one in reads], planned
    for kind in CARRIERS if full else FEW:
        with trainer_end(kind, folder / kind, readers=RANKS) as transport:
            updates = 10 if full else 4 if kind == "shared_memory" else 2
            used, first = (shared, RANKS) if kind == "directory-handles" else (plan, 0)
            await adapter.attach(engine, used, transport, first_reader=first, timeout_s=TIMEOUT_S)
            with Publisher(used, model, transport, full_every=FULL_EVERY) as publisher:
                saw["syncs"][kind] = await _updates(requests, model, publisher, kind, updates)
    seen = await adapter.observe(engine, timeout_s=TIMEOUT_S)
    saw["held"] = verify_engine(model, seen, plan=plan)
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[3, -1] += 1
    saw["wrong"] = verify_engine(model, seen, plan=plan)
    swapped = plan_sync([source], reads[::-1], bucket_bytes=BUCKET_BYTES)
    with SharedMemoryTransport("never", owner=True) as never:
        for case, wrong, first in (("swapped", swapped, 0), ("behind", plan, 2)):
            try:
                await adapter.attach(engine, wrong, never, first_reader=first, timeout_s=TIMEOUT_S)
            except PlanError as error:
                saw[case] = str(error)
    engine.shutdown()
    fresh = _start(folder / "odd")
    saw["odd"] = await Requests(fresh).all("start", SAID)
    fresh.shutdown()
    return saw


async def _updates(requests, model, publisher, kind, updates):
    """Versions of odd and even weights in turns, while requests run."""
    said, spans, sizes, engine = [], [], [], requests.engine
    for version in range(1, updates + 1):
        change(model)
        publish = partial(publisher.publish, version, timeout_s=TIMEOUT_S)
        receipt = Receipt(version, 0, 0.0, "") if kind == "group" else publish()
        name = f"{kind}-{version}-"
        running = requests.start(name, LONG)
        await requests.reach(*names(name), tokens=5)
        if kind != "group":  # There the publish is a part of the update.
            await engine.pause_generation(mode="keep", clear_cache=False)
        updating = adapter.update(engine, receipt, timeout_s=TIMEOUT_S)
        if kind == "group":  # A publish waits for its readers.
            receipt, _ = await asyncio.gather(asyncio.to_thread(publish), updating)
        else:
            await updating
        await requests.advance(*names(name), tokens=5)
        await engine.abort(names(name))  # They have seen what they were for.
        spans.append([spans_of(output) for output in await asyncio.gather(*running)])
        sizes.append(receipt.bytes)
        said.append(await requests.all(f"{name}now", SAID))
    counts = await engine.collective_rpc("counted")
    return {"said": said, "counts": counts, "spans": spans, "sizes": sizes}


@pytest.fixture(params=CARRIERS)
def sync(request, saw):
    if request.param not in saw["syncs"]:
        pytest.skip("--full runs every carrier")
    return saw["syncs"][request.param]


def test_a_description_changes_nothing_and_is_a_shard(saw):
    assert saw["described"] == saw["even"] != saw["odd"]
    assert saw["reads"][0] == [{}] * RANKS


def test_every_version_is_served_as_by_a_fresh_engine(saw, sync):
    said = sync["said"]
    assert said == [saw["odd"], saw["even"]] * (len(said) // 2)


def test_each_worker_reads_its_shard_alone(saw, sync):
    whole = max(sync["sizes"])
    for (counts, parameters), read in zip(sync["counts"], saw["reads"][1], strict=True):
        assert read <= 1.05 * parameters < whole
        for (received, digested), size in zip(counts, sync["sizes"], strict=True):
            if size == whole:
                assert received == digested == read
            else:
                assert received < 0.1 * read


def test_requests_in_flight_see_both_versions(sync):
    for version, spans in enumerate(sync["spans"], start=1):
        last = [each[-1][0] for each in spans]
        assert last == [str(version)] * len(spans)
        assert all(len(each) == 2 for each in spans)


def test_each_worker_is_seen_to_hold_its_shard(saw):
    held = saw["held"]
    assert (held.differing, held.missing, held.unexpected) == ({}, {}, {}), held.table()
    # The loader of gpt_oss makes zeros of this bias in all workers but the first: they hold none.
    for name, where in held.unobservable.items():
        assert (name.rpartition(".")[2], where[:9]) == ("down_proj_bias", "reader 1,"), held.table()
    assert held.tensors > 20
    assert list(saw["wrong"].differing) == ["model.layers.1.self_attn.o_proj.weight"]
    assert "reader 1" in saw["wrong"].table()  # Whose columns are the last.


def test_a_plan_for_other_workers_is_refused(saw):
    assert "worker 0 reads elements of " in saw["swapped"]
    assert "that reader 0 of 2 does not want" in saw["swapped"]
    assert "reader 2 is not in the plan, which has readers 0 to 1" in saw["behind"]
