"""A fake of an engine with several workers: takes its calls in order, and fails by script."""

import asyncio
import selectors
from dataclasses import asdict, replace
from functools import wraps

import torch

from primeblocks.weightsync.convert import record_reads
from primeblocks.weightsync.engines.remote import STATE, VERIFY, WorkerState
from primeblocks.weightsync.manifest import Manifest


def in_a_loop(test):
    """A test that is a coroutine."""

    @wraps(test)
    def run(*args, **named):
        asyncio.run(test(*args, **named))

    return run


def hurried_loop():
    """A loop in which time passes only while everything waits, and then at once."""
    selector = selectors.DefaultSelector()
    loop, select, now = asyncio.SelectorEventLoop(selector), selector.select, [0.0]

    def pass_time(timeout=None):
        now[0] += timeout or 0.0
        return select(None if timeout is None else 0)

    selector.select, loop.time = pass_time, lambda: now[0]
    return loop


def _load_all(tensors):
    for _, tensor in tensors:
        torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


class FakeEngine:
    """Answers the calls of an update as vLLM's engine does; holds numbers for weights.

    Args:
        held: the version of each worker; None is what an engine has that was never updated.
        faults: position of a call -> "die", "hang" (until `wake`; calls queue up) or "refuse".
        worker_faults: (worker, "init", "verify" or version to load) -> (error type, message), once.
        seen: called after each call that was carried out.
    """

    def __init__(self, held, faults=None, worker_faults=None, seen=lambda: None):
        self.states = [WorkerState(version) for version in held]
        self.weights = list(held)
        self.faults, self.worker_faults = dict(faults or {}), dict(worker_faults or {})
        self.seen = seen
        self.label = str(held[0])
        self.features_of = {self.label}  # The versions that cached image features were made with.
        self.paused = self.active = self.errored = False
        self.transaction = self.init_info = None
        self.log = []
        self._queue, self._awake, self._task = [], asyncio.Event(), None

    @property
    def serving(self):
        """The weights that tokens come from, and their label; None while there are no tokens."""
        return None if self.errored or self.paused else (tuple(self.weights), self.label)

    def wake(self):
        """Let a call that hangs, and all that queued up behind it, go on."""
        self._awake.set()

    async def settle(self):
        """Wait until every call was carried out."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    # --- the calls

    async def is_paused(self):
        return await self._call("is_paused", lambda: self.paused)

    async def pause_generation(self, *, mode, clear_cache):
        return await self._call(f"pause {mode} {clear_cache}", lambda: self._set(paused=True))

    async def wake_up(self, tags):
        if tags == ["scheduling"]:  # No memory. Other tags do not matter to a fake.
            return await self._call("resume", lambda: self._set(paused=False))
        return True

    async def init_weight_transfer_engine(self, request):
        self.init_info = request
        return await self._call("init", lambda: self._meet("init"))

    async def start_weight_update(self):
        def start():
            if self.active:
                raise RuntimeError("a session is active")
            self.active = True

        return await self._call("start", start)

    async def update_weights(self, request):
        return await self._call(
            f"load {request.update_info['version']}", lambda: self._load(request.update_info)
        )

    async def finish_weight_update(self, weight_version=None):
        def finish():
            if not self.active:
                raise RuntimeError("no session is active")
            self._set(active=False, label=weight_version or self.label)

        return await self._call("finish", finish)

    async def reset_encoder_cache(self):
        return await self._call("reset encoder", lambda: self._set(features_of=set()))

    async def collective_rpc(self, method, timeout=None, args=()):
        acts = {
            STATE: self._states,
            VERIFY: lambda: self._verify(*args),
            "primeblocks_describe": lambda: self._describe(*args),
        }
        return await self._call(method, acts[method])

    # --- what they do

    def _set(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)

    def _states(self):
        told = [asdict(replace(state, active=self.active)) for state in self.states]
        self.states = [replace(state, busy=False) for state in self.states]
        return told

    def _meet(self, act):
        """Workers do what changes no weights, and say so."""
        for worker, state in enumerate(self.states):
            error, message = self.worker_faults.pop((worker, act), ("", ""))
            self.states[worker] = replace(state, error=error, message=message)

    def _describe(self, checkpoint):
        """Each worker reads all."""
        manifest = Manifest.from_json(checkpoint)
        reads = record_reads(_load_all, manifest)
        return [{"value": reads.to_json()} for _ in self.states]

    def _verify(self, info):
        self.transaction = info["transaction"]
        self._meet("verify")
        self.states = [replace(state, busy=True) for state in self.states]
        return [None] * len(self.states)

    def _load(self, info):
        if not self.active:
            raise RuntimeError("no session is active")
        if info["transaction"] != self.transaction:
            return
        version = info["version"]
        for worker, state in enumerate(self.states):
            error, message = self.worker_faults.pop((worker, version), ("", ""))
            held = state.version if error else version
            self.states[worker] = replace(state, version=held, error=error, message=message)
            if not error or error == "EngineError":
                self.weights[worker] = "torn" if error else version

    # --- in order, as an engine's input queue

    async def _call(self, name, act):
        answer = asyncio.get_running_loop().create_future()
        self._queue.append((name, act, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())
        return await answer

    async def _work(self):
        while self._queue and not self.errored:
            name, act, answer = self._queue.pop(0)
            fault = self.faults.pop(len(self.log), None)
            self.log.append(name)
            if fault == "die":
                self.errored = True
            elif fault == "hang":
                await self._awake.wait()
            if self.errored:
                return
            try:
                if fault == "refuse":
                    raise RuntimeError("refused by script")
                result = act()
            except RuntimeError as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)
            self.seen()
