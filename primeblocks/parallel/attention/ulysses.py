"""Attention over a split sequence: ranks exchange tokens for heads."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...groups import all_to_all_rows, outside_graphs
from ..sequence import SequencePlan, kept_on_plan
from .hops import Hops, attend
from .inputs import checked
from .kernel import AttentionKernel

__all__ = ["Heads", "ulysses_attention"]


@outside_graphs
def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: SequencePlan,
    group: dist.ProcessGroup,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: AttentionKernel | None = None,
    check: bool = True,
) -> Tensor:
    """Compute attention inside each document of a sequence that is split over `group`.

    Each rank sends all heads of its own tokens, and receives some heads of all tokens. `kernel`
    computes attention over the whole sequence in one call, and a second exchange returns the
    output. The number of heads need not be divisible by the number of ranks. If there are fewer key
    heads than ranks, a key head is sent to every rank whose query heads read the key head.
    Differentiable.

    The call is collective. It makes four all-to-alls: one each for q, k, v and the output. The
    backward makes an all-to-all for each of the four gradients. During the call, a rank stores all
    tokens of its heads.

    Arguments, result and errors are the same as for `ring_attention`.

    Source: arXiv:2309.14509.
    """
    given = checked(
        "ulysses_attention", q, k, v, sinks, sequence=sequence, group=group, causal=causal,
        scale=scale, window=window, softcap=softcap, kernel=kernel, check=check,
        whole=True,
    )  # fmt: skip
    q, k, v = given.q, given.k, given.v
    ranks, rank, heads = group.size(), group.rank(), q.shape[1]
    per_key = heads // k.shape[1]
    of_queries = [range(heads * r // ranks, heads * (r + 1) // ranks) for r in range(ranks)]
    of_keys = [_key_heads(part, per_key) for part in of_queries]
    far = Heads(sequence, group)
    # A rank receives only the key heads that its query heads read.
    q_, k_, v_ = (
        far.gather(x, parts) for x, parts in ((q, of_queries), (k, of_keys), (v, of_keys))
    )
    own = of_queries[rank]
    if k_.shape[1] and (len(own) % k_.shape[1] or _uneven(own, of_keys[rank], per_key)):
        index = torch.tensor([h // per_key - of_keys[rank].start for h in own], device=q.device)
        k_, v_ = k_.index_select(1, index), v_.index_select(1, index)
    mine = None if given.sinks is None else given.sinks[own.start : own.stop]
    out = attend(Hops(given.spec, given.kernel, 1, v.shape[2], None), mine, q_, k_, v_)
    return given.unfold(far.scatter(out, of_queries))


class Heads:
    """The exchange of tokens for heads, and back."""

    def __init__(self, sequence: SequencePlan, group: dist.ProcessGroup) -> None:
        self.sequence, self.group = sequence, group
        self.counts = sequence.counts
        self.own = self.counts[group.rank()]

    def gather(self, x: Tensor, parts: list[range]) -> Tensor:
        """Turn `[local_tokens, heads, dim]` into `[tokens, own heads, dim]`."""
        mine, dim = len(parts[self.group.rank()]), x.shape[2]
        rows = [x[:, part.start : part.stop].reshape(-1, dim) for part in parts]
        arrived = all_to_all_rows(
            torch.cat(rows),
            send_counts=[self.own * len(part) for part in parts],
            receive_counts=[count * mine for count in self.counts],
            group=self.group,
        )
        # Rows arrive rank after rank. Put them into the order of the sequence.
        order, _ = _orders(self.sequence, x.device)
        return arrived.view(self.sequence.tokens, mine, dim).index_select(0, order)

    def scatter(self, x: Tensor, parts: list[range]) -> Tensor:
        """Turn `[tokens, own heads, dim]` into `[local_tokens, heads, dim]`."""
        mine, dim = x.shape[1:]
        _, order = _orders(self.sequence, x.device)
        rows = x.index_select(0, order)
        arrived = all_to_all_rows(
            rows.reshape(-1, dim),
            send_counts=[count * mine for count in self.counts],
            receive_counts=[self.own * len(part) for part in parts],
            group=self.group,
        )
        each = arrived.split([self.own * len(part) for part in parts])
        return torch.cat(
            [rows.view(self.own, len(part), dim) for rows, part in zip(each, parts, strict=True)],
            dim=1,
        )


@kept_on_plan
def _orders(sequence: SequencePlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `row_of_token` and `token_of_row`. A copy in each layer would let the host wait."""
    return sequence.row_of_token.to(device), sequence.token_of_row.to(device)


def _key_heads(queries: range, per_key: int) -> range:
    if not queries:
        return range(0)
    return range(queries.start // per_key, (queries.stop - 1) // per_key + 1)


def _uneven(queries: range, keys: range, per_key: int) -> bool:
    """Return whether a kernel that assigns query heads evenly to key heads would pair wrongly."""
    each = len(queries) // len(keys)
    return any(h // per_key - keys.start != i // each for i, h in enumerate(queries))
