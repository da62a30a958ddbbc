"""PEFT's adapters of linear layers, sharded, beside ours of experts: against PEFT on one rank.

On one rank PEFT adapts experts too (`target_parameters`), so it is the oracle for both.
"""

import copy
import io
import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn

from primeblocks.errors import UnsupportedError
from primeblocks.parallel import clip_grad_norm_, global_token_count, plan_mesh, plan_sequence
from primeblocks.parallel.experts import add_expert_lora, expert_lora_state_dict
from primeblocks.testing import ranks, tiny_models
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.bodies import each, randomize
from tests.parallel.test_lora import _ours, _rows

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
ranks.preload("peft")

VOCABULARY, EXPERTS, RANK, ALPHA = 32, 8, 3, 6
DOCUMENTS = [9, 1, 14, 5]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
GROUPED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _model(family):
    sizes = {"hidden": 64, "num_layers": 2, "num_experts": EXPERTS, "vocab": VOCABULARY}
    model = tiny_models.build(family, dtype="float64", top_k=2, **sizes)
    # In float64 as they stand: eager attention of others would go through float32.
    model.set_attn_implementation("eager" if family == "gpt_oss" else "sdpa")
    if family != "llama":
        model.set_experts_implementation("batched_mm")
    randomize(model.parameters())
    return model


def _trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _pair(family, **options):
    """Linear layers adapted by PEFT and experts by us; and all by PEFT, to the same values."""
    import peft

    model = _model(family)
    whole = copy.deepcopy(model)
    options |= {"r": RANK, "lora_alpha": ALPHA}
    if family == "llama":
        config = peft.LoraConfig(**options, target_modules=ATTENTION + MLP)
        ours, theirs = (peft.get_peft_model(m, copy.copy(config)) for m in (model, whole))
    else:
        config = peft.LoraConfig(**options, target_modules=ATTENTION, target_parameters=GROUPED)
        theirs = peft.get_peft_model(whole, config)
        ours = peft.get_peft_model(model, peft.LoraConfig(**options, target_modules=ATTENTION))
        add_expert_lora(ours, rank=RANK, alpha=ALPHA)
    randomize(_trained(ours), seed=1)
    state = peft.get_peft_model_state_dict(ours) | expert_lora_state_dict(ours)
    assert state.keys() == peft.get_peft_model_state_dict(theirs).keys()
    peft.set_peft_model_state_dict(theirs, state)
    return ours, theirs


def _shared_pair(family):
    """PEFT on the dense layer and the shared experts alone. By name it would take the experts."""
    import peft

    model = _model(family).requires_grad_(False)
    blocks = [layer.mlp for layer in model.model.layers]
    mlps = nn.ModuleList(getattr(block, "shared_experts", block) for block in blocks)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MLP)
    peft.inject_adapter_in_model(config, mlps)
    randomize(_trained(model), seed=1)
    assert len(_trained(model)) == 2 * 2 * len(MLP)
    return model, copy.deepcopy(model)


def _tokens(batch):
    g = torch.Generator().manual_seed(batch)
    return torch.randint(VOCABULARY, (sum(DOCUMENTS),), generator=g)


def _loss(logits, labels):
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def _one_by_one(model, batch):
    losses = []
    for document in _tokens(batch).split(DOCUMENTS):
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(_loss(logits[:-1], document[1:]))
    return torch.stack(losses).sum()


def _packed(model, meshes):
    from primeblocks.parallel.adapters.transformers import local_inputs

    group = meshes.context.get_group()
    plan = plan_sequence(DOCUMENTS, ranks=group.size(), order="contiguous")
    tokens = _tokens(meshes.batch.get_local_rank())
    labels = plan.split(plan.labels(tokens), group=group)
    return _loss(model(**local_inputs(tokens, sequence=plan, group=group)).logits[0], labels)


def _like_ours(theirs, name, tensor_of):
    """A tensor of PEFT's parameter for the same adapter, shaped as ours."""
    weight, grouped, factor = name.partition("_proj_lora_")
    if not grouped:
        return tensor_of(theirs.get_parameter(name)).detach()
    path, _, weight = weight.rpartition(".")
    wrapper = f"{path}.base_layer" if weight == "gate_up" else path
    flat = tensor_of(theirs.get_parameter(f"{wrapper}.lora_{factor}.default.weight")).detach()
    if factor == "A":
        return flat.view(EXPERTS, RANK, -1)
    return flat.view(-1, RANK, EXPERTS).permute(2, 0, 1)


def _error(ours, theirs, tensor_of):
    errors = []
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            want = _like_ours(theirs, name, tensor_of)
            got = tensor_of(parameter).detach().full_tensor()
            errors.append((got - want).norm() / want.norm())
        else:
            assert parameter.grad is None, name
    return float(max(errors))


