import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop import (
    Group,
    StalenessPolicy,
    cache_salt,
    staleness,
)
from primeblocks.async_loop.ledger import Partial, pack_trajectory
from primeblocks.errors import ShapeError, UsageError
from primeblocks.rollout import versions_from_spans

from .conftest import make_rollout


def test_a_rollout_knows_its_parts(make_rollout):
    rollout = make_rollout(versions=(3, 3, 5), prompt_length=2)
    assert rollout.prompt.tolist() == [1, 2]
    assert rollout.completion.tolist() == [3, 4, 5]
    assert (rollout.oldest_version, rollout.newest_version) == (3, 5)
    with pytest.raises(ValueError, match="read-only"):
        rollout.tokens[0] = 9


def test_it_goes_to_another_process_by_pickle(make_rollout):
    extras = {"rewards": {"style": 0.5}, "attachments": {"routes": b"abc"}}
    counts = np.array([True, False, True])
    rollout = make_rollout(versions=(3, 3, 5), loss_mask=counts, **extras)
    group = Group("p", (rollout, rollout), 3, 0.5, 7)
    assert group.newest_version == 5
    parts = ("tokens", "prompt_length", "logprobs", "versions", "loss_mask", "attachments")
    partial = Partial(**{name: getattr(rollout, name) for name in parts})

    def content(trajectory):
        return pack_trajectory(trajectory, name="")

    for copied in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
        assert (copied.prompt, copied.version, copied.generate_s, copied.ordinal) == (
            ("p", 3, 0.5, 7)
        )
        assert [*map(content, copied.rollouts)] == [content(rollout)] * 2
        with pytest.raises(ValueError, match="read-only"):
            copied.rollouts[0].logprobs[0] = -2
        with pytest.raises(TypeError, match="does not support item assignment"):
            copied.rollouts[0].attachments["routes"] = b""
    assert content(pickle.loads(pickle.dumps(partial))) == content(partial)


def test_a_deep_copy_shares_no_attachment_and_text_counts_its_letters():
    rollout = make_rollout(attachments={"notes": ["a"], "text": "x" * 5000})
    copied = copy.deepcopy(rollout)
    copied.attachments["notes"].append("b")
    assert rollout.attachments["notes"] == ["a"]
    assert rollout.nbytes >= make_rollout().nbytes + 5000


@pytest.mark.parametrize(
    "change",
    [{"versions": ()}, {"versions": (0, -1)}, {"reward": float("nan")}, {"prompt_length": 0}],
)
def test_what_makes_no_sense_is_refused(make_rollout, change):
    with pytest.raises(UsageError):
        make_rollout(**change)


@pytest.mark.parametrize("wrong", [0.5, 2e-3, float("inf"), float("-inf"), float("nan")])
def test_a_log_probability_is_finite_and_not_above_0(make_rollout, wrong):
    rollout = dataclasses.replace(
        make_rollout(), logprobs=np.array([-1, 5e-4])
    )  # above 0 by rounding
    with pytest.raises(UsageError, match=rf"logprobs\[1\] is {wrong}\. .* log-softmax"):
        dataclasses.replace(rollout, logprobs=np.array([-1, wrong]))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6))
def test_spans_write_out_one_version_a_token(parts):
    spans, written = [], []
    for version, count in parts:
        spans.append((version, len(written), len(written) + count))
        written += [version] * count
    assert versions_from_spans(spans, length=len(written)).tolist() == written
    with pytest.raises(ShapeError):
        versions_from_spans(spans, length=len(written) + 1)


def test_a_group_is_as_old_as_its_oldest_part(make_rollout):
    group = Group("p", (make_rollout(versions=(4, 5)), make_rollout(versions=(6, 6))), 4)
    assert staleness(group, version=7) == 3
    policy = StalenessPolicy(2, "drop", "a test")
    assert policy.trainable(group, version=6) is group
    assert policy.trainable(group, version=7) is None
    # Sampled late, but its prompt was cached under the version that it was submitted with.
    assert staleness(Group("p", (make_rollout(versions=(6, 6)),), 4), version=7) == 3


