"""Models whose indexer chooses the tokens: the same tokens in every row, and what is special.

Losses and gradients of these families: test_transformers_families.py.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.parallel import plan_mesh, plan_sequence
from primeblocks.parallel.attention import dsa, ring_attention
from primeblocks.testing import ranks
from tests.parallel.float64 import Float64, StableTopK
from tests.parallel.test_transformers_families import (
    DOCUMENTS,
    EXPERTS,
    INDEXED,
    TOP_K,
    _errors,
    _loss,
    _model,
    _one_by_one,
    _tokens,
)

STARTS = [sum(DOCUMENTS[:i]) for i in range(len(DOCUMENTS))]
START_OF = torch.tensor(STARTS).repeat_interleave(torch.tensor(DOCUMENTS))


def _meshes(**degrees):
    return plan_mesh(world_size=dist.get_world_size(), **degrees).build("cpu")


def _plan(group, order="balanced"):
    return plan_sequence(DOCUMENTS, ranks=group.size(), order=order, chunk_tokens=3)


def _call(model, group, *, batch=0, order="balanced"):
    """The sum of the losses of this rank's tokens."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    plan, tokens = _plan(group, order), _tokens(batch)
    labels = plan.split(plan.labels(tokens), group=group)
    return _loss(model(**local_inputs(tokens, sequence=plan, group=group)).logits[0], labels)


def _hook_indexers(model, hook):
    """Call `hook(layer, output)` after each indexer; what it returns takes the output's place."""
    for layer, block in enumerate(model.model.layers):
        if block.self_attn.indexer is not None:
            block.self_attn.indexer.register_forward_hook(
                lambda module, args, output, layer=layer: hook(layer, output)
            )


def _keep(found):
    return lambda layer, output: found.setdefault(layer, []).append(output[0])


def _compare_choices():
    """By family: rows that had a choice, and whether all rows are those of the model alone."""
    from primeblocks.parallel.adapters.transformers import parallelize

    results = {}
    for family in INDEXED:
        meshes = _meshes(context=dist.get_world_size())
        group = meshes.context.get_group()
        model, whole, ours, theirs = _model(family), _model(family), {}, {}
        k = model.config.index_topk
        parallelize(model, meshes)
        _hook_indexers(model, _keep(ours))
        _hook_indexers(whole, _keep(theirs))
        with torch.no_grad(), Float64(), StableTopK():
            for order in ("contiguous", "zigzag", "balanced"):
                _call(model, group, order=order)
            for document in _tokens(0).split(DOCUMENTS):
                whole(input_ids=document[None], use_cache=False)
        assert ours.keys() == theirs.keys()
        choices = 0
        for layer, by_order in ours.items():
            wanted = [row.tolist() for rows in theirs[layer] for row in rows]
            for order, rows in zip(("contiguous", "zigzag", "balanced"), by_order, strict=True):
                assert rows.dtype == torch.int32
                places = _plan(group, order).indices(group.rank()).tolist()
                for place, row in zip(places, rows, strict=True):
                    start = int(START_OF[place])
                    # Where few tokens are seen, the model alone chooses masked ones as well.
                    seen = sorted(start + i for i in wanted[place] if start + i <= place)
                    assert row.tolist() == seen + [-1] * (len(row) - len(seen)), (order, place)
                    choices += place - start >= k
        results[family] = choices
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_row_reads_the_tokens_that_the_model_alone_reads(world_size):
    by_rank = ranks.run(_compare_choices, world_size=world_size)
    for family in INDEXED:
        # 7 rows of two documents see more than k tokens, in three orders, in each full layer.
        assert sum(found[family] for found in by_rank) in (7 * 3, 7 * 3 * 2)


def _float32():
    """Relative errors of gradients in float32 against float64: over two ranks, and alone."""
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = _meshes(context=2, expert=2)
    model, alone, oracle = _model("glm_moe_dsa"), _model("glm_moe_dsa"), _model("glm_moe_dsa")
    model, alone = model.float(), alone.float()
    parallelize(model, meshes)
    with StableTopK():
        loss = _call(model, meshes.context.get_group())
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        _one_by_one(alone, [0], 1)
        with Float64():
            want = _one_by_one(oracle, [0], 1)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    got, naive = (_distance(m, oracle) for m in (model, alone))
    return abs(float(loss / want) - 1), got, naive


