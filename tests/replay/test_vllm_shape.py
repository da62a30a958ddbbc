"""What `RouterShape` reads from a configuration, against the routers of the model it builds."""

import json
import re

import pytest

from primeblocks.errors import UnsupportedError, UsageError
from primeblocks.replay.adapters.transformers import routers
from primeblocks.replay.adapters.vllm import RouterShape
from tests.replay.test_transformers_routers import FAMILIES, build


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_tells_what_the_model_has(family):
    model = build(family)
    if family == "solar_open":  # The tiny model is given what its family does not have.
        del model.config.first_k_dense_replace
    found = routers(model)
    expected = RouterShape(
        num_layers=3,
        moe_layers=tuple(router.layer_id for router in found),
        num_experts=found[0].num_experts,
        top_k=found[0].top_k,
    )
    assert RouterShape.from_config(model.config) == expected
    assert RouterShape.from_config(json.loads(model.config.to_json_string())) == expected


SIZES = {"num_hidden_layers": 6, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("published", "moe_layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ({"num_dense_layers": 5}, (5,)),
        ({"interleave_moe_layer_step": 2}, (1, 3, 5)),  # Llama 4 Maverick
        ({"moe_layers": [2, 5], "interleave_moe_layer_step": 1}, (2, 5)),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),  # Jamba
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"hybrid_override_pattern": "MEM*E"}, (1, 4)),
        ({"mlp_layer_types": ["dense"] * 5 + ["sparse"]}, (5,)),
    ],
    ids=str,
)
def test_the_ways_in_which_layers_are_told(published, moe_layers):
    shape = RouterShape.from_config(SIZES | published)
    assert shape.moe_layers == moe_layers
    for name in ("text_config", "thinker_config"):
        assert RouterShape.from_config({name: SIZES | published}) == shape
    assert RouterShape.from_config({"thinker_config": {"text_config": SIZES | published}}) == shape


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("num_hidden_layers", "['num_hidden_layers']"),
        ("num_experts", "['num_experts', 'num_local_experts', 'n_routed_experts']"),
        ("num_experts_per_tok", "['num_experts_per_tok', 'num_experts_per_token']"),
    ],
)
def test_what_is_missing_is_named(name, named):
    for empty in ({}, {name: None}):
        config = {key: value for key, value in SIZES.items() if key != name} | empty
        with pytest.raises(UnsupportedError, match=re.escape(f"'tiny' has none of {named}")):
            RouterShape.from_config(config | {"model_type": "tiny"})


def test_a_model_without_experts_is_refused():
    with pytest.raises(UsageError, match="moe_layers must be ascending"):
        RouterShape.from_config(SIZES | {"mlp_layer_types": ["dense"] * 6})


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"num_hidden_layers": True}, "none of ['num_hidden_layers']"),
        ({"num_experts_per_tok": True}, "none of ['num_experts_per_tok'"),
        ({"num_hidden_layers": 10**9}, "num_layers must be at most 65536"),
        ({"num_experts": 10**5000}, "num_experts must be a whole number below 2**63"),
        ({"num_experts": -1}, "num_experts must be at least 1; got -1"),
        ({"first_k_dense_replace": "1"}, "first_k_dense_replace in the configuration is '1'"),
        ({"decoder_sparse_step": 2.0}, "decoder_sparse_step in the configuration is 2.0"),
        ({"expert_layer_offset": [1]}, "expert_layer_offset in the configuration is [1]"),
        ({"moe_layer_freq": {"a": 1}}, "moe_layer_freq in the configuration is {'a': 1}"),
        ({"mlp_only_layers": 3}, "mlp_only_layers in the configuration is 3"),
        ({"moe_layers": "1,2"}, "moe_layers in the configuration is '1,2'"),
        ({"text_config": "qwen3"}, "text_config must be of transformers, or a dict; got 'qwen3'"),
    ],
)
def test_forms_that_are_not_read_are_refused_by_name(odd, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        RouterShape.from_config(SIZES | odd)


@pytest.mark.parametrize("odd", [None, "Qwen/Qwen3-30B-A3B", 3, [SIZES]])
def test_what_is_no_configuration_is_refused(odd):
    with pytest.raises(UsageError, match="a configuration must be of transformers, or a dict"):
        RouterShape.from_config(odd)
