"""Run by test_vllm_fleet.py in a process of its own: `vllm_fleet_job.py CASE FOLDER`.

Writes FOLDER/CASE.json, what the case saw. Checkpoints FOLDER/float32-0 and -1 are there. Case
"mixed" is an AsyncLLM and vLLM's server, "pair" is two AsyncLLMs. The second of either starts
with the weights of seed 1, so it is the freshly loaded reference for those.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from primeblocks.errors import PrimeblocksError, how_it_ended
from primeblocks.plugins.vllm import register
from primeblocks.weightsync.adapters import vllm as adapter
from tests.weightsync.vllm_flight import flight
from tests.weightsync.vllm_site import ENGINE, PROMPTS, TIMEOUT_S, Requests, Trainer, cost, spans


class InProcess:
    """An AsyncLLM of the fleet."""

    def __init__(self, checkpoint: Path) -> None:
        arguments = AsyncEngineArgs(
            str(checkpoint), dtype="float32", **ENGINE, **adapter.engine_args()
        )
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.requests = Requests(self.engine)
        (process,) = self.engine.engine_core.resources.engine_manager.processes
        self.pid = process.pid

    async def greedy(self, name: str) -> list[Any]:
        return await self.requests.all(name, 24)

    async def long(self, name: str) -> tuple[int, Any]:
        output = await self.requests.one(name, PROMPTS[0], 600)
        return len(output.outputs[0].token_ids), spans(output)

    def close(self) -> None:
        self.engine.shutdown()


class Served:
    """A server of the fleet, asked over HTTP."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        arguments = ["--model", str(checkpoint), "--port", str(port), "--host", "127.0.0.1"]
        arguments += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
        arguments += ["--max-num-seqs", "8", "--skip-tokenizer-init", "--enable-scale-out"]
        arguments += ["--logprobs-mode", "processed_logprobs", *adapter.server_args()]
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{port}"
        self.engine = adapter.VllmServer(self.url)

    def wait(self, timeout_s: float) -> None:
        """Until it answers."""
        deadline, never = time.monotonic() + timeout_s, threading.Event()
        while time.monotonic() < deadline:
            ended = self.process.poll()
            log = Path(self.log.name).read_text()[-4000:]
            assert ended is None, f"the server {how_it_ended(ended)}\n{log}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health"):
                return
            never.wait(0.1)
        raise AssertionError("the server did not start")

    async def ask(self, ids: list[int], tokens: int, salt: str) -> Any:
        sampling = {
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        body = {"token_ids": ids, "sampling_params": sampling, "cache_salt": salt}
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )

        def answer() -> Any:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)["choices"][0]

        return await asyncio.to_thread(answer)

    async def greedy(self, name: str) -> list[Any]:
        result = []
        for index, ids in enumerate(PROMPTS):
            choice = await self.ask(ids, 24, f"{name}{index}")
            told = [float.hex(item["logprob"]) for item in choice["logprobs"]["content"]]
            result.append([choice["token_ids"], told])
        return result

    async def long(self, name: str) -> tuple[int, Any]:
        choice = await self.ask(PROMPTS[0], 600, name)
        parts = [[s["version"], s["start"], s["end"]] for s in choice["weight_versions"]]
        return len(choice["token_ids"]), parts

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


class StoppedAtLoad:
    """An engine whose process is stopped at the moment when it is to load."""

    def __init__(self, member: InProcess) -> None:
        self._member = member

    def __getattr__(self, name: str) -> Any:
        return getattr(self._member.engine, name)

    async def update_weights(self, request: Any) -> None:
        os.kill(self._member.pid, signal.SIGSTOP)
        await self._member.engine.update_weights(request)


