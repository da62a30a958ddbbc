"""On a CUDA device: fused kernels per tile, gathers and grouped products, against float64."""

import pytest
import torch
import torch.distributed as dist

from primeblocks.parallel import plan_sequence, reference
from primeblocks.parallel.attention import ring_attention, ulysses_attention
from primeblocks.parallel.experts import GroupedExperts, LocalDispatcher
from primeblocks.testing.oracles import assert_as_precise, assert_close_float64

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [130, 1, 61]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _step(function, inputs, cotangent):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(cotangent.to(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_attention_on_the_device(group, attention, window, dtype):
    tokens = sum(LENGTHS)
    plan = plan_sequence(LENGTHS, ranks=1)
    inputs = [_draw(tokens, heads, 64, seed=heads) for heads in (4, 2, 2)]
    inputs = [x.to(dtype).cuda() for x in (*inputs, _draw(4, seed=7))]
    cotangent = _draw(tokens, 4, 64, seed=9).to(dtype).cuda()

    def ours(q, k, v, sinks):
        return attention(q, k, v, sequence=plan, group=group, window=window, sinks=sinks)

    def plain(q, k, v, sinks):
        every_k, every_v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ every_k.transpose(1, 2) * 64**-0.5
        place = torch.arange(tokens, device="cuda")
        document = torch.arange(3, device="cuda").repeat_interleave(
            torch.tensor(LENGTHS, device="cuda")
        )
        behind = place[:, None] - place
        seen = (behind >= 0) & (document[:, None] == document)
        if window is not None:
            seen &= behind < window
        more = sinks[:, None, None].expand(-1, tokens, 1)
        weights = torch.cat([scores.masked_fill(~seen, -torch.inf), more], dim=2).softmax(-1)
        return (weights[..., :-1] @ every_v).transpose(0, 1)

    def exact(q, k, v, sinks):
        return reference.attention(q, k, v, LENGTHS, window=window, sinks=sinks)

    found = _step(ours, inputs, cotangent)
    right = _step(exact, [x.double().cpu() for x in inputs], cotangent.double().cpu())
    if dtype == torch.float64:
        assert_close_float64([x.cpu() for x in found], right)
        return
    for got, naive, want in zip(found, _step(plain, inputs, cotangent), right, strict=True):
        assert_as_precise(got.cpu(), naive=naive.cpu(), exact=want)


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_experts_on_the_device(dtype, alignment):
    module = GroupedExperts(
        8, 64, 32, dispatcher=LocalDispatcher(alignment=alignment), dtype=dtype, device="cuda"
    )
    ids = _draw(50, 8, seed=1).topk(2).indices
    inputs = [x.to(dtype).cuda() for x in (_draw(50, 64, seed=2), _draw(50, 2, seed=3).sigmoid())]
    weights = [p.detach() for p in module.parameters()]
    cotangent = _draw(50, 64, seed=4).to(dtype).cuda()

    def ours(x, scores, gate_up, down):
        parameters = {"gate_up_proj": gate_up, "down_proj": down}
        return torch.func.functional_call(module, parameters, (x, ids.cuda(), scores))

    def loops(x, scores, gate_up, down):
        return reference.experts(x, ids.to(x.device), scores, gate_up, down)

    inputs += weights
    found = [x.cpu() for x in _step(ours, inputs, cotangent)]
    right = _step(loops, [x.double().cpu() for x in inputs], cotangent.double().cpu())
    if dtype == torch.float64:
        assert_close_float64(found, right)
        return
    for got, want in zip(found, right, strict=True):
        # Two roundings to bfloat16 on the way; the loops have none.
        assert (got.double() - want).abs().max() < 0.03 * want.abs().max()
