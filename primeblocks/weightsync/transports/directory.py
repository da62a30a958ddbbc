"""Versions as files in a directory: in shared memory, or on a disk."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ...errors import DeadlineError, UnsupportedError, UsageError
from ..held import Blob, Held
from ..marker import Marker
from ..plan import Plan
from .choose import chain_to, choose
from .safetensors_header import header
from .slots import Slots
from .transport import Begun, Incoming, Outgoing, Request

__all__ = ["DirectoryTransport", "FileTransport", "SharedMemoryTransport"]

_LOOK_S = 0.002


class DirectoryTransport:
    """What the two transports below share. Any number of processes may play a reader.

    A full version is one safetensors file with all tensors, which every rank writes its boxes
    into; a delta is one file a rank. The versions that the last one needs stay, and the one before
    it until the next is begun.
    """

    def __init__(
        self, spec: dict[str, Any], directory: Path, *, owner: bool, durable: bool
    ) -> None:
        self._spec, self._slots = spec, Slots(directory, owner=owner, durable=durable)
        self._head: tuple[Plan, bytes] | None = None

    def spec(self) -> dict[str, Any]:
        """What `open_transport` needs in another process."""
        return dict(self._spec)

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: make room for a version."""
        head = self._header(plan)
        size_bytes = len(head) + plan.blob_bytes
        if base not in [marker.version for marker in self.markers()[-1:]]:
            base = None  # Another publisher came between, or it is not kept.
        self._slots.allocate(version, size_bytes=size_bytes, delta=base is not None)
        if base is None:
            blob = self._slots.writable(version, size_bytes=size_bytes)
            blob[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return Begun(self._slots.run, base)

    def send(self, outgoing: Outgoing, *, deadline: float) -> None:
        """Trainer rank: write its boxes, or its file of deltas."""
        plan, version = outgoing.plan, outgoing.version
        mine = plan.of_rank(outgoing.rank)
        if outgoing.base is not None:
            payloads = (outgoing.payload(index) for index in mine)
            self._slots.write_part(version, outgoing.rank, payloads)
            return
        start = len(self._header(plan))
        blob = self._slots.writable(version, size_bytes=start + plan.blob_bytes)
        held = Blob(plan, blob[start:])
        for index in mine:
            outgoing.fill(index, held.views(index))
        self._slots.flush(version)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically."""
        self._slots.commit(marker)

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed; else nothing."""
        self._slots.abort(version)

    def markers(self) -> tuple[Marker, ...]:
        """The committed versions, oldest first."""
        return self._slots.markers()

    def receive(self, request: Request) -> Sequence[Incoming]:
        """Reader: wait for a version; look every 2 ms."""
        never = threading.Event()
        while True:
            markers = self.markers()
            found = choose(markers, request.version, served=request.served)
            if found is not None:
                chain = chain_to(found, markers, held=request.held)
                start = len(self._header(request.plan))
                return [_Version(self._slots, request.plan, marker, start) for marker in chain]
            if time.monotonic() >= request.deadline:
                wanted = "a newer version"
                if request.version is not None:
                    wanted = f"version {request.version}"
                raise DeadlineError(
                    f"{wanted} was not committed in time; this engine holds "
                    f"{request.served and request.served.version}, the transport "
                    f"{[marker.version for marker in markers]}."
                )
            never.wait(_LOOK_S)

    def close(self) -> None:
        """Let go. The owner removes everything; twice is fine."""
        self._slots.close()

    def _header(self, plan: Plan) -> bytes:
        if self._head is None or self._head[0] is not plan:
            self._head = plan, header(plan)
        return self._head[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class SharedMemoryTransport(DirectoryTransport):
    """Versions in /dev/shm, which every rank writes in place: one host, no disk.

    Two files take turns. The owner clears what a dead owner of the same name left behind, and
    removes everything at close or at the end of its process.

    Args:
        name: one word that trainer and engine agree on.
        owner: true on trainer rank 0, and there only.
        root: where tmpfs is mounted.

    Raises:
        UnsupportedError: this is not Linux, or `root` does not exist.
        UsageError: `name` is not one path component, or has a living owner.
    """

    def __init__(self, name: str, *, owner: bool = False, root: str = "/dev/shm") -> None:
        if not sys.platform.startswith("linux"):
            raise UnsupportedError(
                f"files in shared memory need Linux; this is {sys.platform}. Use FileTransport."
            )
        if not Path(root).is_dir():
            raise UnsupportedError(f"{root} is no directory. Mount a tmpfs, or use FileTransport.")
        if not name or Path(name).name != name:
            raise UsageError(f"{name!r} is not one path component; try 'policy'")
        spec = {"kind": "shared_memory", "name": name, "root": root}
        super().__init__(spec, Path(root) / f"primeblocks-{name}", owner=owner, durable=False)


class FileTransport(DirectoryTransport):
    """Versions in a directory on a disk that trainer and engine share; synced before a commit.

    Writers on several hosts need a file system with coherent writes (Lustre, GPFS; not NFS):
    where it has none, the digests refuse the version. A full version is the safetensors file
    `version-<n>.safetensors`, which other programs can read.

    Args:
        path: the directory; made if missing. Other files in it are left alone.
        owner: true on trainer rank 0, and there only.

    Raises:
        UsageError: the directory has a living owner.
    """

    def __init__(self, path: str | Path, *, owner: bool = False) -> None:
        spec = {"kind": "file", "path": str(Path(path).absolute())}
        super().__init__(spec, Path(path).absolute(), owner=owner, durable=True)


class _Version:
    """A committed version in a directory. Its tensors start at byte `start` of its file."""

    def __init__(self, slots: Slots, plan: Plan, marker: Marker, start: int) -> None:
        self.marker = marker
        self._slots, self._plan, self._start = slots, plan, start

    def whole(self) -> Held:
        size_bytes = self._start + self._plan.blob_bytes
        lease = self._slots.lease(self.marker, size_bytes=size_bytes)
        return Blob(self._plan, lease.blob[self._start :], lease=lease)

    def payload(self, index: int) -> memoryview:
        rank = self._plan.buckets[index].rank
        size = self.marker.sizes[index]
        return self._slots.read_part(self.marker.version, rank, self._places[index], size)

    def settle(self, error: str, *, deadline: float) -> None:
        """Nothing: what is committed stands, whoever reads it."""

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where each bucket starts in its rank's file."""
        places = {}
        for rank in range(self._plan.world_size):
            end = 0
            for index in self._plan.of_rank(rank):
                places[index] = end
                end += self.marker.sizes[index]
        return places
