"""The life of one rank of `ranks`, in the process that a gang has forked.

A rank joins the group, calls the body, and sends its result or its traceback to the parent. Then it
waits until the parent hangs up, because a rank that leaves earlier would break the collectives of
its peers. The rank's own watchdog writes the stack and ends the process at the deadline, even
during a C call or after the parent has ended.
"""

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from primeblocks.errors import UsageError

__all__ = ["KILLED", "RAISED", "RETURNED", "TOLD", "Seat", "kill", "main", "tell"]

# The kinds of message that a rank sends to its parent.
RETURNED, RAISED, KILLED, TOLD = "returned", "raised", "killed", "told"

# The connection to the parent. None in a process that is not a rank.
_outbox: Connection | None = None


class Seat(NamedTuple):
    """The facts that a rank needs about its gang."""

    rank: int
    world_size: int
    folder: Path
    deadline: float
    timeout_s: float

    @property
    def stack_file(self) -> Path:
        """The file that gets the rank's stack if it still runs at the deadline."""
        return self.folder / f"stack-{self.rank}"


def main(seat: Seat, task: bytes, outbox: Connection) -> None:
    """Join the group, call the body, report, and leave when the parent hangs up."""
    global _outbox  # noqa: PLW0603
    _outbox = outbox
    with open(seat.stack_file, "w") as stacks:
        # The rank's own watchdog works during a C call, and after the parent has ended.
        remaining_s = max(0.01, seat.deadline - time.monotonic())
        faulthandler.dump_traceback_later(remaining_s, exit=True, file=stacks)
        try:
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True)  # Also fills torch.empty with NaN.
            _join(seat)
            body, args = pickle.loads(task)
            _send(RETURNED, body(*args))
        except BaseException:
            _send(RAISED, traceback.format_exc())
            _until_hung_up(outbox)
            # The group may be broken: tidying up could hang.
            os._exit(1)
        # A rank that left earlier would break the collectives of its peers.
        _until_hung_up(outbox)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def kill(rank: int) -> None:
    """End `rank` by SIGKILL when this rank calls `kill` in its body. Local.

    On other ranks, `kill` does nothing. `run` and `Gang.wait` return None as the result of the
    killed rank, and do not raise RankError.
    """
    if dist.get_rank() == rank:
        _send(KILLED, None)
        os.kill(os.getpid(), signal.SIGKILL)


def tell(value: object) -> None:
    """Send a value from the body of a rank to `Gang.hear`. Local."""
    _send(TOLD, value)


def _join(seat: Seat) -> None:
    # Loopback only: a machine's own name may not resolve, and no port should face the network.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    # A store in a file outlives any rank, but a TCP store would die with rank 0.
    store = dist.FileStore(str(seat.folder / "store"), seat.world_size)
    store.set_timeout(timedelta(seconds=seat.timeout_s))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=seat.timeout_s),
    )
    # A rank that dies in its body would otherwise break the join of a peer that still connects.
    store.set(f"joined {seat.rank}", "")
    store.wait([f"joined {rank}" for rank in range(seat.world_size)])


def _send(kind: str, value: object) -> None:
    if _outbox is None:
        raise UsageError("tell and kill can be called only in the body of ranks.run or ranks.gang")
    # Pickled here. `Connection.send` would put tensors into shared memory that ends with this rank.
    _outbox.send_bytes(pickle.dumps((kind, value)))


def _until_hung_up(outbox: Connection) -> None:
    with suppress(EOFError, ConnectionResetError):
        outbox.recv_bytes()