def _distance(model, oracle):
    """The norm of the error of all gradients together, over that of the gradients."""
    error = scale = 0.0
    for name, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            grad = model.get_parameter(name).grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            error += float((grad.double() - parameter.grad.double()).square().sum())
            scale += float(parameter.grad.double().square().sum())
    return (error / scale) ** 0.5


def test_float32_errs_no_more_than_the_model_alone():
    for loss, got, naive in ranks.run(_float32):
        assert loss < 1e-6
        assert got < min(1e-6, 2 * naive), (got, naive)


class _Fickle:
    """An engine of scores that turns them round when told to."""

    sign = 1.0

    def __call__(self, q, k, weights):
        return self.sign * dsa.index_scores(q, k, weights)


@contextmanager
def _both(*contexts):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _keep_indices():
    forward, again = dsa.keep_indices()
    return forward, _both(Float64(), StableTopK(), again)


def _choose_again():
    return nullcontext(), Float64()


def _recomputed(family):
    """Errors with choices kept and without, where recomputation would choose otherwise."""
    from primeblocks.parallel.adapters.transformers import IndexedAttention, parallelize

    meshes, errors = _meshes(context=2), []
    for contexts in (_keep_indices, _choose_again):
        model, whole, engine = _model(family), _model(family), _Fickle()
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        parallelize(model, meshes, attention=IndexedAttention(scores=engine))
        with Float64(), StableTopK():
            loss = _call(model, meshes.context.get_group())
            engine.sign = -1.0
            loss.backward()
            loss = loss.detach()
            dist.all_reduce(loss)
            want = _one_by_one(whole, [0], 1)
        errors.append(_errors(loss, model, want, whole))
    return errors


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4"])
def test_recomputation_keeps_the_first_choice(family):
    for kept, chosen_again in ranks.run(_recomputed, family):
        assert max(kept.values()) < 1e-12
        assert chosen_again["loss"] < 1e-12
        assert chosen_again["gradients"] > 1e-3


def _micro_batches():
    """Two calls by different plans, then both backwards, the first one's last."""
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = _meshes(context=2, expert=2)
    group, model, whole = meshes.context.get_group(), _model("glm_moe_dsa"), _model("glm_moe_dsa")
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": _keep_indices})
    parallelize(model, meshes)
    with Float64(), StableTopK():
        losses = [_call(model, group, batch=i, order=("zigzag", "balanced")[i]) for i in (0, 1)]
        for loss in reversed(losses):
            loss.backward()
        loss = sum(losses).detach()
        dist.all_reduce(loss)
        want = _one_by_one(whole, [0, 1], 1)
    assert _left_behind(model) == []
    return _errors(loss, model, want, whole)


def _left_behind(model):
    """What calls left in the modules of attention, where nothing may outlive a call."""
    calls = [m.indexed_call for m in model.modules() if hasattr(m, "indexed_call")]
    assert calls
    return [call for call in calls if call is not None]


def test_micro_batches_do_not_mix():
    for errors in ranks.run(_micro_batches):
        assert max(errors.values()) < 1e-12


class _Imposed:
    """Routes and indices from outside, for tokens by their place: what replay does by hooks."""

    def __init__(self, model, places):
        self.places = places
        """Of the tokens at hand, in the packed sequence."""
        self.packed = True
        self.indices, self.experts = {}, {}
        _hook_indexers(model, self.replace)
        for layer, block in enumerate(model.model.layers):
            if hasattr(block.mlp, "gate"):
                block.mlp.gate.register_forward_hook(
                    lambda module, args, output, layer=layer: self.route(layer, output)
                )

    def replace(self, layer, output):
        rows = []
        for place in self.places.tolist():
            generator = torch.Generator().manual_seed(100 * layer + place)
            start = int(START_OF[place])
            chosen = torch.randperm(place - start + 1, generator=generator)[:3].sort().values
            fill = -1 if self.packed else int(chosen[0])  # transformers takes an id twice.
            row = torch.full((4,), fill, dtype=torch.int32)
            row[: len(chosen)] = chosen + (start if self.packed else 0)
            rows.append(row)
        return torch.stack(rows)[None]

    def route(self, layer, output):
        logits = output[0]
        generator = torch.Generator().manual_seed(layer)
        noise = torch.rand(sum(DOCUMENTS), EXPERTS, generator=generator)
        ids = noise.topk(TOP_K, dim=-1).indices[self.places]
        gates = logits.sigmoid().gather(-1, ids)
        return logits, gates / gates.sum(-1, keepdim=True), ids


