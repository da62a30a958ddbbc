"""The machine: what it has, and why the suite cannot run on it. Needs torch alone."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["describe_machine", "lacks", "refusal"]

# In the order of the page in the docs; those that are not there are told as such.
PACKAGES = (
    *("torch", "triton", "transformers", "peft", "numpy", "safetensors", "xxhash", "jaxtyping"),
    *("pytest", "hypothesis", "torchao", "sgl-deep-gemm", "apache-tvm-ffi"),
)
LEAST_FREE_BYTES = 40 << 30


def describe_machine() -> dict[str, Any]:
    """Return device, driver, capability, memory and versions, as JSON takes them."""
    said: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "nvcc": shutil.which("nvcc") is not None,
        "device": "cpu",
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        said |= {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "cuda": torch.version.cuda,
            "free_bytes": free,
            "total_bytes": total,
        }
    return said


def refusal(said: dict[str, Any]) -> str:
    """Return why nothing can be measured on a machine, or nothing."""
    if said["device"] == "cpu":
        return "torch sees no CUDA device. On a CPU, pass --dry-run."
    if said["free_bytes"] < LEAST_FREE_BYTES:
        return (
            f"{said['free_bytes'] >> 30} GiB of the device are free; {LEAST_FREE_BYTES >> 30} "
            "needed. End what uses it."
        )
    return ""


def lacks(modules: tuple[str, ...]) -> str:
    """Return which modules are not there, or nothing. Imports none of them."""
    missing = [name for name in modules if find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
