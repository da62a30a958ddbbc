"""Causes of the mismatch, found by removing them, and their shares of the mismatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from ..errors import ShapeError, UsageError

__all__ = ["Attribution", "Cause", "attribute"]

Removed = frozenset[str]


@dataclass(frozen=True)
class Cause:
    """The part of one cause in the mismatch, in nats per token."""

    name: str
    share: float
    """The Shapley value: the drop of k3 when the cause is removed, averaged over all orders."""
    standard_error: float
    """The standard error of `share`, over tokens."""
    alone: float
    """The drop of k3 if only this cause is removed."""
    last: float
    """The drop of k3 if this cause is removed after all other causes."""


@dataclass(frozen=True)
class Attribution:
    """k3 of KL(rollout || trainer), split among causes.

    `total` is exactly `residual` plus the causes' shares. If a cause's `alone` and `last` differ
    much, the cause acts together with another cause. For instance, rounding changes routes, so
    these changes vanish if either rounding or routes are removed.
    """

    total: float
    residual: float
    """The k3 that remains when all causes are removed."""
    causes: tuple[Cause, ...]
    """The largest share first."""
    tokens: int
    evaluations: int

    @property
    def dominant(self) -> str | None:
        """The cause with the largest share, or None if no cause stands out.

        A cause stands out if its share exceeds two standard errors, and the residual.
        """
        first = self.causes[0]
        is_clear = first.share > 2 * first.standard_error and first.share > self.residual
        return first.name if is_clear else None

    def table(self) -> str:
        """Shares with their standard errors, and effects of removing each cause alone or last."""
        width = max(len("residual"), *(len(cause.name) for cause in self.causes))
        lines = [f"{'':{width}}  {'share':>9} {'+-':>8}  {'alone':>9} {'last':>9}  of total"]
        scale = self.total if self.total else math.nan
        for cause in self.causes:
            lines.append(
                f"{cause.name:{width}}  {cause.share:>9.2e} {cause.standard_error:>8.1e}"
                f"  {cause.alone:>9.2e} {cause.last:>9.2e}  {cause.share / scale:>7.1%}"
            )
        blank = " " * 30
        lines.append(
            f"{'residual':{width}}  {self.residual:>9.2e}{blank}  {self.residual / scale:>7.1%}"
        )
        lines.append(f"{'total':{width}}  {self.total:>9.2e}{blank}  {1:>7.1%}")
        return "\n".join(lines)


@torch.no_grad()
def attribute(
    evaluate: Callable[[Removed], torch.Tensor],
    rollout_logprobs: torch.Tensor,
    *,
    causes: Sequence[str],
    mask: torch.Tensor | None = None,
) -> Attribution:
    """Split the mismatch among causes that can be switched off one by one.

    A cause is a difference between trainer and engine, such as different routes, a different dtype
    or a different weight version. You choose the causes. `evaluate` computes the trainer's
    log-probabilities of the sampled tokens with some causes *removed*. If `"routes"` is removed,
    for example, the trainer uses the engine's routes. `evaluate(frozenset())` evaluates the
    unchanged trainer.

    The cost is `2 ** n` evaluations for n causes, each a forward of the trainer. Local.

    Args:
        evaluate: a function that takes the set of removed causes, and returns log-probabilities of
            the shape of `rollout_logprobs`.
        rollout_logprobs: the engine's log-probabilities of the sampled tokens, as a tensor of any
            shape.
        causes: the names of all causes that `evaluate` can remove. If `evaluate` tests another
            spelling of a name, the share of this cause is 0, without an error.
        mask: bool of the shape of `rollout_logprobs`, True for tokens that count.

    Raises:
        UsageError: `causes` is empty, repeats a name, or has more than 12 names. Also raised if a
            log-probability is not finite.
        ShapeError: the result of `evaluate` or the mask differs in shape from `rollout_logprobs`,
            or no token counts.

    Source: L. Shapley, "A value for n-person games" (1953).
    """
    names = tuple(causes)
    if not names or len(set(names)) != len(names):
        raise UsageError(f"causes must be distinct and not empty; got {names}")
    if len(names) > 12:
        raise UsageError(
            f"{len(names)} causes take {2 ** len(names)} evaluations. Remove several causes "
            "together, as one cause."
        )
    k3 = _Measured(evaluate, rollout_logprobs, mask)
    everything = frozenset(names)
    gains = {name: _shapley(k3, name, names) for name in names}
    nothing = k3(frozenset())
    found = [
        Cause(
            name=name,
            share=gains[name].mean().item(),
            standard_error=gains[name].std(correction=0).item() / len(nothing) ** 0.5,
            alone=(nothing - k3(frozenset([name]))).mean().item(),
            last=(k3(everything - {name}) - k3(everything)).mean().item(),
        )
        for name in names
    ]
    return Attribution(
        total=nothing.mean().item(),
        residual=k3(everything).mean().item(),
        causes=tuple(sorted(found, key=lambda cause: cause.share, reverse=True)),
        tokens=len(nothing),
        evaluations=k3.evaluations,
    )


class _Measured:
    """k3 of every token in float64, by the set of removed causes. Evaluates each set once."""

    def __init__(
        self,
        evaluate: Callable[[Removed], torch.Tensor],
        rollout: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        self._evaluate = evaluate
        self._shape = rollout.shape
        self._mask = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask.bool()
        if self._mask.shape != rollout.shape or not self._mask.any():
            raise ShapeError(
                f"mask needs the shape of the tokens, {list(rollout.shape)}, and must keep at least"
                f" one; got {list(self._mask.shape)}, {int(self._mask.sum())} kept"
            )
        self._rollout = rollout[self._mask].double()
        self._known: dict[Removed, torch.Tensor] = {}

    @property
    def evaluations(self) -> int:
        return len(self._known)

    def __call__(self, removed: Removed) -> torch.Tensor:
        if removed not in self._known:
            trainer = self._evaluate(removed)
            if trainer.shape != self._shape:
                raise ShapeError(
                    f"evaluate({sorted(removed)}) returned {list(trainer.shape)} for"
                    f" {list(self._shape)} tokens"
                )
            log_ratio = trainer.to(self._rollout)[self._mask] - self._rollout
            if not log_ratio.isfinite().all():
                raise UsageError(
                    f"with {sorted(removed)} removed a log-probability is not finite; mask the"
                    " token out"
                )
            self._known[removed] = torch.expm1(log_ratio) - log_ratio
        return self._known[removed]


def _shapley(k3: _Measured, name: str, names: tuple[str, ...]) -> torch.Tensor:
    """Return the drop of each token's k3 when `name` is removed, averaged over all orders."""
    others = [other for other in names if other != name]
    total = torch.zeros_like(k3(frozenset()))
    for size in range(len(names)):
        weight = 1 / (len(names) * math.comb(len(others), size))
        for chosen in combinations(others, size):
            before = frozenset(chosen)
            total += weight * (k3(before) - k3(before | {name}))
    return total
