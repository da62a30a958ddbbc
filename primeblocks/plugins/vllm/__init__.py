"""vLLM's entry point (`vllm.general_plugins`), loaded by vLLM in every process that it starts.

It registers the blocks' adapters with vLLM's factories and looks at each engine's configuration.
If a configuration asks for a patch, code of vLLM that has no hook is patched. Other engines are not
changed. An engine without captured routes and without a part of primeblocks can only get the patch
`amx_on_cpu`.

Each patch names its reason and symbols, and logs that it is applied. It is applied only to tested
versions of vLLM. Any other vLLM stays unchanged, with one warning, so that installing primeblocks
never breaks an engine. Version 0.33 was compared and never run, because it has no build for CPUs.
It is patched only for an engine with a tier of ours. A tier without routes gets only the patch
`stores_before_reuse`. A warning says that this version was never run.

`PRIMEBLOCKS_VLLM_PATCHES_OFF="name,name"` switches patches off. docs/decisions/vllm_plugin.md says
why that is an environment variable.
"""

import logging
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from ...errors import MissingPackageError, UnsupportedError, UsageError
from ..patch import Patch, replace
from . import cpu_platform, missing_routes, routed_experts, routes_with_pages
from .scheduled_blocks import STORES_FIRST, carries_routes, lift_cap, watch_loads

__all__ = ["COMPARED", "LOGGER", "OFF", "PATCHES", "TESTED", "refusals", "register", "require"]

TESTED = "0.32"
COMPARED = "0.33"  # Its signatures and its Python code were compared, but no engine was run.
OFF = "PRIMEBLOCKS_VLLM_PATCHES_OFF"
LOGGER = "vllm.primeblocks"  # vLLM shows only its own loggers, at VLLM_LOGGING_LEVEL.
PATCHES = (
    cpu_platform.AMX,
    routed_experts.PATCH,
    cpu_platform.MOE_RELOAD,
    missing_routes.PATCH,
    routes_with_pages.PATCH,
    routed_experts.OVER_NIXL,
    STORES_FIRST,
)
_CONFIG = "vllm.config.vllm:VllmConfig.__post_init__"
_FRONT = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
_WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
_ENGINE = "vllm.v1.core.sched.scheduler:Scheduler.__init__"


def _is(version: str, release: str) -> bool:
    return release.split(".")[:2] == version.split(".")


def refusals(*, release: str, is_cpu: bool, off: str) -> dict[str, str]:
    """Return the reason and the remedy for each refused patch. Local. Pure."""
    switched_off = {name.strip() for name in off.split(",")}
    refused = {}
    for patch in PATCHES:
        if not _is(TESTED, release) and not (patch.compared and _is(COMPARED, release)):
            refused[patch.name] = f"vLLM {release} was not tested. Install {patch.tested}"
        elif patch.cpu_only and not is_cpu:
            refused[patch.name] = "it is for vLLM's CPU platform. Other platforms do not need it"
        elif patch.name in switched_off:
            refused[patch.name] = f"{OFF} contains its name. Remove the name from that variable"
    for patch in PATCHES:
        if lost := [name for name in patch.needs if name in refused]:
            refused.setdefault(patch.name, f"it needs {lost[0]}: {refused[lost[0]]}")
    return refused


def _here() -> dict[str, Any]:
    """Return the facts about this process that `refusals` needs."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        raise MissingPackageError("vllm", "vllm") from error
    off = os.environ.get(OFF, "")
    return {"release": vllm.__version__, "is_cpu": current_platform.is_cpu(), "off": off}


@cache
def _warn_once(message: str) -> None:
    logging.getLogger(LOGGER).warning(message)


def _apply(patch: Patch) -> None:
    if not patch.applied():
        patch.apply()
        logging.getLogger(LOGGER).info(
            "primeblocks patches vLLM in this process: %s. %s", patch.name, patch.reason
        )


def _apply_asked(patches: Iterable[Patch], config: Any) -> None:
    """Apply the patches that a configuration asks for. Warn about those that it cannot have."""
    here = _here()
    refused = refusals(**here)
    if _is(COMPARED, here["release"]) and not carries_routes(config):
        patches = [patch for patch in patches if patch is STORES_FIRST]
    for patch in patches:
        if (patch.cpu_only and not here["is_cpu"]) or not patch.asked(config):
            continue
        if patch.name in refused:
            _warn_once(f"this engine needs the patch {patch.name}: {refused[patch.name]}.")
            continue
        try:
            _apply(patch)
        except UnsupportedError as error:
            _warn_once(f"primeblocks leaves out a patch of vLLM: {error}")


def _looking_config(stock_post_init: Callable[..., None]) -> Callable[..., None]:
    """Apply the patches of a configuration's check before the check, in front end and engine."""

    def post_init(config: Any, *more: Any, **kwargs: Any) -> None:
        _apply_asked([routed_experts.PATCH, routed_experts.OVER_NIXL], config)
        stock_post_init(config, *more, **kwargs)

    return post_init


