"""Losses and corrections of verl 0.9.1, read from two of its files: values and gradients.

It is not imported whole: the files are run with stubs for the packages whose names they import and
do not use here; sums with a mask are verl's own. Differences are a test of their own below.
"""

import importlib.util
import math
import sys
import types
from unittest import mock

import pytest
import torch

from primeblocks import losses
from primeblocks.losses import advantages, corrections, normalisation

from .loss_peers import BAND, draw, folder, functions, same, slope


class ActorConfig(types.SimpleNamespace):
    """Settings by verl's names."""

    def get(self, name, default=None):
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl():
    home = folder("verl")
    sums = functions(home / "utils" / "torch_functional.py", "masked_sum", "masked_mean")
    names = "omegaconf verl verl.protocol verl.trainer verl.trainer.config verl.utils verl.workers"
    names += " verl.trainer.config.algorithm verl.utils.import_utils verl.workers.config"
    names += " verl.workers.config.actor"
    stubs = {name: mock.MagicMock(name=name) for name in names.split()}
    stubs["omegaconf"].DictConfig = stubs["verl.trainer.config"].AlgoConfig = type("Other", (), {})
    stubs["verl.workers.config"].ActorConfig = ActorConfig
    stubs["verl.utils"].torch_functional = stubs["verl.utils.torch_functional"] = sums
    stubs["verl"].utils = stubs["verl.utils"]
    stubs["verl.utils.import_utils"].deprecated = lambda *_: lambda function: function
    modules = []
    with mock.patch.dict(sys.modules, stubs):
        for name in ("core_algos", "rollout_corr_helper"):
            spec = importlib.util.spec_from_file_location(
                name, home / "trainer" / "ppo" / f"{name}.py"
            )
            modules.append(importlib.util.module_from_spec(spec))
            spec.loader.exec_module(modules[-1])
    return types.SimpleNamespace(losses=modules[0], corrections=modules[1])


