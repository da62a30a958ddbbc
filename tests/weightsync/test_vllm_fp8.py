"""Updates of a real vLLM that computes in FP8. It answers as a fresh engine does, bit for bit.

The trainer sends codes and scales, or vLLM quantizes the weights that it loads. FP8 in blocks
needs a CPU with AMX in vLLM 0.32. FP8 with a scale per output channel runs on all CPUs.
"""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from primeblocks import fp8
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.marker import Receipt
from tests.engine_job import call
from tests.weightsync.vllm_site import (
    CARRIERS,
    ENGINE,
    SIZES,
    TIMEOUT_S,
    Trainer,
    error_of,
    greedy,
    needs,
    trainer_end,
)

pytestmark = needs("vllm")

RULE = r"mlp\.(gate|up|down)_proj"
QUANTIZED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        f"model.layers.{layer}.self_attn.{each}_proj" for layer in (0, 1) for each in "qkvo"
    ],
}


@pytest.fixture(scope="module", params=[1, 2])
def saw(request, tmp_path_factory):
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's FP8 in blocks needs AMX")
    if request.param != 1 and not request.config.getoption("--full"):
        pytest.skip("two engines of two workers more: --full")
    return call(_see, tmp_path_factory.mktemp("fp8"), request.param)


def _sizes(workers):
    return {"dtype": "bfloat16", "num_layers": 2, "hidden": 128 * workers}


def _checkpoint(path, seed, sizes):
    """As a quantizer of checkpoints would write it."""
    tiny_models.save("qwen3", path, seed=seed, **sizes)
    tensors = {}
    for name, tensor in tiny_models.build("qwen3", seed=seed, **sizes).state_dict().items():
        tensors[name] = tensor.contiguous()
        if any(f"mlp.{each}_proj" in name for each in ("gate", "up", "down")):
            made = fp8.quantize(tensor, fp8.Recipe().weights)
            tensors |= {name: made.codes, f"{name}_scale_inv": made.scales}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    return str(path)


def _see(folder, workers):
    import vllm

    def start(path):
        parallel = {"tensor_parallel_size": workers}
        return vllm.LLM(path, dtype="bfloat16", **parallel, **ENGINE, **adapter.engine_args())

    register()
    sizes = _sizes(workers)
    build = partial(tiny_models.build, "qwen3", **sizes)
    model, paths = build(seed=0), [_checkpoint(folder / str(s), s, sizes) for s in (0, 1)]
    held = describe(model)
    encode = fp8.encode_weights(
        fp8.Recipe(), only=RULE, layouts={name: spec.layout for name, spec in held.items()}
    )
    encoded = encode.describe(held)
    llm = start(paths[0])
    target = encoded.whole() if workers == 1 else adapter.describe_llm(llm, encoded.whole())
    plan = plan_sync([encoded], target, bucket_bytes=1 << 16)
    saw = {"start": greedy(llm), "syncs": {}}
    read = max(plan.read_bytes(reader) for reader in range(workers))
    saw["shard"] = read * workers / plan_sync([encoded], encoded.whole()).bytes_total
    for kind in CARRIERS:
        with trainer_end(kind, folder / kind, readers=workers) as transport:
            adapter.attach_llm(llm, plan, transport)
            with Publisher(plan, model, transport, encode=encode, full_every=4) as publisher:
                saw["syncs"][kind] = list(_updates(llm, model, build, publisher))
    del llm
    gc.collect()
    fresh = start(paths[1])
    saw["fresh"] = greedy(fresh)
    return saw


def _updates(llm, model, build, publisher):
    with ThreadPoolExecutor(1) as pool:
        for version, seed in ((1, 1), (2, 0), (3, 1)):
            with torch.no_grad():
                for mine, new in zip(
                    model.parameters(), build(seed=seed).parameters(), strict=True
                ):
                    mine.copy_(new)
            sent = pool.submit(publisher.publish, version, timeout_s=TIMEOUT_S)
            coming = Receipt(version, 0, 0.0, "")
            told = error_of(adapter.update_llm, llm, coming, timeout_s=TIMEOUT_S)
            yield told, greedy(llm), sent.result().bytes


@pytest.mark.parametrize("kind", CARRIERS)
def test_codes_and_scales_are_served_as_by_a_fresh_engine(saw, kind):
    errors, said, _ = zip(*saw["syncs"][kind], strict=True)
    assert errors == (("", ""),) * 3
    assert list(said) == [saw["fresh"], saw["start"], saw["fresh"]]
    assert saw["fresh"] != saw["start"]
    assert saw["shard"] <= 1.05  # Of a worker's even share of all bytes.


def test_weights_that_vllm_quantizes_are_served_as_by_a_fresh_engine(tmp_path):
    errors, said, fresh = call(_quantized_by_vllm, tmp_path)
    assert errors == [("", "")] * 2
    assert said == [fresh[0], fresh[1], fresh[0]]
    assert fresh[0] != fresh[1]


def _quantized_by_vllm(folder):
    """Errors of updates to seeds 1 and 0; what is said before and after each; and by fresh ones."""
    import vllm

    def start(seed):
        path = folder / f"from-{seed}"
        tiny_models.save("qwen3", path, seed=seed, dtype="bfloat16", **SIZES)
        options = {**ENGINE, **adapter.engine_args(), "quantization": "fp8_per_channel"}
        return vllm.LLM(str(path), dtype="bfloat16", **options)

    register()
    trainer, llm = Trainer("bfloat16", folder, "qwen3"), start(0)
    adapter.attach_llm(llm, trainer.plan, trainer.transport)
    errors, said = [], [greedy(llm)]
    for version, seed in ((1, 1), (2, 0)):
        receipt = trainer.publish(version, seed=seed)
        errors.append(error_of(adapter.update_llm, llm, receipt, timeout_s=TIMEOUT_S))
        said.append(greedy(llm))
    del llm
    gc.collect()
    trainer.transport.close()
    return errors, said, [said[0], greedy(start(1))]
