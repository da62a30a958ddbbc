import pytest
import torch

from primeblocks.errors import PlanError
from primeblocks.layout import Layout, Shard
from primeblocks.weightsync.manifest import Manifest, TensorSpec
from tests.weightsync.reference import gather_whole, slice_again


def half(start):
    layout = Layout((4,), Shard((start,), (2,)))
    return Manifest((("a", TensorSpec(torch.float32, layout)),))


def test_gather_and_slice_are_inverse():
    sources, parts = [half(0), half(2)], [{"a": torch.ones(2)}, {"a": torch.full((2,), 5.0)}]
    whole = gather_whole(sources, parts, half(0).whole())
    assert whole["a"].tolist() == [1, 1, 5, 5]
    for source, part in zip(sources, parts, strict=True):
        assert slice_again(whole, source)["a"].tolist() == part["a"].tolist()


def test_what_nobody_holds_is_not_made_up():
    with pytest.raises(PlanError, match="2 of 4 elements of 'a' are missing"):
        gather_whole([half(0)], [{"a": torch.zeros(2)}], half(0).whole())