@pytest.mark.parametrize("wrong", [-1, 1 << 63, True])
def test_what_is_no_version_is_refused(make_rollout, wrong):
    with pytest.raises(UsageError, match=re.escape(repr(wrong))):
        cache_salt(wrong)
    with pytest.raises(UsageError, match=re.escape(repr(wrong))):
        versions_from_spans([(wrong, 0, 1)], length=1)


def test_each_version_has_its_own_salt():
    assert len({cache_salt(version) for version in range(100)}) == 100


def test_a_policy_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="one of .*'ignore'"):
        StalenessPolicy(1, "ignore", "a test")
    with pytest.raises(UsageError, match="-1"):
        StalenessPolicy(max_off_policy_steps=-1)


@pytest.mark.parametrize(("bound", "on_stale"), [(1, "pace"), (4, "mask"), (0, "continue")])
def test_a_lag_without_a_named_correction_is_refused(bound, on_stale):
    with pytest.raises(UsageError, match="Pass the name of the loss correction"):
        StalenessPolicy(bound, on_stale)
    assert StalenessPolicy(0).max_off_policy_steps == 0


def test_tokens_beyond_the_bound_leave_the_loss():
    policy = StalenessPolicy(2, "mask", "a test")
    kept = np.array([True, True, False, True])
    old = make_rollout(versions=(0, 1, 2, 3), loss_mask=kept)
    group = policy.trainable(Group("p", (old, make_rollout(versions=(3, 3))), 0), version=3)
    assert [r.loss_mask.tolist() for r in group.rollouts] == [
        [False, True, False, True],
        [True, True],
    ]
    assert old.loss_mask.tolist() == kept.tolist()
    for on_stale in ("pace", "continue"):
        given = Group("p", (old,), 0)
        assert StalenessPolicy(2, on_stale, "a test").trainable(given, version=9) is given


def test_the_default_holds_the_bound_that_its_name_promises():
    """Whoever asks: nothing beyond `max_off_policy_steps` is handed out."""
    group = Group("p", (make_rollout(versions=(1, 3)),), 1)
    for policy in (
        StalenessPolicy(1, correction="a test"),
        StalenessPolicy(1, "wait", "a test"),
        StalenessPolicy(1, "drop", "a test"),
    ):
        assert policy.trainable(group, version=3) is None
        assert policy.trainable(Group("p", group.rollouts, 2), version=2 + 1) is None
        fresh = Group("p", (make_rollout(versions=(2, 3)),), 2)
        assert policy.trainable(fresh, version=3) is fresh


@pytest.mark.parametrize("on_stale", ["wait", "pace", "mask", "drop", "continue"])
def test_a_rollout_of_a_later_policy_is_refused(on_stale):
    """An engine that outlived a rollback."""
    policy = StalenessPolicy(1, on_stale, "a test")
    for versions, submitted in (((5, 5), 3), ((3, 4), 3), ((3, 3), 4)):
        group = Group("which", (make_rollout(versions=versions),), submitted)
        for call in (policy.trainable, staleness):
            with pytest.raises(UsageError, match=r"policy 3 .*'which'.* the later policy [45]"):
                call(group, version=3)
    with pytest.raises(UsageError, match="the later policy"):
        policy.fresh(make_rollout(versions=(3, 4)), version=3)


def test_arrays_are_copied_unless_nobody_can_write_to_them(make_rollout):
    writable = np.array([1, 2, 3, 4])
    view = writable[:]
    view.flags.writeable = False
    constant = np.frombuffer(writable.tobytes(), np.int64)
    for tokens, copied in ((writable, True), (view, True), (constant, False)):
        rollout = dataclasses.replace(make_rollout(), tokens=tokens)
        assert np.shares_memory(rollout.tokens, tokens) != copied
        assert not rollout.tokens.flags.writeable
    again = dataclasses.replace(rollout, reward=1.0)
    assert again.tokens is rollout.tokens


def test_a_number_too_long_to_show_is_refused_too():
    for wrong in (10**5000, -(10**5000)):
        with pytest.raises(UsageError, match="got an int of 16610 bits"):
            cache_salt(wrong)
