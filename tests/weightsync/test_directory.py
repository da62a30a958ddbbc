"""What is special to a place: its name, what it needs, whose it is."""

import sys

import pytest
import torch

from primeblocks.errors import UnsupportedError, UsageError
from primeblocks.weightsync import (
    FileTransport,
    Publisher,
    SharedMemoryTransport,
    describe,
    plan_sync,
)


@pytest.mark.parametrize("name", ["", "a/b", "/dev/shm"])
def test_a_name_is_one_path_component(name):
    with pytest.raises(UsageError, match="path component"):
        SharedMemoryTransport(name)


def test_shared_memory_refuses_where_it_cannot_work(monkeypatch, tmp_path):
    with pytest.raises(UnsupportedError, match="is no directory"):
        SharedMemoryTransport("a", root=str(tmp_path / "none"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin. Use FileTransport"):
        SharedMemoryTransport("a")


def test_there_is_one_owner_and_it_alone_begins(tmp_path):
    with FileTransport(tmp_path, owner=True):
        with pytest.raises(UsageError, match="has a living owner"):
            FileTransport(tmp_path, owner=True)
        weights = {"w": torch.zeros(16)}
        plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=64)
        publisher = Publisher(plan, weights, FileTransport(tmp_path))
        with pytest.raises(UsageError, match="owner=True"):
            publisher.publish(0, timeout_s=5)
    FileTransport(tmp_path, owner=True).close()


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    weights = {"w": torch.zeros(16, dtype=torch.complex64)}
    plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=64)
    with FileTransport(tmp_path, owner=True) as transport:
        with pytest.raises(UsageError, match="safetensors has no name"):
            Publisher(plan, weights, transport).publish(0, timeout_s=5)
        assert [path.name for path in tmp_path.iterdir()] == ["owner.lock"]
