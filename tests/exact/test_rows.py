"""Operations one by one: the same bits in any batch, and right against float64."""

from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.exact import attend, batch_invariant, rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(found, exact):
    """The root mean square of the error, in units of the result's."""
    error = found.double() - exact.double()
    return (error.norm() / exact.double().norm()).item()


seeds = st.integers(0, 2**32 - 1)


@given(
    st.sampled_from(list(DTYPES)),
    *(st.integers(1, most) for most in (70, 300, 140)),
    st.booleans(),
    seeds,
)
def test_a_product_has_rows_of_its_own(dtype, count, inner, outer, transposed, seed):
    dtype = DTYPES[dtype]
    left = drawn(count, inner, seed=seed, dtype=dtype)
    right = drawn(outer, inner, seed=seed + 1, dtype=dtype)
    right = right.t() if transposed else right.t().contiguous()
    with batch_invariant():
        whole = left @ right
        order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
        assert torch.equal(left[order] @ right, whole[order])
        cut = seed % count
        assert torch.equal(torch.cat([left[:cut] @ right, left[cut:] @ right]), whole)
    # A product or sum is off by half a unit of what is added, and the result by half of its own.
    exact, added = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    most = 2 * inner * torch.finfo().eps * added + torch.finfo(dtype).eps * exact.abs()
    assert ((whole - exact).abs() <= most).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_narrow_products_have_rows_of_their_own(transposed):
    """MKL on an AMD EPYC adds by the place of a row where there are fewer than twelve columns."""
    for inner in (1, 2, 5, 10, 23, 64, 131):
        left = drawn(37, inner, seed=inner)
        for outer in range(18):
            right = drawn(outer, inner, seed=outer)
            right = right.t() if transposed else right.t().contiguous()
            with batch_invariant():
                whole = left @ right
                assert torch.equal(torch.cat([left[:5] @ right, left[5:] @ right]), whole)
            assert whole.shape == (37, outer)
            assert whole.is_contiguous()
            added = left.double().abs() @ right.double().abs()
            most = 2 * inner * torch.finfo().eps * added
            assert ((whole - left.double() @ right.double()).abs() <= most).all()


@given(st.integers(1, 300), st.integers(0, 80), st.sampled_from(list(DTYPES)), seeds)
def test_zeros_at_the_end_of_a_sum_change_nothing(size, more, dtype, seed):
    values = drawn(3, size, seed=seed, dtype=DTYPES[dtype])
    padded = torch.nn.functional.pad(values, (0, more))
    found = rows.total(values, dtype=torch.float32)
    assert torch.equal(rows.total(padded, dtype=torch.float32), found)
    assert torch.equal(rows.total(values[1:2], dtype=torch.float32), found[1:2])
    most = size * torch.finfo().eps * values.double().abs().sum(1)
    assert ((found - values.double().sum(1)).abs() <= most).all()


