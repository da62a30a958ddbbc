"""Benchmarks that need packages of `scripts/peers` run in its Python."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["restart_where"]

# Page faults of fresh allocations would take most of the time of both sides.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"


def restart_where(package: str, *, module: str) -> None:
    """Return if this process has `package`, and an allocator that keeps its pages; else replace it.

    Raises:
        SystemExit: the peers are not installed.
    """
    here = find_spec(package) is not None
    if here and ALLOCATOR.items() <= os.environ.items():
        return
    if not here and (not PYTHON.exists() or Path(sys.executable) == PYTHON):
        raise SystemExit(f"needs {package}: run scripts/peers once.")
    python = sys.executable if here else str(PYTHON)
    os.execve(python, [python, "-m", module, *sys.argv[1:]], os.environ | ALLOCATOR)
