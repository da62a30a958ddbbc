"""Pictures of the mismatch and of a run, one function each.

A function draws into an Axes and returns it. It makes an Axes if none is given. The functions show
and save nothing, and do not touch global settings. Pictures of a run take plain values of other
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import MissingPackageError
from ..attribution import Attribution
from ..mismatch import Agreement

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingPackageError("matplotlib", "plots") from error

__all__ = [
    "plot_agreement",
    "plot_attribution",
    "plot_metrics",
    "plot_ratios",
    "plot_staleness",
    "plot_tiers",
    "plot_tokens",
]


def plot_tokens(log_ratios: Mapping[str, torch.Tensor], *, axes: Axes | None = None) -> Axes:
    """Plot k3 of each token, the worst first, on a log scale. A few tokens cause most of it.

    Args:
        log_ratios: by label, trainer minus rollout log-probabilities of the tokens that count.
    """
    axes = _made(axes)
    for label, log_ratio in log_ratios.items():
        wide = log_ratio.detach().double().flatten().cpu()
        k3 = (torch.expm1(wide) - wide).sort(descending=True).values
        axes.semilogy(k3.clamp_min(1e-16).numpy(), label=label)
    axes.set(title="k3 of each token, the worst first", xlabel="token", ylabel="nats")
    axes.legend()
    return axes


def plot_ratios(log_ratios: Mapping[str, torch.Tensor], *, axes: Axes | None = None) -> Axes:
    """Plot a histogram of log p_trainer / p_rollout, with logarithmic counts to show its tails.

    Args:
        log_ratios: as for `plot_tokens`.
    """
    axes = _made(axes)
    for label, log_ratio in log_ratios.items():
        values = log_ratio.detach().double().flatten().cpu().numpy()
        axes.hist(values, bins=60, histtype="step", log=True, label=label)
    axes.set(title="Log of the importance ratio", xlabel="nats", ylabel="tokens")
    axes.legend()
    return axes


def plot_agreement(agreement: Agreement, *, axes: Axes | None = None) -> Axes:
    """Plot by layer how often the same experts were chosen."""
    axes = _made(axes)
    axes.bar(list(agreement.by_layer), list(agreement.by_layer.values()))
    axes.set(title="Routes that agree", xlabel="layer", ylabel="fraction", ylim=(0, 1))
    return axes


def plot_attribution(attribution: Attribution, *, axes: Axes | None = None) -> Axes:
    """Plot each cause's share of the mismatch with two standard errors, then the residual."""
    axes = _made(axes)
    names = [cause.name for cause in attribution.causes] + ["residual"]
    shares = [cause.share for cause in attribution.causes] + [attribution.residual]
    errors = [2 * cause.standard_error for cause in attribution.causes] + [0.0]
    axes.barh(names, shares, xerr=errors)
    axes.invert_yaxis()
    axes.set(title=f"What explains k3 = {attribution.total:.1e}", xlabel="nats per token")
    return axes


def plot_metrics(
    history: Sequence[Mapping[str, float]], *names: str, axes: Axes | None = None
) -> Axes:
    """Plot metrics over the steps of a run, such as "reward".

    Args:
        history: `Step.metrics_dict()` of each step.
        names: keys of it. A step without the key leaves a gap.
    """
    axes = _made(axes)
    steps = [metrics["training/global_step"] for metrics in history]
    for name in names:
        axes.plot(steps, [metrics.get(name, math.nan) for metrics in history], label=name)
    axes.set(xlabel="optimizer step")
    axes.legend()
    return axes


def plot_staleness(lags: Sequence[Mapping[int, int]], *, axes: Axes | None = None) -> Axes:
    """Plot for each step of a run the share of its tokens by age.

    Args:
        lags: `Step.lags` of each step.
    """
    axes = _made(axes)
    tokens = [sum(counts.values()) for counts in lags]
    ages = sorted({age for counts in lags for age in counts})
    shares = [
        [counts.get(age, 0) / max(total, 1) for counts, total in zip(lags, tokens, strict=True)]
        for age in ages
    ]
    axes.stackplot(range(1, len(lags) + 1), shares, labels=[f"age {age}" for age in ages])
    axes.set(title="Age of tokens", xlabel="optimizer step", ylabel="share", ylim=(0, 1))
    axes.legend()
    return axes


def plot_tiers(tiers: Mapping[str, Any], *, axes: Axes | None = None) -> Axes:
    """Plot what each tier of attention pages did: hits, misses, stores and evictions.

    Args:
        tiers: by name, what `TieredStore.statistics` returns, or `engine_statistics().tiers`.
    """
    axes = _made(axes)
    kinds = ("hits", "misses", "stores", "evictions")
    for index, (name, found) in enumerate(tiers.items()):
        counts = found if isinstance(found, Mapping) else vars(found)
        places = [place + index / (len(tiers) + 1) for place in range(len(kinds))]
        heights = [counts.get(kind, 0) for kind in kinds]
        axes.bar(places, heights, width=1 / (len(tiers) + 1), label=name)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(title="Tiers", ylabel="pages")
    axes.legend()
    return axes


def _made(axes: Axes | None) -> Axes:
    # Not pyplot: its figures are global and stay open.
    return Figure(layout="constrained").subplots() if axes is None else axes
