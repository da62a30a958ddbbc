import importlib
import sys

import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st

from primeblocks.errors import MissingPackageError
from primeblocks.testing import strategies


@given(st.data())
def test_expert_ids_are_distinct_and_in_range(data):
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, num_experts))
    ids = data.draw(strategies.expert_ids(num_experts=num_experts, top_k=top_k))
    assert ids.shape[1] == top_k
    for row in ids.tolist():
        assert len(set(row)) == top_k
        assert set(row) <= set(range(num_experts))


def test_expert_ids_reach_every_expert_and_leave_some_out():
    ids = strategies.expert_ids(num_experts=4, top_k=2, tokens=st.just(8), dtype=torch.uint8)
    assert find(ids, lambda x: x.unique().numel() == 4).dtype == torch.uint8
    assert find(ids, lambda x: x.unique().numel() == 2).shape == (8, 2)


def test_edges_are_drawn():
    assert find(strategies.ragged_lengths(), lambda lengths: 0 in lengths and max(lengths) > 1)


@given(strategies.generators())
def test_generators_repeat(generator):
    first = torch.rand(2, generator=generator)
    again = torch.rand(2, generator=torch.Generator().manual_seed(generator.initial_seed()))
    assert torch.equal(first, again)


def test_without_hypothesis_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, strategies.__name__)
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[test\]'"):
        importlib.import_module(strategies.__name__)
