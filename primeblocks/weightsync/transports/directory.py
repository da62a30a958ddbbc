"""Versions as files in a directory, in shared memory or on a disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CorruptionError, TransferError, UnsupportedError
from ..held import Blob, Held, Lent
from ..marker import Marker
from ..outgoing import Shipment
from ..plan import Plan
from .blobs import DiskBlobs, MemoryBlobs, check_size
from .directory_commits import DirectoryCommits, fsync, not_opened
from .packed import starts_of_version
from .place import DiskPlace, Place, PrivatePlace
from .transport import (
    Begun,
    Incoming,
    ReceiveRequest,
    await_versions,
    last_chain,
    newest_only,
)

__all__ = ["DirectoryTransport", "FileTransport", "SharedMemoryTransport"]

_LENGTH = struct.Struct("<Q")
# The first tensor starts at a cache line.
_ALIGN_BYTES = 64
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}


class DirectoryTransport:
    """The base of the two transports below. Several processes may use the same reader number.

    A full version is one safetensors file with all tensors. Every rank writes its boxes into this
    file. A delta is one file per rank. The transport keeps the last version and the versions that
    it depends on. It keeps the previous version until the next version begins.
    """

    def __init__(
        self, spec: dict[str, Any], place: Place, blobs: DiskBlobs | MemoryBlobs, *, owner: bool
    ) -> None:
        self._spec, self._blobs = spec, blobs
        self._memory = blobs if isinstance(blobs, MemoryBlobs) else None
        self.commits = DirectoryCommits(place, owner=owner, durable=self._memory is None)
        self._head: tuple[Plan, bytes] | None = None

    def spec(self) -> dict[str, Any]:
        return dict(self._spec)

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        head = self._header(plan)
        base = newest_only(base, self.markers())
        size_bytes = len(head) + plan.blob_bytes
        self._allocate(version, size_bytes, delta=base is not None)
        if base is None:
            blob = self._writable(version, size_bytes)
            blob[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return Begun(self.commits.run, base)

    def send(self, outgoing: Shipment, *, deadline: float) -> None:
        """Trainer rank: write its boxes into the file, or write its file of deltas."""
        plan, version = outgoing.plan, outgoing.version
        mine = plan.of_rank(outgoing.rank)
        if outgoing.base is not None:
            name = _part(version, outgoing.rank)
            self.commits.write(name, [outgoing.payload(index) for index in mine])
            return
        start = len(self._header(plan))
        held = Blob(plan, self._writable(version, start + plan.blob_bytes)[start:])
        outgoing.fill_all((index, held.views(index)) for index in mine)
        if self._memory is None:
            fsync(self._path(version))

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: seal the version's memory, if any, and make the version visible."""
        if self._memory and marker.base is None:
            self._memory.seal(self._path(marker.version))
        self.commits.commit(marker, deadline=deadline)

    def abort(self, version: int) -> None:
        self.commits.check(owner=True)
        if all(marker.version != version for marker in self.commits.committed):
            self._blobs.abort(self._path(version))
        self.commits.abort(version)

    def markers(self) -> tuple[Marker, ...]:
        return self.commits.markers()

    def receive(self, request: ReceiveRequest) -> Sequence[Incoming]:
        chain, start = await_versions(self.commits, request), len(self._header(request.plan))
        return [_Incoming(self, request.plan, marker, start) for marker in chain]

    def to_remove(self) -> tuple[Path, ...]:
        """Owner: return the files that `close` removes. The owner has made all of them."""
        return self.commits.to_remove()

    def close(self) -> None:
        """Release this end. The owner removes the files of `to_remove`. Idempotent."""
        if self._memory:
            self._memory.close()
        self.commits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _header(self, plan: Plan) -> bytes:
        if self._head is None or self._head[0] is not plan:
            self._head = plan, _header(plan)
        return self._head[1]

    def _path(self, version: int) -> Path:
        return self.commits.directory / f"version-{version}.safetensors"

    def _allocate(self, version: int, size_bytes: int, *, delta: bool) -> None:
        """Owner: make room. A delta needs no blob, because its parts are files of their own."""
        self.abort(version)
        path, needs_blob = self._path(version), not delta
        gone = self.commits.retire(last_chain(self.commits.committed))
        for old in (self._path(marker.version) for marker in gone):
            if self._memory and needs_blob:
                needs_blob = not self._memory.reuse(old, path, size_bytes)
            self._blobs.drop(old)
        try:
            if needs_blob:
                self._blobs.make(path, size_bytes)
        except OSError as error:
            self._blobs.drop(path)
            raise self.commits.no_room(error, size_bytes) from error
        self.commits.open(version)

    def _writable(self, version: int, size_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Writer: return the blob of a begun version, to write to in place."""
        self.commits.check()
        path = self._path(version)
        try:
            return self._blobs.writable(path, size_bytes)
        except FileNotFoundError:
            check_size(path, None, size_bytes)
            raise

    def _open(self, marker: Marker, plan: Plan, *, start: int) -> Held | Lent:
        self.commits.check()
        try:
            return self._blobs.open(self._path(marker.version), plan, start=start)
        except OSError as error:
            raise not_opened(marker.version, error) from error


class SharedMemoryTransport(DirectoryTransport):
    """Carries versions in shared memory, on one machine, for one user.

    A version is stored in a memfd of the owner's process, to which every rank writes directly. The
    memfd is sealed before the commit. After the commit, only the mappings of the trainer ranks can
    write to the memfd. Therefore, readers need not copy a version before they load it. A version is
    lost when the owner's process ends, except in a reader that has kept the version. The owner uses
    two memfds in turn. If a reader still uses the older memfd, or a tensor in this memfd, the owner
    makes a new memfd. After a trainer rank other than the owner has joined again, the first publish
    may raise TransferError.

    A directory of mode 700, whose name ends in random digits, contains commits, deltas, and links
    to the memfds. Engines find the directory by `name` and by the user who owns the directory.
    Directories of other users are ignored. The owner removes its directory at `close`, or when its
    process ends. If an owner was killed, the next owner of the same user removes the killed owner's
    directory, even under another name.

    Args:
        name: one word that trainer and engine agree on.
        owner: true only on trainer rank 0.
        root: the mount point of a tmpfs. `root` contains the directory, and so the bytes of deltas,
            but not the bytes of full versions.

    Raises:
        UnsupportedError: this is not Linux 5.1 or newer, or `root` does not exist. Also raised, at
            the first read, if an engine is not allowed to open the trainer's memory.
        UsageError: `name` is not one path component, or has a living owner, or other users may
            rename the files in `root`.
    """

    def __init__(self, name: str, *, owner: bool = False, root: str = "/dev/shm") -> None:
        spec = {"kind": "shared_memory", "name": name, "root": root}
        super().__init__(spec, PrivatePlace(name, root), MemoryBlobs(), owner=owner)


class FileTransport(DirectoryTransport):
    """Carries versions in a directory on a disk that trainer and engine share.

    Files are synced to the disk before a commit. Writers on several machines need a file system
    with coherent writes, such as Lustre or GPFS. NFS does not have coherent writes, so readers
    there may refuse a version because its digests differ. A full version is the safetensors file
    `run-<run>/version-<n>.safetensors`, which other programs can read.

    An owner writes only `primeblocks-run.json`, `primeblocks.lock` and a directory `run-<run>`.
    `close` keeps the last version in `run-<run>`, and the versions on which the last version
    depends. The next owner removes the versions of a killed owner.

    Args:
        path: the directory, which is made if missing. Other files in the directory are not changed.
        owner: true only on trainer rank 0.
        user: the id of the user whose files are read, for a mount that shows all files as files of
            another user. With None, only files of this process's user are read, and other users
            must not have write access.

    Raises:
        UsageError: the directory has a living owner, or cannot be written to, or a file in the
            directory belongs to another user.
    """

    def __init__(self, path: str | Path, *, owner: bool = False, user: int | None = None) -> None:
        place = DiskPlace(str(path), user=user)
        spec = {**place.spec(), "kind": "file"}
        super().__init__(spec, place, DiskBlobs(user), owner=owner)


class _Incoming:
    """A committed version in a directory. Its tensors start at byte `start` of its file."""

    def __init__(
        self, transport: DirectoryTransport, plan: Plan, marker: Marker, start: int
    ) -> None:
        self.marker = marker
        self._transport, self._plan, self._start = transport, plan, start

    def whole(self) -> Held | Lent:
        return self._transport._open(self.marker, self._plan, start=self._start)

    def payload(self, index: int) -> memoryview:
        name = _part(self.marker.version, self._plan.buckets[index].rank)
        at, size = self._starts[index], self.marker.sizes[index]
        payload = self._transport.commits.read(name, at, size)
        if payload is None:
            raise TransferError(
                f"version {self.marker.version} was retired while it was read. Receive the newest "
                "version."
            )
        if len(payload) != size:
            raise CorruptionError(
                f"{name} ends at {at + len(payload)} bytes; it must have at least {at + size}. "
                "Publish again."
            )
        return memoryview(payload)

    def settle(self, error: str, *, deadline: float) -> None:
        """Do nothing. A committed version stands, whether or not this reader has it."""

    @cached_property
    def _starts(self) -> dict[int, int]:
        """The start of each bucket in its rank's file."""
        return {
            index: start
            for rank in range(self._plan.world_size)
            for index, start in starts_of_version(self._plan, self.marker, rank)[0].items()
        }


def _part(version: int, rank: int) -> str:
    """Return the name of one rank's part of a delta."""
    return f"version-{version}.{rank}.delta"


def _header(plan: Plan) -> bytes:
    """Return the safetensors header, which precedes the blob of a plan's whole tensors. Pure.

    The format is 8 bytes of length, little-endian, then JSON: name -> dtype, shape, first byte and
    end.

    Source: the safetensors format description, huggingface.co/docs/safetensors.
    """
    rows = {}
    for name, spec in plan.target.items():
        if spec.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{name!r} is {spec.dtype}, for which safetensors has no name. View the tensor as "
                "uint8."
            )
        start = plan.offsets[name]
        rows[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.bytes],
        }
    text = json.dumps(rows, separators=(",", ":")).encode()
    padding = -(_LENGTH.size + len(text)) % _ALIGN_BYTES
    return _LENGTH.pack(len(text) + padding) + text + b" " * padding
