"""Every family, its experts and its sequences split, against itself on one rank."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.parallel import global_token_count, plan_sequence
from primeblocks.parallel.attention import (
    FlexKernel,
    RectangleKernel,
    ring_attention,
    ulysses_attention,
)
from primeblocks.parallel.experts import OncePerRankDispatcher
from primeblocks.testing import ranks, tiny_models
from tests.parallel.bodies import each, meshes_of, randomize
from tests.parallel.float64 import Float64, StableTopK

VOCABULARY, EXPERTS, TOP_K = 32, 12, 2
DOCUMENTS = [9, 1, 14, 5]
INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")
EAGER = ("gpt_oss", *INDEXED)
NO_EXPERTS = ("llama", "qwen3")
# Lightning attention has a decay of its own, which is not implemented.
FAMILIES = sorted({*tiny_models.FAMILIES, *tiny_models.OTHER_FAMILIES} - {"minimax"})


class _Counted:
    """A kernel that says how often it was called."""

    def __init__(self, kernel):
        self.kernel, self.forwards, self.backwards = kernel, 0, 0

    def forward(self, *tensors, hop):
        self.forwards += 1
        return self.kernel.forward(*tensors, hop=hop)

    def backward(self, *tensors, hop):
        self.backwards += 1
        return self.kernel.backward(*tensors, hop=hop)


ATTENTIONS = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "ring, kernel": partial(ring_attention, kernel=_Counted(RectangleKernel())),
    "ulysses, kernel": partial(ulysses_attention, kernel=_Counted(FlexKernel(tile_tokens=4))),
}


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
    model.set_attn_implementation("eager" if family in EAGER else "sdpa")
    model.set_experts_implementation("eager")
    randomize(model.parameters())
    return model.train()


def _tokens(batch):
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(VOCABULARY, (sum(DOCUMENTS),), generator=generator)


def _loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def _one_by_one(model, batches, count):
    """Each document alone, by the model's own attention."""
    total = 0.0
    for batch in batches:
        for document in _tokens(batch).split(DOCUMENTS):
            logits = model(input_ids=document[None], use_cache=False).logits[0]
            total += _loss(logits[:-1], document[1:]) / count
    total.backward()
    return total.detach()


