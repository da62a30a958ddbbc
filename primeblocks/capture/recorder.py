"""Recording of rollouts in front of one engine. A name and a key identify a session.

A session forwards an agent's requests to the engine and records each turn token by token. A turn is
recorded when the engine has answered, even if the agent has left. A session is open until its
context ends or the recorder closes. Then it cancels running requests and refuses later ones. The
recorded turns stay. Without bounds an agent could send any number of requests, so `CaptureBounds`
limits them.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Collection, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..attachments import Aligned
from ..clock import Clock, MonotonicClock, within
from ..errors import (
    CapacityError,
    ClosedError,
    EngineError,
    PrimeblocksError,
    UsageError,
)
from ..rollout import Rollout
from .conversation import Conversation
from .history import History, Prompt, Renderer
from .request import ToolCall, TurnAnswer, TurnRequest

__all__ = ["CaptureBounds", "CaptureSession", "Generate", "Recorder", "Sampled"]


class Sampled(Protocol):
    """A completion, such as `async_loop.adapters.vllm.Completion`.

    `token_ids`, `logprobs` and `versions` have one entry per sampled token. `routed_experts` has
    one row per token of prompt and completion, except the last token. The engine may leave out rows
    of the first tokens. `routed_experts` must be None if the engine does not return routes.
    """

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> ArrayLike: ...
    @property
    def versions(self) -> NDArray[np.int64]: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def routed_experts(self) -> NDArray | None: ...


class Generate(Protocol):
    """An engine that samples one completion of token ids, including the stop id."""

    async def __call__(
        self,
        prompt: Sequence[int],
        /,
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None,
        stop_token_ids: Sequence[int],
        timeout_s: float,
    ) -> Sampled:
        """Sample one completion.

        Raises:
            UsageError: the request does not fit the engine.
            CapacityError: the engine has no room for the request now.
            DeadlineError: the engine did not answer within `timeout_s`.
            EngineError: the engine died or refused the request.
            PrimeblocksError: the engine aborted the request. The agent may send it again.
        """


@dataclass(frozen=True, kw_only=True)
class CaptureBounds:
    """The limits of a recorder. A request beyond a limit gets an error of `primeblocks.errors`.

    Args:
        turns: the largest number of turns of one session.
        in_flight: the largest number of requests that wait for the engine, over all sessions.
        body_bytes: the largest body of a request, in bytes.
        max_tokens: the largest number of tokens of one answer, also for requests without
            `max_tokens`.
        timeout_s: seconds to wait at most for an answer of the engine.
        transfer_timeout_s: seconds to wait at most until a request has arrived in full, and until
            the agent has read a response.

    Raises:
        UsageError: a limit is not positive.
    """

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
    """One conversation that is being recorded. `Recorder.session` makes sessions.

    If an agent sends an answer back unchanged, the next prompt contains the answer's sampled ids.
    The recorder tokenises only the text after the answer. If the agent changes an earlier message,
    only answers before the changed message keep their sampled ids, and `conversation` gets a
    REALIGN or FORK turn.

    Attributes:
        base_url: the base URL for the agent's client, which includes `name`.
        key: the secret that the agent's client needs as `api_key`.
        conversation: the recorded turns so far.
    """

    def __init__(self, recorder: Recorder, name: str, *, prompt_id: Hashable) -> None:
        self.name, self.key, self.prompt_id = name, secrets.token_urlsafe(32), prompt_id
        self.base_url = f"{recorder.url}/s/{name}/v1"
        self.conversation = Conversation(max_realigned_tokens=recorder.max_realigned_tokens)
        self._recorder = recorder
        self._waiting: set[asyncio.Future[BaseException]] = set()
        self._history = History(recorder.renderer)
        self._ended = False

    async def ask(
        self, request: TurnRequest, *, gone: asyncio.Future[BaseException] | None = None
    ) -> TurnAnswer:
        """Answer a request, and record the turn as soon as the engine has answered.

        Args:
            gone: a future that gets an error as its result when the agent closes its connection.
                When `gone` is done, the request to the engine is cancelled, unless the engine has
                answered.

        Raises:
            UsageError: the request does not fit the engine, the chat template or the bounds.
            CapacityError: the session has `bounds.turns` turns, including running requests. Also
                raised if `bounds.in_flight` requests are running in all sessions together.
            DeadlineError, EngineError, PrimeblocksError: as for `Generate`. Every other exception
                of `generate` becomes an EngineError.
            ClosedError: the session has ended.
            CancelledError: the agent closed its connection (see `gone`). Recorded turns stay.
        """
        if self._ended:
            raise self._end()
        prompt, options = self._history.prompt(request), self._options(request)
        sampled = await self._sample(prompt.ids, options, gone)
        self._append(prompt.ids, sampled)
        return self._answer(request, prompt, sampled, options["stop_token_ids"])

    def rollouts(
        self, *, reward: float | None = None, rewards: Mapping[str, float] | None = None
    ) -> tuple[Rollout, ...]:
        """Return the rollouts so far, as `Conversation.rollouts` does."""
        return self.conversation.rollouts(prompt_id=self.prompt_id, reward=reward, rewards=rewards)

    def close(self) -> None:
        """Refuse later requests, and cancel running requests. Recorded turns stay readable."""
        self._ended = True
        for gone in self._waiting:
            if not gone.done():
                gone.set_result(self._end())

    def _answer(
        self,
        request: TurnRequest,
        prompt: Prompt,
        sampled: Sampled,
        stops: Collection[int],
    ) -> TurnAnswer:
        """Return the agent's view of the last turn, and remember it to recognise the ids later."""
        ids, place = [*sampled.token_ids], len(self.conversation.turns) - 1
        end = int(ids[-1] in stops)
        text, calls = self._recorder.renderer.parse(ids[: len(ids) - end], calls=request.calls)
        answer = TurnAnswer(
            id=f"{self.name}-{place}",
            content=text,
            # Nine letters and digits, because some templates require them.
            tool_calls=tuple(
                ToolCall(f"t{place:05}{i:03}", name, arguments)
                for i, (name, arguments) in enumerate(calls)
            ),
            finish_reason=sampled.finish_reason,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(ids),
        )
        self._history.keep(request, prompt, ids, answer, end=end)
        return answer

    def _end(self) -> ClosedError:
        return ClosedError(f"session {self.name} has ended. Open another session.")

    def _options(self, request: TurnRequest) -> dict[str, Any]:
        most, stops = self._recorder.bounds.max_tokens, self._recorder.renderer.stop_token_ids
        if (count := request.max_tokens or most) > most:
            raise UsageError(
                f"max_tokens={count} is above the limit of this server, {most}. Ask for fewer "
                "tokens, or raise CaptureBounds(max_tokens=)."
            )
        return {
            "max_tokens": count,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "seed": request.seed,
            "stop_token_ids": tuple(dict.fromkeys([*stops, *request.stop_token_ids])),
            "timeout_s": self._recorder.bounds.timeout_s,
        }

    async def _sample(
        self,
        prompt: list[int],
        options: dict[str, Any],
        gone: asyncio.Future[BaseException] | None,
    ) -> Sampled:
        """Call the engine within the bounds. The returned completion has at least one token."""
        bounds = self._recorder.bounds
        if len(self.conversation.turns) + len(self._waiting) >= bounds.turns:
            raise CapacityError(
                f"session {self.name} has reached the bound of {bounds.turns} turns. End it, or "
                "raise CaptureBounds(turns=)."
            )
        if len(self._recorder.in_flight) >= bounds.in_flight:
            raise CapacityError(
                f"{bounds.in_flight} requests are under way. Ask again later, or raise "
                "CaptureBounds(in_flight=)."
            )
        unless = asyncio.get_running_loop().create_future() if gone is None else gone
        self._recorder.in_flight.add(unless)
        self._waiting.add(unless)
        try:
            sampled = await within(
                self._recorder.generate(prompt, **options),
                timeout_s=bounds.timeout_s,
                clock=self._recorder.clock,
                what=f"an answer in session {self.name}",
                unless=unless,
            )
        except PrimeblocksError:
            raise
        except Exception as error:  # The agent must get an answer in any case.
            raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error
        finally:
            self._recorder.in_flight.discard(unless)
            self._waiting.discard(unless)
        if not len(sampled.token_ids):
            raise EngineError("the engine returned an answer without a token")
        return sampled

    def _append(self, prompt: list[int], sampled: Sampled) -> None:
        """Record a turn."""
        try:
            self.conversation.append(
                prompt,
                sampled.token_ids,
                logprobs=np.asarray(sampled.logprobs, np.float64),
                versions=np.asarray(sampled.versions),
                finish_reason=sampled.finish_reason,
                attachments=_attachments(sampled, len(prompt) + len(sampled.token_ids)),
            )
        except UsageError as error:
            raise EngineError(
                f"the engine returned an answer that cannot be recorded: {error}"
            ) from error