def _alone_imposed(model):
    imposed = _Imposed(model, None)
    imposed.packed = False
    for start, document in zip(STARTS, _tokens(0).split(DOCUMENTS), strict=True):
        imposed.places = torch.arange(start, start + len(document))
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        _loss(logits[:-1], document[1:]).backward()
    return model


def _split_imposed(model, group):
    _Imposed(model, _plan(group).indices(group.rank()))
    _call(model, group).backward()


def _replaced(family):
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes, model, whole = _meshes(context=2), _model(family), _model(family)
    parallelize(model, meshes)
    with Float64():
        _split_imposed(model, meshes.context.get_group())
        return _distance(model, _alone_imposed(whole))


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_attention_reads_what_a_hook_on_the_indexer_returns(family):
    for error in ranks.run(_replaced, family):
        assert error < 1e-12


class _Watched(dsa.ReferenceKernel):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def forward(self, q, kv, indices, **rules):
        self.seen |= {q.dtype, kv.dtype}
        return super().forward(q, kv, indices, **rules)


def _mixed_precision(family):
    """Errors of gradients against float64: mixed precision over ranks, and bfloat16 alone."""
    from primeblocks.parallel.adapters.transformers import IndexedAttention, parallelize

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    meshes, model, kernel = _meshes(context=2, expert=2), _model(family).float(), _Watched()
    engines = IndexedAttention(kernel=kernel)
    parallelize(model, meshes, precision=precision, attention=engines)
    weighed = []
    model.model.layers[0].self_attn.indexer.weights_proj.register_forward_hook(
        lambda module, args, output: weighed.append((args[0].dtype, output.dtype))
    )
    _split_imposed(model, meshes.context.get_group())
    assert kernel.seen == {torch.bfloat16}
    assert weighed == [(torch.float32, torch.float32)]
    oracle, naive = _model(family), _alone_imposed(_model(family).bfloat16())
    with Float64():
        _alone_imposed(oracle)
    return _distance(model, oracle), _distance(naive, oracle)


@pytest.mark.parametrize("family", INDEXED)
def test_mixed_precision_errs_no_more_than_bfloat16(family):
    for ours, naive in ranks.run(_mixed_precision, family):
        # The lower bound: float32 throughout would err thousands of times less.
        assert naive / 10 < ours < 2 * naive < 0.2, (ours, naive)


def _sent():
    """By layer: the bytes that a rank passes to its all-gathers of a forward; and agreements."""
    from primeblocks import groups
    from primeblocks.parallel.adapters.transformers import IndexedAttention, parallelize

    meshes, sent, agreements = _meshes(context=2), [], []
    gather, agree = dsa.gather.all_gather_rows, groups.agree

    def counted(x, **where):
        sent.append(x.shape[1] * x.itemsize)
        return gather(x, **where)

    def noted(call, *arguments, **named):
        agreements.append(call)
        return agree(call, *arguments, **named)

    dsa.gather.all_gather_rows, groups.agree = counted, noted
    for check in (True, False):
        model = _model("glm_moe_dsa")
        parallelize(model, meshes, attention=IndexedAttention(check=check))
        with torch.no_grad():
            _call(model, meshes.context.get_group())
    return sent, agreements


def test_a_layer_gathers_once():
    for sent, agreements in ranks.run(_sent):
        latents, keys = 512 + 64, 128
        assert sent == [8 * (latents + keys), 8 * latents] * 2  # A full layer, and a shared one.
        assert agreements == ["an indexer", "sparse_attention", "sparse_attention"]


def _failing(q, k, weights):
    raise ShapeError("this engine fails")


def _after_an_error():
    """A call that fails leaves nothing behind, and a call without a plan is the model's own."""
    from primeblocks.parallel.adapters.transformers import IndexedAttention, parallelize

    meshes, model, whole = _meshes(), _model("glm_moe_dsa"), _model("glm_moe_dsa")
    group, ids = meshes.context.get_group(), _tokens(0)[:24].view(2, 12)
    parallelize(model, meshes, attention=IndexedAttention(scores=_failing))
    with pytest.raises(ShapeError, match="this engine fails"):
        _call(model, group)
    assert _left_behind(model) == []
    with Float64(), StableTopK():
        got, want = (m(input_ids=ids, use_cache=True).logits for m in (model, whole))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_an_error_ends_a_call():
    ranks.run(_after_an_error, world_size=1)


