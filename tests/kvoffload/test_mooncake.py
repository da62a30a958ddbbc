"""The tier in Mooncake Store against a fake of its client; `test_mooncake_peer` runs Mooncake."""

import socket
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from primeblocks.errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    EngineError,
    MissingPackageError,
    PlanError,
)
from primeblocks.kvoffload import PageKey, TieredStore
from primeblocks.kvoffload.adapters import mooncake
from primeblocks.kvoffload.adapters.mooncake import MooncakeTier, connect
from tests.deadlines import HANG_S
from tests.kvoffload.mooncake_fake import FakeClient, FakeMaster
from tests.kvoffload.tier_conformance import (
    CHECKS,
    EXTRA,
    PAGE,
    Bench,
    check_name,
    content_of,
    host_for,
    is_error,
    key_of,
)

VALUE = 64 + 8192


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def master():
    return FakeMaster(capacity_bytes=30 * VALUE)


@pytest.fixture
def engine(master):
    """Makes benches of one store."""
    benches = []

    def make(*, namespace="test", **how):
        host = host_for()
        tier = MooncakeTier(FakeClient(master), host, namespace=namespace, **how)
        benches.append(Bench(host, tier, room=24, too_many=60))
        return benches[-1]

    yield make
    for bench in benches:
        bench.tier.close()
        bench.host.close()


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, engine):
    check(engine())


def test_threads_do_not_write_each_others_headers(engine, master):
    bench, door = engine(), threading.Barrier(2)

    def meet(name):
        with suppress(threading.BrokenBarrierError):
            door.wait(0.1)

    master.before_call = meet
    records = [[bench.record(key_of(n), content_of(n, EXTRA), n)] for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        put = [pool.submit(bench.tier.put, each) for each in records]
    assert [each.result() for each in put] == [[None]] * 2
    assert bench.get(key_of(0), key_of(1)) == [content_of(n, EXTRA) for n in range(2)]


def test_namespaces_share_nothing(engine):
    mine, *others = (engine(namespace=name) for name in ("a.b", "aXb", "a.b.c", "za.b"))
    for bench in (mine, *others):
        assert bench.get(key_of(1)) == [None]
        bench.put((key_of(1), content_of(1)))
    mine.tier.clear()
    assert mine.get(key_of(1)) == [None]
    for bench in others:
        assert bench.get(key_of(1)) == [content_of(1)]


@pytest.mark.parametrize("namespace", ["", "a/b", "a|b", "a" * 65, "ä"])
def test_a_namespace_is_a_plain_word(engine, namespace):
    with pytest.raises(PlanError, match="namespace"):
        engine(namespace=namespace)


def test_stores_of_other_sizes_do_not_meet(engine, master):
    bench = engine()
    bench.put((key_of(1), content_of(1)))
    bench.tier.page_bytes -= 1
    assert bench.get(key_of(1)) == [None]


def test_batches_are_split(engine, master):
    bench = engine()
    records = [bench.record(key_of(number), content_of(1)) for number in range(65)]
    assert [is_error(each) for each in bench.tier.put(records)] == [False] * 30 + [True] * 35
    keys = [key_of(number) for number in range(65)]
    found = bench.tier.get(keys, into=[bench.host.frame(0)] * 65)
    assert [each is not None for each in found] == [True] * 30 + [False] * 35
    # A batch has no page twice: here 2, 3 and 1 pages.
    bench.tier.get([keys[each] for each in (0, 1, 0, 2, 1, 1)], into=[bench.host.frame(0)] * 6)
    assert master.calls == ["put"] * 2 + ["get"] * 2 + ["get"] * 3


def test_every_changed_byte_of_a_value_is_noticed_and_removed(engine, master):
    bench = engine()
    key, content = key_of(1), content_of(1, 9)
    bench.put((key, content))
    (name,) = master.values
    whole = bytes(master.values[name])
    header_and_ends = [*range(64), 64, 64 + PAGE, 64 + PAGE + 8]
    for at in header_and_ends:
        master.values[name] = bytearray(whole)
        master.values[name][at] ^= 16
        (got,) = bench.get(key)
        assert not isinstance(got, bytes)
        if isinstance(got, CorruptionError):
            assert not master.values
    master.values[name] = bytearray(whole)
    assert bench.get(key) == [content]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda value: value + b"x", CorruptionError),
        # As for a transfer that failed, which may succeed later.
        (lambda value: value[:-1], ConnectionError),
        (lambda value: value[:10], ConnectionError),
    ],
)
def test_a_value_of_another_size_is_no_page(engine, master, change, kind):
    bench = engine()
    bench.put((key_of(1), content_of(1)), (key_of(2), content_of(2)))
    name = next(iter(master.values))
    master.values[name] = bytearray(change(bytes(master.values[name])))
    wrong, right = bench.get(key_of(1), key_of(2))
    assert isinstance(wrong, kind)
    assert right == content_of(2)
    assert len(master.values) == (1 if kind is CorruptionError else 2)


