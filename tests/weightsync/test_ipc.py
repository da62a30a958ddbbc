"""What is special to IPC: handles, a private directory, and what is refused."""

import fcntl
import inspect
import os
import pickle
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.held import Boxes
from primeblocks.weightsync.transports import (
    Transport,
    ipc,
    ipc_handle,
    ipc_version,
    open_transport,
)
from primeblocks.weightsync.transports.ipc import IpcTransport
from primeblocks.weightsync.transports.ipc_handle import Exported, open_exported
from primeblocks.weightsync.transports.transport import Request
from tests.weightsync.contents import Engine, same_bytes

CPU = torch.device("cpu")
TIMEOUT_S = 10.0


@pytest.fixture
def site(tmp_path):
    weights = {"a": torch.arange(50.0), "b": torch.arange(7)}
    source = describe(weights)
    planned = plan_sync([source], source.whole(), bucket_bytes=64)
    with IpcTransport("policy", owner=True, root=str(tmp_path)) as owner:
        yield weights, planned, owner, Publisher(planned, weights, owner)


def folder(tmp_path):
    return next(tmp_path.glob("primeblocks-ipc-policy-*"))


# --- handles -----------------------------------------------------------------------------------


def test_a_buffer_is_seen_through_its_handle():
    made = Exported(1000, device=CPU)
    opened = open_exported(made.note)
    assert os.stat(f"/proc/self/fd/{made.note['fd']}").st_blocks * 512 >= 1000  # Reserved.
    made.buffer.fill_(3)
    assert opened.eq(3).all()
    opened[0] = 9  # Harms the one who writes, and nobody else.
    assert made.buffer.eq(3).all()
    made.close()
    made.close()
    assert opened[1:].eq(3).all()
    with pytest.raises(TransferError, match="is gone"):
        open_exported(made.note)


def test_an_empty_buffer_has_a_handle():
    made = Exported(0, device=CPU)
    assert open_exported(made.note).shape == (0,)
    made.close()


def test_another_file_under_the_same_descriptor_is_not_opened(tmp_path):
    made = Exported(10, device=CPU)
    for other in (Exported(10, device=CPU).note["fd"], os.open(tmp_path, os.O_RDONLY)):
        with pytest.raises(TransferError, match="is gone"):
            open_exported({**made.note, "fd": other})
    os.close(other)
    with pytest.raises(TransferError, match="is gone"):
        open_exported({**made.note, "pid": 2**22 + 1})
    made.close()


def test_no_room_is_a_typed_error():
    with pytest.raises(CapacityError, match="1,125,899,906,842,624 bytes on cpu"):
        Exported(1 << 50, device=CPU)


def test_forgotten_buffers_leave_no_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        made = Exported(100, device=CPU)
        open_exported(made.note)
        del made
    assert len(os.listdir("/proc/self/fd")) == before


# --- the transport -----------------------------------------------------------------------------


def test_it_is_opened_by_its_spec(site, tmp_path):
    weights, planned, owner, publisher = site
    assert isinstance(owner, Transport)
    publisher.publish(1, timeout_s=TIMEOUT_S)
    for keep in (False, True):
        here = IpcTransport("policy", root=str(tmp_path), keep=keep)
        engine = Engine()
        with open_transport(here.spec()) as reader:
            assert reader.spec() == here.spec()
            Subscriber(planned, engine, reader).receive(timeout_s=TIMEOUT_S)
        assert engine.tensors["a"].equal(weights["a"])


def test_each_buffer_is_opened_once(site, monkeypatch):
    _, planned, owner, publisher = site
    opened, inner = [], ipc_version.open_exported
    monkeypatch.setattr(
        ipc_version, "open_exported", lambda note: opened.append(note["token"]) or inner(note)
    )
    with IpcTransport("policy", root=owner.spec()["root"]) as reader:
        subscriber = Subscriber(planned, Engine(), reader)
        for version in range(8):
            publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
    assert len(opened) == len(set(opened)) == 2


