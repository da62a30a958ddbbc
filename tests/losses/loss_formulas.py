"""Losses as their papers write them: plain loops over tokens, numbers for what has no gradient.

A sequence is a list of tokens (p, q, a, w): the trainer's log-probability, a float64 scalar whose
gradient is asked for, and numbers: the engine's, the advantage, the weight.
"""

import math

import torch

SETTINGS = {
    "grpo": ("grpo_loss", {"clip_low": 0.2, "clip_high": 0.3}),
    "dual clip": ("grpo_loss", {"clip_low": 0.2, "clip_high": 0.28, "max_ratio": 1.5}),
    "stable-reinforce": ("grpo_loss", {"min_ratio": 0.6, "max_ratio": 1.9}),
    "unclipped": ("grpo_loss", {"clip_low": 1, "clip_high": math.inf}),
    "cispo": ("cispo_loss", {"clip_low": 0.1, "clip_high": 0.3}),
    "aipo": ("aipo_loss", {"max_ratio": 1.5}),
    "sapo": ("sapo_loss", {"temperature_positive": 1.2, "temperature_negative": 1.7}),
    "dppo tv": ("dppo_loss", {"divergence": "tv", "max_low": 0.04, "max_high": 0.06}),
    "dppo kl": ("dppo_loss", {"divergence": "kl", "max_low": 0.02, "max_high": 0.04}),
    "dro": ("dro_loss", {"beta": 0.7}),
    "gspo": ("gspo_loss", {"clip_low": 0.04, "clip_high": 0.06}),
    "gmpo": ("gmpo_loss", {"clip_low": 0.3, "clip_high": 0.4}),
    "gmpo clips all": ("gmpo_loss", {"clip_low": 0.0, "clip_high": 0.0}),
}
DIRECTIONS = ("reverse", "forward")
KLS = {
    f"{estimator} {direction} {gradient}": ("kl_loss", {
        "estimator": estimator, "direction": direction, "gradient": gradient,
    })
    for estimator in ("k1", "k2", "k3", "abs")
    for direction in DIRECTIONS
    for gradient in ("unbiased", "estimator")
    if (estimator, gradient) != ("abs", "unbiased")
}  # fmt: skip


def expected(loss, settings, sequence):
    """Losses of a sequence's tokens, each with whether it was clipped."""
    rule = {"kl_loss": _kl, "gspo_loss": _gspo, "gmpo_loss": _gmpo}.get(loss)
    if rule is not None:
        found = rule(sequence, **settings)
    else:
        found = [TOKENS[loss](p, q, a, **settings) for p, q, a, _ in sequence]
    return [(w * x, clipped) for (x, clipped), (*_, w) in zip(found, sequence, strict=True)]


def _number(x):
    return torch.tensor(x, dtype=torch.float64)


def _grpo(p, q, a, *, clip_low=0.2, clip_high=0.2, min_ratio=0.0, max_ratio=math.inf):
    ratio = (p - q).exp()
    if a > 0 and ratio > 1 + clip_high:
        return _number(-(1 + clip_high) * a), True
    if a < 0 and ratio < 1 - clip_low:
        return _number(-(1 - clip_low) * a), True
    if ratio > max_ratio:
        return _number(-max_ratio * a), True
    if ratio < min_ratio:
        return _number(-min_ratio * a), True
    return -ratio * a, False


def _cispo(p, q, a, *, clip_low, clip_high):
    ratio = math.exp(p.item() - q)
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    return -bounded * a * p, bounded != ratio


def _aipo(p, q, a, *, max_ratio):
    ratio = math.exp(p.item() - q)
    return -min(ratio, max_ratio) * a * p, ratio > max_ratio


def _sapo(p, q, a, *, temperature_positive, temperature_negative):
    tau = temperature_positive if a > 0 else temperature_negative
    return -4 / tau / (1 + (-tau * ((p - q).exp() - 1)).exp()) * a, False


def _dppo(p, q, a, *, divergence, max_low, max_high):
    now, then = math.exp(p.item()), math.exp(q)
    if divergence == "tv":
        moved = abs(now - then)
    else:
        moved = then * math.log(then / now) + (1 - then) * math.log((1 - then) / (1 - now))
    away = now > then if a > 0 else now < then
    if away and moved > (max_high if a > 0 else max_low):
        return 0 * p, True
    return -min(now / then, 20.0) * a * p, False


def _dro(p, q, a, *, beta):
    return -(a * p - beta / 2 * (p - q) ** 2), False


TOKENS = {
    "grpo_loss": _grpo,
    "cispo_loss": _cispo,
    "aipo_loss": _aipo,
    "sapo_loss": _sapo,
    "dppo_loss": _dppo,
    "dro_loss": _dro,
}


def _gspo(sequence, *, clip_low, clip_high):
    mean = sum(p.item() - q for p, q, *_ in sequence) / max(len(sequence), 1)
    found = []
    for p, _, a, _ in sequence:
        ratio = math.exp(mean) * (p - p.item()).exp()
        bounded = min(max(ratio.item(), 1 - clip_low), 1 + clip_high)
        stopped = bounded * a < ratio.item() * a
        found.append((_number(-bounded * a) if stopped else -ratio * a, stopped))
    return found


def _gmpo(sequence, *, clip_low, clip_high):
    logs = []
    for p, q, a, _ in sequence:
        stopped = p.item() - q > clip_high if a > 0 else p.item() - q < -clip_low
        bound = clip_high if a > 0 else -clip_low
        logs.append((_number(bound) if stopped else p - q, stopped))
    mean = sum(x.item() for x, _ in logs) / max(len(logs), 1)
    return [
        (-a * math.exp(mean) * (x - x.item()).exp(), stopped)
        for (x, stopped), (_, _, a, _) in zip(logs, sequence, strict=True)
    ]


def _kl(sequence, *, estimator, direction, gradient):
    found = []
    for p, q, *_ in sequence:
        u, forward = (q - p).exp(), direction == "forward"
        value = {
            "k1": u * (q - p) if forward else p - q,
            "k2": (p - q) ** 2 / 2,
            "k3": u * (q - p) - (u - 1) if forward else (u - 1) - (q - p),
            "abs": abs(p - q),
        }[estimator]
        if gradient == "unbiased":
            slope = 1 - u.item() if forward else p.item() - q
            value = value.item() + slope * (p - p.item())
        found.append((value, False))
    return found
