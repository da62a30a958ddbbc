"""Find the first module in which two computations of one model have different numbers."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..errors import UsageError

__all__ = ["Difference", "Trace", "first_difference"]


class _Event(NamedTuple):
    module: str
    side: Literal["input", "output"]
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The first difference between two traces.

    Attributes:
        module: the name of the module in the model.
        side: `"output"` if the module itself computed the differing numbers, in its code after its
            last submodule. `"input"` if the module's caller computed the differing numbers, after
            the event `after`.
        after: the last event in which both traces agree, such as
            `"model.layers.0.self_attn.v_proj output"`.
        rows: the number of compared rows that differ.
        of: the number of compared rows.
        largest: the largest difference between elements at the same position. NaN if shapes or
            dtypes differ.
    """

    module: str
    side: Literal["input", "output"]
    after: str
    rows: int
    of: int
    largest: float


class Trace:
    """Records the floating-point inputs and outputs of every module, until `stop`. Local.

    All recorded tensors are copied to host memory. A trace is also a context manager, which calls
    `stop` at the end.

    Args:
        model: the model to record. The trace changes the model only by hooks, which `stop` removes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.events: list[_Event] = []
        self._handles = []
        for name, module in model.named_modules():
            before, after = self._noting(name)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> "Trace":
        """Stop recording, and return this trace."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
        return self

    @property
    def tokens(self) -> int:
        """Number of tokens: the rows of the first output, which is usually the embedding."""
        found = (each.values for each in self.events if each.side == "output" and each.values)
        return next((len(_rows(next(iter(values.values())))) for values in found), 0)

    def _noting(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.events.append(_Event(name, "input", _tensors((args, kwargs))))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.events.append(_Event(name, "output", _tensors(output)))

        return before, after


def first_difference(one: Trace, other: Trace) -> Difference | None:
    """Return the first difference of two traces, in the order of the events of `one`. Local.

    If all common events agree, the function returns None. Each trace must contain one sequence. A
    row is a vector along the last dim. If one trace has fewer rows, such as a decode step, its rows
    are compared with the last rows of the other trace. A tensor is not
    compared if its numbers of rows differ, and one trace has more rows than tokens. An example is
    a tensor of rows that are sorted by expert.

    Raises:
        UsageError: the traces have no tensors to compare.
    """
    theirs: defaultdict[tuple[str, str], list[_Event]] = defaultdict(list)
    for each in reversed(other.events):
        theirs[each.module, each.side].append(each)
    after, compared = "the start", 0
    for mine in one.events:
        calls = theirs[mine.module, mine.side]
        if not calls:
            continue
        values = calls.pop().values
        for path in [path for path in mine.values if path in values]:
            rows, more = _rows(mine.values[path]), _rows(values[path])
            if len(rows) != len(more) and (len(rows) > one.tokens or len(more) > other.tokens):
                continue
            found, compared = _compare(rows, more), compared + 1
            if found is not None:
                return Difference(mine.module, mine.side, after, *found)
        after = f"{mine.module} {mine.side}"
    if not compared:
        raise UsageError(
            f"traces of {len(one.events)} and {len(other.events)} events have no numbers in "
            "common. Trace a forward pass in each, of models whose modules have the same names."
        )
    return None


def _tensors(values: Any) -> dict[str, Tensor]:
    found = tree_leaves_with_path(values)
    return {
        keystr(path): each.detach().to("cpu", copy=True)
        for path, each in found
        if isinstance(each, Tensor) and each.is_floating_point() and each.dim() and each.numel()
    }


def _rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _compare(rows: Tensor, more: Tensor) -> tuple[int, int, float] | None:
    """Return the number of differing rows, of all rows, and the largest difference, or None."""
    count = min(len(rows), len(more))
    if rows.shape[1] != more.shape[1] or rows.dtype != more.dtype:
        return count, count, torch.nan
    rows, more = rows[len(rows) - count :], more[len(more) - count :]
    differs = (rows != more) & ~(rows.isnan() & more.isnan())
    if not differs.any():
        return None
    largest = (rows[differs].double() - more[differs].double()).abs().max().item()
    return int(differs.any(1).sum()), count, largest
