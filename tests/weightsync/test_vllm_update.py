"""Weights into an offline LLM, and turns with it: bit for bit what a fresh engine computes."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
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
from primeblocks.weightsync.adapters.vllm.loads import record_load
from primeblocks.weightsync.engines.colocated import Colocated, ColocatedEngine
from primeblocks.weightsync.manifest import Manifest
from primeblocks.weightsync.marker import Receipt
from primeblocks.weightsync.transports import FileTransport, GroupTransport
from tests.engine_job import call
from tests.weightsync.contents import PACKED, packed_end
from tests.weightsync.vllm_site import ENGINE, TIMEOUT_S, Trainer, error_of, greedy, needs

pytestmark = needs("vllm")

# Asymmetric inputs have one kernel on all CPUs.
INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": False}
WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
LINEAR = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": LINEAR},
    "ignore": ["lm_head"],
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def offline(request, tmp_path_factory):
    if request.param == "bfloat16" and not request.config.getoption("--full"):
        pytest.skip("two engines more: --full")
    folder, dtype = tmp_path_factory.mktemp("offline"), request.param
    for seed in (0, 1):
        path = folder / f"{dtype}-{seed}"
        tiny_models.save("qwen3_moe", path, seed=seed, dtype=dtype, num_layers=2, hidden=64)
    return call(_offline, folder, dtype)


def _offline(folder, dtype):
    """An engine that starts with seed 0 and is updated; one that starts with seed 1: turns."""
    import vllm

    def start(seed):
        path = str(folder / f"{dtype}-{seed}")
        return vllm.LLM(path, dtype=dtype, **ENGINE, **adapter.engine_args())

    register()
    trainer = Trainer(dtype, folder)
    saw = _updated(start(0), trainer)
    # Now: collected while the next engine starts, this one would end the groups of that one.
    gc.collect()
    second = start(1)
    saw["fresh"] = greedy(second)
    saw["turns"] = _turns(second, trainer)
    trainer.transport.close()
    return saw


def _updated(llm, trainer):
    def update(receipt, timeout_s=TIMEOUT_S):
        adapter.update_llm(llm, receipt, timeout_s=timeout_s)

    def now():
        return greedy(llm), llm.get_weight_version()

    saw = {"start": greedy(llm)}
    first = trainer.publish(1, seed=1)
    saw["unattached"] = error_of(update, first)
    for part in ("self_attn.k_proj.weight", "mlp.experts.3.up_proj.weight"):
        saw[part] = error_of(
            adapter.attach_llm,
            llm,
            _plan_without(trainer.model, f"layers.1.{part}"),
            trainer.transport,
        )
    wide = describe({"model.embed_tokens.weight": torch.zeros(1000, 64)})
    saw["wide"] = error_of(adapter.attach_llm, llm, plan_sync([wide], wide), trainer.transport)
    adapter.attach_llm(llm, trainer.plan, trainer.transport)
    trainer.flip(1)
    saw["corrupt"], saw["after_corrupt"] = error_of(update, first), now()
    trainer.flip(1)
    update(first)
    saw["updated"] = now()

    # A load that breaks half-way, one that leaves a parameter out; going back loads all.
    second = trainer.publish(2, seed=0)
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
    whole = model.load_weights
    for case, damaged in (("broken", _cut_short), ("partial", _without_last)):
        left = [damaged]
        model.load_weights = lambda tensors, left=left: whole(
            left.pop()(tensors) if left else tensors
        )
        saw[case], saw[f"after_{case}"] = error_of(update, second), now()
    model.load_weights = whole
    update(second)
    saw["back"] = now()

    late = first.__class__(9, first.bytes, 0.0, first.digest)
    saw["never_committed"] = error_of(update, late, 0.2)
    saw["joined"] = list(_joined(llm, trainer))
    saw["over"] = {kind: _over(kind, llm, trainer, seed) for seed, kind in enumerate(PACKED, 1)}
    return saw


def _plan_without(model, part):
    names = to_checkpoint(model).targets.items()
    have = Manifest(tuple((name, spec) for name, spec in names if not name.endswith(part)))
    assert len(have) == len(names) - 1
    return plan_sync([have], have)


def _over(kind, llm, trainer, seed):
    """The engine attached over packed buffers, which its worker opens from their spec."""
    folder, before = trainer.root / kind, trainer.publisher
    folder.mkdir()
    with packed_end(kind, folder, owner=True) as transport:
        trainer.publisher = Publisher(trainer.plan, trainer.model, transport)
        receipt = trainer.publish(5, seed=seed % 2)
        adapter.attach_llm(llm, trainer.plan, transport)
        adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
    trainer.publisher = before
    return greedy(llm), llm.get_weight_version()


def _joined(llm, trainer):
    """The engine's worker as a reader of a group: it asks while the trainer publishes."""
    store, before = dist.FileStore(str(trainer.root / "store")), trainer.publisher
    with (
        GroupTransport(store=store, trainers=1, readers=1, rank=0) as transport,
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.publisher = Publisher(trainer.plan, trainer.model, transport)
        adapter.attach_llm(llm, trainer.plan, transport)
        for version, seed in ((5, 1), (6, 0)):
            sent = pool.submit(trainer.publish, version, seed=seed)
            adapter.update_llm(llm, Receipt(version, 0, 0.0, ""), timeout_s=TIMEOUT_S)
            assert sent.result().version == version
            yield greedy(llm), llm.get_weight_version()
    trainer.publisher = before


def _cut_short(tensors):
    for index, item in enumerate(tensors):
        if index == 9:
            raise RuntimeError("out of memory")
        yield item


def _without_last(tensors):
    yield from list(tensors)[:-1]


def _turns(llm, trainer):
    """Two turns of an engine with other weights: what it says in each, and the calls."""
    calls, said = [], []

    def call(name, act):
        calls.append((name, act, llm.llm_engine.is_sleeping()))

    def update(receipt, timeout_s):
        # Attached anew, because a worker that holds the version would not load it again.
        adapter.attach_llm(llm, trainer.plan, trainer.transport)
        adapter.update_llm(llm, receipt, timeout_s=timeout_s)
        call("update", None)

    engine = ColocatedEngine(
        sleep=lambda s: call("sleep", llm.sleep(level=2)),
        wake=lambda part, s: call(part, llm.wake_up(tags=[part])),
        update=update,
    )
    colocated = Colocated(
        trainer=SimpleNamespace(release=lambda: None, restore=lambda: None),
        engine=engine,
        publish=lambda version, s: trainer.publisher.publish(version, timeout_s=s),
        memory=int,
    )
    engine.sleep(TIMEOUT_S)
    trainer.take(seed=0)
    for version in (3, 4):
        colocated.to_engine(version, timeout_s=TIMEOUT_S)
        said.append(greedy(llm))
        colocated.to_trainer(timeout_s=TIMEOUT_S)
        with torch.no_grad():
            for mine in trainer.model.parameters():
                mine.mul_(1.5)
    return {"said": said, "calls": calls}


def test_an_updated_engine_equals_a_fresh_one_bit_for_bit(offline):
    assert offline["start"] != offline["fresh"]
    assert offline["updated"] == (offline["fresh"], "1")
    assert offline["back"] == (offline["start"], "2")


def test_a_flipped_byte_leaves_the_old_weights_served(offline):
    kind, message = offline["corrupt"]
    assert kind == "CorruptionError"
    assert "of version 1 fails its digest" in message
    assert offline["after_corrupt"] == (offline["start"], "default")


def test_a_load_that_breaks_goes_back(offline):
    kind, message = offline["broken"]
    assert kind == "TransferError"
    assert "out of memory. Version 1 was loaded again" in message
    assert offline["after_broken"] == (offline["fresh"], "1")


def test_a_worker_reads_over_every_carrier(offline):
    fresh, start = (offline["fresh"], "5"), (offline["start"], "5")
    assert offline["joined"] == [(offline["fresh"], "5"), (offline["start"], "6")]
    assert [*offline["over"]] == [*PACKED]
    assert [*offline["over"].values()] == ([fresh, start] * len(PACKED))[: len(PACKED)]


def test_a_parameter_without_new_values_is_noticed(offline):
    kind, message = offline["partial"]
    assert kind == "TransferError"
    assert "would keep their old values" in message
    assert offline["after_partial"] == (offline["fresh"], "1")


def test_a_manifest_that_fills_a_parameter_in_part_is_refused(offline):
    kind, message = offline["self_attn.k_proj.weight"]
    assert kind == "PlanError"
    assert "lacks elements of 1 parameters, such as model.layers.1.self_attn.qkv_proj" in message
    assert "(8192 of 12288 elements)" in message
    kind, message = offline["mlp.experts.3.up_proj.weight"]
    assert kind == "PlanError"
    assert "lacks elements of 1 parameters, such as model.layers.1.mlp.experts" in message


def test_a_manifest_on_which_the_loader_fails_is_refused(offline):
    kind, message = offline["wide"]
    assert kind == "UnsupportedError"
    assert "Qwen3MoeForCausalLM cannot be updated: the loader fails without values" in message
    assert "at 'model.embed_tokens.weight': AssertionError" in message


def test_int8_layers_are_described_and_refused(tmp_path):
    """After a reload they compute with memory that is gone: on a CPU, oneDNN keeps pointers."""
    said, lacking, refused = call(_int8, tmp_path)
    assert said[0] == said[1]
    down, up = ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.gate_up_proj.weight")
    assert lacking == [[], [down], [f"{up} (32768 of 65536 elements)"]]
    assert refused[0] == "UnsupportedError"
    assert "int8 kernels" in refused[1]


def _int8(folder):
    import vllm

    sizes = {"num_layers": 2, "hidden": 128}
    tiny_models.save("qwen3", folder / "model", **sizes)
    held = {}
    for name, tensor in tiny_models.build("qwen3", **sizes).state_dict().items():
        held[name] = tensor.contiguous()
        if "_proj" in name:
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            codes = (tensor.float() / scale).round().to(torch.int8)
            held |= {name: codes, f"{name}_scale": scale}
    save_file(held, folder / "model" / "model.safetensors")
    config = json.loads((folder / "model" / "config.json").read_text())
    config["quantization_config"] = INT8
    (folder / "model" / "config.json").write_text(json.dumps(config))
    llm = vllm.LLM(str(folder / "model"), dtype="bfloat16", **ENGINE, **adapter.engine_args())
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    said, lacking = [greedy(llm)], []
    for part in ("nothing", "layers.1.mlp.down_proj.weight", "layers.1.mlp.up_proj.weight"):
        rows = describe({name: one for name, one in held.items() if not name.endswith(part)})
        lacking.append(record_load(worker.get_model(), rows, worker.vllm_config).lacking)
    said.append(greedy(llm))
    plan = plan_sync([describe(held)], describe(held))
    with SharedMemoryTransport("int8", owner=True, root=str(folder)) as transport:
        return said, lacking, error_of(adapter.attach_llm, llm, plan, transport)


def test_a_tied_head_follows_its_embedding(tmp_path):
    """Its tensor is not in the checkpoint, and on a CPU vLLM packs it besides."""
    said, differing, other = call(_tied, tmp_path)
    assert said[0] == said[2] != said[1]
    assert differing == [[], []]
    assert other == [("PlanError", True), []]


def _tied(folder):
    import vllm

    sizes = {"num_layers": 2, "hidden": 64}
    model = tiny_models.build("qwen3", **sizes)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "model")
    llm = vllm.LLM(str(folder / "model"), dtype="bfloat16", **ENGINE, **adapter.engine_args())
    source = describe(model)
    plan = plan_sync([source], source.whole())
    less = Manifest(tuple(row for row in source.whole().items() if "1.mlp.down" not in row[0]))
    said, differing = [greedy(llm)], []

    def update(version):
        receipt = publisher.publish(version, timeout_s=TIMEOUT_S)
        adapter.update_llm(llm, receipt, timeout_s=TIMEOUT_S)
        found = verify_engine(model, adapter.observe_llm(llm), plan=plan)
        return [*found.differing, *found.missing]

    with (
        SharedMemoryTransport("tied", owner=True, root=str(folder)) as transport,
        Publisher(plan, model, transport) as publisher,
    ):
        adapter.attach_llm(llm, plan, transport)
        for version, step in enumerate((1, -1)):
            weight = model.get_input_embeddings().weight.detach()
            weight.copy_(weight.roll(step, 0))
            differing.append(update(version))
            said.append(greedy(llm))
        # A plan that is refused leaves nothing behind for the next one.
        kind, _ = error_of(adapter.attach_llm, llm, plan_sync([source], less), transport)
        adapter.attach_llm(llm, plan, transport)
        return said, differing, [(kind, True), update(2)]