def test_a_client_that_says_it_read_and_did_not_is_noticed(engine, master):
    bench = engine()
    bench.put((key_of(1), content_of(1)))
    assert bench.get(key_of(1)) == [content_of(1)]
    master.answers = [VALUE]
    assert isinstance(bench.get(key_of(1))[0], CorruptionError)


def test_a_value_under_another_name_is_no_page(engine, master):
    bench = engine()
    bench.put((key_of(1), content_of(1)), (key_of(2), content_of(2)))
    one, two = master.values
    master.values[two] = master.values[one]
    good, bad = bench.get(key_of(1), key_of(2))
    assert good == content_of(1)
    assert isinstance(bad, CorruptionError)
    assert bench.put((key_of(2), content_of(2))) == [None]
    assert bench.get(key_of(2)) == [content_of(2)]


ERRORS = [
    (-200, CapacityError),
    (-1700, CapacityError),
    (-800, ConnectionError),
    (-900, ConnectionError),
    (-901, DeadlineError),
    (-707, DeadlineError),
    (-801, CorruptionError),
    (-1, OSError),
]


@pytest.mark.parametrize(("code", "kind"), ERRORS)
def test_codes_are_answers_not_exceptions(engine, master, code, kind):
    clock = Clock()
    bench = engine(clock=clock)
    bench.put((key_of(1), content_of(1)))
    master.answers = [code]
    put = bench.put((key_of(2), content_of(2)), (key_of(3), content_of(3)))
    clock.now += 5
    master.answers = [code]
    got = bench.get(key_of(1), key_of(2))
    for answer in (*put, *got):
        assert isinstance(answer, kind)
        assert str(code) in str(answer)
    clock.now += 5
    master.answers = []
    assert bench.put((key_of(1), content_of(1)), (key_of(2), content_of(2))) == [None, None]
    assert bench.get(key_of(1), key_of(2)) == [content_of(1), content_of(2)]


@pytest.mark.parametrize("code", [-703, -704, -712])
def test_what_left_meanwhile_is_a_miss(engine, master, code):
    bench = engine()
    bench.put((key_of(1), content_of(1)))
    master.answers = [code]
    assert bench.get(key_of(1)) == [None]
    assert bench.get(key_of(1)) == [content_of(1)]


@pytest.mark.parametrize("code", [-800, -900, -901])
def test_after_a_lost_connection_the_tier_rests(engine, master, code):
    clock = Clock()
    bench = engine(clock=clock, rest_s=5.0)
    bench.put((key_of(1), content_of(1)))
    master.answers = [code]
    assert is_error(bench.get(key_of(1))[0])
    master.calls.clear()
    clock.now = 4.9
    assert isinstance(bench.get(key_of(1))[0], ConnectionError)
    assert isinstance(bench.put((key_of(2), content_of(2)))[0], ConnectionError)
    assert bench.tier.holds([key_of(1)]) == [False]
    with pytest.raises(ConnectionError, match="is not used for"):
        bench.tier.drop([key_of(1)])
    assert master.calls == []
    clock.now = 5.0
    assert bench.tier.holds([key_of(1)]) == [True]
    assert bench.get(key_of(1)) == [content_of(1)]


@pytest.mark.parametrize("ask", ["holds", "drop", "clear"])
def test_what_cannot_answer_raises(engine, master, ask):
    bench = engine()
    master.answers = [-900]
    with pytest.raises(ConnectionError, match="-900"):
        getattr(bench.tier, ask)(*([] if ask == "clear" else [[key_of(1)]]))


