"""What a trainer rank and the engine do on each rung of the ladder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from primeblocks.layout import Layout, Shard
from primeblocks.weightsync.manifest import Manifest, TensorSpec, gather_manifests

from .model import tensors
from .sides import digest

__all__ = ["LadderEngine", "Rank", "Rungs"]

BUCKET_BYTES = 32 << 20
# All experts of four layers, 1572 tensors, matrices a tenth of the size: 0.5 GB.
EXPERTS, SHRINK = 128, 0.1


@dataclass(frozen=True)
class Rungs:
    """What is switched on."""

    handles: bool = False
    async_gather: bool = False
    buckets: bool = False
    flatten: bool = False
    cached_maps: bool = False
    kept_segments: bool = False


class Row(NamedTuple):
    """A tensor, and where it starts in its segment."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + 2 * prod(self.shape)

    def view(self, segment: Tensor) -> Tensor:
        return segment[self.offset : self.end].view(torch.bfloat16).view(self.shape)


class Part(NamedTuple):
    """A segment by name or by value, and what lies in it; no rows where the engine knows."""

    key: tuple[int, ...]
    segment: str | bytes
    rows: tuple[Row, ...] | None


class Rank:
    """One of two trainer ranks; it holds the first or the second half of every tensor's rows."""

    def __init__(
        self, rank: int, store: str, prefix: str, scale: float, pipe: Connection | None
    ) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        self.rank, self.prefix, self.pipe = rank, prefix, pipe
        self.whole = tensors(SHRINK * scale, experts=EXPERTS)
        self.shards = {name: whole.chunk(2)[rank].clone() for name, whole in self.whole.items()}
        self.version = 0
        self.maps: list[list[Row]] | None = None
        # Kept on every rung, as CUDA's allocator keeps memory: one bucket's worth.
        self.segments: dict[tuple[int, int], tuple[str, Tensor]] = {}
        self.known: set[tuple[int, ...]] = set()

    def change(self) -> str:
        """Another version of every tensor. Returns the digest of the whole ones."""
        self.version += 1
        for name, whole in self.whole.items():
            whole.view(-1)[self.version % whole.numel()] = self.version
            self.shards[name].copy_(whole.chunk(2)[self.rank])
        return digest(self.whole)

    def sync(self, rungs: Rungs) -> float:
        """Gather, hand over, wait for the engine, bucket by bucket. Collective. Seconds."""
        dist.barrier()
        start = time.perf_counter()
        if self.maps is None or not rungs.cached_maps:
            self.maps = self._maps()
        for index, rows in enumerate(self.maps):
            parts = list(self._parts(index, rows, flatten=rungs.flatten))
            self._gather(parts, in_flight=rungs.async_gather)
            if self.pipe is not None:
                messages = [parts] if rungs.buckets else [[part] for part in parts]
                for message in messages:
                    self.pipe.send((rungs, [self._part(*part, rungs) for part in message]))
                    self.pipe.recv()
        if self.pipe is not None:
            self.pipe.send(None)
        return time.perf_counter() - start

    def close(self) -> None:
        for name, _ in self.segments.values():
            Path(name).unlink(missing_ok=True)
        dist.destroy_process_group()

    def _maps(self) -> list[list[Row]]:
        """Every rank says what it holds; the tensors are dealt into buckets."""
        held = [
            (name, TensorSpec(torch.bfloat16, _half(tuple(whole.shape), self.rank)))
            for name, whole in self.whole.items()
        ]
        first, second = gather_manifests(Manifest(tuple(held)))
        maps: list[list[Row]] = []
        end = BUCKET_BYTES
        for name, spec in first.items():
            boxes = spec.layout.shard, second[name].layout.shard
            assert sum(box.numel for box in boxes) == prod(spec.shape)
            if end + 2 * prod(spec.shape) > BUCKET_BYTES:
                maps.append([])
                end = 0
            maps[-1].append(Row(name, spec.shape, end))
            end = maps[-1][-1].end
        return maps

    def _parts(
        self, index: int, rows: list[Row], *, flatten: bool
    ) -> Iterator[tuple[tuple[int, ...], str, Tensor, list[Row]]]:
        """Key, name and memory of each segment of a bucket, with its rows."""
        if flatten:
            yield (index,), *self._segment(rows[-1].end, 0), rows
            return
        sizes: Counter[int] = Counter()
        for place, row in enumerate(rows):
            size = row.end - row.offset
            yield (index, place), *self._segment(size, sizes[size]), [row._replace(offset=0)]
            sizes[size] += 1

    def _segment(self, size: int, nth: int) -> tuple[str, Tensor]:
        if (size, nth) not in self.segments:
            name = f"{self.prefix}-{self.rank}-{size}-{nth}"
            room = torch.from_file(name, shared=True, size=size, dtype=torch.uint8).zero_()
            self.segments[size, nth] = name, room
        return self.segments[size, nth]

    def _gather(
        self, parts: Iterable[tuple[tuple[int, ...], str, Tensor, list[Row]]], *, in_flight: bool
    ) -> None:
        works = []
        for _, _, room, rows in parts:
            for row in rows:
                target, shard = row.view(room).view(torch.uint8), self.shards[row.name]
                work = dist.all_gather_single(
                    target.view(-1), shard.view(torch.uint8).view(-1), async_op=True
                )
                works.append(work)
                if not in_flight:
                    work.wait()
        for work in works:
            work.wait()

    def _part(
        self, key: tuple[int, ...], name: str, room: Tensor, rows: list[Row], rungs: Rungs
    ) -> Part:
        news = None if rungs.cached_maps and key in self.known else tuple(rows)
        self.known.add(key)
        return Part(key, name if rungs.handles else room.numpy().tobytes(), news)


class LadderEngine:
    """Copies what it is handed into its parameters, and answers when it has."""

    def __init__(self, scale: float, pipe: Connection) -> None:
        torch.set_num_threads(1)
        self.parameters = tensors(SHRINK * scale, seed=1, experts=EXPERTS)
        self.pipe = pipe
        self.maps: dict[tuple[int, ...], tuple[Row, ...]] = {}
        self.mapped: dict[str, Tensor] = {}

    def forget(self) -> None:
        for tensor in self.parameters.values():
            tensor.zero_()

    def digest(self) -> str:
        return digest(self.parameters)

    def serve(self) -> None:
        """One sync."""
        while (message := self.pipe.recv()) is not None:
            rungs, parts = message
            for part in parts:
                if part.rows is not None:
                    self.maps[part.key] = part.rows
                rows = self.maps[part.key]
                segment = self._open(part.segment, rows[-1].end, kept=rungs.kept_segments)
                for row in rows:
                    self.parameters[row.name].copy_(row.view(segment))
            self.pipe.send(None)

    def _open(self, segment: str | bytes, size: int, *, kept: bool) -> Tensor:
        if isinstance(segment, bytes):
            return torch.frombuffer(bytearray(segment), dtype=torch.uint8)
        if kept and segment in self.mapped:
            return self.mapped[segment]
        room = torch.from_file(segment, shared=True, size=size, dtype=torch.uint8)
        if kept:
            self.mapped[segment] = room
        return room


def _half(shape: tuple[int, ...], rank: int) -> Layout:
    rows = shape[0] // 2
    rest = shape[1:]
    return Layout(shape, Shard((rank * rows, *(0 for _ in rest)), (rows, *rest)))
