"""The walks in the docs are those of the code as it is."""

from pathlib import Path

import pytest

from tests.engine_job import fork_job


@pytest.mark.vllm
def test_the_page_is_as_the_code_is():
    """All but the engine's own part: no engine starts."""
    fork_job(Path(__file__).parents[1] / "scripts" / "walks.py", "--check")
