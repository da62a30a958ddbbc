"""Our client of vLLM's server, against a fake of its endpoints (a real one: test_vllm_fleet.py)."""

import asyncio
import contextlib
import importlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import torch

from primeblocks.errors import (
    DeadlineError,
    EngineError,
    MissingPackageError,
    PlanError,
    UnsupportedError,
    UsageError,
)
from primeblocks.weightsync import adapters, describe, plan_sync
from primeblocks.weightsync.adapters.vllm import VllmServer, attach, server_args, update
from primeblocks.weightsync.adapters.vllm import describe as describe_loads
from primeblocks.weightsync.marker import Receipt
from primeblocks.weightsync.transports import FileTransport
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.fake_engine import FakeEngine

RECEIPT = Receipt(2, 0, 0.0, "")


class FakeServer:
    """A `FakeEngine` behind the paths of vLLM's development mode."""

    def __init__(self, *, replicas=1, dev_mode=True, **engine):
        self.engine = FakeEngine([1, 1], **engine)
        self.replicas, self.dev_mode = replicas, dev_mode
        self.loop = asyncio.new_event_loop()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.threads = [
            threading.Thread(target=self.loop.run_forever),
            threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}),
        ]
        for thread in self.threads:
            thread.start()
        self.client = VllmServer(f"http://127.0.0.1:{self.server.server_port}")

    def calls(self, query, body):
        """For each path, the call of the engine."""
        engine, body = self.engine, body or {}
        clear = {"true": True, "false": False}.get(query.get("clear_cache", [""])[0])
        mode = query.get("mode", [""])[0]
        return {
            "/is_paused": engine.is_paused,
            "/pause": lambda: engine.pause_generation(mode=mode, clear_cache=clear),
            "/wake_up": lambda: engine.wake_up(query["tags"]),
            "/init_weight_transfer_engine": lambda: engine.init_weight_transfer_engine(
                body["init_info"]
            ),
            "/start_weight_update": engine.start_weight_update,
            "/update_weights": lambda: engine.update_weights(SimpleNamespace(**body)),
            "/finish_weight_update": lambda: engine.finish_weight_update(
                body.get("weight_version")
            ),
            "/reset_encoder_cache": engine.reset_encoder_cache,
            "/collective_rpc": lambda: engine.collective_rpc(
                body["method"], body["timeout"], body["args"]
            ),
        }

    def answer(self, target, body):
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        if not self.dev_mode:
            return 404, {"detail": "Not Found"}
        if parts.path == "/get_world_size":
            world = 2 * (self.replicas if query["include_dp"] == ["true"] else 1)
            return 200, {"world_size": world}
        try:
            done = asyncio.run_coroutine_threadsafe(
                self.calls(query, body)[parts.path](), self.loop
            ).result(TIMEOUT_S)
        except RuntimeError as error:
            return 500, {"error": str(error)}
        names = {"/is_paused": "is_paused", "/collective_rpc": "results"}
        return 200, {names.get(parts.path, "message"): done}

    def handler(fake):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, told = fake.answer(self.path, body)
                text = json.dumps(told).encode()
                with contextlib.suppress(OSError):  # The client may have gone.
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(text)))
                    self.end_headers()
                    self.wfile.write(text)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        return Handler

    def close(self):
        self.loop.call_soon_threadsafe(self.engine.wake)
        self.server.shutdown()
        self.server.server_close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        for thread in self.threads:
            thread.join(TIMEOUT_S)
        self.loop.close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(**how):
            server = FakeServer(**how)
            stack.callback(server.close)
            return server

        yield start


def update_one(server, *, timeout_s=TIMEOUT_S, **how):
    return asyncio.run(update(server.client, RECEIPT, timeout_s=timeout_s, **how))


@pytest.mark.parametrize(
    ("mode", "pause"),
    [("continue", "keep False"), ("recompute", "keep True"), ("abort", "abort True")],
)
def test_an_update_over_http(serve, mode, pause):
    server = serve()
    assert update_one(server, in_flight=mode).version == 2
    assert server.engine.serving == ((2, 2), "2")
    assert f"pause {pause}" in server.engine.log
    assert server.engine.features_of == set()
    reset, resumed = (server.engine.log.index(name) for name in ("reset encoder", "resume"))
    assert reset < resumed


