"""The wire over TCP: what is special to it. `test_packed` and others have the rest."""

import gc
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import (
    CorruptionError,
    DeadlineError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync import held
from primeblocks.weightsync.transports import Read, TcpWire
from primeblocks.weightsync.transports.open import open_spec
from tests.deadlines import HANG_S

HOST = "127.0.0.1"
SIZE = 1 << 20


@pytest.fixture
def ends():
    trainer, engine = TcpWire(HOST), TcpWire()
    yield trainer, engine
    trainer.close()
    trainer.close()
    engine.close()


def soon(seconds=30.0):
    return time.monotonic() + seconds


def buffer_of(value, size=SIZE):
    return torch.full((size,), value, dtype=torch.uint8)


def test_ranges_are_read(ends):
    trainer, engine = ends
    source, target = torch.randint(0, 256, (SIZE,), dtype=torch.uint8), buffer_of(0)
    note = trainer.share(source)
    assert engine.share(target) == {}
    spans = [(start, start * 3 % 1000, 700) for start in range(0, SIZE - 2000, 19999)]
    spans += [(5, SIZE, 0), (SIZE - 1, SIZE - 1, 1)]  # Nothing, and the last byte.
    want = buffer_of(0)
    for start, at, n in spans:
        want[start : start + n] = source[at : at + n]
    engine.read(
        [Read(note, at, target[start : start + n]) for start, at, n in spans], deadline=soon()
    )
    assert target.equal(want)
    engine.read([], deadline=soon(-1))


def test_several_processes_are_read_from_at_once(ends):
    trainer, engine = ends
    other = TcpWire("localhost")
    notes = [trainer.share(buffer_of(1)), other.share(buffer_of(2)), trainer.share(buffer_of(3))]
    target = buffer_of(0, 3)
    engine.read([Read(note, 7, target[i : i + 1]) for i, note in enumerate(notes)], deadline=soon())
    assert target.tolist() == [1, 2, 3]
    other.close()


def test_a_read_has_one_connection_at_a_time_and_one_for_each_process_in_turn(ends, monkeypatch):
    others = [TcpWire(HOST) for _ in range(3)]
    notes = [other.share(buffer_of(i)) for i, other in enumerate(others)]
    target, made = buffer_of(9, 9), []

    class Counted(socket.socket):
        def connect(self, at):
            assert [link for link in made if link.fileno() != -1] == []
            made.append(self)
            super().connect(at)

    monkeypatch.setattr(socket, "socket", Counted)
    reads = [Read(notes[i // 3], 0, target[i : i + 1]) for i in range(9)]
    ends[1].read(reads, deadline=soon())
    assert target.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(made) == 3
    for other in others:
        other.close()


def test_what_is_not_there_is_a_typed_error_and_the_wire_goes_on(ends):
    trainer, engine = ends
    source, target = buffer_of(1), buffer_of(0)
    note = trainer.share(source)
    refused = [Read(note, 1, target), Read({**note, "token": "00" * 16}, 0, target)]
    for read in refused:
        with pytest.raises(TransferError, match=r"1,048,576 bytes from \d on were removed"):
            engine.read([read], deadline=soon())
    assert target.eq(0).all()
    engine.read([Read(note, 0, target)], deadline=soon())
    assert target.eq(1).all()
    trainer.unshare(source)
    with pytest.raises(TransferError, match="were removed"):
        engine.read([Read(note, 0, target)], deadline=soon())
    trainer.close()
    with pytest.raises(TransferError, match=f"a read from {HOST}"):
        engine.read([Read(note, 0, target)], deadline=soon())


WRONG = [
    {"port": 0},
    {"port": "80"},
    {"port": 1 << 16},
    {"host": None},
    {"host": "a..b"},
    {"host": "x" * 64},
    {"host": "a\0b"},
    {"token": "xyz"},
    {"token": None},
    {"token": "00"},
]


@pytest.mark.parametrize("change", WRONG)
def test_a_note_that_nobody_wrote_is_corrupt(ends, change):
    trainer, engine = ends
    note = trainer.share(buffer_of(1)) | change
    with pytest.raises((CorruptionError, TransferError)):
        engine.read([Read(note, 0, buffer_of(0))], deadline=soon())


@pytest.fixture
def stranger():
    """A server that takes connections, and does what it is told on each."""
    with socket.create_server((HOST, 0)) as server:
        acts, links = [], []

        def serve():
            for act in acts:
                links.append(server.accept()[0])
                act(links[-1])

        thread = threading.Thread(target=serve)

        def doing(*more):
            acts.extend(more)
            thread.start()
            return {"host": HOST, "port": server.getsockname()[1], "token": "00" * 16}

        yield doing
        thread.join(HANG_S)
        for link in links:
            link.close()


def test_one_that_answers_nothing_costs_until_the_deadline(ends, stranger):
    note = stranger(lambda link: None)
    with pytest.raises(DeadlineError, match="0 of 1 reads ended in time"):
        ends[1].read([Read(note, 0, buffer_of(0))], deadline=soon(0.2))


def test_all_addresses_of_a_name_have_one_deadline(ends, monkeypatch):
    now, asked = [100.0], []

    class Silent(socket.socket):
        def connect(self, at):
            asked.append(self.gettimeout())
            now[0] += asked[-1]
            raise TimeoutError

    clock = SimpleNamespace(monotonic=lambda: now[0])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, port)) for port in (1, 2)]
    monkeypatch.setattr(held, "time", clock)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", Silent)
    note = {"host": "engines", "port": 1, "token": "00" * 16}
    with pytest.raises(DeadlineError):
        ends[1].read([Read(note, 0, buffer_of(0))], deadline=110.0)
    assert asked == [10.0]


def test_a_wire_that_is_left_or_forgotten_listens_no_more():
    with TcpWire(HOST) as wire:
        left = wire._server
    assert not left._thread.is_alive()
    forgotten = TcpWire(HOST)
    server, ended = forgotten._server, threading.Event()
    end = server.end
    server.end = lambda: (end(), ended.set())
    del forgotten
    gc.collect()
    assert ended.wait(HANG_S)
    assert (server._thread.is_alive(), server.fileno()) == (False, -1)


def test_one_that_stops_in_the_middle_costs_until_the_deadline(ends, stranger):
    note = stranger(lambda link: link.sendall(b"\x01" + b"x" * 1000))
    with pytest.raises(DeadlineError, match="0 of 1 reads ended in time"):
        ends[1].read([Read(note, 0, buffer_of(0))], deadline=soon(0.5))


@pytest.mark.parametrize("said", [b"", b"\x01" + b"x" * 1000, b"\x07"])
def test_one_that_hangs_up_or_babbles_is_a_typed_error(ends, stranger, said):
    def act(link):
        link.recv(1)
        link.sendall(said)
        link.close()

    note = stranger(act)
    with pytest.raises(TransferError):
        ends[1].read([Read(note, 0, buffer_of(0))], deadline=soon())


def test_a_reader_that_goes_away_or_babbles_leaves_the_others_alone(ends, capfd):
    trainer, engine = ends
    note, target = trainer.share(buffer_of(1)), buffer_of(0)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(10_000)):
        with socket.create_connection((HOST, note["port"])) as link:
            link.sendall(said)
    engine.read([Read(note, 0, target)], deadline=soon())
    assert target.eq(1).all()
    assert capfd.readouterr() == ("", "")


