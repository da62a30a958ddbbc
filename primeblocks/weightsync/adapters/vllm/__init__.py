"""Weight updates of running vLLM engines: offline `LLM`, `AsyncLLM` and the HTTP server.

`primeblocks.plugins.vllm` calls `register` in every process of vLLM. Build an engine with
`engine_args()`, or a server with `server_args()`. Call `attach` once per engine or server. After
each publish, call `update`, or `update_all` for several engines. Offline code uses `attach_llm` and
`update_llm`.

This module imports vLLM only if you use `PrimeblocksEngine` or `WorkerExtension`, so that a
trainer can drive servers without vLLM.
"""

from typing import TYPE_CHECKING, Any

from .front import (
    InFlight,
    UpdateReport,
    attach,
    attach_llm,
    describe,
    describe_llm,
    observe,
    observe_llm,
    update,
    update_all,
    update_llm,
)
from .loads import with_draft
from .server import BACKEND, VllmServer, engine_args, register, server_args

if TYPE_CHECKING:
    from .worker import PrimeblocksEngine, WorkerExtension

__all__ = [
    "BACKEND",
    "InFlight",
    "PrimeblocksEngine",
    "UpdateReport",
    "VllmServer",
    "WorkerExtension",
    "attach",
    "attach_llm",
    "describe",
    "describe_llm",
    "engine_args",
    "observe",
    "observe_llm",
    "register",
    "server_args",
    "update",
    "update_all",
    "update_llm",
    "with_draft",
]


def __getattr__(name: str) -> Any:
    if name in ("PrimeblocksEngine", "WorkerExtension"):
        from . import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