def _refusals():
    from primeblocks.parallel.adapters.transformers import (
        IndexedAttention,
        local_inputs,
        parallelize,
    )

    world = _meshes(context=2)
    group = world.context.get_group()
    with pytest.raises(UnsupportedError, match=r"indexer .* ring_attention does not gather"):
        parallelize(_model("glm_moe_dsa"), world, attention=ring_attention)
    with pytest.raises(UnsupportedError, match="qwen3_moe has no indexer"):
        parallelize(_model("qwen3_moe"), world, attention=IndexedAttention())
    mixed = _model("hy_v4").bfloat16()
    mixed.lm_head.float()
    with pytest.raises(UnsupportedError, match=r"several dtypes: .*float32 \(lm_head.weight\)"):
        parallelize(mixed, world)
    model = _model("hy_v4")
    parallelize(model, world)
    inputs = local_inputs(_tokens(0), sequence=_plan(group), group=group)
    ids, mask = inputs["input_ids"], torch.ones_like(inputs["input_ids"])
    for error, said, wrong in [
        (PlanError, "needs their plan", {"input_ids": ids}),
        (ShapeError, "into one row; got a batch of 2", inputs | {"input_ids": ids.repeat(2, 1)}),
        (PlanError, "documents and no masks", inputs | {"attention_mask": mask}),
        (PlanError, "and no masks", inputs | {"attention_mask": mask[None, None].bool()}),
        (PlanError, "has no cache. Pass use_cache=False", inputs | {"use_cache": True}),
        (PlanError, "plan must be equal on all ranks", _other_inputs(group)),
    ]:
        with pytest.raises(error, match=said):
            model(**wrong)
        assert _left_behind(model) == []
    attention = model.model.layers[1].self_attn
    attention.attention_dropout = 0.1
    with pytest.raises(PlanError, match="no dropout; got 0.1"):
        model(**inputs)
    attention.attention_dropout = 0.0
    with torch.no_grad():
        handle = attention.kv_b_proj.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedError, match="is a Linear with hooks; attention"):
            model(**inputs)
        handle.remove()
        attention.kv_b_proj.__class__ = type("Fp8Linear", (nn.Linear,), {})
        with pytest.raises(UnsupportedError, match=r"is a Fp8Linear; .*out of fp8's rules"):
            model(**inputs)
        attention.kv_b_proj.__class__ = nn.Linear
        assert model(**inputs).logits.isfinite().all()


def _other_inputs(group):
    """Another plan on each rank, of as many tokens."""
    from primeblocks.parallel.adapters.transformers import local_inputs

    documents = DOCUMENTS if group.rank() == 0 else [sum(DOCUMENTS)]
    plan = plan_sequence(documents, ranks=group.size(), order="contiguous")
    return local_inputs(_tokens(0), sequence=plan, group=group)


def test_what_a_plan_cannot_serve_is_refused():
    ranks.run(_refusals)


class _Other(nn.Module):
    """An indexer of another making."""

    def __init__(self, deed):
        super().__init__()
        self.deed = deed

    def forward(self, hidden, past_key_values=None):
        keys = past_key_values.update_indexer(hidden, 0)
        return self.deed(hidden[:, :, None], keys)


def _other_indexers():
    from primeblocks.parallel.adapters.transformers import IndexedAttention
    from primeblocks.parallel.adapters.transformers.indexed import _Call, _lend_keys

    attention, group = nn.Module(), dist.group.WORLD
    attention.indexed_call = _Call(IndexedAttention(), group, plan_sequence([3], ranks=1))
    for said, deed in [
        ("calls sigmoid", lambda q, keys: torch.sigmoid(torch.matmul(q, keys))),
        ("calls relu", lambda q, keys: torch.relu(keys)),
        ("calls matmul", lambda q, keys: torch.matmul(q, torch.matmul(q, keys))),
        ("multiplies scores by -1", lambda q, keys: torch.matmul(q, keys) * -1),
        ("chooses before it has scores", lambda q, keys: torch.matmul(q, keys).topk(2)),
    ]:
        indexer = _Other(deed)
        indexer.register_forward_pre_hook(partial(_lend_keys, attention), with_kwargs=True)
        with pytest.raises(UnsupportedError, match=f"the indexer {said}, .*transformers 5.19"):
            indexer(torch.zeros(1, 3, 4), past_key_values=None)


def test_an_indexer_that_scores_otherwise_is_refused():
    ranks.run(_other_indexers, world_size=1)
