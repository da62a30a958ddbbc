"""A model of transformers, parallel, against itself on one rank: a whole step, and what is special.

All families: test_transformers_families.py.
"""

import copy
import importlib
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from primeblocks.errors import MissingPackageError
from primeblocks.layout import layout_of
from primeblocks.parallel import clip_grad_norm_, global_token_count, plan_sequence
from primeblocks.parallel.experts import LocalDispatcher
from primeblocks.testing import ranks, tiny_models
from tests.parallel.bodies import each, meshes_of, randomize
from tests.parallel.test_transformers_families import INDEXED
from tests.parallel.test_transformers_families import _compare as compare_families

VOCABULARY, EXPERTS, TOP_K = 32, 12, 2


def _model(family):
    sizes = {"hidden": 32, "num_layers": 2, "num_experts": EXPERTS, "vocab": VOCABULARY}
    model = tiny_models.build(family, dtype="float32", top_k=TOP_K, **sizes)
    model.config._experts_implementation = "eager"
    randomize(model.parameters())
    return model.train()


def _batch(rank):
    """Ragged by rank; rank 1 has no token that counts in the loss."""
    g = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCABULARY, (1 + rank % 2, 6 + 3 * rank), generator=g)
    return ids, torch.full((ids.shape[0], ids.shape[1] - 1), rank != 1)


def _loss(model, rank, count):
    ids, mask = _batch(rank)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -(logprobs * mask).sum() / count


def _impose(model, rank):
    """Replace the router's choices by given ones, from outside, as replay does."""
    handles = []
    for layer, block in enumerate(model.base_model.layers):
        if hasattr(block.mlp, "gate"):
            g = torch.Generator().manual_seed(100 * rank + layer)
            noise = torch.rand(_batch(rank)[0].numel(), EXPERTS, generator=g)
            hook = _Imposed(noise.topk(TOP_K, dim=-1).indices)
            handles.append(block.mlp.gate.register_forward_hook(hook))
    return handles


class _Imposed:
    def __init__(self, ids):
        self.ids = ids

    def __call__(self, module, args, output):
        logits = output[0]
        gates = logits.softmax(-1, dtype=torch.float32).gather(-1, self.ids)
        return logits, (gates / gates.sum(-1, keepdim=True)).to(logits.dtype), self.ids


def _run(model, rank, count):
    handles = _impose(model, rank)
    loss = _loss(model, rank, count)
    loss.backward()
    for handle in handles:
        handle.remove()
    return loss.detach()


def _whole(dtype, count):
    model = _model("qwen3_moe").to(dtype)
    for rank in range(dist.get_world_size()):
        _run(model, rank, count)
    return model


def _sharded(degrees, dtype, *, precision=None, checkpointing=False):
    from primeblocks.parallel.adapters.transformers import parallelize

    warnings.simplefilter("error")
    model = _model("qwen3_moe").to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    meshes = meshes_of(**degrees)
    parallelize(model, meshes, precision=precision)
    count = global_token_count(_batch(dist.get_rank())[1].sum(), meshes)
    return model, meshes, count