def test_without_keep_an_engine_keeps_no_copy(site, tmp_path):
    _, planned, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    for keep in (False, True):
        with IpcTransport("policy", root=str(tmp_path), keep=keep) as reader:
            subscriber = Subscriber(planned, Engine(), reader)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert (subscriber._held is not None) is keep


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_weights_go_as_deltas(dtype, tmp_path):
    weights = {"c": torch.randn(600, dtype=dtype), "b": torch.arange(7)}
    source, engine = describe(weights), Engine()
    planned = plan_sync([source], source.whole(), bucket_bytes=1 << 20)
    with (
        IpcTransport("policy", owner=True, root=str(tmp_path), keep=True) as owner,
        Publisher(planned, weights, owner, full_every=9) as publisher,
        Subscriber(planned, engine, owner) as subscriber,
    ):
        for version in range(4):
            weights["c"][version] = version
            sent = publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert same_bytes(engine.tensors, weights)
    assert sent.bytes < planned.bytes_total // 4


def test_deltas_are_applied_to_a_copy(site, tmp_path):
    weights, planned, owner, _ = site
    with Publisher(planned, weights, owner, full_every=9) as publisher:
        for version in (1, 2):
            publisher.publish(version, timeout_s=TIMEOUT_S)
    with IpcTransport("policy", root=str(tmp_path)) as reader:
        request = Request(planned, 0, None, None, None, time.monotonic() + TIMEOUT_S)
        full, delta = reader.receive(request)
        assert (full.marker.version, delta.marker.base) == (1, 1)
        assert isinstance(full.whole(), Boxes)


def test_an_engine_that_writes_to_what_it_is_given_harms_itself_and_recovers(site, tmp_path):
    weights, planned, _, publisher = site
    seen = []

    def load(tensors):
        for name, tensor in tensors:
            if name == "b":  # It lies in one bucket, and is not copied.
                seen.append(tensor.clone())
                tensor.zero_()

    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, load, reader)
        for version in range(1, 7):
            weights["b"].fill_(version)
            publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert seen[-1].eq(version).all()


def test_a_version_retired_between_open_and_lock_is_not_read(site, tmp_path, monkeypatch):
    _, _, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    (marker,) = owner.markers()
    inner = fcntl.flock

    def retire_and_lock(fd, how):
        monkeypatch.setattr(fcntl, "flock", inner)
        for version in (2, 3):
            publisher.publish(version, timeout_s=TIMEOUT_S)
        inner(fd, how)

    with IpcTransport("policy", root=str(tmp_path)) as reader:
        monkeypatch.setattr(fcntl, "flock", retire_and_lock)
        with pytest.raises(TransferError, match="version 1 was retired"):
            reader._buffers.hold(marker)
        reader._buffers.hold(owner.markers()[0]).close()


def test_close_leaves_nothing(site, tmp_path):
    _, _, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    assert folder(tmp_path).stat().st_mode & 0o777 == 0o700
    owner.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ClosedError):
        owner.markers()


def test_a_directory_that_others_write_to_is_refused(site, tmp_path):
    _, planned, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    folder(tmp_path).chmod(0o770)
    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, Engine(), reader)
        with pytest.raises(UsageError, match="mode 770; it has to be of user"):
            subscriber.receive(timeout_s=TIMEOUT_S)
        folder(tmp_path).chmod(0o700)
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda part: part[:-1], "ends at"),
        (lambda part: part[:4] + b"\xff" * (len(part) - 4), "cannot be read"),
        (lambda part: part[:4] + b"1".ljust(len(part) - 4), "cannot be read"),
    ],
)
def test_a_broken_handle_is_refused(site, tmp_path, change, error):
    _, planned, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    part = folder(tmp_path) / "version-1.0.delta"
    whole = part.read_bytes()
    part.write_bytes(change(whole))
    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, Engine(), reader)
        with pytest.raises(CorruptionError, match=error):
            subscriber.receive(timeout_s=TIMEOUT_S)
        part.write_bytes(whole)
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1


