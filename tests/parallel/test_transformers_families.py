"""Every family, its experts and its sequences split, against itself on one rank."""

import copy

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.parallel import (
    OncePerRankDispatcher,
    global_token_count,
    plan_mesh,
    plan_sequence,
    ring_attention,
    ulysses_attention,
)
from primeblocks.testing import ranks, tiny_models

VOCABULARY, EXPERTS, TOP_K = 32, 8, 2
DOCUMENTS = [9, 1, 14, 5]
# The state of these is float32 in transformers, whatever the model is; ours keeps the model's.
RECURRENT = ("nemotron_h", "qwen3_5_moe", "qwen3_next")
NO_CONTEXT = ("deepseek_v32", "glm_moe_dsa", "minimax")
NO_EXPERTS = ("llama", "qwen3")
FAMILIES = sorted((*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES))
ATTENTIONS = {"ring": ring_attention, "ulysses": ulysses_attention}


def _model(family):
    model = tiny_models.build(
        family,
        dtype="float64",
        num_layers=4 if family == "nemotron_h" else 2,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=64,
        vocab=VOCABULARY,
    )
    # In float64 as it stands: eager attention would go through float32.
    model.set_attn_implementation("eager" if family in ("gpt_oss", *NO_CONTEXT) else "sdpa")
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # Far from the symmetry of a fresh model.
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))
    return model.train()


def _tokens(batch):
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(VOCABULARY, (sum(DOCUMENTS),), generator=generator)


def _loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def _one_by_one(model, batches, count):
    """Each document alone, by the model's own attention."""
    total = 0.0
    for batch in range(batches):
        for document in _tokens(batch).split(DOCUMENTS):
            logits = model(input_ids=document[None], use_cache=False).logits[0]
            total += _loss(logits[:-1], document[1:]) / count
    total.backward()
    return total.detach()


