"""What is special to handles of memory, and to a directory whose readers read in place."""

import fcntl
import gc
import inspect
import json
import os
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import (
    CapacityError,
    CorruptionError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from primeblocks.weightsync.transports import IpcTransport, carriers, directory_commits
from primeblocks.weightsync.transports.carriers import HandleCarrier, Span, WireCarrier
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.contents import Engine, same_bytes


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


def opened(note, size_bytes):
    return HandleCarrier().fetch([Span(note, 0, size_bytes)], again=False, deadline=0.0).parts[0]


def test_a_buffer_is_seen_through_its_handle():
    carrier = HandleCarrier()
    made = carrier.make(1000)
    found = opened(made.note, 1000)
    assert os.stat(f"/proc/self/fd/{made.note['fd']}").st_blocks * 512 >= 1000  # Reserved.
    made.buffer.fill_(3)
    assert found.eq(3).all()
    found[0] = 9  # Harms the one who writes, and nobody else.
    assert made.buffer.eq(3).all()
    carrier.drop(made)
    carrier.drop(made)
    assert found[1:].eq(3).all()
    with pytest.raises(TransferError, match="is not available"):
        opened(made.note, 1000)


def test_an_empty_buffer_has_a_handle():
    carrier = HandleCarrier()
    assert opened(carrier.make(0).note, 0).shape == (0,)


def test_memory_of_another_size_than_was_said_is_not_mapped():
    carrier = HandleCarrier()
    made = carrier.make(10)
    with pytest.raises(CorruptionError, match="another size"):
        opened({**made.note, "bytes": 1 << 20}, 10)
    with pytest.raises(CorruptionError, match="smaller than its note"):
        opened(made.note, 11)


def test_another_file_under_the_same_descriptor_is_not_opened(tmp_path):
    carrier = HandleCarrier()
    made = carrier.make(10)
    for other in (carrier.make(10).note["fd"], os.open(tmp_path, os.O_RDONLY)):
        with pytest.raises(TransferError, match="is not available"):
            opened({**made.note, "fd": other}, 10)
    os.close(other)
    with pytest.raises(TransferError, match="is not available"):
        opened({**made.note, "pid": 2**22 + 1}, 10)


def test_no_room_is_a_typed_error():
    with pytest.raises(CapacityError, match="1,125,899,906,842,624 bytes on cpu"):
        HandleCarrier().make(1 << 50)


@pytest.mark.parametrize("end", ["drop", "close", "forget"])
def test_buffers_that_end_leave_no_descriptors(end):
    gc.collect()  # What earlier tests left.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        carrier = HandleCarrier()
        made = carrier.make(100)
        opened(made.note, 100)
        if end == "drop":
            carrier.drop(made)
        elif end == "close":
            carrier.close()
            carrier.close()
        del made
        if end == "forget":
            del carrier
    assert len(os.listdir("/proc/self/fd")) <= before


# --- the transport -----------------------------------------------------------------------------


def test_each_buffer_is_opened_once(site, monkeypatch):
    _, planned, owner, publisher = site
    tokens, inner = [], carriers._opened
    monkeypatch.setattr(
        carriers, "_opened", lambda note: tokens.append(note["token"]) or inner(note)
    )
    with IpcTransport("policy", root=owner.spec()["commits"]["place"]["root"]) as reader:
        subscriber = Subscriber(planned, Engine(), reader)
        for version in range(8):
            publisher.publish(version, timeout_s=TIMEOUT_S)
            subscriber.receive(timeout_s=TIMEOUT_S)
    assert len(tokens) == len(set(tokens)) == 2


def test_without_keep_an_engine_keeps_no_copy(site, tmp_path):
    _, planned, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    for keep in (False, True):
        with IpcTransport("policy", root=str(tmp_path), keep=keep) as reader:
            subscriber = Subscriber(planned, Engine(), reader)
            subscriber.receive(timeout_s=TIMEOUT_S)
            assert (subscriber._last.held is not None) is keep


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
            reader.commits.hold(marker, deadline=0.0)
        reader.commits.hold(owner.markers()[0], deadline=0.0).close()


def test_a_directory_that_others_write_to_is_refused(site, tmp_path):
    _, planned, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    folder(tmp_path).chmod(0o770)
    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, Engine(), reader)
        with pytest.raises(UsageError, match="mode 770; it must belong to user"):
            subscriber.receive(timeout_s=TIMEOUT_S)
        folder(tmp_path).chmod(0o700)
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda note: note[:-1],
        lambda note: b"\xff" * len(note),
        lambda note: b"1",
        lambda note: b'{"1": 5}',
        lambda note: b'{"1": {"bytes": 10000, "at": {"token": "1"}}}',
        lambda note: b'{"1": {"bytes": 10000, "at": [1]}}',
        lambda note: note.replace(b'"pid": ', b'"pid": -'),
        lambda note: note.replace(b'"fd": ', b'"fd": "../../../../etc/passwd", "x": '),
    ],
)
def test_a_broken_handle_is_refused(site, tmp_path, change):
    _, planned, _, publisher = site
    publisher.publish(1, timeout_s=TIMEOUT_S)
    path = folder(tmp_path) / "rank-0.json"
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    with IpcTransport("policy", root=str(tmp_path)) as reader:
        subscriber = Subscriber(planned, Engine(), reader)
        with pytest.raises(CorruptionError, match="cannot be read"):
            subscriber.receive(timeout_s=TIMEOUT_S)
        path.write_bytes(whole)
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
        monkeypatch.setattr(directory_commits, "threading", event)
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


