"""One rank's part of one version: taken from its tensors once, digested, made smaller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor

import torch
from jaxtyping import UInt8
from torch import Tensor

from ..errors import DeadlineError, TransferError
from .delta.bucket import apply_payload, encode_payload
from .digest import as_buffer
from .held import packed_views
from .parts import Parts
from .plan import Plan

__all__ = ["History", "Shipment"]


class History:
    """The bytes that this rank sent last, packed, from which the next deltas are made."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.buffers: dict[int, UInt8[Tensor, " bytes"]] = {}

    def forget(self) -> None:
        """Have the next version sent in full."""
        self.version = None
        self.buffers = {}


class Shipment:
    """An `Outgoing`: pieces of the parameters, with the bytes that were sent of them before.

    Attributes:
        digests: of each bucket that was asked for.
        sizes: bytes of each as it travels.
    """

    def __init__(
        self,
        parts: Parts,
        plan: Plan,
        rank: int,
        version: int,
        *,
        base: int | None,
        history: History | None,
        helper: Executor | None,
        deadline: float,
    ) -> None:
        self.plan, self.rank, self.version, self.base = plan, rank, version, base
        self.digests: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self._parts, self._helper, self._deadline = parts, helper, deadline
        self._history, self._payloads = history, dict[int, memoryview]()
        if history is not None and base is None:
            history.forget()  # Its room is needed for what is sent now.
        elif base is not None and (history is None or history.version != base):
            raise TransferError(f"rank {rank} has not what it sent as version {base} any more")

    def fill(self, index: int, into: Sequence[Tensor]) -> None:
        self.sizes[index] = self.plan.buckets[index].bytes
        if self._history is None:
            self._take(index, into)
            return
        if index not in self._history.buffers:
            self._history.buffers[index] = self._packed(index)
        kept = packed_views(self.plan, index, self._history.buffers[index])
        for view, piece in zip(into, kept, strict=True):
            view.copy_(piece)

    def payload(self, index: int) -> memoryview:
        if index not in self._payloads:
            packed = self._packed(index)
            coded = None
            if self._history is not None and self.base is not None:
                coded = encode_payload(self.plan, index, packed, self._history.buffers[index])
            self._payloads[index] = as_buffer(packed) if coded is None else memoryview(coded)
            self.sizes[index] = len(self._payloads[index])
        return self._payloads[index]

    def digest_all(self) -> None:
        """Take every piece, for its digest alone."""
        for index in self.plan.of_rank(self.rank):
            self._take(index, None)
            self.sizes[index] = self.plan.buckets[index].bytes

    def sent(self) -> None:
        """Remember what was sent as the base of the next delta."""
        if self._history is None:
            return
        for index, payload in self._payloads.items():
            buffer = self._history.buffers[index]
            if len(payload) == len(buffer):
                self._history.buffers[index] = torch.frombuffer(payload, dtype=torch.uint8)
            else:
                apply_payload(self.plan, index, buffer, payload)
        self._history.version = self.version

    def _packed(self, index: int) -> UInt8[Tensor, " bytes"]:
        """Return a bucket in new memory."""
        buffer = torch.empty(self.plan.buckets[index].bytes, dtype=torch.uint8)
        self._take(index, packed_views(self.plan, index, buffer))
        return buffer

    def _take(self, index: int, into: Sequence[Tensor] | None) -> None:
        if time.monotonic() > self._deadline:
            done, whole = len(self.digests), len(self.plan.of_rank(self.rank))
            raise DeadlineError(f"took {done} of {whole} buckets before the deadline")
        self.digests[index] = self._parts.fill(index, into, helper=self._helper)
