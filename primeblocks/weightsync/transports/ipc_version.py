"""The engine's side of `IpcTransport`: trainer ranks' buffers, opened once, and their versions."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, TransferError
from ..held import Held, Lent, copied
from ..lease import Hold
from ..marker import Marker
from ..plan import Copy, Plan
from .directory_commits import DirectoryCommits
from .ipc_handle import open_exported
from .packed import places_of_version
from .place import open_own
from .transport import Request

__all__ = ["Buffers", "IpcIncoming", "lock_path", "note_part"]

_TURNS = 2
_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
_SIZE = struct.Struct("<I")


def note_part(note: Mapping[str, Any]) -> memoryview:
    """Return the bytes of a note, with which a trainer rank's buffer is opened."""
    text = json.dumps(note).encode()
    return memoryview(_SIZE.pack(len(text)) + text)


def lock_path(directory: Path, marker: Marker) -> Path:
    """Return the file that readers of a version lock: rank 0's part, in `DirectoryCommits`."""
    return directory / f"version-{marker.version}.0.delta"


class Buffers:
    """Buffers of trainer ranks that this process has opened.

    Raises, in every method:
        TransferError: the version was retired, or a trainer rank is gone.
    """

    def __init__(self, commits: DirectoryCommits) -> None:
        self._commits = commits
        self._opened: dict[int, dict[str, Tensor]] = {}

    def hold(self, marker: Marker) -> Hold:
        """Keep a version's buffers from being written to."""
        gone = TransferError(f"version {marker.version} was retired while it was being opened")
        try:
            fd = open_own(lock_path(self._commits.directory, marker), os.O_RDONLY)
            hold = Hold(fd, fcntl.LOCK_SH)
        except (FileNotFoundError, BlockingIOError) as error:
            raise gone from error
        try:
            # The owner hides a version before it lets go of the lock.
            if marker not in self._commits.markers():
                raise gone
        except BaseException:
            hold.close()
            raise
        return hold

    def opened(self, marker: Marker, rank: int) -> UInt8[Tensor, " bytes"]:
        """Return the buffer of a rank that has a version's bytes. Each is opened once."""
        (size,) = _SIZE.unpack(self._commits.read_part(marker.version, rank, 0, _SIZE.size))
        text = bytes(self._commits.read_part(marker.version, rank, _SIZE.size, size))
        try:
            note = json.loads(text)
            token = note["token"]
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(f"the handle of rank {rank} cannot be read: {error}") from error
        buffers = self._opened.setdefault(rank, {})
        if token not in buffers:
            # A rank has two; others are from an earlier life.
            while len(buffers) >= _TURNS:
                del buffers[next(iter(buffers))]
            buffers[token] = open_exported(note)
        return buffers[token]

    def payload(self, plan: Plan, marker: Marker, index: int) -> memoryview:
        """Return a bucket as it travelled in a delta."""
        rank = plan.buckets[index].rank
        starts, _ = places_of_version(plan, marker, rank)
        return self._commits.read_part(marker.version, rank, starts[index], marker.sizes[index])

    def close(self) -> None:
        """Forget the buffers: each is opened again when it is needed."""
        self._opened.clear()


class IpcIncoming:
    """A committed version in the buffers of trainer ranks; a delta in files."""

    def __init__(
        self, buffers: Buffers, request: Request, marker: Marker, *, copies: bool, keep: bool
    ) -> None:
        self.marker = marker
        self._opened, self._plan, self._reader = buffers, request.plan, request.reader
        self._copies, self._keep, self._deadline = copies, keep, request.deadline

    def whole(self) -> Held | Lent:
        with ExitStack() as unless:
            lock = self._opened.hold(self.marker)
            unless.callback(lock.close)
            buckets = self._buckets()
            unless.pop_all()
        lent = _Lent(buckets, lock)
        if not self._copies:
            return lent
        try:
            return copied(self._plan, self._reader, lent, stays=self._keep, deadline=self._deadline)
        finally:
            lent.close()

    def payload(self, index: int) -> memoryview:
        return self._opened.payload(self._plan, self.marker, index)

    def settle(self, error: str, *, deadline: float) -> None:
        """Do nothing: what is committed stands, whoever reads it."""

    def _buckets(self) -> dict[int, Tensor]:
        mine, buckets = set(self._plan.of_reader(self._reader)), {}
        for rank in sorted({self._plan.buckets[index].rank for index in mine}):
            buffer = self._opened.opened(self.marker, rank)
            starts, size_bytes = places_of_version(self._plan, self.marker, rank)
            if len(buffer) != size_bytes:
                raise CorruptionError(
                    f"rank {rank} packed {len(buffer):,} bytes; the plan has {size_bytes:,}"
                )
            for index in mine & starts.keys():
                start, size = starts[index], self._plan.buckets[index].bytes
                buckets[index] = buffer[start : start + size]
        return buckets


class _Lent:
    """Packed buckets in buffers of trainer ranks, which are not written to until it is closed."""

    stays = False

    def __init__(self, buckets: Mapping[int, Tensor], lock: Hold) -> None:
        self._buckets = buckets
        self.device = next((part.device for part in buckets.values()), torch.device("cpu"))
        gpus = {part.device for part in buckets.values() if part.device.type == "cuda"}
        self.close = weakref.finalize(self, _let_go, lock, gpus)
        self.close.atexit = False

    def chunks(
        self, index: int, copy: Copy, into: UInt8[Tensor, " bytes"] | None
    ) -> Iterator[UInt8[Tensor, " chunk"]]:
        lies = self._buckets[index][copy.offset : copy.offset + copy.bytes]
        # Few launches on a GPU; what stays in the cache on a CPU.
        step = _CHUNK_BYTES[lies.device.type]
        for start in range(0, copy.bytes, step):
            part = lies[start : start + step]
            yield part.clone() if into is None else into[start : start + step].copy_(part)


def _let_go(lock: Hold, gpus: Collection[torch.device]) -> None:
    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # Copies out of the buffer may be on their way.
    lock.close()
