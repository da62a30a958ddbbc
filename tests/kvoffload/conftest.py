"""Small stores."""

import inspect

import pytest

from primeblocks.kvoffload import DiskTier, HostTier, TieredStore
from tests.deadlines import HANG_S
from tests.kvoffload.memory_tier import MemoryTier

PAGE = 48
EXTRA = 64
FRAME = 4096
SIZES = {"page_bytes": PAGE, "attachment_bytes": EXTRA}


@pytest.fixture
def host():
    return lambda pages: HostTier(capacity_bytes=pages * FRAME, **SIZES)


@pytest.fixture
def memory():
    return lambda pages, **how: MemoryTier(pages, **SIZES, **how)


@pytest.fixture
def disk(tmp_path):
    def make(pages, *, path=tmp_path / "pages", **how):
        return DiskTier(path, capacity_bytes=pages * FRAME, **SIZES, **how)

    return make


@pytest.fixture
def patient(monkeypatch):
    """No tier is late: a busy machine would have it after a second, with another result."""
    defaults = inspect.unwrap(TieredStore.__init__).__kwdefaults__
    monkeypatch.setitem(defaults, "patience_s", HANG_S)
