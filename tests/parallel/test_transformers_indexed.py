"""Models whose indexer chooses the tokens: the same tokens in every row, and low precision.

Losses and gradients of these families in float64: test_transformers_families.py.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from primeblocks.parallel import plan_sequence
from primeblocks.parallel.attention import dsa
from primeblocks.testing import ranks
from tests.parallel.bodies import each, meshes_of
from tests.parallel.float64 import Float64, StableTopK
from tests.parallel.test_transformers_families import (
    DOCUMENTS,
    EXPERTS,
    INDEXED,
    TOP_K,
    _loss,
    _model,
    _one_by_one,
    _tokens,
)

STARTS = [sum(DOCUMENTS[:i]) for i in range(len(DOCUMENTS))]
START_OF = torch.tensor(STARTS).repeat_interleave(torch.tensor(DOCUMENTS))


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
        meshes = meshes_of(context=dist.get_world_size())
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


def test_every_row_reads_the_tokens_that_the_model_alone_reads():
    by_rank = ranks.run(_compare_choices, world_size=3)
    for family in INDEXED:
        # 7 rows of two documents see more than k tokens, in three orders, in each full layer.
        assert sum(found[family] for found in by_rank) in (7 * 3, 7 * 3 * 2)


def _float32():
    """Relative errors of gradients in float32 against float64: over two ranks, and alone."""
    from primeblocks.parallel.adapters.transformers import parallelize

    meshes = meshes_of(context=2, expert=2)
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
        assert got < 2 * naive < 64 * torch.finfo(torch.float32).eps, (got, naive)


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

    meshes, model, whole = meshes_of(context=2), _model(family), _model(family)
    parallelize(model, meshes)
    with Float64():
        _split_imposed(model, meshes.context.get_group())
        return _distance(model, _alone_imposed(whole))


def test_attention_reads_what_a_hook_on_the_indexer_returns():
    for errors in ranks.run(each, _replaced, [("glm_moe_dsa",), ("deepseek_v32",)]):
        assert max(errors) < 1e-12


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
    meshes, model, kernel = meshes_of(context=2, expert=2), _model(family).float(), _Watched()
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


def test_mixed_precision_errs_no_more_than_bfloat16(full):
    families = INDEXED if full else ("glm_moe_dsa", "hy_v4")
    for found in ranks.run(each, _mixed_precision, [(family,) for family in families]):
        for family, (ours, naive) in zip(families, found, strict=True):
            # The lower bound: float32 throughout would err thousands of times less.
            assert naive / 10 < ours < 2 * naive < 0.2, (family, ours, naive)
