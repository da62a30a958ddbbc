"""The steps of an update against engines with several workers, all of them fakes."""

import asyncio
import threading
import time
from dataclasses import asdict

import pytest

from primeblocks.errors import CorruptionError, DeadlineError, EngineError, TransferError
from primeblocks.weightsync.remote import (
    Step,
    WorkerState,
    attach_steps,
    call,
    drive,
    drive_sync,
    update_steps,
)

ASK = Step("states")


class Engine:
    """Workers that hold a version; `fails[(worker, version)]` is the error each load meets once."""

    errored = False

    def __init__(self, held, fails=None):
        self.workers = [WorkerState(version) for version in held]
        self.fails, self.calls, self.label, self.active = fails or {}, [], "start", False

    def states(self):
        return [
            asdict(WorkerState(w.version, self.active, w.error, w.message)) for w in self.workers
        ]

    def init_weight_transfer_engine(self, request):
        self.workers = [WorkerState(w.version, False, *request) for w in self.workers]

    def start_weight_update(self):
        assert not self.active, "already active"
        self.active = True

    def update_weights(self, version):
        assert self.active
        for i, worker in enumerate(self.workers):
            error = self.fails.pop((i, version), None)
            held = worker.version if error else version
            self.workers[i] = WorkerState(held, False, *(error or ("", "")))

    def finish_weight_update(self, label=None):
        assert self.active
        self.active = False
        self.label = label or self.label

    def update(self, version):
        drive_sync(self, update_steps(ASK, version, lambda version: version))

    @property
    def held(self):
        return [worker.version for worker in self.workers]


def test_all_workers_load_and_the_label_changes():
    engine = Engine([1, 1])
    engine.update(2)
    assert (engine.held, engine.label, engine.active) == ([2, 2], "2", False)


def test_an_update_that_was_left_open_is_closed_first():
    engine = Engine([1, 1])
    engine.start_weight_update()
    engine.update(2)
    assert (engine.held, engine.label) == ([2, 2], "2")


@pytest.mark.parametrize("failing", [[0, 1], [0], [1]])
def test_workers_stay_on_one_version(failing):
    bad = ("CorruptionError", "bucket 3")
    engine = Engine([1, 1], {(worker, 2): bad for worker in failing})
    with pytest.raises(CorruptionError, match="bucket 3"):
        engine.update(2)
    assert (engine.held, engine.label, engine.active) == ([1, 1], "start", False)
    engine.update(2)
    assert (engine.held, engine.label) == ([2, 2], "2")


def test_workers_that_cannot_be_brought_back_are_an_engine_error():
    bad = ("TransferError", "out of memory")
    engine = Engine([1, 1], {(1, 2): bad, (0, 1): bad})
    with pytest.raises(EngineError, match="out of memory Going back to 1 failed too"):
        engine.update(2)
    engine = Engine([None, None], {(1, 2): bad})
    with pytest.raises(EngineError, match="1 of 2 workers failed .* no version to bring all back"):
        engine.update(2)
    assert not engine.active


def test_a_torn_worker_is_what_is_reported():
    engine = Engine([1, 1], {(0, 2): ("TransferError", "a"), (1, 2): ("EngineError", "torn")})
    with pytest.raises(EngineError, match="torn"):
        engine.update(2)


def test_attach_raises_what_a_worker_met():
    drive_sync(Engine([None]), attach_steps(ASK, ("", "")))
    with pytest.raises(TransferError, match="no such place"):
        drive_sync(Engine([None]), attach_steps(ASK, ("TransferError", "no such place")))
    with pytest.raises(EngineError):
        drive_sync(Engine([None]), attach_steps(ASK, ("SomethingElse", "?")))


class Slow:
    """Answers, never answers, raises, or dies."""

    errored = False

    async def answer(self):
        return 3

    async def never(self):
        await asyncio.Event().wait()

    async def raises(self):
        raise ValueError("no")

    async def dies(self):
        threading.Timer(0.05, lambda: setattr(self, "errored", True)).start()
        await self.never()

    async def dies_and_says_so(self):
        self.errored = True
        raise RuntimeError("gone")


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        ("never", DeadlineError, "did not try in time"),
        ("raises", EngineError, "refused to try: ValueError: no"),
        ("dies", EngineError, "died before it did try. Restart"),
        ("dies_and_says_so", EngineError, "died before it did try: gone Restart"),
    ],
)
def test_a_call_ends_with_a_type_before_its_deadline(method, kind, message):
    engine = Slow()
    patience_s = 0.1 if method == "never" else 10
    start = time.monotonic()
    with pytest.raises(kind, match=message):
        asyncio.run(call(engine, getattr(engine, method)(), "try", start + patience_s))
    assert time.monotonic() - start < 5


def test_a_call_returns_the_answer():
    engine = Slow()
    assert asyncio.run(call(engine, engine.answer(), "try", time.monotonic() + 10)) == 3


def test_steps_on_an_asynchronous_engine():
    seen = []

    def steps():
        seen.append((yield Step("answer")))
        yield Step("never")

    start = time.monotonic()
    with pytest.raises(DeadlineError):
        asyncio.run(drive(Slow(), steps(), "try", start + 0.1))
    assert seen == [3]
