"""A port for a server that is started with its number."""

import random
import socket
from pathlib import Path


def free_port() -> int:
    """Return one that other processes get only by asking for it, however late the server binds it.

    The kernel deals out those of its range to every connection.
    """
    dealt_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = random.SystemRandom()  # Hypothesis gives all test processes one seed.
    while True:
        port = own.randrange(dealt_from // 2, dealt_from)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
