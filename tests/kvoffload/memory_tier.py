"""A lower tier that is a dictionary, and misbehaves when told to."""

import threading

from primeblocks.errors import CapacityError
from primeblocks.kvoffload import Found
from primeblocks.kvoffload.page import ALIGNMENT
from tests.deadlines import HANG_S as SOON


class MemoryTier:
    """A fake. `refuse` is an error for each put, `stuck` makes puts wait for `release`, and `room`
    is how many pages really fit.

    Args:
        common: the dictionary of a tier that several stores share.
    """

    def __init__(self, pages, *, page_bytes, attachment_bytes=0, name="memory", common=None):
        self.name = name
        self.page_bytes = page_bytes
        self.attachment_bytes = attachment_bytes
        self.capacity_pages = pages
        self.shared = common is not None
        self.pages = {} if common is None else common
        self.refuse = None
        self.room = None
        self.stuck = False
        self.entered, self.release = threading.Event(), threading.Event()
        self.flushes = 0
        self.closed = False

    def put(self, records):
        assert len({record.key for record in records}) == len(records)
        for record in records:
            assert record.frame.ctypes.data == record.content.ctypes.data
            assert record.frame.ctypes.data % ALIGNMENT == 0
            assert record.frame.nbytes % ALIGNMENT == 0
        if self.stuck:
            self.entered.set()
            assert self.release.wait(SOON)
        if isinstance(self.refuse, RuntimeError):
            raise self.refuse  # which no tier may do
        if self.refuse is not None:
            return [self.refuse] * len(records)
        answers = [self._put(record) for record in records]
        assert self.shared or len(self.pages) <= self.capacity_pages
        return answers

    def _put(self, record):
        if self.room is not None and len(self.pages) >= self.room:
            return CapacityError("no space left on device")
        self.pages[record.key] = (record.content.copy(), record.digest)
        return None

    def get(self, keys, *, into):
        return [self._get(key, frame) for key, frame in zip(keys, into, strict=True)]

    def _get(self, key, frame):
        found = self.pages.get(key)
        if found is None or isinstance(found, Exception):
            return found
        content, digest = found
        frame[: len(content)] = content
        return Found(len(content), digest)

    def damage(self, key):
        content, digest = self.pages[key]
        content[-1] ^= 1
        self.pages[key] = content, digest

    def drop(self, keys):
        for key in keys:
            self.pages.pop(key, None)

    def clear(self):
        self.pages.clear()

    def flush(self):
        self.flushes += 1

    def holds(self, keys):
        return [key in self.pages for key in keys]

    def keys(self):
        return [] if self.shared else list(self.pages)

    def close(self):
        self.closed = True

    def __len__(self):
        return len(self.pages)
