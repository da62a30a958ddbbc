import multiprocessing
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.testing import ranks, tiny_models
from primeblocks.weightsync import describe
from primeblocks.weightsync.adapters.transformers import to_checkpoint
from primeblocks.weightsync.convert.families import VLLM, checkpoint_to_vllm
from primeblocks.weightsync.convert.pieces import merge
from primeblocks.weightsync.manifest import gather_manifests, named_tensors
from tests.engine_job import call

pytest.importorskip("transformers")

# The vocabulary is one that vLLM pads.
SIZES = {"num_layers": 4, "hidden": 64, "num_experts": 3, "top_k": 1, "vocab": 72}
TIMEOUT_S = 150.0
# One for each table with experts; the other families share theirs.
ENGINES = ("glm4_moe", "mixtral", "gpt_oss", "deepseek_v3")
TINY = (*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES)


def assert_same(got, wanted):
    assert set(got) == set(wanted)
    different = [
        name
        for name, tensor in wanted.items()
        if got[name].dtype != tensor.dtype or not torch.equal(got[name], tensor)
    ]
    assert not different


def test_every_table_has_a_tiny_model():
    assert set(VLLM) <= set(TINY)


@pytest.mark.parametrize("family", TINY)
def test_the_wiring_makes_what_save_pretrained_writes_and_undoes_it(family, tmp_path):
    model = tiny_models.build(family, **SIZES)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    module = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    wiring = to_checkpoint(model)
    assert_same(wiring.move(module), saved)
    assert_same(wiring.inverse().move(saved), module)
    assert wiring.inverse().targets == describe(module)


def _shards(folder):
    """Write the checkpoint of a model whose class FSDP2 changed, from its gathered tensors."""
    model = tiny_models.build("mixtral", **SIZES)
    whole = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    for part in (model.model, model):
        fully_shard(part)
    wiring = to_checkpoint(model, *gather_manifests(describe(model)))
    dist.barrier()
    assert_same(wiring.move(whole), load_file(folder / "model.safetensors"))


def test_a_sharded_model_has_the_checkpoint_of_the_whole_one(tmp_path):
    ranks.run(_shards, tmp_path, world_size=2)


@pytest.mark.parametrize(
    ("transform", "match"),
    [
        (lambda of: of.WeightConverter("q_proj", "q_proj", [of.Interleave(0)]), "computes '.*q_p"),
        (lambda of: of.WeightRenaming("q_proj", "k_proj"), "has .* elements of .*Conversion"),
    ],
)
def test_what_is_computed_or_lost_is_refused(transform, match, monkeypatch):
    from transformers import conversion_mapping, core_model_loading

    model = tiny_models.build("qwen3", **SIZES)
    known = {"Qwen3ForCausalLM": [transform(core_model_loading)]}
    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", known.get)
    with pytest.raises(UnsupportedError, match=match):
        to_checkpoint(model)


@pytest.mark.parametrize("family", VLLM)
def test_from_the_module_to_vllm_experts_stay_in_one_piece(family):
    first = to_checkpoint(tiny_models.build(family, **SIZES))
    last = checkpoint_to_vllm(family).bind(first.targets)
    assert not last.dropped
    assert set(last.unfilled) <= {
        "model.embed_tokens.weight",
        "model.embedding.weight",
        "lm_head.weight",
    }
    fused = {"qkv_proj": 3, "fused_qkv_a_proj": 2, "gate_up_proj": 2}
    for name, fillers in last.by_target.items():
        joined = [before.then(it) for it in fillers for before in first.by_target[it.source]]
        pieces = merge([piece for piece in joined if piece is not None])
        assert len(pieces) == fused.get(name.split(".")[-2], 1)


