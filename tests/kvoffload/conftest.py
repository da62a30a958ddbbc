"""Small stores."""

import pytest

from primeblocks.kvoffload import DiskTier, HostTier

PAGE = 48
EXTRA = 64


@pytest.fixture
def host():
    def make(pages):
        size = PAGE + EXTRA
        return HostTier(capacity_bytes=pages * size, page_bytes=PAGE, attachment_bytes=EXTRA)

    return make


@pytest.fixture
def disk(tmp_path):
    def make(pages, *, path=tmp_path / "pages", **how):
        size = PAGE + EXTRA
        return DiskTier(
            path, capacity_bytes=pages * size, page_bytes=PAGE, attachment_bytes=EXTRA, **how
        )

    return make
