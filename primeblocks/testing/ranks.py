"""Run a function on several gloo ranks of this machine, with tracebacks, deadlines and faults.

Use `run` for tests in which every rank runs to the end. Use `gang` for tests that kill a rank or
read values of running ranks. Ranks are forked from a server process that has already imported
torch, so a test takes tenths of a second. With the start method `spawn`, a test would take seconds.
An example:

    def body(x):
        dist.all_reduce(x)
        return x.item()

    assert ranks.run(body, torch.ones(1), world_size=3) == [3, 3, 3]
"""

import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from primeblocks.errors import ClosedError, DeadlineError, RankError, UsageError, how_it_ended

from . import rank_process
from .rank_process import kill, tell

__all__ = ["Gang", "gang", "kill", "preload", "run", "tell"]

# A failed rank leaves its peers hanging in a collective. They have this long to report as well.
_SETTLE_S = 0.5
# A rank ends itself at the deadline. If it cannot, because it was stopped for example, it is ended
# this much later.
_GRACE_S = 5.0
# A rank that has returned destroys its group and ends. Then the fork server reports its exit code.
# A busy machine may take seconds for this.
_LEAVE_S = 60.0

_starting = threading.Lock()
# Each start polls every process. If two threads poll one process, one gets no exit code.
_polling = threading.Lock()
_preloaded = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._inductor.config",  # torch.use_deterministic_algorithms imports it, in 0.7 s.
    rank_process.__name__,
]


def run(
    body: Callable[..., Any], *args: object, world_size: int = 2, timeout_s: float = 300.0
) -> list[Any]:
    """Call `body(*args)` on every rank and return the results in rank order.

    Each rank is a process with one torch thread and a default gloo group with the timeout
    `timeout_s`. Uninitialised tensors are filled with NaN. Arguments and results are pickled.
    `run` returns None for a rank that `kill` ended, and other ranks continue.

    Args:
        body: a function at the top level of an importable module. In a script, define the function
            outside of `if __name__ == "__main__":`, because ranks import the script.
        args: the arguments of `body`, equal on all ranks.

    Raises:
        RankError: a rank raised an error, died, or could not import `body`. The message contains
            the rank's traceback, signal or exit code. Ranks that still run are ended.
        DeadlineError: some ranks still ran after `timeout_s`. The message contains the stacks of
            the running ranks.
        UsageError: `body` or `args` cannot be pickled.
    """
    with gang(body, *args, world_size=world_size, timeout_s=timeout_s) as members:
        return members.wait()


