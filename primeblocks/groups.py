"""Collectives that behave the same on gloo and NCCL.

On both backends, ranks may send tensors of every dtype of at most 8 bytes, and different numbers
of rows or no rows. `all_to_all_rows` is differentiable. The timeout of the process group bounds
every wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .errors import (
    CapacityError,
    PlanError,
    PrimeblocksError,
    RankError,
    ShapeError,
    UsageError,
)

__all__ = [
    "Call",
    "agreed",
    "all_gather_rows",
    "all_to_all_rows",
    "check_alike",
    "check_group",
    "check_tensors",
    "facts_of",
    "outside_graphs",
    "reduce_scatter_rows",
]

# Messages that ranks exchange after a disagreement have one size.
_TEXT_BYTES, _REASON_BYTES = 2048, 400

# torch 2.13 renamed both.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

P = ParamSpec("P")
R = TypeVar("R")


def all_to_all_rows(
    x: Tensor,
    *,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send consecutive rows to each rank, and return the received rows, ordered by sender.

    `x` may have any dtype of at most 8 bytes, and zero rows. Differentiable: backward sends
    gradients to the ranks that sent the rows. Collective, also in backward: either all ranks or no
    ranks run backward.

    Args:
        x: `[rows, ...]`. The trailing dims are equal on all ranks.
        send_counts: the number of rows for each rank of `group`. The counts add up to `rows`.
        receive_counts: the number of rows from each rank. The sender passes the same number in
            `send_counts`.

    Raises:
        ShapeError: a count is negative, or the counts do not match the number of ranks or the rows
            of `x`. The error is raised before rows are sent.
        PlanError: `group` is not a process group, or does not include this rank.
    """
    check_group(group)
    check_tensors(x=x)
    send, receive = list(send_counts), list(receive_counts)
    size = group.size()
    if len(send) != size or len(receive) != size:
        raise ShapeError(
            f"a group of {size} ranks needs {size} counts each way; "
            f"got {len(send)} to send and {len(receive)} to receive."
        )
    if min(*send, *receive) < 0 or sum(send) != x.shape[0]:
        raise ShapeError(f"send_counts {send} must add up to the {x.shape[0]} rows of x.")
    return _AllToAllRows.apply(x, send, receive, group)


