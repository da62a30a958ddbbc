"""Engine side: wait for a version, check every byte, load it, or keep the old one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..errors import (
    ClosedError,
    CorruptionError,
    DeadlineError,
    EngineError,
    PlanError,
    PrimeblocksError,
    TransferError,
)
from .convert import Wiring
from .delta_bucket import apply_payload
from .digest import bucket_digest
from .held import Held, pack, packed_views
from .marker import Marker, Receipt
from .plan import Plan
from .transport import Incoming, Request, Transport

__all__ = ["Load", "Subscriber"]

Load = Callable[[Iterable[tuple[str, Tensor]]], object]


class _Version(NamedTuple):
    marker: Marker
    held: Held
    bytes: int


class Subscriber:
    """Loads committed versions, all or nothing. One per engine process.

    It keeps the bytes that it loaded last, where the transport lets it: to apply deltas to them,
    and to go back to them when a later load fails.

    Args:
        plan: the publisher's; `Plan.from_json` carries it between processes.
        load: takes what this reader wants, by name and in the order of its target: whole tensors,
            or its boxes of them. It copies them, for they change after `receive` returns. It may
            be called again with the version before, when it raises or leaves tensors untaken.
        transport: where the publisher sends.
        reader: which of the plan's readers this is.
        convert: the wiring that `plan_sync` was given for this reader; `load` then gets the
            targets of it, put together in new memory, one at a time.

    Raises:
        PlanError: the plan has no such reader.
    """

    def __init__(
        self,
        plan: Plan,
        load: Load,
        transport: Transport,
        *,
        reader: int = 0,
        convert: Wiring | None = None,
    ) -> None:
        plan.check_reader(reader)
        self._plan, self._load, self._transport = plan, load, transport
        self._reader, self._convert = reader, convert
        self._served: Marker | None = None
        self._held: _Version | None = None
        self._ready: _Version | None = None
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version loaded last; None before the first."""
        return None if self._served is None else self._served.version

    def verify(self, version: int | None = None, *, timeout_s: float) -> Receipt:
        """Wait for a version and check every byte of it, and load nothing. Local.

        A `receive` of the same version then only loads it. Arguments, cost and errors are those of
        `receive`.
        """
        start = time.monotonic()
        ready = self._get_ready(version, deadline=start + timeout_s)
        return _receipt(ready, start)

    def receive(self, version: int | None = None, *, timeout_s: float) -> Receipt:
        """Load a version. Local.

        Cost: one XXH3-128 of what this reader wants, then what `load` costs. Deltas are applied to
        the bytes held, one copy each way for each bucket.

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
        start = time.monotonic()
        ready = self._get_ready(version, deadline=start + timeout_s)
        self._ready = None
        if ready.marker != self._served:
            self._load_or_go_back(ready, deadline=start + timeout_s)
        return _receipt(ready, start)

    def close(self) -> None:
        """Let go of what is held. Twice is fine; the transport stays open."""
        self._closed = True
        self._drop_ready()
        if self._held is not None:
            self._held.held.close()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _get_ready(self, version: int | None, *, deadline: float) -> _Version:
        if self._closed:
            raise ClosedError("this Subscriber was closed")
        if self._ready is None or version not in (None, self._ready.marker.version):
            self._drop_ready()
            self._ready = self._fetch(version, deadline, served=self._served)
        return self._ready

    def _drop_ready(self) -> None:
        if self._ready is not None and self._ready != self._held:
            self._ready.held.close()
        self._ready = None

    def _fetch(self, version: int | None, deadline: float, *, served: Marker | None) -> _Version:
        """A version's bytes, all checked; and what other readers of it agreed to."""
        held = None if self._held is None else self._held.marker
        request = Request(self._plan, self._reader, version, held, served, deadline)
        found = self._transport.receive(request)
        if found[-1].marker == held and self._held is not None:
            return self._held
        last = found[-1]
        try:
            try:
                fetched = self._bring(found, deadline)
            except CorruptionError:
                # What it was applied to may be at fault; a full version is its own base.
                if found[0].marker.base is None or last.marker not in self._transport.markers():
                    raise
                again = self._transport.receive(
                    Request(self._plan, self._reader, last.marker.version, None, served, deadline)
                )
                fetched = self._bring(again, deadline)
        except PrimeblocksError as error:
            last.settle(f"{type(error).__name__}: {error}", deadline=deadline)
            raise
        try:
            last.settle("", deadline=deadline)
        except BaseException:
            fetched.held.close()
            raise
        return fetched

    def _bring(self, found: Sequence[Incoming], deadline: float) -> _Version:
        """The bytes of the last of `found`, each a delta to the one before."""
        marker = found[-1].marker
        if marker.plan != self._plan.fingerprint():
            raise PlanError(
                f"version {marker.version} was written by plan {marker.plan}, this is plan "
                f"{self._plan.fingerprint()}. Build both from the same manifests."
            )
        deltas = [one for one in found if one.marker.base is not None]
        if len(deltas) < len(found):
            held = found[0].whole()
        else:
            assert self._held is not None, "a delta to what is not held"
            # From here on it is neither the one nor the other.
            held, self._held = self._held.held, None
        mine = self._plan.of_reader(self._reader)
        try:
            for done, index in enumerate(mine):
                if time.monotonic() > deadline:
                    raise DeadlineError(f"checked {done} of {len(mine)} buckets in time")
                self._bring_bucket(index, held, deltas, marker)
        except BaseException:
            held.close()
            raise
        size = sum(one.marker.sizes[index] for one in found for index in mine)
        return _Version(marker, held, size)

    def _bring_bucket(
        self, index: int, held: Held, deltas: Sequence[Incoming], marker: Marker
    ) -> None:
        bucket = self._plan.buckets[index]
        pieces = held.views(index)
        if deltas:
            packed = pack(self._plan, index, pieces)
            for delta in deltas:
                payload = delta.payload(index)
                if len(payload) == bucket.bytes:
                    packed = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                else:
                    apply_payload(self._plan, index, packed, payload)
            after = packed_views(self._plan, index, packed)
            for piece, new in zip(pieces, after, strict=True):
                piece.copy_(new)
        if bucket_digest(pieces) != marker.buckets[index]:
            names = sorted({copy.name for copy in bucket.copies})
            raise CorruptionError(
                f"bucket {index} of version {marker.version} fails its digest: "
                f"{bucket.bytes:,} bytes from rank {bucket.rank}, {len(names)} tensors such "
                f"as {names[0]!r}. Publish again."
            )

    def _load_or_go_back(self, new: _Version, *, deadline: float) -> None:
        try:
            self._feed(new.held)
        except Exception as error:  # Whatever load raises, the model must not stay torn.
            if new != self._held:
                new.held.close()
            self._go_back(new.marker, error, deadline=deadline)
        if self._held is not None and self._held != new:
            self._held.held.close()
        self._served, self._held = new.marker, new
        if not new.held.stays:
            new.held.close()
            self._held = None

    def _go_back(self, failed: Marker, error: Exception, *, deadline: float) -> None:
        """Load the version before again, and raise."""
        met = f"{type(error).__name__}: {error}".rstrip(".")
        text = f"loading version {failed.version} failed: {met}"
        served, self._served = self._served, None
        if served is None:
            raise EngineError(
                f"{text}. There is no version to go back to; restart the engine."
            ) from error
        try:
            old = self._held
            if old is None or old.marker != served:
                old = self._fetch(served.version, deadline, served=None)
            else:
                self._check(old)
            self._feed(old.held)
        except Exception as second:
            raise EngineError(
                f"{text}. Going back to version {served.version} failed too: "
                f"{type(second).__name__}: {second}. Restart the engine."
            ) from error
        self._served, self._held = served, old
        raise TransferError(f"{text}. Version {served.version} was loaded again.") from error

    def _check(self, version: _Version) -> None:
        for index in self._plan.of_reader(self._reader):
            self._bring_bucket(index, version.held, (), version.marker)

    def _feed(self, held: Held) -> None:
        taken = 0
        wanted = self._plan.wants[self._reader] if self._convert is None else self._convert.targets

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for name in wanted:
                taken += 1
                yield name, self._tensor(name, held)

        self._load(tensors())
        if taken < len(wanted):
            raise TransferError(f"load took {taken} of {len(wanted)} tensors")

    def _tensor(self, name: str, held: Held) -> Tensor:
        if self._convert is None:
            (box,) = self._plan.wants[self._reader][name]
            return held.box(name, box)
        spec, pieces = self._convert.targets[name], self._convert.by_target[name]
        made = torch.zeros(spec.shape, dtype=spec.dtype)  # Padding is zero.
        for piece in pieces:
            source = held.box(piece.source, piece.source_box)
            made[piece.target_box.slices].copy_(piece.view(source, piece.source_box))
        return made


def _receipt(version: _Version, start: float) -> Receipt:
    seconds = time.monotonic() - start
    return Receipt(version.marker.version, version.bytes, seconds, version.marker.digest)
