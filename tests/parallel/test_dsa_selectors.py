"""Selectors against the modules of transformers on one rank, and against plain loops."""

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from primeblocks.parallel import plan_sequence
from primeblocks.testing import ranks
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.dsa_models import HIDDEN, MODELS, Place, StableTopK, as_computed

ORDERS = ["balanced", "contiguous", "zigzag"]
# Of one token, shorter than a window and than k, cut by every order, empty; as long as a window.
PACKING = [11, 1, 3, 26, 0, 4, 9]


def _inputs(tokens, dtype, integers):
    generator = torch.Generator().manual_seed(tokens)
    if integers:
        hidden = torch.randint(-2, 3, (tokens, HIDDEN), generator=generator).to(dtype)
    else:
        hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    grad = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), grad.to(dtype)


def _split(name, lengths, order, dtype, integers, chunk_bytes):
    """This rank's indices, keys of all, output, and gradients of hidden states and parameters."""
    group = dist.group.WORLD
    plan = plan_sequence(lengths, ranks=group.size(), order=order, chunk_tokens=3)
    own = plan.indices(group.rank())
    hidden, grad = (x.detach()[own] for x in _inputs(plan.tokens, dtype, integers))
    with as_computed(dtype):
        model = MODELS[name](dtype, integers=integers)
        hidden.requires_grad_()
        out, indices, keys = model.split(
            hidden, sequence=plan, group=group, chunk_bytes=chunk_bytes
        )
        out.backward(grad)
    of_parameters = {}
    for parameter, x in model.attention.named_parameters():
        of_parameters[parameter] = torch.zeros_like(x) if x.grad is None else x.grad
        dist.all_reduce(of_parameters[parameter])
    return indices, keys, [out.detach(), hidden.grad], of_parameters


def _whole(name, lengths, dtype, integers):
    """The lists of all queries, output and gradients, document by document."""
    hidden, grad = _inputs(sum(lengths), dtype, integers)
    chosen, outs = [], []
    with as_computed(dtype), StableTopK():
        model = MODELS[name](dtype, integers=integers)
        starts = accumulate(lengths, initial=0)
        entries = accumulate((length // model.ratio for length in lengths), initial=0)
        for length, start, entry in zip(lengths, starts, entries, strict=False):
            if not length:
                continue
            found = []
            hook = model.chooser.register_forward_hook(lambda *x, into=found: into.append(x[2]))
            outs.append(model.whole(hidden[None, start : start + length])[0])
            hook.remove()
            chosen += model.ids(found[0], Place(start, entry, sum(lengths)))
        out = torch.cat(outs)
        out.backward(grad)
    of_parameters = {
        parameter: torch.zeros_like(x) if x.grad is None else x.grad
        for parameter, x in model.attention.named_parameters()
    }
    return chosen, [out.detach(), hidden.grad], of_parameters


def _listed(indices):
    """The ids of each row and group, which must be compact."""
    assert indices.dtype == torch.int32
    lists = [[[i for i in row if i >= 0] for row in rows] for rows in indices.tolist()]
    width = indices.shape[2]
    assert indices.tolist() == [[r + [-1] * (width - len(r)) for r in rows] for rows in lists]
    return lists


def _assert_equal_one_rank(found, name, lengths, order, dtype, integers):
    chosen, expected, of_parameters = _whole(name, lengths, dtype, integers)
    plan = plan_sequence(lengths, ranks=len(found), order=order, chunk_tokens=3)
    for rank, (indices, keys, results, ours) in enumerate(found):
        own = plan.indices(rank)
        assert _listed(indices) == [chosen[t] for t in own.tolist()]
        assert keys is None or torch.equal(keys, found[0][1])
        if integers:
            continue
        assert_close_float64(results, [x[own] for x in expected], tolerance=TOLERANCE)
        assert ours.keys() == of_parameters.keys()
        for parameter, x in ours.items():
            assert_close_float64(x, of_parameters[parameter], tolerance=TOLERANCE)


TOLERANCE = 1e-12


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_equal_to_transformers(name, world_size, order):
    for integers, dtype, chunk_bytes in (
        (False, torch.float64, 300),
        (True, torch.float32, 1 << 20),
    ):
        found = ranks.run(
            _split, name, PACKING, order, dtype, integers, chunk_bytes, world_size=world_size
        )
        _assert_equal_one_rank(found, name, PACKING, order, dtype, integers)
