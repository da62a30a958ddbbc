"""Conversion of real models, alone, under FSDP2 and with experts dealt out."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, JambaConfig

from primeblocks.errors import UnsupportedError, UsageError
from primeblocks.fp8 import Fp8Linear, Recipe, Tile, convert, encode_weights
from primeblocks.fp8.adapters import transformers
from primeblocks.testing import ranks, tiny_models

RECIPE = Recipe(activations=Tile(1, 32), weights=Tile(16, 32), source="float32", wgrad="float32")
ONLY = r"self_attn\.[qkvo]_proj"
TOKENS = torch.arange(4, 24).reshape(2, 10)


def model():
    return tiny_models.build("qwen3_moe", dtype=torch.float32, num_layers=2, hidden=64)


EXPERTS = r"self_attn\.[qkvo]_proj|mlp\.experts"


def logits_after_a_step(net):
    """What a weight rounded before the step and kept would get wrong."""
    optimizer = torch.optim.SGD(net.parameters(), lr=3.0)
    optimizer.step()
    with torch.no_grad():
        return net(input_ids=TOKENS, use_cache=False).logits


def logits_and_gradient(net):
    logits = net(input_ids=TOKENS, use_cache=False).logits
    logits.square().mean().backward()
    grad = net.model.layers[0].self_attn.q_proj.weight.grad
    return logits.detach(), grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def test_names_and_parameters_stay():
    net = model()
    before = dict(net.named_parameters())
    seen = []
    layer = net.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    names = convert(net, RECIPE, only=ONLY)
    assert len(names) == 8
    assert all(isinstance(net.get_submodule(name), Fp8Linear) for name in names)
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    net(input_ids=TOKENS)
    assert seen == ["hook"]


def test_a_layer_under_two_names_is_one_layer():
    linear = torch.nn.Linear(32, 32)
    net = torch.nn.Sequential(linear, linear)
    assert convert(net, RECIPE, only=".*") == ("0",)
    assert net[0] is net[1]
    assert isinstance(net[1], Fp8Linear)
    alone = torch.nn.Linear(32, 32)
    names = convert(alone, RECIPE, only=".*")
    assert names == ("",)
    assert isinstance(alone, Fp8Linear)
    assert sorted(encode_weights(RECIPE, only=names, layouts=None)("weight", alone.weight)) == [
        "weight",
        "weight_scale_inv",
    ]


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(UsageError, match="matches none of"):
        convert(model(), RECIPE, only="no_such_layer")
    with pytest.raises(UsageError, match="none of 0 linear layers.*Pass the whole model"):
        convert(torch.nn.ModuleList([torch.nn.LayerNorm(4)]), RECIPE, only=".*")


def sharded_on_this_rank():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    convert(net, RECIPE, only=ONLY)
    mesh = init_device_mesh("cpu", (2,))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return found_of(net)


def found_of(net):
    logits, gradient = logits_and_gradient(net)
    return logits.numpy(), gradient.numpy(), logits_after_a_step(net).numpy()


def whole_and_sharded():
    # Both on a rank: another number of threads adds in another order.
    net = model()
    convert(net, RECIPE, only=ONLY)
    return found_of(net), sharded_on_this_rank()


def test_it_works_under_fsdp2():
    for (logits, gradient, stepped), sharded in ranks.run(whole_and_sharded, world_size=2):
        theirs, their_gradient, their_stepped = sharded
        moved = np.linalg.norm(stepped - logits)
        assert moved > 0.01 * np.linalg.norm(logits)
        assert np.array_equal(theirs, logits)
        np.testing.assert_allclose(their_gradient, gradient, rtol=1e-6, atol=1e-9)
        assert np.linalg.norm(their_stepped - stepped) < 0.01 * moved


def experts_model(family, implementation="eager"):
    net = tiny_models.build(family, dtype=torch.float32, num_layers=2, hidden=64)
    net.set_experts_implementation(implementation)
    return net


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_experts_multiply_in_float8_and_the_others_do_not(family):
    exact, rounded = experts_model(family), experts_model(family)
    modules = {n: m for n, m in rounded.named_modules() if hasattr(m, "_apply_gate")}
    first, *others = modules
    square = dataclasses.replace(RECIPE, weights=Tile(32, 32))
    if modules[first].is_transposed:
        with pytest.raises(UnsupportedError, match="Use square tiles"):
            transformers.convert(rounded, RECIPE, only=r"mlp\.experts")
        assert not any(hasattr(module, "grouped_mm") for module in rounded.modules())
    names = transformers.convert(rounded, square, only=re.escape(first) + "$")
    assert names == (first,)
    assert all(not hasattr(modules[name], "grouped_mm") for name in others)
    seen = {}

    def keep(name):
        return lambda _, inputs, output: seen.update({name: (inputs, output.detach())})

    for name, module in modules.items():
        module.register_forward_hook(keep(name))
    rounded(input_ids=TOKENS)
    for name, module in exact.named_modules():
        if name in modules:
            inputs, output = seen[name]
            expected = module(*inputs).detach()
            error = float((output - expected).norm() / expected.norm())
            assert (5e-3 < error < 0.15) if name == first else error == 0


def test_experts_without_a_seam_are_refused():
    with pytest.raises(UnsupportedError, match="has no attribute grouped_mm"):
        convert(experts_model("qwen3_moe"), RECIPE, only=EXPERTS)
    net = experts_model("qwen3_moe")
    names = convert(net, RECIPE, only=EXPERTS, exclude="experts$")
    assert len(names) == 8


class OfAHook(torch.nn.Linear):
    """As accelerate leaves a layer: its own forward, wrapped."""

    def __init__(self):
        super().__init__(32, 32)
        self.forward = super().forward


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: torch.nn.Sequential(OfAHook()), ".*"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(32, 32), Doubled(32, 32)), "0|1"),
        (lambda: torch.nn.TransformerEncoderLayer(32, 2, batch_first=True), "linear1"),
        (lambda: torch.nn.Sequential(torch.nn.LazyLinear(32)), ".*"),
    ],
)
def test_layers_that_would_not_multiply_by_it_are_refused(make, rule):
    with pytest.raises(UnsupportedError, match="by nn.Linear's forward.* with exclude="):
        convert(make(), RECIPE, only=rule)


def test_a_class_with_a_forward_of_its_own_can_be_left_out():
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), Doubled(32, 32))
    assert convert(net, RECIPE, only=".*", exclude="1") == ("0",)
    assert convert(net, RECIPE, only="0") == ("0",)


class Wrapper(torch.nn.Linear):
    """As some of peft's layers: a Linear by class alone, which calls the layer that it wraps."""

    def __init__(self, base):
        torch.nn.Module.__init__(self)
        self.base_layer = base

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x)


