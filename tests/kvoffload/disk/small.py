"""Small pages for disk tiers, and what one is said to hold."""

import numpy as np

from primeblocks.kvoffload import DiskTier, PageKey
from primeblocks.kvoffload.disk import System
from primeblocks.kvoffload.page import checksum
from primeblocks.kvoffload.tier import Found, Record

PAGE, EXTRA, FRAME = 48, 64, 4096
LONG = 20_000  # bytes of a key that takes several pages of the index


def key_of(number):
    """Keys from 100 on are long."""
    return PageKey("s", number.to_bytes(2, "big") * (LONG // 2 if number >= 100 else 1))


def content_of(number, value=0):
    """Bytes that differ between pages and between values, of several lengths."""
    length = PAGE + (7 * number + value) % EXTRA
    return ((np.arange(length) * 3 + 17 * number + 101 * value) % 251).astype(np.uint8)


def record(number, value=0):
    """A page in a whole frame, as the store hands it over."""
    key, content = key_of(number), content_of(number, value)
    return framed(key, content, checksum(key, content))


def framed(key, content, digest=bytes(16), *, size=FRAME):
    frame = aligned(size)
    frame[: content.nbytes] = content
    return Record(key, frame[: content.nbytes], digest, frame)


def aligned(count=FRAME):
    memory = np.zeros(count + FRAME, dtype=np.uint8)
    start = -memory.ctypes.data % FRAME
    return memory[start : start + count]


class Unsynced(System):
    """Does not wait for the disk: what a power cut would leave is not looked at."""

    synchronous = "OFF"

    def sync(self, descriptor):
        pass

    def sync_folder(self, folder):
        pass


def open_tier(path, *, pages=4, **how):
    sizes = {"page_bytes": PAGE, "attachment_bytes": EXTRA}
    how = {"io": "buffered", "system": Unsynced(), **sizes, **how}
    return DiskTier(path, capacity_bytes=pages * FRAME, **how)


def read(tier, numbers):
    """Content by number; None for a miss or an error, b"" where the digest does not match."""
    keys = [key_of(number) for number in numbers]
    into = [aligned() for _ in keys]
    contents = []
    for key, frame, found in zip(keys, into, tier.get(keys, into=into), strict=True):
        content = None
        if isinstance(found, Found):
            content = frame[: found.length].tobytes()
            if checksum(key, frame[: found.length]) != found.digest:
                content = b""
        contents.append(content)
    return contents


def state(tier):
    """Content of every page that the tier says it has, by number."""
    keys = tier.keys()
    numbers = [int.from_bytes(key.hash[:2], "big") for key in keys]
    return dict(zip(numbers, read(tier, numbers), strict=True))


def assert_serves(tier, *, pages=4):
    """Every frame can be used, and none more: nothing leaked."""
    before = state(tier)
    new = [number for number in range(50, 99) if number not in before][: pages - len(tier)]
    assert tier.put([record(number) for number in new]) == [None] * len(new)
    assert tier.put([record(99)]) != [None]
    assert state(tier) == before | {number: content_of(number).tobytes() for number in new}
    tier.drop([key_of(number) for number in new])
    assert state(tier) == before
