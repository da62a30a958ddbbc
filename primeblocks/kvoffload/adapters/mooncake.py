"""A tier in Mooncake Store, which engines on several machines share.

    host = HostTier(capacity_bytes=..., page_bytes=...)
    client = connect("10.0.0.1:50051", hostname="10.0.0.7", segment_bytes=64 << 30, protocol="rdma")
    store = TieredStore([host, MooncakeTier(client, host, namespace="glm-5")])

An engine finds the pages that other engines wrote, if namespace, keys and sizes of pages are equal.
Mooncake moves bytes directly between the slab of the host tier and the memory of other machines.
Mooncake's master decides which pages are evicted.

The code of this tier is based on the source of Mooncake 0.3.13 (store_py.cpp, real_client.cpp and
types.h). The tier was run with the wheel `mooncake-transfer-engine-non-cuda` over TCP on one
machine. The tier was not run over RDMA.
"""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...errors import (
    CapacityError,
    ClosedError,
    CorruptionError,
    DeadlineError,
    EngineError,
    MissingPackageError,
    PlanError,
    PrimeblocksError,
)
from ..page import DIGEST_BYTES, PageKey
from ..tier import Found, HostTier, Record

__all__ = ["MooncakeTier", "connect"]

_BATCH = 64
_INVALID_PARAMS = -600
_CLOSE_S = 120.0  # twice the longest call that was measured
_MAGIC = b"pbpage\x00\x01"
_HEADER = struct.Struct(f"<8s32s{DIGEST_BYTES}sQ")  # magic, name, digest, bytes of the content

# ErrorCode in mooncake-store/include/types.h, 0.3.13.
# REPLICA_IS_NOT_READY, OBJECT_NOT_FOUND, REPLICA_NOT_FOUND, REPLICA_IS_GONE
_MISS = frozenset({-703, -704, -710, -712})
_ERRORS: dict[int, tuple[type[PrimeblocksError] | type[OSError], str]] = {
    **dict.fromkeys(  # NO_AVAILABLE_HANDLE, DFS_QUOTA_EXCEEDED, TENANT_QUOTA_EXCEEDED
        (-200, -1602, -1700), (CapacityError, "Mooncake has no room for the page")
    ),
    **dict.fromkeys(  # TRANSFER_FAIL, RPC_FAIL, DFS_SERVICE_UNAVAILABLE
        (-800, -900, -1601), (ConnectionError, "Mooncake lost its connection")
    ),
    **dict.fromkeys(  # RPC_TIMEOUT, DFS_NETWORK_TIMEOUT
        (-901, -1600), (DeadlineError, "Mooncake did not get an answer in time")
    ),
    # LEASE_EXPIRED, CHECKSUM_MISMATCH
    -707: (DeadlineError, "Mooncake's lease ended before the page was read"),
    -801: (CorruptionError, "Mooncake read other bytes than it wrote"),
}
# After these, the next call is likely to wait just as long.
_LOST = frozenset({-800, -900, -1601, -901, -1600})

Wrong = PrimeblocksError | OSError


