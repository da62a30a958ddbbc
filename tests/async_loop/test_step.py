"""The numbers of a step, as loggers get them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from primeblocks.async_loop import Group, Rollout, Step


def rollout(versions, **more):
    """A prompt of two tokens, and one sampled token for each version."""
    ends = {"prompt_length": 2, "finish_reason": "stop"} | more
    tokens, logprobs = np.full(2 + len(versions), 5), np.full(len(versions), -1.0)
    return Rollout(tokens=tokens, logprobs=logprobs, versions=np.array(versions), **ends)


DRAFTS = {"draft_tokens": np.array([1, 4])}  # Accepted, and all.
EQUAL = Group("a", (rollout([3], reward=1.0, rewards={"format": 1.0}, attachments=DRAFTS),) * 2, 3)
SPREAD = Group(
    "b",
    (
        rollout([1, 3], reward=0.0, rewards={"format": 0.0}, finish_reason="length"),
        rollout(
            [2, 2, 2],
            reward=1.0,
            loss_mask=np.array([True, True, False]),
            attachments={"draft_tokens": np.array([4, 4])},
        ),
    ),
    1,
)
STEP = Step(
    version=4,
    groups=(EQUAL, SPREAD),
    staleness=(0, 2),
    dropped=2,
    trainer_idle_s=0.5,
    train_s=1.0,
    publish_s=0.25,
    metrics={"loss": torch.tensor(0.5), "ess": 0.9, "k1": 0.1, "k2": 0.2, "k3": 0.3, "rows": 7},
    filtered=1,
    failures={"OSError": 2, "ValueError": 1},
    lost=(("c", "failed"),),
    masked_tokens=5,
    engine_idle_s=0.125,
)


def test_the_numbers_of_a_step():
    assert STEP.metrics_dict() == {
        "training/global_step": 4,
        "reward": 0.75,
        "reward_std": 0.5,
        "frac_reward_zero_std": 0.5,
        "rewards/format/mean": pytest.approx(2 / 3),
        "completions/mean_length": 1.75,
        "completions/min_length": 1,
        "completions/max_length": 3,
        "completions/clipped_ratio": 0.25,
        "prompt_length/mean": 2.0,
        "batch/groups_per_step": 2,
        "batch/samples_per_step": 4,
        "batch/trained_tokens_per_step": 6,
        "sample/staleness_mean": 1.0,
        "sample/staleness_max": 2,
        "loop/token_staleness_mean": pytest.approx(5 / 7),  # Of ages 0, 0, 2, 0, 1, 1, 1.
        "loop/masked_tokens": 5,
        "loop/dropped_groups": 2,
        "loop/filtered_groups": 1,
        "loop/failed_attempts": 3,
        "loop/lost_prompts": 1,
        "rollout/spec_accept_rate": 0.5,  # 6 of 12.
        "perf/rollout_wait_s": 0.5,
        "loop/engine_idle_s": 0.125,
        "loop/train_s": 1.0,
        "loop/publish_s": 0.25,
        "loss": 0.5,
        "rows": 7,
        "rollout_corr/ess": 0.9,
        "rollout_corr/kl": 0.1,
        "rollout_corr/k2_kl": 0.2,
        "rollout_corr/k3_kl": 0.3,
    }


@pytest.mark.parametrize("groups", [(), (Group("a", (rollout([3]),), 3),)])
def test_keys_stay_where_there_is_nothing_to_measure(groups):
    step = replace(STEP, groups=groups, staleness=(0,) * len(groups), metrics=None, lost=())
    found = step.metrics_dict()
    added = {"rewards/format/mean", "loss", "rows"}
    added |= {f"rollout_corr/{name}" for name in ("ess", "kl", "k2_kl", "k3_kl")}
    assert found.keys() == STEP.metrics_dict().keys() - added
    assert all(type(value) in (int, float) for value in found.values())
    assert all(math.isnan(found[name]) for name in ("reward", "reward_std", "frac_reward_zero_std"))
    assert math.isnan(found["completions/mean_length"]) == (not groups)
    assert math.isnan(found["rollout/spec_accept_rate"])


def test_numbers_of_train_come_first_and_all_else_is_left_out():
    returned = {"reward": 3.0, "text": "x", "many": torch.zeros(2), "none": None, "nested": {}}
    found = replace(STEP, metrics=returned).metrics_dict()
    assert found["reward"] == 3.0
    assert not found.keys() & {"text", "many", "none", "nested"}
