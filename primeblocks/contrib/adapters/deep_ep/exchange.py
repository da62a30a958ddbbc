"""The dispatcher over either buffer: everything except the calls of DeepEP.

A dispatcher is open until `close`, which frees the buffer. Each send returns a handle of DeepEP
with the layout of its rows. Autograd keeps the handle for backward, where a sum sends rows back
along the same layout. One call runs at a time.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....errors import (
    ClosedError,
    PlanError,
    ShapeError,
    UnsupportedError,
    UsageError,
    check_counts,
)
from ....groups import agreed, check_group, check_tensors, facts_of
from ....parallel.experts.dispatcher import (
    Dispatched,
    align,
    check_outputs,
    check_slots,
    judge_slots,
    measure_slots,
    pad_rows,
    sort_slots,
    unalign,
)
from ....parallel.experts.permute import RowMap, map_rows, permute, unpermute

__all__ = [
    "MAX_TOP_K",
    "ROWS",
    "SCORES",
    "DeepEpBuffer",
    "DeepEpDispatcher",
    "Received",
    "check_sizes",
]

# The dtypes of rows that DeepEP sums, and of the weights that it carries.
ROWS, SCORES = torch.bfloat16, torch.float32
# A warp holds one choice per lane, in both versions.
MAX_TOP_K = 32
# Rows are copied in units of this many bytes.
_UNIT_BYTES = 16


class Received(NamedTuple):
    """The rows that arrive: one row for each token that chose an expert of this rank.

    Attributes:
        rows: `[rows, hidden]`.
        scores: `[rows, top_k]`, as sent. A score is undefined if its expert is on another rank.
        expert_ids: `[rows, top_k]`, local ids, with -1 if the expert is on another rank.
        counts: the number of choices of each local expert. The counts are on the host, because
            DeepEP has waited for them.
        handle: DeepEP's own handle, which remembers the layout.
    """

    rows: Tensor
    scores: Tensor
    expert_ids: Tensor
    counts: list[int]
    handle: Any


class DeepEpBuffer(Protocol):
    """One of DeepEP's buffers, which moves rows without gradients. Each call is collective."""

    def send(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> Received:
        """Send each token once to every rank that owns one of its experts."""
        ...

    def send_again(self, x: Tensor, handle: Any) -> Tensor:
        """Send rows to the ranks of an earlier `send`. Rows arrive in the order of that `send`."""
        ...

    def sum_back(
        self, rows: Tensor, scores: Tensor | None, handle: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Send rows back and sum the rows of each token. Also send each choice's score back."""
        ...

    def close(self) -> None:
        """Free the buffer."""
        ...


class _Sent(NamedTuple):
    handle: Any
    row_map: RowMap
    weights: Tensor
    places: Tensor | None
    tokens: int


class DeepEpDispatcher:
    """A `TokenDispatcher` for bfloat16 that sends tokens between ranks with DeepEP.

    Build a dispatcher with `elastic_dispatcher` or `buffer_dispatcher`. Any number of layers may
    use one dispatcher, but only one call may run at a time. Call `close()` to free the device
    memory. `dispatch`, `combine`, their backwards and `close` are collective.

    The backward of `dispatch` sums the gradients of each token's rows. The backward of `combine`
    sends gradients to the ranks to which `dispatch` sent the tokens. Both backwards use the layout
    in DeepEP's handle, which autograd keeps until backward.
    """

    def __init__(
        self,
        buffer: DeepEpBuffer,
        group: dist.ProcessGroup,
        *,
        hidden: int,
        top_k: int,
        max_tokens: int | None,
        alignment: int,
        check: bool,
    ) -> None:
        self.group, self.check, self.alignment = group, check, alignment
        self.hidden, self.top_k, self.max_tokens = hidden, top_k, max_tokens
        self._buffer: DeepEpBuffer | None = buffer

    def dispatch(
        self, x: Tensor, scores: Tensor, expert_ids: Tensor, *, num_experts: int
    ) -> Dispatched:
        """Send tokens to their experts, as `TokenDispatcher.dispatch` does. Collective.

        Raises:
            ShapeError, PlanError, RankError: as for `TokenDispatcher.dispatch`. ShapeError is also
                raised if a rank has more than `max_tokens` tokens or a token has more than `top_k`
                choices.
            UnsupportedError: `x` is not bfloat16, or a token chose an expert twice.
            ClosedError: the dispatcher was closed.
        """
        buffer = self._open()
        self._admit(x, scores, expert_ids, num_experts)
        tokens = x.shape[0]
        if tokens == 0:
            # DeepEP is not safe without tokens (sgl-project/sglang#25397), so send one to no rank.
            x, scores = F.pad(x, (0, 0, 0, 1)), F.pad(scores, (0, 0, 0, 1))
            expert_ids = F.pad(expert_ids.long(), (0, 0, 0, 1), value=-1)
        x, scores = x.contiguous(), scores.to(SCORES).contiguous()
        received = _Send.apply(x, scores, expert_ids, buffer, num_experts)
        rows, gates, ids, chosen, handle = received
        share = len(chosen)
        slots, counts = sort_slots(ids.masked_fill(ids < 0, share).flatten(), num_experts=share)
        slots = slots[: sum(chosen)]
        row_map = map_rows(slots // ids.shape[1], tokens=len(rows))
        arrived, places = permute(rows, row_map), None
        if self.alignment > 1:
            padded = pad_rows(counts, self.alignment)
            most = sum(-(-count // self.alignment) for count in chosen) * self.alignment
            arrived, places = align(arrived, counts, padded, rows=most)
            counts = padded
        weights = gates.flatten()[slots[row_map.rows]]
        return Dispatched(arrived, counts, _Sent(handle, row_map, weights, places, tokens))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the experts' results back, as `TokenDispatcher.combine` does. Collective.

        Raises:
            ShapeError: `y` does not have one row for each dispatched row.
            UnsupportedError: `y` is not bfloat16.
            ClosedError: the dispatcher was closed.
        """
        buffer = self._open()
        name = "DeepEpDispatcher.combine"
        with agreed(name, y, group=self.group, check=self.check) as call:
            check_outputs(y, dispatched)
            _check_rows("y", y, self.hidden)
            call.facts |= facts_of("y", y)
        handle, row_map, weights, places, tokens = dispatched.handle
        rows = unpermute(unalign(y, places), row_map, weights)
        out = _SumBack.apply(rows, buffer, handle)
        return out if tokens else out[:0]

    def close(self) -> None:
        """Free the buffer, after which backward cannot run. Collective. Call `close` once."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> DeepEpBuffer:
        if self._buffer is None:
            raise ClosedError("this DeepEpDispatcher was closed. Build a new one.")
        return self._buffer

    def _admit(self, x: Tensor, scores: Tensor, expert_ids: Tensor, num_experts: int) -> None:
        """Refuse arguments that DeepEP cannot take. Collective if `check`, else local."""
        name = "DeepEpDispatcher.dispatch"
        with agreed(name, x, scores, group=self.group, check=self.check) as call:
            check_tensors(x=x)
            _check_rows("x", x, self.hidden)
            check_slots(x, scores, expert_ids, num_experts=num_experts, values=False)
            self._check_room(x.shape[0], expert_ids.shape[1])
            if num_experts % self.group.size():
                raise PlanError(
                    f"{num_experts} experts cannot be shared equally by {self.group.size()} ranks. "
                    f"Plan with an expert degree that divides {num_experts}."
                )
            call.facts |= {"num_experts": num_experts, "top_k": expert_ids.shape[1]}
            call.facts |= {"hidden": self.hidden, "max_tokens": self.max_tokens or 0}
            call.facts |= facts_of("x", x) | facts_of("scores", scores)
            if self.check:
                measured = measure_slots(scores, expert_ids), _count_twice(expert_ids)
                call.numbers = torch.cat(measured)
                call.judge = lambda told: (
                    judge_slots(told, num_experts, scores.numel()) or _judge_distinct(told[3])
                )

    def _check_room(self, tokens: int, top_k: int) -> None:
        if self.max_tokens is not None and tokens > self.max_tokens:
            raise ShapeError(
                f"{tokens} tokens exceed max_tokens={self.max_tokens}. Raise max_tokens."
            )
        if not 1 <= top_k <= self.top_k:
            raise ShapeError(
                f"{top_k} choices per token; the buffer has room for 1 to {self.top_k}."
            )


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        buffer: DeepEpBuffer,
        num_experts: int,
    ) -> tuple[Any, ...]:
        received = buffer.send(x, scores, expert_ids, num_experts)
        ctx.buffer, ctx.handle = buffer, received.handle
        ctx.mark_non_differentiable(received.expert_ids)
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return *ctx.buffer.sum_back(grads[0], grads[1], ctx.handle), None, None, None


class _SumBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: DeepEpBuffer, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.sum_back(rows, None, handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return ctx.buffer.send_again(grads[0].contiguous(), ctx.handle), None, None


def check_sizes(group: dist.ProcessGroup, *, hidden: int, alignment: int) -> None:
    """Refuse sizes that neither of DeepEP's buffers supports. Local.

    Raises:
        ShapeError: `hidden` is not a positive multiple of 8.
        PlanError: this rank is not in the group, or the alignment is below 1.
    """
    if hidden < 1 or hidden * ROWS.itemsize % _UNIT_BYTES:
        raise ShapeError(
            f"DeepEP copies {_UNIT_BYTES} bytes at a time: hidden must be a multiple of "
            f"{_UNIT_BYTES // ROWS.itemsize}; got {hidden}."
        )
    check_group(group)
    check_counts(alignment=alignment)


def _check_rows(name: str, x: Tensor, hidden: int) -> None:
    if x.ndim != 2 or x.shape[1] != hidden:
        raise ShapeError(f"{name} must be [rows, {hidden}]; got {tuple(x.shape)}.")
    if x.dtype != ROWS:
        raise UnsupportedError(
            f"DeepEP sums rows of {ROWS}; {name} is {x.dtype}. Cast it, or use AllToAllDispatcher."
        )


def _count_twice(expert_ids: Tensor) -> Tensor:
    ids = expert_ids.sort(1).values
    return (ids[:, 1:] == ids[:, :-1]).sum()[None]


def _judge_distinct(twice: int) -> UsageError | None:
    if not twice:
        return None
    return UnsupportedError(
        "a token chose an expert twice, at which DeepEP's kernel aborts. Merge the choices, "
        "or use AllToAllDispatcher."
    )
