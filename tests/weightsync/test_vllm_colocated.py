"""The turns with a real vLLM on a CPU: the calls and their order. Its sleep frees nothing there."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.engine_job import fork_job

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_vllm_takes_turns_with_a_trainer(tmp_path):
    fork_job(Path(__file__).with_name("vllm_colocated_job.py"), str(tmp_path))
    seen = json.loads((tmp_path / "seen.json").read_text())
    start, first, second = seen["tokens"]
    assert len(start) == len(first) == len(second) == 12
    assert start != first != second
    turn = [
        ["weights", False, True],  # Not wholly awake yet: vLLM schedules nothing.
        ["update", None, True],
        ["kv_cache", True, False],
        ["sleep", None, True],
    ]
    assert seen["calls"] == [["sleep", None, True], *turn, *turn]
