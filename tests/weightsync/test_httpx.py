"""Requests to servers that answer badly, slowly, or not at all."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from primeblocks.errors import DeadlineError, EngineError, UnsupportedError
from primeblocks.weightsync.adapters.httpx import JsonServer
from tests.deadlines import HANG_S
from tests.ports import free_port


@pytest.fixture
def serve():
    """Starts a server that hears one request and hands its connection to `answer`."""
    stop, threads, listeners = threading.Event(), [], []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    answer(connection, stop)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return JsonServer(f"http://127.0.0.1:{listener.getsockname()[1]}")

    yield start
    stop.set()
    for listener in listeners:
        with contextlib.suppress(OSError):  # macOS shuts no listener down.
            listener.shutdown(socket.SHUT_RDWR)  # Closing alone would not end an `accept`.
        listener.close()
    for thread in threads:
        thread.join(HANG_S)


def _whole(text, status="200 OK"):
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n"
    return lambda connection, stop: connection.sendall(head.encode() + text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b"null", {"answer": None}),
        (b"[1]", {"answer": [1]}),
        (b"", {}),
        (b"Cache flushed.\n", {"answer": "Cache flushed.\n"}),
        (b"\xff", {"answer": "\ufffd"}),
    ],
)
def test_every_answer_is_an_object(serve, text, answer):
    server = serve(_whole(text, "418 I'm a teapot"))
    assert server.exchange_blocking("POST", "/x", {"b": 2}, deadline=time.monotonic() + HANG_S) == (
        418,
        answer,
    )


_CUT_HEAD = b"HTTP/1.1 200 OK\r\nConte"
_CUT_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"


def _silent(connection, stop):
    stop.wait(HANG_S)


def _dribbling(connection, stop):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while not stop.wait(0.02):
        connection.sendall(b"1")


def _endless_head(connection, stop):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not stop.wait(0.02):
        connection.sendall(b"X")


@pytest.mark.parametrize("answer", [_silent, _dribbling, _endless_head])
def test_the_deadline_is_for_all_of_it(serve, answer):
    server, start = serve(answer), time.monotonic()
    with pytest.raises(DeadlineError, match=r"GET /y at http://.* got no answer within 0\.\d+ s"):
        server.exchange_blocking("GET", "/y", deadline=start + 0.2)


def test_an_answer_in_chunks(serve):
    text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    server = serve(lambda connection, stop: connection.sendall(text))
    assert server.exchange_blocking("GET", "/", deadline=time.monotonic() + HANG_S) == (200, {})


def test_a_deadline_that_has_passed(serve):
    with pytest.raises(DeadlineError):
        serve(_silent).exchange_blocking("GET", "/", deadline=time.monotonic() - 1)


@pytest.mark.parametrize("sent", [b"", _CUT_HEAD, _CUT_BODY, b"SSH-2.0"])
def test_a_server_that_hangs_up(serve, sent):
    server = serve(lambda connection, stop: connection.sendall(sent))
    with pytest.raises(EngineError, match=r"GET / at .* Restart the server"):
        server.exchange_blocking("GET", "/", deadline=time.monotonic() + HANG_S)


def test_a_caller_may_have_an_event_loop(serve):
    server = serve(_whole(b"{}"))

    async def call():
        return server.exchange_blocking("GET", "/", deadline=time.monotonic() + HANG_S)

    assert asyncio.run(call()) == (200, {})


def test_an_answer_that_only_ends_is_refused(serve):
    server = serve(lambda connection, stop: connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}"))
    with pytest.raises(EngineError, match="sent an answer without its length"):
        server.exchange_blocking("GET", "/", deadline=time.monotonic() + HANG_S)


def test_no_proxy_is_asked(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server = serve(_whole(b"{}"))
    assert server.exchange_blocking("GET", "/", deadline=time.monotonic() + HANG_S) == (200, {})


def test_no_server():
    port = free_port()
    for host in ("127.0.0.1", "localhost"):
        server = JsonServer(f"http://{host}:{port}")
        with pytest.raises(EngineError, match="ConnectError: All connection attempts failed"):
            server.exchange_blocking("GET", "/", deadline=time.monotonic() + HANG_S)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:30000",
        "https://host",
        "http://",
        "http://host/v1",
        "http://host:abc",
        "http://host:99999",
        "http://[::1",
    ],
)
def test_no_address(url):
    with pytest.raises(UnsupportedError, match="not the address of a server"):
        JsonServer(url)
