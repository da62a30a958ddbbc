"""Send the weights of TRL 1.16's `AsyncGRPOTrainer` to any engine, with a `Publisher`.

Pass a `TrlTransfer` as the argument `weight_transfer=` of `AsyncGRPOTrainer`. TRL gathers each
weight on its main rank, so one rank sends all weights. This module does not import TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ClosedError, UsageError
from ..manifest import describe
from ..marker import Receipt
from ..plan import Plan
from ..planner import plan_sync
from ..publish import Publisher
from ..transports.transport import Transport

__all__ = ["TrlTransfer"]


class TrlTransfer:
    """Publishes TRL's weights, and makes the engine load them.

    The first call of `send_weights` makes the plan and attaches the engine. The first transfer is
    version 1, and each later transfer is the next version. Cost: a copy of the model in `dtype` in
    host memory, filled one weight at a time. If `full_every` is above 1, the cost is two copies of
    the model.

    Args:
        transport: the trainer's end of the transport. You must close the transport yourself.
        attach: `attach(plan)` connects the engine to the transport.
        update: `update(receipt)` makes the engine load a version, and may pause the engine.
        run: `run(coroutine, timeout_s=)` runs a coroutine in the engine's event loop and returns
            its result, like `EventThread.call`.
        dtype: the dtype of the engine's weights.
        timeout_s: the longest time that each publish, attach and update may take.
        full_every: as for `Publisher`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        attach: Callable[[Plan], Coroutine[Any, Any, Any]],
        update: Callable[[Receipt], Coroutine[Any, Any, Any]],
        run: Callable[..., Any],
        dtype: torch.dtype = torch.bfloat16,
        full_every: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        self.version = 0
        self.receipts: list[Receipt] = []
        self._transport, self._attach, self._update, self._run = transport, attach, update, run
        self._dtype, self._full_every, self._timeout_s = dtype, full_every, timeout_s
        self._held: dict[str, Tensor] = {}
        self._publisher: Publisher | None = None
        self._closed = False

    def init_weight_transfer(self) -> None:
        """Do nothing. `send_weights` opens the transfer."""

    def pause(self) -> None:
        """Do nothing. The engine continues to generate until it loads the new weights."""

    def resume(self) -> None:
        """Do nothing.

        A successful update resumes the engine, and a failed update raises an error.
        """

    @torch.no_grad()
    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Send all weights as the next version, and return when the engine has loaded it. Local.

        Raises:
            PrimeblocksError: the errors of `Publisher.publish`, `attach` and `update`. TRL ends the
                training run with the error. You may call `send_weights` again. The new transfer
                has the same version number if the publish failed, and the next version number if
                the update failed.
            UsageError: TRL's weights have other names or shapes than in the first transfer.
            ClosedError: `destroy` was called.
        """
        if self._closed:
            raise ClosedError("this TrlTransfer was destroyed. Make a new TrlTransfer.")
        publisher = self._publisher
        if publisher is None:
            self._held = {
                name: self._empty(name, tensor).copy_(tensor) for name, tensor in iterator
            }
            publisher = self._open()
        else:
            self._refill(iterator)
        receipt = publisher.publish(self.version + 1, timeout_s=self._timeout_s)
        self.version = receipt.version  # A failed update must not publish this number again.
        self._run(self._update(receipt), timeout_s=self._timeout_s)
        self.receipts.append(receipt)

    def destroy(self) -> None:
        """Free the copy of the weights. The engine keeps its weights. Idempotent."""
        self._closed = True
        if self._publisher is not None:
            self._publisher.close()
        self._held = {}

    def _open(self) -> Publisher:
        source = describe(self._held)
        plan = plan_sync([source], source.whole())
        self._run(self._attach(plan), timeout_s=self._timeout_s)
        group = None
        if dist.is_initialized():  # TRL's other ranks do not publish.
            me = dist.get_rank()
            group = dist.new_group([me], backend="gloo", use_local_synchronization=True)
        full_every = self._full_every
        self._publisher = Publisher(
            plan, self._held, self._transport, group=group, full_every=full_every
        )
        return self._publisher

    def _refill(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        seen = 0
        for name, tensor in iterator:
            held = self._held.get(name)
            if held is None or held.shape != tensor.shape:
                shape = "absent" if held is None else tuple(held.shape)
                raise UsageError(
                    f"TRL sends {name!r} with shape {tuple(tensor.shape)}, but in the first "
                    f"transfer it was {shape}. Do not freeze parameters after training has begun."
                )
            held.copy_(tensor)
            seen += 1
        if seen != len(self._held):
            raise UsageError(
                f"TRL sent {seen} weights, but the first transfer had {len(self._held)}. Do not "
                "freeze parameters after training has begun."
            )

    def _empty(self, name: str, tensor: Tensor) -> Tensor:
        dtype = describe({name: tensor}, dtype=self._dtype)[name].dtype
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")
