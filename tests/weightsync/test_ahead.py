"""Versions that are checked beside their load, where there is one to go back to."""

import os

import pytest
import torch

from primeblocks.errors import CorruptionError, TransferError
from primeblocks.weightsync import Subscriber, fetched, load_into
from primeblocks.weightsync.transports import FileTransport
from tests.weightsync.contents import flip_sent


@pytest.fixture(params=["beside the load", "all first"])
def ahead(setup, request, monkeypatch):
    setup.subscriber = Subscriber(setup.plan, setup.engine.load, setup.transport, check="ahead")
    if request.param == "all first":  # As where the load's threads take all cores.
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return setup


def test_checked_ahead_a_version_arrives_like_any_other(ahead):
    for version in (1, 2, 3):
        ahead.publish(version)
        assert ahead.receive().bytes == 520
        assert ahead.served() == version
    assert ahead.engine.loads == 3


@pytest.mark.parametrize("offset", [0, 77, 300, 519])
def test_checked_ahead_no_damaged_tensor_is_handed_out_and_the_old_version_comes_back(
    ahead, offset
):
    seen = []
    whole = ahead.engine.load

    def load(tensors):
        for name, tensor in tensors:
            seen.append(tensor.unique().tolist())
            ahead.engine.serves[name] = tensor.clone()

    ahead.publish(1)
    flip_sent(ahead.transport, ahead.path, 1, offset - 520)
    with pytest.raises(CorruptionError):  # There is nothing to go back to: checked before.
        ahead.receive()
    assert ahead.engine.loads == 0
    flip_sent(ahead.transport, ahead.path, 1, offset - 520)
    ahead.receive()
    ahead.publish(2)
    flip_sent(ahead.transport, ahead.path, 2, offset - 520)
    ahead.subscriber._load = load
    with pytest.raises(TransferError, match="bucket .* fails .* Version 1 was loaded again"):
        ahead.receive()
    assert all(values in ([1], [2]) for values in seen)
    are_first = torch.get_num_threads() >= len(os.sched_getaffinity(0)) > 1
    if are_first and not isinstance(ahead.transport, FileTransport):
        assert [2] not in seen  # Nothing of it was handed out; of files, checked copies are.
    assert (ahead.served(), ahead.subscriber.version) == (1, 1)
    flip_sent(ahead.transport, ahead.path, 2, offset - 520)
    ahead.subscriber._load = whole
    assert ahead.receive().version == 2
    assert ahead.served() == 2


@pytest.fixture
def written(setup):
    """Engine tensors that `load_into` fills; a version is copied and checked in one pass."""
    held = {name: torch.zeros_like(tensor) for name, tensor in setup.weights.items()}
    load = load_into(held, setup.plan)
    setup.subscriber = Subscriber(setup.plan, load, setup.transport, check="ahead")
    setup.held = held
    return setup


def test_a_version_is_copied_into_the_engine_s_own_tensors_and_checked_there(written, monkeypatch):
    written.publish(1)
    written.receive()
    monkeypatch.setattr(fetched.Feed, "__init__", lambda *args: pytest.fail("was read twice"))
    if isinstance(written.transport, FileTransport):
        monkeypatch.undo()  # What others may write to is copied first.
    counted = {name: tensor._version for name, tensor in written.held.items()}
    written.publish(2)
    assert written.receive().version == 2
    assert all((tensor == 2).all() for tensor in written.held.values())
    assert all(tensor._version > counted[name] for name, tensor in written.held.items())


@pytest.mark.parametrize("offset", [0, 77, 300, 519])
def test_copied_into_the_engine_s_own_tensors_a_damaged_version_is_gone_back_from(written, offset):
    written.publish(1)
    written.receive()
    written.publish(2)
    flip_sent(written.transport, written.path, 2, offset - 520)
    with pytest.raises(TransferError, match="bucket .* fails .* Version 1 was loaded again"):
        written.receive()
    assert written.subscriber.version == 1
    assert all((tensor == 1).all() for tensor in written.held.values())
    flip_sent(written.transport, written.path, 2, offset - 520)
    assert written.receive().version == 2
    assert all((tensor == 2).all() for tensor in written.held.values())


def test_a_mapping_that_was_written_to_in_this_process_is_not_copied(written):
    if isinstance(written.transport, FileTransport):
        pytest.skip("files are read, not mapped")
    for version in (1, 2, 3):
        written.publish(version)
        written.receive()
    mappings = written.transport._memory._read.values()
    assert mappings
    for mapping in mappings:
        mapping[-520:] ^= 0xFF  # Private pages: nobody else sees it.
    written.publish(4)
    assert written.receive().version == 4
    assert all((tensor == 4).all() for tensor in written.held.values())
