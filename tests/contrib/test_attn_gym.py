"""attn_gym's kernels as an engine: its operators' arguments, and the calls it is kept from.

Results of its reference are in test_dsa_kernels.py, its selection in test_dsa_peers.py.
"""

import pytest
import torch

from primeblocks.errors import UnsupportedError
from primeblocks.parallel.attention.dsa import ReferenceKernel, Rows, SparseKernel
from primeblocks.testing.oracles import assert_close_float64
from tests.parallel.sparse_cases import CASES

pytest.importorskip("attn_gym", reason="attn_gym is not installed; scripts/peers does")
pytest.importorskip("triton", reason="its operators are defined beside kernels in Triton")
from primeblocks.contrib.adapters import attn_gym as adapter

KERNEL = adapter.AttnGymKernel()


def _operator(
    query, sparse_kv, local_kv, kv_indices, selected_queries, block_offsets, attention_sink,
    cu_seqlens, cu_seqlens_k, output, lse, grad_output, window, share_kv, scale,
):  # fmt: skip
    """What attn_gym::_gather_attn_bwd computes without a window and sinks, on any device."""
    assert (cu_seqlens, cu_seqlens_k, window, share_kv) == (None, None, 0, True)
    assert (attention_sink == -torch.inf).all()
    assert not local_kv.any()
    assert local_kv.shape[2:] == query.shape[2:]
    for x in (query, sparse_kv, output, grad_output, lse, kv_indices):
        assert x.is_contiguous()
    entries = sparse_kv.shape[2]
    found = torch.zeros(*kv_indices.shape[:2], entries + 1, dtype=torch.bool)
    seen = found.scatter_(2, kv_indices.long() % (entries + 1), True)[:, None, :, :entries]
    # The same selection, by rows: as many queries a row, the same ones.
    for batch, starts in enumerate(block_offsets.tolist()):
        for row in range(entries):
            some = selected_queries[batch, starts[row] : starts[row + 1]].sort().values
            assert torch.equal(some.long(), seen[batch, 0, :, row].nonzero()[:, 0])
    scores = (query @ sparse_kv.mT * scale).masked_fill(~seen, -torch.inf)
    weights = (scores - lse.to(query.dtype)[..., None]).exp().nan_to_num()
    delta = (grad_output * output).sum(-1, keepdim=True)
    slopes = weights * (grad_output @ sparse_kv.mT - delta) * scale
    of_rows = weights.mT @ grad_output + slopes.mT @ query
    sinks = torch.zeros_like(attention_sink)
    return slopes @ sparse_kv, of_rows.sum(1, keepdim=True), local_kv.clone(), sinks


@pytest.mark.parametrize("name", CASES)
def test_the_fused_backward_is_called_with_the_output_and_the_lse_as_they_are(monkeypatch, name):
    monkeypatch.setattr(adapter, "_check_fused", lambda *args: None)
    case = CASES[name]
    drawn = case.draw()
    q, kv, grad, ids = (drawn[x] for x in ("q", "kv", "grad", "indices"))
    how = {"rows": case.rows, "scale": case.scale}
    reference = ReferenceKernel()
    out, lse = reference.forward(q, kv, ids, **how)
    total = torch.logaddexp(lse, drawn["sinks"]).float()  # Its lse is float32.
    out = out * (lse - total).exp().unsqueeze(-1)
    view = adapter._View(q, kv, ids, case.rows)
    with torch.library._scoped_library("attn_gym", "IMPL") as library:
        import attn_gym.sparse.gather_attn.impl.triton.ops  # noqa: F401

        library.impl("_gather_attn_bwd", _operator, "CPU")
        dq, of_rows = adapter._fused_backward(
            view, grad, q, kv, ids, out, total, case.rows, case.scale
        )
    wanted = reference.backward(grad, q, kv, ids, out, total.double(), **how)
    assert_close_float64(view.take(dq, case.rows.key), wanted[0])
    columns = slice(view.first, view.stop)
    assert_close_float64(of_rows[:, 0].transpose(0, 1), wanted[1][..., columns])


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "k", "capability", "message"),
    [
        (torch.bfloat16, 64, 576, 16, (10, 0), "up to 512 columns; got 576"),
        (torch.bfloat16, 64, 512, 2048, (9, 0), r"9\.0, are unrolled.*k=2048"),
        (torch.bfloat16, 8, 512, 2048, (10, 0), "8 heads"),
        (torch.bfloat16, 64, 192, 2048, (10, 0), "192 columns"),
        (torch.float32, 64, 128, 2048, (10, 0), "float32"),
        (torch.float64, 64, 128, 16, (10, 0), "no float64"),
    ],
)
def test_calls_that_its_kernels_lack_are_refused_with_another_engine(
    monkeypatch, dtype, heads, width, k, capability, message
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = torch.empty(1, heads, width, dtype=dtype, device="meta")
    kv = torch.empty(4, 1, width, dtype=dtype, device="meta")
    ids = torch.empty(1, 1, k, dtype=torch.int32, device="meta")
    with pytest.raises(UnsupportedError, match=f"{message}.*TritonSparseKernel"):
        KERNEL.forward(q, kv, ids, rows=Rows((0, width), (0, width)), scale=1.0)


@pytest.mark.parametrize(
    ("heads", "width", "k", "capability"),
    [
        (64, 512, 2048, (10, 0)),
        (128, 128, 2048, (10, 3)),
        (16, 112, 99, (12, 0)),
        (4, 40, 32, (9, 0)),
    ],
)
def test_calls_that_its_kernels_have_are_not(monkeypatch, heads, width, k, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    adapter._check_fused(torch.empty(0, dtype=torch.bfloat16), heads, width, k)


def test_it_is_a_kernel():
    assert isinstance(KERNEL, SparseKernel)
