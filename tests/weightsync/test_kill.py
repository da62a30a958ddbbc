"""Ranks that are killed or stopped anywhere in a sync: nobody hangs, nothing is mixed or left.

Over a group all living readers have one version. Where readers come and go, each serves the old
or the new one, whole.
"""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from primeblocks.testing import ranks
from primeblocks.weightsync import SharedMemoryTransport, doctor
from tests.weightsync.contents import PACKED, store_at
from tests.weightsync.small_sync import PULL, RANKS, TRAINERS, Small

ranks.preload(__name__)  # With all that it imports.

PLACES = (
    "group on a file store",
    "group on a TCP store",
    "joined",
    "joined on a TCP store",
    "shared_memory",
    "file",
    "directory-handles",
    "store-handles",
    "directory-wire",
    "store-wire on a TCP store",
)
NEVER = 10**9


class Lines:
    """Counts the lines of the block that this rank runs, and dies or stops at one of them."""

    def __init__(self, *, last=None, by=signal.SIGKILL):
        self.count, self._last, self._by = 0, last, by

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        return self._line if "primeblocks/weightsync" in frame.f_code.co_filename else None

    def _line(self, frame, event, arg):
        self.count += 1
        if self.count == self._last:
            if self._by == signal.SIGKILL:
                ranks.kill(dist.get_rank())
            os.kill(os.getpid(), self._by)
        return self._line


def ready(kind, where, version, victim, point):
    """Bring all to `version` + 1; return this rank's sync, and the line at which it ends.

    A gang that was killed may have tried it. Every second time what follows is a delta.
    """
    full_every = 8 if version % 4 else 1
    small = Small(kind, where, full_every=full_every, keep=True, sparse=True, bucket_bytes=128)
    small.sync(version)
    with Lines() as lines:
        receipt = small.sync(version + 1)
    assert small.is_engine or (receipt.bytes < small.plan.bytes_total) is (full_every > 1)
    assert small.holds(version + 1)
    dist.barrier()
    if small.rank == victim:
        ranks.tell("ready")
    last = lines.count + point if point < 0 else max(1, int(lines.count * point))
    return small, last if small.rank == victim else None


def kill_body(kind, where, version, victim, point):
    """Go on, and die on the way. Returns what the attempt raised."""
    small, last = ready(kind, where, version, victim, point)
    with Lines(last=last):
        text = small.attempt(version + 2, timeout_s=1.0)
    if kind in PULL:
        stay(where, f"ends{version}", small.rank, victim)
    assert small.holds(version + 1 if text else version + 2)
    if small.is_engine:
        assert small.side.subscriber.version == (version + 1 if text else version + 2)
    return text


def stay(where, key, rank, victim):
    """The owner removes everything at its end; so it lives until readers have read."""
    store = store_at(where)
    store.set(f"{key}/{rank}", "done")
    if rank == 0:
        readers = [f"{key}/{r}" for r in range(TRAINERS, RANKS) if r != victim]
        store.wait(readers, timedelta(seconds=10))


def stop_body(kind, where, version, victim, point):
    """Go on, and stop on the way until the others have ended; then sync again."""
    small, last = ready(kind, where, version, victim, point)
    pids = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    store, key = store_at(where), f"stopped{version}"
    with Lines(last=last, by=signal.SIGSTOP):
        text = small.attempt(version + 2, timeout_s=1.0)
    store.set(f"{key}/{small.rank}", "done")
    if small.rank == (victim + 1) % RANKS:
        store.wait([f"{key}/{rank}" for rank in range(RANKS) if rank != victim])
        while not store.check([f"{key}/{victim}"]):  # It may stop after the first signal.
            os.kill(pids[victim], signal.SIGCONT)
            with suppress(RuntimeError):
                store.wait([f"{key}/{victim}"], timedelta(milliseconds=20))
    assert small.holds(version + 1 if text else version + 2)
    dist.barrier()
    small.renew()
    small.sync(version + 3)
    assert small.holds(version + 3)
    dist.barrier()
    small.transport.close()
    return text


def check(kind, texts, victim):
    """Whether readers have the new version; and that none differs that must not."""
    living = [text for rank, text in enumerate(texts) if rank >= TRAINERS and text is not None]
    trainers = [text for text in texts[:TRAINERS] if text is not None]
    committed = {text == "" for text in living}
    if kind not in PULL:
        assert len(committed) == 1, texts
    # Packed buffers end with the rank that packed them, before a reader has come or after.
    ends = kind in PACKED or (kind in PULL and victim >= TRAINERS)
    if "" in trainers and not ends:
        # A trainer rank that says so is right.
        assert committed == {True}, texts
    return True in committed


def place_of(name, tmp_path, host):
    return name.partition(" on ")[0], host if "TCP" in name else str(tmp_path)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_killed_at_any_line(place, full, tmp_path, host):
    rng, (kind, where) = random.Random(place), place_of(place, tmp_path, host)
    cases = 170 if full else 9
    killed = committed = 0
    for case in range(cases):
        # Often among the last lines: where it is decided.
        point = rng.random() if rng.random() < 0.5 else -rng.randrange(40)
        victim = rng.randrange(RANKS)
        texts = ranks.run(kill_body, kind, where, 2 * case, victim, point, world_size=RANKS)
        killed += texts[victim] is None
        committed += check(kind, texts, victim)
    print(f"{place}: {cases} cases, {killed} killed, {committed} committed")
    # A slow rank may have made the others give up before the victim came to its line.
    assert killed > 0.4 * cases
    assert 0 < committed < cases + (not full)

    nothing_is_left(tmp_path)


def nothing_is_left(root):
    """Of all that died: whoever starts next, whatever its name, removes it."""
    SharedMemoryTransport("next", owner=True, root=str(root)).close()
    assert [found for found in doctor.examine(str(root)) if found.path.parent == root] == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_stopped_at_any_line(place, full, tmp_path, host):
    rng, (kind, where) = random.Random(place), place_of(place, tmp_path, host)
    cases = 25 if full else 2
    held_up = 0
    for case in range(cases):
        point = rng.random() if rng.random() < 0.5 else -rng.randrange(40)
        victim = rng.randrange(RANKS)
        texts = ranks.run(stop_body, kind, where, 5 * case, victim, point, world_size=RANKS)
        held_up += any(texts)
    print(f"{place}: {cases} stopped, {held_up} syncs held up")
    nothing_is_left(tmp_path)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", ["group on a TCP store", "shared_memory"])
def test_a_rank_killed_at_any_time(place, full, tmp_path, host):
    rng, (kind, where) = random.Random(6), place_of(place, tmp_path, host)
    cases = 75 if full else 4
    committed = 0
    for case in range(cases):
        victim = rng.randrange(RANKS)
        args = (kind, where, 2 * case, victim, NEVER)  # Beyond its last line.
        with ranks.gang(kill_body, *args, world_size=RANKS) as members:
            assert members.hear(victim) == "ready"
            time.sleep(rng.uniform(0, 0.06))
            members.kill(victim)
            committed += check(kind, members.wait(), victim)
    print(f"{place}: {cases} cases by time, {committed} committed")
