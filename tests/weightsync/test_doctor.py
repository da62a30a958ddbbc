"""What is left in shared memory, and what is in use."""

import os

import torch

from primeblocks.testing import ranks
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    describe,
    doctor,
    plan_sync,
)
from tests.weightsync.test_directory import AS_ROOT, STRANGER

ranks.preload(__name__)


def _publish(where, name):
    weights = {"w": torch.zeros(1000)}
    source = describe(weights)
    plan = plan_sync([source], source.whole())
    transport = SharedMemoryTransport(name, owner=True, root=str(where))
    Publisher(plan, weights, transport).publish(1, timeout_s=20)
    return transport


def _killed(where):
    kept = _publish(where, "dead")
    ranks.kill(0)
    kept.close()


def test_the_dead_are_removed_and_the_living_listed(tmp_path):
    ranks.run(_killed, tmp_path, world_size=1)
    (dead,) = tmp_path.iterdir()
    (one,) = doctor(str(tmp_path))
    assert (one.path, one.user, one.removed) == (dead, os.geteuid(), True)
    assert not list(tmp_path.iterdir())
    with _publish(tmp_path, "alive"):
        (alive,) = tmp_path.iterdir()
        (one,) = doctor(str(tmp_path))
        assert (one.path, one.removed) == (alive, False)
        assert one.bytes > 4000
        assert alive.is_dir()
    assert doctor(str(tmp_path)) == doctor(str(tmp_path / "none")) == ()


@AS_ROOT
def test_another_users_is_listed_and_kept(tmp_path):
    theirs = tmp_path / f"primeblocks-policy-{'0' * 16}"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, STRANGER, STRANGER)
    assert doctor(str(tmp_path)) == ((theirs, 0, STRANGER, False),)
    assert theirs.is_dir()
