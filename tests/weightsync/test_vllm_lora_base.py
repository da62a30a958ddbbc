"""New base weights into an engine with LoRA on: vLLM wraps the layers that they go into."""

import importlib.util
import json
from pathlib import Path

import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_lora_base_job.py")
MISSING = [name for name in ("vllm", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora-base")
    for seed in (0, 1):
        path = folder / f"base-{seed}"
        tiny_models.save("qwen3", path, seed=seed, dtype="float32", num_layers=2, hidden=64)
    fork_job(JOB, str(folder))
    return json.loads((folder / "base.json").read_text())


def test_base_and_adapter_equal_a_fresh_engine_bit_for_bit(saw):
    assert saw["wrapped"] >= 2 * 4, "LoRA wraps nothing here, so the test shows nothing"
    base, one, two = saw["fresh"]
    assert saw["error"] == ["", ""]
    assert saw["updated"] == [base, one]
    assert saw["two"] == two
    outputs = [*saw["start"], base, one, two]
    assert len({json.dumps(each) for each in outputs}) == len(outputs)


def test_and_back(saw):
    assert saw["error_back"] == ["", ""]
    assert saw["back"] == saw["start"]


def test_a_flipped_byte_leaves_both_as_they_were(saw):
    kind, message = saw["corrupt"]
    assert kind == "CorruptionError"
    assert "fails its digest" in message
    assert saw["after_corrupt"] == saw["start"]


def test_a_parameter_without_new_values_is_noticed_under_its_own_name(saw):
    kind, message = saw["partial"]
    assert kind == "TransferError"
    assert "1 of " in message
    assert "would keep their old values" in message
    assert "base_layer" not in message
    assert saw["after_partial"] == saw["updated"]
