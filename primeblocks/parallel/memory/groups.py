"""Free the device memory of process groups while another program needs the device.

NCCL keeps buffers on the device for each communicator, which carries the calls of one group. NCCL
can suspend a communicator: its buffers are freed, and later allocated again at the same addresses.
The process group stays the same object, so meshes and FSDP2 keep working.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import UnsupportedError, UsageError
from ...groups import check_group
from .host import MovedBytes

__all__ = ["GroupMemory"]


class GroupMemory:
    """Frees the device memory of process groups, and allocates it again:

        memory = GroupMemory(meshes.fsdp, meshes.expert_fsdp, meshes.expert, meshes.loss)
        with memory.released() as moved:  # or release() ... restore()
            rollout()

    `release` suspends groups on NCCL. Groups on gloo, and groups that have not made a collective
    call yet, have nothing to free and are skipped. We have never run this class on a GPU.

    `release` and `restore` are collective over all groups. If a rank does not call them, the other
    ranks wait without a deadline. NCCL has no timeout for these calls, and a suspended group cannot
    be used to check that all ranks arrived. Between `release` and `restore`, a collective
    call over a suspended group uses freed memory, because NCCL does not refuse the call.

    Args:
        groups: process groups and meshes, in any order. For a mesh, the groups of all its axes are
            suspended. Leave out the groups that an engine in the same process uses.

    Raises:
        PlanError: a group is not a process group or a mesh, or does not include this rank.
        UsageError: no group was passed.

    Source: `ncclCommSuspend` of NCCL 2.29.7.
    """

    def __init__(self, *groups: dist.ProcessGroup | DeviceMesh) -> None:
        if not groups:
            raise UsageError(
                "GroupMemory needs at least one group. Pass all groups of the trainer."
            )
        by_name: dict[str, Any] = {}
        for each in groups:
            for group in each.get_all_groups() if isinstance(each, DeviceMesh) else [each]:
                check_group(group)
                by_name[group.group_name] = group
        # Suspending waits for all ranks of a group. One order of groups on all ranks avoids
        # deadlocks, and the members of a group agree on its name.
        self._backends = [
            by_name[name]._get_backend(device)
            for name in sorted(by_name)
            for device in by_name[name]._device_types
        ]
        # The suspended backends, each with its bytes. None before a release and after a restore.
        self._suspended: dict[Any, int] | None = None

    def release(self) -> MovedBytes:
        """Suspend the groups, and return the bytes that NCCL frees. Collective.

        Raises:
            UsageError: the groups are released already. Nothing was changed.
            UnsupportedError: a backend cannot be suspended. Nothing was changed.
            RuntimeError: NCCL failed, for example because communicators share memory
                (`split_share`). If NCCL failed, call `restore` on all ranks.
        """
        if self._suspended is not None:
            raise UsageError("the groups are released already. Call restore() first.")
        sizes = {backend: _suspendable_bytes(backend) for backend in self._backends}
        self._suspended = {}
        for backend, size in sizes.items():
            if size is not None:
                backend.suspend()
                self._suspended[backend] = size
        return MovedBytes({"groups": sum(self._suspended.values())})

    def restore(self) -> MovedBytes:
        """Resume the groups that `release` suspended. Collective.

        Raises:
            UsageError: the groups are not released.
            RuntimeError: NCCL failed, for example because the device lacks memory.
        """
        if self._suspended is None:
            raise UsageError("the groups are not released. Call release() first.")
        moved = MovedBytes({"groups": sum(self._suspended.values())})
        for backend in list(self._suspended):
            backend.resume()
            del self._suspended[backend]
        self._suspended = None
        return moved

    @contextmanager
    def released(self) -> Iterator[MovedBytes]:
        """Call `release` at the start of a `with` block, and `restore` at its end. Collective."""
        moved = self.release()
        try:
            yield moved
        finally:
            if self._suspended is not None:
                self.restore()


def _suspendable_bytes(backend: Any) -> int | None:
    """Return the bytes that suspending frees, or None without a communicator. Local."""
    if backend.name() == "gloo":
        return None
    try:
        stats = backend.memory_stats()
    except (AttributeError, RuntimeError) as error:
        # torch makes a communicator in the first collective call.
        if "communicator not initialized" in str(error):
            return None
        raise UnsupportedError(
            f"cannot suspend a group with the backend {backend.name()}: {error}. NCCL needs torch "
            "2.12 and NCCL 2.29.7 or later. Leave the group out, and its memory stays allocated."
        ) from error
    if stats["suspended"]:
        raise UsageError("a group is suspended already, by other code. Resume it there first.")
    return stats["suspend"]
