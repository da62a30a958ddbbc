"""Recording of rollouts in front of one engine: sessions, opened and found by their keys.

A session answers an agent's requests by the engine and keeps each turn token by token. It is open
until its context ends or the recorder closes. Then requests under way are cancelled, later ones are
refused, and what was recorded stays.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Collection, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attachments import Aligned
from ..clock import Clock, MonotonicClock, within
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

__all__ = ["CaptureBounds", "CaptureSession", "Recorder"]


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

    def __init__(self, recorder: Recorder, name: str, *, prompt_id: Hashable) -> None:
        self.name, self.key, self.prompt_id = name, secrets.token_urlsafe(32), prompt_id
        self.base_url = f"{recorder.url}/s/{name}/v1"
        self.conversation = Conversation(max_realigned_tokens=recorder.max_realigned_tokens)
        self._recorder, self._journal = recorder, recorder.journal
        self._waiting: set[asyncio.Future[BaseException]] = set()
        self._history = History(recorder.renderer)
        self._ended = False
        # Turns from before a crash, by prompt: an agent that begins anew is answered as it was.
        self._kept: dict[bytes, list[tuple[int, KeptTurn]]] = {}
        for place, turn in enumerate([] if self._journal is None else self._journal.turns(name)):
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
        text, calls = self._recorder.renderer.parse(ids[: len(ids) - end], calls=request.calls)
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
        most = self._recorder.bounds.max_tokens
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
            "timeout_s": self._recorder.bounds.timeout_s,
        }

    def _stop_ids(self, request: TurnRequest) -> tuple[int, ...]:
        ids = [*self._recorder.renderer.stop_token_ids, *request.stop_token_ids]
        for text in request.stop:
            if (found := self._recorder.renderer.stop_id(text)) is None:
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
        self._recorder.in_flight.add(unless)
        self._waiting.add(unless)
        try:
            sampled = await within(
                self._recorder.generate(prompt, **options),
                timeout_s=self._recorder.bounds.timeout_s,
                clock=self._recorder.clock,
                what=f"an answer in session {self.name}",
                unless=unless,
            )
        except PrimeblocksError:
            raise
        except Exception as error:  # Whatever it is, the agent gets an answer.
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error
        finally:
            self._recorder.in_flight.discard(unless)
            self._waiting.discard(unless)
        if not len(sampled.token_ids):
            raise EngineError("the engine ended a request without a token")
        return sampled

    def _check_room(self) -> None:
        bounds = self._recorder.bounds
        if len(self.conversation.turns) + len(self._waiting) >= bounds.turns:
            raise CapacityError(
                f"session {self.name} has had its {bounds.turns} turns. End it, or raise "
                "CaptureBounds(turns=)."
            )
        if len(self._recorder.in_flight) >= bounds.in_flight:
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


class Recorder:
    """The sessions of one engine. Belongs to one event loop.

    Args:
        generate: the engine; an `async` callable of ids, as `Generate` says.
        renderer: makes ids of messages, `adapters.transformers.ChatTemplate` for instance.
        model: the name that the agents see.
        journal: keeps turns on disk. It stays the caller's to close.
        max_realigned_tokens: as of `Conversation`.

    Attributes:
        url: what the URLs of sessions begin with; whoever serves it sets it.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        *,
        model: str = "policy",
        bounds: CaptureBounds | None = None,
        journal: CaptureJournal | None = None,
        max_realigned_tokens: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.url = model, ""
        self.bounds = CaptureBounds() if bounds is None else bounds
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.generate, self.renderer, self.journal = generate, renderer, journal
        self.max_realigned_tokens = max_realigned_tokens
        self.in_flight: set[asyncio.Future[BaseException]] = set()  # Of all sessions.
        self._sessions: dict[str, CaptureSession] = {}
        self._closed = False

    @asynccontextmanager
    async def session(
        self, *, prompt_id: Hashable = None, name: str | None = None
    ) -> AsyncIterator[CaptureSession]:
        """Open a session for as long as the context lasts. What it recorded stays with it.

        Args:
            prompt_id: of its rollouts.
            name: a part of its URL, and its name in the journal; a random one by default.

        Raises:
            UsageError: the name is not made of letters, digits, "-" and "_", or is in use.
            CapacityError: too many sessions are open.
            ClosedError: the recorder is closed.
        """
        if self._closed:
            raise ClosedError("the recorder is closed")
        if len(self._sessions) >= self.bounds.sessions:
            raise CapacityError(
                f"{self.bounds.sessions} sessions are open. End some, or raise "
                "CaptureBounds(sessions=)."
            )
        name = secrets.token_hex(8) if name is None else name
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise UsageError(f'a name is made of letters, digits, "-" and "_"; got {name!r}')
        if name in self._sessions:
            raise UsageError(f"session {name} is open already")
        session = self._sessions[name] = CaptureSession(self, name, prompt_id=prompt_id)
        try:
            yield session
        finally:
            session.close()
            self._sessions.pop(name, None)
            if self.journal is not None:
                self.journal.leave(name)

    def find(self, name: str, key: str) -> CaptureSession | None:
        """Return a session, or None: there is none of that name, or the key is another's.

        Takes as long for the one as for the other.
        """
        session = self._sessions.get(name)
        expected = secrets.token_urlsafe(32) if session is None else session.key
        is_right = hmac.compare_digest(expected.encode(), key.encode())
        return session if is_right else None

    def close(self) -> None:
        """Close every session, and open none from now on."""
        self._closed = True
        for session in self._sessions.values():
            session.close()


def _attachments(sampled: Sampled, length: int) -> dict[str, Aligned]:
    rows = sampled.routed_experts
    if rows is None or not len(rows):
        return {}
    # The last token was never computed; rows of the first may be left out.
    return {"routed_experts": Aligned.rows(rows, start=max(0, length - 1 - len(rows)))}