def gang(
    body: Callable[..., Any], *args: object, world_size: int = 2, timeout_s: float = 300.0
) -> "Gang":
    """Start `body(*args)` on every rank, and return a `Gang` while the ranks run:

        with ranks.gang(body, world_size=3) as members:
            members.hear(1)          # The body calls ranks.tell(...).
            members.kill(1)
            survivors = members.wait()

    Raises:
        UsageError: `body` or `args` cannot be pickled, or `world_size` is below 1.
    """
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1; got {world_size}")
    try:
        task = pickle.dumps((body, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{body!r} and its arguments must be picklable: {error}. Move the body to the top "
            "level of a module, and build unpicklable values inside the body."
        ) from error
    return Gang(task, world_size=world_size, timeout_s=timeout_s)


def preload(*modules: str) -> None:
    """Import `modules` in the fork server of ranks. Call `preload` before the first gang."""
    if _started.cache_info().currsize:
        raise UsageError(
            f"the server of ranks is already running. Call preload({modules}) before the first "
            "gang."
        )
    _preloaded.extend(modules)


class Gang:
    """Running ranks and their processes. The end of a `with` block ends ranks that still run."""

    def __init__(self, task: bytes, *, world_size: int, timeout_s: float) -> None:
        context = _server()
        self._folder = Path(tempfile.mkdtemp(prefix="primeblocks-ranks-"))
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._members: list[_Member] = []
        self._closed = False
        for rank in range(world_size):
            inbox, outbox = context.Pipe()
            seat = rank_process.Seat(rank, world_size, self._folder, self._deadline, timeout_s)
            process = context.Process(
                target=rank_process.main, args=(seat, task, outbox), daemon=True
            )
            with _polling:
                process.start()
            outbox.close()
            self._members.append(_Member(rank, process, inbox, seat.stack_file))

    def kill(self, rank: int) -> None:
        """End `rank` by SIGKILL. Other ranks go on, and `wait` returns None for `rank`. Local."""
        if self._closed:
            raise ClosedError(f"cannot kill rank {rank}: its gang is closed")
        member = self._members[rank]
        if not member.settled:
            member.settle(_Killed())
        if _ended(member.process, 0.0) is None:
            member.process.kill()

    def hear(self, rank: int) -> Any:
        """Wait for the next value that `rank` sends with `tell`.

        Raises:
            RankError: a rank failed, or `rank` ended before it sent another value.
            DeadlineError: `rank` did not send a value before the gang's deadline.
        """
        member = self._members[rank]
        while not (member.told or member.settled or self._failures()):
            if not self._pump(self._deadline + _GRACE_S):
                break
        if member.told:
            return member.told.popleft()
        self._settle_all()
        raise RankError(f"rank {rank} ended and sent no further value")

    def wait(self) -> list[Any]:
        """Wait for all ranks and return results in rank order, with None for a killed rank.

        Raises:
            RankError: a rank raised an error or died.
            DeadlineError: some ranks still ran at the gang's deadline.
        """
        self._settle_all()
        self.close()
        crashed = [
            f"rank {m.rank} returned its result, and then {how_it_ended(m.process.exitcode)}"
            for m in self._members
            if m.process.exitcode and not isinstance(m.outcome, _Killed)
        ]
        if crashed:
            raise RankError("; ".join(crashed))
        return [None if isinstance(m.outcome, _Killed) else m.outcome for m in self._members]

    def close(self) -> None:
        """Let finished ranks exit, and end running ranks. You may call `close` twice."""
        if self._closed:
            return
        self._closed = True
        for member in self._members:
            # A rank that has reported waits for this before it destroys its group.
            member.inbox.close()
            if not member.settled or isinstance(member.outcome, _Killed):
                member.process.kill()
        until = time.monotonic() + _LEAVE_S
        for member in self._members:
            if _ended(member.process, until - time.monotonic()) is None:
                member.process.kill()
                _ended(member.process, None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Gang":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _failures(self) -> dict[int, "_Failed"]:
        return {m.rank: m.outcome for m in self._members if isinstance(m.outcome, _Failed)}

    def _pump(self, until: float) -> bool:
        """Handle the next message, or return False if none came before `until`."""
        waiting = {member.inbox: member for member in self._members if not member.settled}
        ready = connection.wait(list(waiting), max(0.0, until - time.monotonic()))
        for inbox, member in waiting.items():
            if inbox in ready:
                member.receive()
        return bool(ready)

    def _settle_all(self) -> None:
        until = self._deadline + _GRACE_S
        while any(not member.settled for member in self._members):
            if self._failures():
                until = min(until, time.monotonic() + _SETTLE_S)
            if not self._pump(until):
                break
        self._raise_failures()

    def _raise_failures(self) -> None:
        hung = {m.rank: m.outcome.stack for m in self._members if isinstance(m.outcome, _Hung)}
        hung |= {m.rank: "(no stack)" for m in self._members if not m.settled}
        size = len(self._members)
        if failures := self._failures():
            # Deaths are reported first, because they cause the errors of the other ranks.
            died = {rank: failure.text for rank, failure in failures.items() if failure.died}
            raised = {rank: failure.text for rank, failure in failures.items() if rank not in died}
            parts = [f"{_names(died)} of {size} died"] if died else []
            parts += [f"{_names(raised)} of {size} raised"] if raised else []
            parts += [f"ended {_names(hung)}, which still ran"] if hung else []
            raise RankError("\n".join(["; ".join(parts), *_sections(died | raised)]))
        if hung:
            headline = f"{_names(hung)} of {size} still ran after {self._timeout_s:g} s"
            raise DeadlineError("\n".join([headline, *_sections(hung)]))


class _Failed(NamedTuple):
    """A rank that raised, or died without a plan."""

    text: str
    died: bool


class _Hung(NamedTuple):
    """A rank that still ran at the deadline."""

    stack: str


class _Killed(NamedTuple):
    """A rank that died as planned."""


@dataclass
class _Member:
    """One rank as its parent sees it."""

    rank: int
    process: ForkServerProcess
    inbox: connection.Connection
    stack_file: Path
    told: deque[Any] = field(default_factory=deque)
    outcome: Any = None
    settled: bool = False

    def settle(self, outcome: object) -> None:
        self.outcome, self.settled = outcome, True

    def receive(self) -> None:
        try:
            kind, value = pickle.loads(self.inbox.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._bury()
        match kind:
            case rank_process.TOLD:
                self.told.append(value)
            case rank_process.RAISED:
                self.settle(_Failed(value, died=False))
            case rank_process.KILLED:
                self.settle(_Killed())
            case rank_process.RETURNED:
                self.settle(value)

    def _bury(self) -> None:
        """Settle a rank that hung up without a result: it is dead."""
        exitcode = _ended(self.process, _LEAVE_S)
        stack = self.stack_file.read_text() if self.stack_file.exists() else ""
        how = "closed its pipe and still runs" if exitcode is None else how_it_ended(exitcode)
        death = _Failed(f"it {how}", died=True)
        self.settle(_Hung(stack) if stack else death)


def _ended(process: ForkServerProcess, timeout_s: float | None) -> int | None:
    """Wait for a process. Return its exit code, or None if it still runs."""
    connection.wait([process.sentinel], None if timeout_s is None else max(0.0, timeout_s))
    with _polling:
        return process.exitcode


def _server() -> ForkServerContext:
    """Return the running process server, so that a gang's deadline excludes importing torch."""
    with _starting:  # Gangs may start in several threads.
        return _started()


@cache
def _started() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    first = context.Process(target=os.getpid, daemon=True)
    first.start()
    first.join()
    if first.exitcode:
        raise RankError(
            f"the first process {how_it_ended(first.exitcode)}. If this is a script, start ranks "
            'under `if __name__ == "__main__":`, because every rank imports the script.'
        )
    return context


def _names(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _sections(texts: dict[int, str]) -> list[str]:
    return [f"--- rank {rank} ---\n{text}" for rank, text in texts.items()]
