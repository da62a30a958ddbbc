"""A whole model with the Triton kernels of `exact`."""

import pytest
import torch

from primeblocks.exact import batch_invariant
from primeblocks.testing import tiny_models
from tests.exact.triton_cases import DEVICE, MARKS, kernels, multiply_tiles_in_order

pytest.importorskip("transformers")
# transformers imports torchao, which has such a text.
pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:invalid escape sequence")]


@pytest.fixture(autouse=True)
def _tiles_are_multiplied_in_order(monkeypatch):
    multiply_tiles_in_order(monkeypatch)


def logits(model, ids, **more):
    with torch.no_grad(), batch_invariant(kernels=kernels):
        return model(input_ids=ids, use_cache=False, **more).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_alone_in_a_batch_cut_and_padded(dtype):
    model = tiny_models.build("qwen3_moe", num_layers=2, dtype=dtype, hidden=64, init_std=0.2)
    ids = torch.randint(4, 512, (3, 12), generator=torch.Generator().manual_seed(1))
    model, ids = model.eval().to(DEVICE), ids.to(DEVICE)
    whole = logits(model, ids)
    assert torch.equal(logits(model, ids[1:2]), whole[1:2])
    assert torch.equal(logits(model, ids[2:, :7]), whole[2:, :7])
    padded = torch.nn.functional.pad(ids[:2, :7], (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids[:2, :7]), (5, 0))
    at = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, padded, attention_mask=mask, position_ids=at)
    assert torch.equal(found[:, 5:], whole[:2, :7])
    if dtype == "float32":  # In bfloat16 a router may choose other experts.
        model = model.double()
        model.set_experts_implementation("eager")  # torch has no grouped products of float64.
        wanted = model(input_ids=ids, use_cache=False).logits
        assert (whole - wanted).norm() <= 100 * torch.finfo().eps * wanted.norm()
