"""Findings about shared memory: what weight transfers have in it, and what the dead left there.

    python -m primeblocks.weightsync.doctor            # list
    python -m primeblocks.weightsync.doctor --clean    # and remove what dead owners left

Memory itself has no name: it ends with the last process that has it open, which is listed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from .lease import Hold
from .transports.own_files import LOCK, open_own
from .transports.place import OWNED, sweep

__all__ = ["Finding", "clean", "examine"]

State = Literal["in use", "left", "another user's", "vLLM's"]
_VLLM = "vllm_offload_*.mmap"


@dataclass(frozen=True)
class Finding:
    """A directory, a file, or memory of a process.

    Attributes:
        path: for memory, its descriptor in the process that has it open.
        state: "left" is what `clean` removes.
    """

    path: Path
    state: State
    bytes: int

    def __str__(self) -> str:
        return f"{self.state:<15}{self.bytes:>16,} bytes  {self.path}"


def examine(root: str = "/dev/shm") -> list[Finding]:
    """List what is in shared memory: directories of owners, their memory, and vLLM's pages.

    Local; changes nothing. Memory of other users' processes is seen by root alone.
    """
    found = [*_directories(Path(root)), *_memory()]
    for path in sorted(Path(root).glob(_VLLM)):
        with suppress(FileNotFoundError):
            found.append(Finding(path, "vLLM's", path.lstat().st_size))
    return found


def clean(root: str = "/dev/shm") -> list[Path]:
    """Remove what dead owners of this user left, and nothing else; return it. Local.

    vLLM's pages are never touched: remove them where no engine is starting.
    """
    return sweep(Path(root))


def _directories(root: Path) -> Iterator[Finding]:
    for path in sorted(root.glob(OWNED)):
        with suppress(FileNotFoundError):
            status = path.lstat()
            state: State = "another user's"
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                state = "in use" if _has_owner(path) else "left"
            yield Finding(path, state, _size(path) if state != "another user's" else 0)


def _has_owner(directory: Path) -> bool:
    try:
        Hold(open_own(directory / LOCK, os.O_RDONLY), fcntl.LOCK_SH).close()
    except FileNotFoundError:
        return False
    except (BlockingIOError, UsageError):  # A file of somebody else is left alone.
        return True
    return False


def _size(directory: Path) -> int:
    return sum(each.lstat().st_size for each in directory.iterdir() if not each.is_symlink())


def _memory() -> Iterator[Finding]:
    """Yield each piece of memory once, in the first process that has it open."""
    seen = set()
    pids = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    for pid in pids:
        with suppress(OSError):  # It has ended, or is another user's.
            for link in sorted(Path(f"/proc/{pid}/fd").iterdir()):
                with suppress(OSError):
                    if os.readlink(link).startswith("/memfd:primeblocks-"):
                        status = link.stat()
                        if status.st_ino not in seen:
                            seen.add(status.st_ino)
                            yield Finding(link, "in use", status.st_size)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clean", action="store_true", help="remove what dead owners left")
    parser.add_argument("--root", default="/dev/shm", help="the mount point of a tmpfs")
    chosen = parser.parse_args()
    found = examine(chosen.root)
    print("\n".join(map(str, found)) or "nothing is in shared memory")
    if chosen.clean:
        removed = clean(chosen.root)
        print("\n".join(f"removed {path}" for path in removed) or "nothing was left by the dead")


if __name__ == "__main__":
    _main()
