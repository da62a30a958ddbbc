"""Functions that plot the mismatch of engine and trainer.

Each function draws into an Axes and returns it. Without `axes`, the function makes an Axes. The
functions do not show or save figures, and do not change global settings.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import needs
from ..attribution import Attribution
from ..mismatch import Agreement

with needs("matplotlib", extra="plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_agreement", "plot_attribution", "plot_ratios", "plot_tokens"]


def plot_tokens(log_ratios: Mapping[str, torch.Tensor], *, axes: Axes | None = None) -> Axes:
    """Plot k3 of each token, the worst first, on a log scale.

    Usually a few tokens cause most of the k3.

    Args:
        log_ratios: for each label, the trainer's minus the engine's log-probabilities of the tokens
            that count.
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
    """Plot for each layer the fraction of tokens with the same experts in two recordings."""
    axes = _made(axes)
    axes.bar(list(agreement.by_layer), list(agreement.by_layer.values()))
    axes.set(title="Routes that agree", xlabel="layer", ylabel="fraction", ylim=(0, 1))
    return axes


def plot_attribution(attribution: Attribution, *, axes: Axes | None = None) -> Axes:
    """Plot each cause's share of the mismatch, with bars of 2 standard errors, and the residual."""
    axes = _made(axes)
    names = [cause.name for cause in attribution.causes] + ["residual"]
    shares = [cause.share for cause in attribution.causes] + [attribution.residual]
    errors = [2 * cause.standard_error for cause in attribution.causes] + [0.0]
    axes.barh(names, shares, xerr=errors)
    axes.invert_yaxis()
    axes.set(title=f"What explains k3 = {attribution.total:.1e}", xlabel="nats per token")
    return axes


def _made(axes: Axes | None) -> Axes:
    # Not pyplot: its figures are global and stay open.
    return Figure(layout="constrained").subplots() if axes is None else axes
