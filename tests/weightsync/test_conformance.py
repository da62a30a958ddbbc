"""One suite over every transport: what a sync promises, whatever carries it.

A new transport takes a line in `contents.KINDS` and one in `transport_of`.
"""

import math
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from primeblocks.errors import (
    CapacityError,
    DeadlineError,
    PlanError,
    PrimeblocksError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing import ranks
from primeblocks.testing.faults import FaultyTransport
from primeblocks.weightsync import Subscriber, plan_sync
from primeblocks.weightsync.transports import Transport, group, open_transport
from tests.deadlines import HANG_S
from tests.weightsync.contents import KINDS, Engine, contents, oracle, same_bytes
from tests.weightsync.small_sync import PULL, RANKS, Small, expiring

ranks.preload(__name__)  # With all that it imports.

pytestmark = pytest.mark.parametrize("kind", KINDS)


def run(bodies, kind, where):
    """Run bodies one after the other in one gang, each in a folder of its own."""
    for number in range(len(bodies)):
        (where / str(number)).mkdir()
    return ranks.run(several, bodies, kind, str(where), world_size=RANKS)


def several(bodies, kind, where):
    found = []
    for number, (body, *args) in enumerate(bodies):
        found.append(body(kind, f"{where}/{number}", *args))
        dist.barrier()
    return found


def arrives_body(kind, where):
    small = Small(kind, where)
    assert isinstance(small.transport, Transport)
    receipts = []
    for version in (1, 2, 7):
        if not small.is_engine:
            small.set(version)
        with torch.device("meta"):  # A caller's default device changes nothing.
            receipts.append(small.side.sync(version, timeout_s=math.inf))
        dist.barrier()  # Of three versions the first is retired.
        assert small.holds(version)
        assert receipts[-1].version == version
    if small.is_engine:
        assert small.engine.loads == 3
        assert small.side.subscriber.version == 7
        assert {r.bytes for r in receipts} == {small.plan.read_bytes(small.side.reader)}
    else:
        assert {r.bytes for r in receipts} == {small.plan.bytes_total}
    dist.barrier()
    small.transport.close()
    small.transport.close()
    with pytest.raises(PrimeblocksError, match="closed"):
        small.sync(8)
    return [receipt.digest for receipt in receipts]


def at_rank(rank, wrap):
    return wrap if dist.get_rank() == rank else None


def fault_body(kind, where, method, at):
    fault = {method: [None, CapacityError("disk full")]}
    small = Small(kind, where, wrap=at_rank(at, lambda t: FaultyTransport(t, fault)))
    small.sync(1)
    # Who waits for what does not come waits to the end; the others have time.
    in_vain = small.is_engine and (kind in PULL or method == "begin")
    with expiring(group, "receive_buckets") if method == "send" else nullcontext():
        said = small.attempt(2, timeout_s=0.7 if in_vain else HANG_S)
    assert small.holds(1)  # Nothing was seen of what was not committed.
    if small.is_engine:
        assert said.startswith(("DeadlineError", "TransferError"))
        assert (small.engine.loads, small.side.subscriber.version) == (1, 1)
    else:
        assert f"rank {at}: CapacityError: disk full" in said
    dist.barrier()
    small.renew()
    first = small.sync(2)
    assert small.holds(2)
    if not small.is_engine:
        again = small.side.publisher.publish(2, timeout_s=HANG_S)
        assert (again.digest, again.bytes) == (first.digest, first.bytes)
        small.set(3)
        with pytest.raises(UsageError, match="version 2 is committed already, with other bytes"):
            small.side.publisher.publish(2, timeout_s=HANG_S)
        with pytest.raises(UsageError, match="version 1 after version 2"):
            small.side.publisher.publish(1, timeout_s=HANG_S)
    small.sync(3)  # A refusal costs nothing.
    assert small.holds(3)
    dist.barrier()
    small.transport.close()


FAULTS = [("begin", 0), ("send", 1), ("commit", 0)]


def test_a_fault_is_typed_and_in_time_and_a_retry_goes_through(kind, tmp_path):
    run([(fault_body, *fault) for fault in FAULTS], kind, tmp_path)


def deadline_body(kind, where):
    small = Small(kind, where)
    start = time.monotonic()
    if small.is_engine:
        with pytest.raises(DeadlineError, match="in time"):
            small.side.subscriber.receive(timeout_s=0.3)
        assert 0.3 <= time.monotonic() - start < 0.3 + HANG_S
    start = time.monotonic()  # Rank 0 keeps the deadline, and may leave the barrier first.
    dist.barrier()
    if not small.is_engine:
        if kind in PULL:  # Nobody has to be there.
            small.sync(1)
        else:
            with pytest.raises(TransferError, match="rank 0: TransferError: reader 0 did not ask"):
                small.sync(1, timeout_s=0.3)
            assert 0.3 <= time.monotonic() - start < 0.3 + HANG_S
    dist.barrier()
    for version in (1, 2):  # Nothing is broken by having waited in vain.
        small.sync(version)
        assert small.holds(version)
    dist.barrier()
    small.transport.close()


def joiner_body(kind, where):
    small = Small(kind, where, full_every=4)
    for version in (1, 2):
        small.sync(version)
    dist.barrier()
    if kind in PULL:
        if small.is_engine:
            engine, reader = Engine(), open_transport(small.transport.spec())
            with Subscriber(small.plan, engine, reader, reader=small.side.reader) as late:
                receipt = late.receive(timeout_s=HANG_S)
                assert receipt.version == 2
                # The full one, and a delta that is not smaller, for all was changed.
                assert receipt.bytes == 2 * small.plan.read_bytes(small.side.reader)
                assert same_bytes(engine.tensors, small.engine.tensors)
            reader.close()
    else:
        small.renew()
        receipt = small.sync(2)
        assert receipt.bytes >= small.plan.read_bytes(small.side.reader)
    assert small.holds(2)
    dist.barrier()
    small.sync(3)
    assert small.holds(3)
    dist.barrier()
    small.transport.close()


def plan_body(kind, where):
    small = Small(kind, where)
    small.sync(1)
    # Where readers are waited for, the trainer hears of the first that refuses.
    if small.is_engine and (kind in PULL or small.rank == 2):
        other = plan_sync(small.sources, small.targets, bucket_bytes=128)
        stranger = Subscriber(other, Engine(), small.transport, reader=small.side.reader)
        said = "call find again" if kind in PULL else "is published, but its plan is"
        with pytest.raises(PlanError, match=said):
            stranger.receive(timeout_s=HANG_S)
        assert small.engine.loads == 1
    elif small.rank < 2 and kind not in PULL:
        with pytest.raises(TransferError, match="reader 0 refused: its plan is"):
            small.sync(2)
    dist.barrier()
    small.sync(2)
    assert small.holds(2)
    dist.barrier()
    small.transport.close()


def spec_body(kind, where):
    small = Small(kind, where)
    if kind == "group" and small.rank == 1:
        with pytest.raises(UnsupportedError, match="rank 0 has the spec"):
            small.transport.spec()
    else:
        reader = open_transport(small.transport.spec())
        assert reader.spec() == small.transport.spec()
        reader.close()
    dist.barrier()
    small.transport.close()


def file_body(kind, where):
    small = Small(kind, where)
    small.sync(1)
    (path,) = Path(where).rglob("version-1.safetensors")
    whole = oracle(small.sources, contents(small.sources, 1), small.plan.target)
    found = load_file(path)
    assert same_bytes({name: found[name] for name in whole}, whole)
    assert {str(t.dtype) for t in whole.values()} == {"torch.bfloat16", "torch.int64"}
    assert torch.equal(found["w"], whole["w"])
    dist.barrier()
    small.transport.close()


BODIES = [(arrives_body,), (deadline_body,), (joiner_body,), (plan_body,), (spec_body,)]


def test_readers_get_the_bytes_of_the_reference_whoever_waits_joins_late_or_has_another_plan(
    kind, tmp_path
):
    files = [(file_body,)] if kind in ("shared_memory", "file") else []
    digests = [found[0] for found in run([*BODIES, *files], kind, tmp_path)]
    assert digests == [digests[0]] * RANKS
    assert len(set(digests[0])) == 3
    with pytest.raises(UnsupportedError, match="no transport has the spec"):
        open_transport({"kind": "pigeon"})