def test_a_family_without_a_table_is_refused():
    with pytest.raises(UnsupportedError, match="no table for 'gpt2' in vLLM; there are .*olmoe"):
        checkpoint_to_vllm("gpt2")


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize(("ranks", "kv_copies"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("family", ENGINES)
def test_ranks_share_a_checkpoint(family, ranks, kv_copies, whole_experts):
    sizes = SIZES | {"num_layers": 2, "hidden": 128, "num_experts": 4}
    checkpoint = to_checkpoint(tiny_models.build(family, **sizes)).targets
    takers = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in checkpoint.items()}
    shapes = []
    for rank in range(ranks):
        wiring = checkpoint_to_vllm(
            family, rank=rank, ranks=ranks, kv_copies=kv_copies, whole_experts=whole_experts
        ).bind(checkpoint)
        shapes.append({name: spec.shape for name, spec in wiring.targets.items()})
        for piece in wiring.pieces:
            takers[piece.source][piece.source_box.slices] += 1
    assert shapes == shapes[:1] * ranks
    for name, shape in shapes[0].items():
        if "routed_experts" in name:
            assert shape[0] == (4 // ranks if whole_experts else 4)
        if name.endswith("w2_weight"):
            assert shapes[0][name.replace("w2", "w13")][1] == 2 * shape[2]
    counts = {name: taken.unique().tolist() for name, taken in takers.items()}
    for name, count in counts.items():
        if re.search(
            r"\.(q|q_b|kv_b|up|gate)_proj|(o|down)_proj.weight|embed|lm_head|\.w[123]\.", name
        ):
            assert count == [1], name
        elif re.search(r"\.[kv]_proj", name):
            assert count == [kv_copies], name
        elif re.search(r"norm|_a_proj|\.gate\.|router|o_proj.bias", name):
            assert count == [ranks], name
        else:
            assert count in ([1], [ranks]), name


def test_ranks_that_make_no_sense_are_refused():
    with pytest.raises(PlanError, match="got rank=2, ranks=2, kv_copies=1"):
        checkpoint_to_vllm("olmoe", rank=2, ranks=2)
    with pytest.raises(PlanError, match="got rank=0, ranks=4, kv_copies=3"):
        checkpoint_to_vllm("olmoe", ranks=4, kv_copies=3)


def load_as_vllm(folder, ranks, what):
    # Four heads on two, a vocabulary that is padded.
    sizes = SIZES | {"num_layers": 2, "hidden": 128, "num_experts": 4}
    for family in what:
        tiny_models.save(family, folder / family, **sizes)
    call(_load_on_ranks, folder, ranks, what)
    for family, kind in what.items():
        for rank in range(ranks):
            assert_like_engine(folder, family, kind, rank, ranks)


def _load_on_ranks(folder, ranks, what):
    for family, kind in what.items():
        with multiprocessing.get_context("fork").Pool(ranks) as pool:
            tasks = [(folder, family, kind, rank, ranks) for rank in range(ranks)]
            pool.starmap_async(_load, tasks, chunksize=1).get(TIMEOUT_S)
        for left in Path("/dev/shm").glob(f"{family}-{os.getpid()}-*"):  # by vLLM
            left.unlink()


def _load(folder, family, kind, rank, ranks):
    """Save the parameters of vLLM's own model as its loader leaves them, not packed for kernels.

    `kind` is "tensors", or "experts" for ranks that have some experts in whole.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    config = EngineArgs(
        str(folder / family),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        enable_expert_parallel=kind == "experts",
    ).create_engine_config()
    os.environ["VLLM_DIST_IDENT"] = f"{family}-{os.getppid()}"  # of memory that ranks share
    meet = f"file://{folder / family}.{kind}.{ranks}"
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_worker_distributed_environment(config, rank, meet, rank, "gloo")
        model = initialize_model(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    loaded = {name: each.detach() for name, each in model.named_parameters()}
    save_file(loaded, folder / f"{family}-{kind}-{rank}.safetensors")


def assert_like_engine(folder, family, kind, rank, ranks):
    checkpoint = load_file(folder / family / "model.safetensors")
    engine = load_file(folder / f"{family}-{kind}-{rank}.safetensors")
    table = checkpoint_to_vllm(family, rank=rank, ranks=ranks, whole_experts=kind == "experts")
    wiring = table.bind(describe(checkpoint))
    got = wiring.move(checkpoint)
    assert set(got) == set(engine)
    # Some routers are kept in float32.
    assert_same({name: tensor.to(engine[name].dtype) for name, tensor in got.items()}, engine)
    fill = None if ranks == 1 else checkpoint
    assert_same(wiring.inverse().move(got, fill=fill), checkpoint)


@pytest.mark.vllm
def test_vllm_loads_what_the_tables_say(tmp_path, full):
    load_as_vllm(tmp_path, 1, dict.fromkeys(ENGINES if full else ENGINES[:1], "tensors"))
    if full:
        load_as_vllm(tmp_path, 2, {"glm4_moe": "tensors", "gpt_oss": "experts"})