def test_another_way_with_requests_is_refused(serve):
    server = serve()
    with pytest.raises(UsageError, match=r"\['continue', 'recompute', 'abort'\]; got 'wait'"):
        update_one(server, in_flight="wait")
    assert not server.engine.log


def test_workers_describe_their_loads_over_http(serve):
    checkpoint = describe({"w": torch.zeros(4, 2), "b": torch.zeros(2)})
    server = serve()
    reads = asyncio.run(describe_loads(server.client, checkpoint, timeout_s=TIMEOUT_S))
    assert [one.sources for one in reads] == [checkpoint] * 2
    told = {"value": reads[0].to_json()[:-3] + '{"w":"why"}]'}
    server.engine._describe = lambda _: [told]
    (one,) = asyncio.run(describe_loads(server.client, checkpoint, timeout_s=TIMEOUT_S))
    assert one.inexact == {"w": "why"}
    server.engine._describe = lambda _: [told, {"error": "PlanError", "message": "no"}]
    with pytest.raises(PlanError, match="no"):
        asyncio.run(describe_loads(server.client, checkpoint, timeout_s=TIMEOUT_S))


def test_attach_sends_plan_and_transport_and_refuses_replicas(serve, tmp_path):
    source = describe({"w": torch.zeros(4)})
    plan = plan_sync([source], source.whole(), bucket_bytes=1 << 10)
    server, replicated = serve(), serve(replicas=3)
    with FileTransport(str(tmp_path), owner=True) as transport:
        asyncio.run(attach(server.client, plan, transport, timeout_s=TIMEOUT_S))
        assert server.engine.log[:2] == ["primeblocks_state", "init"]
        sent = {"transport": transport.spec(), "plan": plan.to_json(), "first_reader": 0}
        assert server.engine.init_info == sent
        with pytest.raises(UnsupportedError, match="an engine with 3 replicas"):
            asyncio.run(attach(replicated.client, plan, transport, timeout_s=TIMEOUT_S))
    assert replicated.engine.log == []


def test_a_server_without_the_endpoints_is_told_how_to_start(serve):
    with pytest.raises(EngineError, match="has no /is_paused. Start .* VLLM_SERVER_DEV_MODE=1"):
        update_one(serve(dev_mode=False))


def test_a_refusal_is_an_engine_error_and_a_retry_succeeds(serve):
    server = serve(faults={7: "refuse"})
    with pytest.raises(EngineError, match="/update_weights answered 500: .*refused by script"):
        update_one(server)
    assert server.engine.serving == ((1, 1), "1")
    update_one(server)
    assert server.engine.serving == ((2, 2), "2")


def test_a_server_that_hangs_ends_at_the_deadline_and_stays_paused(serve):
    server = serve(faults={7: "hang"})
    # The update and its request have one deadline: either may see it first.
    late = r"(did not load in time|no answer within).*Engines .0. stay paused"
    with pytest.raises(DeadlineError, match=late):
        update_one(server, timeout_s=3)  # Else it hangs for ever.
    server.loop.call_soon_threadsafe(server.engine.wake)
    update_one(server)
    assert server.engine.serving == ((2, 2), "2")


def test_nobody_at_the_address():
    server = FakeServer()
    server.close()
    with pytest.raises(EngineError, match="died before it could answer.*ConnectError"):
        update_one(server)


def test_a_trainer_drives_servers_without_vllm(monkeypatch):
    monkeypatch.setattr(adapters, "vllm", adapters.vllm)  # It is imported anew.
    for name in [*sys.modules]:
        if name.startswith((adapters.vllm.__name__, "vllm.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm = importlib.import_module("primeblocks.weightsync.adapters.vllm")
    vllm.VllmServer("http://host:1")
    assert vllm.server_args() == server_args()
    remedy = r"vllm is not installed\. Run in your clone of primeblocks: pip install '\.\[vllm\]'"
    for needs_it in (vllm.engine_args, vllm.register, lambda: vllm.WorkerExtension):
        with pytest.raises(MissingPackageError, match=remedy):
            needs_it()
