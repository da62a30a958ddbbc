"""Trainer side: every rank sends its shards, then rank 0 commits.

A publish has four steps. After each step the ranks exchange their results. If one failed, all fail:

    check -> begin (rank 0) -> send -> commit (rank 0)

If a rank dies, the exchange fails on the living ranks. They then need a new group and new
Publishers. Rank 0 aborts the version, so that readers keep the previous version. If rank 0 died,
its transport needs a new owner, which starts without versions and removes the old ones. If only the
exchange after the commit fails, readers get the new version although `publish` raises.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self

import torch

from ..errors import ClosedError, TransferError, UsageError, check_counts, check_version, shown
from .agree import Messenger
from .convert.conversion import Wiring
from .digest import pool_of
from .lease import alone
from .manifest import Manifest, NamedTensors
from .marker import Marker, Receipt
from .outgoing import Pace, Sent, SentBytes, Shipment
from .parts import Encode, Parts
from .plan import Plan
from .progress import Progress
from .transports.transport import Transport

__all__ = ["Publisher"]

_ERROR_CHARS = 600
_THREADS, _WORTH_A_THREAD_BYTES = 4, 8 << 20
# A rank whose work ends at the deadline reports a little later. Other ranks wait this much longer.
_GRACE_S = 2.0


class Publisher:
    """Sends a model's weights over a transport, one version at a time. Each rank makes a Publisher.

    While a call of `publish` runs, a second call from any thread is refused.

    Args:
        plan: the plan, which must be equal on all ranks. Source i of the plan is rank i of `group`.
        parameters: as for `describe`. The parameters are read again at each publish.
        transport: this rank's end of the transport, which rank 0 owns.
        group: a gloo group. None is the default group, if torch.distributed is initialized.
        source: the manifest that `plan_sync` got for this rank. `source` is needed only if this
            manifest differs from `describe(parameters)`, for example for plain tensors that are
            parts of larger tensors.
        convert: as for `plan_sync`.
        encode: a function that gets each tensor's name and this rank's part, before the cast to the
            target's dtype. A function that is not an `Encoder` must return `{name: tensor}` with
            the same name and shape. The returned dtype must be convertible to the target's dtype.
            For FP8, pass the result of `fp8.encode_weights`.
        full_every: at least one of `full_every` consecutive versions is sent in full. The other
            versions are sent as deltas if a delta is expected to be faster. If `full_every` is 1,
            all versions are full. With a larger number, each rank keeps a copy, in host memory, of
            all bytes that it sends.
        link_bytes_per_s: the rate at which a reader receives bytes. Pass this rate if `publish`
            does not wait for readers. Without the rate, the choice between a delta and a full
            version ignores how long readers take to get the bytes.

    Raises:
        UsageError: the plan is for a different number of ranks, or `full_every` is not a count.
        UnsupportedError: the group does not support gloo.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: NamedTensors,
        transport: Transport,
        *,
        group: torch.distributed.ProcessGroup | None = None,
        source: Manifest | None = None,
        convert: Wiring | None = None,
        encode: Encode | None = None,
        full_every: int = 1,
        link_bytes_per_s: float | None = None,
    ) -> None:
        check_counts(full_every=full_every)
        self._messenger = Messenger(world_size=plan.world_size, group=group)
        rank = self._messenger.rank
        self._parts = Parts(plan, rank, parameters, source=source, convert=convert, encode=encode)
        self._plan, self._transport, self._rank = plan, transport, rank
        self._history = SentBytes() if full_every > 1 else None
        self._full_every, self._link_bytes_per_s = full_every, link_bytes_per_s
        self._pace = Pace()
        self._shipment: Shipment | None = None
        self._publishing = threading.Lock()
        self._closed = False

    def publish(
        self, version: int, *, timeout_s: float, progress: Progress | None = None
    ) -> Receipt:
        """Send and commit one version. Collective over the trainer ranks.

        Readers never see a partly sent version. After a failure, call `publish` again with the same
        version. If a rank died or hung, first make a new group and new Publishers. If the version
        is already committed, `publish` compares the committed version with the parameters and does
        not send weights. If another rank hangs, the call ends two seconds after `timeout_s`.

        Cost: one copy and one XXH3-128 of the bytes that this rank sends, in up to four threads,
        and four exchanges of small messages. A delta costs one more pass over the bytes of the
        previous version.

        Args:
            progress: called after each bucket, with the number of bytes that this rank has read so
                far, and the total number.

        Raises:
            TransferError: some rank failed, died or was late. The committed version did not
                change, unless the call failed after rank 0's commit.
            UsageError: `version` is not a policy version, is below the committed version, or is
                committed with other bytes. Also raised if the parameters do not fit the plan, if
                ranks differ in version or plan, or if another call of `publish` is running.
            ClosedError: the publisher was closed.
        """
        if self._closed:
            raise ClosedError("this Publisher was closed. Make a new Publisher.")
        try:
            with alone(self._publishing, f"publish({shown(version)})"):
                return self._publish(version, timeout_s, progress)
        finally:
            if self._closed:  # Closed during this call.
                self.close()

    def _publish(self, version: int, timeout_s: float, progress: Progress | None) -> Receipt:
        start = time.monotonic()
        deadline = start + timeout_s
        checked: int | None = None
        try:
            told = self._step(self._check, version, deadline=deadline)
            _expect_equal(told)
            version = checked = told[self._rank]["version"]
            begun = self._step(self._begin, version, deadline=deadline)[0]
            send_start = time.monotonic()
            sent = self._step(self._send, version, begun, progress, deadline=deadline)
            sent_s = time.monotonic() - send_start
            done = self._step(self._commit, version, begun, sent, deadline=deadline)[0]
        except BaseException:
            self._forget_sent()
            if self._rank == 0 and checked is not None:
                self._transport.abort(checked)
            raise
        self._remember_sent(begun, done, sent_s)
        seconds = time.monotonic() - start
        return Receipt(version, done["bytes"], seconds, done["digest"], base=done["base"])

    def close(self) -> None:
        """Refuse further use. Local. The transport stays open, and a running `publish` goes on."""
        self._closed = True
        with suppress(UsageError), alone(self._publishing, "close()"):
            self._forget_sent()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _step(
        self, work: Callable[..., dict[str, Any]], *args: Any, deadline: float
    ) -> list[dict[str, Any]]:
        """Do this rank's work, and exchange the outcomes. If one rank failed, all ranks raise."""
        failure: Exception | None = None
        message: dict[str, Any] = {}
        try:
            message = work(*args, deadline)
        except Exception as error:  # Without a message, peers would wait in vain.
            failure = error
            text = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
            message = {"error": text, "usage": isinstance(error, UsageError)}
        replies = self._messenger.exchange(message, deadline=deadline + _GRACE_S)
        failed = {rank: reply for rank, reply in enumerate(replies) if "error" in reply}
        if failed:
            text = "; ".join(f"rank {rank}: {reply['error']}" for rank, reply in failed.items())
            usage = all(reply["usage"] for reply in failed.values())
            raise (UsageError if usage else TransferError)(text) from failure
        return replies

    def _check(self, version: int, deadline: float) -> dict[str, Any]:
        self._parts.refresh()
        return {"version": check_version(version), "plan": self._plan.fingerprint()}

    def _begin(self, version: int, deadline: float) -> dict[str, Any]:
        if self._rank > 0:
            return {}
        last = self._transport.markers()[-1:]
        if last and version < last[0].version:
            raise UsageError(
                f"publish() got version {version} after version {last[0].version}. Versions must "
                "increase. Pass a larger version."
            )
        if last and version == last[0].version:
            return {"sends": False, "run": last[0].run, "base": None}
        wants_delta = self._pace.wants_delta(
            full_every=self._full_every, link_bytes_per_s=self._link_bytes_per_s
        )
        base = self._history.version if self._history is not None and wants_delta else None
        begun = self._transport.begin(version, plan=self._plan, base=base, deadline=deadline)
        return {"sends": True, "run": begun.run, "base": begun.base}

    def _send(
        self, version: int, begun: dict[str, Any], progress: Progress | None, deadline: float
    ) -> dict[str, Any]:
        with _pool(self._plan.written_bytes(self._rank)) as pool:
            self._shipment = shipment = Shipment(
                self._parts,
                version,
                base=begun["base"],
                history=self._history if begun["sends"] else None,
                pool=pool,
                deadline=deadline,
                progress=progress,
            )
            if begun["sends"]:
                self._transport.send(shipment, deadline=deadline)
            else:
                shipment.digest_all()
        mine = self._plan.of_rank(self._rank)
        return {"digests": [[shipment.digests[i], shipment.sizes[i]] for i in mine]}

    def _commit(
        self, version: int, begun: dict[str, Any], sent: list[dict[str, Any]], deadline: float
    ) -> dict[str, Any]:
        if self._rank > 0:
            return {}
        queues = [iter(reply["digests"]) for reply in sent]
        rows = [next(queues[bucket.rank]) for bucket in self._plan.buckets]
        marker = Marker.make(
            run=begun["run"],
            version=version,
            plan=self._plan.fingerprint(),
            base=begun["base"],
            sizes=tuple(size for _, size in rows),
            buckets=tuple(digest for digest, _ in rows),
        )
        if begun["sends"]:
            self._transport.commit(marker, deadline=deadline)
        else:
            marker = self._committed(marker)
        rows = [self._plan.of_reader(reader) for reader in range(len(self._plan.wants))]
        most = max((sum(marker.sizes[index] for index in row) for row in rows), default=0)
        sizes = {"bytes": marker.size_bytes, "read_bytes": most}
        return {"digest": marker.digest, "base": marker.base, **sizes}

    def _committed(self, marker: Marker) -> Marker:
        """Return the marker committed under this version, or raise if its weights differ."""
        same = marker.version, marker.plan, marker.buckets
        for old in self._transport.markers():
            if (old.version, old.plan, old.buckets) == same:
                return old
        raise UsageError(
            f"version {marker.version} is committed already, with other bytes. "
            "Publish these weights as a new version."
        )

    def _remember_sent(self, begun: dict[str, Any], done: dict[str, Any], seconds: float) -> None:
        if begun["sends"] and self._history is not None and self._shipment is not None:
            sent = Sent(done["bytes"], seconds, self._shipment.sent(done["read_bytes"]))
            self._pace = self._pace.after(sent, is_delta=begun["base"] is not None)
        self._shipment = None

    def _forget_sent(self) -> None:
        if self._history is not None:
            self._history.forget()
        self._shipment = None


def _pool(size_bytes: int) -> AbstractContextManager[Executor | None]:
    """Open threads that read buckets, if there are enough bytes for more than one thread."""
    threads = min(_THREADS, len(os.sched_getaffinity(0)), size_bytes // _WORTH_A_THREAD_BYTES)
    return pool_of(threads) if threads > 1 else nullcontext()


def _expect_equal(replies: list[dict[str, Any]]) -> None:
    for key in ("version", "plan"):
        said = [reply[key] for reply in replies]
        if len(set(said)) > 1:
            raise UsageError(
                f"ranks disagree about the {key}: {said}, by rank. Pass the same {key} on every "
                "rank."
            )
