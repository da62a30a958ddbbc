"""Flash attention on packed sequences as the kernel of a hop, if the order of tokens allows it.

A hop is cut into segments, which are flash attention's sequences. The plan determines the segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UnsupportedError
from ..sequence import SequencePlan, kept_on_plan
from .kernel import AttentionSpec, Hop, seen_rows

__all__ = ["Segments", "VarlenKernel", "check_segments", "segments_of"]

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 256
# On "meta" torch computes only shapes, so a test can count launches.
_DEVICES = ("cuda", "meta")


class VarlenKernel:
    """An `AttentionKernel` that calls torch's flash attention on packed sequences.

    The kernel has run on one H100, where one process computed the share of one rank at a time.
    Forward and backward of a hop are one call each. The kernel cuts a hop into segments. A segment
    contains consecutive queries and all keys that these queries see. No key is in two segments. The
    order of tokens decides whether a hop has segments:

    - With `order="contiguous"`, every hop has segments.
    - With `order="zigzag"`, every hop has segments, unless the window exceeds tokens / ranks.
    - With `order="balanced"`, a hop seldom has segments.
    - In Ulysses attention, the single hop always has segments.

    Key heads are not repeated. The kernel works without compilation, and the host does not read
    from a GPU.

    The kernel calls the operators inside of `torch.nn.attention.varlen.varlen_attn` directly,
    because the backward operator accepts the output and the `lse` of all hops. In each hop, the
    gradients of keys are rounded to the dtype of q.

    Args:
        operators: for tests without a GPU, a forward and a backward to call instead of
            `torch.ops.aten._flash_attention_forward` and `_backward`. With `operators`, the kernel
            does not check devices, dtypes and widths.

    Raises:
        UnsupportedError: attention was called with a `softcap`, with a plan that has `parents`
            (documents fork), or with values and keys of different widths. Or a hop has no segments.
        UnsupportedError: attention was called with tensors that are not on a CUDA device, or whose
            dtype is neither bfloat16 nor float16.
        UnsupportedError: attention was called with a head_dim above 256, or one that is not a
            multiple of 8.

    Source: arXiv:2307.08691.
    """

    def __init__(
        self, *, operators: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    ) -> None:
        self.operators = operators

    def check(self, spec: AttentionSpec, q: Tensor, value_dim: int) -> None:
        """Raise UnsupportedError if a hop of any rank is not supported. Local.

        Each rank checks the hops of all ranks, so all ranks raise the error.
        """
        if spec.plan.parents is not None:
            raise UnsupportedError(
                "torch's flash attention has no mask for documents that fork. Use "
                "kernel=FlexKernel(), or pack whole rollouts."
            )
        if spec.softcap is not None:
            raise UnsupportedError(
                f"torch's flash attention does not support softcap; got {spec.softcap:g}. Use "
                "kernel=FlexKernel()."
            )
        if value_dim != q.shape[2]:
            raise UnsupportedError(
                f"flash attention needs values as wide as keys; got {value_dim} and "
                f"{q.shape[2]}. Use kernel=RectangleKernel(), or pad them with zeros."
            )
        if self.operators is None:
            _check_operators(q)
        check_segments(spec)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, hop: Hop) -> tuple[Tensor, Tensor]:
        self.check(hop.spec, q, v.shape[2])
        found, run = segments_of(hop, q.device), self.operators or _of_torch()
        out, lse, *_ = run[0](
            _taken(q, found.queries),
            _taken(k, found.keys),
            _taken(v, found.keys),
            *_sizes(found),
            False,
            **_mask(found, hop),
        )
        return (
            _placed(out, found.queries, len(q)),
            _placed(lse.transpose(0, 1), found.queries, len(q), -torch.inf),
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, hop: Hop
    ) -> tuple[Tensor, Tensor, Tensor]:
        found, run = segments_of(hop, q.device), self.operators or _of_torch()
        # Without dropout the random state is not read.
        random = torch.empty(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = run[1](
            _taken(grad, found.queries),
            _taken(q, found.queries),
            _taken(k, found.keys),
            _taken(v, found.keys),
            _taken(out, found.queries),
            # The kernel ignores the strides of the lse.
            _taken(lse, found.queries).transpose(0, 1).contiguous(),
            *_sizes(found),
            random,
            random.new_empty(0),
            **_mask(found, hop),
        )
        return (
            _placed(dq, found.queries, len(q)),
            _placed(dk, found.keys, len(k)),
            _placed(dv, found.keys, len(v)),
        )


def _of_torch() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


def _check_operators(q: Tensor) -> None:
    width = q.shape[2]
    if q.dtype not in _DTYPES:
        raise UnsupportedError(
            f"torch's flash attention takes bfloat16 and float16; got {q.dtype}. Cast, or use "
            "kernel=RectangleKernel()."
        )
    if width > _WIDEST or width % 8:
        raise UnsupportedError(
            "torch's flash attention needs a head_dim that is a multiple of 8, and at most "
            f"{_WIDEST}; got {width}. Pad with zeros and pass scale, or use "
            "kernel=RectangleKernel()."
        )
    # On ROCm torch 2.11 returns the lse in another layout.
    if q.device.type not in _DEVICES or torch.version.hip is not None:
        raise UnsupportedError(
            f"VarlenKernel needs CUDA; got a tensor on {q.device}. Use kernel=RectangleKernel()."
        )


def _sizes(found: Segments) -> tuple[Any, ...]:
    most = found.most_queries, found.most_keys
    return found.query_starts, found.key_starts, *most, 0.0, found.causal


def _mask(found: Segments, hop: Hop) -> dict[str, Any]:
    return {
        "scale": hop.spec.scale,
        "window_size_left": found.left,
        "window_size_right": found.right,
    }


def _taken(x: Tensor, rows: slice | Tensor) -> Tensor:
    part = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
    return part if part.ndim < 3 or part.stride(2) == 1 else part.contiguous()


def _placed(part: Tensor, rows: slice | Tensor, total: int, others: float = 0.0) -> Tensor:
    if len(part) == total:
        return part
    whole = part.new_full((total, *part.shape[1:]), others)
    if isinstance(rows, slice):
        whole[rows] = part
        return whole
    return whole.index_copy_(0, rows, part)


# Flash attention's value for no limit to the left or to the right.
_ALL = -1


class Segments(NamedTuple):
    """A hop as packed sequences: segments of queries, each with keys of its own.

    All segments have one mask, aligned to their last query and last key. With n queries and m keys,
    query i sees the keys from `i + m - n - left` to `i + m - n + right`. A `left` or `right` of -1
    means no limit.

    Attributes:
        queries, keys: rows that take part. Other queries see no key, and no query sees other keys.
        query_starts, key_starts: int32 `[segments + 1]`, the start of each segment among these
            rows, then the number of rows.
        most_queries, most_keys: the tokens of the longest segment. If a window limits only the
            keys to the left, `most_keys` is at least `most_queries`. The reason is that flash
            attention uses `most_keys` as the limit to the right.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    left: int
    right: int

    @property
    def causal(self) -> bool:
        return (self.left, self.right) == (_ALL, 0)


