"""Registration with vLLM's processes, arguments for engines and servers, and the calls of a server.

Calls use the endpoints of the server's development mode. They were tested with vLLM 0.32. Source:
entrypoints/rl/online/api_router.py and entrypoints/serve/dev/rpc/api_router.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ....errors import EngineError, MissingPackageError, UnsupportedError
from ..httpx import JsonServer

__all__ = ["BACKEND", "VllmServer", "engine_args", "register", "server_args"]

BACKEND = "primeblocks"
_WORKER = f"{__package__}.worker"
_EXTENSION = f"{_WORKER}.WorkerExtension"


def register() -> None:
    """Register our weight transfer backend with vLLM in this process. Local. Idempotent.

    Raises:
        MissingPackageError: vLLM is not installed.
        UnsupportedError: vLLM has a version other than 0.32 and 0.33.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ModuleNotFoundError as error:
        raise MissingPackageError("vllm", "vllm") from error
    if not vllm.__version__.startswith(("0.32.", "0.33.")):
        raise UnsupportedError(
            "primeblocks.weightsync was tested with vLLM 0.32, and its signatures were compared "
            f"with vLLM 0.33; found {vllm.__version__}. Install vllm==0.32.*."
        )
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _WORKER, "PrimeblocksEngine")


def engine_args() -> dict[str, Any]:
    """Return keyword arguments for `AsyncEngineArgs` or `LLM`.

    Local. Raises the errors of `register`.
    """
    register()
    from vllm.config import WeightTransferConfig

    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": _EXTENSION,
    }


def server_args() -> list[str]:
    """Return `engine_args` as arguments of a server's command line. Pure.

    The server also needs VLLM_SERVER_DEV_MODE=1 in its environment, and primeblocks installed. The
    process that calls `server_args` does not need vLLM.
    """
    transfer = json.dumps({"backend": BACKEND})
    return ["--weight-transfer-config", transfer, "--worker-extension-cls", _EXTENSION]


class VllmServer:
    """The address of one server. Pass a VllmServer to functions that take an engine.

    A VllmServer does not keep a connection open.

    Args:
        url: http://host:port of the server itself, not of an HTTP router.
        headers: HTTP headers that are sent with every request.

    Raises:
        UnsupportedError: `url` is not of the form http://host:port.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._server = JsonServer(url, headers=headers)

    def until(self, deadline: float) -> _Calls:
        """Return an object that calls the server. Each call ends by `deadline` (time.monotonic)."""
        return _Calls(self._server, deadline)


class _Calls:
    """The calls of an `AsyncLLM` that an update makes, over HTTP.

    A cancelled call may still reach the server. `errored` is true if the last call did not reach
    the server, or lost its connection.
    """

    def __init__(self, server: JsonServer, deadline: float) -> None:
        self._server, self._deadline = server, deadline
        self.errored = False

    async def is_paused(self) -> bool:
        return bool((await self._get("/is_paused"))["is_paused"])

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        query = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._post(f"/pause?{urlencode(query)}")

    async def wake_up(self, tags: list[str]) -> None:
        await self._post(f"/wake_up?{urlencode({'tags': tags}, doseq=True)}")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._post("/init_weight_transfer_engine", init_info=request.init_info)

    async def start_weight_update(self) -> None:
        await self._post("/start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._post("/update_weights", update_info=request.update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        label = {} if weight_version is None else {"weight_version": weight_version}
        await self._post("/finish_weight_update", **label)

    async def reset_encoder_cache(self) -> None:
        await self._post("/reset_encoder_cache")

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]:
        answer = await self._post("/collective_rpc", method=method, timeout=timeout, args=args)
        return list(answer["results"])

    async def get_weight_version(self) -> str:
        return str((await self._get("/weight_info"))["weight_version"])

    async def replicas(self) -> int:
        every = (await self._get("/get_world_size?include_dp=true"))["world_size"]
        one = (await self._get("/get_world_size?include_dp=false"))["world_size"]
        return int(every) // int(one)

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def _post(self, path: str, **body: Any) -> dict[str, Any]:
        return await self._call("POST", path, body or None)

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        self.errored = False
        exchange = self._server.exchange(method, path, body, deadline=self._deadline)
        try:
            status, answer = await exchange
        except EngineError:
            self.errored = True
            raise
        if status == 404:
            raise EngineError(
                f"{self._server.url} has no {path}. Start the server with VLLM_SERVER_DEV_MODE=1 "
                "and server_args()."
            )
        if status != 200:
            raise EngineError(
                f"{self._server.url}{path} answered {status}: {str(answer)[:500]}. Look at the "
                "server's log."
            )
        return answer
