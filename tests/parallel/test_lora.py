"""Low-rank adapters of sharded experts, against one rank whose weights have the products added."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call

from primeblocks.errors import PlanError, UnsupportedError
from primeblocks.layout import layout_of, local_part
from primeblocks.parallel import clip_grad_norm_, fully_shard_moe, global_token_count
from primeblocks.parallel.experts import (
    AllToAllDispatcher,
    GroupedExperts,
    LocalDispatcher,
    OncePerRankDispatcher,
    add_expert_lora,
    expert_lora_state_dict,
    merged_expert_weights,
)
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import (
    assert_as_precise,
    assert_close_float64,
    max_relative_error,
)
from tests.parallel.bodies import each, meshes_of, randomize

RANK, ALPHA = 3, 6.0
TOKENS = (5, 0, 3, 8)  # By rank: ragged, one without any.
HIDDEN, VOCABULARY = 6, 32


class Model(nn.Module):
    """Two layers of ours; the gate stays trainable."""

    def __init__(self, experts=8, dtype=torch.float64):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, experts, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(
            GroupedExperts(experts, HIDDEN, 4, dispatcher=LocalDispatcher(), dtype=dtype)
            for _ in range(2)
        )

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        for experts in self.layers:
            x = x + experts(x, ids, scores)
        return x


def _ours(experts=8, dtype=torch.float64):
    torch.manual_seed(0)
    return Model(experts, dtype)


def _ours_loss(model, rank, dtype=torch.float64):
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=g, dtype=torch.float64)
    return model(x.to(dtype)).double().square().sum()


def _family(family):
    model = tiny_models.build(
        family, dtype="float64", hidden=32, num_layers=2, num_experts=8, vocab=VOCABULARY, top_k=2
    )
    model.set_experts_implementation("batched_mm")  # Eager experts may add up in float32.
    randomize(model.parameters())
    if family == "nemotron_h":  # What it computes behind the experts is float32.
        model.model.norm_f = nn.Identity()
    return model.requires_grad_(False)


def _family_loss(model, rank):
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCABULARY, (1, 6 + TOKENS[rank]), generator=g)
    found = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    return found.hidden_states[-1].square().sum()


def _adapt(model, **options):
    """Add factors and give them values, the same in every dtype; return copies of them."""
    names = add_expert_lora(model, rank=RANK, alpha=ALPHA, **options)
    g = torch.Generator().manual_seed(1)
    factors = {}
    for factor in [f"{name}_lora_{f}" for name in names for f in "AB"]:
        parameter = model.get_parameter(factor)
        values = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(values * parameter.shape[-1] ** -0.5)
        factors[factor] = parameter.detach().clone().requires_grad_()
    return names, factors


def _summed(whole, names, factors):
    """The weights of `names` with the products added: what adapters mean."""
    merged = {}
    for name in names:
        a, b = factors[f"{name}_lora_A"], factors[f"{name}_lora_B"]
        product = torch.einsum("eor,eri->eoi", b, a) * (ALPHA / RANK)
        if getattr(whole.get_submodule(name.rpartition(".")[0]), "is_transposed", False):
            product = product.transpose(1, 2)
        merged[name] = whole.get_parameter(name).detach() + product
    return merged


def _shard(model, degrees, dispatcher, **more):
    meshes = meshes_of(**degrees)
    dispatcher = dispatcher(meshes.expert.get_group())
    if isinstance(model, Model):
        for module in model.layers:
            module.dispatcher = dispatcher
        fully_shard_moe(model, meshes, layers=[], experts=model.layers, **more)
    else:
        from primeblocks.parallel.adapters.transformers import parallelize

        parallelize(model, meshes, dispatcher=dispatcher)
    return meshes


def _compare(model, tensor_of, expected):
    """Trained parameters alone have tensors, and those are as expected."""
    found = {n: tensor_of(p) for n, p in model.named_parameters() if tensor_of(p) is not None}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert_close_float64(tensor.detach().full_tensor(), expected[name].detach())


def _train(kind, dispatcher):
    """One step; every rank raises for itself."""
    warnings.simplefilter("error")
    whole, loss_of = (_ours(), _ours_loss) if kind == "ours" else (_family(kind), _family_loss)
    model = copy.deepcopy(whole)
    names, factors = _adapt(model)
    trained = factors | {n: p for n, p in whole.named_parameters() if n == "gate.weight"}
    meshes = _shard(model, {"expert": 2}, dispatcher)
    count = global_token_count(TOKENS[dist.get_rank()], meshes)

    loss = loss_of(model, dist.get_rank()) / count
    loss.backward()
    dist.all_reduce(loss := loss.detach())

    def run(*inputs, **named):
        return functional_call(whole, _summed(whole, names, factors), inputs, named)

    want = sum(loss_of(run, rank) for rank in range(dist.get_world_size())) / count
    want.backward()
    assert_close_float64(loss, want.detach())
    _compare(model, lambda p: p.grad, {name: p.grad for name, p in trained.items()})
    norm = clip_grad_norm_(model.parameters(), 0.1, meshes=meshes)
    want = nn.utils.clip_grad_norm_(trained.values(), 0.1)
    assert want > 0.2
    assert_close_float64(norm, want)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2).step()
    torch.optim.AdamW(trained.values(), lr=1e-2).step()
    _compare(model, lambda p: p if p.requires_grad else None, trained)


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [("ours", OncePerRankDispatcher), ("nemotron_h", OncePerRankDispatcher)]),
        (4, [("ours", AllToAllDispatcher)]),
    ],
)
def test_a_step_equals_one_rank(world_size, cases):
    """Of our experts. `test_peft.py` compares families of transformers."""
    ranks.run(each, _train, cases, world_size=world_size)


def _merge(kind, experts, degrees):
    whole = _ours(experts) if kind == "ours" else _family(kind)
    model = copy.deepcopy(whole)
    names, factors = _adapt(model)
    want = _summed(whole, names, factors)
    _shard(model, degrees, AllToAllDispatcher)
    merged = dict(merged_expert_weights(model))
    assert list(merged) == names
    for name, weight in merged.items():
        assert layout_of(weight) == layout_of(model.get_parameter(name))
        assert_close_float64(weight.full_tensor(), want[name].detach())
        assert torch.equal(model.get_parameter(name).full_tensor(), whole.get_parameter(name))


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (3, [("ours", 2, {})]),  # A rank without a row of A.
        (
            4,
            [
                ("ours", 6, {"expert": 2}),  # Three experts for two ranks: weights split inside.
                ("ours", 4, {"expert": 2, "replicate": 2}),
                ("gpt_oss", 8, {"expert": 2}),
            ],
        ),
    ],
    ids=str,
)
def test_merged_weights_hold_the_products(world_size, cases):
    ranks.run(each, _merge, cases, world_size=world_size)


def test_merged_weights_give_the_same_outputs_and_are_formed_in_float32():
    model = _ours()
    _adapt(model)
    merged = dict(merged_expert_weights(model))
    plain = functional_call(_ours(), merged, _rows())
    assert_close_float64(model(_rows()).detach(), plain.detach())
    low = model.bfloat16()
    factors = {name: p.detach().double() for name, p in low.named_parameters() if "lora" in name}
    want = _summed(_ours().bfloat16().double(), list(merged), factors)
    for name, weight in merged_expert_weights(low):
        assert weight.dtype == torch.bfloat16
        rounding = (weight.double() - want[name]).abs() / want[name].abs()
        assert rounding.max() < 1.01 * 2**-8  # Half a unit in the last place: rounded once.


def _rows(dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return torch.randn(7, HIDDEN, generator=g, dtype=torch.float64).to(dtype)


def test_fresh_adapters_change_no_bit():
    model = _ours(dtype=torch.bfloat16)
    want = model(_rows(torch.bfloat16))
    add_expert_lora(model, rank=RANK, alpha=ALPHA)
    assert torch.equal(model(_rows(torch.bfloat16)), want)


def test_the_first_factor_is_drawn_like_a_linear_layer():
    model = _ours(experts=64)
    add_expert_lora(model, rank=8, alpha=ALPHA)
    a = model.layers[0].gate_up_proj_lora_A.detach()
    bound = HIDDEN**-0.5  # Uniform, of variance 1 / (3 in).
    assert a.abs().max() <= bound
    assert a.std() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_other_weights_stay_as_they_are():
    model = _ours()
    names = add_expert_lora(model.layers[0], rank=RANK, alpha=ALPHA)
    assert names == ["gate_up_proj", "down_proj"]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == [
        "gate.weight",
        "layers.0.gate_up_proj_lora_A",
        "layers.0.gate_up_proj_lora_B",
        "layers.0.down_proj_lora_A",
        "layers.0.down_proj_lora_B",
        "layers.1.gate_up_proj",
        "layers.1.down_proj",
    ]
    assert list(expert_lora_state_dict(model)) == [
        "layers.0.base_layer.lora_A.weight",
        "layers.0.base_layer.lora_B.weight",
        "layers.0.lora_A.weight",
        "layers.0.lora_B.weight",
    ]


class _Routes(nn.Module):
    """The same in every dtype."""

    def forward(self, x):
        g = torch.Generator().manual_seed(4)
        return torch.rand(len(x), 8, generator=g).argsort().to(x) / 4


def _gradients(dtype, dtype_of_factors):
    model = _ours().to(dtype)
    model.gate = _Routes()
    names, _ = _adapt(model, dtype=dtype_of_factors)
    _shard(model, {}, AllToAllDispatcher)
    _ours_loss(model, dist.get_rank(), dtype).backward()
    grads = [model.get_parameter(f"{name}_lora_{f}").grad for name in names for f in "AB"]
    assert {grad.dtype for grad in grads} == {dtype_of_factors}
    return torch.cat([grad.full_tensor().flatten() for grad in grads])


def _beside_bfloat16():
    exact = _gradients(torch.float64, torch.float64)
    naive = _gradients(torch.bfloat16, torch.bfloat16)
    assert_as_precise(_gradients(torch.bfloat16, torch.float32), naive=naive, exact=exact)
    assert max_relative_error(naive, exact) < 0.05


def test_float32_factors_beside_bfloat16_weights():
    ranks.run(_beside_bfloat16, world_size=2)


def _exported_after_a_forward():
    model = _ours(dtype=torch.float32)
    _adapt(model)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    _shard(model, {}, AllToAllDispatcher, precision=low, reshard_after_forward=False)
    for export in (merged_expert_weights, expert_lora_state_dict):
        want = {name: local_part(x).clone() for name, x in dict(export(model)).items()}
        model(torch.ones(2, HIDDEN))
        found = dict(export(model))
        assert all(torch.equal(local_part(found[name]), want[name]) for name in want)


def test_an_export_after_a_forward_alone_does_not_contain_its_bfloat16_copies():
    ranks.run(_exported_after_a_forward, world_size=2)


def _added_too_late():
    model = _ours()
    _shard(model, {}, AllToAllDispatcher)
    with pytest.raises(UnsupportedError, match=r"layers.0 is sharded already.*before parallelize"):
        add_expert_lora(model, rank=RANK, alpha=ALPHA)


def test_adapters_after_sharding_are_refused():
    ranks.run(_added_too_late, world_size=1)


def test_bad_arguments_are_refused_and_change_nothing():
    model = _ours()
    with pytest.raises(PlanError, match="rank must be at least 1; got 0"):
        add_expert_lora(model, rank=0, alpha=ALPHA)
    with pytest.raises(PlanError, match=r"Linear have a parameter .* gate_up_proj or up_proj"):
        add_expert_lora(model.gate, rank=1, alpha=ALPHA)
    assert all(p.requires_grad for p in model.parameters())
    assert len(list(model.parameters())) == 5
    add_expert_lora(model, rank=1, alpha=ALPHA)
    with pytest.raises(PlanError, match=r"layers.0 has an adapter already"):
        add_expert_lora(model, rank=1, alpha=ALPHA)


def test_a_forward_that_knows_no_adapters_is_refused():
    model = _family("qwen3_moe")
    add_expert_lora(model, rank=RANK, alpha=ALPHA)
    with pytest.raises(UnsupportedError, match="Qwen3MoeExperts has no dispatcher.*parallelize"):
        _family_loss(model, 0)
