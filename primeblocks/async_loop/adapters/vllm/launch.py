"""The start of an engine, which can be abandoned.

A launch runs vLLM's constructor in a thread, because the constructor blocks until the engine is
ready. The launch notes the child processes that appear meanwhile, and `abandon` kills these
processes. The constructor then fails, or returns an engine, which is shut down. One engine is
launched at a time, because a new child process could otherwise belong to any of several launches.
After the constructor, vLLM's own list of processes replaces the noted processes.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.system_utils import kill_process_tree
from vllm.v1.engine.async_llm import AsyncLLM

from ....clock import Clock
from ....errors import EngineError
from ...worker import WorkerThread

__all__ = ["Launch", "check_checkpoint", "kill"]

# Seconds between looks for the child process while vLLM's constructor runs in its thread.
_POLL_S = 0.01

# Held until a launch has found its child process, which could otherwise be another launch's.
_LAUNCHING = threading.Lock()


class Launch:
    """One attempt to start an engine, in a thread."""

    def __init__(self, engine_kwargs: Mapping[str, Any], clock: Clock) -> None:
        self.processes: list[BaseProcess] = []
        self._arguments = dict(engine_kwargs)
        self._clock = clock
        self._abandoned = threading.Event()

    async def run(self) -> AsyncLLM:
        while not _LAUNCHING.acquire(blocking=False):
            await self._clock.sleep(_POLL_S)
        worker = WorkerThread("vllm-start")
        try:
            before = set(multiprocessing.active_children())
            built = asyncio.ensure_future(worker.call(self._build))
            while not self.processes and not built.done():
                await self._clock.sleep(_POLL_S)
                started = set(multiprocessing.active_children()) - before
                self.processes = [p for p in started if p.name.startswith("EngineCore")]
        finally:
            _LAUNCHING.release()
            worker.close()
        llm = await built
        # A manager of Ray actors does not have `processes`.
        manager = llm.engine_core.resources.engine_manager
        self.processes = [*getattr(manager, "processes", ())]
        return llm

    def abandon(self) -> None:
        """Kill the started processes. The constructor fails, or its engine is shut down."""
        self._abandoned.set()
        kill(self.processes)

    def _build(self) -> AsyncLLM:
        try:
            arguments = AsyncEngineArgs(**self._arguments)
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            if self._abandoned.is_set():
                raise EngineError("the start was abandoned before the engine's process began")
            llm = AsyncLLM.from_vllm_config(
                config,
                enable_log_requests=arguments.enable_log_requests,
                disable_log_stats=arguments.disable_log_stats,
            )
        except Exception as error:
            raise EngineError(
                f"the vLLM engine did not start with model={self._arguments['model']!r}: {error}"
            ) from error
        if self._abandoned.is_set():
            llm.shutdown(timeout=0)
        return llm


def check_checkpoint(path: str | Path) -> None:
    """Check a checkpoint's files, headers and sizes, before an engine spends seconds on it.

    Raises:
        EngineError: the folder, the configuration or the weights are missing, or a file is cut off.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise EngineError(f"wrong checkpoint: {folder} has no config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"wrong checkpoint: {folder} has no *.safetensors")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            raise EngineError(
                f"wrong checkpoint: {file.name} has {file.stat().st_size} bytes and is damaged or "
                f"cut off ({error}). Write it again."
            ) from error


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kill these processes, whatever their state."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            for _ in range(3):  # A worker that ends meanwhile ends the call.
                with suppress(Exception):
                    kill_process_tree(process.pid)  # Workers do not die with their engine.
            process.kill()
    for process in processes:
        process.join(1.0)