def _packed(model, meshes, order, count):
    """All documents in one row, split over the context group."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    group = meshes.context.get_group()
    plan = plan_sequence(DOCUMENTS, ranks=group.size(), order=order, block_tokens=3)
    tokens = _tokens(meshes.batch.get_local_rank())
    labels = plan.split(plan.labels(tokens), group=group)
    logits = model(**local_inputs(tokens, sequence=plan, group=group)).logits[0]
    loss = _loss(logits, labels) / count
    loss.backward()
    return loss.detach()


def _unpacked(model, meshes, count):
    """Documents one after the other, where sequences cannot be split."""
    losses = []
    for document in _tokens(meshes.batch.get_local_rank()).split(DOCUMENTS):
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(_loss(logits[:-1], document[1:]) / count)
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach()


def _errors(loss, model, want, whole):
    """Relative errors of the loss and of the worst gradient."""
    worst, theirs = 0.0, dict(whole.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(theirs)
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        if wanted is None:
            assert parameter.grad is None or not parameter.grad.full_tensor().any(), name
            continue
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else None
        grad = parameter.grad if grad is None else grad
        worst = max(worst, float((grad - wanted).norm() / wanted.norm().clamp_min(1e-30)))
    return {"loss": abs(float(loss / want) - 1), "gradients": worst}


def _compare(family, cases):
    """By case: errors against each document alone, and against the packed row on one rank."""
    from primeblocks.parallel.adapters.transformers import parallelize

    found = {}
    for degrees, order, attention, once, checkpointing in cases:
        meshes = plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")
        count = global_token_count(
            sum(n - 1 for n in DOCUMENTS) if meshes.context.get_local_rank() == 0 else 0, meshes
        )
        batches, pristine = meshes.plan.batch, _model(family)
        model, whole = copy.deepcopy(pristine), copy.deepcopy(pristine)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        dispatcher = OncePerRankDispatcher(meshes.expert.get_group()) if once else None
        split = family not in NO_CONTEXT
        chosen = ATTENTIONS[attention] if split else None
        parallelize(model, meshes, attention=chosen, dispatcher=dispatcher)
        loss = _packed(model, meshes, order, count) if split else _unpacked(model, meshes, count)
        dist.all_reduce(loss)
        errors = _errors(loss, model, _one_by_one(whole, batches, count), whole)
        if family in RECURRENT:
            errors |= _against_one_rank(pristine, loss, model, batches, count)
        found[str(degrees)] = errors
    return found


def _against_one_rank(pristine, loss, model, batches, count):
    """The same functions on a context group of one rank."""
    from primeblocks.parallel.adapters.transformers import local_inputs
    from primeblocks.parallel.adapters.transformers.attention import Context, install_attention
    from primeblocks.parallel.adapters.transformers.recurrence import install_recurrence

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    context = Context(alone, ring_attention)
    install_attention(pristine, context)
    install_recurrence(pristine, context)
    plan = plan_sequence(DOCUMENTS, ranks=1)
    want = 0.0
    for batch in range(batches):
        tokens = _tokens(batch)
        logits = pristine(**local_inputs(tokens, sequence=plan, group=alone)).logits[0]
        want += _loss(logits, plan.labels(tokens)) / count
    want.backward()
    errors = _errors(loss, model, want.detach(), pristine)
    return {f"{name} on one rank": error for name, error in errors.items()}


def _assert_exact(family, results):
    for by_case in results:
        for case, errors in by_case.items():
            for name, error in errors.items():
                loose = family in RECURRENT and not name.endswith("one rank")
                assert error < (1e-4 if loose else 1e-12), (case, errors)


def _cases(family, world_size):
    """Degrees, order of tokens, attention, once-per-rank dispatch, checkpointing."""
    if family in NO_CONTEXT:
        return [({"expert": world_size}, None, None, False, True)]
    shared = family not in NO_EXPERTS
    if world_size == 2:
        return [
            ({"context": 2}, "zigzag", "ring", False, False),
            ({"expert": 2 if shared else 1}, "contiguous", "ulysses", True, False),
        ]
    return [
        ({"context": 2, "expert": 4 if shared else 1}, "contiguous", "ulysses", True, True),
        ({"context": 4, "expert": 2 if shared else 1}, "balanced", "ring", False, False),
    ]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_one_rank(family, world_size):
    if family == "minimax" and world_size == 2:
        pytest.skip("compared on 4 ranks")
    results = ranks.run(_compare, family, _cases(family, world_size), world_size=world_size)
    _assert_exact(family, results)


def test_the_table_holds_what_is_tested():
    from primeblocks.parallel.adapters.transformers import FAMILIES as table

    kinds = {tiny_models.config(family).model_type: family for family in FAMILIES}
    assert set(table) == set(kinds)
    for kind, family in kinds.items():
        assert bool(table[kind].context) == (family in NO_CONTEXT)
        assert table[kind].experts == (family not in NO_EXPERTS)


def _refusals():
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    world = plan_mesh(world_size=2, context=2).build("cpu")
    with pytest.raises(UnsupportedError, match="glm_moe_dsa cannot split .* Use context=1"):
        parallelize(_model("glm_moe_dsa"), world)
    shared = plan_mesh(world_size=2, expert=2).build("cpu")
    with pytest.raises(UnsupportedError, match="llama has no experts"):
        parallelize(_model("llama"), shared)
    group = world.context.get_group()
    plan = plan_sequence(DOCUMENTS, ranks=2, order="zigzag")
    inputs = local_inputs(_tokens(0), sequence=plan, group=group)
    ids = inputs["input_ids"]
    for error, said, wrong in [
        (PlanError, r"needs their plan: call model\(\*\*local_inputs", {"input_ids": ids}),
        (ShapeError, "into one row; got a batch of 2", inputs | {"input_ids": ids.repeat(2, 1)}),
        (PlanError, "knows documents and no masks", inputs | {"attention_mask": torch.ones_like(ids)}),
    ]:
        model = _model("llama")
        parallelize(model, world)
        with pytest.raises(error, match=said):
            model(**wrong)


def test_what_cannot_be_split_is_refused():
    ranks.run(_refusals)