class _Cut(NamedTuple):
    """`Segments` on the host. `starts` are the first queries of segments, among `rows`."""

    rows: np.ndarray
    starts: np.ndarray
    first_keys: np.ndarray
    last_keys: np.ndarray
    left: int
    right: int


def segments_of(hop: Hop, device: torch.device) -> Segments:
    """Return the segments of one hop on the device, cached on the plan. Local.

    Some query of the hop must see a key.

    Raises:
        UnsupportedError: the hop cannot be cut into segments.
    """
    spec = hop.spec
    found = _of_hop(spec.plan, hop.query_rank, hop.key_rank, spec.causal, spec.window, device)
    if found is None:
        raise UnsupportedError(_refusal(spec, hop.query_rank, hop.key_rank))
    return found


def check_segments(spec: AttentionSpec) -> None:
    """Raise UnsupportedError if some hop of some rank has no segments. Local.

    The first call for a plan examines the hops of all ranks: ranks x tokens queries.
    """
    bad = _first_without(spec.plan, spec.causal, spec.window)
    if bad is not None:
        raise UnsupportedError(_refusal(spec, *bad))


def _cut_segments(first: np.ndarray, last: np.ndarray) -> _Cut | None:
    """Cut a hop into the fewest segments, from the rows of keys that each query sees. Pure.

    Some query must see a key. The function tries several kinds of segments. A kind fits if flash
    attention's mask gives each query exactly its keys. Returns None if no kind fits, or if some key
    would be in two segments.
    """
    rows = np.flatnonzero(first < last)
    low, high = first[rows], last[rows]
    found = [cut for cut in _candidates(rows, low, high) if _is_exact(cut, low, high)]
    return min(found, key=lambda cut: len(cut.starts), default=None)


