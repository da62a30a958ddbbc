"""Arguments that make a vLLM engine return its routes, and the room that routes take."""

import json
import math
from typing import Any, Literal

from ....errors import UsageError
from .shape import RouterShape

__all__ = ["engine_args", "plan_capture_bytes", "server_args"]


def plan_capture_bytes(
    shape: RouterShape,
    *,
    page_tokens: int,
    device_pages: int,
    offloaded_pages: int = 0,
    slack: float = 2.0,
) -> int:
    """Return how many bytes of rows the engine must keep so that no cache hit outlives its rows.

    Rows of the engine's own pages lie beside them, and rows of `kvoffload`'s tiers travel with the
    pages: neither needs `offloaded_pages`. Pages of other tiers are looked up by hash in a store of
    this many bytes. A page that it forgot is missing with the plug-in's patch
    `missing_routes_survive`; without the patch the *engine dies*. Such tiers evict in another order
    than the store, hence `slack` for their pages. With `offload_prompt_only=True` generated pages
    take rows but never a tier's room: let `slack` be at least 1 + generated/prompt tokens. Pure.

    Args:
        page_tokens: tokens in a KV page (vLLM's block size).
        device_pages: pages of the engine's own KV cache.
        offloaded_pages: pages of all tiers behind it together.

    Raises:
        UsageError: a count is not positive, or slack is below 1.
    """
    if page_tokens < 1 or device_pages < 1 or offloaded_pages < 0 or not slack >= 1:
        raise UsageError(
            "needs page_tokens >= 1, device_pages >= 1, offloaded_pages >= 0 and slack >= 1; got "
            f"{page_tokens}, {device_pages}, {offloaded_pages} and {slack}."
        )
    pages = device_pages + math.ceil(offloaded_pages * slack)
    return pages * page_tokens * shape.bytes_per_token


def engine_args(*, max_bytes: int, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """Return the keywords of `LLM` or `AsyncEngineArgs` that switch capture on. Pure.

    On CPU this includes `enforce_eager=True`: under torch.compile every captured expert is 0.

    Args:
        max_bytes: room for rows, from `plan_capture_bytes`.

    Raises:
        UsageError: there is no room for a row.
    """
    if max_bytes < 1:
        raise UsageError(f"max_bytes must be positive; got {max_bytes}. Use plan_capture_bytes.")
    args: dict[str, Any] = {
        "enable_return_routed_experts": True,
        "aux_output_config": {"max_bytes": max_bytes},
    }
    if device == "cpu":
        args["enforce_eager"] = True
    return args


def server_args(*, max_bytes: int, device: Literal["cpu", "cuda"]) -> list[str]:
    """Return the same for the command line of vLLM's server, with `RoutesMiddleware`. Pure.

    Arguments and errors as `engine_args`.
    """
    words = []
    for name, value in engine_args(max_bytes=max_bytes, device=device).items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(json.dumps(value))
    return [*words, "--middleware", f"{__package__}.RoutesMiddleware"]
