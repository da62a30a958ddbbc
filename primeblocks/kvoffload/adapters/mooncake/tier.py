"""Pages in a Mooncake Store."""

from __future__ import annotations

import hashlib
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    EngineError,
    PlanError,
    PrimeblocksError,
)
from ...host import HostTier
from ...page import DIGEST_BYTES, PageKey
from ...tier import Found, Record

__all__ = ["MooncakeTier"]

_BATCH = 64
_CLOSE_S = 120.0  # twice the longest call that was measured
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_INVALID_PARAMS = -600
_MAGIC = b"pbpage\x00\x01"
_HEADER = struct.Struct(f"<8s32s{DIGEST_BYTES}sQ")
_HEADER_BYTES = _HEADER.size

# ErrorCode in mooncake-store/include/types.h, 0.3.13.
# REPLICA_IS_NOT_READY, OBJECT_NOT_FOUND, REPLICA_NOT_FOUND, REPLICA_IS_GONE
_MISS = frozenset({-703, -704, -710, -712})

_Kind = type[PrimeblocksError] | type[OSError]
_NO_ROOM = (CapacityError, "Mooncake has no room for the page")
_NO_CONNECTION = (ConnectionError, "Mooncake lost its connection")
_NO_ANSWER = (DeadlineError, "Mooncake was not answered in time")
_ERRORS: dict[int, tuple[_Kind, str]] = {
    -200: _NO_ROOM,  # NO_AVAILABLE_HANDLE
    -1602: _NO_ROOM,  # DFS_QUOTA_EXCEEDED
    -1700: _NO_ROOM,  # TENANT_QUOTA_EXCEEDED
    -800: _NO_CONNECTION,  # TRANSFER_FAIL
    -900: _NO_CONNECTION,  # RPC_FAIL
    -1601: _NO_CONNECTION,  # DFS_SERVICE_UNAVAILABLE
    -901: _NO_ANSWER,  # RPC_TIMEOUT
    -1600: _NO_ANSWER,  # DFS_NETWORK_TIMEOUT
    -707: (DeadlineError, "Mooncake's lease ended before the page was read"),  # LEASE_EXPIRED
    -801: (CorruptionError, "Mooncake read other bytes than it wrote"),  # CHECKSUM_MISMATCH
}

# After these, the next call is likely to wait just as long.
_LOST = frozenset(code for code, is_ in _ERRORS.items() if is_ in (_NO_CONNECTION, _NO_ANSWER))

Wrong = PrimeblocksError | OSError