def test_a_worker_that_is_attached_again_does_not_wait_for_its_old_check(tmp_path):
    waited, attached, last = call(_attached_again, tmp_path)
    assert not waited
    assert (attached.busy, attached.error) == (False, "")
    assert last.error == "DeadlineError"  # The old check has found its version.


def _attached_again(folder):
    from vllm.config import VllmConfig

    from primeblocks.weightsync.adapters.vllm.worker import InitInfo, PrimeblocksEngine, UpdateInfo

    weights = {"w": torch.zeros(4, 4)}
    plan = plan_sync([describe(weights)], describe(weights))
    worker = object.__new__(PrimeblocksEngine)  # Its __init__ needs the configuration of an engine.
    worker.model, worker.parallel_config = nn.Module(), SimpleNamespace(enable_eplb=False)
    worker._known, worker.vllm_config = (plan.fingerprint(), 0), VllmConfig()
    with (
        FileTransport(folder, owner=True) as transport,
        Publisher(plan, weights, transport) as publisher,
    ):
        info = InitInfo(transport=transport.spec(), plan=plan.to_json())
        worker.init_transfer_engine(info)
        worker.verify(UpdateInfo(version=1, transaction="old", timeout_s=TIMEOUT_S))
        old = worker._checking
        worker.init_transfer_engine(info)
        waited, attached = old.done(), worker.state
        worker.verify(UpdateInfo(version=2, transaction="new", timeout_s=0.0))
        worker._checking.result()
        publisher.publish(1, timeout_s=TIMEOUT_S)
        old.result()
        return waited, attached, worker.state


def test_refusals_have_types(offline):
    assert offline["unattached"][0] == "TransferError"
    assert "Call attach() first" in offline["unattached"][1]
    assert offline["never_committed"][0] == "DeadlineError"


def test_vllm_takes_turns_with_a_trainer(offline):
    """On a CPU it goes through the motions of sleeping and keeps its memory: calls and order."""
    first, second = offline["turns"]["said"]
    assert offline["fresh"] != first == offline["start"]
    assert [tokens for tokens, _ in second] != [tokens for tokens, _ in first]
    turn = [
        ("weights", False, True),  # Not wholly awake yet: vLLM schedules nothing.
        ("update", None, True),
        ("kv_cache", True, False),
        ("sleep", None, True),
    ]
    assert offline["turns"]["calls"] == [("sleep", None, True), *turn, *turn]
