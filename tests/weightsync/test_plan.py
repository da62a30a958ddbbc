import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.layout import Layout, Shard
from primeblocks.weightsync import Plan, describe, plan_sync
from primeblocks.weightsync.manifest import Manifest, TensorSpec
from primeblocks.weightsync.transports import estimate
from primeblocks.weightsync.transports.group_wire import Rounds
from tests.weightsync.link_layouts import elements, layouts


def manifest(**boxes):
    """name -> (global shape, offsets, sizes), float32."""
    return Manifest(
        tuple(
            (name, TensorSpec(torch.float32, Layout(shape, Shard(offsets, sizes))))
            for name, (shape, offsets, sizes) in boxes.items()
        )
    )


def test_replicas_are_shared_out_evenly():
    replicated = describe({f"w{i}": torch.zeros(16) for i in range(9)})
    plan = plan_sync([replicated] * 3, replicated.whole(), bucket_bytes=64)
    assert [plan.written_bytes(rank) for rank in range(3)] == [192] * 3
    assert repr(plan) == "<Plan of 9 tensors, 3 ranks, 1 readers, 9 buckets of 576 bytes>"


def test_replicas_fill_up_ranks_that_have_less_of_their_own():
    own = manifest(a=((4, 32), (0, 0), (4, 32)), r=((8, 16), (0, 0), (8, 16)))
    other = manifest(r=((8, 16), (0, 0), (8, 16)))
    plan = plan_sync([own, other], own.whole(), bucket_bytes=64)
    assert [plan.written_bytes(rank) for rank in (0, 1)] == [512, 512]


def test_large_replicas_are_shared_out_before_small_ones():
    source = describe({"a": torch.zeros(16), "b": torch.zeros(16), "c": torch.zeros(32)})
    plan = plan_sync([source] * 2, source.whole(), bucket_bytes=1 << 10)
    assert [plan.written_bytes(rank) for rank in (0, 1)] == [128, 128]


def test_a_plan_depends_on_every_input():
    a = describe({"w": torch.zeros(64)})
    plans = [
        plan_sync([a], a.whole(), bucket_bytes=64),
        plan_sync([a], a.whole(), bucket_bytes=128),
        plan_sync([a], a.whole(dtype=torch.bfloat16), bucket_bytes=64),
        plan_sync([a, a], a.whole(), bucket_bytes=64),
    ]
    assert len({plan.fingerprint() for plan in plans}) == 4


