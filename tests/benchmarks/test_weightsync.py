"""The benchmark of weight transfer: gates that refuse, real processes at a small scale."""

import os
from math import prod
from pathlib import Path

import pytest

from benchmarks.weightsync_parts import model, plan, shared_memory, torchstore_peer
from benchmarks.weightsync_parts.worker import Worker

TINY = 1e-4


class Fake:
    """Answers like a worker; the engine's digest is another one than the trainer's."""

    def __init__(self, **answers):
        self.answers = answers

    def call(self, method, *_):
        return self.answers.get(method, 0.0)


class Counter:
    """What a worker may hold."""

    def __init__(self, start, closed):
        self.value, self.closed = start, closed

    def add(self, by):
        self.value += by
        return self.value

    def fail(self):
        raise ValueError("no")

    def close(self):
        Path(self.closed).touch()


def test_a_worker_keeps_its_object_and_tells_errors(tmp_path):
    with Worker(Counter, 5, str(tmp_path / "closed")) as worker:
        assert worker.call("add", 2) == 7
        with pytest.raises(RuntimeError, match="fail: ValueError: no"):
            worker.call("fail")
        assert worker.call("add", 1) == 8
    assert (tmp_path / "closed").exists()


def test_other_bytes_than_were_sent_are_refused():
    trainer = Fake(change="a", publish=0.1, copy=0.1)
    engine = Fake(digest="b", receive=(0.1, 0.1), copy=0.1)
    with pytest.raises(AssertionError, match="other bytes"):
        shared_memory.measure(trainer, engine, 1)


def test_shared_memory_brings_every_byte_and_leaves_no_file():
    figures = shared_memory.figures(scale=TINY, runs=1, threads=(1,))
    plain = figures["weightsync.shared_memory.copy_bandwidth_fraction"]
    assert plain == figures["weightsync.shared_memory.1_threads.copy_bandwidth_fraction"]
    assert 0 < plain[0] < 100
    assert not list(Path("/dev/shm").glob(f"*weightsync-benchmark-{os.getpid()}*"))


def test_the_model_has_the_tensors_of_its_checkpoint():
    tensors = model.tensors(TINY)
    assert len(tensors) == 4 * (9 + 3 * 24)
    assert all(tensor.shape[0] % 2 == 0 for tensor in tensors.values())


def test_torchstore_is_absent_with_its_reason(capsys, tmp_path):
    assert torchstore_peer.figures(None) == {}
    assert "--torchstore" in capsys.readouterr().out
    assert torchstore_peer.figures(tmp_path / "python") == {}
    assert "No such file" in capsys.readouterr().out


def test_plan_sends_little_more_than_the_least():
    figures = plan.figures()
    over, _, _ = figures["weightsync.plan.bytes_over_bound"]
    assert 1 < over <= 1.05  # Digests are sent too.


def test_the_paper_model_has_a_trillion_parameters():
    count = sum(
        layers * sum(prod(shape) for shape in shapes.values())
        for layers, shapes in plan.KIMI_K2.values()
    )
    assert 1.02e12 < count < 1.04e12