@pytest.mark.parametrize("dims", [(0,), (1,), (-1,), (0, 2), (2, 1), (0, 1, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_sums_and_means_have_the_shape_of_torchs(dims, keepdim):
    values = drawn(4, 5, 6, seed=1).double()
    for name in ("sum", "mean"):
        plain = getattr(torch, name)(values, dims, keepdim)
        with batch_invariant():
            found = getattr(torch, name)(values, dims, keepdim)
        assert found.shape == plain.shape
        assert torch.allclose(found, plain, rtol=1e-12, atol=1e-12)
    with batch_invariant():
        assert torch.allclose(values.sum(), values.view(-1).sum())
        assert values.int().sum().dtype == torch.int64
        assert values[:0].sum(0).tolist() == torch.zeros(5, 6).tolist()
        with pytest.raises(IndexError):
            values.sum(3)
        with pytest.raises(IndexError):
            values[0, 0, 0].mean(1)


@pytest.mark.parametrize("name", ["sum", "mean", "logsumexp"])
def test_a_number_is_its_own_sum_and_mean(name):
    value = torch.tensor(2.5, requires_grad=True)
    function = getattr(torch, name)
    with batch_invariant():
        found = [function(value, 0), function(value, -1, keepdim=True)]
        found += [] if name == "logsumexp" else [function(value)]
    assert value.is_leaf
    assert all(each is not value for each in found)
    assert [(each.shape, each.item()) for each in found] == [((), 2.5)] * len(found)
    assert torch.autograd.grad(sum(found), value)[0] == len(found)


def test_logsumexp_of_infinities_is_torchs():
    infinite = torch.inf
    values = torch.tensor(
        [[infinite, 1], [-infinite, 2], [infinite, -infinite], [-infinite] * 2, [infinite] * 2]
    )
    with batch_invariant():
        found = values.logsumexp(-1)
    assert found.tolist() == [infinite, 2, infinite, -infinite, infinite]


FUNCTIONS = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "softplus": torch.nn.functional.softplus,
    "cos": torch.cos,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "power": lambda x: x.abs().pow(1.7),
    "in place": lambda x: x.clone().tanh_(),
    "of two": lambda x: torch.atan2(x, x[..., :1]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_an_element_do_not_know_its_place(name, dtype):
    values = drawn(40, 97, seed=3, dtype=DTYPES[dtype])
    with batch_invariant():
        whole = FUNCTIONS[name](values)
        for row in (0, 7, 39):
            assert torch.equal(FUNCTIONS[name](values[row : row + 1].clone())[0], whole[row])
            assert torch.equal(
                FUNCTIONS[name](values[:, ::2])[row], FUNCTIONS[name](values[row, ::2])
            )
    exact = FUNCTIONS[name](values.double())
    assert off(whole, exact) <= 4 * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_by_row(name, dtype):
    function = getattr(torch, name)
    values = (8 * drawn(33, 301, seed=5)).to(DTYPES[dtype])
    values[4, 3:] = -torch.inf
    with batch_invariant():
        whole = function(values, -1)
        assert torch.equal(function(values[4:5], -1), whole[4:5])
        wide = torch.nn.functional.pad(values, (0, 40), value=-torch.inf)
        assert torch.equal(
            function(wide, -1)[..., :301] if whole.dim() > 1 else function(wide, -1), whole
        )
    exact = function(values.double(), -1)
    finite = exact.isfinite()
    assert torch.equal(whole.isfinite(), finite)
    assert off(whole[finite], exact[finite]) <= 4 * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmax_over_any_dim_has_the_shape_of_torchs(name, dim):
    values = drawn(3, 4, 5, seed=1).double()
    plain = getattr(torch, name)(values, dim)
    with batch_invariant():
        found = getattr(torch, name)(values, dim)
        assert torch.softmax(values[0, 0, 0], -1).tolist() == 1
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12, check_stride=True)


@given(
    st.integers(1, 70),
    st.integers(0, 70),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.data(),
)
def test_of_equal_elements_the_lowest_index_is_chosen(count, more, largest, dtype, data):
    """In any batch, at any size of a row, and at any dim."""
    values = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 3), min_size=count, max_size=count), min_size=1))
    ).to(dtype)
    k = data.draw(st.integers(0, count))
    with batch_invariant():
        found, at = values.topk(k, -1, largest=largest)
        turned = values.T.topk(k, 0, largest=largest)
        alone = values[-1].topk(k, largest=largest)
        worst = torch.nn.functional.pad(values, (0, more), value=-1 if largest else 9)
        padded = worst.topk(k, largest=largest)
    order = [
        sorted(range(count), key=lambda i: -row[i] if largest else row[i])
        for row in values.tolist()
    ]
    assert at.tolist() == [each[:k] for each in order]
    assert torch.equal(found, values.gather(-1, at))
    assert found.is_contiguous()
    for other in (turned[0].T, padded[0]):
        assert torch.equal(other, found)
    for other in (turned[1].T, padded[1]):
        assert torch.equal(other, at)
    assert torch.equal(alone[0], found[-1])
    assert torch.equal(alone[1], at[-1])


