"""Selections of one model imposed on another, in transformers' own eager attention."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from primeblocks.contrib import index_replay as selections
from primeblocks.contrib.adapters.transformers import indexers
from primeblocks.errors import PlanError, ShapeError, UnsupportedError, UsageError
from primeblocks.testing import tiny_models

TOKENS, TOP_K = 48, 6
FAMILIES = ["glm_moe_dsa", "deepseek_v32"]


def _model(family="glm_moe_dsa", *, shared=False):
    model = tiny_models.build(
        family, dtype="float32", num_layers=3, num_experts=4, top_k=2, hidden=32, vocab=64
    )
    for indexer in indexers(model):
        indexer.module.index_topk = TOP_K
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 + (parameter.ndim == 1))
    return model.train()


def _tokens(rows=1):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(64, (rows, TOKENS), generator=generator)


def _other(model):
    """The same model, but for indexers with other weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for indexer in indexers(other):
            for parameter in indexer.module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return other


def _logits(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


def _gradients(model):
    return {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None and "indexer" not in name
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_an_imposed_model_selects_and_computes_as_the_engine(family):
    trainer, tokens = _model(family), _tokens(2)
    engine = _other(trainer)
    with selections.record(indexers(engine)) as tape:
        wanted = _logits(engine, tokens)
    loss = cross_entropy(wanted.flatten(0, 1), tokens.flatten())
    loss.backward()
    own = _logits(trainer, tokens)
    assert not torch.allclose(own, wanted)  # Otherwise the test would see nothing.
    sent = selections.Indices.unpack(bytes(tape.indices.pack()))
    assert sent.layer_ids == tuple(one.layer_id for one in indexers(trainer))
    with selections.impose(indexers(trainer), sent):
        found = _logits(trainer, tokens)
        cross_entropy(found.flatten(0, 1), tokens.flatten()).backward()
    assert torch.equal(found, wanted)
    theirs, ours = _gradients(engine), _gradients(trainer)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_missing_rows_select_for_themselves():
    trainer, tokens = _model(), _tokens()
    engine = _other(trainer)
    with selections.record(indexers(engine)) as tape, torch.no_grad():
        _logits(engine, tokens)
    half = tape.indices[:30].with_missing(after=TOKENS - 30)
    seen = []
    layer = indexers(trainer)[0]
    with selections.impose(indexers(trainer), half), torch.no_grad():
        handle = layer.module.register_forward_hook(lambda m, a, out: seen.append(out))
        _logits(trainer, tokens)
        handle.remove()
    with torch.no_grad():
        handle = layer.module.register_forward_hook(lambda m, a, out: seen.append(out))
        _logits(trainer, tokens)
        handle.remove()
    imposed, own = seen
    assert torch.equal(imposed[0, 30:, :TOP_K], own[0, 30:])
    for row, ids in zip(imposed[0, :30].tolist(), half.ids[:30, 0].tolist(), strict=True):
        assert set(row) == {i for i in ids if i >= 0}
    nothing = half.with_missing()[:0].with_missing(after=TOKENS)
    with selections.impose(indexers(trainer), nothing), torch.no_grad():
        assert torch.equal(_logits(trainer, tokens), _logits(trainer, tokens))


def test_checkpointing_recomputes_under_the_same_rows():
    trainer, tokens = _model(), _tokens()
    engine = _other(trainer)
    with selections.record(indexers(engine)) as tape:
        loss = cross_entropy(_logits(engine, tokens)[0], tokens[0])
    loss.backward()
    trainer.gradient_checkpointing_enable({"use_reentrant": False})
    with selections.impose(indexers(trainer), tape.indices):
        cross_entropy(_logits(trainer, tokens)[0], tokens[0]).backward()
    theirs, ours = _gradients(engine), _gradients(trainer)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)
    with selections.impose(indexers(trainer), tape.indices):
        loss = cross_entropy(_logits(trainer, tokens)[0], tokens[0])
    with pytest.raises(UsageError, match="recomputed after its impose context was closed"):
        loss.backward()
    cross_entropy(_logits(trainer, tokens)[0], tokens[0]).backward()  # The guard is gone.


def test_packed_documents_and_parts_of_them():
    """Ids inside documents become places in the packed sequence, for any part of the rows."""
    lengths, module = [5, 3, 8], torch.nn.Identity()
    starts = torch.tensor([0] * 5 + [5] * 3 + [8] * 8)
    positions = torch.cat([torch.arange(n) for n in lengths])

    class Plain:
        layer_id = 4

        def __init__(self):
            self.module = module

        def filled(self, ids):
            return ids

    packed = torch.stack([starts, starts + positions], 1)[None].to(torch.int32)
    packed[0, positions == 0, 1] = -1
    where = {"starts": starts, "positions": positions}
    with selections.record([Plain()], **where) as tape:
        module(packed)
    documents = tape.indices.split(lengths)
    assert documents[2].ids[3, 0].tolist() == [0, 3]
    order = torch.tensor([15, 2, 6])
    part = {name: x[order] for name, x in where.items()}
    with selections.impose([Plain()], tape.indices.take(order), **part):
        assert torch.equal(module(torch.zeros(1, 3, 1, dtype=torch.int32)), packed[:, order])
    with (
        pytest.raises(ShapeError, match="positions of the indices differ"),
        selections.impose([Plain()], tape.indices.take(order)),
    ):
        module(torch.zeros(1, 3, 1, dtype=torch.int32))


def test_what_does_not_fit_is_refused():
    trainer, tokens = _model(), _tokens()
    with selections.record(indexers(trainer)) as tape, torch.no_grad():
        _logits(trainer, tokens)
    good = tape.indices
    with pytest.raises(PlanError, match="recorded layers"):
        selections.impose(indexers(trainer)[:1], good).__enter__()
    with (
        pytest.raises(ShapeError, match=r"runs on 48 tokens, but the indices hold 40"),
        selections.impose(indexers(trainer), good[:40]),
    ):
        _logits(trainer, tokens)
    with (
        pytest.raises(UsageError, match="already under impose"),
        selections.impose(indexers(trainer), good),
        selections.impose(indexers(trainer), good),
    ):
        pass
    with pytest.raises(UsageError, match="never ran"), selections.impose(indexers(trainer), good):
        pass
    with pytest.raises(UsageError, match="belong together"):
        selections.record(indexers(trainer), positions=torch.arange(3)).__enter__()
    with pytest.raises(UsageError, match="list of indexers is empty"):
        selections.record([]).__enter__()
    with pytest.raises(UnsupportedError, match="has no indexer"):
        indexers(torch.nn.Linear(2, 2))
    with selections.record(indexers(trainer)) as tape, torch.no_grad():
        _logits(trainer, tokens)
        _logits(trainer, tokens.flip(1))
    with pytest.raises(UsageError, match="selected other ids"):
        _ = tape.indices
