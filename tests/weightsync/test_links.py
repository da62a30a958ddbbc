import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primeblocks.errors import PlanError
from primeblocks.weightsync.link_plan import DIGEST_BYTES, estimate
from primeblocks.weightsync.links import plan_links
from primeblocks.weightsync.manifest import describe
from tests.weightsync.link_layouts import elements, layouts, manifest

ROWS = {"a": ((6,), (0,), (2,))}


def float32(**boxes):
    return manifest({name: (torch.float32, *box) for name, box in boxes.items()})


@settings(max_examples=150)
@given(layouts(), st.sampled_from([64, 100, 1000]))
def test_every_wanted_element_comes_once_from_a_rank_that_holds_it(pair, bucket_bytes):
    sources, targets = pair
    if not sum(elements(target) for target in targets):
        with pytest.raises(PlanError, match="nothing to plan"):
            plan_links(sources, targets, bucket_bytes=bucket_bytes)
        return
    plan = plan_links(sources, targets, bucket_bytes=bucket_bytes)
    arrived = [
        {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in target.items()}
        for target in targets
    ]
    for bucket in plan.buckets:
        assert 0 < bucket.bytes <= bucket_bytes - DIGEST_BYTES
        receiver, end = bucket.receiver - len(sources), 0
        for copy in bucket.copies:
            spec = targets[receiver][copy.name]
            copy.box.within(sources[bucket.sender][copy.name].layout.shard)  # The sender holds it.
            assert copy.bytes == copy.box.numel * spec.dtype.itemsize
            assert copy.offset == end
            assert copy.offset % spec.dtype.itemsize == 0
            end += copy.bytes
            arrived[receiver][copy.name][copy.box.slices] += 1
    for target, counts in zip(targets, arrived, strict=True):
        for name, spec in target.items():
            wanted = torch.zeros(spec.shape, dtype=torch.int64)
            wanted[spec.layout.shard.slices] = 1
            assert counts[name].equal(wanted)
    assert plan.bytes_total == plan.lower_bound_bytes == sum(plan.bytes_by_link.values())


@settings(max_examples=150)
@given(layouts(), st.sampled_from([64, 100]))
def test_no_rank_has_two_buckets_in_a_round(pair, bucket_bytes):
    sources, targets = pair
    if not sum(elements(target) for target in targets):
        return
    plan = plan_links(sources, targets, bucket_bytes=bucket_bytes)
    busy = [(rank, b.round) for b in plan.buckets for rank in (b.sender, b.receiver)]
    assert len(set(busy)) == len(busy)
    most = [max(len(plan.of_rank(r)) for r in range(*side)) for side in sides(plan)]
    assert max(most) <= plan.rounds < sum(most)
    for rank in range(plan.world_size):
        rounds = [bucket.round for bucket in plan.of_rank(rank)]
        assert rounds == sorted(rounds)


def sides(plan):
    return (0, len(plan.sources)), (len(plan.sources), plan.world_size)


def test_replicas_are_shared_out_evenly_and_fill_up_ranks_with_less_of_their_own():
    replicated = describe({f"w{i}": torch.zeros(12) for i in range(9)})
    plan = plan_links([replicated] * 3, [replicated] * 2, bucket_bytes=64)
    assert plan.bytes_by_rank == (288, 288, 288, 432, 432)
    own = float32(a=((4, 32), (0, 0), (4, 32)), r=((8, 12), (0, 0), (8, 12)))
    other = float32(r=((8, 12), (0, 0), (8, 12)))
    plan = plan_links([own, other], [own], bucket_bytes=64)
    assert plan.max_sent_bytes - min(plan.bytes_by_rank) == 512 - 384


def test_the_largest_boxes_are_dealt_out_first_and_after_those_with_one_holder():
    small, large = ((4,), (0,), (4,)), ((8,), (0,), (8,))
    replicated = float32(a=small, b=small, c=large)
    plan = plan_links([replicated] * 2, [replicated], bucket_bytes=64)
    assert plan.bytes_by_rank == (32, 32, 64)
    own = float32(a=small, z=small)
    plan = plan_links([own, float32(a=small)], [own], bucket_bytes=64)
    assert plan.bytes_by_rank == (16, 16, 32)


def test_figures_by_hand():
    trainer = [float32(w=((8, 4), (row, 0), (4, 4))) for row in (0, 4)]
    engine = [float32(w=((8, 4), (0, col), (8, 2))) for col in (0, 2)]
    plan = plan_links(trainer, engine, bucket_bytes=64)
    assert plan.bytes_by_link == {(s, r): 32 for s in (0, 1) for r in (2, 3)}
    assert plan.bytes_by_rank == (64, 64, 64, 64)
    assert (plan.rounds, plan.max_sent_bytes, plan.max_received_bytes) == (2, 64, 64)
    assert [plan.peak_extra_bytes(rank) for rank in (0, 2)] == [2 * 48, 64 + 2 * 48]
    assert "4 links, 4 buckets, 2 rounds, 128 bytes; lower bound 128 bytes" in plan.table()


