"""A client that updates the weights of an SGLang server over a shared disk.

We have never run this client with SGLang. The client follows the source code of sglang 0.5.23 (the
wheel on PyPI), and does not import SGLang. The client is tested with a fake server that imitates
these files of SGLang: `srt/entrypoints/http_server.py`,
`srt/managers/{io_struct,tokenizer_manager,tokenizer_control_mixin,scheduler}.py`,
`srt/managers/scheduler_components/weight_updater.py`, and `weight_updater.py` in
`srt/model_executor/model_runner_components`.

Three properties of SGLang explain the design of this client:

1. Because SGLang "rolls back" a failed load by reading the new path again, this client restores the
   old version itself.
2. Because SGLang can swap the responses to two concurrent loads, this client runs one load at a
   time.
3. Because SGLang does not verify the loaded bytes, `ModelFolders` verifies the bytes before a load,
   and this client compares checksums after a load.

Call `attach`, `pause`, `load` and `resume` in this order. `attach` reads the version of the
server's weights. `pause` stops generation. `load` loads a new version, and restores the old version
if the server refuses the new version. `resume` continues generation. If `load` raises an error
other than TransferError, the weights are unknown and the server stays paused.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...errors import (
    DeadlineError,
    EngineError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ...weightsync.adapters.httpx import JsonServer
from ..model_folders import ModelFolder

__all__ = ["InFlight", "Sglang", "SglangReport"]

_OLDEST = (0, 5, 23)

InFlight = Literal["continue", "recompute", "abort"]
# Pause mode, and whether the update may drop the KV cache. "in_place" keeps requests that need it.
_PAUSE: dict[str, tuple[str, bool]] = {
    "continue": ("in_place", False),
    "recompute": ("retract", True),
    "abort": ("abort", True),
}


@dataclass(frozen=True)
class SglangReport:
    """The duration of an update in seconds, and SGLang's checksum of the weights on all ranks.

    Engines with equal sharding and version have equal checksums.
    """

    version: int
    seconds: float
    pause_seconds: float
    checksum: str


@dataclass(frozen=True)
class _Held:
    label: str
    path: str
    checksum: str


class Sglang:
    """One SGLang server, which the client reaches without a router. All methods block the caller.

    Call `attach` first, and then `update` for each new version. To update several engines at the
    same time, call `pause`, `load` and `resume` instead of `update`.

    Args:
        url: the address of the server, http://host:port. The server must find each `ModelFolder`
            under the same path as this process.
        api_key: the value of the server's option --admin-api-key or --api-key.

    Raises:
        UnsupportedError: `url` is not of the form http://host:port.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._server = JsonServer(url, headers=headers)
        self._held: _Held | None = None
        self._flush: bool | None = None
        self._torn = False

    @property
    def version(self) -> int | None:
        """The version that was loaded last, or None if the server's label is not an integer."""
        label = "" if self._held is None else self._held.label
        return int(label) if label.isdecimal() else None

    def attach(self, *, timeout_s: float) -> None:
        """Read the version of the server's weights, to restore it after a failed update.

        The call does not change weights. The weights must be complete and in memory, because the
        call makes SGLang compute their checksum once.

        Raises:
            UnsupportedError: the server is older than 0.5.23. An older server exits if it refuses
                to flush its cache.
            DeadlineError, EngineError: as for `load`.
        """
        deadline = time.monotonic() + timeout_s
        found = str(self._ask("GET", "/server_info", None, deadline, needs="version")["version"])
        if tuple(int(digits) for digits in re.findall(r"\d+", found)[:3]) < _OLDEST:
            oldest = ".".join(map(str, _OLDEST))
            raise UnsupportedError(
                f"{self._server.url} runs SGLang {found}; this client needs {oldest} or later."
            )
        model = self._model(deadline)
        self._held = _Held(*model, checksum=self._checksum(deadline))

    def update(
        self, folder: ModelFolder, *, in_flight: InFlight = "continue", timeout_s: float
    ) -> SglangReport:
        """Pause, load, check and resume. You may call `update` again after a failure.

        SGLang's responses contain `meta_info["weight_versions"]`, the version of each token as
        `str(version)`.

        Args:
            folder: the result of `ModelFolders.make`.
            in_flight: what happens to running requests. "continue" keeps the KV cache that the old
                weights computed. "recompute" computes the KV cache again with the new weights.
                "abort" ends the running requests. With "continue" the prefix cache keeps old pages,
                so use one `cache_salt` per version.
            timeout_s: the deadline of the whole call, in seconds. The call reserves a part of
                `timeout_s` to restore the previous version and to resume.

        Raises:
            TransferError: the server refused the folder, and serves the previous version again.
            DeadlineError, EngineError: as for `load`. If the load failed, the server stays paused,
                so that it samples no token with mixed weights. Call `update` again, or restart the
                server.
        """
        start = time.monotonic()
        try:
            self.pause(in_flight, timeout_s=0.2 * timeout_s)
        except (DeadlineError, EngineError):
            if not self._torn:
                with contextlib.suppress(DeadlineError, EngineError):
                    self.resume(timeout_s=0.1 * timeout_s)
            raise
        paused = time.monotonic()
        left_s = start + timeout_s - paused
        try:
            checksum = self.load(folder, timeout_s=0.9 * left_s)
        except TransferError:
            self.resume(timeout_s=0.1 * left_s)
            raise
        self.resume(timeout_s=0.1 * left_s)
        end = time.monotonic()
        return SglangReport(folder.version, end - start, end - paused, checksum)

    def pause(self, in_flight: InFlight, *, timeout_s: float) -> None:
        """Stop generation until `resume`. See `update` for the meaning of `in_flight`.

        Raises:
            DeadlineError, EngineError: as for `load`.
            UsageError: `attach` was not called, or the value of `in_flight` is unknown.
        """
        self._attached()
        if in_flight not in _PAUSE:
            raise UsageError(f"in_flight must be one of {list(_PAUSE)}; got {in_flight!r}.")
        mode, flush = _PAUSE[in_flight]
        self._ask("POST", "/pause_generation", {"mode": mode}, time.monotonic() + timeout_s)
        self._flush = flush

    def resume(self, *, timeout_s: float) -> None:
        """Continue generation after `pause`.

        Do not call `resume` if `load` raised an error other than TransferError, because the
        server's weights are then unknown.

        Raises:
            DeadlineError, EngineError: as for `load`.
        """
        self._ask("POST", "/continue_generation", {}, time.monotonic() + timeout_s)
        self._flush = None

    def load(self, folder: ModelFolder, *, timeout_s: float) -> str:
        """Load a version into a paused server, and return the checksum of the weights.

        You may load the version that the server already has. If the server refuses the folder,
        `load` loads the previous version again, and compares the checksum with the previous
        checksum.

        Args:
            folder: the result of `ModelFolders.make`.
            timeout_s: the deadline of the whole call, in seconds. The new version must load within
                half of `timeout_s`.

        Raises:
            TransferError: the server refused the folder, and has loaded the previous version.
            DeadlineError: the server did not respond in time, and may still load the version. Call
                `load` again.
            EngineError: the server died, sent an unexpected response, or has mixed weights. Restart
                the server.
            UsageError: `attach` or `pause` was not called.
        """
        before = self._attached()
        if self._flush is None:
            raise UsageError("call pause() before load(), and resume() after it.")
        start = time.monotonic()
        deadline = start + timeout_s
        new = _Held(str(folder.version), str(folder.path), "")
        # The response comes after a load that still runs because its caller gave up.
        self._ask("GET", "/server_info", None, deadline)
        self._torn = True  # Until it is known to be whole.
        refusal = self._try(new, start + timeout_s / 2)
        if refusal is None:
            self._held, self._torn = replace(new, checksum=self._checksum(deadline)), False
            return self._held.checksum
        refusal = _cause(refusal)
        text = f"{self._server.url} did not load version {folder.version}: {refusal}"
        again = self._try(before, deadline)
        if again is not None:
            again = _cause(again)
            raise EngineError(
                f"{text}. Going back to {before.path} failed too: {again}. Restart the server."
            )
        if self._checksum(deadline) != before.checksum:
            raise EngineError(
                f"{text}. The previous version was loaded again, but its checksum changed. Restart "
                "the server."
            )
        self._torn = False
        raise TransferError(f"{text}. Version {before.label!r} was loaded again.")

    def _attached(self) -> _Held:
        if self._held is None:
            raise UsageError(f"call attach() first; {self._server.url} is not attached.")
        return self._held

    def _try(self, wanted: _Held, deadline: float) -> str | None:
        """Load a folder. Return the reason if the server did not load it, or None."""
        body = {
            "model_path": wanted.path,
            "load_format": "auto",
            "weight_version": wanted.label,
            "flush_cache": self._flush,
        }
        path = "/update_weights_from_disk"
        status, answer = self._server.exchange_blocking("POST", path, body, deadline=deadline)
        if status == 400 and answer.get("success") is False:
            return " ".join(str(answer.get("message")).split())
        self._expect("POST", path, status, answer, needs="success")
        holds = self._model(deadline)
        if holds != (wanted.label, wanted.path):
            return f"it says that it holds version {holds[0]!r} from {holds[1]}"
        return None

    def _model(self, deadline: float) -> tuple[str, str]:
        info = self._ask("GET", "/model_info", None, deadline, needs="weight_version")
        return str(info["weight_version"]), str(info.get("model_path"))

    def _checksum(self, deadline: float) -> str:
        body, needs = {"action": "checksum"}, "per_engine_checksum"
        return str(self._ask("POST", "/weights_checker", body, deadline, needs=needs)[needs])

    def _ask(
        self, method: str, path: str, body: Any, deadline: float, *, needs: str | None = None
    ) -> Mapping[str, Any]:
        status, answer = self._server.exchange_blocking(method, path, body, deadline=deadline)
        return self._expect(method, path, status, answer, needs)

    def _expect(
        self, method: str, path: str, status: int, answer: Mapping[str, Any], needs: str | None
    ) -> Mapping[str, Any]:
        if status != 200 or (needs is not None and needs not in answer):
            raise EngineError(
                f"{self._server.url} answered {status} {str(dict(answer))[:300]} to {method} {path}"
                + (f"; {needs!r} was expected." if status == 200 else ".")
            )
        return answer


def _cause(text: str) -> str:
    """Return a text without the remedy of another error, because this error ends in its own."""
    return text.removesuffix(" Restart it.").rstrip(".")