def _candidates(rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[_Cut]:
    """Return a cut for each kind of segment. Queries that cannot share a segment are separated."""
    low_step, high_step, size = np.diff(low), np.diff(high), high - low
    stays, grows = high_step == 0, high_step == 1
    slides = low_step == 1
    found = [
        _cut(rows, low, high, stays & (low_step == 0), _ALL, _ALL),
        _cut(rows, low, high, grows & (low_step == 0), _ALL, 0),
    ]
    if (grows & slides).any():
        # A window is full while it slides. Both steps are also 1 after a document of 1 token.
        window = int(size[1:][grows & slides].max())
        same = grows & ((low_step == 0) | slides & (size[1:] == window))
        found.append(_cut(rows, low, high, same, window - 1, 0))
    if (stays & slides).any():  # A window that leaves the keys of an earlier rank behind.
        cut = _cut(rows, low, high, stays & ((low_step == 0) | slides), 0, _ALL)
        ends = np.append(cut.starts[1:], len(rows)) - 1
        slid = low[ends] > low[cut.starts]
        found.append(cut._replace(left=int(size[ends][slid][0]) - 1))
    return found


def _cut(
    rows: np.ndarray, low: np.ndarray, high: np.ndarray, same: np.ndarray, left: int, right: int
) -> _Cut:
    starts = np.flatnonzero(np.concatenate([[True], ~same]))
    ends = np.append(starts[1:], len(rows)) - 1
    return _Cut(rows, starts, low[starts], high[ends], left, right)


def _is_exact(cut: _Cut, low: np.ndarray, high: np.ndarray) -> bool:
    """Return whether no key is in two segments, and flash attention's mask is exact."""
    if (cut.first_keys[1:] < cut.last_keys[:-1]).any():
        return False
    queries = np.diff(np.append(cut.starts, len(cut.rows)))
    begin, end = (np.repeat(x, queries) for x in (cut.first_keys, cut.last_keys))
    # The last query is aligned to the last key.
    aligned = end - 1 - (np.repeat(cut.starts + queries, queries) - 1 - np.arange(len(low)))
    seen_low = begin if cut.left == _ALL else np.maximum(begin, aligned - cut.left)
    seen_high = end if cut.right == _ALL else np.minimum(end, aligned + cut.right + 1)
    return bool((seen_low == low).all() and (seen_high == high).all())


@kept_on_plan
def _first_without(plan: SequencePlan, causal: bool, window: int | None) -> tuple[int, int] | None:
    for query_rank in range(plan.ranks):
        for key_rank in range(plan.ranks):
            first, last = seen_rows(plan, query_rank, key_rank, causal, window)
            if (first < last).any() and _cut_segments(first, last) is None:
                return query_rank, key_rank
    return None


@kept_on_plan
def _of_hop(
    plan: SequencePlan,
    query_rank: int,
    key_rank: int,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> Segments | None:
    cut = _cut_segments(*seen_rows(plan, query_rank, key_rank, causal, window))
    if cut is None:
        return None
    queries = np.diff(np.append(cut.starts, len(cut.rows)))
    keys = cut.last_keys - cut.first_keys
    ends = np.cumsum(keys)
    key_rows = np.arange(ends[-1]) + np.repeat(cut.last_keys - ends, keys)
    most_queries, most_keys = int(queries.max()), int(keys.max())
    if cut.left != _ALL and cut.right == _ALL:
        most_keys = max(most_keys, most_queries)
    starts = np.concatenate([cut.starts, [len(cut.rows), 0], ends])
    moved = torch.from_numpy(starts.astype(np.int32)).to(device)
    query_starts, key_starts = moved.tensor_split(2)
    return Segments(
        queries=_neighbours(cut.rows, device),
        keys=_neighbours(key_rows, device),
        query_starts=query_starts,
        key_starts=key_starts,
        most_queries=most_queries,
        most_keys=most_keys,
        left=cut.left,
        right=cut.right,
    )


def _neighbours(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    start, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - start == len(rows):
        return slice(start, stop)
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def _refusal(spec: AttentionSpec, query_rank: int, key_rank: int) -> str:
    plan = spec.plan
    return (
        f"flash attention cannot take {plan.counts[query_rank]} queries of rank {query_rank} and "
        f"{plan.counts[key_rank]} keys of rank {key_rank} in one launch. In order={plan.order!r} "
        f"with window={spec.window}, the queries cannot be cut into segments that each have their "
        "own keys. Use kernel=FlexKernel(), or order='contiguous', which always allows such "
        "segments."
    )
