"""A store that is told of rollouts and versions, over two tiers."""

from unittest.mock import Mock

import numpy as np
import pytest

from primeblocks.errors import UsageError
from primeblocks.kvoffload import PageKey, TieredStore
from primeblocks.kvoffload.evict import RolloutAware, VersionAware
from tests.kvoffload.memory_tier import SOON

PAGE = 48


def key_of(name, number, version=0):
    return PageKey("s", f"{name}{number}".encode(), version=version)


def save(store, key, rollout=None):
    page = np.full(PAGE, 7, np.uint8)
    assert store.save(key, page, rollout=rollout).wait(timeout_s=SOON).stored


def load(store, key, rollout=None):
    into = np.zeros(PAGE, np.uint8)
    return store.load(key, into=into, rollout=rollout).wait(timeout_s=SOON).tier


@pytest.mark.parametrize("evict", ["versions", VersionAware, None])
def test_a_name_or_class_is_no_policy_and_leaves_the_host_tier_free(host, evict):
    tier = host(2)
    with pytest.raises(UsageError, match=r"such as lru or VersionAware\(8\); got "):
        TieredStore([tier], evict=evict)
    TieredStore([tier]).close()


def test_a_store_that_cannot_be_made_leaves_the_host_tier_free(host, memory):
    tier, below = host(2), memory(4)
    below.keys = Mock(side_effect=OSError("no answer"))
    with pytest.raises(OSError, match="no answer"):
        TieredStore([tier, below])
    TieredStore([tier]).close()


def test_pages_of_rollouts_that_ended_go_first_and_not_to_disk(host, disk):
    with TieredStore([host(4), disk(4)], evict=VersionAware(1)) as store:
        old = [key_of("old", number) for number in range(2)]
        done = [key_of("done", number) for number in range(2)]
        for key in old:
            save(store, key, "old")
        for key in done:
            save(store, key, "done")
        store.end("done")
        for number in range(2):
            save(store, key_of("new", number), "new")
        assert [load(store, key) for key in old] == ["host", "host"]
        assert [load(store, key) for key in done] == [None, None]
        assert store.statistics()["disk"].stores == 0


def hits(host, *, told):
    """Two rollouts whose tools are quick and eight whose tools are slow; room for two pages."""
    found = 0
    with TieredStore([host(2)], evict=RolloutAware()) as store:
        for turn in range(64):
            slow = turn % 8
            for name, tool in (("a", "quick"), ("b", "quick"), (f"slow {slow}", "slow")):
                key = key_of(name, 0)
                if load(store, key, name):
                    found += 1
                else:
                    save(store, key, name)
                if told:
                    store.pause(name, tool)
    return found


def test_what_rollouts_wait_for_is_learnt(host):
    assert hits(host, told=True) > hits(host, told=False)


def test_the_queue_is_kept_from_its_head(host):
    with TieredStore([host(3)], evict=RolloutAware()) as store:
        for name in "abcd":
            save(store, key_of(name, 0), name)
            store.pause(name, "tool")
            store.queue([other for other in "abcd" if other <= name])
        assert [load(store, key_of(name, 0)) for name in "abcd"] == ["host", "host", None, "host"]
        with pytest.raises(UsageError, match=r"Pass \['da'\]"):
            store.queue("da")
        store.queue(["d", "a"])  # b runs now, and the engine has its pages
        store.resume("b")
        save(store, key_of("e", 0))
        assert [load(store, key_of(name, 0)) for name in "ad"] == ["host", "host"]
