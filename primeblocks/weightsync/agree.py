"""Messages between trainer ranks, each exchange bounded by a deadline."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransferError, UnsupportedError, UsageError
from .held import left_s

__all__ = ["Messenger"]

# Larger messages are broadcast. An all_gather would pad every rank's message to the longest.
_GATHERED_BYTES = 1 << 16


class Messenger:
    """Exchanges JSON objects between all trainer ranks.

    After a failed exchange the group's state is unknown, so every later exchange is refused.

    Args:
        group: a gloo group. None is the default group, if torch.distributed is initialized.

    Raises:
        UsageError: the group does not have `world_size` ranks.
        UnsupportedError: the group does not support gloo.
    """

    def __init__(self, *, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._broken = ""
        joined = group is not None or dist.is_initialized()
        self.size = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0
        if self.size != world_size:
            raise UsageError(
                f"the plan is for {world_size} ranks, but the group has {self.size} ranks. Make a "
                "plan from the manifest of each rank of this group."
            )
        if self.size > 1 and "gloo" not in str(dist.get_backend_config(group)):
            raise UnsupportedError(
                f"the group has the backend {dist.get_backend_config(group)}, but waits with a "
                "deadline need gloo. Pass group=torch.distributed.new_group(backend='gloo')."
            )

    def exchange(self, message: dict[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        """Return every rank's message, by rank. Collective. Cost: memory for all messages.

        Gathers the sizes, then the messages of at most 64 KiB. Each rank with a larger message
        broadcasts this message.

        Raises:
            TransferError: a peer died, or did not call before `deadline` (time.monotonic).
        """
        if self._broken:
            raise TransferError(
                f"the group failed earlier: {self._broken}. Make a new group and a new Publisher."
            )
        if self.size == 1:
            return [message]
        text = bytearray(json.dumps(message).encode())
        told = self._gather(torch.tensor([len(text)], device="cpu"), deadline)
        sizes = [int(size) for size in told]
        width = max((size for size in sizes if size <= _GATHERED_BYTES), default=0)
        texts = [torch.empty(0, dtype=torch.uint8, device="cpu")] * self.size
        if width:
            texts = self._gather(_bytes(text[:width].ljust(width)), deadline)
        for rank, size in enumerate(sizes):
            if size > width:
                mine = rank == self.rank
                texts[rank] = _bytes(text if mine else bytearray(size))
                send = partial(dist.broadcast, texts[rank], group=self._group, group_src=rank)
                self._wait(send, deadline)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    def _gather(self, mine: Tensor, deadline: float) -> list[Tensor]:
        theirs = [torch.zeros_like(mine) for _ in range(self.size)]
        self._wait(partial(dist.all_gather, theirs, mine, group=self._group), deadline)
        return theirs

    def _wait(self, start: Callable[..., dist.Work | None], deadline: float) -> None:
        # Not 0, because `work.wait` takes 0 as a wait without end.
        patience = timedelta(seconds=left_s(deadline, least_s=0.001))
        try:
            work = start(async_op=True)
            assert work is not None
            work.wait(patience)
        except RuntimeError as error:
            self._broken = str(error).splitlines()[0][:200]
            raise TransferError(
                f"rank {self.rank} of {self.size} lost its peers, or the deadline passed: "
                f"{self._broken}. The committed version did not change. Make a new group and a "
                "new Publisher."
            ) from error


def _bytes(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8)