def test_a_close_ends_the_reads_that_are_under_way(ends):
    trainer, _ = ends
    size = 64 << 20  # More than the kernel takes at a time.
    note = trainer.share(buffer_of(1, size))
    with socket.create_connection((HOST, note["port"])) as link:
        link.sendall(bytes.fromhex(note["token"]) + bytes(8) + size.to_bytes(8, "big"))
        assert link.recv(1) == b"\x01"
        trainer.close()
        link.settimeout(HANG_S)
        got = 1
        while more := link.recv(1 << 20):
            got += len(more)
    assert got < size


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "203.0.113.7", "no such host", "a..b", "a\0b"]
)
def test_an_address_that_is_not_this_machines_is_refused(host):
    with pytest.raises(UsageError, match="Pass an address of this machine"):
        TcpWire(host)


def test_a_port_that_is_taken_or_none_is_refused(ends):
    taken = ends[0].share(buffer_of(1))["port"]
    for port in (taken, -1, 1 << 16):
        with pytest.raises(UsageError, match=f"port {port}"):
            TcpWire(HOST, port=port)


def test_memory_of_a_gpu_is_refused(ends):
    with pytest.raises(UnsupportedError, match='device="cpu"'):
        ends[1].share(torch.empty(4, dtype=torch.uint8, device="meta"))


def test_a_reading_end_is_opened_by_its_spec(ends):
    opened = open_spec(ends[0].spec())
    target = buffer_of(0)
    opened.read([Read(ends[0].share(buffer_of(9)), 0, target)], deadline=soon())
    assert target.eq(9).all()
    assert opened.share(target) == {}
    opened.close()
