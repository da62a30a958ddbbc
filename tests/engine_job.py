"""Run a test's body or script in a process of its own.

vLLM changes torch, the environment and the default process group for good, so an engine never
starts inside pytest. Its import costs more than the start of a tiny engine: `call` and `fork_job`
fork a server that has done it; `run_job` starts an interpreter.
"""

import atexit
import json
import os
import pickle
import resource
import runpy
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from primeblocks.errors import how_it_ended
from tests.deadlines import HANG_S, JOB_S

# A pool of keys and values for a tiny model. `VLLM_CPU_KVCACHE_SPACE` would replace it by whole
# GiB, all of them written to, for every engine that a process starts.
KV_BYTES = 64 << 20
MOST_BYTES = 1_500_000_000  # vLLM's imports take 0.6 GB
ENVIRONMENT = {
    # vLLM chooses its own kernels by the processor, and asks oneDNN for theirs. As conftest narrows
    # oneDNN for torch, undo it.
    "ONEDNN_MAX_CPU_ISA": "DEFAULT",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def is_gone(pid: int) -> bool:
    """Say whether a process that somebody killed ends before a deadline."""
    import psutil  # vLLM brings it; environments of peers have none.

    deadline, never = time.monotonic() + HANG_S, threading.Event()
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        never.wait(0.01)
    return False


def call(body: Callable[..., Any], *args: object, timeout_s: float = JOB_S) -> Any:
    """Return `body(*args)` from a fork that has imported vLLM; its errors where it fails.

    A body fails too if its process, or a process that it started, ever holds `MOST_BYTES`.

    Args:
        body: a function at the top level of an importable module.
    """
    return _fork(_within_bounds, (body, args), timeout_s, body.__name__)[0]


def fork_job(script: Path, *arguments: str, timeout_s: float = JOB_S) -> str:
    """Run a script in a fork that has imported vLLM and return what it printed."""
    return _fork(_script, (str(script), arguments), timeout_s, script.name)[1]


def run_job(
    script: Path,
    *arguments: str,
    timeout_s: float = JOB_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script in an interpreter of its own, in an environment of its own; as `fork_job`."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    how = f"{script.name} {how_it_ended(done.returncode)}"
    assert done.returncode == 0, f"{how}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def peak_bytes(which: int = resource.RUSAGE_SELF) -> int:
    """The most that this process, or one that it started and that has ended, ever held."""
    return 1024 * resource.getrusage(which).ru_maxrss


def _within_bounds(body: Callable[..., Any], args: tuple[object, ...]) -> Any:
    result = body(*args)
    peak = max(peak_bytes(), peak_bytes(resource.RUSAGE_CHILDREN))
    assert peak < MOST_BYTES, (
        f"a process of {body.__name__} held {peak / 1e9:.1f} GB; at most {MOST_BYTES / 1e9} GB are "
        "allowed. Pass kv_cache_memory_bytes=KV_BYTES to each engine, and free one before the next."
    )
    return result


def _script(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # Scripts may start engines of any size.
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.engine_server"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate, timeout=HANG_S)  # It ends with its input.
    return server


def _fork(
    body: Callable[..., Any], args: tuple[object, ...], timeout_s: float, name: str
) -> tuple[Any, str]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    folder = Path(tempfile.mkdtemp(prefix="primeblocks-job-"))
    try:
        paths = {each: str(folder / each) for each in ("task", "result", "stdout", "stderr")}
        (folder / "task").write_bytes(pickle.dumps((body, args)))
        print(json.dumps({**paths, "timeout_s": timeout_s}), file=server.stdin, flush=True)
        server.stdout.readline()  # its pid, for whoever debugs
        ended = server.stdout.readline()
        assert ended, f"the server of engines {how_it_ended(server.wait())}"
        texts = [(folder / each).read_text(errors="replace") for each in ("stdout", "stderr")]
        how = f"{name} {how_it_ended(int(ended))}"
        assert int(ended) == 0, f"{how}\n{texts[0][-4000:]}\n{texts[1][-8000:]}"
        return pickle.loads((folder / "result").read_bytes()), texts[0]
    finally:
        shutil.rmtree(folder)
