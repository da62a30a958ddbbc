"""The attention kernel of `exact`: the same bits for a query in any batch, and right results."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from primeblocks.errors import ShapeError, UnsupportedError
from tests.exact.triton_cases import (
    DEVICE,
    DTYPES,
    MARKS,
    UNIT,
    assert_within,
    drawn,
    kernels,
    multiply_tiles_in_order,
    rounding,
)

pytestmark = MARKS
SCALE = 0.3
KEYS = {"float32": 50, "bfloat16": 150, "float16": 150}  # three pages or four
# heads, groups, width of keys, width of values
SHAPES = [(4, 2, 32, 32), (3, 1, 72, 40), (2, 2, 16, 128), (2, 1, 256, 64)]


@pytest.fixture(autouse=True)
def _tiles_are_multiplied_in_order(monkeypatch):
    multiply_tiles_in_order(monkeypatch)
    with torch.device(DEVICE):
        yield


def operands(shape, dtype, *, seed=1, size=1.0):
    keys, (heads, groups, width, outs) = KEYS[dtype], shape
    shapes = (keys, heads, width), (keys, groups, width), (keys, groups, outs)
    drawn_ones = [drawn(*each, seed=seed + i) for i, each in enumerate(shapes)]
    return [(size * each).to(DTYPES[dtype]) for each in drawn_ones]


def run(query, key, value, positions):
    return kernels.attend(query, key, value, positions=positions, scale=SCALE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_is_computed_alone(dtype, shape):
    """Whole, in pieces, one by one, in another order, and beside other queries and keys."""
    query, key, value = operands(shape, dtype)
    keys = len(key)
    at = torch.arange(keys)
    whole = run(query, key, value, at)
    assert whole.dtype == query.dtype
    ends = [0, 31, 32, 33, keys - 2, keys]
    pieces = [run(query[a:b], key[:b], value[:b], at[a:b]) for a, b in pairwise(ends)]
    assert torch.equal(torch.cat(pieces), whole)
    order = torch.from_numpy(np.random.default_rng(3).permutation(keys))
    assert torch.equal(run(query[order], key, value, at[order]), whole[order])
    # Larger keys after the last that a query sees, and queries with larger scores in its tile.
    more, *after = operands(shape, dtype, seed=9, size=30.0)
    some, seen = slice(20, 41), slice(41)
    longer = [torch.cat([x[seen], y]) for x, y in zip((key, value), after, strict=True)]
    assert torch.equal(run(query[some], *longer, at[some]), whole[some])
    beside = torch.cat([more[:33], query[some], more])
    places = torch.cat([at.flip(0)[:33], at[some], at])
    assert torch.equal(run(beside, key, value, places)[33:54], whole[some])
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 50)) for x in (query[some], key, value)]
    place = torch.nn.functional.pad(at[some], (0, 50))
    assert torch.equal(run(*padded, place)[:21], whole[some])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_is_computed_alone(dtype):
    """Of a group or not, and at any strides."""
    query, key, value = operands((6, 2, 32, 48), dtype)
    at = torch.arange(len(key))
    whole = run(query, key, value, at)
    apart = run(query, *(x.repeat_interleave(3, 1) for x in (key, value)), at)
    assert torch.equal(apart, whole)
    for head in range(6):
        one = slice(head // 3, head // 3 + 1)
        found = run(query[:, head : head + 1], key[:, one], value[:, one], at)
        assert torch.equal(found, whole[:, head : head + 1])
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    assert torch.equal(run(*strided, at.int()), whole)


def limit(query, key, value, seen, wanted, dtype):
    """The largest error to first order, of operands in float64 `[heads, tokens, width]`."""
    scores = (SCALE * query @ key.mT).masked_fill(~seen, -torch.inf)
    left = (scores.amax(-1, keepdim=True) - scores).masked_fill(~seen, 0.0)
    added = SCALE * query.abs() @ key.abs().mT
    keys, width = key.shape[1:]
    # A score is off by a unit per product and sum, a rounded factor, and a rounded product.
    error = UNIT * (2 * width + 2) * added
    # Its exponential by three units of the last place, of 2 UNIT each, in each page, in which the
    # sum is scaled too. The differences of maxima add up to the difference that is rounded, and
    # which a GPU multiplies by a rounded logarithm.
    error += UNIT * (3 * left + 7 * (keys // 16 + 1))
    # A weight is rounded to the dtype, and it and the sum are added in the order of keys, by a
    # tensor core without the last bit.
    error += torch.finfo(dtype).eps / 2 + UNIT * 2 * (keys + 1)
    shares = scores.softmax(-1)
    off = (shares * error) @ value.abs()
    off += (shares * error).sum(-1, keepdim=True) * wanted.abs()
    info = torch.finfo(dtype)
    # The greatest weight is 1, so those that are subnormal are off by this at most in the result.
    return 1.1 * off + info.smallest_normal * info.eps * value.abs().sum(1, keepdim=True)


@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_right(dtype, shape, size):
    query, key, value = operands(shape, dtype, size=size)
    at = torch.from_numpy(np.random.default_rng(5).integers(0, KEYS[dtype], 40)).to(DEVICE)
    found = run(query[:40], key, value, at).transpose(0, 1)
    shared = shape[0] // shape[1]
    query, key, value = (x.double().transpose(0, 1) for x in (query[:40], key, value))
    key, value = (x.repeat_interleave(shared, 0) for x in (key, value))
    seen = torch.arange(KEYS[dtype]) <= at[:, None]
    scores = (SCALE * query @ key.mT).masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1) @ value
    most = limit(query, key, value, seen, wanted, DTYPES[dtype])
    assert_within(found, wanted, most + rounding(DTYPES[dtype], wanted))


def test_positions_after_the_last_key_and_no_queries():
    query, key, value = operands((2, 1, 16, 16), "float32")
    last = torch.full((len(key),), len(key) - 1)
    assert torch.equal(run(query, key, value, last + 100), run(query, key, value, last))
    assert run(query[:0], key, value, last[:0]).shape == (0, 2, 16)


def test_what_the_kernel_cannot_compute_is_refused():
    query, key, at = torch.ones(4, 6, 16), torch.ones(5, 2, 16), torch.arange(4)
    wide = torch.ones(4, 6, 257), torch.ones(5, 2, 257), key
    for odd, word in [
        (lambda: run(query, key, key[:4], at), r"value \[4, 2, 16\] of torch.float32 on"),
        (lambda: run(query, key, key, at[:3]), r"positions \[3\] of torch.int64"),
        (lambda: run(query, key, key.half(), at), "float16"),
        (lambda: run(query[..., :8], key, key, at), r"query \[4, 6, 8\]"),
        (lambda: run(query[:, :5], key, key, at), "5 heads and 5 keys in 2 groups"),
        (lambda: run(query, key[:0], key[:0], at), "at least one key"),
    ]:
        with pytest.raises(ShapeError, match=word):
            odd()
    for odd, word in [
        (lambda: run(*wide, at), "width 256 at most; got 257, 16"),
        (lambda: run(query.double(), key, key, at), "float64"),
        (lambda: run(query, key.clone().requires_grad_(), key, at), "no_grad"),
    ]:
        with pytest.raises(UnsupportedError, match=word):
            odd()
