"""Versions as files in a directory: in shared memory, or on a disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ...errors import UsageError
from ..held import Blob, BlobFile, Held, Lent, Sealed
from ..marker import Marker
from ..plan import Plan
from ..sealed import SealedLease
from .blob_versions import BlobVersions
from .blobs import Blobs, DiskBlobs, MemoryBlobs
from .directory_commits import DirectoryCommits
from .place import DiskPlace, Place, private_place, sweep
from .safetensors_header import header
from .transport import Begun, Incoming, Outgoing, Request
from .versions import await_announced, await_versions

__all__ = ["DirectoryTransport", "FileTransport", "SharedMemoryTransport"]


class DirectoryTransport:
    """The base of the two transports below. Any number of processes may play a reader.

    A full version is one safetensors file with all tensors, which every rank writes its boxes
    into; a delta is one file a rank. The versions that the last one needs stay, and so does the
    one before it until the next is begun.
    """

    def __init__(
        self, spec: dict[str, Any], place: Place, blobs: Blobs, *, owner: bool, durable: bool
    ) -> None:
        self._spec = spec
        self._commits = DirectoryCommits(place, owner=owner, durable=durable)
        self._versions = BlobVersions(self._commits, blobs, durable=durable)
        self._head: tuple[Plan, bytes] | None = None

    def spec(self) -> dict[str, Any]:
        """Return what `open_transport` needs in another process."""
        return dict(self._spec)

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: make room for a version."""
        head = self._header(plan)
        size_bytes = len(head) + plan.blob_bytes
        if base not in [marker.version for marker in self.markers()[-1:]]:
            base = None  # Another publisher came between, or it is not kept.
        self._versions.allocate(version, size_bytes=size_bytes, delta=base is not None)
        if base is None:
            blob = self._versions.writable(version, size_bytes=size_bytes)
            blob[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return Begun(self._commits.run, base)

    def send(self, outgoing: Outgoing, *, deadline: float) -> None:
        """Trainer rank: write its boxes, or its file of deltas."""
        plan, version = outgoing.plan, outgoing.version
        mine = plan.of_rank(outgoing.rank)
        if outgoing.base is not None:
            payloads = (outgoing.payload(index) for index in mine)
            self._versions.write_part(version, outgoing.rank, payloads)
            return
        start = len(self._header(plan))
        blob = self._versions.writable(version, size_bytes=start + plan.blob_bytes)
        held = Blob(plan, blob[start:])
        outgoing.fill_all((index, held.views(index)) for index in mine)
        self._versions.flush(version)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically."""
        self._versions.commit(marker, deadline=deadline)

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed, if there is one."""
        self._versions.abort(version)

    def markers(self) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first."""
        return self._commits.markers()

    def receive(self, request: Request) -> Sequence[Incoming]:
        """Reader: wait for a version; look every 2 ms.

        Raises:
            UsageError: a file there belongs to another user, or others may write to it.
        """
        commits = self._commits
        chain = await_versions(self.markers, request, every_s=commits.look_s, hint=commits.hint)
        start = len(self._header(request.plan))
        return [_DirectoryIncoming(self._versions, request.plan, marker, start) for marker in chain]

    def announce(self, text: str, *, deadline: float) -> None:
        """Owner: leave a text for those who find this transport."""
        self._commits.announce(text, deadline=deadline)

    def announced(self, *, deadline: float) -> str:
        """Wait for what the owner announced.

        Raises:
            DeadlineError: there was no owner, or it announced nothing.
            UsageError: a file there belongs to another user, or others may write to it.
        """
        return await_announced(self._commits, deadline=deadline)

    def to_remove(self) -> tuple[Path, ...]:
        """Owner: return the files that `close` removes; it made them all. No others are touched."""
        return self._commits.to_remove()

    def close(self) -> None:
        """Let go. The owner removes the files of `to_remove`; twice is fine."""
        self._versions.close()

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
    """Versions in shared memory, which every rank writes in place: one host, one user, no disk.

    A version lies in memory of the owner's process (memfd), which is sealed before the commit:
    nobody can write to it then, save through the mappings that trainer ranks wrote it with, so
    readers load it in place. It ends with the owner's process; a reader that holds it keeps
    it. Two buffers take turns, with a third while a reader lags or has kept a tensor. A trainer
    rank that joins again fails one publish.

    Links to the memory, deltas and commits are in a directory of mode 700 whose name ends in a
    random word. Others find it by `name` and by its owner; directories of other users are ignored.
    The owner removes it at close or at the end of its process; those of killed owners are removed
    when the next owner of this user starts, whatever its name, or by `sweep`.

    Args:
        name: one word that trainer and engine agree on.
        owner: true on trainer rank 0, and there only.
        root: the mount point of a tmpfs. Versions take no room there.

    Raises:
        UnsupportedError: this is not Linux 5.1 or newer, or `root` does not exist; or, at
            the first read, an engine may not look into the trainer's process.
        UsageError: `name` is not one path component, or has a living owner; or others may rename
            what is in `root`.
    """

    def __init__(self, name: str, *, owner: bool = False, root: str = "/dev/shm") -> None:
        place = private_place(name, root, prefix="primeblocks")
        spec = {"kind": "shared_memory", "name": name, "root": root}
        super().__init__(spec, place, MemoryBlobs(), owner=owner, durable=False)

    @staticmethod
    def sweep(root: str = "/dev/shm") -> list[Path]:
        """Remove what killed owners of this user left in shared memory, also by `IpcTransport`.

        Living owners keep theirs. Returns the removed directories. Local.
        """
        return sweep(Path(root))


class FileTransport(DirectoryTransport):
    """Versions in a directory on a disk that trainer and engine share; synced before a commit.

    Writers on several hosts need a file system with coherent writes (Lustre, GPFS; not NFS):
    on another one the digests refuse the version. A full version is the safetensors file
    `run-<run>/version-<n>.safetensors` in it, which other programs can read.

    An owner touches only what it made: a directory `run-<run>`, `primeblocks-run.json` and
    `primeblocks.lock`. Its close leaves the last version, with those that it is a delta to, for
    good; the versions of an owner that was killed are removed by the next one.

    Args:
        path: the directory; made if missing. Other files in it are left alone.
        owner: true on trainer rank 0, and there only.
        user: the number of the user whose files are read, where a mount shows all files as another
            user's. None is the user of this process, and then nobody else may have write access.

    Raises:
        UsageError: the directory has a living owner, or cannot be written to, or a file there
            belongs to another user.
    """

    def __init__(self, path: str | Path, *, owner: bool = False, user: int | None = None) -> None:
        if "\0" in str(path):
            raise UsageError(f"{str(path)!r} is no path")
        place = DiskPlace(Path(path).absolute(), user=user)
        super().__init__(
            {"kind": "file", **place.spec()}, place, DiskBlobs(user), owner=owner, durable=True
        )


class _DirectoryIncoming:
    """A committed version in a directory. Its tensors start at byte `start` of its file."""

    def __init__(self, blobs: BlobVersions, plan: Plan, marker: Marker, start: int) -> None:
        self.marker = marker
        self._versions, self._plan, self._start = blobs, plan, start

    def whole(self) -> Held | Lent:
        size_bytes = self._start + self._plan.blob_bytes
        lease = self._versions.lease(self.marker, size_bytes=size_bytes)
        if isinstance(lease, SealedLease):
            return Sealed(self._plan, lease, start=self._start)
        return BlobFile(self._plan, lease, start=self._start)

    def payload(self, index: int) -> memoryview:
        rank = self._plan.buckets[index].rank
        size = self.marker.sizes[index]
        return self._versions.read_part(self.marker.version, rank, self._places[index], size)

    def settle(self, error: str, *, deadline: float) -> None:
        """Do nothing: what is committed stands, whoever reads it."""

    @cached_property
    def _places(self) -> dict[int, int]:
        """The start of each bucket in its rank's file."""
        places = {}
        for rank in range(self._plan.world_size):
            end = 0
            for index in self._plan.of_rank(rank):
                places[index] = end
                end += self.marker.sizes[index]
        return places
