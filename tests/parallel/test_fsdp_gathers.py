"""When FSDP2 gathers, frees and offloads the layers of a mixture-of-experts model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from primeblocks.errors import PlanError, UsageError
from primeblocks.parallel import check_optimizer, clip_grad_norm_, fully_shard_moe
from primeblocks.parallel.experts import AllToAllDispatcher, GroupedExperts, LocalDispatcher
from primeblocks.testing import ranks
from tests.parallel.bodies import each, meshes_of
from tests.parallel.test_fsdp import Model as WithExperts
from tests.parallel.test_fsdp import _backward, _error, _pair

EXPERTS, HIDDEN, LAYERS = 4, 6, 3


class Layer(nn.Module):
    """Its experts, and what is left of it, have sizes of their own, to be told apart by."""

    def __init__(self, index):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.own = nn.Linear(HIDDEN, 4 * index + 4)
        self.experts = GroupedExperts(EXPERTS, HIDDEN, 4 + 2 * index, dispatcher=LocalDispatcher())

    def forward(self, x):
        scores, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, ids, scores) + self.own(x).sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(LAYERS)))
        self.head = nn.Linear(HIDDEN, 50)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Exchanges(TorchDispatchMode):
    """Gathers of weights by layer, and exchanges of tokens, in the order in which they start."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.seen = sizes, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if "allgather_base" in name:
            self.seen.append(self.sizes.get(args[0].numel(), "other"))
        elif "alltoall_base" in name and (not self.seen or self.seen[-1] != "tokens"):
            self.seen.append("tokens")
        return function(*args, **(kwargs or {}))


