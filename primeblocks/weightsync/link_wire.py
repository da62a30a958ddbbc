"""Pack a rank's buckets, send or receive them two at a time, and check each on arrival."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import CorruptionError, DeadlineError, PlanError
from .link_plan import DIGEST_BYTES, LinkBucket, LinkPlan
from .manifest import NamedTensors, named_tensors
from .plan import Copy

__all__ = ["Wire", "local_parts"]

_IN_FLIGHT = 2


def local_parts(plan: LinkPlan, rank: int, parameters: NamedTensors) -> dict[str, Tensor]:
    """This trainer rank's parts of the tensors that it sends. Local; moves no data.

    Raises:
        PlanError: a tensor is missing, or has another local shape or dtype than it was described
            with.
    """
    source, named = plan.sources[rank], named_tensors(parameters)
    parts = {}
    for name in {copy.name for bucket in plan.of_rank(rank) for copy in bucket.copies}:
        if name not in named:
            raise PlanError(f"rank {rank} shall send {name!r} and has no such tensor; plan again.")
        tensor, spec = named[name].detach(), source[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        floats = local.dtype.is_floating_point and spec.dtype.is_floating_point
        fits = tuple(local.shape) == spec.layout.shard.sizes
        if not fits or not (floats or local.dtype == spec.dtype):
            raise PlanError(
                f"{name!r} is {tuple(local.shape)} {local.dtype} on rank {rank} and was described "
                f"as {spec.layout.shard.sizes} {spec.dtype}; describe it anew and plan again."
            )
        parts[name] = local
    return parts


class Wire:
    """One rank's end of one transaction. Its messages carry the transaction in their digests."""

    def __init__(
        self,
        plan: LinkPlan,
        rank: int,
        transaction: str,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        deadline: float,
    ) -> None:
        self._plan, self._transaction = plan, transaction
        self._group, self._device, self._deadline = group, device, deadline
        self._rank, self._buckets = rank, plan.of_rank(rank)
        size = max((bucket.bytes for bucket in self._buckets), default=0) + DIGEST_BYTES
        self._buffers = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in self._buckets[:_IN_FLIGHT]
        ]
        self._works: list[dist.Work | None] = [None] * _IN_FLIGHT
        self._digest = xxhash.xxh3_128()

    def send(self, parts: Mapping[str, Tensor]) -> str:
        """Send every bucket of this rank; a digest over all of them, the same for the same bytes.

        Raises:
            RuntimeError: what the backend raises when a receiver died or the deadline passed.
            DeadlineError: the deadline passed.
        """
        held = self._plan.sources[self._rank]
        for index, bucket in enumerate(self._buckets):
            self._wait(index)
            message = self._message(index)
            for copy in bucket.copies:
                box = copy.box.within(held[copy.name].layout.shard)
                self._view(message, copy, bucket).copy_(parts[copy.name][box.slices])
            seal = torch.frombuffer(bytearray(self._seal(message, bucket)), dtype=torch.uint8)
            message[bucket.bytes :].copy_(seal)
            self._works[index % _IN_FLIGHT] = dist.isend(
                message, group_dst=bucket.receiver, group=self._group
            )
        for slot in range(_IN_FLIGHT):
            self._wait(slot)
        return self._digest.hexdigest()

    def receive(self) -> tuple[dict[str, Tensor], str]:
        """Receive every bucket of this rank: its boxes by name, and a digest as of `send`.

        Raises:
            CorruptionError: a bucket is not what was sent for it in this transaction.
            RuntimeError: what the backend raises when a sender died or the deadline passed.
            DeadlineError: the deadline passed.
        """
        wanted = self._plan.targets[self._rank - len(self._plan.sources)]
        staged = {
            name: torch.empty(spec.layout.shard.sizes, dtype=spec.dtype, device=self._device)
            for name, spec in wanted.items()
        }
        for index in range(min(_IN_FLIGHT, len(self._buckets))):
            self._post(index)
        for index, bucket in enumerate(self._buckets):
            self._wait(index)
            message = self._message(index)
            if message[bucket.bytes :].cpu().numpy().tobytes() != self._seal(message, bucket):
                raise CorruptionError(
                    f"{bucket.bytes:,} bytes from rank {bucket.sender} to rank {bucket.receiver} "
                    f"in round {bucket.round} fail their digest; they hold "
                    f"{len(bucket.copies)} boxes, first of {bucket.copies[0].name!r}"
                )
            for copy in bucket.copies:
                box = copy.box.within(wanted[copy.name].layout.shard)
                staged[copy.name][box.slices].copy_(self._view(message, copy, bucket))
            if index + _IN_FLIGHT < len(self._buckets):
                self._post(index + _IN_FLIGHT)
        return staged, self._digest.hexdigest()

    def _post(self, index: int) -> None:
        self._works[index % _IN_FLIGHT] = dist.irecv(
            self._message(index), group_src=self._buckets[index].sender, group=self._group
        )

    def _wait(self, index: int) -> None:
        """Until the buffer that this bucket uses is done with."""
        work = self._works[index % _IN_FLIGHT]
        if work is None:
            return
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineError(f"bucket {index} of {len(self._buckets)} came too late")
        # Not 0: a work's wait takes that for "for ever".
        work.wait(timedelta(seconds=max(0.001, remaining_s)))

    def _message(self, index: int) -> Tensor:
        size = self._buckets[index].bytes + DIGEST_BYTES
        return self._buffers[index % _IN_FLIGHT][:size]

    def _view(self, message: Tensor, copy: Copy, bucket: LinkBucket) -> Tensor:
        dtype = self._plan.targets[bucket.receiver - len(self._plan.sources)][copy.name].dtype
        return message[copy.offset : copy.offset + copy.bytes].view(dtype).view(copy.box.sizes)

    def _seal(self, message: Tensor, bucket: LinkBucket) -> bytes:
        """The digest of these weights in this place: right bytes for another bucket fail."""
        digest = xxhash.xxh3_128_intdigest(message[: bucket.bytes].cpu().numpy().data)
        self._digest.update(digest.to_bytes(DIGEST_BYTES, "big"))
        place = f"{self._transaction}/{bucket.sender}/{bucket.receiver}/{bucket.round}"
        return (digest ^ xxhash.xxh3_128_intdigest(place.encode())).to_bytes(DIGEST_BYTES, "big")