def test_a_publish_waits_for_a_slow_engine(site, tmp_path, monkeypatch):
    _, planned, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    loading, go_on = threading.Event(), threading.Event()

    def load(tensors):
        loading.set()
        assert go_on.wait(TIMEOUT_S)
        list(tensors)

    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, load, reader)
        thread = threading.Thread(target=subscriber.receive, kwargs={"timeout_s": TIMEOUT_S})
        thread.start()
        assert loading.wait(TIMEOUT_S)
        publisher.publish(2, timeout_s=TIMEOUT_S)
        looks = []

        def look(waited):
            looks.append(owner.markers())
            if len(looks) == 5:
                go_on.set()
            return threading.Event.wait(waited, 0.001)

        # It looks again and again, and what is loaded stays until then.
        event = SimpleNamespace(Event=lambda: SimpleNamespace(wait=lambda _: look(never)))
        never = threading.Event()
        monkeypatch.setattr(ipc, "threading", event)
        publisher.publish(3, timeout_s=TIMEOUT_S)
        thread.join()
    assert len(looks) >= 5
    assert {tuple(marker.version for marker in seen) for seen in looks} == {(1, 2)}
    assert [marker.version for marker in owner.markers()] == [2, 3]


@contextmanager
def child_that_stays():
    """A process forked now, which lives to the end of the block and runs nothing."""
    until, ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ends)
        os.read(until, 1)
        os._exit(0)
    os.close(until)
    try:
        yield
    finally:
        os.close(ends)
        os.waitpid(pid, 0)


def test_a_version_that_is_checked_and_never_loaded_holds_up_nobody(site, tmp_path):
    _, planned, _, publisher = site
    engine = Engine()
    publisher.publish(1, timeout_s=TIMEOUT_S)
    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, engine, reader)
        subscriber.verify(1, timeout_s=TIMEOUT_S)
        publisher.publish(2, timeout_s=TIMEOUT_S)
        assert subscriber.receive(1, timeout_s=TIMEOUT_S).version == 1  # Of its two buffers.
        subscriber.verify(2, timeout_s=TIMEOUT_S)
        for version in (3, 4):
            publisher.publish(version, timeout_s=TIMEOUT_S)
        with pytest.raises(TransferError, match="version 2 was retired"):
            subscriber.receive(2, timeout_s=TIMEOUT_S)
        assert (subscriber.version, engine.loads) == (1, 1)
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_forked_during_a_load_holds_up_nobody(site, tmp_path):
    _, planned, owner, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    with ExitStack() as children, IpcTransport("policy", root=str(tmp_path)) as reader:

        def load(tensors):
            children.enter_context(child_that_stays())
            list(tensors)

        Subscriber(planned, load, reader).receive(timeout_s=TIMEOUT_S)
        children.enter_context(child_that_stays())  # It has what the owner has open.
        for version in (2, 3, 4):
            publisher.publish(version, timeout_s=TIMEOUT_S)
        owner.close()
        IpcTransport("policy", owner=True, root=str(tmp_path)).close()


@pytest.mark.parametrize("name", ["", "a/b", "/dev/shm"])
def test_a_name_is_one_path_component(name):
    with pytest.raises(UsageError, match="path component"):
        IpcTransport(name)


def test_it_refuses_where_it_cannot_work(monkeypatch, tmp_path):
    with pytest.raises(UnsupportedError, match="is no directory"):
        IpcTransport("a", root=str(tmp_path / "none"))
    with pytest.raises(UnsupportedError, match="no handles of memory on meta"):
        IpcTransport("a", device="meta")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UnsupportedError, match="torch sees no GPU"):
            IpcTransport("a", device="cuda")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin. Use FileTransport"):
        IpcTransport("a")


def test_a_gpu_that_is_not_seen_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    note = {"token": "", "bytes": 1, "uuid": "GPU-1", "cuda": ""}
    with pytest.raises(UnsupportedError, match="on GPU GPU-1, this process sees"):
        open_exported(note)


def test_a_gpu_is_found_by_its_uuid(monkeypatch):
    """Against a fake of torch's handles: CUDA IPC itself has not run in a test."""
    names = list(inspect.signature(ipc_handle.rebuild_cuda_tensor).parameters)
    args = [name if name != "storage_device" else 0 for name in names]
    got = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(ipc_handle, "_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(
        ipc_handle, "rebuild_cuda_tensor", lambda *a: got.extend(a) or torch.zeros(1).byte()
    )
    open_exported({"uuid": "GPU-2", "cuda": pickle.dumps(args).hex()})
    assert dict(zip(names, got, strict=True))["storage_device"] == 2
    assert sum(a != b for a, b in zip(args, got, strict=True)) == 1
