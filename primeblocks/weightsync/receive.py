"""Engine side: wait for a version, check every byte, load the version, or keep the old one:

    FETCHED ----------> CHECKED       the new version, whose bytes are in `_next`
       every byte is right |
                           | a load of either begins
                           v
    EMPTY, LOADED ------> TORN -----> LOADED       the engine, whose state is `_state`
                           |  load took every tensor
                           | load raised
                           v
          the version before is checked and loaded again:
          LOADED with a TransferError, or still TORN with an EngineError

`_last` is the version that was loaded last. A version that fails before its load changes neither
`_state` nor `_last`. A load of a FETCHED version begins only if its bytes were checked before, or
if there is a version to go back to. Each tensor is then checked before `load` gets it, or once it
is copied in place.

All state is in memory. If the process dies, the next one starts EMPTY and fetches a full version.
`SharedMemoryTransport` and `IpcTransport` hold a lock, which ends with the process. `PullTransport`
holds its lease (`lease_s`) only while it fetches. Other readers continue. Only the readers of a
`GroupTransport` vote, in `settle`. If a reader dies before its vote, the publisher and the other
readers raise TransferError by their deadlines, and keep their version. If it dies after its vote,
the others load. In both cases, the next publish needs new transports on all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, NoReturn, Self

from torch import Tensor

from ..errors import (
    ClosedError,
    CorruptionError,
    EngineError,
    TransferError,
    UsageError,
    check_counts,
    check_version,
)
from .convert.conversion import Wiring, check_wiring
from .fetched import Feed, Fetched, ReaderState, bring, check, check_plan, feeding, write
from .held import CachingAllocator, Lent
from .lease import alone
from .load import InPlace
from .manifest import NamedTensors
from .marker import Digests, Marker, Receipt
from .observed import kept, loadable
from .plan import Plan
from .progress import Counted, Progress
from .transports.transport import Incoming, ReceiveRequest, Transport, replaced

__all__ = ["Load", "Subscriber"]

_BACK_S = 60.0

Load = Callable[[Iterable[tuple[str, Tensor]]], object]


class Subscriber:
    """A reader that loads committed versions, all or nothing. Make one reader per engine process.

    Only one call of `receive` or `verify` runs at a time, and a second call from any thread is
    refused. If the transport allows it, the reader keeps the bytes of the version loaded last. If
    a later load fails, the reader loads the kept bytes again. A delta is applied to a copy of the
    kept bytes, so the reader has the weights twice until the copy is loaded.

    Args:
        plan: the publisher's plan. In another process, `Plan.from_json` reads the plan.
        load: a function that takes (name, tensor) pairs, in the order of the reader's target. Each
            tensor is whole, or the box that this reader wants. `load` must copy the tensors,
            because they may change after `receive` returns. If `load` raises or does not take all
            tensors, `receive` may call `load` again with the previous version.
        transport: the transport over which the publisher sends.
        reader: the number of this reader in the plan.
        convert: this reader's wiring, if it was a target of `plan_sync`. With `convert`, `load`
            gets the targets of the wiring one at a time, in new memory.
        threads: the largest number of threads that check bytes.
        check: "before" checks every byte before `load` gets the first tensor. "ahead" checks a
            tensor while `load` copies earlier tensors, or after `load_into`, if it casts no tensor.
            "ahead" is faster, but may find damage in the middle of a load. `receive` then loads the
            previous version again. "ahead" works like "before" for a delta, for a reader of a
            group, and if the previous version is not kept. "ahead" usually also works like "before"
            if torch's threads use all cores. With both values, `load` gets checked copies if other
            processes may still write to the bytes.
        observe: a function that returns the engine's tensors by the names that `load` got. After a
            load, each tensor must equal what `load` got, bit for bit, and the load fails otherwise.
            Tensors that `describe` does not round may be cast.

    Raises:
        PlanError: the plan has no such reader, or `convert` does not fit the reader's boxes.
        UsageError: `threads` is not a count, or `check` is unknown.
    """

    def __init__(
        self,
        plan: Plan,
        load: Load,
        transport: Transport,
        *,
        reader: int = 0,
        convert: Wiring | None = None,
        threads: int = 4,
        check: Literal["before", "ahead"] = "before",
        observe: Callable[[], NamedTensors] | None = None,
    ) -> None:
        if check not in ("before", "ahead"):
            raise UsageError(f'check must be "before" or "ahead"; got {check!r}.')
        check_counts(threads=threads)
        check_wiring(plan, reader, convert)
        self.plan, self.reader = plan, reader
        self._load, self._transport = load, transport
        self._convert, self._threads = convert, threads
        self._ahead, self._observe = check == "ahead", observe
        self._state = ReaderState.EMPTY
        self._last: Fetched | None = None
        self._next: Fetched | None = None
        self._memory, self._counted = CachingAllocator(), Counted(None)
        self._written = set[str]()  # The names of tensors that `load` writes to.
        self._busy = threading.Lock()
        self._closed = False

    @property
    def version(self) -> int | None:
        """The loaded version. None before the first load, during a load, and after EngineError."""
        return None if self._served is None else self._served.version

    @property
    def _served(self) -> Marker | None:
        if self._last is None or self._state is not ReaderState.LOADED:
            return None
        return self._last.marker

    @property
    def _kept(self) -> Fetched | None:
        return None if self._last is None or self._last.held is None else self._last

    def verify(
        self, version: int | None = None, *, timeout_s: float, progress: Progress | None = None
    ) -> Receipt:
        """Wait for a version and check every byte, but do not load it.

        The next `receive` then only loads the version. Arguments, cost and errors are as for
        `receive`. If the bytes are in the trainer's memory, the trainer may reuse this memory after
        `verify`. In this case, `receive(version)` raises TransferError after two more publishes.
        """
        start = time.monotonic()
        with self._alone("verify()", Counted(progress)):
            ready = self._get_next(version, start + timeout_s, loads=False)
            if isinstance(ready.held, Lent) and not ready.held.stays:
                self._drop_next()
            return _receipt(ready._replace(digests=None), start)

    def receive(
        self, version: int | None = None, *, timeout_s: float, progress: Progress | None = None
    ) -> Receipt:
        """Wait for a version, check it and load it.

        Local, except over a `GroupTransport`, where all readers must call `receive` or `verify`.

        Cost: one XXH3-128 of the bytes that this reader wants, and the cost of `load`. If the bytes
        are in a file or in the trainer's memory, the cost includes one copy and one more XXH3-128.
        Copy and digest run in threads during the load, and hold about one bucket per trainer rank
        in memory. A delta also costs one copy of the kept bytes, and the memory of this copy is
        kept for the next delta.

        A load starts only before the deadline, unless `verify` has checked the version before. A
        started load runs to completion, and so does a load of the previous version. At the
        deadline, each thread finishes the bucket that it is checking.

        Args:
            version: the version to load. `version` may be older than the loaded version. The loaded
                version is not loaded again. None means the version whose bytes `verify` has kept.
                Without such bytes, the call waits for newer versions, and takes the newest.
            timeout_s: how long to wait for the version and its checks.
            progress: called with the bytes checked plus the bytes loaded so far, and the total. If
                `progress` raises an error during a load, the load still runs to completion.

        Raises:
            DeadlineError: the version was not committed or not checked in time.
            CorruptionError: bytes or commit marker are damaged. The engine is unchanged.
            PlanError: publisher and reader have different plans, or the group publishes another
                version. The engine is unchanged.
            TransferError: the version was retired, or another reader of the group does not have the
                version. Also raised if `load` failed and the previous version was loaded again.
            EngineError: `load` failed and the previous version could not be loaded again. Only a
                part of the model's weights is new.
            UsageError: `version` is not a policy version, or another call is running.
            ClosedError: the subscriber was closed.
        """
        start = time.monotonic()
        made = None if self._convert is None else self._convert.targets.values()
        size = self.plan.read_bytes(self.reader) if made is None else sum(x.bytes for x in made)
        with self._alone("receive()", Counted(progress, last_bytes=size)):
            ready = self._get_next(version, start + timeout_s, loads=True)
            self._next = None
            if self._last is None or ready.marker != self._served:
                return _receipt(self._load_or_go_back(ready), start)
            if ready is not self._last:
                ready.closed()
            return _receipt(self._last, start)

    def close(self) -> None:
        """Release the kept bytes. A running call releases the bytes at its end. Idempotent."""
        self._closed = True
        if not self._busy.locked():
            self._drop_next()
            self._last = None if self._last is None else self._last.closed()
            self._memory = CachingAllocator()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _alone(self, call: str, counted: Counted) -> Iterator[None]:
        try:
            with alone(self._busy, call):
                self._counted = counted
                yield
                self._counted = Counted(None)  # An error would keep frames and their bytes alive.
                if counted.error is not None:
                    raise counted.error
        finally:
            if self._closed:  # Closed during this call.
                self.close()

    def _get_next(self, version: int | None, deadline: float, *, loads: bool) -> Fetched:
        if self._closed:
            raise ClosedError("this Subscriber was closed. Make a new Subscriber.")
        version = None if version is None else check_version(version)
        ready = self._next
        is_kept = ready is not None and ready.held and version in (None, ready.marker.version)
        # `receive` loads what `verify` has checked, even of an ended trainer.
        if ready and is_kept and (loads or not replaced(ready.marker, self._transport)):
            return ready
        self._drop_next()
        self._next = self._fetch(version, deadline, served=self._served, loads=loads)
        return self._next

    def _drop_next(self) -> None:
        """Release the bytes of the next version, but remember that they were checked."""
        self._next = None if self._next in (None, self._last) else self._next.closed()

    def _fetch(
        self, version: int | None, deadline: float, *, served: Marker | None, loads: bool = False
    ) -> Fetched:
        """Return a version's checked bytes, once all readers of a group have voted for it.

        If the caller `loads` them, bytes may be unchecked: after a `verify`, or with check="ahead"
        if a version to go back to is kept. Bytes of a group are always checked before the vote.
        """
        kept = self._kept
        held = None if kept is None else kept.marker
        request = ReceiveRequest(self.plan, self.reader, version, held, served, deadline)
        found = self._transport.receive(request)
        last = found[-1]
        if kept is not None and last.marker == held:
            try:
                if held != self._served:  # A load may have written to these bytes.
                    check(self.plan, self.reader, kept)
                return kept
            except CorruptionError:
                self._last = kept.closed()
                return self._fetch(version, deadline, served=served, loads=loads)
        can_go_back = self._served is not None and kept is not None
        # For a reader of a group, markers() is empty, because every reader must vote.
        may_fail = can_go_back and last.marker in self._transport.markers()
        was_checked = self._next is not None and last.marker == self._next.marker
        may_skip = was_checked or (self._ahead and may_fail)
        if loads and may_skip and len(found) == 1 and last.marker.base is None:
            check_plan(self.plan, last.marker)
            size = self.plan.read_bytes(self.reader)
            return Fetched(last.marker, last.whole(), size, ReaderState.FETCHED)
        try:
            fetched = self._bring(found, request)
        except BaseException as error:  # Other readers wait for this vote.
            last.settle(f"{type(error).__name__}: {error}", deadline=deadline)
            raise
        try:
            last.settle("", deadline=deadline)
        except BaseException:
            fetched.closed()
            raise
        return fetched

    def _bring(self, found: Sequence[Incoming], request: ReceiveRequest) -> Fetched:
        """Return the checked bytes of the versions found. After a failed check, fetch once more.

        The second fetch ignores the version held, because this base of deltas may be damaged.
        """
        marker, base = found[-1].marker, self._kept
        apply = partial(bring, memory=self._memory, threads=self._threads, counted=self._counted)
        try:
            return apply(request, found, None if base is None else base.held)
        except CorruptionError:
            if marker not in self._transport.markers():
                raise
        again = replace(request, version=marker.version, held=None)
        fetched = apply(again, self._transport.receive(again), None)
        if base is not None and found[0].marker.base is not None:
            self._last = base.closed()
        return fetched

    def _load_or_go_back(self, new: Fetched) -> Fetched:
        served, self._state = self._served, ReaderState.TORN  # Until a load ends.
        if new is self._last:  # An earlier load left the engine torn, and this repairs it.
            self._last = None
        self._counted.begin_last()
        try:
            digests = self._feed(new)
        except Exception as error:  # After any error, the model must not stay torn.
            self._go_back(new, served, error)
        if self._last is not None:
            self._last.closed()
        return self._serve(new, digests)

    def _serve(self, fetched: Fetched, digests: Digests | None) -> Fetched:
        """Note that a version was loaded, and keep its bytes if they stay."""
        assert fetched.held is not None
        done = fetched._replace(state=ReaderState.CHECKED, digests=digests)
        self._state, self._last = ReaderState.LOADED, done if fetched.held.stays else done.closed()
        return self._last

    def _go_back(self, failed: Fetched, served: Marker | None, error: Exception) -> NoReturn:
        """Load the previous version again and raise TransferError, or EngineError if that fails."""
        failed.closed()
        self._counted = Counted(None)
        text = f"loading version {failed.marker.version} failed: {type(error).__name__}: {error}"
        text = text.rstrip(".")
        kept = self._kept
        gone = EngineError(f"{text}. There is no version to go back to. Restart the engine.")
        if served is None:
            raise gone from error
        try:
            if kept is None and served not in self._transport.markers():
                raise gone
            # If the failed load used up the caller's time, a wait is better than a torn model.
            if kept is None:
                old = self._fetch(served.version, time.monotonic() + _BACK_S, served=None)
            else:
                old = kept
                check(self.plan, self.reader, old)
            digests = self._feed(old)
        except Exception as second:
            if second is gone:
                raise gone from error
            raise EngineError(
                f"{text}. Going back to version {served.version} failed too: "
                f"{type(second).__name__}: {second}. Restart the engine."
            ) from error
        self._serve(old, digests)
        raise TransferError(f"{text}. Version {old.marker.version} was loaded again.") from error

    def _feed(self, fetched: Fetched) -> Digests | None:
        """Give the engine all tensors, each after its bytes were checked, and observe them."""
        plan, reader, threads = self.plan, self.reader, self._threads
        counted = self._counted
        is_copied = fetched.state is ReaderState.FETCHED and not isinstance(fetched.held, Lent)
        places = self._places() if is_copied else {}
        if places and all(place.device.type == "cpu" for place in places.values()):
            write(plan, reader, fetched, places, threads=threads, counted=counted)
            return None
        taken, given = 0, dict[str, Sequence[Sequence[str]]]()

        def tensors(feed: Feed) -> Iterator[tuple[str, Tensor]]:
            nonlocal taken
            for name, tensor in feed.tensors():
                taken += 1
                if self._observe is not None:
                    given[name] = loadable(name, tensor)
                yield name, tensor
                counted.add(tensor.nbytes)

        with feeding(plan, reader, fetched, self._convert, self._written, threads=threads) as feed:
            self._load(tensors(feed))
        if taken < len(feed.names):
            raise TransferError(
                f"load took {taken} of {len(feed.names)} tensors. Take every tensor in load=."
            )
        return None if self._observe is None else kept(given, self._observe())

    def _places(self) -> Mapping[str, Tensor]:
        """Return the engine's own tensors if `load` only copies into them. Otherwise, return {}."""
        is_plain = self._convert is None and self._observe is None
        return self._load.places() if is_plain and isinstance(self._load, InPlace) else {}


def _receipt(done: Fetched, start: float) -> Receipt:
    marker, seconds = done.marker, time.monotonic() - start
    return Receipt(marker.version, done.bytes, seconds, marker.digest, done.digests, marker.base)
