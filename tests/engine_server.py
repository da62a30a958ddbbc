"""Imports vLLM once and forks a process for each task: `python -m tests.engine_server`.

Engines that a task starts are forked as well.

A line on standard input is a task, as JSON: `task`, a pickled `(body, args)`; `result`, where to
pickle what it returns; `stdout` and `stderr`; `timeout_s`. Answers are lines: pid, then exit code.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import signal
import sys
from functools import partial
from pathlib import Path

import psutil

# Beside vLLM itself: the modules that an engine's start imports, and those of most bodies.
MODULES = (
    "vllm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors",
    "pytest",
    "hypothesis",
    "jaxtyping",
    "primeblocks.plugins.vllm",
    "primeblocks.testing.tiny_models",
)


def main() -> None:
    gc.disable()  # Collections are a quarter of what these imports take.
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    _fork_engines()
    # Or each task would copy, and each collection of its engine walk, all that was imported.
    gc.collect()
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return _run(**request)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        _end(pid)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _fork_engines() -> None:
    """vLLM spawns the processes of an engine on a CPU, each of which imports it once more."""
    for module in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        with contextlib.suppress(ImportError):
            host = importlib.import_module(module)
            host.get_mp_context = partial(multiprocessing.get_context, "fork")


def _end(session: int) -> None:
    """Kill what a task has left running, if it was ended at its deadline."""
    for process in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process) == session:
                os.kill(process, signal.SIGKILL)


def _run(*, task: str, result: str, stdout: str, stderr: str, timeout_s: float) -> None:
    """Do one task and return, so that the process ends as any other does."""
    os.setsid()
    for descriptor, path in ((0, os.devnull), (1, stdout), (2, stderr)):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    body, args = pickle.loads(Path(task).read_bytes())
    Path(result).write_bytes(pickle.dumps(body(*args)))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
