"""LoRA adapters into real vLLM, and new base weights under them, in layers that vLLM wraps.

Bit for bit what a stock engine computes that loads the base's checkpoint and PEFT's folders.
"""

import dataclasses
import gc
import json

import pytest
import torch

from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.transports import GroupTransport
from tests.engine_job import call
from tests.weightsync.contents import PACKED, packed_end, store_at
from tests.weightsync.vllm_site import (
    LORA_ENGINE,
    PROMPTS,
    SIZES,
    TIMEOUT_S,
    AdapterTrainer,
    Trainer,
    error_of,
    greedy,
    needs,
)

pytestmark = needs("vllm", "peft")


@pytest.fixture(scope="module", params=[("qwen3", "float32"), ("llama", "bfloat16")], ids="-".join)
def saw(request, tmp_path_factory):
    if request.param != ("qwen3", "float32") and not request.config.getoption("--full"):
        pytest.skip("runs under --full")
    folder, (family, dtype) = tmp_path_factory.mktemp("lora"), request.param
    for seed in (0, 1):
        tiny_models.save(family, folder / f"base-{seed}", seed=seed, dtype=dtype, **SIZES)
    return call(_see, folder, family, dtype)


def _see(folder, family, dtype):
    """An engine that starts with seed 0 is updated to seed 1, a stock one starts with it."""
    import vllm

    from primeblocks.weightsync.adapters.vllm import lora

    register()
    base = Trainer(dtype, folder, family)
    policy, critic = AdapterTrainer.pair(folder / "base-1", folder / "adapters")
    engine = {**LORA_ENGINE, **lora.lora_engine_args()}
    llm = vllm.LLM(str(folder / "base-0"), dtype=dtype, **engine)
    first = policy.publish(1)
    saw = {"unattached": error_of(lora.update_lora_llm, llm, "policy", first, timeout_s=TIMEOUT_S)}
    saw |= _refused_at_attach(llm, policy)
    for trainer in (policy, critic):
        lora.attach_lora_llm(llm, trainer.spec, trainer.plan, trainer.transport, keep=3)
    policy.flip(1)
    saw["corrupt_first"] = error_of(_load, llm, policy, first)
    policy.flip(1)
    one = _load(llm, policy, first)
    saw["under"] = _new_bases(llm, base, one)
    saw |= _versions(llm, one, policy, critic)
    del llm
    # Now: collected while the next engine starts, this one would end the groups of that one.
    gc.collect()

    stock = vllm.LLM(str(folder / "base-1"), dtype=dtype, enable_lora=True, **LORA_ENGINE)
    saw |= _fresh(stock, policy)
    if dtype == "float32":
        saw["peft"] = _peft_logprobs(policy, saw["three"])
    for trainer in (base, policy, critic):
        trainer.transport.close()
    return saw


def _load(llm, trainer, receipt, timeout_s=TIMEOUT_S):
    from primeblocks.weightsync.adapters.vllm import lora

    return lora.update_lora_llm(llm, trainer.spec.name, receipt, timeout_s=timeout_s)


def _refused_at_attach(llm, policy):
    from primeblocks.weightsync.adapters.vllm import lora

    def attach(spec, plan):
        return error_of(lora.attach_lora_llm, llm, spec, plan, policy.transport)

    def other(name, **settings):
        made = AdapterTrainer(name, policy.checkpoint, policy.transport, policy.root, **settings)
        return attach(made.spec, made.plan)

    narrow = {name: tensor[:, :-1] for name, tensor in policy.tensors.items() if "A" in name}
    source = describe(dict(policy.tensors) | narrow)
    return {
        "group": error_of(
            lora.attach_lora_llm,
            llm,
            policy.spec,
            policy.plan,
            GroupTransport(store=store_at(policy.root), trainers=1, readers=1, rank=0),
        ),
        "rank": other("wide", r=9),
        "module": other("head", target_modules=["lm_head"]),
        "shape": attach(policy.spec, plan_sync([source], source.whole(), bucket_bytes=1 << 14)),
    }


def _new_bases(llm, base, one):
    """From seed 0 to seed 1, back, and to seed 1 again, with an adapter beside it."""
    core = llm.llm_engine.engine_core.engine_core.model_executor
    model = core.driver_worker.worker.get_model()
    wrapped = [name for name, _ in model.named_parameters() if ".base_layer." in name]
    adapter.attach_llm(llm, base.plan, base.transport)

    def both():
        return [greedy(llm), greedy(llm, one)]

    def update(receipt):
        return error_of(adapter.update_llm, llm, receipt, timeout_s=TIMEOUT_S)

    saw = {"wrapped": len(wrapped), "start": both()}
    first = base.publish(1, seed=1)
    base.flip(1)
    saw["corrupt"], saw["after_corrupt"] = update(first), both()
    base.flip(1)
    saw["error"], saw["updated"] = update(first), both()

    second = base.publish(2, seed=0)
    whole, left = model.load_weights, [slice(-1)]
    model.load_weights = lambda tensors: whole(list(tensors)[left.pop() if left else slice(None)])
    saw["partial"], saw["after_partial"] = update(second), both()
    model.load_weights = whole
    saw["error_back"], saw["back"] = update(second), both()
    saw["error_again"], saw["again"] = update(base.publish(3, seed=1)), both()
    return saw