def all_gather_rows(x: Tensor, *, rows: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the rows of all ranks in rank order, with zeros after each rank's rows. Collective.

    `x` may have any dtype of at most 8 bytes. Not differentiable.

    Args:
        x: `[own_rows, ...]`, with at most `rows` rows. The trailing dims are equal on all ranks.
        rows: the padded number of rows per rank, equal on all ranks.

    Returns:
        `[ranks * rows, ...]`.
    """
    assert x.shape[0] <= rows, (x.shape, rows)
    if x.shape[0] < rows:
        x = torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
    out = x.new_empty(group.size() * rows, *x.shape[1:])
    _gather_single(_bytes(out), _bytes(x.contiguous()), group=group)
    return out


def reduce_scatter_rows(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Sum `x` `[ranks * rows, ...]` over ranks and return this rank's `[rows, ...]`. Collective."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _scatter_single(out, x.contiguous(), group=group)
    return out


def check_group(group: object) -> None:
    """Raise PlanError unless `group` is a process group that includes this rank. Local."""
    if isinstance(group, dist.ProcessGroup) and group.rank() >= 0:
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup):
        raise PlanError("this rank is not in the group. Pass meshes.context.get_group().")
    remedy = "meshes.context.get_group(), or torch.distributed.group.WORLD for all ranks"
    if isinstance(group, DeviceMesh):
        remedy = "its get_group()"
    elif not dist.is_initialized():
        remedy = "one after torch.distributed.init_process_group"
    raise PlanError(f"group must be a process group; got {_shown(group)}. Pass {remedy}.")


def check_tensors(**operands: object) -> None:
    """Raise ShapeError if an operand is not a tensor. The message names the operand. Local."""
    for name, x in operands.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} must be a tensor; got {_shown(x)}.")


def check_alike(**operands: Tensor) -> None:
    """Raise ShapeError unless operands have one floating dtype and one device. Local."""
    *names, last = operands
    named = f"{', '.join(names)} and {last}"
    dtypes, devices = (
        [getattr(x, what) for x in operands.values()] for what in ("dtype", "device")
    )
    if len({*dtypes}) > 1 or not dtypes[0].is_floating_point:
        shown = ", ".join(map(str, dtypes))
        raise ShapeError(f"{named} need one floating dtype; got {shown}. Cast them.")
    if len({*devices}) > 1:
        raise ShapeError(f"{named} need one device; got {', '.join(map(str, devices))}. Move them.")


def facts_of(name: str, x: Tensor) -> dict[str, object]:
    """Return the facts about `x` for a comparison by `agreed`, without the number of rows. Local.

    One fact is whether `x` needs a gradient, because either all ranks or no ranks must run
    backward.
    """
    wanted = int(torch.is_grad_enabled() and x.requires_grad)
    sizes = {f"{name} dim {dim}": size for dim, size in enumerate(x.shape) if dim}
    return {
        **sizes,
        f"{name} dims": x.ndim,
        f"{name} dtype": x.dtype,
        f"{name} requires_grad": wanted,
    }


def _shown(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass
class Call:
    """The facts and numbers that a rank sends in `agreed`, and the numbers that all ranks sent.

    Attributes:
        facts: a dict of values that must be equal on all ranks, such as sizes and dtypes. Values
            are compared and shown as text.
        numbers: an int64 tensor `[count]` on the device, with at most 3 + 2 x ranks values. The
            gather of the facts also sends the numbers, so that the host waits only once.
        judge: a function that returns an error if the numbers of one rank are wrong, else None. The
            function must be the same on all ranks. The function must return None for zeros, because
            zeros stand for a rank that passes no numbers.
        told: the numbers of each rank, set at the end of the block. With `check=False` or without
            numbers, `told` stays empty.
    """

    facts: dict[str, object] = field(default_factory=dict)
    numbers: Tensor | None = None
    judge: Callable[[list[int]], UsageError | None] = lambda numbers: None
    told: list[list[int]] = field(default_factory=list)


@contextmanager
def agreed(
    name: str,
    *operands: object,
    group: dist.ProcessGroup,
    check: bool = True,
    device: torch.device | str | None = None,
) -> Iterator[Call]:
    """Check arguments in a `with` block. If one rank fails, all ranks fail. Collective if `check`:

        with agreed("ring_attention", q, group=group, check=check) as call:
            check_tensors(q=q)  # An error that one rank raises here is an error on every rank.
            call.facts |= facts_of("q", q)  # A difference between ranks is an error on every rank.

    Use `agreed` before a larger exchange. Without `agreed`, other ranks would wait in the exchange
    for a rank that raised an error. The cost is one gather of 40 + 16 x ranks bytes per rank. The
    bytes do not depend on the call, so that different calls can be compared. The host waits once,
    and reads 16 bytes per rank and the numbers. A group of one rank does not communicate.

    Args:
        name: name of the call. If ranks pass different names, all ranks raise an error.
        operands: operands of the call. Without `device`, the gather uses the device of the first
            tensor, which the backend of `group` must support.
        check: if False, ranks do not communicate, and each rank raises only its own error.

    Raises:
        UsageError, CapacityError: the block raised the error on this rank.
        RankError: another rank raised an error. The message repeats the error of the failed rank
            with the lowest number. Also raised if not all ranks made the call before the timeout
            of the group.
        PlanError: `group` is not a process group, or does not include this rank. Also raised if
            `name` or an entry of `call.facts` differs between ranks.
    """
    check_group(group)
    call, problem = Call(), None
    try:
        yield call
    except (CapacityError, UsageError) as error:
        if not check:
            raise
        problem = error
    if check:
        call.told = _agree(name, call, problem, group, device or _device_of(operands, group))


def _device_of(operands: Sequence[Any], group: dist.ProcessGroup) -> torch.device | str:
    """Return the device of the first tensor, but not the CPU if the group is of NCCL alone."""
    found = next((x.device for x in operands if isinstance(x, Tensor)), torch.device("cpu"))
    kinds = [each.type for each in group._device_types]
    return kinds[0] if found.type == "cpu" and kinds and "cpu" not in kinds else found


def _agree(
    name: str,
    call: Call,
    problem: PrimeblocksError | None,
    group: dist.ProcessGroup,
    device: torch.device | str,
) -> list[list[int]]:
    told = {"the call": name} | {fact: str(value) for fact, value in call.facts.items()}
    mine, text = call.numbers, json.dumps(told)
    if problem is None and len(text.encode()) > _TEXT_BYTES:
        problem = CapacityError(
            f"{name} compares at most {_TEXT_BYTES} bytes of arguments between ranks; got "
            f"{len(text.encode())} bytes. Shorten the names of arguments."
        )
    if problem is not None:
        mine, text = None, f"{type(problem).__name__}: {problem}"
    if group.size() == 1:
        rows = [] if mine is None else [mine.tolist()]
        problem = problem if mine is None else call.judge(rows[0])
        if problem is not None:
            raise problem
        return rows
    everyone = _gather(_head(text, problem, mine, group.size(), device), name, group)
    heads = everyone[:, : 2 if mine is None else 2 + len(mine)].tolist()
    rows = [] if mine is None else [head[2:] for head in heads]
    bad = [call.judge(row) for row in rows]
    if not any(bad) and all(head[:2] == [0, heads[0][1]] for head in heads):
        return rows
    if any(bad) and problem is None and (problem := bad[group.rank()]) is not None:
        text = f"{type(problem).__name__}: {problem}"
    raw = text.encode()[: _TEXT_BYTES if problem is None else _REASON_BYTES].ljust(_TEXT_BYTES)
    letters = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    texts = [
        bytes(x).decode(errors="replace").strip() for x in _gather(letters, name, group).tolist()
    ]
    if problem is not None:
        raise problem
    for rank, said in enumerate(texts):
        if not said.startswith("{"):
            raise RankError(f"rank {rank} of the group refused its arguments: {said}")
    by_rank: list[dict[str, str]] = [json.loads(said) for said in texts]
    for fact in dict.fromkeys(fact for each in by_rank for fact in each):
        values = [each.get(fact, "nothing") for each in by_rank]
        if len(set(values)) > 1:
            raise PlanError(
                f"{fact} must be equal on all ranks; by rank it is [{', '.join(values)}]."
            )
    raise AssertionError(texts)


def _head(
    text: str,
    problem: PrimeblocksError | None,
    mine: Tensor | None,
    ranks: int,
    device: torch.device | str,
) -> Tensor:
    """Return numbers of one size for all calls. Filled on the device: a copy would wait for it."""
    digest = xxhash.xxh3_64_intdigest(text.encode()) >> 1
    numbers = torch.zeros(5 + 2 * ranks, dtype=torch.int64, device=device)
    numbers[0].fill_(problem is not None)
    numbers[1].fill_(digest)
    if mine is not None:
        numbers[2 : 2 + len(mine)] = mine
    return numbers


def _gather(x: Tensor, name: str, group: dist.ProcessGroup) -> Tensor:
    everyone = x.new_empty(group.size(), len(x))
    try:
        _gather_single(everyone.view(-1), x, group=group)
    except RuntimeError as error:  # gloo and NCCL raise it at a timeout, or when a rank died.
        raise RankError(
            f"{name}: not all {group.size()} ranks of the group made this call, or one died. All "
            f"ranks must make the same calls, over the same group. {error}"
        ) from error
    return everyone


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile end its graph before a function and run the function uncompiled.

    A function that depends on plans and on counts from other ranks does not have one fixed graph.
    A function that depends on exact rounding would compute other values in a graph.
    With `fullgraph=True`, torch raises an error.
    """
    reason = f"{function.__qualname__} must run uncompiled. Compile without fullgraph."

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():  # Before anything is imported for it.
            return function(*args, **kwargs)
        return torch.compiler.disable(function, reason=reason)(*args, **kwargs)

    return call


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = (receive, send, group)
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(_bytes(out), _bytes(x.contiguous()), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _AllToAllRows.apply(grads[0], *ctx.way_back), None, None, None


# Maps the size of an element to a dtype that gloo can send. gloo refuses float8, int16 and uint32.
_SENT_AS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def _bytes(x: Tensor) -> Tensor:
    """View `x` in a dtype of the same size that gloo can send. Sums of such views are wrong."""
    known = x.is_floating_point() and x.dtype.itemsize > 1
    return x if known else x.view(_SENT_AS.get(x.dtype.itemsize, x.dtype))
