"""A wire over plain TCP. It reads from any machine that it can reach, without RDMA or NIXL."""

from __future__ import annotations

import secrets
import socket
import socketserver
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, Self

from torch import Tensor

from ...errors import CorruptionError, DeadlineError, TransferError, UnsupportedError, UsageError
from ..held import left_s
from ..marker import as_corruption
from .carriers import Read, noted

__all__ = ["TcpWire"]

_TOKEN_BYTES = 16
_REQUEST = struct.Struct(f"!{_TOKEN_BYTES}sQQ")  # The buffer's token, first byte, number of bytes.
_GRANTED, _REFUSED = b"\x01", b"\x00"
_EVERYWHERE = ("", "0.0.0.0", "::")
_STEP_BYTES = 16 << 20  # Between two looks at the clock.
_IDLE_S = 60.0  # The time that a reader has for a step, and until its next request.
_POLL_S = 0.05  # How often the server looks whether it was closed. `close` waits for a look.

_Address = tuple[str, int]


class TcpWire:
    """Reads CPU memory of other processes over TCP.

    If you pass `host`, the wire starts a server, from which other processes can read. Without
    `host`, this process only reads. The server has a thread for each connected reader, and sends
    bytes directly from a buffer. A call of `read` has one connection at a time, which it keeps for
    successive reads from the same process. To read a buffer, a reader needs the random token that
    `share` returned. The wire does not encrypt bytes, so use the wire only in a network of trusted
    machines. A `Subscriber` checks all bytes.

    Args:
        host: an address of this machine that readers can reach. The server listens only on `host`.
        port: the port to listen on. With 0, the server chooses a free port.

    Raises:
        UsageError: the server cannot listen on `host` and `port`, or `host` is a wildcard.
    """

    def __init__(self, host: str | None = None, *, port: int = 0) -> None:
        self._shared: dict[bytes, Tensor] = {}
        self._host = host
        self._server = None if host is None else _serve(host, port, self._shared)
        self._forgotten = weakref.finalize(self, _end_aside, self._server)
        self._forgotten.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def spec(self) -> dict[str, Any]:
        return {"kind": "tcp"}

    def share(self, buffer: Tensor) -> dict[str, Any]:
        if buffer.device.type != "cpu":
            raise UnsupportedError(
                f"TcpWire reads and sends CPU memory; got a buffer on {buffer.device}. "
                'Make the transport with device="cpu".'
            )
        if self._server is None:
            return {}  # This process only reads into the buffer.
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._shared[token] = buffer
        return {"host": self._host, "port": self._server.server_address[1], "token": token.hex()}

    def unshare(self, buffer: Tensor) -> None:
        for token, shared in list(self._shared.items()):
            if shared is buffer:
                del self._shared[token]

    def read(self, reads: Sequence[Read], *, deadline: float) -> None:
        """Do all reads, one after the other.

        Raises CorruptionError if the `note` of a read is not from a `TcpWire`.
        """
        done = 0
        for at, mine in groupby(reads, lambda read: _address(read.note)):
            try:
                with _connected(at, deadline) as link:
                    for read in mine:
                        _read(link, read, deadline)
                        done += 1
            except TimeoutError as error:
                raise DeadlineError(
                    f"only {done} of {len(reads)} reads ended in time. Pass a longer timeout_s."
                ) from error
            except OSError as error:
                where = f"{at[0]}:{at[1]}"
                raise TransferError(
                    f"a read from {where} failed: {error}. Check that the trainer is alive "
                    "and its port is open."
                ) from error

    def close(self) -> None:
        self._forgotten.detach()
        self._shared.clear()
        if self._server is not None:
            self._server.end()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address = True, True
    request_queue_size = 1024  # All engines may connect at the same time.

    def __init__(self, at: _Address, family: int, shared: Mapping[bytes, Tensor]) -> None:
        self.address_family = family
        self.shared, self._links = shared, set[Any]()
        super().__init__(at, _Answers)
        serve = partial(self.serve_forever, _POLL_S)
        self._thread = threading.Thread(target=serve, daemon=True, name="tcp-wire")
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._links.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._links.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent, because a reader that hung up has its own error, and may connect again."""

    def end(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        for link in list(self._links):
            with suppress(OSError):  # The link's own thread may have closed it.
                link.shutdown(socket.SHUT_RDWR)


class _Answers(socketserver.BaseRequestHandler):
    """Serves the requests of one reader, one after the other, until it hangs up."""

    server: _Server

    def handle(self) -> None:
        self.request.settimeout(_IDLE_S)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (asked := _receive(self.request, _REQUEST.size)) is not None:
            token, start, size = _REQUEST.unpack(asked)
            buffer = self.server.shared.get(token)
            if buffer is None or start + size > len(buffer):
                self.request.sendall(_REFUSED)
                continue
            self.request.sendall(_GRANTED)
            view = buffer.numpy().data[start : start + size]
            for at in range(0, size, _STEP_BYTES):
                self.request.sendall(view[at : at + _STEP_BYTES])


def _end_aside(server: _Server | None) -> None:
    """End the server of a wire that was garbage-collected, maybe in a thread of that server."""
    if server is not None:
        threading.Thread(target=server.end, daemon=True).start()


def _serve(host: str, port: int, shared: Mapping[bytes, Tensor]) -> _Server:
    why: object = "readers could not connect to it"
    try:
        if host not in _EVERYWHERE:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            return _Server((host, port), family, shared)
    except (OSError, OverflowError, ValueError) as error:
        why = error
    raise UsageError(
        f"cannot listen on {host!r}, port {port}: {why}. Pass an address of this machine that "
        "readers can reach."
    )


def _address(note: Mapping[str, Any]) -> _Address:
    port, host = noted(note, "port"), note.get("host")
    with suppress(UnicodeError):  # Not a host name: a label is empty or too long.
        if isinstance(host, str) and host.encode("idna").count(0) == 0 and 0 < port < 1 << 16:
            return host, port
    raise CorruptionError(
        f"the note of a buffer cannot be read: {str(note)[:100]!r} has no host and port. Use "
        "TcpWire on both sides."
    )


def _connected(at: _Address, deadline: float) -> socket.socket:
    met = OSError("the name has no address")
    for family, kind, protocol, _, there in socket.getaddrinfo(*at, type=socket.SOCK_STREAM):
        link = socket.socket(family, kind, protocol)
        try:
            link.settimeout(_left_s(deadline))  # One deadline for all addresses of a name.
            link.connect(there)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        except OSError as error:
            link.close()
            met = error
    raise met


def _read(link: socket.socket, read: Read, deadline: float) -> None:
    with as_corruption("the note of a buffer"):
        token = bytes.fromhex(read.note["token"])
    link.settimeout(_left_s(deadline))
    link.sendall(_REQUEST.pack(token, read.start, len(read.target)))
    answer = _receive(link, len(_GRANTED))
    if answer is None:
        raise ConnectionResetError("the other process closed the connection")
    if answer != _GRANTED:
        raise TransferError(
            f"{len(read.target):,} bytes from {read.start:,} on were removed, because their "
            "version was retired. Receive the newest version."
        )
    room, done = read.target.numpy().data, 0
    while done < len(room):
        link.settimeout(_left_s(deadline))
        count = link.recv_into(room[done : done + _STEP_BYTES])
        if count == 0:
            raise ConnectionResetError(
                f"the other process closed the connection after {done:,} bytes"
            )
        done += count


def _receive(link: socket.socket, size: int) -> bytes | None:
    """Return `size` bytes, or None if the other end hung up."""
    received = b""
    while len(received) < size:
        more = link.recv(size - len(received))
        if not more:
            return None
        received += more
    return received


def _left_s(deadline: float) -> float:
    if (seconds := left_s(deadline)) <= 0:
        raise TimeoutError
    return seconds
