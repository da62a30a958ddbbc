"""Bytes that change on their way, over every transport: refused by all, the old version served."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from primeblocks.testing import ranks
from primeblocks.weightsync.held import Blob, packed_views
from primeblocks.weightsync.transports import group_wire
from tests.deadlines import HANG_S
from tests.weightsync.contents import KINDS, PACKED, as_written
from tests.weightsync.small_sync import PULL, RANKS, Small

ranks.preload(__name__)  # With all that it imports.

CULPRIT = 1  # The trainer rank whose bytes are damaged.
FAULTS = ("first byte", "last byte", "reordered", "duplicated", "truncated")


def pair_of(plan):
    """Two buckets of the culprit that only differ in what is in them."""
    mine = plan.of_rank(CULPRIT)
    alike = lambda i, j: plan.buckets[i].bytes == plan.buckets[j].bytes  # noqa: E731
    same = lambda i, j: plan.buckets[i].readers == plan.buckets[j].readers  # noqa: E731
    return next((i, j) for i in mine for j in mine if i < j and alike(i, j) and same(i, j))


def damaged(fault, first, second):
    """Two messages as they arrive."""
    if fault in ("reordered", "duplicated"):
        return second, second if fault == "duplicated" else first
    changed = first.clone()
    changed[0 if fault == "first byte" else -1] ^= 4
    return changed, second


def damage_file(path, transport, plan, fault, *, sizes):
    """A whole version where it lies, or rank 1's part of a delta, of buckets of `sizes`."""
    if path.is_symlink():
        content = as_written(transport, path, 2)
    else:
        content = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    if fault == "truncated":
        content = content[:-1]
    elif path.suffix == ".delta":
        starts = dict(zip(plan.of_rank(CULPRIT), [0, *np.cumsum(sizes)], strict=False))
        first, second = (content[starts[i] :][: plan.buckets[i].bytes] for i in pair_of(plan))
        after = damaged(fault, first.clone(), second.clone())
        first.copy_(after[0])
        second.copy_(after[1])
    else:
        blob = Blob(plan, content[len(content) - plan.blob_bytes :])
        pair = pair_of(plan)
        before = [
            torch.cat([view.reshape(-1).view(torch.uint8) for view in blob.views(index)])
            for index in pair
        ]
        for index, message in zip(pair, damaged(fault, *before), strict=True):
            views = zip(blob.views(index), packed_views(plan, index, message), strict=True)
            for view, piece in views:
                view.copy_(piece)
    if not path.is_symlink():
        content.numpy().tofile(path)


@contextmanager
def damaged_messages(plan, fault):
    """What this rank sends over a group."""
    inner, (first, second) = group_wire._fill, pair_of(plan)

    def fill(outgoing, index, buffer):
        if index not in (first, second) or dist.get_rank() != CULPRIT:
            return inner(outgoing, index, buffer)
        if fault == "truncated":
            return inner(outgoing, index, buffer)[:-1]
        pair = [inner(outgoing, i, torch.empty_like(buffer)).clone() for i in (first, second)]
        message = damaged(fault, *pair)[index == second]
        return buffer[: len(message)].copy_(message)

    group_wire._fill = fill
    yield
    group_wire._fill = inner


def damage_body(kind, where, cases):
    for number, case in enumerate(cases):
        one_damage(kind, f"{where}/{number}", *case)
        dist.barrier()


def one_damage(kind, where, fault, full_every):
    small = Small(kind, where, full_every=full_every)
    small.sync(1)
    if kind in PULL:
        pull_damaged(small, where, fault)
    else:
        with damaged_messages(small.plan, fault):
            said = small.attempt(2, timeout_s=HANG_S)
        assert "fails its digest" in said
        assert small.is_refused()
        assert small.holds(1)
        assert not small.is_engine or (small.engine.loads, small.side.subscriber.version) == (1, 1)
    dist.barrier()
    small.renew()
    # Files that are damaged are not noticed by who wrote them: the next version mends it.
    retry = 3 if kind in PULL else 2
    small.sync(retry)
    assert small.holds(retry)
    dist.barrier()
    small.transport.close()


def pull_damaged(small, where, fault):
    if not small.is_engine:
        small.sync(2)
    dist.barrier()
    marker = small.transport.markers()[-1]
    if small.rank == CULPRIT:
        name = "version-2.safetensors" if marker.base is None else f"version-2.{CULPRIT}.delta"
        (path,) = Path(where).rglob(name)
        sizes = [marker.sizes[index] for index in small.plan.of_rank(CULPRIT)]
        damage_file(path, small.transport, small.plan, fault, sizes=sizes)
    dist.barrier()
    if small.is_engine:
        said = small.attempt(None, timeout_s=HANG_S)
        last = small.plan.of_rank(CULPRIT)[-1]
        hit = [last] if fault == "truncated" else pair_of(small.plan)
        reads = any(small.side.reader in small.plan.buckets[index].readers for index in hit)
        if reads or (fault == "truncated" and marker.base is None):
            assert said.startswith("CorruptionError: ")
            words = "fails its digest", "were sent", "must have at least"
            assert any(word in said for word in words), said
        else:
            assert said == ""  # It reads none of that.
        assert small.holds(1 if said else 2)
        assert small.side.subscriber.version == (1 if said else 2)
    dist.barrier()


# The other transports have no files of weights.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PACKED])
def test_damage_is_refused_and_the_old_version_is_served(kind, tmp_path):
    cases = [(fault, full_every) for full_every in (1, 4) for fault in FAULTS]
    if kind == "shared_memory":
        cases.remove(("truncated", 1))  # Sealed memory keeps its size.
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
    ranks.run(damage_body, kind, str(tmp_path), cases, world_size=RANKS)
