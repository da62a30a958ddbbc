"""Turns of a conversation, token by token as the engine saw them, made into rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..attachments import common_tokens, cut_attachments, join_attachments, join_rows, whole
from ..errors import ShapeError, UsageError
from ..rollout import UNSAMPLED, Rollout

__all__ = ["Continuity", "Conversation", "Turn", "common_prefix", "cut"]


class Continuity(StrEnum):
    """The relation of a prompt to the tokens that were held before it."""

    START = "start"
    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


@dataclass(frozen=True)
class Turn:
    """One request to the engine, and what became of it.

    Attributes:
        continuity: START begins the conversation; CLEAN goes on exactly where an earlier turn
            ended; REALIGN leaves out the end of the last answer; FORK begins another rollout.
        branch: the rollout that it is a part of.
        matched: tokens of the prompt that were held already.
        added: tokens of the prompt that were not, which are not trained on.
        sampled: tokens of the answer.
        dropped: sampled tokens that this turn took out of the rollout, and so out of training.
    """

    continuity: Continuity
    branch: int
    matched: int
    added: int
    sampled: int
    dropped: int = 0


class Conversation:
    """The requests of one trajectory, from which exact rollouts are made.

    Takes ids as the engine was given and has returned them, and never tokenises. So the tokens of
    each rollout are what the engine saw, and each that is trained on was sampled behind exactly
    those before it, with the log-probability that is kept.

    An agent whose prompts do not go on where the last answer ended, because it tokenised the
    answer again, left out its reasoning, or asked twice, begins another rollout: the earlier one
    stays whole, and what both have in common is trained on once. So does one that has another
    image under the same tokens. Where only the end of the last answer differs, the answer may
    rather be cut there: it saves a rollout and costs these tokens.

    Cost: local; a comparison of the prompt, and of images that come with it, with each rollout so
    far.

    Args:
        max_realigned_tokens: sampled tokens that a turn may cut from the end of the last answer,
            to go on with its rollout. At 0 each token that was sampled is trained on.

    Raises:
        UsageError: `max_realigned_tokens` is negative.
    """

    def __init__(self, *, max_realigned_tokens: int = 0) -> None:
        if max_realigned_tokens < 0:
            raise UsageError(f"max_realigned_tokens is {max_realigned_tokens}, which is negative")
        self._most = max_realigned_tokens
        self._branches: list[_Branch] = []
        self.turns: list[Turn] = []

    @property
    def counts(self) -> Mapping[Continuity, int]:
        """Turns that began, went on cleanly, were realigned or forked."""
        return Counter(turn.continuity for turn in self.turns)

    def append(
        self,
        prompt: ArrayLike,
        sampled: ArrayLike,
        *,
        logprobs: ArrayLike,
        versions: NDArray[np.int64],
        finish_reason: str = "stop",
        attachments: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Add one request: what was asked, and what the engine sampled.

        All or nothing: a turn that is refused changes nothing.

        Args:
            prompt: ids of the whole prompt, what was said before included.
            sampled: ids of the answer.
            logprobs: the engine's log-probability of each sampled token.
            versions: the policy version that sampled each of them.
            attachments: `Aligned` counts tokens of this prompt and answer. Rows may begin at any
                token up to the first for which none are held; images that are held may be left
                out.

        Raises:
            ShapeError: the prompt or the answer is empty, lengths do not fit, or rows are missing.
            UsageError: as `Rollout` says.
        """
        asked, answer = np.asarray(prompt), np.asarray(sampled)
        if not asked.size or not answer.size:
            raise ShapeError(
                f"a turn needs a prompt and an answer; got {asked.size} and {answer.size} tokens. "
                "Leave out requests that were aborted empty."
            )
        # Its checks are a rollout's.
        new = Rollout(
            tokens=np.concatenate([asked, answer]),
            prompt_length=len(asked),
            logprobs=np.asarray(logprobs, np.float64),
            versions=versions,
            finish_reason=finish_reason,
            attachments=attachments or {},
        )
        if not new.sampled.all():
            raise UsageError(f"an answer was sampled; got version {UNSAMPLED} for a token of it")
        place, continuity, matched = self._place(new)
        is_new = place == len(self._branches)
        held = _Branch.empty() if is_new else self._branches[place]
        turn = Turn(
            continuity,
            place,
            matched,
            added=new.prompt_length - matched,
            sampled=len(new.completion),
            dropped=0 if is_new else len(held.tokens) - matched,
        )
        self._branches[place : place + 1] = [held.followed(new, 0 if is_new else matched)]
        self.turns.append(turn)
        return turn

    def rollouts(
        self,
        *,
        prompt_id: Hashable = None,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
    ) -> tuple[Rollout, ...]:
        """Return the rollouts so far, each beginning with its first prompt. Arguments as there.

        Rows that belong to each token, routes for instance, are `Aligned`.
        """
        return tuple(
            Rollout(
                tokens=branch.tokens,
                prompt_length=branch.prompt_length,
                logprobs=branch.logprobs[branch.prompt_length :],
                versions=branch.versions[branch.prompt_length :],
                finish_reason=branch.finish_reason,
                prompt_id=prompt_id,
                reward=reward,
                rewards=rewards or {},
                attachments=join_rows(branch.attachments),
            )
            for branch in self._branches
        )

    def _place(self, new: Rollout) -> tuple[int, Continuity, int]:
        """Return the branch that a prompt goes on with, how, and the tokens in common."""
        if not self._branches:
            return 0, Continuity.START, 0
        matches = [branch.common_with(new) for branch in self._branches]
        # The longest; of equals, the newest.
        for place in sorted(range(len(matches)), key=lambda i: (matches[i], i), reverse=True):
            branch, matched = self._branches[place], matches[place]
            if matched == len(branch.tokens):
                return place, Continuity.CLEAN, matched
            if branch.can_end_at(matched, most=self._most) and matched < new.prompt_length:
                return place, Continuity.REALIGN, matched
        return len(self._branches), Continuity.FORK, max(matches)


