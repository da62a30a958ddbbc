"""Full or delta: by what they cost, within the bounds that were set."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync, publish
from primeblocks.weightsync.manifest import Manifest
from primeblocks.weightsync.outgoing import Pace, Sent, Shipment
from tests.deadlines import HANG_S

GIGABYTE = 10**9


@given(st.data(), st.integers(1, 6), st.sampled_from([1000, GIGABYTE]))
def test_one_version_of_so_many_is_full_and_one_is_a_delta(data, full_every, full_bytes):
    """Whatever they cost; the second only where deltas do not grow to a full version."""
    pace, kinds = Pace(), []
    for _ in range(40):
        is_delta = pace.wants_delta(full_every=full_every, link_bytes_per_s=None)
        seconds = data.draw(st.floats(0, 10))
        size = full_bytes // 100 if is_delta else full_bytes
        pace = pace.after(Sent(size, seconds), is_delta=is_delta)
        kinds.append(is_delta)
    for start in range(len(kinds) - full_every):
        assert not all(kinds[start : start + full_every])
        assert full_every == 1 or any(kinds[start : start + full_every + 1])


def test_a_delta_that_takes_longer_is_left_out_until_its_turn():
    full, delta = Sent(GIGABYTE, 0.1), Sent(GIGABYTE // 100, 0.25, 0.05)
    pace = Pace().after(full, is_delta=False).after(delta, is_delta=True)
    memory = [pace.wants_delta(full_every=16, link_bytes_per_s=None)]
    assert memory == [False]
    assert pace.wants_delta(full_every=16, link_bytes_per_s=10e9 / 8)
    # 0.99 GB less against 0.2 s more: worth it below 4.95 GB/s.
    assert pace.wants_delta(full_every=16, link_bytes_per_s=4.9e9)
    assert not pace.wants_delta(full_every=16, link_bytes_per_s=5.0e9)


def test_a_delta_costs_what_the_reader_of_the_most_bytes_applies(tmp_path, monkeypatch):
    """And not what one trainer rank sent, which is a part of that, or more than one reader gets."""
    monkeypatch.setattr(Shipment, "_apply_s_a_byte", lambda _: 1.0)
    seen = []
    monkeypatch.setattr(publish, "Sent", lambda *cost: seen.append(cost[2]) or Sent(*cost))
    weights = {"a": torch.zeros(4000), "b": torch.zeros(1000)}
    rows = describe(weights).tensors
    plan = plan_sync([Manifest(rows)], [Manifest((row,)) for row in rows], bucket_bytes=1 << 20)
    with (
        SharedMemoryTransport("pace", owner=True, root=str(tmp_path)) as transport,
        Publisher(plan, weights, transport, full_every=4) as publisher,
    ):
        for version in range(2):
            publisher.publish(version, timeout_s=HANG_S)
            for tensor in weights.values():
                tensor[::100] += 1
        sizes = transport.markers()[-1].sizes
    applied = [sum(sizes[i] for i in plan.of_reader(reader)) for reader in range(2)]
    assert seen == [0.0, max(applied)]
    assert 0 < max(applied) < sum(sizes)
