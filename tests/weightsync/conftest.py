"""A store that outlives the ranks of a test."""

import pytest
import torch.distributed as dist


@pytest.fixture
def host():
    """A TCP store that no rank hosts, as (address, port)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port
    del store  # It lived as long as the test.