class Recorder:
    """The sessions of one engine. Use a recorder from one event loop.

    Args:
        generate: the engine, as an async callable (see `Generate`).
        renderer: the converter of messages to ids, such as `adapters.transformers.ChatTemplate`.
        model: the model name that agents see.
        max_realigned_tokens: as for `Conversation`.

    Attributes:
        url: the beginning of the sessions' URLs, which `CaptureServer` sets.
    """

    def __init__(
        self,
        generate: Generate,
        renderer: Renderer,
        *,
        model: str = "policy",
        bounds: CaptureBounds | None = None,
        max_realigned_tokens: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.model, self.url = model, ""
        self.bounds = CaptureBounds() if bounds is None else bounds
        self.clock: Clock = MonotonicClock() if clock is None else clock
        self.generate, self.renderer = generate, renderer
        self.max_realigned_tokens = max_realigned_tokens
        self.in_flight: set[asyncio.Future[BaseException]] = set()  # Of all sessions.
        self._sessions: dict[str, CaptureSession] = {}
        self._closed = False

    @asynccontextmanager
    async def session(
        self, *, prompt_id: Hashable = None, name: str | None = None
    ) -> AsyncIterator[CaptureSession]:
        """Open a session, which ends with the `async with` block. Recorded turns stay readable.

        Args:
            prompt_id: the prompt id of the session's rollouts.
            name: the name of the session in its URL. The default is a random name.

        Raises:
            UsageError: the name contains other characters than letters, digits, "-" and "_", or an
                open session has this name.
            ClosedError: the recorder is closed.
        """
        if self._closed:
            raise ClosedError("the recorder is closed. Create another recorder.")
        name = secrets.token_hex(8) if name is None else name
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise UsageError(f'a name may have only letters, digits, "-" and "_"; got {name!r}')
        if name in self._sessions:
            raise UsageError(f"session {name} is already open. End it, or choose another name.")
        session = self._sessions[name] = CaptureSession(self, name, prompt_id=prompt_id)
        try:
            yield session
        finally:
            session.close()
            self._sessions.pop(name, None)

    def find(self, name: str, key: str) -> CaptureSession | None:
        """Return an open session, or None if the name is unknown or the key is wrong.

        The time of the call does not depend on whether the name or the key is wrong.
        """
        session = self._sessions.get(name)
        expected = secrets.token_urlsafe(32) if session is None else session.key
        is_right = hmac.compare_digest(expected.encode(), key.encode())
        return session if is_right else None

    def close(self) -> None:
        """Close every session, and refuse to open more sessions."""
        self._closed = True
        for session in self._sessions.values():
            session.close()


def _attachments(sampled: Sampled, length: int) -> dict[str, Aligned]:
    rows = sampled.routed_experts
    if rows is None or not len(rows):
        return {}
    # The last token was never computed. Rows of the first tokens may be missing.
    return {"routed_experts": Aligned.rows(rows, start=max(0, length - 1 - len(rows)))}
