"""Mooncake itself on this machine: a master, and processes that use it, over TCP."""

import importlib
import importlib.util
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from primeblocks.errors import how_it_ended
from primeblocks.kvoffload.adapters.mooncake import MooncakeTier, connect
from tests.deadlines import HANG_S
from tests.kvoffload.tier_conformance import Bench, content_of, host_for, key_of

__all__ = ["SEGMENT", "missing", "open_bench", "owner", "running_master"]

SEGMENT = 16 << 20  # the least that Mooncake takes
_HERE = "127.0.0.1"


def missing():
    """Why Mooncake does not run here; empty if it does."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed; scripts/peers does"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake is not whole: {error}"
    return ""


@contextmanager
def running_master():
    """A master's process and its address."""
    deadline = time.monotonic() + HANG_S
    while True:
        port = _free_port()
        with _master(port) as process:
            # It ends if somebody else took one of its ports meanwhile.
            while process.poll() is None and not _listens(port):
                assert time.monotonic() < deadline, "the master does not listen"
                time.sleep(0.02)
            if process.poll() is None:
                yield process, f"{_HERE}:{port}"
                return
            assert time.monotonic() < deadline, f"the master {how_it_ended(process.returncode)}"


@contextmanager
def _master(port):
    (package,) = importlib.util.find_spec("mooncake").submodule_search_locations
    command = [
        str(Path(package) / "mooncake_master"),
        f"--rpc_address={_HERE}",
        f"--rpc_port={port}",
        f"--metrics_host={_HERE}",
        f"--metrics_port={_free_port()}",
    ]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            yield process
        finally:
            process.kill()


def _listens(port):
    try:
        socket.create_connection((_HERE, port), timeout=1).close()
    except OSError:
        return False
    return True


def open_bench(master, *, namespace, segment_bytes=SEGMENT, **how):
    client = connect(master, hostname=_HERE, segment_bytes=segment_bytes)
    host = host_for()
    tier = MooncakeTier(client, host, namespace=namespace, **how)
    return Bench(host, tier, room=24, too_many=3 * segment_bytes // (2 * 8256))


@contextmanager
def owner(master, *, namespace, saves=0):
    """A process that gives memory to the store, and has put pages 0 ... into it."""
    command = [sys.executable, "-m", __name__, master, namespace, str(saves)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
            process.stdin.close()
            process.wait(HANG_S)
        finally:
            process.kill()


def _free_port():
    with socket.socket() as one:
        one.bind((_HERE, 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    bench = open_bench(sys.argv[1], namespace=sys.argv[2])
    for number in range(int(sys.argv[3])):
        assert bench.put((key_of(number), content_of(number))) == [None]
    print("ready", flush=True)
    sys.stdin.read()
    bench.tier.close()
