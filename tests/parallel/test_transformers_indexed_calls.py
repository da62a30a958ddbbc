"""Models whose indexer chooses the tokens: recomputed, called twice, failing, refused."""

from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from primeblocks import groups
from primeblocks.errors import PlanError, ShapeError, UnsupportedError
from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa, ring_attention
from primeblocks.testing import ranks
from tests.parallel.bodies import meshes_of
from tests.parallel.float64 import Float64, StableTopK
from tests.parallel.test_transformers_families import (
    DOCUMENTS,
    _errors,
    _model,
    _one_by_one,
    _tokens,
)
from tests.parallel.test_transformers_indexed import _call, _plan


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

    meshes, errors = meshes_of(context=2), []
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


def test_recomputation_keeps_the_first_choice():
    for kept, chosen_again in ranks.run(_recomputed, "glm_moe_dsa"):
        assert max(kept.values()) < 1e-12
        assert chosen_again["loss"] < 1e-12
        assert chosen_again["gradients"] > 1e-3


def _micro_batches():
    """Two calls by different plans, then both backwards, the first one's last."""
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = meshes_of(context=2, expert=2)
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


def _sent():
    """By layer: the bytes that a rank passes to its all-gathers of a forward; and agreements."""
    from primeblocks.parallel.adapters.transformers import IndexedAttention, parallelize

    meshes, sent, agreements = meshes_of(context=2), [], []
    gather, agree = dsa.gather.all_gather_rows, groups._gather

    def counted(x, **where):
        sent.append(x.shape[1] * x.itemsize)
        return gather(x, **where)

    def noted(head, *call):
        agreements.append(len(head))
        return agree(head, *call)

    dsa.gather.all_gather_rows, groups._gather = counted, noted
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
        assert len(agreements) == 3  # Of the indexer, and of attention in both layers.


def _failing(q, k, weights):
    raise ShapeError("this engine fails")


def _after_an_error():
    """A call that fails leaves nothing behind, and a call without a plan is the model's own."""
    from primeblocks.parallel.adapters.transformers import IndexedAttention, parallelize

    meshes, model, whole = meshes_of(), _model("glm_moe_dsa"), _model("glm_moe_dsa")
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

    world = meshes_of(context=2)
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
        (PlanError, "does not take masks", inputs | {"attention_mask": mask}),
        (PlanError, "not take masks", inputs | {"attention_mask": mask[None, None].bool()}),
        (PlanError, "does not support a cache. Pass use_cache=False", inputs | {"use_cache": True}),
        (PlanError, "plan must be equal on all ranks", _other_inputs(group)),
    ]:
        with pytest.raises(error, match=said):
            model(**wrong)
        assert _left_behind(model) == []
    attention = model.model.layers[1].self_attn
    attention.attention_dropout = 0.1
    with pytest.raises(PlanError, match="not support dropout; got 0.1"):
        model(**inputs)
    attention.attention_dropout = 0.0
    with torch.no_grad():
        for kind in ("register_forward_hook", "register_full_backward_hook"):
            handle = getattr(attention.kv_b_proj, kind)(lambda *_: None)
            with pytest.raises(UnsupportedError, match="is a Linear with hooks. Attention"):
                model(**inputs)
            handle.remove()
        attention.kv_b_proj.__class__ = type("Fp8Linear", (nn.Linear,), {})
        with pytest.raises(UnsupportedError, match=r"is a Fp8Linear. .* from fp8's rules"):
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
        ("selects before it has scores", lambda q, keys: torch.matmul(q, keys).topk(2)),
    ]:
        indexer = _Other(deed)
        indexer.register_forward_pre_hook(partial(_lend_keys, attention), with_kwargs=True)
        with pytest.raises(UnsupportedError, match=f"the indexer {said}, .*transformers 5.19"):
            indexer(torch.zeros(1, 3, 4), past_key_values=None)


def test_an_indexer_that_scores_otherwise_is_refused():
    ranks.run(_other_indexers, world_size=1)


def _compiled():
    """Relative errors of the loss and the worst gradient, compiled against not."""
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes, model = meshes_of(context=2), _model("glm_moe_dsa").float()
    parallelize(model, meshes)
    want = _call(model, meshes.context.get_group())
    want.backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.model.layers[0].self_attn.compile(backend="eager")
    got = _call(model, meshes.context.get_group())
    got.backward()
    worst = 0.0
    for name, wanted in gradients.items():
        error = model.get_parameter(name).grad.full_tensor() - wanted
        worst = max(worst, float(error.norm() / wanted.norm()))
    return abs(float((got / want).detach()) - 1), worst


def test_compiled_attention_is_the_same():
    for loss, gradients in ranks.run(_compiled):
        assert max(loss, gradients) < 64 * torch.finfo(torch.float32).eps
