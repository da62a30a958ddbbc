"""On each device, one rank: kernels per tile, recurrences, grouped products, against float64."""

import pytest
import torch

from benchmarks.parallel_parts import plain_flash
from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import (
    FlexKernel,
    RectangleKernel,
    VarlenKernel,
    ring_attention,
    ulysses_attention,
)
from primeblocks.parallel.experts import GroupedExperts, LocalDispatcher, merged_expert_weights
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel import test_lora
from tests.parallel.linear_cases import CASES, drawn

LENGTHS = [130, 1, 61]
KERNELS = {
    "default": None,
    "rectangles": RectangleKernel(),
    "rectangles_wide": RectangleKernel(),  # torch's flash attention takes at most 256.
    "flex": FlexKernel(),
    "flex_recompute": FlexKernel(recompute=True),
    "varlen": VarlenKernel(),
    # Its code around the operators, which plain torch stands in for.
    "varlen_plain": VarlenKernel(operators=(plain_flash.forward, plain_flash.backward)),
}
# Of the norm: operands, weights, results and gradients are each rounded, to 8 bits or to 24.
ERRORS = {torch.bfloat16: 0.02, torch.float32: 2e-6}


def _step(function, inputs, cotangent):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(cotangent.to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _assert_close(found, right, dtype):
    for got, want in zip(found, right, strict=True):
        error = float((got.cpu().double() - want).norm() / want.norm())
        assert error < ERRORS[dtype]


def _draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("attention", "window"), [(ring_attention, 9), (ulysses_attention, None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention(group, device, attention, window, dtype, kernel):
    if kernel == "default" and device != "cuda":
        pytest.skip("rectangles, which have their own case")
    if kernel.startswith("flex") and device == "pretend":
        pytest.skip("nothing compiles for a device that is none")
    if kernel.startswith("flex") and device == "cuda" and dtype == torch.float64:
        pytest.skip("FlexAttention compiles no float64")
    if kernel == "varlen" and (device != "cuda" or dtype != torch.bfloat16):
        pytest.skip("torch's flash attention is of CUDA, in bfloat16 and float16")
    tokens = sum(LENGTHS)
    plan = plan_sequence(LENGTHS, ranks=1)
    width = 320 if kernel == "rectangles_wide" else 64
    inputs = [_draw(tokens, heads, width, seed=heads) for heads in (4, 2, 2)]
    inputs = [x.to(dtype).to(device) for x in (*inputs, _draw(4, seed=7))]
    cotangent = _draw(tokens, 4, width, seed=9).to(dtype).to(device)

    def ours(q, k, v, sinks):
        rules = {"window": window, "sinks": sinks, "kernel": KERNELS[kernel]}
        return attention(q, k, v, sequence=plan, group=group, **rules)

    def exact(q, k, v, sinks):
        return reference.attention(q, k, v, LENGTHS, window=window, sinks=sinks)

    found = _step(ours, inputs, cotangent)
    right = _step(exact, [x.double().cpu() for x in inputs], cotangent.double().cpu())
    if dtype == torch.float64:
        assert_close_float64([x.cpu() for x in found], right)
        return
    _assert_close(found, right, dtype)


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_experts(device, dtype, alignment):
    module = GroupedExperts(
        8, 64, 32, dispatcher=LocalDispatcher(alignment=alignment), dtype=dtype, device=device
    )
    ids = _draw(50, 8, seed=1).topk(2).indices
    inputs = [
        x.to(dtype).to(device) for x in (_draw(50, 64, seed=2), _draw(50, 2, seed=3).sigmoid())
    ]
    weights = [p.detach() for p in module.parameters()]
    cotangent = _draw(50, 64, seed=4).to(dtype).to(device)

    def ours(x, scores, gate_up, down):
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(module, parameters, (x, ids.to(device), scores))

    def loops(x, scores, gate_up, down):
        return reference.experts(x, ids.to(x.device), scores, gate_up, down)

    inputs += weights
    found = [x.cpu() for x in _step(ours, inputs, cotangent)]
    right = _step(loops, [x.double().cpu() for x in inputs], cotangent.double().cpu())
    if dtype == torch.float64:
        assert_close_float64(found, right)
        return
    _assert_close(found, right, dtype)


def test_adapters_of_experts(device):
    model, whole, x = test_lora._ours().to(device), test_lora._ours(), test_lora._rows()
    names, factors = test_lora._adapt(model)
    factors = {name: x.detach().cpu().requires_grad_() for name, x in factors.items()}
    out = model(x.to(device))
    out.square().sum().backward()
    summed = test_lora._summed(whole, names, factors)
    right = torch.func.functional_call(whole, summed, (x,))
    right.square().sum().backward()
    found = [out, *(model.get_parameter(name).grad for name in factors)]
    assert_close_float64(
        [x.detach().cpu() for x in found], [right.detach(), *(x.grad for x in factors.values())]
    )
    for name, weight in merged_expert_weights(model):
        assert_close_float64(weight.cpu(), summed[name].detach())


@pytest.mark.parametrize("name", CASES)
def test_recurrences_and_convolutions(group, device, name):
    plan = plan_sequence(LENGTHS, ranks=1, chunk_tokens=8)
    inputs, _ = drawn(name, plan.tokens)

    def ours(*leaves):
        return CASES[name][2](*leaves, sequence=plan, group=group)

    cotangent = torch.ones_like(CASES[name][3](*inputs, LENGTHS))
    right = _step(lambda *leaves: CASES[name][3](*leaves, LENGTHS), inputs, cotangent)
    found = _step(ours, [x.to(device) for x in inputs], cotangent.to(device))
    assert_close_float64([x.cpu() for x in found], right)
