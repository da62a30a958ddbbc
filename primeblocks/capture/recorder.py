"""Sessions under recording in front of one engine: opened, found by their keys, closed."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from ..clock import Clock, MonotonicClock
from ..errors import CapacityError, ClosedError, UsageError
from .journal import CaptureJournal
from .seams import Generate, Renderer
from .session import CaptureBounds, CaptureSession

__all__ = ["Recorder"]


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
        self._generate, self._renderer, self._journal = generate, renderer, journal
        self._most_realigned = max_realigned_tokens
        self._sessions: dict[str, CaptureSession] = {}
        self._in_flight: set[asyncio.Future] = set()
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
        session = self._sessions[name] = CaptureSession(
            name,
            secrets.token_urlsafe(32),
            base_url=f"{self.url}/s/{name}/v1",
            generate=self._generate,
            renderer=self._renderer,
            bounds=self.bounds,
            clock=self.clock,
            in_flight=self._in_flight,
            prompt_id=prompt_id,
            journal=self._journal,
            max_realigned_tokens=self._most_realigned,
        )
        try:
            yield session
        finally:
            session.close()
            self._sessions.pop(name, None)
            if self._journal is not None:
                self._journal.leave(name)

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