def test_the_first_elements_have_gradients_nans_first_and_refusals_of_torchs():
    values = torch.tensor([1.0, torch.nan, 1.0, 2.0], requires_grad=True)
    with batch_invariant():
        found, at = values.topk(3)
        assert [each.item() for each in torch.tensor(3.0).topk(1)] == [3, 0]
        with pytest.raises(RuntimeError):
            values.topk(5)
    assert at.tolist() == [1, 3, 0]
    found[1:].sum().backward()
    assert values.grad.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["rms", "fused rms", "layer"])
def test_norms_by_row(norm, dtype):
    values, weight = (drawn(n, 96, seed=n, dtype=DTYPES[dtype]) for n in (20, 1))
    functional = torch.nn.functional

    def run(x):
        if norm == "fused rms" and x.dtype == DTYPES[dtype]:  # A GPU calls this for an RMS norm.
            return torch.ops.aten._fused_rms_norm(x, [96], weight[0], 1e-6)[0]
        if norm != "layer":
            return functional.rms_norm(x, (96,), weight[0].to(x.dtype), 1e-6)
        return functional.layer_norm(x, (96,), weight[0].to(x.dtype), None, 1e-6)

    with batch_invariant():
        whole = run(values)
        assert torch.equal(run(values[6:7])[0], whole[6])
    assert off(whole, run(values.double())) <= 4 * torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weight", ["the same", torch.float32, None])
def test_gradients_of_layer_norms_are_as_close_as_torchs(dtype, of_weight):
    operands = [drawn(20, 96, seed=1, dtype=dtype)]
    if of_weight is not None:
        operands += [drawn(96, seed=2, dtype=dtype if of_weight == "the same" else of_weight)]

    def gradient(invariant, *operands):
        x, *weights = (each.clone().requires_grad_() for each in operands)
        with batch_invariant() if invariant else nullcontext():
            y = torch.nn.functional.layer_norm(x, (96,), *weights)
        return torch.autograd.grad(y.double().square().sum(), [x, *weights])

    exact = gradient(False, *(each.double() for each in operands))
    found, naive = gradient(True, *operands), gradient(False, *operands)
    for mine, torchs, right in zip(found, naive, exact, strict=True):
        assert mine.dtype == torchs.dtype
        assert off(mine, right) <= 2 * off(torchs, right) + torch.finfo().eps


def test_groups_of_rows_and_rows_of_no_group():
    left, right = drawn(50, 24, seed=1), drawn(4, 24, 16, seed=2)
    ends = torch.tensor([3, 3, 40, 45], dtype=torch.int32)
    with batch_invariant():
        found = torch._grouped_mm(left, right, offs=ends)
        for group, (start, end) in enumerate([(0, 3), (3, 3), (3, 40), (40, 45)]):
            assert torch.equal(found[start:end], left[start:end] @ right[group])


@given(
    st.integers(1, 300), st.integers(1, 2), st.integers(1, 3), st.sampled_from(list(DTYPES)), seeds
)
def test_attention_walks_alike_whole_in_pieces_and_one_by_one(keys, groups, shared, dtype, seed):
    dtype = DTYPES[dtype]
    query = drawn(keys, groups * shared, 16, seed=seed, dtype=dtype)
    key, value = (drawn(keys, groups, 16, seed=seed + n, dtype=dtype) for n in (1, 2))
    at = torch.arange(keys)
    whole = attend(query, key, value, positions=at, scale=0.25)
    cut = seed % keys + 1
    more = min(keys, cut + 40)
    ends = sorted({0, cut, *range(cut, more), more, keys})
    found = [
        attend(query[a:b], key[:b], value[:b], positions=at[a:b], scale=0.25)
        for a, b in pairwise(ends)
    ]
    assert torch.equal(torch.cat(found), whole)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(keys))
    mixed = attend(query[order], key, value, positions=at[order], scale=0.25)
    assert torch.equal(mixed, whole[order])
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (query, key, value)),
        is_causal=True, scale=0.25, enable_gqa=True,
    ).transpose(0, 1)  # fmt: skip
    assert off(whole, exact) <= 2 * torch.finfo(dtype).eps + 100 * torch.finfo().eps


