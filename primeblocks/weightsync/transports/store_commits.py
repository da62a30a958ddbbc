"""`Commits` as notes in a torch Store. The leases are counts of readers, with a time limit.

A version is begun, then committed, then hidden. One note lists the committed versions. The owner
replaces only its own note, in one step of the store, so an owner that was replaced cannot commit.
Each marker is a note of its own, because a store takes only small values. The owner writes a marker
before it lists the marker's version, and empties the note after it has hidden the version. So a
reader that does not find a listed marker reads the list again. A reader adds 1 to the version's
count `held`, and then looks whether the version is still listed. At the end, the reader adds 1 to
the count `let_go`. The owner first hides a version, and then waits until both counts are equal, or
until `lease_s` is over. So a reader that died delays a publish by at most `lease_s`.
"""

from __future__ import annotations

import base64
import json
import math
import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import (
    CapacityError,
    CorruptionError,
    DeadlineError,
    TransferError,
    UsageError,
    shown,
)
from ..held import left_s
from ..marker import Marker, as_corruption
from .board import Board, store_spec
from .transport import Lease, check_call, retired

__all__ = ["StoreCommits"]

_COMMITS = "commits"
_LOOK_S = 0.005
_CLOSE_S = 1.0
_MOST_TEXT = 1 << 28  # bytes of an uncompressed note; the plan of a large model has 12 MB


class _Record(NamedTuple):
    """The owner's last note, which lists the version and the digest of each marker.

    `lease_s` is how long a reader may read after it was counted.
    """

    run: str
    lease_s: float
    listed: tuple[tuple[int, str], ...]


