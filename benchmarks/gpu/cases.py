"""Cases of the GPU suite: tests, then figures by value; each a process with its own deadline."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["CASES", "PARTS", "Case"]

# What `--only` names, beside single cases: a block's tests and figures.
PARTS = ("fp8", "parallel", "dsa", "replay", "kvoffload", "weightsync", "losses", "exact")
# With whatever its packages warn of: torchao does when it is compiled.
_PYTEST = (
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0"),
    *("-o", "filterwarnings=default"),
    *("-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"),
)
# Compiling takes longest, and each process compiles what its tests need.
_SPREAD = ("-n", "4") if find_spec("xdist") else ()


@dataclass(frozen=True)
class Case:
    """One command of Python.

    Attributes:
        arguments: of Python on a machine with a GPU; none where only a CPU has use for it.
        dry: of Python on a CPU: the same code at small sizes, or the nearest that a CPU can do.
        deadline_s: after which it is killed.
        needs: modules without which it is skipped.
        dry_needs: the same on a CPU.
        dry_environment: variables of its process there.
        has_figures: it takes `--json FILE` and writes figures there.
    """

    part: str
    name: str
    arguments: tuple[str, ...]
    dry: tuple[str, ...]
    deadline_s: float = 120.0
    needs: tuple[str, ...] = ()
    dry_needs: tuple[str, ...] = ()
    dry_environment: tuple[tuple[str, str], ...] = ()
    has_figures: bool = False


def _tests(part: str, name: str, *paths: str, needs: tuple[str, ...] = ()) -> Case:
    """Tests marked gpu; a CPU skips these, and runs the others of their files."""
    there = (*_PYTEST, "-m", "gpu", *paths)
    return Case(part, name, there, (*_PYTEST, *paths), 180.0, needs, needs)


def _pretended(part: str, *paths: str) -> Case:
    """Tests of devices on one that is none, which finds what would mix host and device."""
    return Case(part, f"{part}_pretended", (), (*_PYTEST, "--pretend", *paths))


def _kernels(part: str, name: str, *interpreted: str) -> Case:
    """Triton's kernels: run there, interpreted here; `scripts/peers` has a Triton for a CPU."""
    return Case(
        part,
        name,
        (*_PYTEST, *_SPREAD, "-m", "gpu", *interpreted),
        (*_PYTEST, *interpreted),
        deadline_s=200.0,
        needs=("triton",),
        dry_needs=("triton",),
        dry_environment=(("TRITON_INTERPRET", "1"),),
    )


def _compiled(part: str, name: str, *paths: str) -> Case:
    """Kernels compiled for sm_90 and sm_100, which needs no device; there they run."""
    return Case(part, name, (), (*_PYTEST, *paths), dry_needs=("triton",))


def _figures(
    part: str, name: str, module: str, *, deadline_s: float, needs: tuple[str, ...] = ()
) -> Case:
    run = ("-m", f"benchmarks.{module}")
    return Case(part, name, run, (*run, "--dry-run"), deadline_s, needs, needs, has_figures=True)


CASES = (
    _kernels(
        "fp8", "fp8_triton", "tests/fp8/test_triton_quantize.py", "tests/fp8/test_triton_gemm.py"
    ),
    _kernels("dsa", "dsa_triton", "tests/parallel/test_triton_sparse.py"),
    _kernels("dsa", "dsa_kernels", "tests/parallel/test_dsa_kernels.py"),
    _kernels(
        "exact",
        "exact_triton",
        "tests/exact/test_triton_rows.py",
        "tests/exact/test_triton_attention.py",
        "tests/exact/test_triton_models.py",
    ),
    _tests("fp8", "fp8_engines", "tests/fp8/test_engines.py", "tests/fp8/test_quantize.py"),
    _tests("fp8", "fp8_devices", "tests/fp8/test_devices.py"),
    _tests("parallel", "parallel_devices", "tests/parallel/test_devices.py"),
    _tests("dsa", "dsa_devices", "tests/parallel/test_devices_sparse.py"),
    _tests("parallel", "memory", "tests/parallel/test_memory_cuda.py"),
    _tests("replay", "replay_devices", "tests/replay/test_devices.py", needs=("transformers",)),
    _tests("kvoffload", "kvoffload_store", "tests/kvoffload/store/test_store_cuda.py"),
    _tests("weightsync", "weightsync_devices", "tests/weightsync/test_devices.py"),
    _tests("losses", "logprobs_devices", "tests/losses/test_logprobs_devices.py"),
    _compiled("fp8", "fp8_compiled", "tests/fp8/test_triton_compile.py"),
    _compiled("dsa", "dsa_compiled", "tests/parallel/test_triton_sparse_compile.py"),
    _compiled("exact", "exact_compiled", "tests/exact/test_triton_rows_compile.py"),
    _pretended("fp8", "tests/fp8/test_devices.py"),
    _pretended("parallel", "tests/parallel/test_devices.py"),
    _pretended("dsa", "tests/parallel/test_devices_sparse.py"),
    _pretended("replay", "tests/replay/test_devices.py"),
    _pretended("losses", "tests/losses/test_logprobs_devices.py"),
    # By value: a run whose time is over loses its end.
    _figures("fp8", "fp8_kernels", "fp8_parts.gpu", deadline_s=120.0),
    _figures("parallel", "attention", "parallel_parts.gpu_attention", deadline_s=90.0),
    _figures(
        "parallel", "layers", "parallel_parts.gpu_layers", deadline_s=60.0, needs=("transformers",)
    ),
    _figures("dsa", "dsa", "dsa_parts.gpu", deadline_s=60.0),
    _figures("losses", "token_logprobs", "async_loop_parts.logprobs_gpu", deadline_s=75.0),
    _figures("parallel", "dispatch", "parallel_parts.gpu_dispatch", deadline_s=30.0),
    _figures("kvoffload", "pages", "kvoffload_parts.device", deadline_s=30.0),
    _figures("weightsync", "colocated", "weightsync_parts.gpu_colocated", deadline_s=45.0),
    _figures("weightsync", "deltas", "weightsync_parts.gpu_deltas", deadline_s=60.0),
    _figures("weightsync", "weights", "weightsync_parts.gpu", deadline_s=75.0),
    _figures("exact", "exact_kernels", "exact_gpu", deadline_s=45.0),
    _figures("parallel", "offload", "parallel_parts.gpu_memory", deadline_s=30.0),
)
