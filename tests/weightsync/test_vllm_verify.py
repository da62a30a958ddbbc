"""Faults of one tensor in a real vLLM, each named by what the engine computes with."""

import json
import re
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import (
    Publisher,
    SharedMemoryTransport,
    describe,
    plan_sync,
    verify_engine,
)
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.adapters.transformers import to_checkpoint
from primeblocks.weightsync.engines import prove_round_trip
from primeblocks.weightsync.manifest import named_tensors
from tests.engine_job import call, fork_job
from tests.weightsync.vllm_site import (
    ENGINE,
    PROMPTS,
    TIMEOUT_S,
    Trainer,
    error_of,
    needs,
    sampling,
    seen,
)

pytestmark = needs("vllm")

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

    found["proof"] = prove_round_trip(trainer.model, push, look, version=100)
    trainer.transport.close()
    return found


def test_an_engine_that_runs_what_was_sent_is_proved(saw):
    assert saw["start"].is_proved, saw["start"].table()
    assert saw["updated"].is_proved, saw["updated"].table()
    assert saw["healed"].is_proved, saw["healed"].table()
    assert saw["unattached"] == ("EngineError", "this worker is not attached. Call attach() first.")
    assert saw["proof"].is_proved


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


# Families, and how many kinds of vectors each has: sinks, biases, norms, corrections of routers.
FEW = {"gpt_oss": 11, "glm4_moe": 6}
MORE = {
    "qwen2_moe": 6,
    "qwen3_moe": 5,
    "mixtral": 3,
    "olmoe": 5,
    "flex_olmo": 5,
    "exaone_moe": 6,
    "deepseek_v3": 6,
    "glm4_moe_lite": 6,
    # By transformers' code: shared experts have two names, corrections are buffers.
    "dots1": 6,
    "solar_open": 4,
    "llama": 3,
    "qwen3": 5,
}
LATENT = ("deepseek_v3", "glm4_moe_lite")
WITHOUT_EXPERTS = ("llama", "qwen3")


@pytest.fixture(params=[*FEW, *MORE])
def alone(request, tmp_path):
    if request.param in MORE and not request.config.getoption("--full"):
        pytest.skip("an engine more: --full")
    return request.param, call(_alone, tmp_path, request.param)


def _alone(folder, family):
    """What is found, and what arrives, as one vector after the other changes."""
    import vllm

    register()
    sizes = {"num_layers": 2, "hidden": 64, "num_experts": 4, "vocab": 128}
    tiny_models.save(family, folder / "model", **sizes)
    model = tiny_models.build(family, **sizes)
    convert, vectors = to_checkpoint(model), {}
    for name, tensor in named_tensors(model).items():
        if tensor.ndim == 1 or name.endswith(("bias", "kv_b_proj.weight")):
            vectors[re.sub(r"\d+", "N", name)] = name, tensor.detach()  # The last layer's.
    checkpoint = convert.targets.whole()
    plan = plan_sync([describe(model)], checkpoint, bucket_bytes=1 << 20, convert=convert)
    llm = vllm.LLM(str(folder / "model"), dtype="bfloat16", **ENGINE, **adapter.engine_args())
    engine = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()

    def say():
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[:2]]
        return [seen(one) for one in llm.generate(prompts, sampling(2), use_tqdm=False)]

    def held():
        return {n: t.detach() for n, t in chain(engine.named_parameters(), engine.named_buffers())}

    with (
        SharedMemoryTransport("policy", owner=True, root=str(folder)) as transport,
        Publisher(plan, model, transport, convert=convert) as publisher,
    ):

        def update(version):
            receipt = publisher.publish(version, timeout_s=TIMEOUT_S)
            adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
            return say()

        def look(seen=None):
            seen = seen or adapter.observe_llm(llm)
            return verify_engine(model, seen, plan=plan, convert=convert)

        adapter.attach_llm(llm, plan, transport)
        said = [say(), update(0)]
        engine.register_parameter("lonely", nn.Parameter(torch.ones(2)))
        found = {"lonely": look()}
        del engine.lonely
        held_now = adapter.observe_llm(llm)
        found["start"] = look(held_now)
        changes, olds = {}, {name: tensor.clone() for name, tensor in vectors.values()}
        for version, (name, tensor) in enumerate(vectors.values(), 1):
            before = {n: t.clone() for n, t in held().items()}
            tensor.add_(torch.linspace(0.25, 0.5, tensor.numel()).view(tensor.shape))
            names = sorted({p.target for p in convert.by_source[name]})
            change = {"names": names, "sent": look(held_now)}
            said.append(update(version))
            held_now = adapter.observe_llm(llm)
            change["loaded"] = look(held_now)
            moved = {n: t != before[n] for n, t in held().items() if not t.equal(before[n])}
            parts = [held()[n][places] for n, places in moved.items()]
            change["moved"] = [part.float().sort().values.tolist() for part in parts]
            change["values"] = tensor.float().flatten().sort().values.tolist()
            for n, places in moved.items():
                new = held()[n].clone()
                held()[n][places] += 1
                change["behind"] = look()
                held()[n].copy_(new)
            changes[name] = change
        found["broken"] = _broken(engine, update, 100), say() == said[-1]
        found["exhausted"] = _exhausted(engine, update, 101)
        for name, tensor in vectors.values():
            tensor.copy_(olds[name])
        found["new memory"] = _dims(lambda: said.append(update(102)))
    return found, changes, said


