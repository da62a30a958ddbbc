"""A fake of SGLang's weight endpoints. It is ours: no SGLang code, no model, no generation.

It behaves as the source of sglang 0.5.23 reads, bad habits included: a load that fails half-way
is "rolled back" from the new path, and a single slot holds the answer to the load that was asked
for last. Its bodies are checked more strictly: a field that SGLang does not know is refused.
"""

import contextlib
import hashlib
import json
import queue
import threading
from concurrent.futures import Future, InvalidStateError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors import safe_open

from tests.deadlines import HANG_S

# Of srt/managers/io_struct.py: what a body may hold. None: also null.
FIELDS = {
    "/pause_generation": {"mode": ("abort", "retract", "in_place")},
    "/continue_generation": {"torch_empty_cache": (bool,)},
    "/update_weights_from_disk": {
        "model_path": (str,),
        "load_format": (str, None),
        "abort_all_requests": (bool,),
        "weight_version": (str, None),
        "is_async": (bool,),
        "torch_empty_cache": (bool,),
        "keep_pause": (bool,),
        "recapture_cuda_graph": (bool,),
        "token_step": (int,),
        "flush_cache": (bool,),
        "manifest": (dict, None),
    },
    "/weights_checker": {
        "action": (str,),
        "allow_quant_error": (bool,),
        "skip_tensor_list": (list, None),
        "selector": ("target", "draft", "all"),
    },
}


class Died(Exception):
    """The scheduler ended; so does the server, in the middle of what it says."""


