"""Settings of every test: one thread, uninitialised memory that shows, ranks that start fast."""

import gc
import os

import hypothesis
import pytest
import torch

from tests.annotations import check_shapes

check_shapes()  # Before the first import of primeblocks.

from primeblocks.testing import ranks
from tests.devices import DEVICES
from tests.engine_job import peak_bytes

if "ATEN_CPU_CAPABILITY" in os.environ:
    # Else oneDNN hands torch AMX kernels whose other half needs AVX-512.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

MOST_BYTES = 3_000_000_000

gc.disable()  # Until all tests are collected: a sixth of the time until then.

# Before the first gang of a run: what bodies import, which costs a rank more than its work.
ranks.preload(
    *("pytest", "hypothesis", "numpy", "safetensors.torch", "jaxtyping"),
    *("primeblocks.fp8", "primeblocks.parallel", "primeblocks.replay", "primeblocks.weightsync"),
    *("primeblocks.testing.oracles", "primeblocks.testing.tiny_models"),
    *("primeblocks.parallel.adapters.transformers", "primeblocks.replay.adapters.transformers"),
    *("transformers.modeling_utils", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
)

# Tensors here are small: more threads only wait for each other, and for whatever else runs.
torch.set_num_threads(1)

# The budget of every property whose example is cheap. A slow machine is no failure; pytest's own
# timeout ends what hangs.
hypothesis.settings.register_profile("primeblocks", deadline=None, max_examples=60)
hypothesis.settings.register_profile("full", deadline=None, max_examples=1000)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="random tests at their stated size")
    parser.addoption("--pretend", action="store_true", help="as a device one that is none")


def pytest_configure(config):
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "primeblocks")


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the marks.
def pytest_collection_modifyitems(config, items):
    """Share tests among workers by file, and give one of them all that start an engine."""
    if not hasattr(config, "workerinput"):  # Only a worker of pytest-xdist has it.
        return
    for item in items:
        alone = item.get_closest_marker("vllm")  # Two engines at once need the memory of both.
        item.add_marker(pytest.mark.xdist_group("engine" if alone else str(item.path)))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


_failed_setups: dict[int, tuple[BaseException, str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Report a failure of a shared fixture once; skip the other tests that need the fixture.

    pytest raises the same exception again for each of them.
    """
    report = yield
    if call.when == "setup" and report.outcome == "failed":
        error = call.excinfo.value
        _, first = _failed_setups.setdefault(id(error), (error, item.nodeid))
        if first != item.nodeid:
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, line, f"not run: the setup that it shares failed in {first}")
    return report


@pytest.fixture
def full(request):
    """True where a random test is to run as often as the docs say, not as a laptop has time."""
    return request.config.getoption("--full")


@pytest.fixture(params=DEVICES)
def device(request):
    if not request.config.getoption("--pretend"):
        yield request.param
        return
    from tests.pretend import Device

    with Device():
        yield "pretend"


@pytest.fixture(autouse=True)
def _bounded_memory():
    """Fail the test in which this process first holds `MOST_BYTES`.

    A worker of `make test` was seen with 1.4 GB; peers, in one process, with 2.5 GB.
    """
    before = peak_bytes()
    yield
    assert (peak := peak_bytes()) < MOST_BYTES or before >= MOST_BYTES, (
        f"the process of the tests held {peak / 1e9:.1f} GB; {MOST_BYTES / 1e9} GB are allowed."
    )


@pytest.fixture(autouse=True)
def _strict_torch(request):
    """Fill torch.empty with NaN, so that a value nobody wrote cannot pass for a result."""
    if request.node.get_closest_marker("vllm"):  # An engine chooses its own settings.
        yield
        return
    # On a GPU cumulative sums have no implementation that torch calls deterministic.
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
