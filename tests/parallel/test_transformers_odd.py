"""Checkpoints that are odd: refused on all ranks, or read as their index says."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from primeblocks.errors import PlanError, RankError
from primeblocks.layout import local_part
from primeblocks.testing import ranks
from tests.parallel.test_transformers_checkpoint import _fill, _model, _start


def _odd(path):
    """Folders that transformers raises all kinds of errors for, and some that it reads."""
    from primeblocks.parallel.adapters.transformers import load_pretrained

    error, model = (
        RankError if dist.get_rank() else PlanError,
        _start("qwen3_moe", {"expert": 2})[0],
    )
    if dist.get_rank() == 0:
        _write_odd(path)
    dist.barrier()
    for folder, said in [
        ("a list", "AttributeError"),
        ("no words", "AttributeError"),
        ("names", "AttributeError"),
        ("above", "outside of the folder: '../one"),
        ("absolute", "outside of the folder: '/"),
        ("an empty expert", "cannot be read as a Qwen3MoeForCausalLM"),
        ("a deep expert", "cannot be read as a Qwen3MoeForCausalLM"),
    ]:
        with pytest.raises(error, match=said):
            load_pretrained(model, path / folder)
    want = {name: x.clone() for name, x in model.state_dict().items()}
    _fill(model, 0)
    load_pretrained(model, path / "twice")
    assert all(
        torch.equal(local_part(x), local_part(want[n])) for n, x in model.state_dict().items()
    )


def _write_odd(path):
    """Each is the model of seed 0 with one oddity."""
    expert, index = "model.layers.0.mlp.experts.1.up_proj.weight", "model.safetensors.index.json"
    _model("qwen3_moe").save_pretrained(path / "one")
    _model("qwen3_moe").save_pretrained(path / "several", max_shard_size="100KB")
    for name, base in {
        **dict.fromkeys(("a list", "no words", "an empty expert", "a deep expert"), "one"),
        **dict.fromkeys(("names", "above", "absolute", "twice"), "several"),
    }.items():
        shutil.copytree(path / base, path / name)
    (path / "a list" / "config.json").write_text("[]")
    config = json.loads((path / "one" / "config.json").read_text())
    config["quantization_config"] = "fp8"
    (path / "no words" / "config.json").write_text(json.dumps(config))
    told = json.loads((path / "several" / index).read_text())
    for name, where in {
        "names": ["a.safetensors"],
        "above": told["weight_map"] | {expert: "../one/model.safetensors"},
        "absolute": told["weight_map"] | {expert: str(path / "one" / "model.safetensors")},
    }.items():
        (path / name / index).write_text(json.dumps(told | {"weight_map": where}))
    tensors = load_file(path / "one" / "model.safetensors")
    for name, odd in {"an empty": tensors[expert][:0], "a deep": tensors[expert][None]}.items():
        file = path / f"{name} expert" / "model.safetensors"
        save_file(tensors | {expert: odd.contiguous()}, file, {"format": "pt"})
    last = path / "twice" / max(told["weight_map"].values())  # Where the index does not say.
    twice = min(told["weight_map"], key=told["weight_map"].get)
    save_file(load_file(last) | {twice: torch.ones_like(tensors[twice])}, last, {"format": "pt"})


def test_odd_checkpoints_are_refused_or_read_as_their_index_says(tmp_path):
    ranks.run(_odd, tmp_path)