def _versions(llm, one, policy, critic):
    """Versions of adapters, over weights that the engine did not start with."""
    from primeblocks.weightsync.adapters.vllm import lora

    saw = {"one": greedy(llm, one), "name": one.lora_name}
    saw["critic"] = greedy(llm, _load(llm, critic, critic.publish(1)))
    two = _load(llm, policy, policy.publish(2))
    saw["two"], saw["one_again"] = greedy(llm, two), greedy(llm, one)
    saw["mixed"] = greedy(llm, [one, two, one])

    third = policy.publish(3)
    policy.flip(3)
    saw["corrupt"] = error_of(_load, llm, policy, third)
    saw["after_corrupt"] = [greedy(llm, one), greedy(llm, two), _held(llm)]
    policy.flip(3)
    saw |= _refused_at_update(llm, policy, third)
    three = _load(llm, policy, third)
    saw["three"] = greedy(llm, three)
    # Three versions take turns in two slots.
    saw["turns"] = [greedy(llm, request) for request in (one, two, three, one)]
    fourth = policy.publish(4)
    saw["full"] = error_of(_load, llm, policy, fourth)
    lora.remove_lora_llm(llm, one)
    saw["refused"] = _refusal(llm, one)
    saw["removed"] = [error_of(lora.remove_lora_llm, llm, one), _held(llm)]
    saw["four"] = greedy(llm, _load(llm, policy, fourth))
    # As vLLM does after every update of the base weights.
    core = llm.llm_engine.engine_core.engine_core.model_executor
    core.driver_worker.worker.model_runner.reset_lora_state()
    saw["after_reset"] = [greedy(llm, two), greedy(llm)]
    saw["carriers"] = {kind: _over(kind, llm, policy) for kind in PACKED}
    return saw


def _over(kind, llm, policy):
    """The first version of an adapter of the carrier's name."""
    from primeblocks.weightsync.adapters.vllm import lora

    where = policy.root / kind
    where.mkdir()
    spec = dataclasses.replace(policy.spec, name=kind)
    policy.draw(1)
    with (
        packed_end(kind, where, owner=True) as transport,
        Publisher(policy.plan, policy.tensors, transport) as publisher,
    ):
        lora.attach_lora_llm(llm, spec, policy.plan, transport)
        sent = publisher.publish(1, timeout_s=TIMEOUT_S)
        request = lora.update_lora_llm(llm, kind, sent, timeout_s=TIMEOUT_S)
        said = greedy(llm, request)
        lora.remove_lora_llm(llm, request)
    return said


def _refusal(llm, request):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as refused:
        greedy(llm, request)
    return str(refused.value)


def _held(llm):
    return len(llm.llm_engine.list_loras())


def _refused_at_update(llm, policy, third):
    from vllm.lora.request import LoRARequest

    from primeblocks.weightsync.adapters.vllm.lora_worker import versioned_request

    other = dataclasses.replace(third, digest="0" * len(third.digest))
    late = dataclasses.replace(third, version=9)
    saw = {
        "digest": error_of(_load, llm, policy, other),
        "never_committed": error_of(_load, llm, policy, late, 0.2),
        "name_taken": error_of(_load, llm, policy, dataclasses.replace(other, version=2), 5.0),
    }
    taken = versioned_request("policy", third.version, third.digest).lora_int_id
    llm.llm_engine.add_lora(LoRARequest("mine", taken, policy.save(7)))
    saw["id_taken"] = error_of(_load, llm, policy, third)
    llm.llm_engine.remove_lora(taken)
    return saw


def _fresh(llm, policy):
    """What a stock engine computes that loads PEFT's folders of versions 1 to 4, and refuses."""
    from vllm.lora.request import LoRARequest

    from primeblocks.weightsync.adapters.vllm import lora

    attach = (lora.attach_lora_llm, llm, policy.spec, policy.plan, policy.transport)
    stock = error_of(*attach)
    config = llm.llm_engine.vllm_config
    llm.llm_engine.vllm_config = dataclasses.replace(config, lora_config=None)
    without = error_of(*attach)
    llm.llm_engine.vllm_config = config
    requests = [LoRARequest(f"disk-{n}", n, policy.save(n)) for n in (1, 2, 3, 4)]
    outputs = [greedy(llm, request) for request in requests]
    return {"base": greedy(llm), "fresh": outputs, "stock": stock, "without": without}


