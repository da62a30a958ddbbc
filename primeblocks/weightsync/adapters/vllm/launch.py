"""Registration with vLLM's processes: a registry entry, arguments for engines and servers."""

from __future__ import annotations

import json
from typing import Any

from ....errors import MissingPackageError, UnsupportedError

__all__ = ["BACKEND", "engine_args", "register", "server_args"]

BACKEND = "primeblocks"
_WORKER = f"{__package__}.worker"
_EXTENSION = f"{_WORKER}.WorkerExtension"


def register() -> None:
    """Make the backend known to vLLM in this process. Idempotent; local.

    Run with vLLM 0.32. Of 0.33 the signatures were compared, and no engine ever was run.

    Raises:
        MissingPackageError: vLLM is not installed.
        UnsupportedError: it is another one.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ModuleNotFoundError as error:
        raise MissingPackageError("vllm", "vllm") from error
    if not vllm.__version__.startswith(("0.32.", "0.33.")):
        raise UnsupportedError(
            "primeblocks.weightsync was run with vLLM 0.32, and its signatures were compared with "
            f"0.33; this is {vllm.__version__}. Install vllm==0.32.*."
        )
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _WORKER, "PrimeblocksEngine")


def engine_args() -> dict[str, Any]:
    """Return keyword arguments for `AsyncEngineArgs` or `LLM`. Local.

    Raises:
        MissingPackageError: vLLM is not installed.
    """
    register()
    from vllm.config import WeightTransferConfig

    return {
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": _EXTENSION,
    }


def server_args() -> list[str]:
    """Return `engine_args` as words of a server's command line. Pure.

    The server also needs VLLM_SERVER_DEV_MODE=1 in its environment.

    vLLM need not be installed here; where the server runs, primeblocks must be.
    """
    transfer = json.dumps({"backend": BACKEND})
    return ["--weight-transfer-config", transfer, "--worker-extension-cls", _EXTENSION]