def _looking_front(stock_create: Callable[..., Any]) -> Callable[..., Any]:
    """Make a configuration, and refuse one that captures wrong rows."""

    def create_engine_config(args: Any, *more: Any, **kwargs: Any) -> Any:
        config = stock_create(args, *more, **kwargs)
        # Not inside VllmConfig, because pydantic would turn our error into its own.
        routed_experts.check_capture(config)
        return config

    return create_engine_config


def _looking_worker(stock_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Apply a worker's patches before it starts its device, which is its first step."""

    def init_device(wrapper: Any) -> None:
        _apply_asked(PATCHES, wrapper.vllm_config)
        stock_init(wrapper)

    return init_device


def _looking_engine(stock_init: Callable[..., None]) -> Callable[..., None]:
    """Apply the scheduler's part of a patch, because its process may not be a worker's."""

    def init(scheduler: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        _apply_asked([routes_with_pages.PATCH], vllm_config)
        stock_init(scheduler, vllm_config, *args, **kwargs)
        if routes_with_pages.PATCH.applied():
            watch_loads(scheduler)
            lift_cap(scheduler, vllm_config)

    return init


def register() -> None:
    """Register adapters with vLLM, and wrap functions of vLLM so that they apply patches.

    vLLM calls `register` in the front end, the engine and every worker. `register` wraps four
    functions of vLLM. Unless a configuration asks for a patch, the wrapped functions behave as in
    vLLM. Idempotent. Local. Warns once instead of raising.
    """
    here = _here()
    names = [patch.name for patch in PATCHES]
    if _is(COMPARED, here["release"]):
        _warn_once(
            f"primeblocks was run with vLLM {TESTED}.*. For vLLM {COMPARED}, signatures were "
            f"compared and parts were run without an engine. Engines of {COMPARED} were never run."
        )
    elif not _is(TESTED, here["release"]):
        _warn_once(
            f"primeblocks does nothing in vLLM {here['release']}, because it was tested with "
            f"{TESTED}.*. It leaves out {', '.join(names)} and the weight-transfer engines."
        )
        return
    if unknown := {name.strip() for name in here["off"].split(",")} - {"", *names}:
        _warn_once(
            f"{OFF} contains unknown names: {sorted(unknown)}. The patches are: {', '.join(names)}."
        )
    looking: dict[str, Callable[[Any], Any]] = {
        _CONFIG: _looking_config,
        _FRONT: _looking_front,
        _ENGINE: _looking_engine,
        _WORKER: _looking_worker,
    }
    try:
        replace(looking, name="primeblocks_looks", tested=f"vllm=={TESTED}.*")
    except UnsupportedError as error:
        _warn_once(f"primeblocks patches nothing in this vLLM: {error}")
    from ...weightsync.adapters import vllm as engines

    engines.register()
    _register_models()


def _register_models() -> None:
    """Register the model of `primeblocks.exact`. vLLM imports it if a configuration names it."""
    from vllm import ModelRegistry

    name, model = "PrimeblocksExactForCausalLM", "primeblocks.exact.adapters.vllm:ExactForCausalLM"
    ModelRegistry.register_model(name, model)


def require(name: str) -> None:
    """Demand a patch: apply it in this process, whatever configurations ask for.

    Use `require` for engines in this process, and for engines that vLLM forks from this process. A
    spawned process applies the patches that its engine's configuration asks for.

    Raises:
        UsageError: no patch has this name.
        UnsupportedError: the patch cannot be applied. The message says why, and what to do.
        MissingPackageError: vLLM is not installed.
    """
    patches = {patch.name: patch for patch in PATCHES}
    if name not in patches:
        raise UsageError(f"no patch is named {name!r}. The patches are: {', '.join(patches)}.")
    if (refusal := refusals(**_here()).get(name)) is not None:
        raise UnsupportedError(f"{name} is not applied: {refusal}.")
    _apply(patches[name])
