"""Faults of one tensor in a real vLLM, each named by what the engine computes with."""

import importlib.util
import json
from pathlib import Path

import pytest

from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import verify_engine
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.engines import prove_round_trip
from tests.engine_job import call, fork_job
from tests.weightsync.vllm_site import ENGINE, TIMEOUT_S, Trainer, error_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

LAYER = "model.layers.1"
QKV, EXPERTS = f"{LAYER}.self_attn.q_proj.weight", f"{LAYER}.mlp.experts.gate_up_proj"
NORMS = f"{LAYER}.input_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight"
DENSE = f"{LAYER}.self_attn.o_proj.weight"


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def saw(request, tmp_path_factory):
    if request.param == "float32" and not request.config.getoption("--full"):
        pytest.skip("one engine more: --full")
    folder, dtype = tmp_path_factory.mktemp("verified"), request.param
    tiny_models.save("qwen3_moe", folder / "model", dtype=dtype, num_layers=2, hidden=64)
    return call(_verified, folder, dtype)


def _verified(folder, dtype):
    """What is found of one engine, before and after updates with a fault in each."""
    import vllm

    register()
    trainer = Trainer(dtype, folder)
    llm = vllm.LLM(str(folder / "model"), dtype=dtype, **ENGINE, **adapter.engine_args())
    core = llm.llm_engine.engine_core.engine_core
    model = core.model_executor.driver_worker.worker.get_model()
    load = model.load_weights
    versions = iter(range(1, 100))
    found = {}

    def look():
        return verify_engine(trainer.model, adapter.observe_llm(llm), plan=trainer.plan)

    def update(spoil=lambda tensors: tensors):
        version = next(versions)
        model.load_weights = lambda tensors: load(spoil(dict(tensors)).items())
        before = {n: t.detach().clone() for n, t in trainer.model.named_parameters()}
        receipt = trainer.publish(version, seed=version)
        spoiled = spoil.__code__.co_argcount > 1
        if spoiled:
            model.load_weights = lambda tensors: load(spoil(dict(tensors), before).items())
        adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
        model.load_weights = load

    found["unattached"] = error_of(adapter.observe_llm, llm)
    adapter.attach_llm(llm, trainer.plan, trainer.transport)
    found["start"] = look()
    update()
    found["updated"] = look()
    update(lambda sent, old: sent | {QKV: old[QKV]})
    found["wrong version"] = look()
    update(lambda sent: sent | {DENSE: sent[DENSE].roll(8, 0)})
    found["wrong slice"] = look()
    update(lambda sent: sent | {EXPERTS: sent[EXPERTS].flip(0)})
    found["experts"] = look()
    update(lambda sent: sent | {NORMS[0]: sent[NORMS[1]] + 1, NORMS[1]: sent[NORMS[0]] + 2})
    found["norms"] = look()
    attention, routed = model.model.layers[1].self_attn, model.model.layers[1].mlp.experts
    routed = getattr(routed, "routed_experts", routed)
    kernel, packed = attention.qkv_proj.cpu_linear, routed.w2_weight.detach().clone()
    update()
    found["healed"] = look()
    attention.qkv_proj.cpu_linear = kernel  # It goes on with what it had packed before.
    found["stale kernel"] = look()
    update()
    routed.w2_weight.data.copy_(packed)
    found["stale experts"] = look()

    def push(version):
        receipt = trainer.publisher.publish(version, timeout_s=TIMEOUT_S)
        adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)

    found["proof"] = prove_round_trip(
        trainer.model, push, lambda: adapter.observe_llm(llm), plan=trainer.plan, version=100,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    trainer.transport.close()
    return found


def test_an_engine_that_runs_what_was_sent_is_proved(saw):
    assert saw["start"].is_proved, saw["start"].table()
    assert saw["updated"].is_proved, saw["updated"].table()
    assert saw["healed"].is_proved, saw["healed"].table()
    assert saw["unattached"] == ("EngineError", "not attached; call attach() first")
    assert saw["proof"].versions == (100, 101, 102)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("wrong version", [QKV]),
        ("wrong slice", [DENSE]),
        ("experts", [EXPERTS]),
        ("norms", sorted(NORMS)),
        ("stale kernel", [f"{LAYER}.self_attn.{part}_proj.weight" for part in "kqv"]),
        ("stale experts", [f"{LAYER}.mlp.experts.down_proj"]),
    ],
)
def test_a_fault_is_named(saw, case, names):
    assert list(saw[case].differing) == names, saw[case].table()
    assert saw[case].wrong == names
    assert not saw[case].unexpected


def test_the_notebook_names_what_it_breaks(tmp_path):
    notebook = Path(__file__).parents[2] / "notebooks/does_my_engine_run_my_weights.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join(code))
    said = fork_job(tmp_path / "cells.py")
    assert "0 not proved" in said
    assert "the parameter that is left: (0,)" in said
    assert "are others in the engine than in the trainer" in said
    assert "RoundTrip(versions=(10, 11, 12)" in said
