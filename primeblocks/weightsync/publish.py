"""Trainer side: every rank writes its shards, then rank 0 commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import (
    ClosedError,
    DeadlineError,
    PlanError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from ..layout import layout_of
from .agree import Agreement
from .digest import BucketDigest, copy_view
from .manifest import NamedTensors, named_tensors
from .marker import Marker, Receipt
from .plan import Copy, Plan
from .transport import Transport

__all__ = ["Encode", "Publisher"]

Encode = Callable[[str, Tensor], Mapping[str, Tensor]]

_MESSAGE_BYTES = 4096
_ERROR_CHARS = 600  # A character takes up to six bytes in JSON.
_DIGEST_BYTES = 68


class Publisher:
    """Writes a model's weights to a transport, version by version. Every rank has one.

    Args:
        plan: equal on all ranks; its sources are the ranks of `group`, in order.
        parameters: what `describe` was given. A module is read again at each publish.
        transport: the same place on all ranks; rank 0 owns it.
        group: a gloo group; None is the default group, or no group for a plan of one rank.
        encode: called with each name and this rank's part of it before the cast to the target's
            dtype, for simulated quantization for example. It returns the same name with the
            same shape; anything else is refused, because the plan has no place for it.

    Raises:
        UsageError: the plan is for another number of ranks.
        UnsupportedError: the group has no gloo.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: NamedTensors,
        transport: Transport,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        encode: Encode | None = None,
    ) -> None:
        self._agreement = Agreement(world_size=plan.world_size, group=group)
        # Pairs may be an iterator: it would be empty the second time.
        self._parameters: nn.Module | Mapping[str, Tensor] = (
            parameters if isinstance(parameters, nn.Module) else named_tensors(parameters)
        )
        self._plan, self._transport, self._encode = plan, transport, encode
        self._fingerprint = plan.fingerprint()
        self._closed = False

    def publish(self, version: int, *, timeout_s: float) -> Receipt:
        """Write and commit one version. Collective.

        Readers see either all of it or nothing. Call it again with the same version after a
        failure: what was already committed is compared, not written.

        Cost: one copy and one SHA-256 of the bytes this rank writes; three small all-gathers.

        Raises:
            TransferError: some rank failed, died or was late; the committed version did not
                change, unless rank 0's commit was the last thing that succeeded.
            UsageError: `version` is not above the committed one, or ranks disagree about it.
            ClosedError: after close().
        """
        if self._closed:
            raise ClosedError("this Publisher was closed")
        start = time.monotonic()
        deadline = start + timeout_s
        try:
            opened = self._step(self._open, version, deadline=deadline, then=_same_version)[0]
            wrote = self._step(self._write, version, opened["writes"], deadline, deadline=deadline)
            digests = {rank: reply["digests"] for rank, reply in enumerate(wrote)}
            done = self._step(self._commit, version, opened, digests, deadline=deadline)[0]
        except BaseException:
            if self._agreement.rank == 0:
                self._transport.abort(version)
            raise
        return Receipt(version, self._plan.bytes_total, time.monotonic() - start, done["digest"])

    def close(self) -> None:
        """Refuse further use. Local; the transport stays open."""
        self._closed = True

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _step(
        self,
        work: Callable[..., dict[str, Any]],
        *args: object,
        deadline: float,
        then: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Do a rank's work, tell the others how it went, and fail together."""
        failure: Exception | None = None
        message: dict[str, Any] = {}
        try:
            message = work(*args)
        except Exception as error:  # Peers must hear of any error, or they wait for nothing.
            failure = error
            text = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
            message = {"error": text, "usage": isinstance(error, UsageError)}
        most = max(len(self._plan.of_rank(rank)) for rank in range(self._plan.world_size))
        size_bytes = _MESSAGE_BYTES + _DIGEST_BYTES * most
        replies = self._agreement.exchange(message, size_bytes=size_bytes, deadline=deadline)
        failed = {rank: reply for rank, reply in enumerate(replies) if "error" in reply}
        if failed:
            text = "; ".join(f"rank {rank}: {reply['error']}" for rank, reply in failed.items())
            usage = all(reply["usage"] for reply in failed.values())
            raise (UsageError if usage else TransferError)(text) from failure
        if then is not None:
            then(replies)
        return replies

    def _open(self, version: int) -> dict[str, Any]:
        message: dict[str, Any] = {"version": version, "plan": self._fingerprint}
        if self._agreement.rank > 0:
            return message
        last = self._transport.markers()[-1:]
        if version < 0 or (last and version < last[0].version):
            raise UsageError(
                f"version {version} after {last[0].version if last else 'none'}; "
                "versions are not negative and strictly increase."
            )
        writes = not last or version > last[0].version
        size_bytes = self._plan.bytes_total
        run = self._transport.begin(version, size_bytes=size_bytes) if writes else last[0].run
        return {**message, "writes": writes, "run": run}

    def _write(self, version: int, writes: bool, deadline: float) -> dict[str, Any]:
        blob = None
        if writes:
            blob = self._transport.writable(version, size_bytes=self._plan.bytes_total)
        tensors = named_tensors(self._parameters)
        digests = []
        local: tuple[str, Tensor] | None = None
        for bucket in self._plan.of_rank(self._agreement.rank):
            digest = BucketDigest()
            for copy in bucket.copies:
                # Copies of one tensor follow each other, so each is encoded once.
                if local is None or local[0] != copy.name:
                    local = (copy.name, self._local(tensors, copy.name))
                piece = self._piece(tensors, local[1], copy)
                digest.update(piece)
                if blob is not None:
                    copy_view(blob, self._plan, copy).copy_(piece)
            digests.append(digest.hexdigest())
            if time.monotonic() > deadline:
                raise DeadlineError(f"wrote {len(digests)} buckets before the deadline")
        if writes:
            self._transport.flush(version)
        return {"digests": digests}

    def _local(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        if name not in tensors:
            raise PlanError(f"this rank shall send {name!r} and has no such tensor; plan again.")
        tensor = tensors[name].detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if self._encode is None:
            return local
        encoded = self._encode(name, local)
        shapes = {key: tuple(value.shape) for key, value in encoded.items()}
        if shapes != {name: tuple(local.shape)}:
            raise UnsupportedError(
                f"encode made {shapes} of {name!r} with shape {tuple(local.shape)}; "
                "it has to keep the name and the shape."
            )
        return encoded[name]

    def _piece(self, tensors: Mapping[str, Tensor], local: Tensor, copy: Copy) -> Tensor:
        box = copy.box.within(layout_of(tensors[copy.name]).shard)
        dtype = self._plan.target[copy.name].dtype
        return local[box.slices].to(device="cpu", dtype=dtype).contiguous()

    def _commit(
        self, version: int, opened: dict[str, Any], digests: dict[int, list[str]]
    ) -> dict[str, Any]:
        if self._agreement.rank > 0:
            return {}
        marker = Marker.make(
            run=opened["run"],
            version=version,
            plan=self._fingerprint,
            size_bytes=self._plan.bytes_total,
            buckets=tuple(digests[bucket.rank].pop(0) for bucket in self._plan.buckets),
        )
        if opened["writes"]:
            self._transport.commit(marker)
        elif marker not in self._transport.markers():
            raise UsageError(
                f"version {version} is committed already, with other bytes. Publish a new version."
            )
        return {"digest": marker.digest}


def _same_version(replies: list[dict[str, Any]]) -> None:
    for key in ("version", "plan"):
        said = [reply[key] for reply in replies]
        if len(set(said)) > 1:
            raise UsageError(f"ranks disagree about the {key}: {said}, by rank.")
