"""Settings of every test: one thread, uninitialised memory that shows, ranks that start fast."""

import hypothesis
import pytest
import torch

from primeblocks.testing import ranks

# Before the first gang of a run: most bodies live in modules that import these.
ranks.preload("pytest", "hypothesis", "numpy", "safetensors.torch", "jaxtyping")


# A slow machine is no failure; pytest's own timeout ends what hangs.
hypothesis.settings.register_profile("primeblocks", deadline=None)
hypothesis.settings.load_profile("primeblocks")


@pytest.fixture(autouse=True)
def _strict_torch(request):
    """Fill torch.empty with NaN, so that a value nobody wrote cannot pass for a result."""
    if request.node.get_closest_marker("vllm"):  # An engine chooses its own settings.
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
