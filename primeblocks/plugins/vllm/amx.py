"""Intel's matrix instructions (AMX) under vLLM's CPU kernels: Linux grants them on request only."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...errors import UnsupportedError
from ..patch import Patch, SelfTest, ours, stock

__all__ = ["PATCH"]

_INIT = "vllm.v1.worker.cpu_worker:CPUWorker.init_device"


def _init_device(stock_init: Callable[[Any], None]) -> Callable[[Any], None]:
    def init_device(worker: Any) -> None:
        _ask_for_amx(worker)
        stock_init(worker)

    return init_device


def _ask_for_amx(worker: Any) -> None:
    # Granted to the whole process, including its later threads. Asking again is harmless.
    if not _needs_amx(worker) or torch.cpu._init_amx():
        return
    raise UnsupportedError(
        "vLLM's kernels for bfloat16 use AMX, which this processor has and the kernel did not "
        "grant (arch_prctl, ARCH_REQ_XCOMP_PERM): the first token would end the process by "
        'SIGILL. Pass dtype="float32" or "float16", or let the process have AMX: Linux 5.16 or '
        "later, no sandbox that filters arch_prctl, alternate signal stacks of 11 KiB or more."
    )


def _needs_amx(config: Any) -> bool:
    """Whether vLLM chooses a kernel that uses AMX. All such kernels take bfloat16."""
    is_bfloat16 = config.model_config.dtype == torch.bfloat16
    return is_bfloat16 and torch.cpu._is_amx_tile_supported()


class _Reached(Exception):
    """The host's own code runs."""


class _Probe:
    """A worker that stops the host's code at its first step."""

    def __init__(self) -> None:
        self.__dict__["model_config"] = SimpleNamespace(dtype=torch.bfloat16)

    def __setattr__(self, name: str, value: object) -> None:
        raise _Reached


def _test_amx() -> SelfTest:
    """Check that a worker asks before it starts, and stops if the answer is no."""
    from unittest import mock

    def outcome(init_device: Callable[[Any], None], *, granted: bool) -> str:
        with (
            mock.patch.object(torch.cpu, "_is_amx_tile_supported", return_value=True),
            mock.patch.object(torch.cpu, "_init_amx", return_value=granted) as ask,
        ):
            try:
                init_device(_Probe())
            except UnsupportedError:
                return "refused"
            except _Reached:
                return "asked" if ask.called else "went on"
        return "went on"

    current = {granted: outcome(ours(_INIT), granted=granted) for granted in (True, False)}
    return SelfTest(
        needed=outcome(stock(_INIT), granted=False) == "went on",
        effective=current == {True: "asked", False: "refused"},
    )


PATCH = Patch(
    name="amx_on_cpu",
    reason="On processors with AMX the kernels for bfloat16 use it without asking the kernel for "
    "it, so the first token ends the process by SIGILL unless somebody else has asked before.",
    tested="vllm==0.32.*",
    replacements={_INIT: _init_device},
    self_test=_test_amx,
    asked=_needs_amx,
)
