"""Packed buffers of trainer ranks, read by engines on the same host: CUDA IPC or shared memory."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from jaxtyping import UInt8
from torch import Tensor

from ...errors import CapacityError, UnsupportedError
from ..lease import Hold
from ..marker import Marker
from ..plan import Plan
from .blobs import MemoryBlobs
from .choose import chain_to
from .directory_commits import DirectoryCommits
from .ipc_handle import Exported
from .ipc_version import Buffers, IpcIncoming, lock_path, note_part
from .packed import Pool, pack_all
from .place import open_own, private_place
from .transport import Begun, Incoming, Outgoing, Request
from .waiting import await_versions

__all__ = ["IpcTransport"]

_LOOK_S = 0.002


class IpcTransport:
    """A transport whose engines read weights in the trainer's buffers: one host, no weight files.

    Each trainer rank packs its part of a version into one buffer on its device; two take turns. An
    engine opens each buffer once and keeps it open. It holds the version that it loads, and the
    buffer is not written to until it lets go: a publish waits for that until its deadline. An
    engine's death ends its hold. Deltas, markers and handles are small files in a directory that
    only this user can read. A publish may follow a failed one, and a restarted rank or engine joins
    by constructing its end again.

    On a GPU, close engines' ends before the trainer's: their memory is the trainer's. This has
    not run on a GPU yet; with CPU tensors everything but the handles is the same.

    Peak memory: on each trainer rank, twice the bytes that it sends; on an engine, the tensors in
    about three buckets of each trainer rank, or with `keep` everything that it wants.

    Args:
        name: one word that trainer and engines agree on.
        owner: true on trainer rank 0, and there only.
        device: the device on which this trainer rank packs. Engines follow.
        keep: engines copy what they receive and keep it, so that deltas are applied to it and a
            load that fails can be undone after the trainer's end.
        root: the parent of the directory, on a tmpfs.

    Raises:
        UnsupportedError: this is not Linux, `root` does not exist, or the device cannot be used.
        UsageError: `name` is not one path component, or has a living owner; or others may rename
            what is in `root`.
    """

    def __init__(
        self,
        name: str,
        *,
        owner: bool = False,
        device: torch.device | str = "cpu",
        keep: bool = False,
        root: str = "/dev/shm",
    ) -> None:
        self._device = _checked(torch.device(device))
        self._spec = {"kind": "ipc", "name": name, "root": root, "keep": keep}
        self._keep = keep
        self._place = private_place(name, root, prefix="primeblocks-ipc")
        self._commits = DirectoryCommits(self._place, MemoryBlobs(), owner=owner, durable=False)
        self._pool = Pool(self._export, Exported.close, spares=1)
        self._buffers = Buffers(self._commits)

    def spec(self) -> dict[str, Any]:
        """Return what `open_transport` needs in another process."""
        return dict(self._spec)

    def begin(self, version: int, *, plan: Plan, base: int | None, deadline: float) -> Begun:
        """Owner: wait until nobody reads the version whose buffers are needed.

        Raises:
            CapacityError: an engine holds it.
        """
        markers = self._commits.markers()
        stay = chain_to(markers[-1], markers, held=None) if markers else ()
        if base not in [marker.version for marker in markers[-1:]]:
            base = None  # Another publisher came between, or it is not kept.
        with ExitStack() as held:
            for marker in markers:
                if marker not in stay and marker.base is None:
                    held.callback(self._lock(marker, deadline).close)
            # No longer visible from here on, and its files are gone.
            self._commits.allocate(version, size_bytes=0, delta=True)
        return Begun(self._commits.run, base)

    def send(self, outgoing: Outgoing, *, deadline: float) -> None:
        """Trainer rank: pack its buckets, or write its file of deltas."""
        version, mine = outgoing.version, outgoing.plan.of_rank(outgoing.rank)
        self._pool.keep([marker.version for marker in self._commits.markers()])
        if outgoing.base is not None:
            payloads = (outgoing.payload(index) for index in mine)
            self._commits.write_part(version, outgoing.rank, payloads)
            return
        note: dict[str, Any] = {}

        def make(size_bytes: int) -> UInt8[Tensor, " bytes"]:
            exported = self._pool.take(version, size_bytes)
            note.update(exported.note)
            return exported.buffer

        pack_all(outgoing, make)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # Other processes do not wait for this stream.
        self._commits.write_part(version, outgoing.rank, [note_part(note)])

    def commit(self, marker: Marker, *, deadline: float) -> None:
        """Owner: make a version visible, atomically."""
        self._commits.commit(marker)

    def abort(self, version: int) -> None:
        """Owner: drop a version that was begun and not committed, if there is one."""
        self._commits.abort(version)

    def markers(self) -> tuple[Marker, ...]:
        """Return the committed versions, oldest first."""
        return self._commits.markers()

    def receive(self, request: Request) -> Sequence[Incoming]:
        """Reader: wait for a version; look every 2 ms.

        Raises:
            UsageError: the directory belongs to another user, or others may write to it.
        """
        chain = await_versions(self.markers, request, every_s=_LOOK_S, hint=self._place.others)
        # Deltas are applied to bytes that are the reader's own.
        copies = self._keep or len(chain) > 1
        return [
            IpcIncoming(self._buffers, request, marker, copies=copies, keep=self._keep)
            for marker in chain
        ]

    def close(self) -> None:
        """Let go. The owner removes everything; twice is fine."""
        self._pool.close()
        self._buffers.close()
        self._commits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _export(self, size_bytes: int) -> Exported:
        return Exported(size_bytes, device=self._device)

    def _lock(self, marker: Marker, deadline: float) -> Hold:
        """Take the lock of a version that no engine holds, so that none can take hold of it."""
        never = threading.Event()
        while True:
            fd = open_own(lock_path(self._commits.directory, marker), os.O_RDONLY)
            try:
                return Hold(fd, fcntl.LOCK_EX)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise CapacityError(
                        f"version {marker.version} is still being loaded by an engine, and the "
                        "next one needs its buffers. Publish again, with more time."
                    ) from error
            never.wait(_LOOK_S)


def _checked(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"no handles of memory on {device}; pass a CUDA device, or the CPU")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"{device}, and torch sees no GPU. Pass device='cpu'.")
    return device
