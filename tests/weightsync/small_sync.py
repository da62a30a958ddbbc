"""A small sync over any transport: two trainer ranks with rows, two readers with columns."""

import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PrimeblocksError, TransferError
from primeblocks.weightsync import plan_sync
from tests.deadlines import HANG_S
from tests.weightsync.contents import KINDS, Side, contents, oracle, same_bytes, transport_of
from tests.weightsync.link_layouts import manifest

TRAINERS, RANKS = 2, 4
# For a loaded machine. What does not keep to its deadline waits for ever.
# Readers of these come and go as they like.
PULL = tuple(kind for kind in KINDS if kind != "group")


def small_sides():
    """Manifests of the trainer ranks and of the readers; all hold the vector and the counts."""

    def side(cut_dim, dtype):
        def part(rank):
            offsets, sizes = [0, 0], [8, 24]
            sizes[cut_dim] //= 2
            offsets[cut_dim] = rank * sizes[cut_dim]
            return dtype, (8, 24), tuple(offsets), tuple(sizes)

        vector, counts = (dtype, (5,), (0,), (5,)), (torch.int64, (3,), (0,), (3,))
        return [manifest({"w": part(r), "v": vector, "n": counts}) for r in (0, 1)]

    return side(0, torch.float32), side(1, torch.bfloat16)


@contextmanager
def expiring(place, name, seconds=0.3):
    """Let the deadline of a call pass soon after the call, however long the machine took before."""
    inner = getattr(place, name)

    def soon(*args, deadline):
        return inner(*args, deadline=min(deadline, time.monotonic() + seconds))

    setattr(place, name, soon)
    yield
    setattr(place, name, inner)


class Small:
    """This rank of the small sync, and what its engine should hold. Constructing is collective."""

    def __init__(self, kind, where, *, bucket_bytes=64, wrap=None, sparse=False, **options):
        self.kind, self.where, self.options = kind, where, options
        self.sparse = sparse
        self.sources, self.targets = small_sides()
        self.plan = plan_sync(self.sources, self.targets, bucket_bytes=bucket_bytes)
        self.rank = dist.get_rank()
        self.is_engine = self.rank >= TRAINERS
        self.parameters = None if self.is_engine else contents(self.sources, 0)[self.rank]
        if kind in PULL:
            self.transport = transport_of(kind, where, self.plan)
            self.join(wrap)
        else:
            self.renew(wrap)

    def join(self, wrap=None, *, load=None):
        """A new Publisher or Subscriber on the same transport."""
        transport = self.transport if wrap is None else wrap(self.transport)
        load = load or (self.side.engine if hasattr(self, "side") else None)
        if self.is_engine:
            self.side = Side(self.plan, transport, None, load=load)
            self.side.engine = load or self.side.engine
        else:
            mine = {"source": self.sources[self.rank], **self.options}
            self.side = Side(self.plan, transport, self.parameters, **mine)
        self.engine = self.side.engine

    def renew(self, wrap=None):
        """What an error tells to do: new transports, where ranks are tied."""
        if self.kind not in PULL:
            self.transport = transport_of(self.kind, self.where, self.plan)
        self.join(wrap)

    def contents(self, version):
        if self.sparse:
            return contents(self.sources, 0, sparse=version)
        return contents(self.sources, version)

    def set(self, version):
        for name, tensor in self.contents(version)[self.rank].items():
            self.parameters[name].copy_(tensor)  # As an optimizer does.

    def sync(self, version, *, timeout_s=HANG_S):
        if not self.is_engine:
            self.set(version)
        return self.side.sync(version, timeout_s=timeout_s)

    def attempt(self, version, *, timeout_s, errors=PrimeblocksError):
        """What sync raised, or ""; and that it ended in time."""
        start = time.monotonic()
        try:
            self.sync(version, timeout_s=timeout_s)
        except errors as error:
            return f"{type(error).__name__}: {error}"
        finally:
            assert time.monotonic() - start < timeout_s + HANG_S
        return ""

    def holds(self, version):
        if not self.is_engine:
            return True
        target = self.targets[self.side.reader]
        wanted = oracle(self.sources, self.contents(version), target)
        return same_bytes(self.engine.tensors, wanted)

    def is_refused(self):
        """Whether the group is declared broken, before anything is tried."""
        with pytest.raises(TransferError, match=r"[Mm]ake new transports") as met:
            self.sync(99)
        return "failed earlier" in str(met.value)