def test_the_estimate_is_the_busiest_rank_at_line_rate():
    trainer = [float32(w=((8, 4), (row, 0), (4, 4))) for row in (0, 4)]
    plan = plan_links(trainer, [trainer[0].whole()] * 3, bucket_bytes=64)
    full = estimate(plan, gbit_per_s=8e-6)
    assert (full.bytes_total, full.busiest_bytes, full.seconds) == (384, 192, 192 / 1000)
    delta = estimate(plan, gbit_per_s=8e-6, sent_fraction=0.25)
    assert (delta.bytes_total, delta.busiest_bytes, delta.seconds) == (96, 48, 48 / 1000)


def moe(layers, experts, hidden, trainer, engines, engine_size):
    """FSDP over expert shards; engines with experts dealt out and attention cut by column."""

    def rows(start, size):
        return ((experts, hidden, hidden), (start, 0, 0), (size, hidden, hidden))

    sources = [
        manifest(
            {
                f"{i}.{name}": (torch.float32, *box)
                for i in range(layers)
                for name, box in {
                    "experts": rows(rank * experts // trainer, experts // trainer),
                    "qkv": (
                        (hidden, hidden),
                        (rank * hidden // trainer, 0),
                        (hidden // trainer, hidden),
                    ),
                    "norm": ((hidden,), (0,), (hidden,)),
                }.items()
            }
        )
        for rank in range(trainer)
    ]
    part = hidden // engine_size
    targets = [
        manifest(
            {
                f"{i}.{name}": (torch.bfloat16, *box)
                for i in range(layers)
                for name, box in {
                    "experts": rows(rank * experts // engine_size, experts // engine_size),
                    "qkv": ((hidden, hidden), (0, rank * part), (hidden, part)),
                    "norm": ((hidden,), (0,), (hidden,)),
                }.items()
            }
        )
        for _ in range(engines)
        for rank in range(engine_size)
    ]
    return sources, targets


def test_a_mixture_of_experts_loads_its_ranks_evenly():
    plan = plan_links(*moe(4, 32, 32, 16, engines=2, engine_size=4), bucket_bytes=4096)
    even = plan.bytes_total / 16
    assert plan.bytes_total == plan.lower_bound_bytes
    assert plan.max_sent_bytes < 1.02 * even
    assert plan.max_received_bytes == plan.bytes_total / 8
    most = max(len(plan.of_rank(rank)) for rank in range(plan.world_size))
    assert plan.rounds <= 1.5 * most


def test_a_plan_depends_on_every_input():
    a, b = describe({"w": torch.zeros(64)}), describe({"w": torch.zeros(64), "x": torch.zeros(1)})
    plans = [
        plan_links([a], [a], bucket_bytes=64),
        plan_links([a], [a], bucket_bytes=128),
        plan_links([a], [a.whole(dtype=torch.bfloat16)], bucket_bytes=64),
        plan_links([a, a], [a], bucket_bytes=64),
        plan_links([a], [a, a], bucket_bytes=64),
        plan_links([b], [a], bucket_bytes=64),
    ]
    assert len({plan.fingerprint() for plan in plans}) == 6
    assert plans[0].fingerprint() == plan_links([a], [a], bucket_bytes=64).fingerprint()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([], [ROWS], "nothing to plan: 0 sources, 1 targets"),
        ([ROWS], [], "nothing to plan: 1 sources, 0 targets"),
        (
            [{"b": ROWS["a"]}],
            [ROWS],
            "no trainer rank holds 1 of 1 names that engines want: a. "
            "The trainer has 1 names, such as b",
        ),
        ([{"a": ((3,), (0,), (3,))}], [ROWS], r"'a' is \(3,\) on rank 0 and \(6,\) in the target"),
        (
            [ROWS, {"a": ((6,), (4,), (2,))}],
            [ROWS, {"a": ((6,), (1,), (4,))}],
            "no trainer rank holds 2 of the 4 elements of 'a' that engine rank 1 wants",
        ),
        (
            [{"a": ((6,), (0,), (6,))}],
            [ROWS, {"a": ((7,), (0,), (2,))}],
            "engine ranks disagree about the global shape of 'a'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(sources, targets, message):
    with pytest.raises(PlanError, match=message):
        plan_links(
            [float32(**s) for s in sources], [float32(**t) for t in targets], bucket_bytes=64
        )


def test_only_floats_are_converted():
    ints = describe({"a": torch.zeros(4, dtype=torch.int32)})
    with pytest.raises(PlanError, match=r"int32 on rank 0 and torch.float32 in the target"):
        plan_links([ints], [describe({"a": torch.zeros(4)})], bucket_bytes=64)


def test_a_tiny_bucket_is_refused():
    a = describe({"a": torch.zeros(4)})
    with pytest.raises(PlanError, match="bucket_bytes is 63"):
        plan_links([a], [a], bucket_bytes=63)


def test_elements_that_no_engine_wants_may_be_on_no_trainer_rank():
    half = float32(a=((6,), (0,), (3,)))
    assert plan_links([half], [half], bucket_bytes=64).bytes_total == 12
