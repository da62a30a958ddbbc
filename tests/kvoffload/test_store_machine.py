"""The store against a dictionary of clones, under any history of calls and faults."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from primeblocks.kvoffload import (
    DiskTier,
    HostTier,
    PageKey,
    ReferenceStore,
    TieredStore,
    VersionAware,
    arc,
    lru,
)

PAGE, EXTRA, SOON = 48, 64, 5.0
SIZES = {"page_bytes": PAGE, "attachment_bytes": EXTRA}


def page_of(number):
    return np.full(PAGE, number, dtype=np.uint8)


class StoreMachine(RuleBasedStateMachine):
    """Any history of calls and faults: a load gives the reference's page or a miss."""

    HOST, DISK = 3, 6

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.reference = ReferenceStore()
        self.version = 0
        self.full = False
        self.faultless = True
        self.keys = set()
        self.store = None

    def write(self, descriptor, data):
        if self.full:
            raise OSError(errno.ENOSPC, "no space left")
        return os.write(descriptor, data)

    @initialize(evict=st.sampled_from([lru, arc, VersionAware(1)]))
    def open(self, evict):
        self.evict = evict
        slot = PAGE + EXTRA
        host = HostTier(capacity_bytes=self.HOST * slot, **SIZES)
        disk = DiskTier(self.path, capacity_bytes=self.DISK * slot, write=self.write, **SIZES)
        self.store = TieredStore([host, disk], evict=evict)
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
        page[:] = 77  # the caller's again
        assert saved.wait(timeout_s=SOON).stored
        self.reference.save(key, page_of(value).tobytes(), attachments)
        self.keys.add(key)
        assert key in self.store

    @rule(rollout=rollouts)
    def end(self, rollout):
        self.store.end(rollout)

    @rule(key=keys_, rollout=rollouts)
    def load(self, key, rollout):
        into = np.full(PAGE, 99, np.uint8)
        loaded = self.store.load(key, into=into, rollout=rollout).wait(timeout_s=SOON)
        expected = self.reference.load(key)
        if loaded:
            assert (into.tobytes(), dict(loaded.attachments)) == expected
        else:
            assert into.tobytes() == page_of(99).tobytes()
            # With room for everything and no fault, a miss is a loss.
            lossless = self.faultless and self.evict in (lru, arc) and len(self.keys) <= self.DISK
            assert expected is None or not lossless

    @rule()
    def advance(self):
        self.version += 1
        self.store.advance(version=self.version)

    @rule()
    def clear(self):
        self.store.clear().wait(timeout_s=SOON)
        self.reference.clear()
        self.keys.clear()
        assert [*self.path.glob("??/*.page")] == []

    @rule()
    def restart(self):
        """What was in host memory alone is lost; what was on disk is still right."""
        self.store.close(timeout_s=SOON)
        self.faultless = False
        self.open(self.evict)

    @rule(full=st.booleans())
    def fill_disk(self, full):
        self.full = full
        self.faultless &= not full

    @precondition(lambda self: any(self.path.glob("??/*.page")))
    @rule(data=st.data(), how=st.sampled_from(["flip", "truncate", "remove"]))
    def damage(self, data, how):
        file = data.draw(st.sampled_from(sorted(self.path.glob("??/*.page"))))
        self.faultless = False
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        if how == "remove":
            file.unlink()
        elif how == "truncate":
            file.write_bytes(content[:at])
        elif content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
            file.write_bytes(content)

    def teardown(self):
        if self.store is not None:
            for name, count in self.store.statistics().items():
                assert count.pages <= count.capacity_pages, name
                assert count.stores >= count.evictions
            self.store.close(timeout_s=SOON)
        shutil.rmtree(self.path)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