def test_a_slab_that_is_refused_is_no_tier(master):
    master.answers = [-600]
    with pytest.raises(EngineError, match=str(24 * 8192)):
        MooncakeTier(FakeClient(master), host_for(), namespace="test")


@pytest.fixture
def asked(engine, master):
    """A bench, an event, and a thread whose question is answered after the event."""
    bench, called, go_on = engine(), threading.Event(), threading.Event()
    master.before_call = lambda name: (called.set(), go_on.wait(HANG_S))
    thread = threading.Thread(target=bench.tier.holds, args=([key_of(1)],))
    thread.start()
    assert called.wait(HANG_S)
    yield bench, go_on, thread
    go_on.set()
    thread.join(HANG_S)


def test_close_waits_for_calls_of_other_threads(asked):
    bench, go_on, thread = asked
    closes = threading.Thread(target=bench.tier.close)
    closes.start()
    closes.join(0.1)
    assert closes.is_alive()
    assert bench.tier._client.open
    go_on.set()
    for each in (thread, closes):
        each.join(HANG_S)
    assert not bench.tier._client.open
    with pytest.raises(ClosedError, match="mooncake"):
        bench.tier.holds([key_of(1)])


def test_close_gives_up_on_calls_that_hang(asked, monkeypatch):
    bench, *_ = asked
    monkeypatch.setattr(mooncake, "_CLOSE_S", 0.05)
    with pytest.raises(DeadlineError, match=r"1 calls of mooncake have not ended after 0\.05 s"):
        bench.tier.close()
    assert bench.tier._client.open


def test_two_stores_over_one_remote(engine, master):
    """Through the whole store: a miss, a hit of another engine, a damaged page."""
    one, other = engine(), engine()
    page, into = content_of(5), np.zeros(PAGE, np.uint8)
    key = PageKey("salt", b"prompt", version=3)
    with TieredStore([one.host, one.tier], write="through") as first:
        assert first.save(key, page, attachments={"routes": b"12"}).wait(timeout_s=HANG_S).stored
        first.flush().wait(timeout_s=HANG_S)
        with TieredStore([other.host, other.tier]) as second:
            assert not second.load(PageKey("salt", b"prompt"), into=into).wait(timeout_s=HANG_S)
            hit = second.load(key, into=into).wait(timeout_s=HANG_S)
            assert (hit.tier, dict(hit.attachments)) == ("mooncake", {"routes": b"12"})
            assert into.tobytes() == page
    (name,) = master.values
    master.values[name][100] ^= 1
    third = engine()
    with TieredStore([third.host, third.tier]) as store:
        into[:] = 0
        assert not store.load(key, into=into).wait(timeout_s=HANG_S)
        assert not into.any()
        assert store.statistics()["mooncake"].checksum_failures == 1


def test_without_mooncake_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    said = "mooncake is not installed. Run: pip install mooncake-transfer-engine"
    with pytest.raises(MissingPackageError, match=said):
        connect("localhost:1", hostname="localhost")


@pytest.fixture
def fake_mooncake(monkeypatch):
    """A module `mooncake.store` whose clients note their setup and answer `code`."""

    class Store:
        code = 0

        def setup(self, *arguments):
            self.arguments = arguments
            return self.code

    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = Store
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return Store


def test_connect_reaches_the_master_first(fake_mooncake):
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"127.0.0.1:{server.getsockname()[1]}"
        client = connect(master, hostname="here", segment_bytes=1 << 24, timeout_s=HANG_S)
        assert client.arguments == ("here", "P2PHANDSHAKE", 1 << 24, 1 << 24, "tcp", "", master)
        fake_mooncake.code = -600
        with pytest.raises(EngineError, match="-600"):
            connect(master, hostname="here", timeout_s=HANG_S)
    with pytest.raises(EngineError, match="no Mooncake master listens"):
        connect(master, hostname="here", timeout_s=HANG_S)


@pytest.mark.parametrize("master", ["", "host", "host:", ":1", "host:port"])
def test_a_master_is_host_and_port(fake_mooncake, master):
    with pytest.raises(PlanError, match="host:port"):
        connect(master, hostname="here")


def test_a_silent_master_is_given_up(fake_mooncake, monkeypatch):
    def silent(address, *, timeout):
        assert timeout == 3.0
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(DeadlineError, match=r"3.0 s"):
        connect("10.0.0.1:50051", hostname="here", timeout_s=3.0)
