"""The tier in Mooncake Store itself: a master and clients over TCP. Runs in `scripts/peers`."""

import time

import numpy as np
import pytest

from primeblocks.errors import CapacityError, EngineError
from primeblocks.kvoffload import TieredStore
from primeblocks.kvoffload.adapters.mooncake import connect
from tests.deadlines import HANG_S
from tests.kvoffload.mooncake_site import missing, open_bench, owner, running_master
from tests.kvoffload.tier_conformance import (
    CHECKS,
    PAGE,
    check_name,
    content_of,
    is_error,
    key_of,
)

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())


@pytest.fixture(scope="module")
def master():
    with running_master() as (_, address):
        yield address


@pytest.fixture(scope="module")
def bench(master):
    """One for all checks, of which the last closes it: Mooncake takes two seconds to do so."""
    made = open_bench(master, namespace="checks")
    yield made
    made.tier.close()


@pytest.mark.parametrize("check", CHECKS, ids=check_name)
def test_conformance(check, bench):
    bench.tier.clear()
    check(bench)


def test_pages_of_another_process_are_hits(master):
    into = np.zeros(PAGE, np.uint8)
    with owner(master, namespace="shared", saves=3):
        bench = open_bench(master, namespace="shared", segment_bytes=0)
        with TieredStore([bench.host, bench.tier]) as store:
            for number in range(3):
                hit = store.load(key_of(number), into=into).wait(timeout_s=HANG_S)
                assert hit.tier == "mooncake"
                assert into.tobytes() == content_of(number)
            assert not store.load(key_of(3), into=into).wait(timeout_s=HANG_S)


@pytest.fixture
def mortal():
    """A master of one test: its process and address."""
    with running_master() as both:
        yield both


def test_memory_that_died_is_a_miss_and_service_goes_on(mortal):
    _, master = mortal
    bench = open_bench(master, namespace="died", segment_bytes=0, rest_s=0.0)
    try:
        with owner(master, namespace="died", saves=2) as first:
            assert bench.get(key_of(0)) == [content_of(0)]
            first.kill()
            first.wait()
            got = bench.get(key_of(0), key_of(1))
            assert all(each is None or is_error(each) for each in got)
        with owner(master, namespace="died"):
            deadline = time.monotonic() + HANG_S
            # Until the master has noticed, it deals out memory of the dead.
            while bench.put((key_of(7), content_of(7))) != [None]:
                assert time.monotonic() < deadline
            assert bench.get(key_of(7)) == [content_of(7)]
    finally:
        bench.tier.close()


def test_a_store_without_memory_is_full(mortal):
    _, master = mortal
    bench = open_bench(master, namespace="full", segment_bytes=0)
    (answer,) = bench.put((key_of(1), content_of(1)))
    assert isinstance(answer, CapacityError)
    bench.tier.close()


def test_a_dead_master_costs_one_wait_and_no_page_of_the_host(mortal, monkeypatch):
    process, master = mortal
    bench = open_bench(master, namespace="dead", rest_s=600.0)
    into = np.zeros(PAGE, np.uint8)
    with TieredStore([bench.host, bench.tier], write="through") as store:
        assert store.save(key_of(1), content_of(1)).wait(timeout_s=HANG_S).stored
        store.flush().wait(timeout_s=HANG_S)
        process.kill()
        process.wait()
        # Mooncake takes about four seconds to give up (measured, 0.3.13).
        assert not store.load(key_of(2), into=into).wait(timeout_s=HANG_S)
        calls, call = [], bench.tier._call
        monkeypatch.setattr(bench.tier, "_call", lambda: calls.append(None) or call())
        assert not store.load(key_of(3), into=into).wait(timeout_s=HANG_S)
        assert store.load(key_of(1), into=into).wait(timeout_s=HANG_S).tier == "host"
        assert calls == []
        assert into.tobytes() == content_of(1)
    with pytest.raises(EngineError, match="no Mooncake master listens"):
        connect(master, hostname="127.0.0.1")
