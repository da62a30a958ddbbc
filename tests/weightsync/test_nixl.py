"""NIXL itself, over TCP and shared memory: what is special to it. `test_packed` has the rest."""

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch

from primeblocks.errors import DeadlineError, MissingPackageError, TransferError
from primeblocks.weightsync.transports import Read
from tests.deadlines import HANG_S

SIZE = 1 << 20


def test_without_nixl_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "primeblocks.weightsync.adapters.nixl", raising=False)
    monkeypatch.setitem(sys.modules, "nixl", None)
    remedy = r"nixl is not installed\. Run in your clone of primeblocks: pip install '\.\[nixl\]'"
    with pytest.raises(MissingPackageError, match=remedy):
        importlib.import_module("primeblocks.weightsync.adapters.nixl")


@pytest.fixture
def ends():
    pytest.importorskip("nixl", reason="nixl is not installed; scripts/peers does")
    from primeblocks.weightsync.adapters.nixl import NixlWire

    trainer, engine = NixlWire(serves=True), NixlWire(serves=False)
    yield trainer, engine
    trainer.close()
    trainer.close()
    engine.close()


def soon(seconds=10.0):
    return time.monotonic() + seconds


def buffer_of(value):
    return torch.full((SIZE,), value, dtype=torch.uint8)


def test_ranges_are_read(ends):
    trainer, engine = ends
    source, target = torch.randint(0, 256, (SIZE,), dtype=torch.uint8), buffer_of(0)
    note = trainer.share(source)
    engine.share(target)
    spans = [(start, start * 3 % 1000, 700) for start in range(0, SIZE - 2000, 1999)]
    reads = [Read(note, start + shift, target[start : start + n]) for start, shift, n in spans]
    engine.read(reads, deadline=soon())
    want = buffer_of(0)
    for start, shift, n in spans:
        want[start : start + n] = source[start + shift : start + shift + n]
    assert target.equal(want)
    engine.read([], deadline=soon())


def test_buffers_come_and_go_at_the_same_place(ends):
    trainer, engine = ends
    source, target = buffer_of(0), buffer_of(0)
    engine.share(target)
    for value, size in enumerate((SIZE, SIZE, 4096, SIZE), start=1):
        part = source[:size]
        part.fill_(value)
        engine.read([Read(trainer.share(part), 0, target[:size])], deadline=soon())
        assert target[:size].eq(value).all()
        trainer.unshare(part)


def test_what_is_not_registered_is_a_typed_error(ends):
    trainer, engine = ends
    note, target = trainer.share(buffer_of(1)), buffer_of(0)
    with pytest.raises(TransferError, match="nixlNotFoundError"):
        engine.read([Read(note, 0, target)], deadline=soon())
    engine.share(target)
    with pytest.raises(TransferError, match="nixl"):
        engine.read([Read(note, SIZE // 2, target)], deadline=soon())  # Past its end.
    with pytest.raises(TransferError, match="nixl"):
        engine.read([Read({**note, "metadata": "", "token": "x"}, 0, target)], deadline=soon())
    engine.read([Read(note, 0, target)], deadline=soon())
    assert target.eq(1).all()


def test_a_deadline_in_the_past_reads_nothing(ends):
    trainer, engine = ends
    note, target = trainer.share(buffer_of(1)), buffer_of(0)
    engine.share(target)
    with pytest.raises(DeadlineError, match="0 of 1 buckets were read"):
        engine.read([Read(note, 0, target)], deadline=soon(-1))
    assert target.eq(0).all()


def test_a_backend_that_is_not_there_is_refused(ends):
    from primeblocks.weightsync.adapters.nixl import NixlWire

    with pytest.raises(TransferError, match="no backend PIGEON"):
        NixlWire(serves=False, backend="PIGEON")


def test_an_engine_runs_no_thread_that_spins(ends):
    from primeblocks.weightsync.adapters.nixl import NixlWire

    ends[0].close()
    engine = NixlWire(serves=False)
    before = sum(os.times()[:2])
    time.sleep(0.5)
    assert sum(os.times()[:2]) - before < 0.25
    engine.close()


_SERVER = """
import sys, torch
from primeblocks.weightsync.adapters.nixl import NixlWire
import json
wire, source = NixlWire(serves=True), torch.full((int(sys.argv[1]),), 7, dtype=torch.uint8)
print("note", json.dumps(wire.share(source)), flush=True)
sys.stdin.read()
"""


def test_a_process_that_dies_in_the_middle_of_a_read(ends):
    size = 256 << 20
    code = [sys.executable, "-c", _SERVER, str(size)]
    server = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        note = next(json.loads(line[5:]) for line in server.stdout if line.startswith("note "))
        target = torch.zeros(size, dtype=torch.uint8)
        engine = ends[1]
        engine.share(target)
        step = size // 64
        reads = [Read(note, at, target[at : at + step]) for at in range(0, size, step)]
        engine.read(reads[:2], deadline=soon())
        assert target[: 2 * step].eq(7).all()
        finish = engine._finish

        def kill_and_finish(*args):
            server.kill()
            finish(*args)

        engine._finish = kill_and_finish
        # Over shared memory each read is done on the spot, and there is no middle.
        with suppress(TransferError):
            engine.read(reads, deadline=soon())
            assert target.eq(7).all()
        server.kill()
        server.wait(HANG_S)
        with pytest.raises((TransferError, DeadlineError)):
            engine.read(reads, deadline=soon(5))
    finally:
        server.kill()
        server.communicate()
