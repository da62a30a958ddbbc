"""vLLM's entry point (`vllm.general_plugins`), loaded by vLLM in every process that it starts.

It registers the blocks' adapters with vLLM's factories and patches what has no hook, most of it on
the CPU platform only. Each patch names its reason and symbols, has a self-test, and is applied to
the tested versions only; any other vLLM is left alone with one warning, so that installing
primeblocks never breaks an engine. `PRIMEBLOCKS_VLLM_PATCHES_OFF="name,name"` switches patches off
(why that is a variable: docs/decisions/vllm_plugin.md).
"""

import logging
import os
from functools import cache
from typing import Any

from ...errors import MissingPackageError, UnsupportedError, UsageError
from . import missing_routes, moe_reload, routed_experts, routes_with_pages

__all__ = ["OFF", "PATCHES", "TESTED", "refusals", "register", "require"]

TESTED = "0.32"
OFF = "PRIMEBLOCKS_VLLM_PATCHES_OFF"
PATCHES = (routed_experts.PATCH, moe_reload.PATCH, missing_routes.PATCH, routes_with_pages.PATCH)


def _is_tested(version: str) -> bool:
    return version.split(".")[:2] == TESTED.split(".")


def refusals(*, version: str, is_cpu: bool, off: str) -> dict[str, str]:
    """Say, for each patch that is not to be applied, why and what to do. Local; pure."""
    switched_off = {name.strip() for name in off.split(",")}
    refused = {}
    for patch in PATCHES:
        if not _is_tested(version):
            refused[patch.name] = f"vLLM {version} was not tested; install {patch.tested}"
        elif patch.cpu_only and not is_cpu:
            refused[patch.name] = "it is for vLLM's CPU platform; other platforms need no patch"
        elif patch.name in switched_off:
            refused[patch.name] = f"{OFF} names it; take it out of that variable"
    return refused


def _here() -> dict[str, Any]:
    """Collect the facts about this process that `refusals` asks for."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise MissingPackageError("vllm", "vllm") from error
    off = os.environ.get(OFF, "")
    return {"version": vllm.__version__, "is_cpu": current_platform.is_cpu(), "off": off}


@cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)


def register() -> None:
    """Register adapters with vLLM and apply the patches; what does not fit is left out.

    vLLM calls this in the front end, the engine and every worker. Idempotent; local; on the CPU
    platform it imports vLLM's model runner, about a second. Warns once instead of raising.
    """
    here = _here()
    names = [patch.name for patch in PATCHES]
    if not _is_tested(here["version"]):
        _warn_once(
            f"primeblocks does nothing in vLLM {here['version']}: it was tested with {TESTED}.*. "
            f"Left out: {', '.join(names)} and the weight-transfer engines."
        )
        return
    if unknown := {name.strip() for name in here["off"].split(",")} - {"", *names}:
        _warn_once(f"{OFF} names no patch: {sorted(unknown)}. There are: {', '.join(names)}.")
    refused = refusals(**here)
    for patch in PATCHES:
        if patch.name not in refused:
            try:
                patch.apply()
            except UnsupportedError as error:
                _warn_once(f"primeblocks leaves out a patch of vLLM: {error}")
    from ...weightsync.adapters import vllm as engines

    engines.register()


def require(name: str) -> None:
    """Demand a patch: apply it in this process, as vLLM will in the processes that it starts.

    Raises:
        UsageError: no patch has this name.
        UnsupportedError: it cannot be applied; the message says why and what to do.
        MissingPackageError: vLLM is not installed.
    """
    patches = {patch.name: patch for patch in PATCHES}
    if name not in patches:
        raise UsageError(f"no patch is named {name!r}; there are: {', '.join(patches)}.")
    if (refusal := refusals(**_here()).get(name)) is not None:
        raise UnsupportedError(f"{name} is not applied: {refusal}.")
    patches[name].apply()