def test_a_wrapper_without_a_weight_is_no_layer():
    net = torch.nn.Sequential(Wrapper(torch.nn.Linear(32, 32)))
    assert convert(net, RECIPE, only="0") == ("0.base_layer",)


def test_a_bias_does_not_widen_the_result():
    net = torch.nn.Sequential(torch.nn.Linear(32, 32))
    convert(net, RECIPE, only=".*")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.randn(4, 32)).dtype == torch.bfloat16


def test_names_are_those_without_wrappers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = torch.nn.Sequential(torch.nn.Linear(32, 32))
    net = torch.nn.Sequential(checkpoint_wrapper(inner))
    assert convert(net, RECIPE, only=r"0\.0") == ("0.0",)


def test_a_layer_whose_weight_its_host_reads_is_refused():
    config = JambaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_experts=2,
        num_attention_heads=2, num_key_value_heads=2, mamba_d_state=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=r"mamba\.dt_proj is not called.*Exclude dt_proj"):
        transformers.convert(model, RECIPE, only="mamba")
    assert transformers.convert(model, RECIPE, only="mamba", exclude="dt_proj")
    for family, layer in (("qwen3_next", "linear_attn"), ("nemotron_h", "mixer")):
        other = tiny_models.build(family, dtype=torch.float32, num_layers=4)
        assert transformers.convert(other, RECIPE, only=layer)