def _peft_logprobs(policy, outputs):
    """What PEFT gives for the same tokens under version 3."""
    policy.draw(3)
    found = []
    for ids, (tokens, _) in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            logits = policy.model(torch.tensor([[*ids, *tokens]])).logits[0]
        rows = torch.log_softmax(logits, -1)[len(ids) - 1 : -1]
        found.append(rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
    return found


# --- versions of adapters --------------------------------------------------------------------


def test_a_synced_adapter_equals_one_loaded_from_its_folder_bit_for_bit(saw):
    assert saw["name"] == "policy@1"
    versions = [saw["one"], saw["two"], saw["three"], saw["four"]]
    assert versions == saw["fresh"]
    assert all(version != saw["base"] for version in versions)
    assert len({json.dumps(version) for version in versions}) == 4


def test_the_same_over_files(saw):
    assert saw["critic"] == saw["fresh"][0]


@pytest.mark.parametrize("kind", PACKED)
def test_the_same_over_every_carrier(saw, kind):
    assert saw["carriers"][kind] == saw["fresh"][0]


def test_peft_computes_the_same(saw):
    if "peft" not in saw:
        pytest.skip("compared in float32 only")
    for (_, ours), theirs in zip(saw["three"], saw["peft"], strict=True):
        assert [float.fromhex(value) for value in ours] == pytest.approx(theirs, abs=1e-5)


def test_versions_live_side_by_side(saw):
    one, two, three, _ = saw["fresh"]
    assert saw["one_again"] == one
    assert saw["mixed"] == [one[0], two[1], one[2]]
    assert saw["turns"] == [one, two, three, one]


def test_adapters_survive_what_vllm_drops_after_an_update_of_the_base(saw):
    assert saw["after_reset"] == [saw["fresh"][1], saw["base"]]


def test_a_flipped_byte_registers_nothing(saw):
    for case in ("corrupt_first", "corrupt"):
        kind, message = saw[case]
        assert kind == "CorruptionError"
        assert "fails its digest" in message
    assert saw["after_corrupt"] == [saw["fresh"][0], saw["fresh"][1], 2]


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("unattached", "TransferError", "Call attach_lora() first"),
        ("group", "UnsupportedError", "Pass another transport"),
        ("rank", "UnsupportedError", "has rank 9, but this engine takes at most 8"),
        ("module", "PlanError", "cannot adapt the module 'lm_head'"),
        ("shape", "ShapeError", "has 64 inputs and 64 outputs, but the adapter has 63 and 64"),
        ("digest", "TransferError", "Use the receipt of the last publish"),
        ("never_committed", "DeadlineError", "version 9 was not committed"),
        ("name_taken", "UsageError", "'policy@2' is already loaded with other bytes"),
        ("id_taken", "UsageError", "which another adapter has"),
        ("full", "CapacityError", "3 versions of 'policy' are loaded, and keep=3"),
        ("stock", "EngineError", "not a WorkerExtension"),
        ("without", "UnsupportedError", "built without enable_lora"),
    ],
)
def test_refusals(saw, case, kind, message):
    assert saw[case][0] == kind
    assert message in saw[case][1]


def test_a_removed_version_is_gone(saw):
    (kind, message), registered = saw["removed"]
    assert kind == "UsageError"
    loaded = "The loaded versions are ['critic@1', 'policy@2', 'policy@3']."
    assert message.startswith(f"this version is not loaded. {loaded}")
    assert registered == 1  # Two of the three left were evicted: vLLM keeps two.
    assert "does not hold 'policy@1'" in saw["refused"]


# --- new weights under them ------------------------------------------------------------------


def test_base_and_adapter_equal_a_fresh_engine_bit_for_bit(saw):
    under, fresh = saw["under"], [saw["base"], saw["fresh"][0]]
    assert under["wrapped"] >= 2 * 4, "LoRA wraps nothing here, so the test shows nothing"
    assert under["error"] == under["error_again"] == ("", "")
    assert under["updated"] == under["again"] == fresh
    assert saw["two"] == saw["fresh"][1]
    outputs = [*under["start"], *fresh, saw["fresh"][1]]
    assert len({json.dumps(each) for each in outputs}) == len(outputs)


def test_and_back(saw):
    assert saw["under"]["error_back"] == ("", "")
    assert saw["under"]["back"] == saw["under"]["start"]


def test_a_flipped_byte_leaves_both_as_they_were(saw):
    kind, message = saw["under"]["corrupt"]
    assert kind == "CorruptionError"
    assert "fails its digest" in message
    assert saw["under"]["after_corrupt"] == saw["under"]["start"]


def test_a_parameter_without_new_values_is_noticed_under_its_own_name(saw):
    kind, message = saw["under"]["partial"]
    assert kind == "TransferError"
    assert "1 parameters would keep their old values" in message
    assert "base_layer" not in message
    assert saw["under"]["after_partial"] == saw["under"]["updated"]
