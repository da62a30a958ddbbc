"""Recording of one rollout: an agent's requests, answered by an engine and kept token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attachments import Aligned
from ..clock import Clock, within
from ..errors import (
    CapacityError,
    ClosedError,
    EngineError,
    PrimeblocksError,
    UnsupportedError,
    UsageError,
)
from ..rollout import Rollout
from .conversation import Conversation
from .history import History, Prompt
from .journal import CaptureJournal, KeptTurn
from .request import TurnRequest
from .response import ToolCall, TurnAnswer
from .seams import Generate, Renderer, Sampled

__all__ = ["CaptureBounds", "CaptureSession"]


@dataclass(frozen=True, kw_only=True)
class CaptureBounds:
    """Limits of a recording. What lies beyond is refused with a typed error.

    Args:
        sessions: open at a time.
        turns: of a session.
        in_flight: requests at the engine at a time, of all sessions.
        body_bytes: of a request.
        max_tokens: of an answer, and of one whose request names no limit.
        timeout_s: of an answer.
        transfer_timeout_s: for a request to come in whole, and for a response to be taken.

    Raises:
        UsageError: one is not positive.
    """

    sessions: int = 4096
    turns: int = 1024
    in_flight: int = 4096
    body_bytes: int = 16 << 20
    max_tokens: int = 4096
    timeout_s: float = 600.0
    transfer_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if wrong := {name: value for name, value in vars(self).items() if not value > 0}:
            raise UsageError(f"bounds must be positive; got {wrong}")


class CaptureSession:
    """A rollout under recording. `Recorder.session` makes one.

    An answer that an agent sends back as it got it stands in the next prompt with the ids that
    were sampled, and only what was said since is tokenised. Messages that go on otherwise are
    tokenised whole; `conversation` then says REALIGN or FORK, and no token is trained on behind
    others than those that it was sampled behind.

    Attributes:
        base_url: of the agent's client; `name` is a part of it.
        key: the secret that its requests need, as `api_key`.
        conversation: the turns so far.
    """

    def __init__(
        self,
        name: str,
        key: str,
        *,
        base_url: str,
        generate: Generate,
        renderer: Renderer,
        bounds: CaptureBounds,
        clock: Clock,
        in_flight: set[asyncio.Future],
        prompt_id: Hashable = None,
        journal: CaptureJournal | None = None,
        max_realigned_tokens: int = 0,
    ) -> None:
        self.name, self.key, self.base_url, self.prompt_id = name, key, base_url, prompt_id
        self.conversation = Conversation(max_realigned_tokens=max_realigned_tokens)
        self._generate, self._renderer = generate, renderer
        self._bounds, self._clock, self._journal = bounds, clock, journal
        self._in_flight = in_flight  # Of all sessions.
        self._waiting: set[asyncio.Future[BaseException]] = set()
        self._history = History(renderer)
        self._ended = False
        # Turns from before a crash, by prompt: an agent that begins anew is answered as it was.
        self._kept: dict[bytes, list[tuple[int, KeptTurn]]] = {}
        for place, turn in enumerate([] if journal is None else journal.turns(name)):
            self.conversation.append(turn.prompt, turn.sampled, **turn.values)
            self._kept.setdefault(turn.prompt.tobytes(), []).append((place, turn))

    async def ask(
        self, request: TurnRequest, *, gone: asyncio.Future[BaseException] | None = None
    ) -> TurnAnswer:
        """Answer a request, and record it as soon as the engine has answered.

        Args:
            gone: done with an error when nobody waits for the answer any more. The engine's
                request is then cancelled, unless it has answered.

        Raises:
            UsageError: the request does not fit.
            CapacityError: too many turns, or requests at a time.
            DeadlineError, EngineError: as `Generate`; whatever else it raises is an EngineError.
            ClosedError: the session has ended.
            CancelledError: as `gone` says. What was recorded stays.
        """
        if self._ended:
            raise self._end()
        prompt, options = self._history.prompt(request), self._options(request)
        if kept := self._kept.get(np.asarray(prompt.ids, np.int64).tobytes()):
            place, turn = kept.pop(0)
            ids, finish_reason = turn.sampled.tolist(), turn.values["finish_reason"]
        else:
            sampled = await self._sample(prompt.ids, options, gone)
            ids, finish_reason = [*sampled.token_ids], sampled.finish_reason
            place = self._append(prompt.ids, ids, sampled)
        return self._answer(
            request, prompt, place, ids, finish_reason, stops=options["stop_token_ids"]
        )

    def rollouts(
        self, *, reward: float | None = None, rewards: Mapping[str, float] | None = None
    ) -> tuple[Rollout, ...]:
        """Return the rollouts so far, as `Conversation.rollouts` does."""
        return self.conversation.rollouts(prompt_id=self.prompt_id, reward=reward, rewards=rewards)

    def close(self) -> None:
        """Refuse requests from now on, and cancel those under way. What was recorded stays."""
        self._ended = True
        for gone in self._waiting:
            if not gone.done():
                gone.set_result(self._end())

    def _answer(
        self,
        request: TurnRequest,
        prompt: Prompt,
        place: int,
        ids: list[int],
        finish_reason: str,
        *,
        stops: Collection[int],
    ) -> TurnAnswer:
        """Return what the agent reads of a turn, by which the ids are known again."""
        end = int(ids[-1] in stops)
        text, calls = self._renderer.parse(ids[: len(ids) - end], calls=request.calls)
        answer = TurnAnswer(
            id=f"{self.name}-{place}",
            content=text,
            # Nine letters and digits, as some templates want them.
            tool_calls=tuple(
                ToolCall(f"t{place:05}{i:03}", name, arguments)
                for i, (name, arguments) in enumerate(calls)
            ),
            finish_reason=finish_reason,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(ids),
        )
        self._history.keep(request, prompt, ids, answer, end=end)
        return answer

    def _end(self) -> ClosedError:
        return ClosedError(f"session {self.name} has ended")

    def _options(self, request: TurnRequest) -> dict[str, Any]:
        most = self._bounds.max_tokens
        if (count := request.max_tokens or most) > most:
            raise UsageError(
                f"max_tokens={count} is more than the {most} of this server. Ask for fewer, or "
                "raise CaptureBounds(max_tokens=)."
            )
        return {
            "max_tokens": count,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "seed": request.seed,
            "stop_token_ids": self._stop_ids(request),
            "timeout_s": self._bounds.timeout_s,
        }

    def _stop_ids(self, request: TurnRequest) -> tuple[int, ...]:
        ids = [*self._renderer.stop_token_ids, *request.stop_token_ids]
        for text in request.stop:
            if (found := self._renderer.stop_id(text)) is None:
                raise UnsupportedError(
                    f"stop={text[:40]!r} is no token of its own, so the engine, which stops at "
                    "ids, would miss some spellings of it. Use a special token, or stop_token_ids."
                )
            ids.append(found)
        return tuple(dict.fromkeys(ids))

    async def _sample(
        self,
        prompt: list[int],
        options: dict[str, Any],
        gone: asyncio.Future[BaseException] | None,
    ) -> Sampled:
        """Ask the engine within the bounds; only a completion of some tokens is returned."""
        self._check_room()
        unless = asyncio.get_running_loop().create_future() if gone is None else gone
        self._in_flight.add(unless)
        self._waiting.add(unless)
        try:
            sampled = await within(
                self._generate(prompt, **options),
                timeout_s=self._bounds.timeout_s,
                clock=self._clock,
                what=f"an answer in session {self.name}",
                unless=unless,
            )
        except PrimeblocksError:
            raise
        except Exception as error:  # Whatever it is, the agent gets an answer.
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error
        finally:
            self._in_flight.discard(unless)
            self._waiting.discard(unless)
        if not len(sampled.token_ids):
            raise EngineError("the engine ended a request without a token")
        return sampled

    def _check_room(self) -> None:
        bounds = self._bounds
        if len(self.conversation.turns) + len(self._waiting) >= bounds.turns:
            raise CapacityError(
                f"session {self.name} has had its {bounds.turns} turns. End it, or raise "
                "CaptureBounds(turns=)."
            )
        if len(self._in_flight) >= bounds.in_flight:
            raise CapacityError(
                f"{bounds.in_flight} requests are under way. Ask again later, or raise "
                "CaptureBounds(in_flight=)."
            )

    def _append(self, prompt: list[int], ids: list[int], sampled: Sampled) -> int:
        """Keep a turn; return its place."""
        values: dict[str, Any] = {
            "logprobs": np.asarray(sampled.logprobs, np.float64),
            "versions": np.asarray(sampled.versions),
            "finish_reason": sampled.finish_reason,
            "attachments": _attachments(sampled, len(prompt) + len(ids)),
        }
        try:
            turn = self.conversation.append(prompt, ids, **values)
        except UsageError as error:
            raise EngineError(f"the engine returned what cannot be recorded: {error}") from error
        if self._journal is not None:
            self._journal.append(self.name, turn, prompt, ids, **values)
        return len(self.conversation.turns) - 1


def _attachments(sampled: Sampled, length: int) -> dict[str, Aligned]:
    rows = sampled.routed_experts
    if rows is None or not len(rows):
        return {}
    # The last token was never computed; rows of the first may be left out.
    return {"routed_experts": Aligned.rows(rows, start=max(0, length - 1 - len(rows)))}
