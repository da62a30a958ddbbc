"""A trainer or an engine that dies while the other reads its memory, or is read by it."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from primeblocks.errors import TransferError
from primeblocks.testing import ranks
from primeblocks.weightsync import Publisher, Subscriber, describe, plan_sync
from tests.weightsync.contents import Engine, same_bytes
from tests.weightsync.packed_site import KINDS, TIMEOUT_S, end, parameters

ranks.preload(__name__)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def await_death(pid):
    """Until it has let go of everything: a dead one with threads may still hold locks."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in "XZ" and len(os.listdir(f"/proc/{pid}/task")) == 1:
                return
        except (FileNotFoundError, ProcessLookupError):
            return
    raise AssertionError(f"{pid} lives")


def both(body, *args):
    """Rank 0 is the trainer, rank 1 the engine; each knows the other's process."""
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    weights = parameters(1)
    manifest = describe(weights)
    plan = plan_sync([manifest], manifest.whole(), bucket_bytes=1000)
    groups = [dist.new_group([rank], backend="gloo") for rank in (0, 1)]
    return body(*args, plan, weights, groups[dist.get_rank()], pids[1 - dist.get_rank()])


def trainer_dies(kind, path, plan, weights, group, other):
    if dist.get_rank() == 0:
        publisher = Publisher(plan, weights, end(kind, path, owner=True), group=group)
        publisher.publish(1, timeout_s=TIMEOUT_S)
        dist.barrier()
        dist.barrier()
        publisher.publish(2, timeout_s=TIMEOUT_S)
        dist.barrier()
        time.sleep(60)
    dist.barrier()
    engine, transport = Engine(), end(kind, path)
    subscriber = Subscriber(plan, engine, transport)
    assert subscriber.receive(timeout_s=TIMEOUT_S).version == 1
    dist.barrier()
    dist.barrier()
    ranks.tell("loaded")
    await_death(other)
    with pytest.raises(TransferError):  # And no DeadlineError: it is noticed.
        subscriber.receive(timeout_s=TIMEOUT_S)
    assert same_bytes(engine.tensors, parameters(1))
    return engine.loads, restart(kind, path, plan, subscriber, engine, group)


def restart(kind, path, plan, subscriber, engine, alone):
    """A new trainer under the same name, whom the engine follows."""
    with end(kind, path, owner=True) as owner:
        publisher = Publisher(plan, parameters(7), owner, group=alone)
        publisher.publish(1, timeout_s=TIMEOUT_S)
        subscriber.receive(timeout_s=TIMEOUT_S)
    return same_bytes(engine.tensors, parameters(7))


def test_a_trainer_dies_and_another_takes_over(kind, tmp_path):
    with ranks.gang(both, trainer_dies, kind, str(tmp_path), world_size=2) as members:
        members.hear(1)
        members.kill(0)
        loads, followed = members.wait()[1]
    assert loads == 1
    assert followed


def engine_dies(kind, path, plan, weights, group, other):
    lease = {} if kind.startswith("directory") else {"lease_s": 1.5}
    if dist.get_rank() == 1:
        dist.barrier()
        transport = end(kind, path)

        def hang(*args, **kwargs):
            ranks.tell("reading")
            time.sleep(60)

        transport._carrier.fetch = hang
        Subscriber(plan, hang, transport).receive(timeout_s=TIMEOUT_S)
    transport = end(kind, path, owner=True, **lease)
    publisher = Publisher(plan, weights, transport, group=group)
    publisher.publish(1, timeout_s=TIMEOUT_S)
    dist.barrier()
    await_death(other)
    for version in (2, 3, 4):  # Once at most it waits for a lease.
        publisher.publish(version, timeout_s=TIMEOUT_S)
    engine = Engine()
    with Subscriber(plan, engine, end(kind, path)) as subscriber:
        assert subscriber.receive(timeout_s=TIMEOUT_S).version == 4
    transport.close()


def test_an_engine_dies_while_it_reads(kind, tmp_path):
    with ranks.gang(both, engine_dies, kind, str(tmp_path), world_size=2) as members:
        members.hear(1)
        members.kill(1)
        members.wait()
