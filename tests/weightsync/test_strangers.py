"""Another user on the machine, who plants links, pipes, directories and files where ours go.

As root the tests act as user 12345; without, those of another owner are left out.
"""

import gc
import os
import shutil
import signal
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from primeblocks import weightsync
from primeblocks.errors import PrimeblocksError, UsageError
from primeblocks.weightsync import SharedMemoryTransport
from primeblocks.weightsync.transports import FileTransport, IpcTransport
from tests.deadlines import HANG_S
from tests.weightsync.conftest import STRANGER
from tests.weightsync.test_directory import AS_ROOT, published, received

MAKES = {
    "shared_memory": lambda where, **how: SharedMemoryTransport("p", root=str(where), **how),
    "file": FileTransport,
    "ipc": lambda where, **how: IpcTransport("p", root=str(where), **how),
}
WHAT = ("link", "dangling link", "pipe", "directory", "mode", "owner", "hard link")
READ = {
    "commits.json": ("shared_memory", "file"),
    "announced.json": ("file",),
    "version-1.safetensors": ("shared_memory", "file"),
    "version-2.0.delta": ("file",),
    "version-2.lock": ("ipc",),
    "rank-0.json": ("ipc",),
    "primeblocks-run.json": ("file",),
}
PLACES = [(kind, name) for name, kinds in READ.items() for kind in kinds]


@contextmanager
def in_time():
    """Fail where a pipe is waited for."""
    signal.alarm(int(HANG_S))
    yield
    signal.alarm(0)


def plant(what, path, elsewhere):
    """Put something in the place of a file."""
    content = path.read_bytes() if path.is_file() else b""
    path.unlink()
    match what:
        case "link":
            elsewhere.write_bytes(content)
            path.symlink_to(elsewhere)
        case "dangling link":
            path.symlink_to(elsewhere)
        case "pipe":
            os.mkfifo(path, 0o600)
        case "directory":
            path.mkdir(0o700)
        case "mode":
            path.write_bytes(content)
            path.chmod(0o622)
        case "owner":
            path.write_bytes(content)
            path.chmod(0o600)
            os.chown(path, STRANGER, STRANGER)
        case "hard link":
            elsewhere.write_bytes(content)
            os.chown(elsewhere, STRANGER, STRANGER)
            path.hardlink_to(elsewhere)


def unplant(path, content):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    content.rename(path)


def needs_root(what):
    if what in ("owner", "hard link") and os.geteuid() != 0:
        pytest.skip("only root acts as another user")


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_what_others_could_have_written_is_not_read(kind, name, what, tmp_path):
    needs_root(what)
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    make = MAKES[kind]
    with make(root, owner=True) as owner:
        plan = published(owner, 1.0, 2.0, full_every=4)
        weightsync.announce(owner, {"w": torch.zeros(1000)})
        (path,) = root.rglob(name)
        kept = tmp_path / "kept"
        os.link(path, kept, follow_symlinks=False)
        plant(what, path, elsewhere)
        look = weightsync.find if name == "announced.json" else partial(received, plan)
        with in_time(), pytest.raises(UsageError, match=f"{name} (was refused|belongs to user)"):
            look(make(root), timeout_s=HANG_S)
        unplant(path, kept)
        assert received(plan, make(root)) == 2.0
        assert what == "dangling link" or not elsewhere.exists() or elsewhere.stat().st_nlink == 1


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("name", ["primeblocks.lock", "primeblocks-run.json"])
def test_an_owner_takes_no_place_that_others_prepared(name, what, tmp_path):
    needs_root(what)
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    (root / name).write_text("precious")
    plant(what, root / name, elsewhere)
    if what == "dangling link":
        elsewhere.write_text("precious")
    before = sorted(root.iterdir())
    with in_time(), pytest.raises(UsageError, match=f"{name} (was refused|belongs to user)"):
        FileTransport(root, owner=True)
    assert sorted(root.iterdir()) == before
    assert not elsewhere.exists() or elsewhere.read_text() == "precious"


def _memory():
    mine = Path(f"/proc/{os.getpid()}/fd")
    held = [one for one in mine.iterdir() if "/memfd:primeblocks-" in os.path.realpath(one)]
    return {one.stat().st_ino: one for one in held}


@AS_ROOT
@pytest.mark.parametrize("kind", MAKES)
def test_another_user_neither_reads_nor_opens_memory(kind, everybodys):
    root, stranger = everybodys
    gc.collect()  # Readers of other tests may hold memory.
    before = _memory()  # torch keeps what it could not map.
    with MAKES[kind](root, owner=True) as owner:
        plan = published(owner, 1.0, 2.0, full_every=4)
        memory = [one for inode, one in _memory().items() if inode not in before]
        assert bool(memory) is (kind in ("shared_memory", "ipc"))
        assert {path.stat().st_mode & 0o777 for path in memory} <= {0o600}
        if kind != "file":
            (place,) = root.iterdir()
            assert place.stat().st_mode & 0o777 == 0o700
            files = [path for path in place.iterdir() if path.is_file()]
            assert any(path.name.endswith((".delta", "rank-0.json")) for path in files)
            assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        folder = f"/proc/{os.getpid()}/fd"
        assert stranger(f"cat {folder}/*").stdout == b""
        assert stranger(f"cat /proc/{os.getpid()}/mem").stdout == b""
        assert stranger("cat */* */*/*").stdout == b""
        assert received(plan, MAKES[kind](root)) == 2.0


@AS_ROOT
def test_the_next_owner_leaves_what_another_user_planted(everybodys, tmp_path):
    root, stranger = everybodys
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "version-1.safetensors").write_text("precious")
    (mine / "primeblocks.lock").write_text("")
    tokens = [f"primeblocks-{name}-{'0' * 15}{name}" for name in "abcd"]
    planted = stranger(
        f"ln -s {mine} {tokens[0]}; mkfifo {tokens[1]}; touch {tokens[2]}; "
        f"mkdir -m 777 {tokens[3]}; ln -s {mine}/primeblocks.lock {tokens[3]}/primeblocks.lock; "
        f"ln -s {mine}/version-1.safetensors {tokens[3]}/version-1.safetensors; "
        "mkfifo vllm_offload_1.mmap; ln -s /etc/shadow vllm_offload_2.mmap"
    )
    assert planted.returncode == 0, planted.stderr
    before = sorted(root.rglob("*"))
    with in_time():
        SharedMemoryTransport("b", owner=True, root=str(root)).close()
        with SharedMemoryTransport("a", owner=True, root=str(root)) as owner:
            plan = published(owner, 3.0)
            assert received(plan, SharedMemoryTransport("a", root=str(root))) == 3.0
        with pytest.raises(PrimeblocksError, match="as one user"):
            received(plan, SharedMemoryTransport("a", root=str(root)), timeout_s=0.05)
    assert sorted(root.rglob("*")) == before
    assert (mine / "version-1.safetensors").read_text() == "precious"
