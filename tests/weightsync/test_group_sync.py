import random
import sys
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import TransferError
from primeblocks.layout import Layout
from primeblocks.testing import ranks
from primeblocks.weightsync import Manifest, TensorSpec
from primeblocks.weightsync.group import GroupSync
from primeblocks.weightsync.links import plan_links
from primeblocks.weightsync.reference import gather_whole, slice_again
from tests.weightsync.link_layouts import elements, manifest, random_layouts

ranks.preload(__name__)  # With all that it imports.

# Stores look at their files or sockets at intervals: a deadline is met within so much.
SLACK_S = 1.5


class Engine:
    """A load callable that keeps what it got, and counts."""

    def __init__(self):
        self.tensors, self.loads = {}, 0

    def __call__(self, tensors):
        self.tensors = {name: tensor.clone() for name, tensor in tensors}
        self.loads += 1


def same_bytes(have, want):
    return list(have) == list(want) and all(
        have[name].dtype == want[name].dtype
        and have[name].shape == want[name].shape
        and have[name]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(want[name].contiguous().view(-1).view(torch.uint8))
        for name in want
    )


def random_tensor(dtype, shape, generator):
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    limit = 127  # No NaN of float8: equal bits are compared anyway.
    raw = torch.randint(0, limit, shape, generator=generator)
    return raw.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else raw.to(dtype)


def contents(sources, seed):
    """Local parts of every source rank, cut from the same whole tensors."""
    generator = torch.Generator().manual_seed(seed)
    whole = {}
    for source in sources:
        for name, spec in source.items():
            if name not in whole:
                whole[name] = random_tensor(spec.dtype, spec.shape, generator)
    return [slice_again(whole, source) for source in sources]


def oracle(sources, parts, target):
    whole = Manifest(
        tuple((name, TensorSpec(s.dtype, Layout.whole(s.shape))) for name, s in target.items())
    )
    return slice_again(gather_whole(sources, parts, whole), target)


def sync_of(plan, store, *, parts, engine):
    if dist.get_rank() < len(plan.sources):
        return GroupSync(plan, store=store, parameters=parts[dist.get_rank()])
    return GroupSync(plan, store=store, load=engine)


@contextmanager
def allocations():
    """The bytes of each tensor that torch.empty makes."""
    inner, sizes = torch.empty, []

    def empty(*args, **kwargs):
        tensor = inner(*args, **kwargs)
        sizes.append(tensor.numel() * tensor.itemsize)
        return tensor

    torch.empty = empty
    yield sizes
    torch.empty = inner


def random_body(path, seeds, senders, receivers):
    store, rank = dist.FileStore(path), dist.get_rank()
    checked = 0
    for seed in seeds:
        sources, targets = random_layouts(seed, senders=senders, receivers=receivers)
        if not sum(elements(target) for target in targets):
            continue
        plan = plan_links(
            sources, targets, bucket_bytes=random.Random(seed).choice([64, 200, 4096])
        )
        parts, engine = contents(sources, seed), Engine()
        sync = sync_of(plan, store, parts=parts, engine=engine)
        with allocations() as sizes:
            receipt = sync.sync(seed, timeout_s=30)
        assert sum(sizes) == plan.peak_extra_bytes(rank)
        assert receipt.version == seed
        assert receipt.bytes == plan.bytes_by_rank[rank]
        if rank >= senders:
            target = targets[rank - senders]
            assert receipt.bytes == sum(t.numel() * t.itemsize for t in engine.tensors.values())
            assert same_bytes(engine.tensors, oracle(sources, parts, target)), seed
        checked += 1
    return checked


