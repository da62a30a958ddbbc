"""Ranks that are killed or stopped anywhere in a sync: nobody hangs, nothing is mixed or left.

Over a group all living readers have one version. Where readers come and go, each serves the old
or the new one, whole. With --full, 1,026 ranks are killed and 216 stopped, over all carriers:
trainer ranks and readers, in versions sent in full and as deltas.
"""

import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from primeblocks.testing import ranks
from primeblocks.weightsync import SharedMemoryTransport
from primeblocks.weightsync.transports import FileTransport
from primeblocks.weightsync.transports.place import OWNED
from tests.deadlines import HANG_S
from tests.weightsync.contents import store_at
from tests.weightsync.small_sync import PULL, RANKS, TRAINERS, Small

ranks.preload(__name__)  # With all that it imports.

PLACES = (
    "group",
    "group on a TCP store",
    "shared_memory",
    "file",
    "directory-handles",
    "store-tcp on a TCP store",
)
# Without --full: each way of messages and commits once. Of those that stop, each way of waiting.
KILLED = PLACES[1:]
STOPPED = ("group on a TCP store", "shared_memory", "store-tcp on a TCP store")
NEVER = 10**9
# At a time: much of each waits for a deadline.
LANES = 3
TIMEOUT_S = 1.0


class Lines:
    """Counts the lines of the block that this rank runs, and dies or stops at one of them."""

    def __init__(self, *, last=None, by=signal.SIGKILL):
        self.count, self._last, self._by = 0, last, by

    @property
    def is_stopped(self):
        """Whether it was, and goes on."""
        return self._last is not None and self.count >= self._last

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


def is_full(version):
    """Whether what follows is sent in full: every second case, of each victim."""
    return version % 4 == 0


def ready(kind, where, version, victim, point):
    """Bring all to `version` + 1; return this rank's sync, and the line at which it ends.

    A gang that was killed may have tried it.
    """
    full_every = 1 if is_full(version) else 8
    small = Small(kind, where, full_every=full_every, sparse=True, bucket_bytes=128)
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
        text = small.attempt(version + 2, timeout_s=TIMEOUT_S)
    if kind in PULL:
        stay(where, f"ends{version}", small.rank, victim)
    assert small.holds(version + 1 if text else version + 2)
    if small.is_engine:
        assert small.side.subscriber.version == (version + 1 if text else version + 2)
        small.side.subscriber.close()
    else:
        small.side.publisher.close()
    if small.rank == 0:
        store_at(where).set(closing(version), "begins")
    small.transport.close()
    assert memory_of_this() == []
    return text


def closing(version):
    """What the owner of a gang tells before it closes its transport."""
    return f"closing{version}"


def memory_of_this():
    """Memory of any sync that this process has open or mapped."""
    gc.collect()  # Errors hold frames, and frames tensors.
    held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    held += Path("/proc/self/maps").read_text().splitlines()
    return [line for line in held if "memfd:primeblocks-" in line]


def stay(where, key, rank, victim):
    """The owner removes everything at its end; so it lives until readers have read."""
    store = store_at(where)
    store.set(f"{key}/{rank}", "done")
    if rank == 0:
        readers = [f"{key}/{r}" for r in range(TRAINERS, RANKS) if r != victim]
        store.wait(readers, timedelta(seconds=HANG_S))


def stop_body(kind, where, version, victim, point):
    """Go on, and stop on the way until the others have ended; then sync again.

    Returns what the attempt raised, and whether this rank was stopped.
    """
    small, last = ready(kind, where, version, victim, point)
    pids = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    store, key = store_at(where), f"stopped{version}"
    with Lines(last=last, by=signal.SIGSTOP) as lines:
        text = small.attempt(version + 2, timeout_s=TIMEOUT_S)
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
    return text, lines.is_stopped


def check(kind, texts, victim):
    """Whether readers have the new version; and that none differs that must not."""
    living = [text for rank, text in enumerate(texts) if rank >= TRAINERS and text is not None]
    committed = {text == "" for text in living}
    if kind in PULL:
        # Each alone; a slow one may have come too late.
        assert all(text.startswith(("DeadlineError", "TransferError")) for text in living if text)
    else:
        assert len(committed) == 1, texts
        if "" in [text for text in texts[:TRAINERS] if text is not None]:
            # A trainer rank that says so is right.
            assert committed == {True}, texts
    return True in committed


