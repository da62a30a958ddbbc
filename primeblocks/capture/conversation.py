"""Turns of a conversation, made into rollouts with exactly the tokens that the engine saw.

A conversation is a list of branches, and each branch becomes a rollout. `append` first tries to
extend the branch that shares most tokens with the new prompt. Only `append` changes branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..attachments import common_tokens, cut_attachments, join_attachments, join_rows, whole
from ..errors import ShapeError, UsageError, check_counts
from ..rollout import UNSAMPLED, Rollout

__all__ = ["Continuity", "Conversation", "Turn", "common_prefix", "cut"]


class Continuity(StrEnum):
    """The relation between a prompt and the tokens of earlier turns.

    A START prompt begins the conversation. A CLEAN prompt continues exactly where a rollout ended.
    A REALIGN prompt cuts the end of a rollout's last answer. A FORK prompt begins another rollout.
    """

    START = "start"
    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


@dataclass(frozen=True)
class Turn:
    """One request to the engine, and the relation of its prompt to earlier turns.

    Attributes:
        branch: the position of the turn's rollout in `Conversation.rollouts()`.
        matched: the number of leading prompt tokens that the turn's rollout already had. If
            `continuity` is FORK, the turn begins a new rollout, and `matched` is the largest number
            of leading prompt tokens that an earlier rollout had.
        added: the number of prompt tokens after the matched tokens. Added tokens are not trained
            on.
        sampled: the number of tokens of the answer.
        dropped: the number of sampled tokens that this turn removed from the rollout.
    """

    continuity: Continuity
    branch: int
    matched: int
    added: int
    sampled: int
    dropped: int = 0


class Conversation:
    """The requests of one trajectory, and the exact rollouts made of these requests. Local.

    A conversation stores the ids that the engine read and sampled, and never tokenises text. The
    tokens of each rollout are exactly the engine's tokens. The engine computed the log-probability
    of each trained token from exactly the tokens before it.

    If no earlier rollout is a prefix of a prompt, the prompt starts another rollout. The earlier
    rollouts stay whole, and shared tokens are trained on once. If a prompt differs from a rollout
    only at the end of the rollout's last answer, this end may be cut instead. A cut avoids another
    rollout, but the cut tokens are not trained on.

    Each call of `append` compares the prompt and its images with every rollout so far.

    Args:
        max_realigned_tokens: the largest number of sampled tokens that a turn may cut from the end
            of the last answer. If `max_realigned_tokens` is 0, every sampled token is trained on.

    Raises:
        UsageError: `max_realigned_tokens` is negative.
    """

    def __init__(self, *, max_realigned_tokens: int = 0) -> None:
        check_counts(least=0, max_realigned_tokens=max_realigned_tokens)
        self._most = max_realigned_tokens
        self._branches: list[_Branch] = []
        self.turns: list[Turn] = []

    @property
    def counts(self) -> Mapping[Continuity, int]:
        """The number of turns per `Continuity`."""
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
        """Add one request: its prompt, and the answer that the engine sampled.

        If `append` raises an error, the conversation does not change.

        Args:
            prompt: `[tokens]`, the ids of the whole prompt, including earlier turns.
            sampled: `[sampled]`, the ids of the answer.
            logprobs: `[sampled]`, the engine's log-probability of each sampled token.
            versions: `[sampled]`, the policy version that sampled each token.
            attachments: named values of the turn, as in `Rollout`. The positions of an `Aligned`
                value count from the start of the prompt. The rows of a value may overlap the rows
                of earlier turns, but must not leave a gap after the rows of earlier turns. You may
                leave out images of earlier turns.

        Raises:
            ShapeError: the prompt or the answer is empty or not one-dimensional, arrays differ in
                length, or rows are missing.
            UsageError: as for `Rollout`.
        """
        asked, answer = np.asarray(prompt), np.asarray(sampled)
        if asked.ndim != 1 or answer.ndim != 1 or not asked.size or not answer.size:
            raise ShapeError(
                "a turn needs a prompt [tokens] and an answer [sampled], which are not empty; got "
                f"{list(asked.shape)} and {list(answer.shape)}. Leave out requests that were "
                "aborted before the first token."
            )
        # A rollout makes all checks.
        new = Rollout(
            tokens=np.concatenate([asked, answer]),
            prompt_length=len(asked),
            logprobs=np.asarray(logprobs, np.float64),
            versions=versions,
            finish_reason=finish_reason,
            attachments=attachments or {},
        )
        if not new.sampled.all():
            raise UsageError(
                f"every token of an answer must be sampled. One token has version {UNSAMPLED}."
            )
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
        """Return the rollouts so far, with `prompt_id`, `reward` and `rewards` as in `Rollout`.

        The prompt of a rollout is the prompt of its first turn. Attachments with one row per token,
        such as routes, are `Aligned`.
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
        """Return the branch and the continuity of a prompt, and the number of common tokens."""
        if not self._branches:
            return 0, Continuity.START, 0
        matches = [branch.common_with(new) for branch in self._branches]
        # The longest match first, and among equals the newest branch.
        for place in sorted(range(len(matches)), key=lambda i: (matches[i], i), reverse=True):
            branch, matched = self._branches[place], matches[place]
            if matched == len(branch.tokens):
                return place, Continuity.CLEAN, matched
            if branch.can_end_at(matched, most=self._most) and matched < new.prompt_length:
                return place, Continuity.REALIGN, matched
        return len(self._branches), Continuity.FORK, max(matches)


@dataclass(frozen=True, eq=False)
class _Branch:
    """A rollout so far. Arrays have one entry per token, including the first prompt."""

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
        """Return how many leading prompt tokens the branch has, with the same images."""
        common = common_prefix(self.tokens, new.prompt)
        return common_tokens(self.attachments, new.attachments, common)

    def can_end_at(self, place: int, *, most: int) -> bool:
        """Return whether a cut at `place` leaves a part of the last answer and all whole values."""
        return (
            self.answer_start < place
            and len(self.tokens) - place <= most
            and all(each.stop <= place for each in whole(self.attachments))
        )

    def followed(self, new: Rollout, matched: int) -> _Branch:
        """Return the branch, cut at `matched` and followed by the rest of a turn."""
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
    """Return at most the first `length` tokens of a rollout. Local. Arrays are views if possible.

    Attachments that belong to tokens are cut together with the tokens. If the cut falls inside an
    attachment that cannot be cut, such as an image, the rollout ends before the first token of the
    attachment. If tokens were cut, the result has `finish_reason="length"`.

    Raises:
        ShapeError: the result would have no sampled token.
    """
    if length >= len(rollout.tokens):
        return rollout
    stop = length
    # Repeated, because an image may begin inside the tokens of another value.
    while inside := [x.start for x in whole(rollout.attachments) if x.start < stop < x.stop]:
        stop = min(inside)
    count = stop - rollout.prompt_length
    if count < 1 or not rollout.sampled[:count].any():
        raise ShapeError(
            f"length={length} leaves {stop} tokens and no sampled token after the prompt of "
            f"{rollout.prompt_length} tokens. Keep more tokens, or leave the rollout out."
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
    """Return the number of leading ids that `held` and `prompt` share."""
    length = min(len(held), len(prompt))
    differs = held[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