def _train(family, degrees, pair):
    from primeblocks.parallel.adapters.transformers import parallelize

    ours, theirs = pair(family)
    frozen = {n: p.detach().clone() for n, p in ours.named_parameters() if not p.requires_grad}
    warnings.simplefilter("error")
    meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    parallelize(ours.get_base_model() if pair is _pair else ours, meshes)
    split, batches = meshes.plan.context > 1, meshes.plan.batch
    first = meshes.context.get_local_rank() == 0
    count = global_token_count(sum(n - 1 for n in DOCUMENTS) if first else 0, meshes)
    loss = _packed(ours, meshes) if split else _one_by_one(ours, dist.get_rank())
    loss = loss / count
    loss.backward()
    dist.all_reduce(loss := loss.detach())
    want = sum(_one_by_one(theirs, batch) for batch in range(batches)) / count
    want.backward()
    errors = {"loss": abs(float(loss / want.detach()) - 1)}
    errors["gradients"] = _error(ours, theirs, lambda p: p.grad)
    norm = clip_grad_norm_(ours.parameters(), 0.1, meshes=meshes)
    want = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    assert want > 0.2
    errors["norm"] = abs(float(norm / want) - 1)
    for model in (ours, theirs):
        torch.optim.AdamW(_trained(model), lr=1e-2).step()
    errors["step"] = _error(ours, theirs, lambda p: p)
    for name, before in frozen.items():
        assert torch.equal(ours.get_parameter(name).full_tensor(), before), name
    return errors


def _train_all(cases):
    found = []
    for case in cases:
        with warnings.catch_warnings():
            found.append(_train(*case))
    return found


def test_a_step_equals_peft_on_one_rank():
    cases = [
        ("gpt_oss", {"expert": 2}, _pair),
        ("qwen3_moe", {"expert": 2, "context": 2}, _pair),
        ("llama", {"context": 2}, _pair),
        ("glm4_moe", {"expert": 2}, _shared_pair),  # Shared experts and the dense layer alone.
    ]
    for found in ranks.run(_train_all, cases):
        for errors in found:
            assert max(errors.values()) < 1e-12, errors


@torch.no_grad()
def test_experts_follow_disable_adapter_of_peft():
    import peft

    model = _ours()
    base = copy.deepcopy(model)
    peft.inject_adapter_in_model(peft.LoraConfig(r=RANK, target_modules=["gate"]), model)
    add_expert_lora(model, rank=RANK, alpha=ALPHA)
    randomize(_trained(model), seed=1)
    torch.save(model, saved := io.BytesIO())
    saved.seek(0)
    adapted, plain = model(_rows()), base(_rows())
    assert not torch.allclose(adapted, plain)
    for one in (model, copy.deepcopy(model), torch.load(saved, weights_only=False)):
        for enabled in (True, False, True):
            one.gate.enable_adapters(enabled)
            assert_close_float64(one(_rows()), adapted if enabled else plain)


def _reference(model):
    with torch.no_grad(), model.disable_adapter():
        return model(input_ids=_tokens(0)[None], use_cache=False).logits


def _references(degrees, kept):
    """Reference forwards before, between and after two forwards and backwards."""
    from primeblocks.parallel.adapters.transformers import parallelize

    ours, theirs = _pair("qwen3_moe", modules_to_save=["lm_head"])
    meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
    parallelize(ours.get_base_model(), meshes, reshard_after_forward=not kept)
    want = _reference(theirs)
    for _ in range(2):
        assert_close_float64(_reference(ours), want)
        loss = _one_by_one(ours, dist.get_rank())
        assert_close_float64(_reference(ours), want)
        loss.backward()
        for batch in range(meshes.plan.batch):
            _one_by_one(theirs, batch).backward()
    return _error(ours, theirs, lambda p: p.grad)


def test_references_between_backwards_change_no_gradient():
    cases = [({"expert": 2}, False), ({"expert": 2, "replicate": 2}, True)]
    for found in ranks.run(each, _references, cases, world_size=4):
        assert max(found) < 1e-12


def _target_parameters():
    import peft

    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = plan_mesh(world_size=1).build("cpu")
    for options in ({"target_modules": [], "target_parameters": GROUPED}, {"target_modules": MLP}):
        model = peft.get_peft_model(_model("qwen3_moe"), peft.LoraConfig(**options))
        with pytest.raises(UnsupportedError, match=r"layers.0.mlp.experts.* call add_expert_lora"):
            parallelize(model.get_base_model(), meshes)


def test_experts_adapted_by_peft_are_refused():
    ranks.run(_target_parameters, world_size=1)
