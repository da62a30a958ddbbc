"""The store against a dictionary of clones, under any history of calls and faults."""

import contextlib
import errno
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from primeblocks.errors import CapacityError, CorruptionError, UsageError
from primeblocks.kvoffload import DiskTier, HostTier, PageKey, TieredStore
from primeblocks.kvoffload.evict import RolloutAware, VersionAware, lru
from primeblocks.testing.faults import ManualClock
from tests.kvoffload.conftest import FRAME, PAGE, SIZES
from tests.kvoffload.disk.small import Unsynced
from tests.kvoffload.memory_tier import SOON
from tests.kvoffload.store.calls import page_of


class FullDisk(Unsynced):
    """Refuses every write while `full`."""

    full = False

    def write(self, descriptor, buffers, offset):
        if self.full:
            raise OSError(errno.ENOSPC, "no space left")
        return super().write(descriptor, buffers, offset)


class StoreMachine(RuleBasedStateMachine):
    """Any history of calls and faults: a load gives the reference's page or a miss."""

    HOST, DISK = 3, 6

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.reference = {}  # copies of pages and attachments: what a real store may miss
        self.version = 0
        self.clock = ManualClock()
        self.system = FullDisk()
        self.was_full = self.damaged = False
        self.faultless = True
        self.keys = set()
        self.store = None

    @initialize(
        evict=st.sampled_from([lru, VersionAware(1), RolloutAware(1)]),
        write=st.sampled_from(["back", "through"]),
    )
    def open(self, evict, write):
        self.evict = evict
        self.write = write
        host = HostTier(capacity_bytes=self.HOST * FRAME, **SIZES)
        room = self.DISK * FRAME
        self.disk = DiskTier(self.path, capacity_bytes=room, system=self.system, **SIZES)
        self.store = TieredStore([host, self.disk], evict=evict, write=write, clock=self.clock.now)
        self.store.advance(version=self.version)

    keys_ = st.builds(
        PageKey,
        salt=st.sampled_from(["a", b"a"]),
        hash=st.sampled_from([b"0", b"1", b"2"]),
        group=st.integers(0, 1),
        version=st.none() | st.integers(0, 3),
    )

    rollouts = st.none() | st.integers(0, 2)

    @rule(key=keys_, value=st.integers(0, 255), extra=st.binary(max_size=20), rollout=rollouts)
    def save(self, key, value, extra, rollout):
        attachments = {"routes": extra} if extra else {}
        page = page_of(value)
        saved = self.store.save(key, page, attachments=attachments, rollout=rollout)
        assert saved.wait(timeout_s=SOON).stored
        page[:] = 77  # the caller's again
        self.reference[key] = page_of(value).tobytes(), attachments
        self.keys.add(key)
        assert key in self.store

    @rule(rollout=rollouts)
    def end(self, rollout):
        self.store.end(rollout)

    @rule()
    def flush(self):
        """Says what could not be written or dropped since the last one."""
        errors = [CapacityError] * self.was_full + [CorruptionError] * self.damaged
        with contextlib.suppress(*errors):
            here = list(self.store._catalogue._pages)
            self.store.flush().wait(timeout_s=SOON)
            assert all(self.disk.holds(here)), "flushed, and not on disk"
        self.was_full = self.system.full

    @rule(key=keys_, rollout=rollouts)
    def load(self, key, rollout):
        into = np.full(PAGE, 99, np.uint8)
        loaded = self.store.load(key, into=into, rollout=rollout).wait(timeout_s=SOON)
        expected = self.reference.get(key)
        if loaded:
            assert (into.tobytes(), dict(loaded.attachments)) == expected
        else:
            assert into.tobytes() == page_of(99).tobytes()
            # With room for everything and no fault, a miss is a loss.
            lossless = self.faultless and self.evict is lru and len(self.keys) <= self.DISK
            assert expected is None or not lossless

    @rule()
    def advance(self):
        self.version += 1
        self.store.advance(version=self.version)

    @precondition(lambda self: not self.system.full)
    @rule()
    def clear(self):
        self.store.clear().wait(timeout_s=SOON)
        self.reference.clear()
        self.keys.clear()
        file = self.path / "pages"
        assert not file.exists() or file.stat().st_size == 0

    @rule()
    def restart(self):
        """What was in host memory alone is lost; what was on disk is still right."""
        self.store.close(timeout_s=SOON)
        self.faultless = False
        self.system.full = self.was_full = self.damaged = False
        try:
            self.open(self.evict, self.write)
        except UsageError:  # nothing says any more that the index is ours: the folder is lost
            shutil.rmtree(self.path)
            self.open(self.evict, self.write)

    @rule(full=st.booleans())
    def fill_disk(self, full):
        self.system.full = full
        self.was_full |= full
        self.clock.advance(0 if full else 60)  # long enough to be tried again
        self.faultless &= not full

    @rule(
        name=st.sampled_from(["pages", "index", "index-wal"]),
        how=st.sampled_from(["flip", "truncate", "remove"]),
        where=st.floats(0, 1, exclude_max=True),
        bit=st.integers(0, 7),
    )
    def damage(self, name, how, where, bit):
        """Of the index some is read when it is wanted, the rest when the store starts again."""
        file = self.path / name
        if not file.exists():
            return
        self.faultless = False
        self.damaged = True  # which a flush may be the first to see
        with contextlib.suppress(FileNotFoundError):  # the store's thread removed it meanwhile
            if how == "remove":
                file.unlink()
                return
            content = bytearray(file.read_bytes())
            at = int(where * len(content))
            with file.open("r+b") as opened:
                if how == "truncate":
                    opened.truncate(at)
                elif content:
                    opened.seek(at)
                    opened.write(bytes([content[at] ^ 1 << bit]))

    def teardown(self):
        if self.store is not None:
            for name, count in self.store.statistics().items():
                assert count.pages <= count.capacity_pages, name
            self.store.close(timeout_s=SOON)
        shutil.rmtree(self.path)


def test_a_store_gives_the_pages_of_a_dictionary_or_misses(full):
    how = settings(max_examples=1000 if full else 20, stateful_step_count=40)
    run_state_machine_as_test(StoreMachine, settings=how)
