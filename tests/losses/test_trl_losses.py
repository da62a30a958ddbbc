"""Losses and corrections of TRL 1.16, single methods of its trainers: values and gradients.

It is not imported: the methods are compiled out of their files, and their trainer is no more than
the attributes that they read. Differences are a test of their own below.
"""

import ast
import math
import types
from collections import defaultdict

import pytest
import torch

from primeblocks import losses
from primeblocks.losses import corrections, distillation, normalisation

from .loss_peers import BAND, draw, folder, functions, same, slope


@pytest.fixture(scope="module")
def trl():
    home = folder("trl")
    trainer = home / "trainer" / "grpo_trainer.py"
    known = {"nanmin": torch.min, "nanmax": torch.max}
    source = ast.parse(trainer.read_text())
    (correction,) = (
        node
        for node in ast.walk(source)
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "per_token_logps_diff" in ast.unparse(node)
    )
    divergence = functions(
        home / "experimental" / "iw_opd" / "iw_opd_trainer.py",
        *("_add_tail_bucket", "_jsd_divergence", "generalized_jsd_loss"),
        IWOPDTrainer=types.SimpleNamespace(_reduce_divergence_loss=lambda x, **_: x.sum(-1)),
    )
    return types.SimpleNamespace(
        grpo=functions(trainer, "_compute_loss", **known)._compute_loss,
        mask=functions(trainer, "get_off_policy_mask").get_off_policy_mask,
        gmpo=functions(
            home / "experimental" / "gmpo" / "gmpo_trainer.py", "_compute_loss", **known
        )._compute_loss,
        divergence=divergence.generalized_jsd_loss,
        correction=compile(ast.Module(correction.body, []), str(trainer), "exec"),
    )


