"""Versions on a disk whose power fails: what was committed is there, and whole."""

import os
from pathlib import Path

import pytest

from primeblocks.weightsync.transports import FileTransport
from tests.weightsync.test_directory import published, received


class Disk:
    """The files of a directory after a power cut: what was synced, as it was at that time."""

    def __init__(self, root, monkeypatch):
        self.root, self.contents, self.names = root, {}, {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd):
        self._fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self.names[path] = {each.name: os.stat(each).st_ino for each in path.iterdir()}
        else:
            self.contents[os.fstat(fd).st_ino] = path.read_bytes()

    def after_a_cut(self, to):
        """Copy what is left: names need a sync of their directory, bytes one of their file."""
        for directory, names in self.names.items():
            (to / directory.relative_to(self.root)).mkdir(parents=True)
            for name, inode in names.items():
                content = self.contents.get(inode, b"")
                (to / directory.relative_to(self.root) / name).write_bytes(content)
        for path in self.root.glob("*.json"):  # The note, of a rename that no sync follows.
            (to / path.name).write_bytes(self.contents.get(path.stat().st_ino, b""))
        for path in to.rglob("*.*"):
            path.chmod(0o600)


@pytest.mark.parametrize("full_every", [1, 3])
def test_what_was_committed_outlasts_a_power_cut(full_every, tmp_path, monkeypatch):
    disk = Disk(tmp_path / "disk", monkeypatch)
    values = (1.0, 2.0, 3.0)
    for count in range(1, 4):
        with FileTransport(disk.root, owner=True) as owner:
            plan = published(owner, *values[:count], full_every=full_every)
            disk.after_a_cut(tmp_path / f"cut-{count}")
        found = FileTransport(tmp_path / f"cut-{count}")
        assert received(plan, found) == values[count - 1]
        disk.names.clear()