def killed(kind, where, version, victim, rng):
    """A case; whether the victim died, and whether the others then had the new version."""
    # Often among the last lines, where it is decided; sometimes in the midst of a call.
    draw = rng.random()
    point = rng.random() if draw < 0.45 else -rng.randrange(40) if draw < 0.85 else NEVER
    args = (kind, where, version, victim, point)
    with ranks.gang(kill_body, *args, world_size=RANKS) as members:
        if point == NEVER:
            assert members.hear(victim) == "ready"
            time.sleep(rng.uniform(0, 0.06))
            members.kill(victim)
        texts = members.wait()
    return texts[victim] is None, check(kind, texts, victim)


def stopped(kind, where, version, victim, rng):
    """A case; whether the victim was stopped, and whether readers then had the new version."""
    point = rng.random() if rng.random() < 0.5 else -rng.randrange(40)
    args = (kind, where, version, victim, point)
    told = ranks.run(stop_body, *args, world_size=RANKS)
    return told[victim][1], check(kind, [text for text, _ in told], victim)


def lane(case, place, root, number, wanted):
    """Cases one after the other in one place, until so many ended as they were to."""
    rng, kind = random.Random(f"{place} {number}"), place.partition(" on ")[0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    root.mkdir()
    where = ("127.0.0.1", store.port) if "TCP" in place else str(root)
    victims, cases, committed, closed = Counter(), 0, 0, 0
    while victims.total() < wanted:
        version, victim = 8 * cases + 2 * ((cases + number) % 2), (cases // 2 + number) % RANKS
        ended, new = case(kind, where, version, victim, rng)
        victims[victim, is_full(version)] += ended
        committed += new
        closed += case is stopped or store_at(where).check([closing(version)])
        cases += 1
        # A slow rank may have made the others give up before the victim came to its line.
        assert cases < 4 * wanted + 20
    nothing_is_left(root, closed)
    return victims, cases, committed


def nothing_is_left(root, closed):
    """Of all that died: whoever starts next, whatever its name, removes it.

    On a disk the last versions of owners that were closed stay.
    """
    SharedMemoryTransport("next", owner=True, root=str(root)).close()
    assert [*root.glob(OWNED)] == []
    FileTransport(root / "blobs", owner=True).close()
    runs = set((root / "blobs").glob("run-*"))
    assert len(runs) <= closed
    others = [path for path in root.rglob("*") if path.is_file() and path.parent not in runs]
    assert {path.name for path in others} <= {"store"}  # The ranks' own.


def lanes(case, place, tmp_path, wanted):
    each = partial(lane, case, place)
    with ThreadPoolExecutor(LANES) as pool:
        roots = [tmp_path / str(number) for number in range(LANES)]
        done = list(pool.map(each, roots, range(LANES), [wanted] * LANES))
    victims = sum((one for one, _, _ in done), Counter())
    cases, committed = (sum(each) for each in list(zip(*done, strict=True))[1:])
    trainers = sum(count for (victim, _), count in victims.items() if victim < TRAINERS)
    in_full = sum(count for (_, full), count in victims.items() if full)
    total = victims.total()
    print(f"{place}: {case.__name__} {total} of {cases}: {trainers} trainers, {in_full} in full; "
          f"new version {committed}")  # fmt: skip
    return total, trainers, in_full


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_killed_anywhere(place, full, tmp_path):
    if not full and place not in KILLED:
        pytest.skip("a place more: --full")
    total, trainers, in_full = lanes(killed, place, tmp_path, 57 if full else 2)
    assert total >= (171 if full else 6)
    if full:
        assert 34 < trainers < 137
        assert 34 < in_full < 137


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_stopped_anywhere(place, full, tmp_path):
    if not full and place not in STOPPED:
        pytest.skip("places more: --full")
    total, *_ = lanes(stopped, place, tmp_path, 12 if full else 1)
    assert total >= (36 if full else 3)