class FakeSglang:
    """A server on a free port of this host, until `close`.

    Faults: `before_load(path)` is called before each load. `break_after[path]` says for each
    attempt to read that path after how many tensors it raises. `before_answer(endpoint)` is
    called before each answer and may return bytes to be sent in its place.
    """

    def __init__(self, checkpoint, *, version="0.5.23", api_key=None):
        self.version, self.api_key = version, api_key
        self.path = self.scheduler_path = str(checkpoint)
        self.label = self.scheduler_label = "default"
        self.weights = dict(_read(self.path))
        self.running, self.waiting, self.aborted = 0, 0, 0
        self.cached = {"default"}  # Of which versions the KV cache holds pages.
        self.blocked = self.engine_paused = self.dead = False
        self.asked = []
        self.break_after = {}
        self.before_load = self.before_answer = lambda path: None
        self._slot = None
        self._commands = queue.Queue()
        self._threads = [threading.Thread(target=self._schedule, daemon=True)]
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._threads.append(threading.Thread(target=self._server.serve_forever, args=(0.01,)))
        for thread in self._threads:
            thread.start()

    def close(self):
        self._commands.put(None)
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join()

    # --- one request at a time, as SGLang's scheduler --------------------------------------------

    def _schedule(self):
        while (command := self._commands.get()) is not None:
            run, reply = command
            try:
                answer = run()
            except Exception as error:
                self.dead = True
                answer = Died(error)
            with contextlib.suppress(InvalidStateError):
                reply(answer)

    def in_scheduler(self, run):
        future = Future()
        self._commands.put((run, future.set_result))
        return _result(future)

    def _load(self, path, label, flush):
        self.scheduler_path = path
        self.before_load(path)
        if not list(Path(path).glob("*.safetensors")):
            return False, "Failed to get weights iterator: no weights."
        try:
            self._load_tensors(path)
        except Exception as error:
            self._load_tensors(self.scheduler_path)  # SGLang's "original weights": the new path.
            return False, f"Failed to update weights: {error}.\nRolling back to original weights."
        self.scheduler_label = label or self.scheduler_label
        if flush and not self._flushed():
            return False, "Weights were updated, but the cache was not flushed because requests are"
        return True, "Succeeded to update model weights."

    def _load_tensors(self, path):
        # In place and without looking for what is missing, as model loaders do.
        attempts = self.break_after.get(path)
        broken = attempts.pop(0) if attempts else None
        for taken, (name, tensor) in enumerate(_read(path)):
            if taken == broken:
                raise RuntimeError(f"broken at tensor {taken}")
            if tensor.shape != self.weights[name].shape:
                raise ValueError(f"shape of {name}")
            self.weights[name] = tensor

    def _flushed(self):
        if self.running or (self.waiting and not self.engine_paused):
            return False
        self.cached.clear()
        return True

    def _pause(self, mode):
        self.engine_paused = True
        if mode == "retract":
            self.waiting, self.running = self.waiting + self.running, 0

    def _continue(self):
        self.engine_paused = False
        self.running, self.waiting = self.running + self.waiting, 0

    def checksum(self):
        """Of all the weights."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            tensor = self.weights[name]
            digest.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # --- the endpoints ---------------------------------------------------------------------------

    def answer(self, method, path, body):
        """Status and content. Raises Died when the scheduler has ended."""
        if self.dead:
            raise Died
        wrong = _wrong(path, body)
        if wrong:
            return 400, {"object": "error", "message": wrong, "type": "Bad Request", "code": 400}
        endpoints = {
            ("GET", "/server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("POST", "/pause_generation"): self._pause_generation,
            ("POST", "/continue_generation"): self._continue_generation,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/weights_checker"): self._check,
        }
        endpoint = endpoints.get((method, path), lambda body: (404, {"detail": "Not Found"}))
        return endpoint(body)

    def _server_info(self, body):
        self.in_scheduler(lambda: None)
        return 200, {"version": self.version, "tp_size": 1}

    def _model_info(self, body):
        return 200, {"model_path": self.path, "weight_version": self.label}

    def _continue_generation(self, body):
        self.blocked = False
        self.in_scheduler(self._continue)
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _check(self, body):
        checksum = self.in_scheduler(self.checksum)
        return 200, {"success": True, "message": "Success.", "per_engine_checksum": checksum}

    def _pause_generation(self, body):
        mode = body.get("mode", "abort")
        self.blocked = True
        if mode == "abort":  # The scheduler is not told to pause.
            self.aborted += self.running + self.waiting
            self.running = self.waiting = 0
        else:
            self.in_scheduler(lambda: self._pause(mode))
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _update(self, body):
        path, label = body["model_path"], body.get("weight_version")
        flush = body.get("flush_cache", True)
        assert self.blocked, "would wait for all running requests"
        slot = self._slot = Future()
        self._commands.put((lambda: self._load(path, label, flush), self._to_whoever_asked_last))
        success, message = _result(slot)
        if success:
            self.path, self.label = path, label or self.label
            message += f" Weight version updated to {label}."
        content = {"success": success, "message": message, "num_paused_requests": 0}
        return (200 if success else 400), content

    def _to_whoever_asked_last(self, answer):
        self._slot.set_result(answer)


class _Handler(BaseHTTPRequestHandler):
    def _serve(self):
        fake = self.fake
        size = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(size) or b"{}")
        fake.asked.append((self.path, body))
        if fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
            status, answer = 401, {"error": "Unauthorized"}
        else:
            try:
                status, answer = fake.answer(self.command, self.path, body)
            except Died:
                return  # Hangs up without a word.
        instead = fake.before_answer(self.path)
        data = json.dumps(answer).encode() if instead is None else instead
        with contextlib.suppress(OSError):  # The client gave up.
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_POST = _serve

    def log_message(self, *args):
        """Nothing."""


def _result(future):
    answer = future.result(timeout=HANG_S)
    if isinstance(answer, Died):
        raise answer
    return answer


def _wrong(path, body):
    fields = FIELDS.get(path, {})
    for name, value in body.items():
        if name not in fields:
            return f"unknown field {name}"
        kinds = fields[name]
        types = tuple(kind for kind in kinds if isinstance(kind, type))
        if value not in [kind for kind in kinds if not isinstance(kind, type)] and (
            not types or not isinstance(value, types)
        ):
            return f"{name} cannot be {value!r}"
    if path == "/update_weights_from_disk" and "model_path" not in body:
        return "model_path is missing"
    return ""


def _read(path):
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name)
