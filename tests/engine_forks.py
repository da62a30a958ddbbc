"""Servers of vLLM that are forked, by a process that has imported vLLM and runs no thread.

The imports of a server take longer than the start of its tiny engine. A process with threads
cannot be forked, so a nursery is forked before there are any. It forks all servers, is their
parent, and says how they ended.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Forked", "Nursery"]


class Forked:
    """A server, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, ask: Any) -> None:
        self.pid, self._ask = pid, ask

    def poll(self) -> int | None:
        return self._ask("poll", self.pid)

    def wait(self) -> int:
        return self._ask("wait", self.pid)


class Nursery:
    """Forks servers from what this process is when the `with` block begins; its end kills them."""

    def __enter__(self) -> "Nursery":
        mine, its = socket.socketpair()
        self._pid, self._asking = os.fork(), threading.Lock()
        if self._pid == 0:
            mine.close()
            _nurse(its)
        its.close()
        self._file = mine.makefile("rw")
        mine.close()
        return self

    def start(self, arguments: list[str], *, environment: dict[str, str], log: Path) -> Forked:
        """Start vLLM's server with a command line, as the leader of a process group."""
        return Forked(self._ask("start", arguments, environment, str(log)), self._ask)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        os.waitpid(self._pid, 0)

    def _ask(self, *request: Any) -> Any:
        with self._asking:
            print(json.dumps(request), file=self._file, flush=True)
            return json.loads(self._file.readline())


def _nurse(connection: socket.socket) -> None:
    """Answer requests until the other end closes, and kill what is left."""
    importlib.import_module("vllm.entrypoints.openai.api_server")
    ended: dict[int, int | None] = {}
    file = connection.makefile("rw")
    for line in file:
        match json.loads(line):
            case ["start", arguments, environment, log]:
                answer = os.fork()
                if answer == 0:
                    os.close(connection.detach())
                    _serve(arguments, environment, log)
                os.setpgid(answer, answer)
                ended[answer] = None
            case [how, pid]:
                if ended[pid] is None:
                    done, status = os.waitpid(pid, os.WNOHANG if how == "poll" else 0)
                    ended[pid] = os.waitstatus_to_exitcode(status) if done else None
                answer = ended[pid]
        print(json.dumps(answer), file=file, flush=True)
    for pid in (pid for pid, code in ended.items() if code is None):
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    try:
        told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(told, descriptor)
        os.environ |= environment
        sys.argv = ["api_server", *arguments]
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
