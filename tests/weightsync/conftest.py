"""A store that outlives the ranks of a test, a place where another user was first, one pair."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from primeblocks.weightsync import SharedMemoryTransport
from primeblocks.weightsync.transports import FileTransport
from tests.weightsync.one_pair import Setup

STRANGER = 12345


@pytest.fixture
def host():
    """A TCP store that no rank hosts, as (address, port)."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield "127.0.0.1", store.port
    del store  # It lived as long as the test.


@pytest.fixture
def everybodys():
    """A directory as /dev/shm is, and what runs a shell there as another user."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="pytest-"))
    root.chmod(0o1777)
    try:
        yield (
            root,
            lambda script: subprocess.run(
                ["sh", "-ec", script], cwd=root, user=STRANGER, check=False, capture_output=True
            ),
        )
    finally:
        shutil.rmtree(root)


@pytest.fixture(params=["shared_memory", "file"])
def setup(request, tmp_path):
    if request.param == "file":
        transport = FileTransport(tmp_path / "blobs", owner=True)
    else:
        transport = SharedMemoryTransport("policy", owner=True, root=str(tmp_path))
    with transport:
        yield Setup(transport, tmp_path)