def _packed(model, meshes, order, count):
    """All documents in one row, split over the context group."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    group = meshes.context.get_group()
    plan = plan_sequence(DOCUMENTS, ranks=group.size(), order=order, chunk_tokens=3)
    tokens = _tokens(meshes.batch.get_local_rank())
    labels = plan.split(plan.labels(tokens), group=group)
    logits = model(**local_inputs(tokens, sequence=plan, group=group)).logits[0]
    loss = _loss(logits, labels) / count
    loss.backward()
    return loss.detach()


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
    """By case: errors against each document alone, on one rank."""
    from primeblocks.parallel.adapters.transformers import parallelize

    found = {}
    for degrees, order, attention, once, checkpointing in cases:
        meshes = meshes_of(**degrees)
        count = global_token_count(
            sum(n - 1 for n in DOCUMENTS) if meshes.context.get_local_rank() == 0 else 0, meshes
        )
        model, whole = _model(family), _model(family)
        if checkpointing:
            contexts = {"context_fn": lambda: (nullcontext(), Float64())}
            model.gradient_checkpointing_enable({"use_reentrant": False} | contexts)
        dispatcher = OncePerRankDispatcher(meshes.expert.get_group()) if once else None
        parallelize(model, meshes, attention=ATTENTIONS.get(attention), dispatcher=dispatcher)
        with Float64(), StableTopK():
            loss = _packed(model, meshes, order, count)
            dist.all_reduce(loss)
            want = _one_by_one(whole, range(meshes.plan.batch), count)
        found[str(degrees)] = _errors(loss, model, want, whole)
    return found


def _cases(family, world_size):
    """Degrees, order of tokens, attention, once-per-rank dispatch, checkpointing.

    On two ranks the first case splits sequences and experts; families take turns in the rest.
    """
    shared, turn = family not in NO_EXPERTS, FAMILIES.index(family) % 2 == 1
    ring, ulysses = (None, None) if family in INDEXED else ("ring", "ulysses")
    if world_size == 2:
        both = {"context": 2, "expert": 2 if shared else 1}
        return [
            (both, "zigzag", ulysses, True, False)
            if turn
            else (both, "balanced", ring, False, True),
            ({"context": 2}, "zigzag", ring, False, False),
            ({"expert": 2 if shared else 1}, "contiguous", None, shared, False),
        ]
    if world_size == 3:
        return [({"context": 3, "expert": 3}, "zigzag", ring, True, False)]
    return [
        ({"context": 2, "expert": 4 if shared else 1}, "contiguous", ulysses, True, True),
        ({"context": 4, "expert": 2 if shared else 1}, "balanced", ring, False, False),
    ]


def _assert_equal_one_rank(cases, world_size):
    """Each family in its cases."""
    for found in ranks.run(each, _compare, [*cases.items()], world_size=world_size):
        for family, by_case in zip(cases, found, strict=True):
            for errors in by_case.values():
                assert max(errors.values()) < 1e-12, (family, by_case)


@pytest.mark.parametrize("part", range(5))
def test_a_family_equals_one_rank(part, full):
    cases = {family: _cases(family, 2) for family in FAMILIES[part::5]}
    _assert_equal_one_rank(cases if full else {name: of[:1] for name, of in cases.items()}, 2)


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_equal_one(world_size, full):
    """Latents, indices, sinks and states."""
    kinds = ["deepseek_v3", "glm_moe_dsa", "gpt_oss", "qwen3_5_moe"]
    families = FAMILIES if full and world_size == 4 else kinds[-2:] if world_size == 3 else kinds
    cases = {family: _cases(family, world_size) for family in families}
    if not full:
        cases = {name: [of[at % len(of)]] for at, (name, of) in enumerate(cases.items())}
    _assert_equal_one_rank(cases, world_size)


def _with_kernel(family, attention):
    cases = [({"context": 2}, "contiguous", attention, False, True)]
    (errors,) = _compare(family, cases).values()
    kernel = ATTENTIONS[attention].keywords["kernel"]
    calls, kernel.forwards, kernel.backwards = (kernel.forwards, kernel.backwards), 0, 0
    return max(errors.values()), calls


def test_a_model_may_be_given_a_kernel():
    """Of 2 layers that run twice: each hop is a call, rank 0 sees no keys of rank 1."""
    cases = [("deepseek_v3", "ring, kernel"), ("gpt_oss", "ulysses, kernel")]
    for rank, found in enumerate(ranks.run(each, _with_kernel, cases)):
        for case, (error, calls) in zip(cases, found, strict=True):
            hops = 1 + rank if case[1].startswith("ring") else 1
            assert error < 1e-12, case
            assert calls == (4 * hops, 2 * hops), case


def test_the_table_holds_what_is_tested():
    from primeblocks.parallel.adapters.transformers import FAMILIES as table

    assert list(table) == sorted(tiny_models.config(family).model_type for family in FAMILIES)


def _refusals():
    from primeblocks.parallel.adapters.transformers import local_inputs, parallelize

    world = meshes_of(context=2)
    with pytest.raises(UnsupportedError, match="'minimax'.*not one of the tested .*'qwen3_moe'"):
        parallelize(_model("minimax"), world)
    group = world.context.get_group()
    plan = plan_sequence(DOCUMENTS, ranks=2, order="zigzag")
    inputs = local_inputs(_tokens(0), sequence=plan, group=group)
    ids = inputs["input_ids"]
    with pytest.raises(PlanError, match=r"a token on every rank, but the plan assigns \[29, 0\]"):
        local_inputs(_tokens(0), sequence=plan_sequence(DOCUMENTS, ranks=2), group=group)
    model = _model("llama")
    parallelize(model, world)
    for error, said, wrong in [
        (PlanError, r"needs their plan: call model\(\*\*local_inputs", {"input_ids": ids}),
        (ShapeError, "into one row; got a batch of 2", inputs | {"input_ids": ids.repeat(2, 1)}),
        (PlanError, "does not take masks", inputs | {"attention_mask": torch.ones_like(ids)}),
    ]:
        with pytest.raises(error, match=said):
            model(**wrong)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(PlanError, match="not support dropout; got 0.1"):
        model(**inputs)


def test_what_cannot_be_split_is_refused():
    ranks.run(_refusals)
