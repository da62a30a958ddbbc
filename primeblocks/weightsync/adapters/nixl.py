"""A `Wire` over NIXL: one-sided reads through UCX, over RDMA, NVLink, shared memory or TCP.

    transport = PullTransport(store, NixlWire(serves=True), owner=rank == 0)   # on trainer ranks
    transport = PullTransport(store, NixlWire(serves=False))                   # in engines

UCX chooses its transports by itself. To restrict the choice, set `UCX_TLS`. On a machine without
RDMA and without a GPU, UCX has only the transports `tcp,shm,self,sysv,posix`.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor

from ...errors import DeadlineError, TransferError, needs
from ..transports.carriers import Read

with needs("nixl", "nixl_meta_utils", "nixl_cu12", "nixl_cu13", extra="nixl"):
    from nixl._api import nixl_agent, nixl_agent_config

__all__ = ["NixlWire"]

_IN_FLIGHT = 8
_LOOK_S = 0.0002


class NixlWire:
    """One NIXL agent, with registered buffers of this process.

    Each bucket is one read. Up to eight reads are posted at a time. If UCX completes a read within
    the call that posts it, for example over shared memory, the deadline may be noticed one bucket
    late.

    Args:
        serves: whether other processes read from this process. With `serves=True`, NIXL runs a
            thread that uses a whole core (measured with NIXL 1.5.1). Without the thread, UCX does
            not accept connections, and serves only reads that the hardware does by itself.
        backend: the name of a backend that NIXL has on this machine.

    Raises:
        TransferError: NIXL has no such backend, or the backend does not start.
    """

    def __init__(self, *, serves: bool, backend: str = "UCX") -> None:
        # Each agent has a new name, by which an engine recognizes a restarted rank.
        name = f"primeblocks-{secrets.token_hex(8)}"
        config = nixl_agent_config(enable_prog_thread=serves, backends=[backend])
        with _typed(f"the backend {backend} does not start"):
            self._agent: Any = nixl_agent(name, config)
        if backend not in self._agent.backends:
            raise TransferError(
                f"NIXL has no backend {backend}. Pass one of {self._agent.get_plugin_list()}."
            )
        self._name, self._backend = name, backend
        self._shared: dict[int, tuple[Tensor, Any]] = {}
        # The addresses of the known buffers of other agents, by agent and token.
        self._known: dict[str, dict[str, range]] = {}

    def spec(self) -> dict[str, Any]:
        return {"kind": "nixl", "backend": self._backend}

    def share(self, buffer: Tensor) -> dict[str, Any]:
        with _typed(f"{len(buffer):,} bytes on {buffer.device} cannot be registered"):
            registered = self._agent.register_memory([buffer])
            metadata = self._agent.get_agent_metadata()
        self._shared[buffer.data_ptr()] = (buffer, registered)
        return {
            "agent": self._name,
            "metadata": base64.b64encode(metadata).decode(),
            "token": secrets.token_hex(4),
            "memory": _memory(buffer),
            "device": max(0, buffer.get_device()),
            "address": buffer.data_ptr(),
            "bytes": len(buffer),
        }

    def unshare(self, buffer: Tensor) -> None:
        _, registered = self._shared.pop(buffer.data_ptr())
        with _typed("a buffer cannot be taken back"):
            self._agent.deregister_memory(registered)

    def read(self, reads: Sequence[Read], *, deadline: float) -> None:
        """Do all reads, into buffers that this process has shared."""
        running: list[tuple[Any, str]] = []
        for read in reads:
            with self._reading(read.note["agent"]):
                self._meet(read)
        try:
            for done, read in enumerate(reads):
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"only {done} of {len(reads)} buckets were read in time. Pass a longer "
                        "timeout_s."
                    )
                if len(running) == _IN_FLIGHT:
                    self._finish(*running[0], deadline)
                    running.pop(0)
                agent = read.note["agent"]
                with self._reading(agent):
                    handle = self._agent.initialize_xfer("READ", *self._ends(read), agent)
                    running.append((handle, agent))
                    state = self._agent.transfer(handle)
                if state == "DONE":
                    self._agent.release_xfer_handle(running.pop()[0])
            while running:
                self._finish(*running[0], deadline)
                running.pop(0)
        finally:
            for handle, _ in running:
                # This cancels the read if UCX can. The buffer is not used again.
                with suppress(Exception):
                    self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        for agent in list(self._known):
            self._forget(agent)
        for buffer, _ in list(self._shared.values()):
            self.unshare(buffer)
        self._agent = None  # The agent's thread runs until the agent is freed.

    def _finish(self, handle: Any, agent: str, deadline: float) -> None:
        never = threading.Event()
        with self._reading(agent):
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                if time.monotonic() >= deadline:
                    self._forget(agent)
                    raise DeadlineError(
                        f"a read from {agent} did not end in time. Pass a longer timeout_s."
                    )
                never.wait(_LOOK_S)
            if state != "DONE":
                raise TransferError(f"a read from {agent} ended as {state}. Receive again.")
            self._agent.release_xfer_handle(handle)

    def _meet(self, read: Read) -> None:
        note = read.note
        known = self._known.setdefault(note["agent"], {})
        if note["token"] in known:
            return
        span = range(note["address"], note["address"] + note["bytes"])
        # The keys of an earlier buffer at these addresses are invalid now.
        if any(span.start < old.stop and old.start < span.stop for old in known.values()):
            self._forget(note["agent"])
            known = self._known.setdefault(note["agent"], {})
        self._agent.add_remote_agent(base64.b64decode(note["metadata"]))
        known[note["token"]] = span

    def _ends(self, read: Read) -> tuple[Any, Any]:
        note, target = read.note, read.target
        here = [(target.data_ptr(), len(target), max(0, target.get_device()))]
        there = [(note["address"] + read.start, len(target), note["device"])]
        return (
            self._agent.get_xfer_descs(here, _memory(target)),
            self._agent.get_xfer_descs(there, note["memory"]),
        )

    def _forget(self, agent: str) -> None:
        self._known.pop(agent, None)
        with suppress(Exception):  # The agent may be unknown already.
            self._agent.remove_remote_agent(agent)

    @contextmanager
    def _reading(self, agent: str) -> Iterator[None]:
        try:
            with _typed(f"a read from {agent} failed"):
                yield
        except TransferError:
            self._forget(agent)
            raise


@contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # NIXL's own errors derive from Exception directly. Their names start with "nixl".
        if not type(error).__name__.startswith("nixl"):
            raise
        raise TransferError(f"{what}: {type(error).__name__} {error}") from error


def _memory(tensor: Tensor) -> str:
    return "VRAM" if tensor.is_cuda else "DRAM"