def _error(model, whole, tensor_of):
    """The largest relative error of a parameter; every shard must sit where layout_of says."""
    worst, theirs = 0.0, dict(whole.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(theirs)
    for name, parameter in model.named_parameters():
        got, want = tensor_of(parameter).detach(), tensor_of(theirs[name]).detach()
        shard = layout_of(got).shard
        assert torch.equal(got.to_local(), got.full_tensor()[shard.slices]), (name, shard)
        worst = max(worst, float((got.full_tensor() - want).norm() / want.norm()))
    return worst


def _three_steps(degrees):
    """Three clipped steps of AdamW, with routes imposed by a hook and layers recomputed."""
    model, meshes, count = _sharded(degrees, torch.float64, checkpointing=True)
    whole, errors = _model("qwen3_moe").double(), {}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole)]
    for step in range(3):  # Moments remember the earlier ones.
        loss = _run(model, dist.get_rank(), count)
        dist.all_reduce(loss)
        want = sum(_run(whole, rank, count) for rank in range(dist.get_world_size()))
        errors["loss", step] = abs(float(loss / want) - 1)
        errors["gradients", step] = _error(model, whole, lambda p: p.grad)
        got = clip_grad_norm_(model.parameters(), 0.1, meshes=meshes)
        want = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        assert want > 0.2
        errors["norm", step] = abs(float(got / want) - 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        errors["weights", step] = _error(model, whole, lambda p: p)
    return errors


def test_three_steps_equal_one_rank():
    for errors in ranks.run(_three_steps, {"expert": 2, "replicate": 2}, world_size=4):
        assert max(errors.values()) < 1e-12, errors


def _low_precision():
    """Relative gradient error against float64: mixed precision in parallel, bfloat16 on one."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _, count = _sharded({"expert": 2}, torch.float32, precision=precision)
    block, seen = model.model.layers[0].mlp, {}
    for name in ("gate", "experts"):
        block.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen.update(
                {name: {args[0].dtype, *(p.dtype for p in module.parameters())}}
            )
        )
    _run(model, dist.get_rank(), count)
    # Routers compute in float32 all the same.
    assert seen == {"gate": {torch.float32}, "experts": {torch.bfloat16}}
    oracle, naive = (_whole(dtype, count) for dtype in (torch.float64, torch.bfloat16))
    ours, theirs, scale = 0.0, 0.0, 0.0
    for name, want in oracle.named_parameters():
        got = model.get_parameter(name).grad
        assert got.dtype == torch.float32
        ours += float((got.full_tensor() - want.grad).square().sum())
        theirs += float((naive.get_parameter(name).grad - want.grad).square().sum())
        scale += float(want.grad.square().sum())
    return (ours / scale) ** 0.5, (theirs / scale) ** 0.5


def test_mixed_precision_errs_no_more_than_bfloat16():
    for ours, naive in ranks.run(_low_precision, world_size=2):
        # The lower bound: float32 throughout would err thousands of times less.
        assert naive / 10 < ours < 2 * naive < 0.1


def _shared_config():
    """A second model with the same config object keeps its own experts and attention."""
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    model = _model("qwen3_moe")
    other = type(model)(model.config)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    ids = _batch(0)[0]
    want = other(input_ids=ids, use_cache=False).logits
    parallelize(model, meshes_of())
    assert torch.equal(other(input_ids=ids, use_cache=False).logits, want)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, want)
    model = _model("qwen3_vl_moe")  # Its configuration holds another, in which text is described.
    other = type(model)(model.config)
    kept = [m.config._attn_implementation for m in other.modules() if hasattr(m, "config")]
    parallelize(model, meshes_of())
    plan = plan_sequence([4, 2], ranks=1)
    model(**local_inputs(torch.arange(6), sequence=plan, group=dist.group.WORLD))
    found = [m.config._attn_implementation for m in other.modules() if hasattr(m, "config")]
    assert found == kept


def test_other_models_are_left_alone():
    ranks.run(_shared_config, world_size=1)


def _inputs_and_choices():
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    meshes = meshes_of(context=2)
    group = meshes.context.get_group()
    plan = plan_sequence([3, 4], ranks=2, order="contiguous")
    inputs = local_inputs(torch.arange(7) + 10, sequence=plan, group=group)
    # A rotary embedding would not notice places that are off by a constant for each document.
    own = slice(0, 3) if dist.get_rank() == 0 else slice(3, 7)
    assert inputs["input_ids"].tolist() == [list(range(10, 17))[own]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3][own]]
    model = _model("qwen3_moe")
    parallelize(model, meshes)  # Experts that one rank owns are sent nowhere.
    assert type(model.model.layers[0].mlp.experts.dispatcher) is LocalDispatcher


def test_positions_count_inside_documents_and_own_experts_stay():
    ranks.run(_inputs_and_choices)


def _other_sizes(family, changes):
    """Windows shorter than documents, more heads of values than of keys, steps that are cut.

    And an indexer that chooses all that there is.
    """
    tiny_config = tiny_models.config

    def changed(*arguments, **sizes):
        config = tiny_config(*arguments, **sizes)
        for name, value in changes.items():
            assert getattr(config, name) != value
            setattr(config, name, value)
        return config

    tiny_models.config = changed
    attention = None if family in INDEXED else "ring"
    found = compare_families(family, [({"context": 2}, "zigzag", attention, False, False)])
    tiny_models.config = tiny_config
    return found


OTHER_SIZES = [
    ("glm_moe_dsa", {"index_topk": 64}),
    ("gpt_oss", {"sliding_window": 4}),
    ("qwen3_5_moe", {"linear_num_value_heads": 8}),
    ("nemotron_h", {"time_step_min": 0.7}),
    ("qwen2_moe", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3_next", {"hidden_act": "gelu"}),
]


def test_sizes_that_tiny_models_lack():
    for found in ranks.run(each, _other_sizes, OTHER_SIZES):
        for case, by_degrees in zip(OTHER_SIZES, found, strict=True):
            for errors in by_degrees.values():
                assert max(errors.values()) < 1e-12, (case, errors)


@pytest.mark.parametrize("family", ["axk2", "deepseek_v32", "gpt_oss", "nemotron_h"])
def test_every_router_is_found(family):
    from primeblocks.parallel.adapters.transformers.experts import experts_of, routers_of

    model = tiny_models.build(family, num_layers=4)
    routers = routers_of(model)
    assert routers
    assert len(routers) == len(experts_of(model))
    assert all(type(router).__name__.lower().endswith("router") for router in routers)


def test_a_missing_package_is_named(monkeypatch):
    name = "primeblocks.parallel.adapters.transformers"
    for module in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[transformers\]'"):
        importlib.import_module(name)