@dataclass(frozen=True, eq=False)
class _Branch:
    """A rollout so far. Arrays have an entry for each token, the first prompt's included."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    versions: NDArray[np.int64]
    prompt_length: int
    answer_start: int  # of the last answer
    finish_reason: str
    attachments: Mapping[str, Any]

    @classmethod
    def empty(cls) -> _Branch:
        none = np.zeros(0, np.int64)
        return cls(none, np.zeros(0), none, 0, 0, "", {})

    def common_with(self, new: Rollout) -> int:
        """Return how many tokens of a prompt are held: the same ones, with the same images."""
        common = common_prefix(self.tokens, new.prompt)
        return common_tokens(self.attachments, new.attachments, common)

    def can_end_at(self, place: int, *, most: int) -> bool:
        """Say whether the last answer may be cut there: not wholly, and through no whole value."""
        return (
            self.answer_start < place
            and len(self.tokens) - place <= most
            and all(each.stop <= place for each in whole(self.attachments))
        )

    def followed(self, new: Rollout, matched: int) -> _Branch:
        """Return the branch, cut at `matched`, with the rest of a turn."""
        start = new.prompt_length
        given = start - matched
        held = cut_attachments(self.attachments, matched)
        return _Branch(
            tokens=new.tokens,
            logprobs=np.concatenate([self.logprobs[:matched], np.zeros(given), new.logprobs]),
            versions=np.concatenate(
                [self.versions[:matched], np.full(given, UNSAMPLED), new.versions]
            ),
            prompt_length=self.prompt_length or start,
            answer_start=start,
            finish_reason=new.finish_reason,
            attachments=join_attachments(held, new.attachments, matched),
        )


def cut(rollout: Rollout, length: int) -> Rollout:
    """Return the first tokens of a rollout, at most `length`. Local; views where it can.

    Values that belong to some tokens are cut with them. One that cannot be, an image, takes its
    tokens along: the rollout then ends before the first of them. It ends with "length".

    Raises:
        ShapeError: nothing that was sampled would be left.
    """
    if length >= len(rollout.tokens):
        return rollout
    stop = length
    # One may lie in the tokens of another, so until none is cut.
    while inside := [x.start for x in whole(rollout.attachments) if x.start < stop < x.stop]:
        stop = min(inside)
    count = stop - rollout.prompt_length
    if count < 1 or not rollout.sampled[:count].any():
        raise ShapeError(
            f"{stop} tokens, of {length} asked for, hold nothing that was sampled behind a prompt "
            f"of {rollout.prompt_length}. Keep more, or leave the rollout out."
        )
    return replace(
        rollout,
        tokens=rollout.tokens[:stop],
        logprobs=rollout.logprobs[:count],
        versions=rollout.versions[:count],
        loss_mask=rollout.loss_mask[:count],
        finish_reason="length",
        attachments=cut_attachments(rollout.attachments, stop),
    )


def common_prefix(held: NDArray[np.int64], prompt: NDArray[np.int64]) -> int:
    """Return how many ids both begin with."""
    length = min(len(held), len(prompt))
    differs = held[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
