import sys
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from primeblocks.errors import MissingPackageError, UsageError
from primeblocks.testing import tiny_models

ALL_ROUTE = (
    *("flex_olmo", "gpt_oss", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen2_moe"),
    *("qwen3_5_moe", "qwen3_moe", "qwen3_next", "solar_open"),
)
SMALL = {"num_layers": 2, "hidden": 64, "vocab": 64}


EXPERTS = {"num_experts": 6, "top_k": 3}


@cache
def _built(family):
    return tiny_models.build(family, **SMALL, **EXPERTS)


def _bytes(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, "qwen3_vl_moe"])
def test_a_checkpoint_loads_as_what_build_returns(family, tmp_path):
    path = tiny_models.save(family, tmp_path / "model", **SMALL, **EXPERTS)
    kind = AutoModelForImageTextToText if family == "qwen3_vl_moe" else AutoModelForCausalLM
    loaded = kind.from_pretrained(path)
    built = _built(family)
    assert loaded.dtype == built.dtype == torch.bfloat16
    ours, theirs = built.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    tokens = torch.tensor([[5, 6, 7, 8]])
    assert loaded(tokens).logits.isfinite().all()


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h"])
def test_equal_arguments_give_equal_bytes(family, tmp_path):
    first = _bytes(tiny_models.save(family, tmp_path / "first", seed=3, **SMALL))
    second = _bytes(tiny_models.save(family, tmp_path / "second", seed=3, **SMALL))
    other = _bytes(tiny_models.save(family, tmp_path / "other", seed=4, **SMALL))
    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_sizes_are_what_was_asked_for(family):
    model = _built(family)
    routers = tiny_models._router_weights(model)
    dense_layers = 0 if family in ALL_ROUTE else 1
    assert [tuple(router.shape) for router in routers] == [(6, 64)] * (2 - dense_layers)
    assert model.config.num_experts_per_tok == 3
    assert model.lm_head.weight.shape == (64, 64)


def test_spreads_are_what_was_asked_for():
    model = tiny_models.build("qwen3_moe", init_std=0.06, router_std=0.3, dtype="float32")
    assert model.lm_head.weight.dtype == torch.float32
    router = torch.cat([weight.flatten() for weight in tiny_models._router_weights(model)])
    assert router.std().item() == pytest.approx(0.3, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.06, rel=0.02)


def test_the_random_state_of_the_caller_is_kept():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tiny_models.build("qwen3_moe", seed=1, **SMALL)
    assert torch.equal(torch.rand(3), expected)


def test_the_tokenizer_goes_there_and_back(tmp_path):
    path = tiny_models.save("qwen3_moe", tmp_path, **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("w4 w63 w9").input_ids == [4, 63, 9]
    assert tokenizer("nonsense").input_ids == [3]
    assert tokenizer.decode([4, 63, 9]) == "w4 w63 w9"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([4, 2], skip_special_tokens=True) == "w4"


def test_what_cannot_be_built_is_refused():
    with pytest.raises(UsageError, match="'gpt2'"):
        tiny_models.config("gpt2")
    with pytest.raises(UsageError, match="hidden=100"):
        tiny_models.config("olmoe", hidden=100)
    with pytest.raises(UsageError, match="'float12'"):
        tiny_models.build("olmoe", dtype="float12", **SMALL)


def test_without_transformers_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[transformers\]'"):
        tiny_models.config("olmoe")