@pytest.mark.parametrize(
    ("sources", "target", "kind", "message"),
    [
        ([], {"a": ((2,), (0,), (2,))}, PlanError, "nothing to plan: 0 sources"),
        (
            [{"b": ((2,), (0,), (2,))}],
            {"a": ((2,), (0,), (2,))},
            PlanError,
            "1 of 1 target tensors: a. The trainer has 1 names, such as b",
        ),
        (
            [{"a": ((3,), (0,), (3,))}],
            {"a": ((2,), (0,), (2,))},
            PlanError,
            r"'a' is \(3,\) on rank 0 and \(2,\) in the target",
        ),
        (
            [{"a": ((6,), (0,), (2,))}, {"a": ((6,), (4,), (2,))}],
            {"a": ((6,), (0,), (6,))},
            PlanError,
            "no rank holds 2 of 6 elements of 'a' that reader 0 wants",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(sources, target, kind, message):
    with pytest.raises(kind, match=message):
        plan_sync([manifest(**s) for s in sources], manifest(**target), bucket_bytes=64)


def test_only_floats_are_converted():
    ints = describe({"a": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(PlanError, match="int32 on rank 0 and torch.float32 in the target"):
        plan_sync([ints], describe({"a": torch.zeros(4)}), bucket_bytes=64)


def test_a_tiny_bucket_is_refused():
    a = describe({"a": torch.zeros(4)})
    with pytest.raises(PlanError, match="bucket_bytes is 63"):
        plan_sync([a], a, bucket_bytes=63)


@given(layouts(), st.sampled_from([64, 100, 1000]))
def test_every_wanted_element_is_in_one_bucket_for_all_who_want_it(pair, bucket_bytes):
    sources, targets = pair
    if not sum(elements(target) for target in targets):
        with pytest.raises(PlanError, match="nothing to plan"):
            plan_sync(sources, targets, bucket_bytes=bucket_bytes)
        return
    plan = plan_sync(sources, targets, bucket_bytes=bucket_bytes)
    written = {
        name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in plan.target.items()
    }
    arrived = [
        {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in target.items()}
        for target in targets
    ]
    for bucket in plan.buckets:
        assert 0 < bucket.bytes <= bucket_bytes
        end = 0
        for copy in bucket.copies:
            copy.box.within(sources[bucket.rank][copy.name].layout.shard)  # The writer holds it.
            size = plan.target[copy.name].dtype.itemsize
            assert (copy.offset, copy.bytes) == (end, copy.box.numel * size)
            assert copy.offset % size == 0
            end += copy.bytes
            written[copy.name][copy.box.slices] += 1
            for reader in bucket.readers:
                arrived[reader][copy.name][copy.box.slices] += 1
    size = 0
    for name, counts in written.items():
        assert counts.le(1).all()
        size += int(counts.sum()) * plan.target[name].dtype.itemsize
    for reader, (target, counts) in enumerate(zip(targets, arrived, strict=True)):
        for name, spec in target.items():
            wanted = torch.zeros(spec.shape, dtype=torch.int64)
            wanted[spec.layout.shard.slices] = 1
            assert counts[name].equal(wanted)
        wants = [spec.layout.shard.numel * spec.dtype.itemsize for spec in target.values()]
        assert plan.read_bytes(reader) == sum(wants)
    assert plan.bytes_total == plan.lower_bound_bytes == size
    assert plan.bytes_total == sum(plan.written_bytes(rank) for rank in range(len(sources)))
    end = 0
    starts = [(plan.offsets[name], counts.numel(), name) for name, counts in written.items()]
    for start, numel, name in sorted(starts):
        assert start == end
        assert start % plan.target[name].dtype.itemsize == 0
        end += numel * plan.target[name].dtype.itemsize
    assert end == plan.blob_bytes
    again = Plan.from_json(plan.to_json())
    assert (again, again.fingerprint()) == (plan, plan.fingerprint())
    assert f"{size:,}" in plan.table()


@given(layouts(), st.sampled_from([64, 100]))
def test_no_rank_has_two_messages_in_a_round(pair, bucket_bytes):
    sources, targets = pair
    if not sum(elements(target) for target in targets):
        return
    plan = plan_sync(sources, targets, bucket_bytes=bucket_bytes)
    rounds = Rounds.of(plan)
    sent = {rank: [(m.bucket, m.reader) for m in row] for rank, row in rounds.by_rank.items()}
    read = {reader: [m.bucket for m in row] for reader, row in rounds.by_reader.items()}
    for rank, row in sent.items():
        wanted = [(i, r) for i in plan.of_rank(rank) for r in plan.buckets[i].readers]
        assert sorted(row) == sorted(wanted)
    for reader, row in read.items():
        assert sorted(row) == list(plan.of_reader(reader))
    rows = [*rounds.by_rank.values(), *rounds.by_reader.values()]
    for row in rows:
        turns = [message.round for message in row]
        assert turns == sorted(set(turns))
    most = [max(len(row) for row in side.values()) for side in (rounds.by_rank, rounds.by_reader)]
    last = max(message.round for row in rows for message in row)
    assert max(most) <= last + 1 < sum(most)


def test_readers_that_want_the_same_share_a_bucket():
    whole = describe({"w": torch.zeros(8, 4)})
    halves = [manifest(w=((8, 4), (0, col), (8, 2))) for col in (0, 2)]
    plan = plan_sync([whole], [whole, *halves, halves[0]], bucket_bytes=1024)
    assert sorted(bucket.readers for bucket in plan.buckets) == [(0, 1, 3), (0, 2)]
    assert plan.bytes_total == 128
    assert [plan.read_bytes(reader) for reader in range(4)] == [128, 64, 64, 64]


def test_links_and_memory_by_hand():
    trainer = [manifest(w=((8, 4), (row, 0), (4, 4))) for row in (0, 4)]
    engine = [manifest(w=((8, 4), (0, col), (8, 2))) for col in (0, 2)]
    plan = plan_sync(trainer, engine, bucket_bytes=64)
    assert sorted((b.rank, *b.readers, b.bytes) for b in plan.buckets) == [
        (s, r, 32) for s in (0, 1) for r in (0, 1)
    ]
    assert [plan.written_bytes(rank) for rank in (0, 1)] == [64, 64]
    assert [plan.writer_peak_bytes(rank) for rank in (0, 1)] == [64, 64]
    assert [plan.reader_peak_bytes(reader) for reader in (0, 1)] == [128 + 64, 128 + 64]
    rows = [row.split() for row in plan.table().splitlines()]
    assert rows[1] == ["rank", "0", "2", "2", "2", "64", "64"]
    assert rows[4] == ["reader", "1", "2", "2", "2", "64", "192"]
    assert rows[5] == ["written", "4", "4", "4", "128"]
    one = plan_sync(trainer[:1], [trainer[0]], bucket_bytes=64)
    assert (one.writer_peak_bytes(0), one.reader_peak_bytes(0)) == (64, 128 + 64)


def test_the_estimate_is_the_busiest_rank_at_line_rate():
    trainer = [manifest(w=((8, 4), (row, 0), (4, 4))) for row in (0, 4)]
    plan = plan_sync(trainer, [trainer[0].whole()] * 3, bucket_bytes=64)
    full = estimate(plan, gbit_per_s=8e-6)
    assert (full.bytes_total, full.busiest_bytes, full.seconds) == (384, 192, 192 / 1000)
    delta = estimate(plan, gbit_per_s=8e-6, sent_fraction=0.25)
    assert (delta.bytes_total, delta.busiest_bytes, delta.seconds) == (96, 48, 48 / 1000)


def test_readers_that_disagree_are_refused():
    a = describe({"a": torch.zeros(4)})
    with pytest.raises(PlanError, match="'a' is torch.* on one rank or reader, and torch.float32"):
        plan_sync([a], [a, a.whole(dtype=torch.bfloat16)], bucket_bytes=64)
    other = Manifest(a.tensors, recipe="e4m3")
    with pytest.raises(PlanError, match="readers have different recipes"):
        plan_sync([a], [a, other], bucket_bytes=64)
    with pytest.raises(PlanError, match="encodes with recipe '', but readers expect 'e4m3'"):
        plan_sync([a], other, bucket_bytes=64)
