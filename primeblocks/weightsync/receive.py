"""Engine side: wait for a version, check every byte, load it, or keep the old one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from torch import Tensor

from ..errors import (
    ClosedError,
    CorruptionError,
    DeadlineError,
    EngineError,
    PlanError,
    TransferError,
)
from .digest import bucket_digest, tensor_view
from .marker import Marker, Receipt
from .plan import Plan
from .slots import Lease
from .transport import Transport

__all__ = ["Load", "Subscriber"]

Load = Callable[[Iterable[tuple[str, Tensor]]], object]


class Subscriber:
    """Loads committed versions, all or nothing. One per engine process.

    It keeps the version it loaded last mapped, to go back to it when a later load fails.

    Args:
        plan: the publisher's; `Plan.from_json` carries it between processes.
        load: takes the named whole tensors, in the order of the target manifest, and copies
            them: they are views of the blob and change after `receive` returns. It may be
            called again with the version before, when it raises or leaves tensors untaken.
        transport: where the publisher writes.
        poll_s: how often to look while waiting.
    """

    def __init__(
        self, plan: Plan, load: Load, transport: Transport, *, poll_s: float = 0.002
    ) -> None:
        self._plan, self._load, self._transport = plan, load, transport
        self._fingerprint = plan.fingerprint()
        self._poll_s = poll_s
        self._held: tuple[Marker, Lease] | None = None
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version loaded last; None before the first."""
        return None if self._held is None else self._held[0].version

    def receive(self, version: int | None = None, *, timeout_s: float) -> Receipt:
        """Load a version. Local.

        Cost: one SHA-256 of the blob, then what `load` costs.

        Args:
            version: this one, be it older than the one held; the held one is not loaded again.
                None is the newest that is newer than the one held.

        Raises:
            DeadlineError: no such version was committed, or it was not checked in time.
            CorruptionError: bytes or marker are not what was sent. Nothing was loaded.
            PlanError: the publisher's plan is another one. Nothing was loaded.
            TransferError: the version was retired before it could be opened, or `load` failed
                and the version before was loaded again.
            EngineError: `load` failed and there was nothing to go back to: the model is torn.
            ClosedError: after close().
        """
        if self._closed:
            raise ClosedError("this Subscriber was closed")
        start = time.monotonic()
        marker = self._wait(version, deadline=start + timeout_s, timeout_s=timeout_s)
        if self._held is None or self._held[0] != marker:
            lease = self._transport.lease(marker)
            try:
                self._check(marker, lease, deadline=start + timeout_s)
                self._load_or_go_back(marker, lease)
            except BaseException:
                lease.close()
                raise
            if self._held is not None:
                self._held[1].close()
            self._held = (marker, lease)
        return Receipt(marker.version, marker.size_bytes, time.monotonic() - start, marker.digest)

    def close(self) -> None:
        """Let go of the held version. Twice is fine; the transport stays open."""
        self._closed = True
        if self._held is not None:
            self._held[1].close()
            self._held = None

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, version: int | None, *, deadline: float, timeout_s: float) -> Marker:
        never = threading.Event()
        while True:
            markers = self._transport.markers()
            found = self._choose(markers, version)
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                wanted = f"version {version}" if version is not None else "a newer version"
                raise DeadlineError(
                    f"{wanted} was not committed within {timeout_s} s; this engine holds "
                    f"{self.version}, the transport {[marker.version for marker in markers]}."
                )
            never.wait(self._poll_s)

    def _choose(self, markers: tuple[Marker, ...], version: int | None) -> Marker | None:
        newest = markers[-1] if markers else None
        if version is None:
            held = None if self._held is None else self._held[0]
            # Another run of the trainer counts from anew.
            old = newest is None or (
                held is not None and held.run == newest.run and held.version >= newest.version
            )
            return None if old else newest
        for marker in markers:
            if marker.version == version:
                return marker
        if newest is not None and newest.version > version:
            raise TransferError(
                f"version {version} was retired; the transport holds "
                f"{[marker.version for marker in markers]}. Receive the newest."
            )
        return None

    def _check(self, marker: Marker, lease: Lease, *, deadline: float) -> None:
        if marker.plan != self._fingerprint:
            raise PlanError(
                f"version {marker.version} was written by plan {marker.plan}, this is plan "
                f"{self._fingerprint}. Build both from the same manifests."
            )
        for index, bucket in enumerate(self._plan.buckets):
            if time.monotonic() > deadline:
                raise DeadlineError(f"checked {index} of {len(self._plan.buckets)} buckets in time")
            if bucket_digest(lease.blob, self._plan, bucket) != marker.buckets[index]:
                names = sorted({copy.name for copy in bucket.copies})
                raise CorruptionError(
                    f"bucket {index} of version {marker.version} fails its digest: "
                    f"{bucket.bytes:,} bytes from rank {bucket.rank}, {len(names)} tensors such "
                    f"as {names[0]!r}. Publish again."
                )

    def _load_or_go_back(self, marker: Marker, lease: Lease) -> None:
        try:
            self._feed(lease)
        except Exception as error:  # Whatever load raises, the model must not stay torn.
            met = f"{type(error).__name__}: {error}".rstrip(".")
            text = f"loading version {marker.version} failed: {met}"
            if self._held is None:
                raise EngineError(
                    f"{text}. There is no version to go back to; restart the engine."
                ) from error
            held = self._held
            try:
                self._check(*held, deadline=float("inf"))
                self._feed(held[1])
            except Exception as second:
                raise EngineError(
                    f"{text}. Going back to version {held[0].version} failed too: "
                    f"{type(second).__name__}: {second}. Restart the engine."
                ) from error
            raise TransferError(f"{text}. Version {held[0].version} was loaded again.") from error

    def _feed(self, lease: Lease) -> None:
        taken = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for name in self._plan.target:
                taken += 1
                yield name, tensor_view(lease.blob, self._plan, name)

        self._load(tensors())
        if taken < len(self._plan.target):
            raise TransferError(f"load took {taken} of {len(self._plan.target)} tensors")