LIMITS = {"max_low": 0.05, "max_high": 0.07, "max_ratio": 1.6}
# By verl's name: our loss, our settings, theirs beyond the clips.
REGISTRY = {
    "vanilla": ("grpo_loss", BAND | {"max_ratio": 1.5}, {"clip_ratio_c": 1.5}),
    "dppo_tv": ("dppo_loss", LIMITS | {"divergence": "tv"}, {"clip_ratio_c": 1.6}),
    "dppo_kl": ("dppo_loss", LIMITS | {"divergence": "kl"}, {"clip_ratio_c": 1.6}),
    "gspo": ("gspo_loss", BAND, {}),
    "sapo": (
        "sapo_loss",
        {"temperature_positive": 1.0, "temperature_negative": 1.05},
        {"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    "gpg": ("cispo_loss", {"clip_low": 0, "clip_high": 0}, {}),
    "cispo": ("cispo_loss", BAND, {}),
    "dro": ("dro_loss", {"beta": 0.3}, {}),
}


def ask(verl, name, p, q, a, mask, weights, mode="token-sum", **settings):
    low, high = settings.pop("clips", (0.2, 0.28))
    config = ActorConfig(
        clip_ratio=0.2,
        clip_ratio_low=low,
        clip_ratio_high=high,
        global_batch_info={},
        policy_loss=types.SimpleNamespace(
            dro_beta=0.3, clip_cov_ratio=0.2, clip_cov_lb=0.05, clip_cov_ub=0.9,
            kl_cov_ratio=0.2, ppo_kl_coef=0.7,
        ),
        **settings,
    )  # fmt: skip
    function = verl.losses.get_policy_loss_fn(name)
    return function(q, p, a, mask, mode, config, weights)


@pytest.mark.parametrize("name", REGISTRY)
def test_verls_policy_losses(verl, name):
    loss, settings, theirs = REGISTRY[name]
    p, q, a, w, mask = draw()
    if name.startswith("dppo"):
        theirs = theirs | {"clips": (LIMITS["max_low"], LIMITS["max_high"])}
    want, metrics = ask(verl, name, p, q, a, mask, w, **theirs)
    found = getattr(losses, loss)(p, q, a, mask=mask, weights=w, **settings)
    if name == "sapo":  # Sequences alike, whatever it is told; lengths have 1e-8 added.
        weights = w * normalisation.length_weights(mask)
        found = losses.sapo_loss(p, q, a, mask=mask, weights=weights, **settings)
        same(normalisation.divide(found, by="sequences"), want, p, rel=3e-8)
        return
    # Of probabilities 1e-8 is added to: far below any bound here.
    same(found.sum, want, p)
    if name in ("dppo_tv", "dppo_kl", "gspo", "cispo"):
        assert found.clipped == pytest.approx(metrics["actor/pg_clipfrac"] * 21, rel=1e-6)
        assert 0 < found.clipped < 21


def test_verls_means(verl):
    p, q, a, w, mask = draw()
    one = losses.grpo_loss(p, q, a, mask=mask, weights=w, **BAND)
    short = w * normalisation.length_weights(mask)
    each = losses.grpo_loss(p, q, a, mask=mask, weights=short, **BAND)
    mine = {
        "token-mean": normalisation.divide(one),
        "seq-mean-token-sum": normalisation.divide(one, by="sequences"),
        "seq-mean-token-sum-norm": normalisation.divide(one, by=4 * 9),
        "seq-mean-token-mean": normalisation.divide(each, by="sequences"),
    }
    for mode, found in mine.items():
        want, _ = ask(verl, "vanilla", p, q, a, mask, w, mode=mode, clip_ratio_c=1e9)
        same(found, want, p, rel=3e-8 if mode == "seq-mean-token-mean" else 1e-12)


def test_verls_geometric_mean_is_ours_of_one_advantage_a_rollout(verl):
    p, q, a, _, mask = draw(by_rollout=True)
    want, _ = ask(verl, "geo_mean", p, q, a, mask, None, clips=(0.3, 0.4))
    weights = normalisation.length_weights(mask)
    found = losses.gmpo_loss(p, q, a, mask=mask, weights=weights, clip_low=0.3, clip_high=0.4)
    same(normalisation.divide(found, by="sequences"), want, p, rel=3e-8)


def test_verls_covariance_losses(verl):
    p, q, a, w, mask = draw()
    torch.manual_seed(3)  # Both draw from torch's own generator.
    want, _ = ask(verl, "clip_cov", p, q, a, mask, w)
    torch.manual_seed(3)
    chosen = corrections.clip_cov_mask(
        p, q, a, mask=mask, fraction=0.2, min_covariance=0.05, max_covariance=0.9, **BAND
    )
    assert chosen.masked == 4
    found = losses.grpo_loss(p, q, a, mask=mask, weights=w * chosen.weights, **BAND)
    same(found.sum, want, p)
    want, _ = ask(verl, "kl_cov", p, q, a, mask, w)
    tokens = corrections.kl_cov_tokens(p, a, mask=mask, fraction=0.2)
    free = losses.grpo_loss(p, q, a, mask=mask, weights=w, clip_low=1, clip_high=math.inf)
    far = losses.kl_loss(p, q, mask=tokens, weights=w, estimator="abs", gradient="estimator")
    same(free.sum + 0.7 * far.sum, want, p)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_verls_kl_terms(verl, estimator):
    p, q, _, _, mask = draw()
    for suffix, gradient in (("", "estimator"), ("+", "unbiased")):
        want = (verl.losses.kl_penalty(p, q, estimator + suffix) * mask).sum()
        same(losses.kl_loss(p, q, mask=mask, estimator=estimator, gradient=gradient).sum, want, p)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.3), (0.6, 1.4)])
def test_verls_corrections(verl, level, low, high):
    p, q, _, _, mask = draw()
    ratios = (p - q).detach() * mask
    want, metrics = verl.corrections.compute_rollout_correction_weights(
        ratios, mask.double(), level, f"{low}_{high}" if low else high
    )
    found = corrections.importance_weights(
        p, q, mask=mask, level=level, beyond="mask" if low else "truncate", min_ratio=low,
        max_ratio=high,
    )  # fmt: skip
    assert torch.allclose(found.weights, want, rtol=1e-12, atol=0)
    if level == "token":  # Theirs is a fraction, and counts tokens whatever the level.
        assert found.ess / 21 == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-7)