class MooncakeTier:
    """Pages that all engines of a Mooncake Store share.

    A value is a header, the page, its attachments and zeros up to the size of a frame, because a
    reader has to know the size. The first value of a key stays until Mooncake evicts it or somebody
    drops it.

    A call ends when Mooncake ends it: after 30 s if the master hangs, 60 s if the owner of the
    memory does (measured, 0.3.13). Frames belong to Mooncake until then, so nothing here gives up
    sooner; the store's own deadlines do. After such a call everything is a miss for `rest_s`.

    Args:
        client: what `connect` returned. The tier closes it.
        host: the tier above, whose slab is registered with Mooncake.
        namespace: prefix of all names in the store; letters, digits and `_.-`.
        rest_s: seconds without calls after one that lost its connection or came too late.
        clock: seconds that never go back.

    Raises:
        PlanError: `namespace` has other characters.
        EngineError: Mooncake refuses to register the slab.
    """

    shared = True
    capacity_pages = 0

    def __init__(
        self,
        client: Any,
        host: HostTier,
        *,
        namespace: str,
        name: str = "mooncake",
        rest_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise PlanError(
                "a namespace has 1 to 64 letters, digits, dots, dashes and underscores; got "
                f"{namespace!r}"
            )
        self.name = name
        self.page_bytes, self.attachment_bytes = host.page_bytes, host.attachment_bytes
        self._frame_bytes = host.frame_bytes
        self._namespace = namespace
        self._rest_s, self._clock, self._rests_until = rest_s, clock, clock()
        self._client = client
        self._changed = threading.Condition()
        self._calls, self._closed = 0, False
        scratch = np.zeros(_BATCH * _HEADER_BYTES + host.frame_bytes - host.page_bytes, np.uint8)
        self._headers = scratch[: _BATCH * _HEADER_BYTES].reshape(_BATCH, _HEADER_BYTES)
        self._zeros = scratch[_BATCH * _HEADER_BYTES :]
        self._registered: list[int] = []
        for memory, size in (
            (host.frame(0), host.capacity_pages * host.frame_bytes),
            (scratch, scratch.nbytes),
        ):
            code = client.register_buffer(memory.ctypes.data, size)
            if code:
                raise EngineError(f"Mooncake refused to register {size} bytes: error {code}")
            self._registered.append(memory.ctypes.data)

    def put(self, records: Sequence[Record]) -> list[Wrong | None]:
        """Write pages that are not there yet: one request for 64 pages, and the transfers."""
        answers: list[Wrong | None] = []
        for batch in _batches([record.key for record in records]):
            answers += self._put(records[batch])
        return answers

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]
    ) -> list[Found | Wrong | None]:
        """Read pages: one request for 64 pages, and the transfers.

        A value that is not the page of its key is removed from the store.
        """
        answers: list[Found | Wrong | None] = []
        for batch in _batches(keys):
            answers += self._get(keys[batch], into[batch])
        return answers

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Remove pages, for everybody, also while others read them: one request.

        Raises:
            OSError, DeadlineError: the store did not do it.
        """
        if self._resting():
            raise self._at_rest()
        if keys:
            self._remove([self._fingerprint(key) for key in keys])

    def clear(self) -> None:
        """Remove all pages of the namespace, for everybody: one request.

        Raises:
            OSError, DeadlineError: the store did not do it.
        """
        pattern = f"^{self._namespace.replace('.', '[.]')}/"
        with self._call() as client:
            self._expect([client.remove_by_regex(pattern, True)])

    def flush(self) -> None:
        """Do nothing: durability is left to Mooncake."""

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Tell which pages are there: one request; none while the tier rests. From any thread.

        Raises:
            OSError, DeadlineError: the store did not say.
        """
        if not keys or self._resting():
            return [False] * len(keys)
        with self._call() as client:
            codes = client.batch_is_exist([self._path(self._fingerprint(key)) for key in keys])
        self._expect(codes)
        return [code == 1 for code in codes]

    def keys(self) -> list[PageKey]:
        """Return no keys: a shared store is asked for each page."""
        return []

    def close(self) -> None:
        """Leave the store, and withdraw the memory that this process gave to it.

        A second call does nothing. Mooncake blocks the whole interpreter meanwhile, for 2 s, or for
        8 s if its master is gone (measured, 0.3.13).

        Raises:
            DeadlineError: a call of another thread has not ended after two minutes; the client, and
                with it the slab, stay Mooncake's.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # Mooncake's close would pull the client away under calls of other threads.
            if not self._changed.wait_for(lambda: self._calls == 0, _CLOSE_S):
                raise DeadlineError(
                    f"{self._calls} calls of {self.name} have not ended after {_CLOSE_S:g} s: is "
                    "the master or an owner of memory hung? End it, or this process."
                )
        for address in self._registered:
            self._client.unregister_buffer(address)
        self._client.close()

    def __len__(self) -> int:
        """Return 0: the pages of a namespace are not counted."""
        return 0

    def _put(self, records: Sequence[Record]) -> list[Wrong | None]:
        if self._resting():
            return [self._at_rest() for _ in records]
        paths, addresses, sizes = [], [], []
        for record, header in zip(records, self._headers, strict=False):
            name, length = self._fingerprint(record.key), record.content.nbytes
            packed = _pack_header(name, digest=record.digest, length=length)
            header[:] = np.frombuffer(packed, dtype=np.uint8)
            parts = [header, record.content, self._zeros[: self._frame_bytes - length]]
            paths.append(self._path(name))
            addresses.append([part.ctypes.data for part in parts if part.nbytes])
            sizes.append([part.nbytes for part in parts if part.nbytes])
        with self._call() as client:
            codes = client.batch_put_from_multi_buffers(paths, addresses, sizes)
        return [self._error(code) for code in codes]

    def _get(
        self, keys: Sequence[PageKey], into: Sequence[np.ndarray]
    ) -> list[Found | Wrong | None]:
        if self._resting():
            return [self._at_rest() for _ in keys]
        names = [self._fingerprint(key) for key in keys]
        headers = self._headers[: len(keys)]
        headers[:] = 0
        addresses = [
            [header.ctypes.data, frame.ctypes.data]
            for header, frame in zip(headers, into, strict=True)
        ]
        sizes = [[_HEADER_BYTES, self._frame_bytes]] * len(keys)
        with self._call() as client:
            codes = client.batch_get_into_multi_buffers(
                [self._path(name) for name in names], addresses, sizes
            )
        answers = [
            self._answer(code, header, name)
            for code, header, name in zip(codes, headers, names, strict=True)
        ]
        self._forget_wrong(names, answers)
        return answers

    def _answer(self, code: int, header: np.ndarray, name: bytes) -> Found | Wrong | None:
        if code in _MISS:
            return None
        if code == _INVALID_PARAMS:
            return CorruptionError(f"Mooncake holds a larger value than a page: error {code}")
        return self._error(code) or _unpack_header(header.tobytes(), name)

    def _forget_wrong(self, names: Sequence[bytes], answers: Sequence[object]) -> None:
        """Remove wrong values: a put would leave them, and every read would find them."""
        pairs = zip(names, answers, strict=True)
        wrong = [self._path(name) for name, each in pairs if isinstance(each, CorruptionError)]
        if wrong:
            with self._call() as client:
                client.batch_remove(wrong, True)

    def _remove(self, names: Sequence[bytes]) -> None:
        with self._call() as client:
            codes = client.batch_remove([self._path(name) for name in names], True)
        self._expect([code for code in codes if code not in _MISS])

    def _fingerprint(self, key: PageKey) -> bytes:
        return _fingerprint(key, page_bytes=self.page_bytes, attachment_bytes=self.attachment_bytes)

    def _path(self, name: bytes) -> str:
        return f"{self._namespace}/{name.hex()}"

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """Lend the client, which is not closed meanwhile."""
        with self._changed:
            if self._closed:
                raise ClosedError(f"the tier {self.name} is closed")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _expect(self, codes: Sequence[int]) -> None:
        for error in map(self._error, codes):
            if error is not None:
                raise error

    def _error(self, code: int) -> Wrong | None:
        if code in _LOST:
            self._rests_until = self._clock() + self._rest_s
        return _error_of(code)

    def _resting(self) -> bool:
        return self._clock() < self._rests_until

    def _at_rest(self) -> ConnectionError:
        return ConnectionError(f"{self.name} rests for {self._rest_s} s after a lost connection")


def _batches(keys: Sequence[PageKey]) -> Iterator[slice]:
    """Cut into requests of 64 pages, none twice: Mooncake 0.3.13 fills one of two, reports both."""
    start, seen = 0, set[PageKey]()
    for at, key in enumerate(keys):
        if key in seen or len(seen) == _BATCH:
            yield slice(start, at)
            start, seen = at, set()
        seen.add(key)
    if seen:
        yield slice(start, len(keys))


def _fingerprint(key: PageKey, *, page_bytes: int, attachment_bytes: int) -> bytes:
    """Return 32 bytes that name a page; stores with other sizes have other names for it."""
    sizes = struct.pack("<QQ", page_bytes, attachment_bytes)
    return hashlib.sha256(sizes + key.encode()).digest()


def _pack_header(name: bytes, *, digest: bytes, length: int) -> bytes:
    """Pack the header of a value; `length` counts page and attachments."""
    return _HEADER.pack(_MAGIC, name, digest, length)


def _unpack_header(data: bytes, name: bytes) -> Found | CorruptionError:
    """Invert `_pack_header` if `data` is the header of this page, else return an error."""
    magic, named, digest, length = _HEADER.unpack(data)
    if magic != _MAGIC or named != name:
        return CorruptionError(f"Mooncake holds something else under the name {name.hex()}")
    return Found(length, digest)


def _error_of(code: int) -> PrimeblocksError | OSError | None:
    """Return the error that a code stands for; None if it is not negative."""
    if code >= 0:
        return None
    kind, what = _ERRORS.get(code, (OSError, "Mooncake refused"))
    return kind(f"{what}: error {code}")
