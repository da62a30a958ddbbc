"""A model in parts, saved and loaded: whole as by transformers, and in parts for other ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from primeblocks.errors import PlanError, RankError, UnsupportedError
from primeblocks.parallel import plan_mesh
from primeblocks.parallel.experts import add_expert_lora
from primeblocks.testing import ranks, tiny_models

ROWS, SIZES = 12, {"num_experts": 12, "hidden": 64, "vocab": 32, "num_layers": 2}


def _model(family, *, seed=0, tied=False, device="cpu"):
    """Parameters and what a checkpoint leaves out, made on `device`."""
    config = tiny_models.config(family, **SIZES)
    config.tie_word_embeddings = tied
    torch.manual_seed(seed)
    with torch.device(device):
        kind = tiny_models._model_class(family)
        return kind.from_config(config, dtype=torch.float32).train()


def _meshes(degrees):
    return plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")


def _step(model, optimizer):
    """One step on this rank's share of the same rows, however many ranks there are."""
    rows = torch.randint(32, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    ids = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    (-logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum() / (ROWS * 5)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _wholes(model):
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def _start(family, degrees, *, device="cpu", **more):
    from primeblocks.parallel.adapters.transformers import parallelize

    model = _model(family, device=device, **more)
    parallelize(model, _meshes(degrees))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _save_parts(family, degrees, path):
    """Weights when they were saved, and one step later."""
    model, optimizer = _start(family, degrees)
    _step(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
    saved = _wholes(model)
    _step(model, optimizer)
    return saved, _wholes(model)


def _resume(family, degrees, path):
    model, optimizer = _start(family, degrees, device="meta")
    assert all(p.to_local().isnan().all() for p in model.parameters())  # Nothing to mistake.
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    loaded = _wholes(model)
    _step(model, optimizer)
    return loaded, _wholes(model)


# A family whose experts have biases too; one rank has no expert degree, three share twelve.
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_run_resumes_on_other_ranks(family, tmp_path):
    saved, after = ranks.run(_save_parts, family, {"expert": 2}, tmp_path, world_size=4)[0]
    for world_size, degrees in [
        (1, {}),
        (2, {"expert": 2}),
        (3, {"expert": 3}),
        (4, {"expert": 4}),
    ]:
        loaded, stepped = ranks.run(_resume, family, degrees, tmp_path, world_size=world_size)[0]
        for name, weight in saved.items():
            assert torch.equal(loaded[name], weight), (world_size, name)
            # Moments came along: Adam divides by them, so that an error is a step of the rate.
            torch.testing.assert_close(stepped[name], after[name], rtol=0, atol=1e-2 * 1e-2)


def _save_whole(family, degrees, tied, path):
    """Write the model before it is in parts and after; read it into one that held nothing."""
    from primeblocks.parallel.adapters.transformers import load_pretrained, save_pretrained

    warnings.simplefilter("error")
    if dist.get_rank() == 0:
        _model(family, tied=tied).save_pretrained(path / "one")
    model, reference = _start(family, degrees, tied=tied)
    save_pretrained(model, path / "parts")
    dist.barrier()
    empty, optimizer = _start(family, degrees, tied=tied, device="meta")
    load_pretrained(empty, path / "parts")
    ids = torch.arange(12).view(2, 6)
    got, want = (m(input_ids=ids, use_cache=False).logits for m in (empty, model))
    assert torch.equal(got, want)  # Frequencies, too, which no checkpoint holds.
    load_pretrained(empty, path / "one")  # After a forward, when parts of it are whole.
    for stepped in (False, True):
        assert all(torch.equal(a, b) for a, b in zip(*map(_local, (empty, model)), strict=True))
        if not stepped:
            _step(model, reference)
            _step(empty, optimizer)
    return type(model).__name__


def _local(model):
    return [x.to_local() if isinstance(x, DTensor) else x for x in model.state_dict().values()]


@pytest.mark.parametrize(
    ("family", "degrees", "tied"),
    [
        ("qwen3_moe", {"expert": 2}, True),
        ("nemotron_h", {"expert": 4}, False),
        ("qwen3_vl_moe", {"expert": 2, "replicate": 2}, False),
    ],
)
def test_the_whole_is_written_as_from_one_rank(family, degrees, tied, tmp_path):
    names = ranks.run(_save_whole, family, degrees, tied, tmp_path, world_size=4)
    assert all(name.startswith("FSDP") for name in names)  # As it was before.
    one, parts = (load_file(tmp_path / kind / "model.safetensors") for kind in ("one", "parts"))
    assert one.keys() == parts.keys()
    assert all(torch.equal(one[name], parts[name]) for name in one)
    one, parts = ((tmp_path / kind / "config.json").read_text() for kind in ("one", "parts"))
    assert one == parts


def _refusals(path):
    from primeblocks.parallel.adapters.transformers import (
        load_pretrained,
        parallelize,
        save_pretrained,
    )

    first, meshes = dist.get_rank() == 0, _meshes({})
    if first:
        _model("llama").save_pretrained(path / "llama")
        _model("qwen3_moe").save_pretrained(path / "cut")
        weights = path / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    model, _ = _start("qwen3_moe", {})
    for wrong, said in [
        ("nowhere", "cannot be read as a Qwen3MoeFor"),
        ("cut", "cannot be read as a Qwen3MoeFor"),
        ("llama", "is missing"),
    ]:
        with pytest.raises(PlanError if first else RankError, match=said):
            load_pretrained(model, path / wrong)
    adapted = _model("qwen3_moe")
    add_expert_lora(adapted, rank=2, alpha=4)
    parallelize(adapted, meshes)
    for use in (save_pretrained, load_pretrained):
        with pytest.raises(UnsupportedError, match="has adapters .*lora_A.*merged_expert_weights"):
            use(adapted, path / "adapted")
    half = _model("qwen3_moe", device="meta")
    half.lm_head.to_empty(device="cpu")
    with pytest.raises(PlanError, match="24 of 25 parameters are on the meta device"):
        parallelize(half, meshes)


def test_what_is_no_checkpoint_of_the_model_is_refused(tmp_path):
    ranks.run(_refusals, tmp_path)


@pytest.mark.parametrize("family", sorted((*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES)))
def test_the_meta_device_loses_no_buffer(family):
    from primeblocks.parallel.adapters.transformers.checkpoint import materialize

    config = tiny_models.config(family, **SIZES | {"num_layers": 4})
    one = tiny_models._model_class(family).from_config(config)
    with torch.device("meta"):
        bare = tiny_models._model_class(family).from_config(config)
    materialize(bare, "cpu")
    assert all(parameter.isnan().all() for parameter in bare.parameters())
    kept = one.state_dict().keys()
    for (name, got), (same, want) in zip(bare.named_buffers(), one.named_buffers(), strict=True):
        assert name == same
        assert name in kept or torch.equal(got, want), name
