"""What is found in shared memory, and what is removed: the dead's alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from primeblocks.testing import ranks
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    describe,
    doctor,
    plan_sync,
)
from primeblocks.weightsync.transports import IpcTransport
from tests.deadlines import HANG_S

ranks.preload(__name__)

MAKES = {"shared_memory": SharedMemoryTransport, "ipc": IpcTransport}
ELEMENTS = 1000


def published(kind, name, root):
    weights = {"w": torch.zeros(ELEMENTS)}
    plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=8192)
    owner = MAKES[kind](name, owner=True, root=root)
    Publisher(plan, weights, owner).publish(1, timeout_s=HANG_S)
    return owner


def dies(kind, root):
    owner = published(kind, "dead", root)
    ranks.kill(0)
    owner.close()


def states(root):
    return {
        found.path.name.rpartition("-")[0]: found.state
        for found in doctor.examine(root)
        if found.path.parent == Path(root)
    }


@pytest.mark.parametrize("kind", MAKES)
def test_what_the_dead_left_is_told_from_what_is_in_use(kind, tmp_path):
    root, prefix = str(tmp_path), "primeblocks-ipc-" if kind == "ipc" else "primeblocks-"
    with published(kind, "living", root) as living:
        ranks.run(dies, kind, root, world_size=1)
        (tmp_path / "vllm_offload_1.mmap").write_bytes(bytes(64))
        (tmp_path / "vllm_offload_1.mmap").chmod(0o600)
        (tmp_path / f"primeblocks-planted-{'0' * 16}").symlink_to("/etc")
        if os.geteuid() == 0:
            (tmp_path / f"primeblocks-x-{'1' * 16}").mkdir(mode=0o700)
            os.chown(tmp_path / f"primeblocks-x-{'1' * 16}", 12345, 12345)
        before = states(root)
        theirs = dict.fromkeys(["primeblocks-planted", "primeblocks-x"], "another user's")
        if os.geteuid():
            del theirs["primeblocks-x"]
        found = {f"{prefix}living": "in use", f"{prefix}dead": "left", "": "vLLM's", **theirs}
        assert before == found
        memory = [one for one in doctor.examine(root) if one.path.parts[1] == "proc"]
        mine = [one for one in memory if one.path.parts[2] == str(os.getpid())]
        assert any(one.bytes >= 4 * ELEMENTS and one.state == "in use" for one in mine)
        said = subprocess.check_output(
            [sys.executable, "-m", "primeblocks.weightsync.doctor", "--clean", "--root", root],
            text=True,
            timeout=HANG_S,
        )
        assert f"removed {tmp_path}/{prefix}dead-" in said
        assert said.count("removed") == 1
        del found[f"{prefix}dead"]
        assert states(root) == found
        assert doctor.clean(root) == []
        assert [marker.version for marker in living.markers()] == [1]


def test_where_nothing_is_nothing_is_said(tmp_path):
    assert states(str(tmp_path)) == states(str(tmp_path / "none")) == {}
    assert doctor.clean(str(tmp_path / "none")) == []
