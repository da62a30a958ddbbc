"""Turns of a conversation, made into rollouts with exactly the tokens that the engine saw.

A conversation is a list of branches, and each branch becomes a rollout. A new turn first tries the
branches that share most tokens with its prompt. Only `append` changes branches.
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
from ..errors import ShapeError, UsageError
from ..rollout import UNSAMPLED, Rollout

__all__ = ["Continuity", "Conversation", "Turn", "common_prefix", "cut"]


class Continuity(StrEnum):
    """The relation of a prompt to the tokens of earlier turns.

    START begins the conversation. CLEAN continues exactly where an earlier turn ended. REALIGN cuts
    the end of a rollout's last answer. FORK begins another rollout.
    """

    START = "start"
    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


@dataclass(frozen=True)
class Turn:
    """One request to the engine, and its relation to earlier turns.

    Attributes:
        branch: the position of its rollout.
        matched: prompt tokens that its rollout already had, or that another rollout had if
            `continuity` is FORK.
        added: the other prompt tokens. They are not trained on.
        sampled: tokens of the answer.
        dropped: sampled tokens that this turn removed from the rollout, and so from training.
    """

    continuity: Continuity
    branch: int
    matched: int
    added: int
    sampled: int
    dropped: int = 0


class Conversation:
    """The requests of one trajectory, from which exact rollouts are made. Local.

    Takes the ids that the engine was given and returned, and never tokenises. So each rollout has
    the tokens that the engine saw. Each trained token has the log-probability with which it was
    sampled after exactly the tokens before it.

    If a prompt does not continue any rollout where its last answer ended, the prompt begins another
    rollout. The earlier rollout stays whole, and tokens common to both are trained on once. If only
    the end of the last answer differs, the answer may be cut there instead. A cut saves a rollout
    and loses the cut tokens.

    Cost per turn: the prompt and its images are compared with each rollout so far.

    Args:
        max_realigned_tokens: the most sampled tokens that a turn may cut from the end of the last
            answer. With 0 every sampled token is trained on.

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
        """The number of turns of each continuity."""
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

        A turn that is refused changes nothing.

        Args:
            prompt: ids of the whole prompt, including earlier turns.
            sampled: ids of the answer.
            logprobs: the engine's log-probability of each sampled token.
            versions: the policy version that sampled each token.
            attachments: `Aligned` counts tokens of this prompt and answer. Rows may begin at any
                token up to the first token that has no row yet. Images of earlier turns may be left
                out.

        Raises:
            ShapeError: the prompt or the answer is empty, lengths do not fit, or rows are missing.
            UsageError: as for `Rollout`.
        """
        asked, answer = np.asarray(prompt), np.asarray(sampled)
        if not asked.size or not answer.size:
            raise ShapeError(
                f"a turn needs a prompt and an answer; got {asked.size} and {answer.size} tokens. "
                "Leave out requests that were aborted before the first token."
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
        """Return the rollouts so far. A rollout begins with its first prompt. Arguments as
        `Rollout`.

        Attachments with one row per token, such as routes, are `Aligned`.
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
    """Return the first tokens of a rollout, at most `length`. Local. Arrays are views if possible.

    Values that belong to tokens are cut with them. A value that cannot be cut, such as an image, is
    removed with all its tokens: the rollout ends before the first of them. The result has
    `finish_reason="length"` if anything was cut.

    Raises:
        ShapeError: no sampled token would be left.
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
    """Return the number of leading ids that are equal."""
    length = min(len(held), len(prompt))
    differs = held[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
