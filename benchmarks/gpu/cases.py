"""Cases of the GPU suite, by part: each a process with a deadline of its own."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "PARTS", "Case"]

PARTS = {
    "A": "correctness: tests that need a device, and suites of the CPU on one",
    "B": "kernels: float8, sparse attention, log-probabilities, each beside its peers",
    "C": "composition: attention of one rank's share, dispatch, decoder layers under FSDP2",
    "D": "memory and transfer: pages, offload, optimizer, IPC, deltas, a colocated turn",
}
# Without the packages that check annotations, which such a machine lacks; and with whatever its
# other packages warn of: torchao does when it is compiled.
_PYTEST = (
    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0"),
    *("-o", "filterwarnings=default"),
    *("-o", "addopts=--import-mode=importlib", "-W", "ignore::pytest.PytestConfigWarning"),
)


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


def _tests(name: str, *paths: str, needs: tuple[str, ...] = ()) -> Case:
    """Tests marked gpu; a CPU skips these, and runs the others of their files."""
    there = (*_PYTEST, "-m", "gpu", *paths)
    return Case("A", name, there, (*_PYTEST, *paths), 90.0, needs, needs)


def _pretended(*paths: str) -> Case:
    """Tests of devices on one that is none, which finds what would mix host and device."""
    return Case("A", "pretended", (), (*_PYTEST, "--pretend", *paths))


def _kernels(name: str, *interpreted: str) -> Case:
    """Triton's kernels: run there, interpreted here; `scripts/peers` has a Triton for a CPU."""
    return Case(
        "A",
        name,
        (*_PYTEST, "-m", "gpu", *interpreted),
        (*_PYTEST, *interpreted),
        deadline_s=120.0,
        needs=("triton",),
        dry_needs=("triton",),
        dry_environment=(("TRITON_INTERPRET", "1"),),
    )


def _compiled(name: str, *paths: str) -> Case:
    """Kernels compiled for sm_90 and sm_100, which needs no device; there they run."""
    return Case("A", name, (), (*_PYTEST, *paths), dry_needs=("triton",))


def _figures(
    part: str, name: str, module: str, *, deadline_s: float, needs: tuple[str, ...] = ()
) -> Case:
    run = ("-m", f"benchmarks.{module}")
    return Case(part, name, run, (*run, "--dry-run"), deadline_s, needs, needs, has_figures=True)


CASES = (
    _tests("parallel", "tests/parallel/test_devices.py", "tests/parallel/test_devices_sparse.py"),
    _tests("memory", "tests/parallel/test_memory_cuda.py"),
    _tests("replay", "tests/replay/test_devices.py", needs=("transformers",)),
    _tests("kvoffload", "tests/kvoffload/store/test_store_cuda.py"),
    _tests("weightsync", "tests/weightsync/test_devices.py"),
    _tests("logprobs", "tests/async_loop/test_logprobs_devices.py"),
    _tests("fp8", "tests/fp8/test_devices.py"),
    _tests("fp8_engines", "tests/fp8/test_engines.py", "tests/fp8/test_quantize.py"),
    _kernels("fp8_triton", "tests/fp8/test_triton_quantize.py", "tests/fp8/test_triton_gemm.py"),
    _kernels(
        "dsa_triton", "tests/parallel/test_triton_sparse.py", "tests/parallel/test_dsa_kernels.py"
    ),
    _compiled("fp8_compiled", "tests/fp8/test_triton_compile.py"),
    _compiled("dsa_compiled", "tests/parallel/test_triton_sparse_compile.py"),
    _pretended(
        *("tests/parallel/test_devices.py", "tests/parallel/test_devices_sparse.py"),
        *("tests/fp8/test_devices.py", "tests/replay/test_devices.py"),
        "tests/async_loop/test_logprobs_devices.py",
    ),
    _figures("B", "fp8_kernels", "fp8_parts.gpu", deadline_s=180.0),
    _figures("B", "dsa", "dsa_parts.gpu", deadline_s=150.0),
    _figures("B", "dsa_peer", "dsa_parts.gpu_peer", deadline_s=75.0, needs=("attn_gym",)),
    _figures("B", "token_logprobs", "async_loop_parts.logprobs_gpu", deadline_s=75.0),
    _figures("C", "attention", "parallel_parts.gpu_attention", deadline_s=210.0),
    _figures("C", "dispatch", "parallel_parts.gpu_dispatch", deadline_s=90.0),
    _figures("C", "layers", "parallel_parts.gpu_layers", deadline_s=180.0, needs=("transformers",)),
    _figures("D", "pages", "kvoffload_parts.device", deadline_s=60.0),
    _figures("D", "offload", "parallel_parts.gpu_memory", deadline_s=120.0),
    _figures("D", "weights", "weightsync_parts.gpu", deadline_s=150.0),
    _figures("D", "deltas", "weightsync_parts.gpu_deltas", deadline_s=90.0),
    _figures("D", "colocated", "weightsync_parts.gpu_colocated", deadline_s=60.0),
)