class StoreCommits:
    """A note that lists all markers, which the owner replaces, and counts of readers by version.

    Calls keep deadlines as `Board` does. A new owner takes over from the previous owner. If the
    previous owner still lives, its next commit is refused. Calls that write wait for each other, in
    all threads. The arguments are those of `PullTransport`.
    """

    look_s = 0.02

    def __init__(
        self,
        store: dist.Store,
        *,
        name: str = "policy",
        owner: bool = False,
        lease_s: float = 60.0,
        timeout_s: float = 60.0,
    ) -> None:
        self._store, self._name = store, name
        self._board = Board(store, f"weightsync/pull/{name}")
        self._owner, self._closed = owner, False
        self._begun: set[int] = set()
        self._hidden: dict[int, float] = {}
        self._seen: dict[str, Marker] = {}
        # A second thread could replace the note between a look at it and its replacement.
        self._writing = threading.Lock()
        self.run = ""
        if owner:
            if not 0 < lease_s < math.inf:
                raise UsageError(f"lease_s must be above 0 and finite; got {shown(lease_s)}.")
            self.run = secrets.token_hex(8)
            text = _text(_Record(self.run, float(lease_s), ()))
            self._board.post(_COMMITS, text, deadline=time.monotonic() + timeout_s)

    def spec(self) -> dict[str, Any]:
        return {"kind": "store", "name": self._name, "store": store_spec(self._store)}

    def begin(self, version: int, *, keep: Sequence[Marker], deadline: float) -> None:
        with self._write(deadline):
            mine = self._owned(deadline)
            kept = tuple((marker.version, marker.digest) for marker in keep)
            gone = [version for version, digest in mine.listed if (version, digest) not in kept]
            if gone:
                self._replace(mine, kept, deadline)
                self._hidden.update((version, time.monotonic()) for version in gone)
            for hidden, hidden_at in list(self._hidden.items()):
                self._await_readers(mine, hidden, hidden_at + mine.lease_s, deadline)
                del self._hidden[hidden]
            self._begun.add(version)

    def commit(self, marker: Marker, *, deadline: float) -> None:
        with self._write(deadline):
            mine = self._owned(deadline)
            if marker.version not in self._begun:
                raise UsageError(
                    f"commit() got version {marker.version}, which was not begun. Call begin() "
                    "first."
                )
            key = _key(mine.run, marker.digest)
            self._board.post(key, _compressed(marker.to_json()), deadline=deadline)
            listed = (*mine.listed, (marker.version, marker.digest))
            self._replace(mine, listed, deadline)
            self._begun.discard(marker.version)

    @contextmanager
    def _write(self, deadline: float) -> Iterator[None]:
        if not self._writing.acquire(timeout=left_s(deadline)):
            raise DeadlineError(
                f"the owner of {self._name!r} waited until its deadline for another thread that "
                "writes its commits. Raise timeout_s, or publish from one thread."
            )
        try:
            yield
        finally:
            self._writing.release()

    def abort(self, version: int) -> None:
        self._check(owner=True)
        self._begun.discard(version)  # Readers see only committed versions.

    def markers(self, *, deadline: float) -> tuple[Marker, ...]:
        last = None
        while (record := self._read(deadline)) is not None:
            found = [self._marker(record.run, digest, deadline) for _, digest in record.listed]
            markers = tuple(marker for marker in found if marker is not None)
            if len(markers) == len(found):
                self._seen = {marker.digest: marker for marker in markers}
                return markers
            if record == last:
                raise CorruptionError("the store has lost the marker of a version. Publish again.")
            last = record
        return ()

    def hold(self, marker: Marker, *, deadline: float) -> Lease:
        start = time.monotonic()
        self._count(marker.run, marker.version, "held", 1, deadline)
        # The owner hides a version before it reads the counts. So either the owner sees this reader
        # in the count, or this reader sees that the version is hidden.
        now = self._read(deadline)
        if now is None or (marker.version, marker.digest) not in now.listed:
            self._release(marker, deadline)
            raise retired(marker.version)
        once = ExitStack()
        once.callback(self._release, marker, deadline)
        return Lease(start + now.lease_s, once.close)

    def post(self, name: str, text: str, *, deadline: float) -> None:
        record = self._read(deadline)
        if record is None:
            raise TransferError(
                "the transport does not have an owner yet. Pass owner=True on rank 0."
            )
        self._board.post(f"{record.run}/{name}", _compressed(text), deadline=deadline)

    def look(self, name: str, *, run: str | None = None, deadline: float) -> str | None:
        if run is None:
            record = self._read(deadline)
            if record is None:
                return None
            run = record.run
        text = self._board.read(f"{run}/{name}", deadline=deadline, waits=False)
        return None if text is None else _decompressed(text)

    def hint(self) -> str:
        return f" All processes must use the same store, and the name {self._name!r} in it."

    def close(self) -> None:
        """Hide the owner's versions, unless another owner took over. Best effort. Idempotent."""
        if self._owner and not self._closed:
            deadline = time.monotonic() + _CLOSE_S
            with suppress(TransferError):
                self._replace(self._owned(deadline), (), deadline)
        self._closed = True

    def _release(self, marker: Marker, deadline: float) -> None:
        late = max(deadline, time.monotonic() + _CLOSE_S)
        self._count(marker.run, marker.version, "let_go", 1, late)

    def _read(self, deadline: float) -> _Record | None:
        """Return the current note, or None before the first owner."""
        self._check()
        text = self._board.read(_COMMITS, deadline=deadline, waits=False)
        return None if text is None else _parsed(text)

    def _marker(self, run: str, digest: str, deadline: float) -> Marker | None:
        if (seen := self._seen.get(digest)) is not None:
            return seen
        text = self._board.read(_key(run, digest), deadline=deadline, waits=False)
        return Marker.from_json(_decompressed(text)) if text else None

    def _await_readers(self, mine: _Record, version: int, over: float, deadline: float) -> None:
        never = threading.Event()
        while time.monotonic() < over:
            self._check()
            held = self._count(mine.run, version, "held", 0, deadline)
            if held == self._count(mine.run, version, "let_go", 0, deadline):
                return
            if time.monotonic() >= deadline:
                left_s = over - time.monotonic()
                raise CapacityError(
                    f"version {version} is still being read, and the next version needs its "
                    f"buffers. Its readers' leases end in {left_s:.1f} s. Publish again with a "
                    "longer timeout_s."
                )
            never.wait(_LOOK_S)

    def _owned(self, deadline: float) -> _Record:
        self._check(owner=True)
        now = self._read(deadline)
        if now is None or now.run != self.run:
            raise _deposed()
        return now

    def _replace(self, mine: _Record, listed: tuple[tuple[int, str], ...], deadline: float) -> None:
        new = _text(mine._replace(listed=listed))
        if self._board.replace(_COMMITS, _text(mine), new, deadline=deadline) != new:
            raise _deposed()
        gone = [_key(mine.run, row[1]) for row in mine.listed if row not in listed]
        self._board.clear(gone, deadline=deadline)

    def _count(self, run: str, version: int, what: str, amount: int, deadline: float) -> int:
        return self._board.add(f"{run}/{version}/{what}", amount, deadline=deadline)

    def _check(self, *, owner: bool = False) -> None:
        check_call(closed=self._closed, may=not owner or self._owner)


def _parsed(text: str) -> _Record:
    with as_corruption("the note of commits"):
        head = json.loads(text)
        listed = tuple((int(version), str(digest)) for version, digest in head["markers"])
        if not 0 < (lease_s := float(head["lease_s"])) < math.inf:
            raise ValueError(f"lease_s is {lease_s}")
        return _Record(str(head["run"]), lease_s, listed)


def _text(record: _Record) -> str:
    """Return a record as text. Equal records give equal text."""
    head: dict[str, Any] = {"run": record.run, "lease_s": record.lease_s}
    return json.dumps({**head, "markers": record.listed})


def _key(run: str, digest: str) -> str:
    return f"{run}/marker-{digest}"


def _compressed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _decompressed(text: str) -> str:
    with as_corruption("a note in the store"):
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text), _MOST_TEXT)
        if not unpacking.eof:
            raise ValueError("it is cut short or too long")
        return data.decode()


def _deposed() -> TransferError:
    return TransferError(
        "another owner took over. Only one trainer may publish under a name. Choose another name."
    )