def compute(method, p, q, a, mask, weights, *, reference=None, **settings):
    """The loss of a trainer that is no more than the attributes its method reads."""
    arguments = {
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "use_bias_correction_kl": False,
    }
    arguments |= {name: settings.pop(name) for name in [*arguments] if name in settings}
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(**arguments, steps_per_generation=1),
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x
        ),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        beta=0.0 if reference is None else 1.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        importance_sampling_level="token",
        max_completion_length=30,
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (p, torch.zeros_like(p), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    vars(trainer).update(settings)
    nobody = torch.zeros(len(p), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": nobody,
        "prompt_mask": nobody,
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": a[:, 0],
        "old_per_token_logps": q,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    return method(trainer, None, inputs)


# By TRL's loss: its settings, our loss and settings, and by what its sum is divided.
TRAINERS = {
    "grpo": ({}, "grpo_loss", BAND, "rollouts"),
    "bnpo": ({}, "grpo_loss", BAND, "tokens"),
    "dapo": ({}, "grpo_loss", BAND, "tokens"),
    "dapo, two-sided": ({"delta": 1.5}, "grpo_loss", BAND | {"max_ratio": 1.5}, "tokens"),
    "dr_grpo": ({}, "grpo_loss", BAND, 4 * 30),
    "grpo, sequences": ({"importance_sampling_level": "sequence"}, "gspo_loss", BAND, "rollouts"),
    # Its temperatures are float32: a number that float32 has.
    "sapo": (
        {"sapo_temperature_neg": 1.25},
        "sapo_loss",
        {"temperature_negative": 1.25},
        "rollouts",
    ),
    # Its epsilon_high is the bound itself, not what 1 is added to.
    "cispo": ({"epsilon_high": 1.3}, "cispo_loss", {"clip_high": 0.3}, "tokens"),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trls_losses(trl, name):
    theirs, loss, settings, by = TRAINERS[name]
    p, q, a, w, mask = draw(by_rollout=True)
    w = None if name == "grpo, sequences" else w  # Weights of tokens make it another loss.
    want = compute(trl.grpo, p, q, a, mask, w, loss_type=name.partition(",")[0], **theirs)
    weights = torch.ones_like(q) if w is None else w
    if by == "rollouts":
        weights, by = weights * normalisation.length_weights(mask), "sequences"
    found = getattr(losses, loss)(p, q, a, mask=mask, weights=weights, **settings)
    same(normalisation.divide(found, by=by), want, p)


def test_trls_geometric_mean_and_kl(trl):
    p, q, a, _, mask = draw(by_rollout=True)
    want = compute(trl.gmpo, p, q, a, mask, None, epsilon_low=0.3, epsilon_high=0.4)
    weights = normalisation.length_weights(mask)
    found = losses.gmpo_loss(p, q, a, mask=mask, weights=weights, clip_low=0.3, clip_high=0.4)
    same(normalisation.divide(found, by="sequences"), want, p)
    reference = q.flip(0)
    want = compute(trl.grpo, p, q, a, mask, None, loss_type="bnpo", reference=reference)
    found = normalisation.divide(losses.grpo_loss(p, q, a, mask=mask, **BAND))
    kl = losses.kl_loss(p, reference, mask=mask, gradient="estimator")  # k3, derived.
    same(found + normalisation.divide(kl), want, p)


@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
)
def test_trls_corrections(trl, mode):
    p, q, a, _, mask = draw()
    level, _, beyond = mode.partition("_")
    trainer = types.SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=0.7,
        vllm_importance_sampling_clip_max=1.4,
    )
    space = {"self": trainer, "torch": torch, "math": math, "tool_mask": None}
    space |= {"completion_mask": mask, "old_per_token_logps": p.detach()}
    exec(trl.correction, space | {"sampling_per_token_logps": q}, found := {})
    want = found["vllm_importance_sampling_ratio"].expand_as(q) * mask
    mine = corrections.importance_weights(
        p, q, mask=mask, level=level, beyond=beyond, min_ratio=0.7, max_ratio=1.4
    )
    assert torch.allclose(mine.weights, want, rtol=1e-12, atol=0)
    kept = trl.mask(a[:, :1], p, q, mask, 0.02)
    mine = corrections.sequence_outlier_mask(
        p, q, mask=mask, statistic="k1", bound=0.02, advantages=a[:, :1].expand_as(q).contiguous()
    )
    assert torch.equal(mine.weights, kept.expand_as(q) * mask.double())


@pytest.mark.parametrize("rest", ["bucket", "renormalise"])
def test_trls_distillation_on_the_students_top_words(trl, rest):
    generator = torch.Generator().manual_seed(1)
    logits, teacher = torch.randn(2, 3, 5, 11, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    kept = torch.rand(3, 5, generator=generator) < 0.7
    want = trl.divergence(logits, teacher, beta=1, top_k=4, add_tail=rest == "bucket")
    words = logits.topk(4).indices
    found = distillation.top_k_loss(
        logits.log_softmax(-1).gather(-1, words),
        teacher.log_softmax(-1).gather(-1, words),
        mask=kept,
        rest=rest,
    )
    same(found.sum, (want * kept).sum(), logits)


def test_where_trl_differs(trl):
    p, q, a, _, mask = draw(by_rollout=True)
    # 1. A ratio is bounded nowhere: beyond exp(88) in float32 its gradient is NaN.
    own, old, up = (p - 1).detach().float().requires_grad_(), (q - 100).float(), a.abs().float()
    theirs = slope(compute(trl.grpo, own, old, up, mask, None, loss_type="bnpo"), own)
    assert theirs.isnan().any()
    assert slope(losses.grpo_loss(own, old, up, mask=mask).sum, own).eq(0).all()
    # 2. A row without a token counts as a rollout in "grpo", where ours is no sequence.
    empty = mask & (torch.arange(4) != 1)[:, None]
    want = compute(trl.grpo, p, q, a, empty, None, loss_type="grpo")
    weights = normalisation.length_weights(empty)
    found = losses.grpo_loss(p, q, a, mask=empty, weights=weights, **BAND)
    assert found.sequences == 3
    same(normalisation.divide(found, by=4), want, p)
    # 3. The correction of its KL has a gradient of its own: through the ratio, where ours has none.
    reference = q.flip(0)
    terms = {"loss_type": "bnpo", "reference": reference, "use_bias_correction_kl": True}
    want = compute(trl.grpo, p, q, 0 * a, mask, None, **terms)
    ratio = corrections.importance_weights(p, q, mask=mask, max_ratio=math.inf).weights
    found = losses.kl_loss(p, reference, mask=mask, gradient="estimator", weights=ratio)
    mine = normalisation.divide(found)
    assert mine.item() == pytest.approx(want.item(), rel=1e-12)
    assert not torch.allclose(slope(mine, p), slope(want, p), rtol=1e-3)