def connect(
    master: str,
    *,
    hostname: str,
    segment_bytes: int = 0,
    buffer_bytes: int = 16 << 20,
    protocol: str = "tcp",
    devices: str = "",
    metadata: str = "P2PHANDSHAKE",
    timeout_s: float = 10.0,
) -> Any:
    """Join a Mooncake Store. Local, except for the connection to Mooncake.

    Args:
        master: the host and port of the master's RPC server.
        hostname: the name under which other clients reach this machine.
        segment_bytes: the bytes of memory that this process gives to pages of all engines: 0, or at
            least 16 MiB.
        buffer_bytes: the size of Mooncake's own buffer, for values that Mooncake reads from a disk.
        protocol: "tcp" or "rdma".
        devices: RDMA devices, separated by commas.
        metadata: Mooncake's metadata server. The default works without a metadata server.
        timeout_s: how long to try to reach the master. Without a master, Mooncake's own setup
            would block the whole interpreter for 90 s (measured with 0.3.13).

    Raises:
        MissingPackageError: Mooncake, or a library that it links, is not installed.
        PlanError: `master` is not host:port.
        DeadlineError: `master` does not answer.
        EngineError: `master` refuses the connection, or Mooncake refuses to set the client up.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        remedy = (
            "Run: pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda on a "
            f"machine without CUDA; both link libibverbs.so.1 (apt install libibverbs1). {error}"
        )
        raise MissingPackageError("mooncake", remedy=remedy) from error
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal():
        raise PlanError(f"the address of a Mooncake master must be host:port; got {master!r}")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_s).close()
    except TimeoutError as error:
        raise DeadlineError(f"no Mooncake master answered at {master} in {timeout_s} s") from error
    except OSError as error:
        raise EngineError(f"no Mooncake master listens at {master}: {error}") from error
    client = MooncakeDistributedStore()
    code = client.setup(hostname, metadata, segment_bytes, buffer_bytes, protocol, devices, master)
    if code:
        raise EngineError(
            f"Mooncake refused a client of {master} on {hostname} over {protocol} with "
            f"segment_bytes={segment_bytes}: error {code}. Its log on stderr says why."
        )
    return client


class MooncakeTier:
    """A tier of pages that all engines of a Mooncake Store share.

    A value has a header, the page, its attachments, and zeros up to the size of a frame. All values
    have one size, because a reader must know the size of a value. The first value that is written
    under a key stays until Mooncake evicts the value or an engine drops it.

    The tier cannot stop a call to Mooncake, because Mooncake uses the frames of the call until the
    call ends. A call takes 30 s if the master hangs, and 60 s if the process that stores the page
    hangs (measured with 0.3.13). Calls of the `TieredStore` still end at their own deadlines. After
    a call that was late or lost its connection, all loads miss for `rest_s` seconds. Threads may
    share a tier. Puts and gets of a tier run one after the other.

    Args:
        client: the result of `connect`. The tier closes this client.
        host: the host tier of the store, whose slab is registered with Mooncake.
        namespace: the prefix of all names in the store. The prefix has 1 to 64 characters: letters,
            digits and `_.-`.
        rest_s: for how many seconds the tier does not call Mooncake, except in `clear` and
            `close`, after a call that was late or lost its connection.
        clock: a monotonic clock: a function that returns seconds.

    Raises:
        PlanError: `namespace` is empty, is too long, or has a character that is not allowed.
        EngineError: Mooncake refuses to register the slab.
    """

    name = "mooncake"
    shared = True
    capacity_pages = 0

    def __init__(
        self,
        client: Any,
        host: HostTier,
        *,
        namespace: str,
        rest_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", namespace):
            raise PlanError(
                "a namespace must have 1 to 64 letters, digits, dots, dashes and underscores; "
                f"got {namespace!r}"
            )
        self.page_bytes, self.attachment_bytes = host.page_bytes, host.attachment_bytes
        self._frame_bytes = host.frame_bytes
        self._namespace = namespace
        self._rest_s, self._clock, self._rests_until = rest_s, clock, clock()
        self._client = client
        self._turn = threading.Lock()  # whose thread has the headers and the zeros
        self._changed = threading.Condition()
        self._calls, self._closed = 0, False
        headers_bytes = _BATCH * _HEADER.size
        scratch = np.zeros(headers_bytes + host.frame_bytes - host.page_bytes, np.uint8)
        self._headers = scratch[:headers_bytes].reshape(_BATCH, _HEADER.size)
        self._zeros = scratch[headers_bytes:]
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
        """Write pages that the store lacks. Cost: a request per 64 pages, and the transfer."""
        answers: list[Wrong | None] = []
        for batch in _batches([record.key for record in records]):
            with self._turn:
                answers += self._put(records[batch])
        return answers

    def get(
        self, keys: Sequence[PageKey], *, into: Sequence[np.ndarray]
    ) -> list[Found | Wrong | None]:
        """Read pages, and remove wrong values. Cost: a request per 64 pages, and the transfer."""
        answers: list[Found | Wrong | None] = []
        for batch in _batches(keys):
            with self._turn:
                answers += self._get(keys[batch], into[batch])
        return answers

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Remove pages for all engines, even while other engines read them. Cost: one request.

        Raises:
            OSError, DeadlineError: Mooncake did not remove the pages.
        """
        if self._resting():
            raise self._at_rest()
        if keys:
            with self._call() as client:
                codes = client.batch_remove([self._path(self._named(key)) for key in keys], True)
            self._expect([code for code in codes if code not in _MISS])

    def clear(self) -> None:
        """Remove all pages of the namespace for all engines.

        Cost: one request. Raises the errors of `drop`.
        """
        pattern = f"^{self._namespace.replace('.', '[.]')}/"
        with self._call() as client:
            self._expect([client.remove_by_regex(pattern, True)])

    def flush(self) -> None:
        """Do nothing. Mooncake decides how durable pages are."""

    def holds(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return which pages Mooncake has.

        During the pause of `rest_s`, the result is False for all pages. Cost: one request.

        Raises:
            OSError, DeadlineError: Mooncake did not answer.
        """
        if not keys or self._resting():
            return [False] * len(keys)
        with self._call() as client:
            codes = client.batch_is_exist([self._path(self._named(key)) for key in keys])
        self._expect(codes)
        return [code == 1 for code in codes]

    def keys(self) -> list[PageKey]:
        return []

    def close(self) -> None:
        """Leave the store, and withdraw the memory that this process gave to it.

        A second call does nothing. The first call blocks the whole interpreter for 2 s, or for 8 s
        if Mooncake's master has ended (measured with 0.3.13).

        Raises:
            DeadlineError: a call of another thread has not ended after two minutes. The client
                stays open, and the slab stays registered.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            # Mooncake's close would pull the client away under calls of other threads.
            if not self._changed.wait_for(lambda: self._calls == 0, _CLOSE_S):
                raise DeadlineError(
                    f"{self._calls} calls of {self.name} have not ended after {_CLOSE_S:g} s. "
                    "If the master or an owner of memory hangs, end it. Otherwise end this process."
                )
        for address in self._registered:
            self._client.unregister_buffer(address)
        self._client.close()

    def _put(self, records: Sequence[Record]) -> list[Wrong | None]:
        if self._resting():
            return [self._at_rest() for _ in records]
        paths, addresses, sizes = [], [], []
        for record, header in zip(records, self._headers, strict=False):
            name, length = self._named(record.key), record.content.nbytes
            packed = _HEADER.pack(_MAGIC, name, record.digest, length)
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
        names = [self._named(key) for key in keys]
        paths, headers = [self._path(name) for name in names], self._headers[: len(keys)]
        headers[:] = 0
        addresses = [
            [header.ctypes.data, frame.ctypes.data]
            for header, frame in zip(headers, into, strict=True)
        ]
        sizes = [[_HEADER.size, self._frame_bytes]] * len(keys)
        with self._call() as client:
            codes = client.batch_get_into_multi_buffers(paths, addresses, sizes)
            answers = list(map(self._answer, codes, headers, names))
            pairs = zip(paths, answers, strict=True)
            # A put would leave a wrong value, and every read would find it.
            if wrong := [path for path, each in pairs if isinstance(each, CorruptionError)]:
                client.batch_remove(wrong, True)
        return answers

    def _answer(self, code: int, header: np.ndarray, name: bytes) -> Found | Wrong | None:
        if code in _MISS:
            return None
        if code == _INVALID_PARAMS:
            return CorruptionError(f"Mooncake has a value that is larger than a page: error {code}")
        if error := self._error(code):
            return error
        magic, named, digest, length = _HEADER.unpack(header.tobytes())
        if magic != _MAGIC or named != name:
            return CorruptionError(
                f"Mooncake has a value of another kind under the name {name.hex()}"
            )
        return Found(length, digest)

    def _named(self, key: PageKey) -> bytes:
        # A store with other sizes names the same key differently.
        sizes = struct.pack("<QQ", self.page_bytes, self.attachment_bytes)
        return hashlib.sha256(sizes + key.encode()).digest()

    def _path(self, name: bytes) -> str:
        return f"{self._namespace}/{name.hex()}"

    @contextmanager
    def _call(self) -> Iterator[Any]:
        """Lend the client. It is not closed while it is lent."""
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
        if code >= 0:
            return None
        if code in _LOST:
            self._rests_until = self._clock() + self._rest_s
        kind, what = _ERRORS.get(code, (OSError, "Mooncake refused"))
        return kind(f"{what}: error {code}")

    def _resting(self) -> bool:
        return self._clock() < self._rests_until

    def _at_rest(self) -> ConnectionError:
        return ConnectionError(
            f"{self.name} is not used for {self._rest_s} s after a lost connection"
        )


def _batches(keys: Sequence[PageKey]) -> Iterator[slice]:
    """Cut into requests of 64 distinct pages. Mooncake 0.3.13 fills only one of two equal ones."""
    start, seen = 0, set[PageKey]()
    for at, key in enumerate(keys):
        if key in seen or len(seen) == _BATCH:
            yield slice(start, at)
            start, seen = at, set()
        seen.add(key)
    if seen:
        yield slice(start, len(keys))
