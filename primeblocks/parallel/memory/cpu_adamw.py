"""AdamW whose state and arithmetic are on the host.

The host holds three tensors per parameter: a float32 master, a page-locked copy of the gradient,
and a page-locked copy of the weight. A step starts to copy all gradients. Then, parameter by
parameter, it waits for the gradient, updates the master, and starts to copy the weight back.

The master would undo writes from outside. So each step compares the parameter's version counter
with its value after the last step, and refuses a parameter that was written. `refresh` copies all
parameters to the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT, StateDict

from ...errors import ShapeError, UnsupportedError, UsageError
from ...layout import local_part
from .storages import plain_tensors

__all__ = ["CpuAdamW"]


class CpuAdamW(AdamW):
    """torch.optim.AdamW that keeps its moments, and a float32 master of the weights, on the host.

    A step copies the gradients to page-locked memory and runs torch's fused kernel on the host. It
    copies each weight back while it computes the next one.

    - float32 and float64 parameters get the bits of `AdamW(fused=True)` on a CPU. A CUDA kernel may
      round the last bit differently.
    - bfloat16 and float16 parameters get the master, rounded once.

    Local. A DTensor is updated through its local part, on any mesh. Step all ranks alike.

    This saves 8 bytes of device memory per float32 parameter, or 12 bytes if the device would also
    keep a float32 master. Each step copies the gradients to the host and the weights to the device
    once. If even the weights do not fit on the device, use FSDP2's `CPUOffloadPolicy` with plain
    AdamW. That policy sends the shards to the device in every forward and backward.

    `state_dict` is AdamW's, plus a "master" for parameters that are not float32 or float64. Each of
    the two classes loads the other's state.

    Args:
        params, lr, betas, eps, weight_decay: as for AdamW, also in groups.
        pin_memory: page-lock the copies. Default: for parameters on CUDA.

    Raises:
        UsageError: `params` is a model instead of its parameters.

    Source: arXiv:2101.06840 keeps state and update on the host likewise.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        pin_memory: bool | None = None,
    ) -> None:
        if isinstance(params, nn.Module):
            raise UsageError(
                f"params must be parameters or groups of them; got a {type(params).__name__}. "
                "Pass model.parameters()."
            )
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        # A GradScaler must unscale the gradients itself, because they are read on the device.
        self._step_supports_amp_scaling = False
        self._pin_memory = pin_memory
        self._hosts: dict[Tensor, _Host] = {}

    @property
    def host_bytes(self) -> dict[str, int]:
        """Measured host memory, in bytes: "state", "master" and "staging" (page-locked)."""
        moments = [x for state in self.state.values() for k, x in state.items() if k != "master"]
        hosts = self._hosts.values()
        return {
            "state": _num_bytes(moments),
            "master": _num_bytes(host.master for host in hosts),
            "staging": _num_bytes(x for host in hosts for x in host.staging()),
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients. Local.

        Raises:
            UsageError: a parameter was written since the last step, and the master would undo the
                write. Call `refresh` after writing.
            UnsupportedError: a gradient is sparse, or a group has amsgrad=True.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for i, (group, parameter) in enumerate(work):
            self._check(f"parameter {i} of {len(work)} with a gradient", group, parameter)
        for _, parameter in work:
            self._host(parameter).receive(parameter.grad)
        for group, parameter in work:
            host = self._host(parameter)
            _update(group, host.master, host.gradient(), self.state[parameter])
            host.send(parameter)
        return loss

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters to the masters. Call it after you change parameters. Local."""
        for parameter, host in self._hosts.items():
            host.refresh(parameter)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state of this class or of AdamW. Local.

        Load the model first, because masters that the state lacks are copied from the parameters.

        Raises:
            ShapeError: a moment has another shape than its parameter. Nothing was changed.
            ValueError: from torch, if the parameter groups differ.
        """
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        entries = [(p, state_dict["state"].get(i)) for i, p in zip(saved, parameters)]  # noqa: B905
        for i, (parameter, entry) in enumerate(entries):
            for name, value in (entry or {}).items():
                if name != "step" and value.shape != parameter.shape:
                    raise ShapeError(
                        f"{name} of parameter {i} has shape {list(value.shape)}, the parameter "
                        f"{list(parameter.shape)}. Load the state of the same model."
                    )
        # Excludes the state, which torch would cast to the parameters' dtype and device.
        super().load_state_dict({**state_dict, "state": {}})
        self._hosts.clear()
        for parameter, entry in entries:
            if entry:
                self._host(parameter)
                for name, value in self.state[parameter].items():
                    value.copy_(entry.get(name, value))

    def _host(self, parameter: Tensor) -> _Host:
        if (host := self._hosts.get(parameter)) is None:
            pin = parameter.is_cuda if self._pin_memory is None else self._pin_memory
            host = self._hosts[parameter] = _Host.of(parameter, pin=pin)
            master = host.master
            state = self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
            if master.dtype != parameter.dtype:
                state["master"] = master
        return host

    def _check(self, name: str, group: dict[str, Any], parameter: Tensor) -> None:
        if group["amsgrad"]:
            raise UnsupportedError("amsgrad=True is not kept on the host. Use amsgrad=False.")
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UnsupportedError(f"{name}: sparse gradients have no fused AdamW. Use dense ones.")
        host = self._hosts.get(parameter)
        if host is not None and host.tensor_version != parameter._version:
            raise UsageError(
                f"{name} was written since the last step (version {host.tensor_version}, now "
                f"{parameter._version}); its master would undo that. Call refresh() after writing."
            )


@dataclass
class _Host:
    """One parameter's part on the host."""

    master: Tensor
    outgoing: Tensor  # As the parameter, page-locked.
    incoming: Tensor | None  # As the gradient; `outgoing` itself where the dtypes agree.
    tensor_version: int  # Of the parameter, when it last agreed with the master.
    pin: bool
    arrived: torch.cuda.Event | None = None

    @classmethod
    def of(cls, parameter: Tensor, *, pin: bool) -> _Host:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        master = torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
        outgoing = torch.empty_like(local_part(parameter), device="cpu", pin_memory=pin)
        host = cls(master, outgoing, None, 0, pin)
        host.refresh(parameter)
        return host

    def staging(self) -> list[Tensor]:
        same = self.incoming is None or self.incoming is self.outgoing
        return [self.outgoing] if same else [self.outgoing, self.incoming]  # type: ignore[list-item]

    def refresh(self, parameter: Tensor) -> None:
        local_part(self.master).copy_(local_part(parameter))
        self.tensor_version = parameter._version

    def receive(self, gradient: Tensor) -> None:
        """Start to copy the gradient to the host."""
        local = local_part(gradient)
        if self.incoming is None or self.incoming.dtype != local.dtype:
            same = local.dtype == self.outgoing.dtype
            self.incoming = (
                self.outgoing
                if same
                else torch.empty_like(self.outgoing, dtype=local.dtype, pin_memory=self.pin)
            )
        self.incoming.copy_(local, non_blocking=True)
        if local.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(local.device))

    def gradient(self) -> Tensor:
        """Wait for the copy of the gradient, and return it in the master's dtype."""
        if self.arrived is not None:
            self.arrived.synchronize()
        assert self.incoming is not None
        return self.incoming.to(self.master.dtype)

    def send(self, parameter: Tensor) -> None:
        """Round the master to the parameter, and start to copy it to the device."""
        self.outgoing.copy_(local_part(self.master))
        local_part(parameter).copy_(self.outgoing, non_blocking=True)
        self.tensor_version = parameter._version


def _update(group: dict[str, Any], master: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [local_part(master)],
        [gradient],
        [local_part(state["exp_avg"])],
        [local_part(state["exp_avg_sq"])],
        [],
        [state["step"]],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {x.untyped_storage() for t in tensors for _, x in plain_tensors(t)}
    return sum(storage.nbytes() for storage in storages)