@torch.library.custom_op("primeblocks_tests::foreign", mutates_args=())
def foreign(values: torch.Tensor) -> torch.Tensor:
    return values.softmax(0)


@pytest.mark.parametrize("shared", [1, 3])
def test_attention_that_cannot_be_is_refused(shared, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # As for a caller.
    query, key = torch.ones(4, 2 * shared, 8), torch.ones(6, 2, 8)
    at = torch.arange(4)
    call = partial(attend, scale=1.0)
    for odd, word in [
        (lambda: call(query, key, key[:5], positions=at), "6 keys in 2 groups and 5 values"),
        (lambda: call(query[:, 1:], key.repeat(1, 2, 1), key, positions=at), "heads"),
        (lambda: call(query, key, key, positions=at - 1), "-1 to 2"),
        (lambda: call(query, key, key, positions=at + 3), "3 to 6 for 6 keys"),
    ]:
        with pytest.raises(ShapeError, match=word):
            odd()
    assert call(query[:0], key, key, positions=at[:0]).shape == (0, 2 * shared, 8)


def test_a_sum_that_is_scaled_is_rounded_alike_everywhere():
    left, right = drawn(5, 97, seed=1), drawn(5, 97, seed=2)
    with batch_invariant():
        whole = torch.add(left, right, alpha=1.7)
        assert torch.equal(torch.add(left[3], right[3], alpha=1.7), whole[3])


def refused(function, *words):
    with pytest.raises(UnsupportedError) as error, batch_invariant():
        function()
    assert all(word in str(error.value) for word in words), error.value


def test_what_has_no_such_form_is_refused_by_name():
    x = torch.ones(2, 3, 4)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    four = torch.ones(1, 2, 4, 8)
    gap = torch.ones(4, 4, dtype=torch.bool)
    gap[:, 1] = False
    heads = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    heads[0, 1, :, 2:] = False
    refused(lambda: x @ x.mT, "a batch of products", "scaled_dot_product_attention")
    refused(lambda: torch.addmm(x[0], x[0, :, :3], x[0], alpha=2.0), "addmm", "2")
    refused(lambda: torch.conv1d(x, torch.ones(3, 3, 2)), "convolution")
    refused(lambda: torch.linalg.inv(x[:, :2, :2] + torch.eye(2)), "linalg")
    refused(lambda: sdpa(four, four, four, dropout_p=0.1), "dropout 0.1")
    refused(lambda: sdpa(four[0], four[0], four[0]), "(2, 4, 8)")
    refused(lambda: sdpa(four, four, four, attn_mask=gap), "gap")
    refused(lambda: sdpa(four, four, four, attn_mask=heads), "differs between heads")
    refused(lambda: sdpa(four, four, four, attn_mask=torch.full((4, 4), -0.5)), "added to scores")
    refused(lambda: sdpa(four, four, four, attn_mask=gap, is_causal=True), "one of them")
    refused(lambda: sdpa(four, four.expand(2, -1, -1, -1), four), "(2, 2, 4, 8)")
    refused(lambda: x.index_put((torch.zeros(2, dtype=torch.int64),), x, accumulate=True), "index")
    refused(lambda: foreign(x), "primeblocks_tests.foreign")
    refused(lambda: torch.exp(x, out=torch.empty_like(x)), "exp.out")
    refused(lambda: torch.ones(4, 4, device="meta") @ torch.ones(4, 4, device="meta"), "meta")
    assert (x @ x.mT).shape == (2, 3, 3)  # Outside all is as it was.


def test_a_processor_whose_products_depend_on_the_batch_is_refused(monkeypatch):
    plain = torch.mm

    def uneven(left, right):
        return plain(left, right) + torch.arange(len(left))[:, None]

    monkeypatch.setattr(rows.torch, "mm", uneven)
    monkeypatch.setattr(rows, "_proved", set())
    with pytest.raises(UnsupportedError, match="depends on the place of a row"):
        rows.matmul(torch.ones(3, 4), torch.ones(4, 5))
