"""The patch `amx_on_cpu`, on a processor that has AMX."""

from pathlib import Path

import pytest
import torch

from tests.engine_job import run_job

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="no AMX in this processor"),
]

JOB = Path(__file__).with_name("amx_job.py")


def test_without_it_the_first_expert_layer_ends_the_process():
    with pytest.raises(AssertionError, match=r"amx_job\.py was ended by SIGILL"):
        run_job(JOB, "kernel")


def test_an_engine_in_bfloat16_asks_for_amx_or_is_refused(tmp_path):
    printed = run_job(JOB, "engine", str(tmp_path))
    assert 'dtype="float32"' in printed.partition("refused: ")[2].partition("\n")[0]
    assert "tokens: 4" in printed
