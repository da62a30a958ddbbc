"""LoRA adapters into real vLLM: bit for bit what an engine computes that loads PEFT's folder."""

import importlib.util
import json
from pathlib import Path

import pytest

from primeblocks.testing import tiny_models
from tests.engine_job import fork_job

JOB = Path(__file__).with_name("vllm_lora_job.py")
MISSING = [name for name in ("vllm", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module", params=[("qwen3", "float32"), ("llama", "bfloat16")], ids="-".join)
def folder(request, tmp_path_factory):
    if request.param != ("qwen3", "float32") and not request.config.getoption("--full"):
        pytest.skip("runs under --full")
    folder = tmp_path_factory.mktemp("lora")
    family, dtype = request.param
    tiny_models.save(family, folder / "model", seed=0, dtype=dtype, num_layers=2, hidden=64)
    cases = ["offline", "running"] if dtype == "float32" else ["offline"]
    fork_job(JOB, dtype, str(folder), *cases)
    return folder


@pytest.fixture(scope="module")
def offline(folder):
    return json.loads((folder / "offline.json").read_text())


@pytest.fixture(scope="module")
def running(folder):
    if not (folder / "running.json").exists():
        pytest.skip("runs in float32 only")
    return json.loads((folder / "running.json").read_text())


def test_a_synced_adapter_equals_one_loaded_from_its_folder_bit_for_bit(offline):
    assert offline["name"] == "policy@1"
    versions = [offline["one"], offline["two"], offline["three"], offline["four"]]
    assert versions == offline["fresh"]
    assert all(version != offline["base"] for version in versions)
    assert len({json.dumps(version) for version in versions}) == 4


def test_the_same_over_files(offline):
    assert offline["critic"] == offline["fresh"][0]


def test_peft_computes_the_same(offline):
    if "peft" not in offline:
        pytest.skip("compared in float32 only")
    for (_, ours), theirs in zip(offline["three"], offline["peft"], strict=True):
        assert [float.fromhex(value) for value in ours] == pytest.approx(theirs, abs=1e-5)


def test_versions_live_side_by_side(offline):
    one, two, three, _ = offline["fresh"]
    assert offline["one_again"] == one
    assert offline["mixed"] == [one[0], two[1], one[2]]
    assert offline["turns"] == [one, two, three, one]


def test_adapters_survive_what_vllm_drops_after_an_update_of_the_base(offline):
    assert offline["after_reset"] == [offline["fresh"][1], offline["base"]]


def test_a_flipped_byte_registers_nothing(offline):
    for case in ("corrupt_first", "corrupt"):
        kind, message = offline[case]
        assert kind == "CorruptionError"
        assert "fails its digest" in message
    assert offline["after_corrupt"] == [offline["fresh"][0], offline["fresh"][1], 2]


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("unattached", "TransferError", "call attach_lora() first"),
        ("rank", "UnsupportedError", "has rank 9, this engine takes 8"),
        ("module", "PlanError", "adapts no module 'lm_head'"),
        ("shape", "ShapeError", "takes 64 inputs to 64 outputs; the adapter 63 to 64"),
        ("digest", "TransferError", "Use the receipt of the last publish"),
        ("never_committed", "DeadlineError", "version 9 was not committed"),
        ("name_taken", "UsageError", "'policy@2' is held with other bytes"),
        ("id_taken", "UsageError", "which another adapter has"),
        ("full", "CapacityError", "3 versions of 'policy' are held and keep=3"),
        ("stock", "EngineError", "not a LoraWorkerExtension"),
        ("without", "UnsupportedError", "built without enable_lora"),
    ],
)
def test_refusals(offline, case, kind, message):
    assert offline[case][0] == kind
    assert message in offline[case][1]


def test_a_removed_version_is_gone(offline):
    (kind, message), registered = offline["removed"]
    assert kind == "UsageError"
    assert message == "no such version is held: ['critic@1', 'policy@2', 'policy@3']"
    assert registered == 1  # Two of the three left were evicted: vLLM keeps two.
    assert "does not hold 'policy@1'" in offline["refused"]


def test_requests_in_flight_finish_on_their_version(running):
    assert running["still_flying"]
    assert running["flown"] == running["one"]
    assert running["two"] == running["two_again"]
    assert [tokens for tokens, _ in running["two"]] != [row[:16] for row, _ in running["one"]]


def test_the_same_over_files_and_processes(running):
    assert running["critic"] == running["one"]


def test_a_version_in_use_is_not_removed(running):
    kind, message = running["in_use"]
    assert kind == "UsageError"
    assert "3 requests such as 'flying0' still use 'policy@1'" in message


def test_a_request_on_a_removed_version_leaves_the_engine_alive(running):
    assert "does not hold 'policy@1'" in running["refused"]
    assert running["two"] == running["two_again"]


def test_a_flipped_byte_while_running(running):
    assert running["corrupt"][0] == "CorruptionError"


def test_workers_hold_a_version_all_or_none(full, tmp_path):
    if not full:
        pytest.skip("runs under --full")
    from transformers import AutoModelForCausalLM

    config = tiny_models.config("qwen3", num_layers=2, hidden=64)
    config.num_key_value_heads = 1  # Of which each worker has a copy.
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    fork_job(JOB, "float32", str(tmp_path), "workers")
    saw = json.loads((tmp_path / "workers.json").read_text())
    assert saw["broken"] == ["EngineError", "RuntimeError: no memory"]
    assert saw["rolled_back"] == [0, 0]
    assert saw["held"] == [1, 1]
    assert saw["synced"] == saw["disk"]