async def failing(call: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        await call
    except PrimeblocksError as error:
        said = {"kind": type(error).__name__, "message": str(error), "engines": error.engines}
        return said | {"seconds": time.monotonic() - start}
    return {}


def calls(engine: Any) -> Any:
    """An engine, or the calls of a server."""
    if isinstance(engine, adapter.VllmServer):
        return engine.until(time.monotonic() + TIMEOUT_S)
    return engine


async def look(members: list[Any], name: str) -> dict[str, Any]:
    """What each member answers now, and under which label."""
    return {
        "greedy": [await member.greedy(name) for member in members],
        "labels": [await calls(member.engine).get_weight_version() for member in members],
    }


async def fleet(members: list[Any], trainer: Trainer) -> dict[str, Any]:
    """Updates of all, then faults of the first."""
    first, second = members
    engines = [member.engine for member in members]
    update, result = adapter.update_all, {"start": await look(members, "start")}

    tasks = [asyncio.create_task(member.long("long")) for member in members]
    await first.requests.reach("long", tokens=20)
    report = await update(engines, trainer.publish(15, seed=1), timeout_s=TIMEOUT_S)
    result["flight"] = list(await asyncio.gather(*tasks))
    result["one"] = await look(members, "one") | {"report": cost(report)}
    report = await update(engines, trainer.publish(16, seed=0), timeout_s=TIMEOUT_S)
    result["two"] = await look(members, "two") | {"report": cost(report)}

    receipt = trainer.publish(17, seed=1)
    trainer.flip(17)
    result["corrupt"] = await failing(update(engines, receipt, timeout_s=TIMEOUT_S))
    result["after_corrupt"] = await look(members, "corrupt")
    trainer.flip(17)

    stopped = [StoppedAtLoad(first), second.engine]
    result["hung"] = await failing(update(stopped, receipt, timeout_s=1.5))
    result["after_hung"] = await look([second], "hung")
    os.kill(first.pid, signal.SIGCONT)
    result["stays_paused"] = [await calls(engine).is_paused() for engine in engines]
    await update(engines, receipt, timeout_s=TIMEOUT_S)
    result["after_retry"] = await look(members, "retry")

    receipt = trainer.publish(18, seed=0)
    os.kill(first.pid, signal.SIGKILL)
    result["dead"] = await failing(update(engines, receipt, timeout_s=TIMEOUT_S))
    result["after_dead"] = await look([second], "dead")
    await update([second.engine], receipt, timeout_s=TIMEOUT_S)
    result["dropped"] = await look([second], "dropped")
    return result


async def lost(member: Served, trainer: Trainer) -> dict[str, Any]:
    """A server that hangs, then is gone."""
    receipt = trainer.publish(19, seed=1)
    os.killpg(member.process.pid, signal.SIGSTOP)
    hung = await failing(adapter.update(member.engine, receipt, timeout_s=1.0))
    os.killpg(member.process.pid, signal.SIGCONT)
    report = await adapter.update(member.engine, receipt, timeout_s=TIMEOUT_S)
    after = await look([member], "lost")
    receipt = trainer.publish(20, seed=0)
    member.close()
    gone = await failing(adapter.update(member.engine, receipt, timeout_s=TIMEOUT_S))
    return {"hung": hung, "after": after, "gone": gone, "report": cost(report)}


async def main(case: str, folder: Path) -> dict[str, Any]:
    trainer = Trainer("float32", folder)
    attach = adapter.attach
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.transport.close)
        if case == "mixed":
            second: Any = Served(folder / "float32-1", folder / "server.log")
            stack.callback(second.close)
        first = InProcess(folder / "float32-0")
        stack.callback(first.close)
        if case == "pair":
            second = InProcess(folder / "float32-1")
            stack.callback(second.close)
        result: dict[str, Any] = {"fresh": await first.greedy("fresh")}
        await attach(first.engine, trainer.plan, trainer.transport, timeout_s=TIMEOUT_S)
        result |= await flight(first.requests, trainer)
        if case == "mixed":
            second.wait(80)
        await attach(second.engine, trainer.plan, trainer.transport, timeout_s=TIMEOUT_S)
        result |= await fleet([first, second], trainer)
        if case == "mixed":
            result["lost"] = await lost(second, trainer)
    return result


if __name__ == "__main__":
    register()
    case, folder = sys.argv[1], Path(sys.argv[2])
    (folder / f"{case}.json").write_text(json.dumps(asyncio.run(main(case, folder))))