def _broken(engine, update, version):
    """The error of an update whose first load ends before the last layer."""
    load, loads = engine.load_weights, []

    def ends(tensors):
        for name, tensor in tensors:
            if "layers.1." in name and len(loads) == 1:
                raise RuntimeError("broken")
            yield name, tensor

    engine.load_weights = lambda tensors: loads.append(0) or load(ends(tensors))
    error = error_of(update, version)
    engine.load_weights = load
    return error


def _exhausted(engine, update, version):
    """The error of an update while layers get no memory, and what is left without memory."""
    from vllm.model_executor.model_loader.reload import layerwise

    def out_of_memory(*_):
        raise MemoryError

    materialize, layerwise.materialize_layer = layerwise.materialize_layer, out_of_memory
    kind, message = error_of(update, version)
    layerwise.materialize_layer = materialize
    return kind, message, [name for name, one in engine.named_parameters() if one.is_meta]


def _dims(act):
    """How many dims each tensor has that gets new memory in an update."""
    from vllm.model_executor.model_loader.reload import meta

    made, materialize = [], meta.materialize_meta_tensor
    meta.materialize_meta_tensor = lambda one: made.append(one.ndim) or materialize(one)
    act()
    meta.materialize_meta_tensor = materialize
    return made


def test_a_sink_a_bias_or_a_norm_that_changes_alone_arrives_and_is_named(alone):
    family, (found, changes, said) = alone
    hidden = found["start"].unobservable
    assert found["start"].wrong == list(hidden), found["start"].table()
    assert all(name.endswith("kv_b_proj.weight") for name in hidden)
    assert bool(hidden) == (family in LATENT)
    assert list(found["lonely"].unexpected) == ["lonely"]
    assert not found["start"].unexpected
    for name, change in changes.items():
        assert change["loaded"].wrong == list(hidden), change["loaded"].table()
        if name in hidden:
            continue
        for kind in ("sent", "behind"):
            assert list(change[kind].differing) == change["names"], (name, change[kind].table())
            assert change[kind].wrong == [*change["names"], *hidden]
            assert not change[kind].unexpected
        assert change["moved"] == [change["values"]], name
    assert len(changes) == (FEW | MORE)[family] + (family in LATENT)
    # What it says changes with each vector, and is what a fresh engine says at both ends.
    assert all(one != other for one, other in pairwise(said[1:]))
    assert said[0] == said[1] == said[-1]
    (kind, message), same = found["broken"]
    assert (kind, same) == ("TransferError", True), message
    kind, message, empty = found["exhausted"]
    assert (kind, empty) == ("EngineError", []), message
    # The loader of gpt_oss writes experts itself. New memory would be for all layers at a time.
    assert (3 in found["new memory"]) == (family not in ("gpt_oss", *WITHOUT_EXPERTS))


def test_the_notebook_names_what_it_breaks(tmp_path):
    notebook = Path(__file__).parents[2] / "notebooks/does_my_engine_run_my_weights.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n".join(code))
    said = fork_job(tmp_path / "cells.py")
    assert "0 not proved" in said
    assert "the parameter that is left: (0,)" in said
    assert "differ in the engine after the push" in said
    assert said.count("0 not proved") >= 2
