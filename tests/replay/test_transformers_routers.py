import sys

import pytest
import torch
from torch import nn

from primeblocks.errors import MissingPackageError, UnsupportedError, UsageError
from primeblocks.replay import Routes, compare, impose, record
from primeblocks.replay.adapters import transformers as adapter
from primeblocks.testing import tiny_models
from tests.replay.reference import sigmoid_router, softmax_router

SIGMOID = [
    *("afmoe", "axk2", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "hy_v4", "laguna", "minimax_m2", "nemotron_h", "solar_open"),
]
SOFTMAX = [
    *("flex_olmo", "gpt_oss", "minimax", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe"),
    *("qwen3_moe", "qwen3_next", "qwen3_vl_moe"),
]
FAMILIES = sorted(SIGMOID + SOFTMAX)
# Their first layer is dense, or (Nemotron-H) the middle one attention.
ALL_ROUTE = [*SOFTMAX, "minimax_m2", "solar_open"]
LAYERS = {family: [0, 1, 2] for family in ALL_ROUTE} | {"nemotron_h": [0, 2]}
TOKENS = torch.arange(24).reshape(2, 12) % 20 + 4


def build(family, dtype="float32"):
    # Wide weights: routers then disagree about most tokens of different seeds.
    model = tiny_models.build(
        family, dtype=dtype, num_layers=3, hidden=32, vocab=32, init_std=0.3, num_experts=8
    )
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        # Neutral by default, which would hide their loss: scale, correction bias, groups.
        for scale in ("routed_scaling_factor", "route_scale"):
            if hasattr(module, scale):
                setattr(module, scale, 1.5)
        for bias in ("e_score_correction_bias", "expert_bias"):
            if hasattr(module, bias):
                getattr(module, bias).data.normal_(0, 0.3, generator=generator)
        if hasattr(module, "num_group"):
            module.num_group, module.topk_group = 4, 2
        if family == "dots1" and hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = False
    return model.train()


def foreign_routes(routers, seed=5):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(TOKENS.numel(), len(routers), 8, generator=generator)
    missing = torch.zeros(TOKENS.numel(), dtype=torch.bool)
    missing[[0, 11, 23]] = True
    return Routes.from_array(
        draws.topk(2).indices.numpy(),
        num_experts=8,
        layer_ids=[router.layer_id for router in routers],
        missing=missing.numpy(),
    )


def step(model):
    model.zero_grad()
    logits = model(input_ids=TOKENS, use_cache=False).logits
    logits.log_softmax(-1).gather(-1, TOKENS[..., None]).mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def weight_of(router):
    return getattr(router.module, "gate", router.module).weight  # AFMoE's is a Linear


def checkpointed(model, use_reentrant):
    if use_reentrant is not None:
        kwargs = {"use_reentrant": use_reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_own_routes_change_no_bit(family):
    model = build(family)
    routers = adapter.routers(model)
    assert [router.layer_id for router in routers] == LAYERS.get(family, [1, 2])
    for use_reentrant, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        checkpointed(model.to(dtype), use_reentrant)
        with record(routers) as tape:
            logits, gradients = step(model)
        with impose(routers, tape.routes):
            again, gradients_again = step(model)
        assert {gradient.dtype for gradient in gradients.values()} == {dtype}
        assert torch.equal(again, logits), use_reentrant
        assert gradients_again.keys() == gradients.keys()
        assert all(torch.equal(gradients_again[name], gradients[name]) for name in gradients)


def test_a_whole_model_equals_one_with_reference_routers_in_float64(monkeypatch):
    # GPT-OSS weighs in the dtype of the model; the other families narrow to float32 inside.
    model = build("gpt_oss", "float64")
    model.set_experts_implementation("eager")  # The grouped kernel refuses float64.
    routers = adapter.routers(model)
    routes = foreign_routes(routers)
    with impose(routers, routes):
        logits, gradients = step(model)
    rows = [
        [None if gone else row for row, gone in zip(layer, routes.missing.tolist(), strict=True)]
        for layer in routes.experts.swapaxes(0, 1).tolist()
    ]
    for router, imposed in zip(routers, rows, strict=True):
        monkeypatch.setattr(router.module, "forward", _by_reference(router.module, imposed))
    expected, expected_gradients = step(model)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


def _by_reference(module, imposed):
    def forward(hidden):
        gates, ids = softmax_router(
            hidden, module.weight, bias=module.bias, top_k=2, renormalise=True, imposed=imposed
        )
        return hidden @ module.weight.T, gates, torch.tensor(ids)

    return forward


def run_router(family, model, router, hidden):
    """A router's output; two families keep the correction bias in the layer around it."""
    layer = model.get_decoder().layers[router.layer_id]
    if family == "afmoe":
        return router.module(hidden[None], layer.mlp.expert_bias)
    if family == "minimax_m2":
        return router.module(hidden, layer.mlp.e_score_correction_bias)
    return router.module(hidden)


def reference(family, model, router, hidden, imposed):
    module, layer = router.module, model.get_decoder().layers[router.layer_id]
    if family in SOFTMAX:
        return softmax_router(
            hidden,
            module.weight,
            top_k=2,
            renormalise=getattr(module, "norm_topk_prob", True),
            bias=getattr(module, "bias", None),
            imposed=imposed,
        )
    holder = layer.mlp if family in ("afmoe", "minimax_m2") else module
    bias = holder.expert_bias if family == "afmoe" else holder.e_score_correction_bias
    scales = {"afmoe": "route_scale", "laguna": "", "minimax_m2": ""}
    return sigmoid_router(
        hidden,
        module.gate.weight if family == "afmoe" else module.weight,
        top_k=2,
        correction_bias=bias.double(),
        renormalise=getattr(module, "norm_topk_prob", True),
        scale=getattr(module, scales.get(family, "routed_scaling_factor"), 1.0),
        groups=getattr(module, "num_group", 1),
        groups_kept=getattr(module, "topk_group", 1),
        softcap=getattr(module, "router_logit_softcapping", 0.0),
        imposed=imposed,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_one_router_equals_its_reference(family):
    model = build(family, "float64")
    router, *_ = adapter.routers(model)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS.numel(), 32, dtype=torch.float64, generator=generator)
    # All but GPT-OSS weigh in float32, or round to it.
    tolerance = dict.fromkeys(("rtol", "atol"), 1e-12 if family == "gpt_oss" else 1e-6)
    routes = foreign_routes([router])
    imposed = [
        None if gone else row
        for row, gone in zip(routes.experts[:, 0].tolist(), routes.missing.tolist(), strict=True)
    ]
    with impose([router], routes):
        _, gates, ids = run_router(family, model, router, hidden)
    expected, expected_ids = reference(family, model, router, hidden, imposed)
    # As sets: some families leave their own choice unsorted.
    assert [set(row) for row in ids.tolist()] == [set(row) for row in expected_ids]
    found = torch.zeros(len(ids), 8, dtype=torch.float64).scatter(1, ids, gates.double())
    wanted = torch.zeros(len(ids), 8, dtype=torch.float64)
    wanted = wanted.scatter(1, torch.tensor(expected_ids), expected)
    torch.testing.assert_close(found, wanted, **tolerance)
    # Rows of any length are weighed alike.
    rows = torch.randint(8, (len(hidden), 5), generator=torch.Generator().manual_seed(4))
    output = run_router(family, model, router, hidden)
    expected, _ = reference(family, model, router, hidden, rows.tolist())
    torch.testing.assert_close(router.gates(output, rows).double(), expected, **tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_saturated_routers_weigh_their_own_choice_as_the_host_does(family):
    model = build(family)
    router, *_ = adapter.routers(model)
    generator = torch.Generator().manual_seed(3)
    hidden = 1 + 0.1 * torch.rand(TOKENS.numel(), 32, generator=generator)
    if family == "laguna":
        router.module.router_logit_softcapping = 0.0
    with torch.no_grad():
        # Logits near -40: their sigmoids are near 4e-18, which some hosts guard and some do not.
        weight_of(router).uniform_(-42 / 32, -38 / 32, generator=generator)
        output = run_router(family, model, router, hidden)
        assert torch.equal(router.gates(output, output[2]), output[1])


def test_models_without_a_known_router_are_refused():
    with pytest.raises(UnsupportedError, match=r"no module of Linear .*Qwen3MoeTopKRouter"):
        adapter.routers(nn.Linear(2, 2))

    class OtherRouter(nn.Module):
        pass

    model = build("qwen3_moe")
    model.model.layers[1].mlp.gate = OtherRouter()
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.gate', a OtherRouter, is not"):
        adapter.routers(model)


def test_a_changed_subclass_of_a_known_router_is_refused():
    model = build("qwen3_moe")
    known = type(model.model.layers[1].mlp.gate)

    class Same(known):
        pass

    class Sampled(known):
        def forward(self, hidden):
            return super().forward(hidden + 1)

    model.model.layers[1].mlp.gate.__class__ = Same  # As FSDP2 does.
    assert len(adapter.routers(model)) == 3
    model.model.layers[1].mlp.gate.__class__ = Sampled
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.gate', a Sampled, is not"):
        adapter.routers(model)


@pytest.mark.parametrize("version", ["5.16.4", "4.57.0", "6.0.0"])
def test_other_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(adapter, "_RELEASE", version)
    with pytest.raises(UnsupportedError, match=version):
        adapter.routers(nn.Linear(2, 2))


def test_a_router_that_returns_something_else_is_refused(monkeypatch):
    model = build("qwen3_moe")
    routers = adapter.routers(model)
    monkeypatch.setattr(routers[0].module, "forward", lambda hidden: hidden)
    with pytest.raises(UnsupportedError, match="does not return"), record(routers[:1]):
        routers[0].module(torch.zeros(1, 32))


def with_copied_routers(family, names):
    peft = pytest.importorskip("peft")
    model = build(family)
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=names)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_moe", "gate"), ("gpt_oss", "router"), ("deepseek_v3", "gate")]
)
def test_routers_that_peft_copied_are_followed(family, name):
    model = with_copied_routers(family, [name])
    routers = adapter.routers(model)
    assert [router.layer_id for router in routers] == LAYERS.get(family, [1, 2])
    with record(routers) as own:
        wanted = model(input_ids=TOKENS, use_cache=False).logits
    with record(routers) as original, model.disable_adapter():
        model(input_ids=TOKENS, use_cache=False)
    assert compare(own.routes, original.routes).overall < 0.9
    with impose(routers, own.routes):
        found = model(input_ids=TOKENS, use_cache=False).logits
        assert torch.equal(found, wanted)
    routes = foreign_routes(routers)
    with impose(routers, routes), record(routers) as tape:
        model(input_ids=TOKENS, use_cache=False).logits.square().sum().backward()
    assert compare(routes, tape.routes).same_order == 1
    for router in routers:
        copy, kept = router.module.modules_to_save["default"], router.module.original_module
        assert copy.weight.grad.abs().max() > 0
        assert kept.weight.grad is None


def test_copies_of_what_is_around_a_router_are_refused():
    model = with_copied_routers("qwen3_moe", ["mlp"])
    with pytest.raises(UnsupportedError, match=r"layer 0 has two routers.*modules_to_save=\[.gate"):
        adapter.routers(model)


def test_generate_in_a_record_is_refused():
    """With a prompt of one token, steps that chose alike were recorded as one."""
    model = build("qwen3_moe").eval()
    with (
        record(adapter.routers(model)),
        pytest.raises(UsageError, match="ran twice in one record: 1 tokens, then 1.*generate"),
    ):
        model.generate(TOKENS[:1, :1], max_new_tokens=6, do_sample=False)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, adapter.__name__)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[transformers\]'"):
        __import__(adapter.__name__)
