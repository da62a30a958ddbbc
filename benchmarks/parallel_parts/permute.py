"""Rows to experts and back on one rank: ours against torchtitan's, in turn, and against a copy."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.testing._internal.distributed.fake_pg
from torch import Tensor

from primeblocks.parallel.experts import LocalDispatcher
from primeblocks.parallel.experts.permute import map_rows, permute
from primeblocks.testing.oracles import assert_as_precise, assert_same_bits, max_relative_error

from ..harness import Timing, compare
from .routing import EXPERTS, TOP_K, Batch, draw, exact, outputs_of_experts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's imports warn of its own dependencies.
    import torchtitan.tools.utils as titan_tools

    # It looks for a GPU when first imported, and cannot do without.
    titan_tools.device_type, titan_tools.device_module = "cpu", torch.cpu
    from torchtitan.models.common import token_dispatcher as titan

__all__ = ["figures"]

TOKENS = 4096
WARM_UPS = 3  # After so many the allocator has all the pages it needs.
# Of a result in the dtype, in units of its largest magnitude.
TOLERANCES = {torch.bfloat16: 2**-7, torch.float32: 2**-20}
Experts = Callable[[Tensor, Tensor], Tensor]


def figures() -> dict[str, tuple[float, str, str]]:
    found: dict[str, tuple[float, str, str]] = {}
    for short, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        ours, theirs = _against_torchtitan(dtype)
        prefix = f"parallel.moe_permute_combine.{short}"
        found[f"{prefix}.speedup_vs_torchtitan"] = (
            theirs.median / ours.median, "ratio", "torchtitan 0.3.0 LocalTokenDispatcher",
        )  # fmt: skip
        found[f"{prefix}.ms"] = (1e3 * ours.median, "ms", "")
        found[f"{prefix}.spread"] = (ours.spread, "ratio", "")
        found[f"{prefix}.torchtitan_spread"] = (theirs.spread, "ratio", "")
        gather, copy = _against_copy(dtype)
        name = "parallel.permute" if dtype == torch.bfloat16 else f"parallel.permute.{short}"
        found[f"{name}.copy_bandwidth_fraction"] = (
            copy.median / gather.median, "ratio", "torch copy_",
        )  # fmt: skip
    return found


def _against_torchtitan(dtype: torch.dtype) -> tuple[Timing, ...]:
    batch = draw(TOKENS, dtype, seed=0)

    def agree() -> None:
        for _ in range(WARM_UPS):
            ours, theirs = _ours(batch, outputs_of_experts), _theirs(batch, outputs_of_experts)
        for a, b, e in zip(ours, theirs, exact(batch), strict=True):
            for error in (max_relative_error(a, e), max_relative_error(b, e)):
                assert error <= TOLERANCES[dtype], f"the relative error is {error}"
            assert_as_precise(a, naive=b, exact=e)

    # The experts are left out: what they get, they return.
    return compare(lambda: _ours(batch, _same), lambda: _theirs(batch, _same), agree=agree)


def _ours(batch: Batch, experts: Experts) -> tuple[Tensor, ...]:
    dispatcher = LocalDispatcher()
    sent = dispatcher.dispatch(batch.x, batch.scores, batch.ids, num_experts=EXPERTS)
    out = dispatcher.combine(experts(sent.tokens, sent.counts), sent)
    return out, *torch.autograd.grad(out, (batch.x, batch.scores), batch.grad)


def _theirs(batch: Batch, experts: Experts) -> tuple[Tensor, ...]:
    dispatcher = titan.LocalTokenDispatcher(
        titan.LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    )
    # Its MoE layer counts by a one-hot histogram, which is slower; ours counts inside.
    counts = torch.bincount(batch.ids.flatten(), minlength=EXPERTS)
    rows, counts, sent = dispatcher.dispatch(batch.x, batch.scores, batch.ids, counts)
    out = dispatcher.combine(experts(rows, counts), sent, batch.x)
    return out, *torch.autograd.grad(out, (batch.x, batch.scores), batch.grad)


def _same(rows: Tensor, counts: Tensor) -> Tensor:
    return rows


def _against_copy(dtype: torch.dtype) -> tuple[Timing, ...]:
    """The gather of dispatch, and a plain copy of the rows that it makes."""
    batch = draw(TOKENS, dtype, seed=0)
    x = batch.x.detach()
    token = batch.ids.flatten().argsort(stable=True) // TOP_K
    row_map, rows = map_rows(token, tokens=TOKENS), x[token]
    target = torch.zeros_like(rows)

    def agree() -> None:
        assert_same_bits(permute(x, row_map), rows)
        assert_same_bits(target.copy_(rows), rows)

    return compare(lambda: permute(x, row_map), lambda: target.copy_(rows), agree=agree)