@pytest.mark.timeout(900)
def test_random_layouts_arrive_as_if_gathered_and_sliced(full, tmp_path):
    sides = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 1)]
    each = -(-(500 if full else 48) // len(sides))
    checked = 0
    for i, (senders, receivers) in enumerate(sides):
        seeds = list(range(i * each, (i + 1) * each))
        args = (str(tmp_path / f"store{i}"), seeds, senders, receivers)
        checked += ranks.run(random_body, *args, world_size=senders + receivers, timeout_s=200)[0]
    assert checked >= (500 if full else 48) * 0.8


# Two trainer ranks with rows, two engine ranks with columns, and a vector that all hold.


def small_plan():
    def side(cut_dim, dtype):
        def part(rank):
            offsets, sizes = [0, 0], [8, 24]
            sizes[cut_dim] //= 2
            offsets[cut_dim] = rank * sizes[cut_dim]
            return dtype, (8, 24), tuple(offsets), tuple(sizes)

        return [manifest({"w": part(r), "v": (dtype, (5,), (0,), (5,))}) for r in (0, 1)]

    return plan_links(side(0, torch.float32), side(1, torch.bfloat16), bucket_bytes=64)


class Small:
    """One rank of the small plan: a GroupSync, and what it and its engine should hold."""

    def __init__(self, store, *, load=None):
        self.plan, self.rank, self.engine = small_plan(), dist.get_rank(), Engine()
        self.is_engine = self.rank >= 2
        self.parameters = contents(self.plan.sources, 0)[self.rank % 2]
        if self.is_engine:
            self.sync_ = GroupSync(self.plan, store=store, load=load or self.engine)
        else:
            self.sync_ = GroupSync(self.plan, store=store, parameters=self.parameters)

    def sync(self, version, *, timeout_s=30.0):
        for name, tensor in contents(self.plan.sources, version)[self.rank % 2].items():
            self.parameters[name].copy_(tensor)  # As an optimizer does.
        return self.sync_.sync(version, timeout_s=timeout_s)

    def holds(self, version):
        parts = contents(self.plan.sources, version)
        target = self.plan.targets[self.rank - 2]
        return same_bytes(self.engine.tensors, oracle(self.plan.sources, parts, target))

    def attempt(self, version, *, timeout_s):
        """What sync raised, or ""; and that it ended in time."""
        start = time.monotonic()
        try:
            self.sync(version, timeout_s=timeout_s)
        except TransferError as error:
            return str(error)
        finally:
            assert time.monotonic() - start < timeout_s + SLACK_S
        return ""

    def is_refused(self):
        """Whether the group is declared broken, at once."""
        start = time.monotonic()
        with pytest.raises(TransferError, match="Make a new group and a new GroupSync"):
            self.sync(99)
        return time.monotonic() - start < 0.5


def kill_body(where, version, victim, point):
    """Bring all to `version`, which a killed gang may have tried; go on to the next and die."""
    store = dist.FileStore(where) if isinstance(where, str) else dist.TCPStore(*where)
    member = Small(store)
    member.sync(version)
    with Lines() as lines:
        member.sync(version)  # Again: now what a plan computes once is there.
    assert not member.is_engine or member.holds(version)
    if member.rank == victim:
        ranks.tell("ready")
    last = lines.count + point if point < 0 else max(1, int(lines.count * point))
    with Lines(last=last if member.rank == victim else None):
        text = member.attempt(version + 1, timeout_s=0.5)
    if text:
        assert member.is_refused()
    if member.is_engine:
        assert member.holds(version) is bool(text)
        assert member.holds(version + 1) is not bool(text)
    return not text


class Lines:
    """Counts the lines of the block that this rank runs, and dies at one of them."""

    def __init__(self, *, last=None):
        self.count, self._last = 0, last

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _enter(self, frame, event, arg):
        return self._line if "primeblocks/weightsync" in frame.f_code.co_filename else None

    def _line(self, frame, event, arg):
        self.count += 1
        if self.count == self._last:
            ranks.kill(dist.get_rank())
        return self._line


def survivors_agree(results):
    """All committed, or none; which of them."""
    said = {result for result in results if result is not None}
    assert len(said) == 1, results
    return said.pop()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_killed_at_any_line_leaves_one_version_and_a_retry_works(kind, full, tmp_path, host):
    rng = random.Random(kind)
    where = str(tmp_path / "store") if kind == "file" else host
    cases = 350 if full else 10
    killed = committed = 0
    for version in range(cases):
        # Every second time among the last lines: from the vote to the end.
        victim, point = rng.randrange(4), -rng.randrange(25) if version % 2 else rng.random()
        results = ranks.run(kill_body, where, version, victim, point, world_size=4)
        killed += results[victim] is None
        committed += survivors_agree(results)
    # A slow rank may have made the others give up before the victim came to its line.
    assert killed > 0.6 * cases
    assert 0 < committed < cases


@pytest.mark.timeout(3600)
def test_a_rank_killed_at_any_time_leaves_one_version_and_a_retry_works(full, host):
    rng = random.Random(6)
    for version in range(300 if full else 10):
        victim = rng.randrange(4)
        args = (host, version, victim, 1e9)  # Beyond its last line: it does not kill itself.
        with ranks.gang(kill_body, *args, world_size=4) as members:
            assert members.hear(victim) == "ready"
            time.sleep(rng.uniform(0, 0.03))
            members.kill(victim)
            survivors_agree(members.wait())
