"""The steps of an update, and calls of an engine that is slow or dead; all engines are fakes."""

import asyncio
import pickle
import threading
import time

import pytest
import torch

from primeblocks.errors import (
    CorruptionError,
    DeadlineError,
    EngineError,
    MissingPackageError,
    PrimeblocksError,
    TransferError,
)
from primeblocks.weightsync import describe, plan_sync
from primeblocks.weightsync.adapters.vllm import update_llm
from primeblocks.weightsync.engines.remote import (
    Update,
    WorkerState,
    attach_steps,
    call,
    drive_sync,
)
from primeblocks.weightsync.marker import Receipt
from primeblocks.weightsync.transports import FileTransport
from tests.deadlines import HANG_S
from tests.weightsync.fake_engine import FakeEngine, in_a_loop


class Blocking:
    """A fake engine whose calls block, as those of an offline `LLM` do."""

    def __init__(self, held, worker_faults=None):
        self.fake = FakeEngine(held, worker_faults=worker_faults)
        self.requests, self.pages_of = 0, {str(held[0])}

    def __getattr__(self, name):
        return lambda *args: asyncio.run(getattr(self.fake, name)(*args))

    def update(self, version):
        update_llm(self, Receipt(version, 0, 0.0, ""), timeout_s=HANG_S)

    def reset_prefix_cache(self, *, reset_connector):
        assert reset_connector, "or pages of the old weights stay behind the engine"
        if not self.requests:
            self.pages_of = set()
        return not self.requests

    @property
    def llm_engine(self):  # An `LLM` has the call there alone.
        return self

    @property
    def held(self):
        return self.fake.weights, self.fake.label, self.fake.active


def test_all_workers_load_and_the_label_changes():
    engine = Blocking([1, 1])
    engine.update(2)
    assert engine.held == ([2, 2], "2", False)
    assert engine.fake.features_of == engine.pages_of == set()


def test_pages_of_the_old_weights_that_cannot_be_cleared_are_an_error():
    engine = Blocking([1, 1])
    engine.requests = 1
    with pytest.raises(EngineError, match="has version 2, but did not clear KV pages"):
        engine.update(2)
    engine.requests = 0
    engine.update(2)
    assert (engine.held, engine.pages_of) == (([2, 2], "2", False), set())


@pytest.mark.parametrize("timeout_s", [10_000, 2])
def test_workers_that_check_bytes_are_asked_less_and_less_often(timeout_s):
    steps, waits = Update(1).prepare(time.monotonic() + timeout_s), []
    next(steps)
    for _ in range(20):
        waits.append(steps.send([{"busy": True}]).wait_s)
    waits = [wait_s for wait_s in waits if wait_s]
    assert len(waits) > 9
    assert max(waits) <= 0.05 * timeout_s, "so that a worker is asked before the deadline"
    if timeout_s > 2:
        assert waits[:3] == [0.005, 0.01, 0.02]
        assert waits[9:] == [1.0] * len(waits[9:])


def test_an_update_that_was_left_open_is_closed_first():
    engine = Blocking([1, 1])
    engine.start_weight_update()
    engine.update(2)
    assert engine.held == ([2, 2], "2", False)


@pytest.mark.parametrize("act", ["verify", 2])
@pytest.mark.parametrize("failing", [[0, 1], [1]])
def test_workers_stay_on_one_version(failing, act):
    bad = ("CorruptionError", "bucket 3")
    engine = Blocking([1, 1], {(worker, act): bad for worker in failing})
    with pytest.raises(CorruptionError, match="bucket 3"):
        engine.update(2)
    assert engine.held == ([1, 1], "1", False)
    engine.update(2)
    assert engine.held == ([2, 2], "2", False)


def test_workers_that_cannot_be_brought_back_are_an_error():
    bad = ("TransferError", "out of memory")
    engine = Blocking([1, 1], {(1, 2): bad, (0, 1): ("EngineError", "torn")})
    with pytest.raises(EngineError, match="torn"):
        engine.update(2)
    engine = Blocking([None, None], {(1, 2): bad})
    with pytest.raises(
        EngineError, match="out of memory The workers had the versions .None, None., and cannot"
    ):
        engine.update(2)


def test_attach_raises_what_a_worker_met(tmp_path):
    source = describe({"w": torch.zeros(4)})
    told = plan_sync([source], source.whole()), FileTransport(tmp_path), 0
    drive_sync(Blocking([None]), attach_steps(*told))
    engine = Blocking([None], {(0, "init"): ("TransferError", "no such place")})
    with pytest.raises(TransferError, match="no such place"):
        drive_sync(engine, attach_steps(*told))


def test_an_error_keeps_its_message_between_processes():
    met = MissingPackageError("nixl", "nixl")
    told = WorkerState(error="MissingPackageError", message=str(met)).typed()
    copied = pickle.loads(pickle.dumps(met))
    assert (str(told), type(told)) == (str(copied), type(copied)) == (str(met), type(met))
    assert (copied.package, copied.extra) == ("nixl", "nixl")


def test_an_unknown_error_of_a_worker_is_an_engine_error():
    assert type(WorkerState(error="SomethingElse", message="?").typed()) is EngineError
    assert isinstance(WorkerState(error="DeadlineError", message="?").typed(), PrimeblocksError)


class Slow:
    """Answers, never answers, raises, or dies."""

    errored = False

    async def answer(self):
        return 3

    async def never(self):
        await asyncio.Event().wait()

    async def raises(self):
        raise ValueError("no")

    async def is_late(self):
        raise DeadlineError("no answer to POST in time")

    async def dies(self):
        threading.Timer(0.05, lambda: setattr(self, "errored", True)).start()
        await self.never()

    async def dies_with_a_remedy(self):
        self.errored = True
        raise EngineError("POST /load: connection refused. Restart the server.")

    async def dies_and_says_so(self):
        self.errored = True
        raise RuntimeError("gone")


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("never", DeadlineError, "did not try in time"),
        ("raises", EngineError, "refused to try: ValueError: no"),
        ("is_late", DeadlineError, "no answer to POST"),
        ("dies", EngineError, "died before it could try. Restart"),
        ("dies_and_says_so", EngineError, "died before it could try: gone Restart"),
        ("dies_with_a_remedy", EngineError, r"connection refused\. Restart the engine\.$"),
    ],
)
def test_a_call_ends_with_a_type_before_its_deadline(method, kind, message):
    engine = Slow()
    patience_s = 0.1 if method == "never" else HANG_S
    deadline = time.monotonic() + patience_s
    with pytest.raises(kind, match=message):
        asyncio.run(call(engine, getattr(engine, method)(), "try", deadline))


@in_a_loop
async def test_a_cancelled_call_leaves_no_task_behind():
    engine, ended = Slow(), asyncio.Event()

    async def never():
        try:
            await engine.never()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(call(engine, never(), "try", time.monotonic() + HANG_S))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait_for(ended.wait(), HANG_S)
