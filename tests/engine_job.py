"""Run a test's job in a process of its own.

vLLM changes torch, the environment and the default process group for good, so an engine never
starts inside pytest.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from primeblocks.errors import how_it_ended

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


# Far beyond what a job takes on a loaded machine, and below the deadline of a test.
HANG_S = 540.0


def run_job(
    script: Path,
    *arguments: str,
    timeout_s: float = HANG_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script to its end and return what it printed; its errors where it fails."""
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
