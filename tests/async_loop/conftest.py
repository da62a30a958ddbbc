"""Rollouts without an engine."""

import numpy as np
import pytest

from primeblocks.async_loop import Group, Rollout


def make_rollout(*, versions=(0, 0), reward=0.0, prompt_length=2, **more):
    return Rollout(
        tokens=np.arange(1, prompt_length + len(versions) + 1),
        prompt_length=prompt_length,
        logprobs=np.full(len(versions), -1.0),
        versions=np.array(versions, dtype=np.int64),
        finish_reason="stop",
        reward=reward,
        **more,
    )


def make_group(prompt, *, version=0, members=2):
    return Group(
        prompt, tuple(make_rollout(versions=(version, version)) for _ in range(members)), version
    )


@pytest.fixture(name="make_rollout")
def _make_rollout():
    return make_rollout


@pytest.fixture(name="make_group")
def _make_group():
    return make_group