@pytest.mark.parametrize(("statistic", "bound"), [("k2", 0.095), ("k3", 0.09)])
@pytest.mark.parametrize("over", ["mean", "max"])
def test_verls_rejections(verl, statistic, bound, over):
    p, q, _, _, mask = draw()
    bound *= 2.6 if over == "max" else 1.0
    want, _ = verl.corrections.compute_rollout_rejection_mask(
        (p - q).detach() * mask, mask.double(), f"seq_{over}_{statistic}", bound
    )
    found = corrections.sequence_outlier_mask(
        p, q, mask=mask, statistic=statistic, bound=bound, over=over
    )
    assert torch.equal(found.weights, want.double())
    assert 0 < found.masked < 21


def test_verls_advantages(verl):
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.5], [0.2, 0.9, 0.2, 0.1]]).double()
    tokens, index = torch.ones(8, 1), [0] * 4 + [1] * 4
    ask_for = verl.losses.get_adv_estimator_fn
    want, _ = ask_for("rloo")(rewards.reshape(8, 1).clone(), tokens, index)
    found = advantages.leave_one_out_advantages(rewards)
    assert torch.allclose(found.flatten(), want[:, 0], rtol=1e-12)
    want, _ = ask_for("grpo")(
        rewards.reshape(8, 1).clone(), tokens, index, norm_adv_by_std_in_grpo=False
    )
    found = advantages.group_advantages(rewards, normalise=False)
    assert torch.allclose(found.flatten(), want[:, 0], rtol=1e-12, atol=1e-12)
    want, _ = ask_for("grpo")(rewards.reshape(8, 1).clone(), tokens, index)
    # Theirs divides by the deviation of a sample (n - 1), ours by that of the group (n).
    found = advantages.group_advantages(rewards, epsilon=0.0) * math.sqrt(3 / 4)
    assert torch.allclose(found.flatten(), want[:, 0], rtol=1e-5)


def test_where_verl_differs(verl):
    p, q, a, _, mask = draw(by_rollout=True)
    # 1. A row without a token counts as a sequence in geo_mean, and in no other mean.
    rows = [x.detach() for x in (p, q, a)]
    empty = torch.cat([mask, torch.zeros(1, 9, dtype=torch.bool)])
    more = [torch.cat([x, x[:1]]) for x in rows]
    alone, _ = ask(verl, "geo_mean", *rows, mask, None, clips=(0.3, 0.4))
    diluted, _ = ask(verl, "geo_mean", *more, empty, None, clips=(0.3, 0.4))
    assert diluted.item() == pytest.approx(alone.item() * 4 / 5, rel=1e-6)
    # 2. GSPO bounds log s by 10, ours by 20.
    far = (torch.full_like(rows[0], -1.0), torch.full_like(rows[0], -16.0), -a.abs())
    want, _ = ask(verl, "gspo", *far, mask, None)
    assert want.item() == pytest.approx(math.exp(10) * (a.abs() * mask).sum().item(), rel=1e-9)
    found = losses.gspo_loss(*far, mask=mask, **BAND).sum
    assert found.item() == pytest.approx(math.exp(15) * (a.abs() * mask).sum().item(), rel=1e-9)
    # 3. clip_cov, kl_cov and geo_mean bound no ratio: far ones are inf, and inf * 0 is NaN.
    huge = [x.float() for x in (torch.zeros_like(rows[0]) - 1, rows[1] - 100, rows[2].abs())]
    own = huge[0].requires_grad_()
    for name in ("clip_cov", "kl_cov"):
        value, _ = ask(verl, name, own, *huge[1:], mask, None)
        assert not slope(value, own).isfinite().all()
    assert slope(losses.grpo_loss(own, *huge[1:], mask=mask).sum, own).isfinite().all()
