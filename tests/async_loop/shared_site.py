"""Children that end themselves by a signal at a chosen step, and groups to compare."""

import itertools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primeblocks.async_loop import codec, shared

SHM = Path("/dev/shm")
FOLDER = Path(shared.__file__).parent
# Where shared state changes; and everything that runs in between.
SHARED = tuple(str(FOLDER / name) for name in ("arena.py", "file.py", "room.py"))
ALL = (str(FOLDER), codec.__file__)


def trace(
    at_step: Callable[[int], None], *, code: tuple[str, ...] = SHARED, opcodes: bool = False
) -> None:
    """Call `at_step` with its number before each step of some files: a line, or an opcode."""
    steps = itertools.count()

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == ("opcode" if opcodes else "line"):
            at_step(next(steps))
        return local

    def enter(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(code):
            return None
        frame.f_trace_opcodes = opcodes
        return local

    sys.settrace(enter)


def die_at(step: int, how: signal.Signals = signal.SIGKILL, **what: Any) -> None:
    """Send this process a signal before one step of `trace`."""
    trace(lambda number: os.kill(os.getpid(), how) if number == step else None, **what)


def say_changes(name: str, say: Callable[[object], None]) -> None:
    """Say the number of each step of `trace` before which the shared memory has changed."""
    # Never closed: that would end the locks of this process.
    fd, last = os.open(SHM / f"primeblocks-{name}", os.O_RDONLY), b""

    def at_step(number: int) -> None:
        nonlocal last
        now = os.pread(fd, os.fstat(fd).st_size, 0)
        if now != last:
            say(number)
        last = now

    trace(at_step)


class Child:
    """A fork that runs `body(say)`; `heard` are the lines it said."""

    def __init__(self, body: Callable[[Callable[[object], None]], None]) -> None:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none
            self.pid = os.fork()
        if self.pid:
            os.close(writer)
            self._reader = reader
            return
        code = 1
        try:
            os.close(reader)
            body(lambda what: os.write(writer, f"{what}\n".encode()))
            code = 0
        except BaseException:
            sys.settrace(None)
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self) -> tuple[int, list[str]]:
        """Return how it ended, negative for a signal, and what it said."""
        with os.fdopen(self._reader) as said:
            heard = said.read().splitlines()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), heard

    def wait_until_stopped(self) -> None:
        assert os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])


@pytest.fixture
def name():
    """A name for a buffer, which is gone afterwards."""
    name = f"test-{os.getpid()}"
    yield name
    (SHM / f"primeblocks-{name}").unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """A value that is equal to another one if type, dtype, shape and all bits are."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.flags.writeable, value.tobytes()
    if is_dataclass(value):
        return type(value), {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    return type(value), value
