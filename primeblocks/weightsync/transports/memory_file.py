"""Memory with a descriptor and no name: other processes of this user open it through /proc.

Its size never changes. Once its maker has sealed it, nobody can write to it, save through mappings
that were made before.
"""

from __future__ import annotations

import errno
import fcntl
import os

from ...errors import TransferError, UnsupportedError

__all__ = ["allocate", "is_sealed", "open_of", "seal"]

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE of Linux 5.1, which fcntl does not name.


def allocate(name: str, size_bytes: int) -> int:
    """Return the descriptor of new memory, all of it reserved. Only this user may open it.

    Raises:
        OSError: there is no room.
    """
    # Nothing else bounds anonymous memory: reserving too much would end in the kernel's OOM killer.
    free_bytes = _free_bytes()
    if size_bytes > free_bytes:
        raise OSError(errno.ENOMEM, f"{free_bytes:,} bytes free")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        # Reserved now: a full machine would end a later write with SIGBUS.
        if size_bytes > 0:
            os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def seal(fd: int) -> None:
    """Seal memory: nobody can write to it any more, save through existing mappings.

    Raises:
        UnsupportedError: the kernel is older than Linux 5.1.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE)
    except OSError as error:
        raise UnsupportedError(
            f"memory cannot be sealed: {error}. Use Linux 5.1 or newer, or FileTransport."
        ) from error


def is_sealed(fd: int) -> bool:
    """Tell whether memory was sealed by its maker."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FUTURE_WRITE)


def open_of(pid: int, fd: int, name: str, flags: int) -> int:
    """Open memory of another process by its descriptor there, and by its name.

    Raises:
        TransferError: that process is gone, or closed it, or cannot be seen from here.
        UnsupportedError: this process may not open it.
    """
    path = f"/proc/{pid}/fd/{fd}"
    gone = TransferError(
        f"memory of process {pid} is gone: it has ended, or let go of it. A trainer in another "
        "container is seen only in the same PID namespace (docker run --pid=container:...)."
    )
    try:
        opened = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise UnsupportedError(
            f"{path} may not be opened: {error}. Trainer and engine must run as one user."
        ) from error
    except OSError as error:
        raise gone from error
    # Another process may have got the same number, and the same descriptor.
    if not os.readlink(f"/proc/self/fd/{opened}").startswith(f"/memfd:{name} "):
        os.close(opened)
        raise gone
    return opened


def _free_bytes() -> int:
    with open("/proc/meminfo") as file:
        rows = dict(line.split(":") for line in file)
    return int(rows["MemAvailable"].split()[0]) * 1024
