import importlib
import warnings

import pytest


@pytest.fixture(scope="session")
def adapter():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        return importlib.import_module("primeblocks.kvoffload.adapters.vllm")
