"""Codes and scales into a real vLLM whose weights are FP8: what a fresh engine says, bit for bit.

vLLM 0.32 has FP8 in blocks on a CPU with AMX alone.
"""

import gc
import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from primeblocks import fp8
from primeblocks.plugins.vllm import register
from primeblocks.testing import tiny_models
from primeblocks.weightsync import Publisher, SharedMemoryTransport, describe, plan_sync
from primeblocks.weightsync.adapters import vllm as adapter
from primeblocks.weightsync.marker import Receipt
from primeblocks.weightsync.transports import FileTransport, GroupTransport
from tests.engine_job import call
from tests.weightsync.contents import PACKED, packed_end, store_at
from tests.weightsync.vllm_site import ENGINE, TIMEOUT_S, error_of, greedy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's FP8 needs AMX"),
]

CARRIERS = ("shared_memory", "file", *PACKED, "group")
RULE = r"mlp\.(gate|up|down)_proj"
SIZES = {"num_layers": 2, "hidden": 128}
QUANTIZED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [
        f"model.layers.{layer}.self_attn.{each}_proj" for layer in (0, 1) for each in "qkvo"
    ],
}


@pytest.fixture(scope="module")
def saw(tmp_path_factory):
    return call(_see, tmp_path_factory.mktemp("fp8"))


def _build(seed):
    return tiny_models.build("qwen3", seed=seed, dtype="bfloat16", **SIZES)


def _checkpoint(path, seed):
    """As a quantizer of checkpoints would write it."""
    tiny_models.save("qwen3", path, seed=seed, dtype="bfloat16", **SIZES)
    tensors = {}
    for name, tensor in _build(seed).state_dict().items():
        tensors[name] = tensor.contiguous()
        if any(f"mlp.{each}_proj" in name for each in ("gate", "up", "down")):
            made = fp8.quantize(tensor, fp8.Recipe().weights)
            tensors |= {name: made.codes, f"{name}_scale_inv": made.scales}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    return str(path)


def _see(folder):
    import vllm

    def start(path):
        return vllm.LLM(path, dtype="bfloat16", **ENGINE, **adapter.engine_args())

    register()
    model, paths = _build(0), [_checkpoint(folder / str(seed), seed) for seed in (0, 1)]
    held = describe(model)
    encode = fp8.encode_weights(
        fp8.Recipe(), only=RULE, layouts={name: spec.layout for name, spec in held.items()}
    )
    encoded = encode.describe(held)
    plan = plan_sync([encoded], encoded.whole(), bucket_bytes=1 << 16)
    llm = start(paths[0])
    saw = {"start": greedy(llm), "syncs": {}}
    for kind in CARRIERS:
        where = folder / kind
        where.mkdir()
        with _transport(kind, where) as transport:
            adapter.attach_llm(llm, plan, transport)
            with Publisher(plan, model, transport, encode=encode, full_every=4) as publisher:
                saw["syncs"][kind] = list(_updates(llm, model, publisher))
    del llm
    gc.collect()
    fresh = start(paths[1])
    saw["fresh"] = greedy(fresh)
    return saw


def _transport(kind, where):
    if kind == "shared_memory":
        return SharedMemoryTransport("fp8", owner=True, root=str(where))
    if kind == "file":
        return FileTransport(where, owner=True)
    if kind == "group":
        return GroupTransport(store=store_at(where), trainers=1, readers=1, rank=0, keep=True)
    return packed_end(kind, where, owner=True, keep=True)


def _updates(llm, model, publisher):
    with ThreadPoolExecutor(1) as pool:
        for version, seed in ((1, 1), (2, 0), (3, 1)):
            with torch.no_grad():
                for mine, new in zip(model.parameters(), _build(seed).parameters(), strict=True):
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
