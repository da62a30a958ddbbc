"""Conversations against an engine that remembers what it was asked before each token."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.async_loop import Rollout
from primeblocks.attachments import Aligned
from primeblocks.capture import Conversation
from primeblocks.capture.conversation import cut
from primeblocks.errors import ShapeError, UsageError
from primeblocks.losses.packing import pack, unpack
from primeblocks.rollout import UNSAMPLED


class Engine:
    """Gives each token that it samples a log-probability of its own, and keeps what preceded it."""

    def __init__(self):
        # By log-probability: everything before it, the token, its version, the image under token 1,
        # and the row of the token that predicted it.
        self.seen = {}
        self.version = self.asked = 0
        self.image = 0.0

    def ask(self, conversation, prompt, count, **more):
        tokens, logprobs = list(prompt), []
        self.asked += 1000  # Rows tell their request and their token.
        for _ in range(count):
            token, logprob = (7 * len(self.seen)) % 5 + 100, -float(len(self.seen) + 1)
            row = self.asked + len(tokens) - 1
            self.seen[logprob] = (tuple(tokens), token, self.version, self.image, row)
            tokens.append(token)
            logprobs.append(logprob)
        rows = np.arange(len(tokens) - 1)[:, None] + self.asked
        turn = conversation.append(
            prompt,
            tokens[len(prompt) :],
            logprobs=logprobs,
            versions=np.full(count, self.version),
            attachments={
                "routes": Aligned.rows(rows),
                "images": (Aligned(np.full(3, self.image), 1, 2),),
            },
            **more,
        )
        return tokens, turn

    def check(self, rollouts):
        """Assert that each trained token is what was sampled behind all those before it."""
        trained = Counter()
        for rollout in rollouts:
            tokens, start = rollout.tokens.tolist(), rollout.prompt_length
            (image,) = rollout.attachments["images"]
            rows = rollout.attachments["routes"].value[:, 0]
            assert (rows % 1000 == np.arange(len(tokens) - 1)).all()
            for i in np.flatnonzero(rollout.loss_mask).tolist():
                logprob = float(rollout.logprobs[i])
                before = tuple(tokens[: start + i])
                found = (before, tokens[start + i], rollout.versions[i], image.value[0])
                assert self.seen[logprob] == (*found, rows[start + i - 1])
                trained[logprob] += 1
        assert not trained or max(trained.values()) == 1
        return len(trained)


# What an agent does before it asks again: go on, change an old token, cut the end of the last
# answer and say it otherwise, ask the same once more, go back to an earlier prompt, or show another
# image at the place of the first.
MOVES = ["go on", "edit", "retokenise", "again", "back", "repaint"]


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(MOVES),
            st.integers(1, 5),  # tokens sampled
            st.integers(1, 4),  # tokens said
            st.integers(0, 10**6),  # where
        ),
        min_size=1,
        max_size=9,
    ),
    most=st.integers(0, 3),
)
def test_trained_tokens_are_those_that_the_engine_sampled_there(turns, most):
    engine, conversation = Engine(), Conversation(max_realigned_tokens=most)
    prompts, tokens = [[1, 2, 3]], None
    for move, sampled, said, where in turns:
        if tokens is not None:
            new = tokens + [10 + where % 7] * said
            if move == "edit":
                new[where % len(tokens)] = 50
            elif move == "retokenise":
                new = tokens[: -1 - where % 3] + [60, 61] + [10] * said
            elif move == "again":
                new = prompts[-1]
            elif move == "back":
                new = prompts[where % len(prompts)] + [where % 3 + 100]
            elif move == "repaint":
                engine.image = float(where % 2)
            prompts.append(new)
        tokens, _ = engine.ask(conversation, prompts[-1], sampled)
        engine.version += where % 2
    dropped = sum(turn.dropped for turn in conversation.turns)
    assert engine.check(conversation.rollouts()) == len(engine.seen) - dropped
    assert dropped == 0 or most
    assert sum(conversation.counts.values()) == len(turns)


def test_each_prompt_is_told_how_it_goes_on():
    engine, conversation = Engine(), Conversation(max_realigned_tokens=2)
    first, turn = engine.ask(conversation, [1, 2], 4)
    assert (turn.continuity, turn.branch, turn.added) == ("start", 0, 2)
    second, turn = engine.ask(conversation, [*first, 3], 3)
    assert (turn.continuity, turn.matched, turn.added, turn.dropped) == ("clean", 6, 1, 0)
    third, turn = engine.ask(conversation, [*second[:-2], 60, 4], 2)
    assert (turn.continuity, turn.branch, turn.matched, turn.dropped) == ("realign", 0, 8, 2)
    _, turn = engine.ask(conversation, [1, 9, *third[2:]], 2)
    assert (turn.continuity, turn.branch, turn.matched) == ("fork", 1, 1)
    # A question asked twice is no answer that was cut.
    _, turn = engine.ask(conversation, [1, 2], 1)
    assert (turn.continuity, turn.branch, turn.matched) == ("fork", 2, 2)
    longest = conversation.rollouts(reward=1.0, rewards={"style": 0.5}, prompt_id="p")[0]
    assert longest.tokens.tolist() == third
    sampled = [1, 1, 1, 1, 0, 1, 0, 0, 1, 1]
    assert longest.sampled.tolist() == longest.loss_mask.tolist() == [bool(x) for x in sampled]
    assert (longest.versions == UNSAMPLED).sum() == 3
    assert (longest.oldest_version, longest.rewards["style"], longest.prompt_id) == (0, 0.5, "p")
    assert conversation.counts == {"start": 1, "clean": 1, "realign": 1, "fork": 2}


def test_a_refused_turn_changes_nothing():
    engine, conversation = Engine(), Conversation()
    tokens, _ = engine.ask(conversation, [1, 2], 3)
    routes = {"routes": Aligned.rows(np.zeros((2, 1)), start=6)}
    with pytest.raises(ShapeError, match="up to token 4 and from 6 on"):
        conversation.append(
            [*tokens, 5, 6], [7], logprobs=[-1.0], versions=np.array([0]), attachments=routes
        )
    for wrong in (
        {"versions": np.array([-1])},
        {"logprobs": [float("nan")]},
        {"sampled": []},
        {"sampled": [[2]]},
        {"prompt": [[1]]},
        {"prompt": 1},
    ):
        asked = {
            "prompt": [1],
            "sampled": [2],
            "logprobs": [-1.0],
            "versions": np.array([0]),
        } | wrong
        with pytest.raises(UsageError):
            conversation.append(asked.pop("prompt"), asked.pop("sampled"), **asked)
    assert len(conversation.turns) == len(conversation.rollouts()) == 1
    assert engine.check(conversation.rollouts()) == 3


def images(*ranges):
    return {"images": tuple(Aligned(f"image {start}", start, stop) for start, stop in ranges)}


def test_an_image_comes_once_and_is_never_cut():
    conversation = Conversation()
    conversation.append(
        [1, 9, 9, 2],
        [3, 4],
        logprobs=[-1, -1],
        versions=np.array([0, 0]),
        attachments=images((1, 3)),
    )
    conversation.append(
        [1, 9, 9, 2, 3, 4, 9, 9, 5],
        [6, 7],
        logprobs=[-1, -1],
        versions=np.array([1, 1]),
        attachments=images((1, 3), (6, 8)),
    )
    (rollout,) = conversation.rollouts()
    assert [(x.value, x.start) for x in rollout.attachments["images"]] == [
        ("image 1", 1),
        ("image 6", 6),
    ]
    assert cut(rollout, 99) is rollout
    assert [len(cut(rollout, length).tokens) for length in (10, 9, 8, 7, 6, 5)] == [
        10,
        9,
        8,
        6,
        6,
        5,
    ]
    assert len(cut(rollout, 7).attachments["images"]) == 1
    assert cut(rollout, 7).finish_reason == "length"
    with pytest.raises(ShapeError, match="no sampled token after the prompt"):
        cut(rollout, 4)


def test_another_image_under_the_same_tokens_begins_another_rollout():
    """A screen that is shown at one place of the prompt, turn after turn."""
    conversation = Conversation(max_realigned_tokens=9)

    def ask(prompt, *shown):
        values = {"images": tuple(Aligned({"pixels": x}, i, i + 2) for x, i in shown)}
        asked = {"logprobs": [-1.0], "versions": np.array([0]), "attachments": values}
        return conversation.append(prompt, [3], **asked)

    one, same, other = np.zeros((2, 4)), np.zeros((2, 4)), np.ones((2, 4))
    ask([1, 9, 9, 2], (one, 1))
    assert ask([1, 9, 9, 2, 3, 5], (same, 1)).continuity == "clean"
    turn = ask([1, 9, 9, 2, 3, 5, 3, 6], (other, 1))
    assert (turn.continuity, turn.branch, turn.matched) == ("fork", 1, 1)
    # An image that is held may be left out; where none was, one is new.
    assert ask([1, 9, 9, 2, 3, 5, 3, 6, 3, 7]).branch == 1
    assert ask([1, 9, 9, 2, 3, 5, 3, 6, 3, 7, 3], (other, 1), (one, 4)).matched == 4
    shown = [[x.value["pixels"] for x in r.attachments["images"]] for r in conversation.rollouts()]
    assert [[float(x.mean()) for x in each] for each in shown] == [[0.0], [1.0], [1.0, 0.0]]
    # Bounds of memory count them.
    assert conversation.rollouts()[2].nbytes > 2 * one.nbytes


@pytest.mark.parametrize(
    ("shown", "continuity"), [((3, 5), "fork"), ((2, 4), "realign"), ((4, 6), "fork")]
)
def test_an_answer_is_not_cut_through_an_image(shown, continuity):
    """The next prompt has four tokens in common, two of them sampled."""
    conversation = Conversation(max_realigned_tokens=9)
    images = {"images": Aligned(np.ones(3), *shown)}
    how = {"logprobs": [-1.0] * 4, "versions": np.zeros(4, np.int64)}
    conversation.append([1, 2], [3, 4, 5, 6], **how, attachments=images)
    turn = conversation.append([1, 2, 3, 4, 9], [7, 7, 7, 7], **how)
    assert (turn.continuity, turn.matched) == (continuity, 4)
    first = conversation.rollouts()[0]
    assert "images" in first.attachments
    assert len(conversation.rollouts()) == (2 if continuity == "fork" else 1)
    assert first.tokens[:6].tolist() == [1, 2, 3, 4, *([5, 6] if continuity == "fork" else [9, 7])]


def test_rows_survive_packing_and_cutting():
    engine, conversation = Engine(), Conversation()
    tokens, _ = engine.ask(conversation, [1, 2], 3)
    engine.ask(conversation, [*tokens, 5], 2)
    (rollout,) = conversation.rollouts()
    packed = pack([rollout, cut(rollout, 5)], [0, 1], per_token=["routes"], multiple_of=8)
    assert len(packed.per_token["routes"]) == 16
    assert packed.per_token["routes"][7] == 0  # The last token was never computed.
    for before, after in zip([rollout, cut(rollout, 5)], unpack(packed), strict=True):
        left, right = before.attachments["routes"], after.attachments["routes"]
        assert (left.start, left.stop) == (right.start, right.stop)
        np.testing.assert_array_equal(left.value, right.value)
        np.testing.assert_array_equal(before.loss_mask, after.loss_mask)
    short = dataclasses.replace(rollout, attachments={"routes": Aligned.rows(np.ones((6, 1)))})
    with pytest.raises(ShapeError, match="for 8 tokens, or all but the last"):
        pack([short], [0], per_token=["routes"])


@pytest.mark.parametrize("change", [{"loss_mask": [True, True]}, {"logprobs": [-1.0, -1.0]}])
def test_a_token_that_was_not_sampled_is_not_trained(change):
    values = {
        "tokens": np.array([1, 2, 3]),
        "prompt_length": 1,
        "logprobs": np.array([-1.0, 0.0]),
        "versions": np.array([0, UNSAMPLED]),
        "finish_reason": "stop",
    }
    assert Rollout(**values).loss_mask.tolist() == [True, False]
    with pytest.raises(UsageError, match="no policy sampled"):
        Rollout(**values | {name: np.array(wrong) for name, wrong in change.items()})