def test_a_device_without_handles_is_refused(monkeypatch):
    with pytest.raises(UnsupportedError, match="memory on meta has no handles"):
        IpcTransport("a", device="meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch sees no GPU"):
        IpcTransport("a", device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="on GPU GPU-1, but this process sees"):
        opened({"token": "t", "bytes": 1, "uuid": "GPU-1", "cuda": []}, 1)


@pytest.mark.parametrize("make", [HandleCarrier, partial(WireCarrier, SimpleNamespace())])
def test_a_gpu_without_an_index_is_that_of_the_constructing_thread(make, monkeypatch):
    class Asked(Exception): ...

    def empty(*_, device, **__):
        raise Asked(str(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    carrier = make(device="cuda")
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(Asked, match="cuda:3"):
        carrier.make(8)


def test_a_gpu_is_found_by_its_uuid_and_its_handle_is_json(monkeypatch):
    """Against a fake of torch's handles: CUDA IPC itself has not run in a test."""
    names = list(inspect.signature(carriers.rebuild_cuda_tensor).parameters)
    fake = {
        **dict.fromkeys(names),
        **{"storage_handle": b"\0handle", "ref_counter_handle": b"counter"},
        **{"event_handle": b"event", "event_sync_required": True, "requires_grad": False},
        **{"storage_size_bytes": 96, "storage_offset_bytes": 32, "ref_counter_offset": 8},
    }
    monkeypatch.setattr(carriers, "reduce_tensor", lambda buffer: (None, tuple(fake.values())))
    note = {"token": "t", "bytes": 40, "uuid": "GPU-2"}
    note = json.loads(json.dumps({**note, "cuda": carriers._cuda_handle(torch.zeros(1))}))
    got = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(carriers, "_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(
        carriers, "rebuild_cuda_tensor", lambda *a: got.extend(a) or torch.zeros(40).byte()
    )
    opened(note, 40)
    given = dict(zip(names, got, strict=True))
    assert (given["storage_device"], given["tensor_size"]) == (2, (40,))
    assert {name: given[name] for name in names[7:]} == {name: fake[name] for name in names[7:]}

    def fails(*_):
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(carriers, "rebuild_cuda_tensor", fails)
    with pytest.raises(TransferError, match="invalid resource handle. Check that the trainer runs"):
        opened(note, 40)
