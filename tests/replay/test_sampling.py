"""What `kept_tokens` leaves, against vLLM's own truncation of the same logits."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.replay.sampling import kept_tokens

pytestmark = pytest.mark.vllm

VOCAB = 12


@pytest.fixture(scope="module")
def truncate():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports are deprecated in places
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    return apply_top_k_top_p_pytorch


@st.composite
def cases(draw):
    """Logits on a coarse grid, so that ties happen at every edge, and settings."""
    level = st.integers(-6, 6).map(lambda step: step / 2)
    rows = draw(st.lists(st.lists(level, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=4))
    return (
        torch.tensor(rows),
        draw(st.sampled_from([0.25, 0.7, 1.0, 1.7])),
        draw(st.integers(0, VOCAB)),
        draw(st.sampled_from([0.01, 0.3, 0.5, 0.8, 0.9, 0.999, 1.0])),
    )


def as_vllm(truncate, logits, temperature, top_k, top_p):
    """vLLM's order: temperature, top-k, top-p. It has a tensor for each setting that is on."""
    rows = len(logits)
    k = torch.full((rows,), top_k) if top_k else None
    p = torch.full((rows,), top_p) if top_p < 1 else None
    return truncate(logits.float() / temperature, k, p)


@given(case=cases())
def test_the_same_ids_are_kept(truncate, case):
    logits, temperature, top_k, top_p = case
    expected = as_vllm(truncate, *case).isfinite()
    kept = kept_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    found = torch.zeros_like(expected)
    for token, (begin, end) in enumerate(zip(kept.offsets[:-1], kept.offsets[1:], strict=True)):
        # No ids stand for no mask.
        found[token, kept.ids[begin:end].astype(np.int64) if end > begin else slice(None)] = True
    assert found.tolist() == expected.tolist()


def test_the_same_ids_are_kept_where_the_edge_falls_on_one(truncate):
    """Equally likely ids: with 10 of them, eight add up to 0.8 but for the last bit."""
    for ids in (4, 5, 10, 20):
        for percent in range(1, 100):
            case = torch.zeros(1, ids), 1.0, 0, percent / 100
            expected = as_vllm(truncate, *case).isfinite().sum().item()
            (found,) = kept_tokens(case[0], top_p=case[3]).counts.tolist()
            assert (found or ids) == expected, (ids, percent)