def _exchanges(**more):
    """Of a forward and of a backward."""
    torch.manual_seed(0)
    model = Model()
    meshes = meshes_of(expert=2)
    for layer in model.layers:
        layer.experts.dispatcher = AllToAllDispatcher(meshes.expert.get_group(), check=False)
    sizes = {}
    for index, layer in enumerate(model.layers):
        experts = sum(p.numel() for p in layer.experts.parameters())
        sizes[experts // 2] = f"experts {index}"
        sizes[_padded(p for n, p in layer.named_parameters() if "experts" not in n)] = index
    assert len(sizes) == 2 * LAYERS
    experts = [layer.experts for layer in model.layers]
    fully_shard_moe(model, meshes, layers=model.layers, experts=experts, **more)
    x = torch.randn(5, HIDDEN)
    with Exchanges(sizes) as forward:
        loss = model(x).square().sum()
    with Exchanges(sizes) as backward:
        loss.backward()
    return forward.seen, backward.seen


def _padded(parameters):
    """Elements of a gather over four ranks: FSDP2 pads what they cannot share equally."""
    return sum(-(-p.shape[0] // 4) * 4 * p[:1].numel() for p in parameters)


def _both_exchanges():
    return _exchanges(), _exchanges(reshard_after_forward=False)


def test_layers_are_gathered_before_tokens_travel_or_kept_for_backward():
    """The host waits for the counts of tokens: what is gathered after it would start late."""
    for freed, kept in ranks.run(_both_exchanges, world_size=4):
        # Runs of exchanges without a gather between them are one.
        assert freed == (
            ["other", 0, 1, "experts 1", "experts 0", "tokens", 2, "experts 2", "tokens"],
            [2, 1, "experts 1", "experts 2", "tokens", 0, "experts 0", "tokens"],
        )
        assert sum(x != "tokens" for x in kept[0]) == 1 + 2 * LAYERS
        assert set(kept[1]) <= {"tokens", "other"}


def _offloaded():
    """Steps with parts on the host and without: on a CPU the same place, by other code."""
    steps = {}
    for policy in (None, CPUOffloadPolicy(pin_memory=False)):
        torch.manual_seed(0)
        model = WithExperts()
        meshes = meshes_of(expert=2)
        experts = [layer.experts for layer in model.layers]
        for module in experts:
            module.dispatcher = AllToAllDispatcher(meshes.expert.get_group())
        fully_shard_moe(
            model, meshes, layers=model.layers, experts=experts,
            routers=[layer.gate for layer in model.layers], offload_policy=policy,
        )  # fmt: skip
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        groups = [m._get_fsdp_state()._fsdp_param_group for m in units]
        taken = {p.offload_to_cpu for group in groups if group for p in group.fsdp_params}
        assert taken == {policy is not None}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            model(torch.ones(3, 6, dtype=torch.float64) * (dist.get_rank() + 1)).sum().backward()
            clip_grad_norm_(model.parameters(), 0.1, meshes=meshes)
            optimizer.step()
            optimizer.zero_grad()
        steps[policy is None] = [p.full_tensor() for p in model.parameters()]
    return all(torch.equal(a, b) for a, b in zip(*steps.values(), strict=True))


def test_parts_may_stay_on_the_host():
    assert ranks.run(_offloaded) == [True, True]


def _forward(model):
    return model(torch.ones(3, 6, dtype=torch.float64))


def _step_after_an_evaluation(kept):
    model, whole, meshes = _pair({"expert": 2}, {}, reshard_after_forward=not kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model, whole, meshes)
    with torch.no_grad():
        _forward(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer.step()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    torch.testing.assert_close(_forward(model), _forward(whole))


def test_a_forward_without_gradients_leaves_nothing_gathered():
    ranks.run(each, _step_after_an_evaluation, [(False,), (True,)], world_size=4)


def _unfrozen_later():
    grads = []
    for frozen in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard_moe(model, meshes_of(), layers=[], experts=[], precision=low)
        if frozen:
            model.requires_grad_(False)
            with torch.no_grad():
                model(torch.ones(1, 4))
            model.requires_grad_(True)
        model(torch.ones(1, 4)).float().sum().backward()
        grads.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    torch.testing.assert_close(*grads)


def test_parameters_that_were_frozen_in_the_first_forward_are_trained():
    ranks.run(_unfrozen_later, world_size=2)


def _after_a_forward_alone():
    model, whole, meshes = _pair({"expert": 2}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _forward(model)
    listed = list(model.parameters())
    late = torch.optim.SGD(listed, lr=1.0)
    _backward(model, whole, meshes)
    for call in (
        lambda: check_optimizer(model, optimizer),
        lambda: clip_grad_norm_(model.parameters(), 0.1, meshes=meshes, optimizer=optimizer),
    ):
        _forward(model)
        assert not isinstance(model.head.weight, DTensor)
        call()
        assert isinstance(model.head.weight, DTensor)
    nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    assert _error(model, whole, lambda p: p.grad) < 1e-12
    with pytest.raises(PlanError, match="2 of 8 tensors .* before the first forward"):
        check_optimizer(model, late)
    with pytest.raises(PlanError, match="2 of 8 parameters are gathered copies"):
        clip_grad_norm_(listed, 0.1, meshes=meshes)


def test_gathered_parameters_are_freed_before_an_optimizer_is_compared_and_gradients_clipped():
    ranks.run(_after_a_forward_alone, world_size=4)


def _after_an_error(new):
    model, whole, meshes = _pair({"expert": 2}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _backward(model, whole, meshes)
    with pytest.raises(UsageError, match="finite"):
        model(torch.full((3, 6), torch.nan, dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        if not new:  # As in torch before 2.13.
            patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        new = hasattr(FSDPModule, "reset_iter_state")
        clip_grad_norm_(model.parameters(), 0.1, meshes=meshes)
    nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    assert _error(model, whole, lambda p: p.grad) < 1e-12
    if new:
        optimizer.step()
        torch.optim.SGD(whole.parameters(), lr=1.0).step()
        torch.testing.assert_close(_forward(model), _forward(whole))


def test_after_an_error_gradients_are_clipped_and_a_forward_uses_the_new_weights():
    ranks.run(each, _after_an_error, [(True,), (False,)], world_size=4)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in a backward")


def _after_an_error_of_a_backward(first):
    model, whole, meshes = _pair({"expert": 2}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hook = model.layers[1].register_forward_hook(lambda module, args, out: Raises.apply(out))
    with pytest.raises(ValueError, match="in a backward"):
        model(torch.ones(3, 6, dtype=torch.float64)).square().sum().backward()
    hook.remove()
    calls = {
        "clip": lambda: clip_grad_norm_(model.parameters(), 0.1, meshes=meshes),
        "check": lambda: check_optimizer(model, optimizer),
    }
    with pytest.raises(PlanError, match="an error ended a backward"):
        calls[first]()
    if hasattr(FSDPModule, "reset_iter_state"):
        optimizer.zero_grad()
        _backward(model, whole, meshes)
        assert _error(model, whole, lambda p: p.grad) < 1e-12


def test_after_an_error_of_a_backward_no_gradient_of_it_is_left():
    ranks.run(each, _after_an_error_of_a_backward, [("clip",), ("check",)], world_size=4)


def _parameters_listed_first(kept):
    model, whole, meshes = _pair({"expert": 2}, {}, reshard_after_forward=not kept)
    listed = list(model.parameters())
    optimizer = torch.optim.SGD(listed, lr=1.0)
    _backward(model, whole, meshes)
    _forward(model)
    clip_grad_norm_(listed, 0.1, meshes=meshes)
    nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    optimizer.step()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    torch.testing.assert_close(_forward(model), _forward(whole))


def test_a_forward_before_the_step_does_not_keep_old_weights():
    ranks.run(each, _parameters_listed_first, [(False,), (True,)], world_size=4)
