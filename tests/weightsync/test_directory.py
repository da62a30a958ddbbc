"""What is special to a place: its name, what it needs, whose it is."""

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from contextlib import suppress

import pytest
import torch

from primeblocks.errors import (
    CorruptionError,
    DeadlineError,
    TransferError,
    UnsupportedError,
    UsageError,
)
from primeblocks.testing import ranks
from primeblocks.weightsync import Publisher, SharedMemoryTransport, Subscriber, describe, plan_sync
from primeblocks.weightsync.lease import Hold
from primeblocks.weightsync.transports import FileTransport, IpcTransport
from tests.deadlines import HANG_S as TIMEOUT_S
from tests.weightsync.conftest import STRANGER
from tests.weightsync.contents import Engine

ranks.preload(__name__)

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
PRIVATE = {"shared_memory": SharedMemoryTransport, "ipc": IpcTransport}


@pytest.mark.parametrize("kind", PRIVATE)
@pytest.mark.parametrize("name", ["", "a/b", "/dev/shm"])
def test_a_name_is_one_path_component(kind, name):
    with pytest.raises(UsageError, match="path component"):
        PRIVATE[kind](name)


@pytest.mark.parametrize("kind", PRIVATE)
def test_memory_refuses_where_it_cannot_work(kind, monkeypatch, tmp_path):
    with pytest.raises(UnsupportedError, match="is not a directory"):
        PRIVATE[kind]("a", root=str(tmp_path / "none"))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="darwin. Use FileTransport"):
        PRIVATE[kind]("a")


def test_there_is_one_owner_and_it_alone_begins(tmp_path):
    with FileTransport(tmp_path, owner=True):
        with pytest.raises(UsageError, match="has a living owner"):
            FileTransport(tmp_path, owner=True)
        weights = {"w": torch.zeros(16)}
        plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=64)
        publisher = Publisher(plan, weights, FileTransport(tmp_path))
        with pytest.raises(UsageError, match="owner=True"):
            publisher.publish(0, timeout_s=TIMEOUT_S)
    FileTransport(tmp_path, owner=True).close()


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    weights = {"w": torch.zeros(16, dtype=torch.complex64)}
    plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=64)
    with FileTransport(tmp_path, owner=True) as transport:
        with pytest.raises(UsageError, match="safetensors has no name"):
            Publisher(plan, weights, transport).publish(0, timeout_s=TIMEOUT_S)
        assert not list(tmp_path.rglob("version-*"))


# --- whose it is -------------------------------------------------------------------------------


def published(transport, *values, full_every=1):
    """A plan of one tensor, after a version of it for each value."""
    weights = {"w": torch.zeros(1000)}
    plan = plan_sync([describe(weights)], describe(weights), bucket_bytes=4096)
    with Publisher(plan, weights, transport, full_every=full_every) as publisher:
        for version, value in enumerate(values, 1):
            weights["w"][:10] = value
            publisher.publish(version, timeout_s=TIMEOUT_S)
    return plan


def received(plan, transport, timeout_s=TIMEOUT_S):
    engine = Engine()
    with Subscriber(plan, engine, transport) as subscriber:
        subscriber.receive(timeout_s=timeout_s)
    return engine.tensors["w"][0].item()


@AS_ROOT
def test_a_directory_and_a_link_made_beforehand_change_nothing(everybodys, tmp_path):
    root, stranger = everybodys
    precious = tmp_path / "precious"
    precious.write_text("precious")
    with SharedMemoryTransport("theirs", owner=True, root=str(root)) as other:
        published(other, 66.0)
        made = next(root.glob("*/version-1.safetensors"))
        weights, commits = made.read_bytes(), (made.parent / "commits.json").read_bytes()
    # What an owner of this name would use, were names easy to foresee.
    planted = stranger(
        f"for d in primeblocks-policy primeblocks-policy-{'0' * 16}; do mkdir -m 777 $d; "
        f"for f in version-1.safetensors commits.json commits.json.tmp version-2.0.delta; do "
        f"ln -s {precious} $d/$f; done; done"
    )
    assert planted.returncode == 0
    with SharedMemoryTransport("policy", owner=True, root=str(root)) as owner:
        plan = published(owner, 1.0, 2.0, full_every=4)
        assert received(plan, SharedMemoryTransport("policy", root=str(root))) == 2.0
        for folder in root.iterdir():
            if folder.stat().st_uid == STRANGER:
                for name, text in (("version-9.safetensors", weights), ("commits.json", commits)):
                    (folder / name).unlink(missing_ok=True)
                    (folder / name).write_bytes(text)
                    os.chown(folder / name, STRANGER, STRANGER)
        assert received(plan, SharedMemoryTransport("policy", root=str(root))) == 2.0
    assert precious.read_text() == "precious"


@AS_ROOT
def test_without_an_owner_an_engine_takes_nothing_from_another_user(everybodys):
    root, _ = everybodys
    with SharedMemoryTransport("policy", owner=True, root=str(root)) as owner:
        plan = published(owner, 66.0)
        (folder,) = root.iterdir()
        shutil.copytree(folder, root / f"primeblocks-policy-{'0' * 16}")
    (folder,) = root.iterdir()
    for path in (folder, *folder.iterdir()):
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(DeadlineError, match="Run trainer and engine on one host as one user"):
        received(plan, SharedMemoryTransport("policy", root=str(root)), timeout_s=0.05)


@AS_ROOT
def test_a_mount_that_shows_another_user_is_named(tmp_path):
    with FileTransport(tmp_path, owner=True) as owner:
        plan = published(owner, 5.0)
        for path in tmp_path.rglob("*"):
            os.chown(path, STRANGER, STRANGER)
        with pytest.raises(UsageError, match=f"belongs to user {STRANGER}"):
            received(plan, FileTransport(tmp_path))
        assert received(plan, FileTransport(tmp_path, user=STRANGER)) == 5.0


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/passwd/x", "/proc/none", "a\0b"])
def test_what_is_no_directory_is_refused(path):
    with pytest.raises(UsageError, match="cannot be used|is not a path"):
        FileTransport(path, owner=True)
    with suppress(UsageError):  # Or there is nothing yet.
        assert FileTransport(path).markers() == ()


def test_a_root_in_which_others_rename_things_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="other users may rename files in it"):
        SharedMemoryTransport("policy", owner=True, root=str(tmp_path / "open"))


# --- what it leaves, and what it leaves alone --------------------------------------------------


def test_a_users_own_files_are_left_alone(tmp_path):
    names = ("version-7.safetensors", "commits.json", "commits.json.tmp", "version-3.0.delta")
    names += ("owner.lock", "model.safetensors")
    for name in names:
        (tmp_path / name).write_text(f"mine: {name}")
    with FileTransport(tmp_path, owner=True) as owner:
        plan = published(owner, *range(7))
        assert received(plan, FileTransport(tmp_path)) == 6.0
        assert {path.parent.parent for path in owner.to_remove()} == {tmp_path}
        inside = [next(tmp_path.glob("run-*")) / name for name in ("x.delta", "model.safetensors")]
        for path in inside:
            path.write_text("mine")
        assert not {*inside} & {*owner.to_remove()}
    FileTransport(tmp_path, owner=True).close()
    assert [(tmp_path / name).read_text() for name in names] == [f"mine: {n}" for n in names]
    assert [path.read_text() for path in inside] == ["mine", "mine"]


def test_a_note_that_is_not_ours_is_refused_and_left_alone(tmp_path):
    (tmp_path / "primeblocks-run.json").write_text('{"run": "../../etc"}')
    with pytest.raises(CorruptionError, match="cannot be read"):
        FileTransport(tmp_path, owner=True)
    assert os.listdir(tmp_path) == ["primeblocks-run.json"]


@pytest.mark.parametrize("full_every", [1, 4])
def test_the_final_weights_stay_on_a_disk(full_every, tmp_path):
    with FileTransport(tmp_path, owner=True) as owner:
        plan = published(owner, 1.0, 2.0, 3.0, full_every=full_every)
        before = {path for path in tmp_path.rglob("*") if path.is_file()}
        said = {*owner.to_remove()}
    after = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert said == {path for path in before - after if path.parent != tmp_path}
    assert received(plan, FileTransport(tmp_path)) == 3.0
    with FileTransport(tmp_path, owner=True) as owner:  # A new run starts with no version.
        assert owner.markers() == ()
        published(owner, 9.0)
    assert {path for path in after if path.suffix == ".safetensors"} < {*tmp_path.rglob("*")}


def test_a_disk_that_is_full_at_the_end_keeps_the_version_and_no_lock(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = FileTransport(tmp_path, owner=True)
    published(owner, 1.0, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TransferError, match=r"No space left.* removes .*run-"):
            owner.close()
    assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["version-2.safetensors"]
    FileTransport(tmp_path, owner=True).close()


def test_a_file_system_without_locks_is_read_and_not_owned(tmp_path, monkeypatch):
    def none(fd, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    with FileTransport(tmp_path, owner=True) as owner, monkeypatch.context() as patch:
        plan = published(owner, 1.0)
        patch.setattr(fcntl, "flock", none)
        assert received(plan, FileTransport(tmp_path)) == 1.0
        with pytest.raises(UnsupportedError, match=r"flock.*not implemented"):
            FileTransport(tmp_path / "other", owner=True)


def _owner_dies(kind, where):
    make = PRIVATE.get(kind, FileTransport)
    place = {"path": where} if kind == "file" else {"name": "gone", "root": where}
    owner = make(**place, owner=True)
    published(owner, 1.0, 2.0)
    ranks.kill(0)


@pytest.mark.parametrize("kind", PRIVATE)
def test_what_a_killed_owner_left_is_removed_by_an_owner_of_another_name(kind, tmp_path):
    ranks.run(_owner_dies, kind, str(tmp_path), world_size=1)
    (left,) = tmp_path.iterdir()
    with SharedMemoryTransport("living", owner=True, root=str(tmp_path)) as living:
        assert not left.exists()
        plan = published(living, 3.0)
        ranks.run(_owner_dies, kind, str(tmp_path), world_size=1)
        SharedMemoryTransport("other", owner=True, root=str(tmp_path)).close()
        assert len([*tmp_path.iterdir()]) == 1
        assert received(plan, SharedMemoryTransport("living", root=str(tmp_path))) == 3.0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_on_a_disk_is_removed_by_the_next(tmp_path):
    ranks.run(_owner_dies, "file", str(tmp_path), world_size=1)
    plan = published(FileTransport(tmp_path / "other", owner=True), 1.0)
    assert received(plan, FileTransport(tmp_path)) == 2.0
    with FileTransport(tmp_path, owner=True):
        assert len([*tmp_path.glob("run-*")]) == 1
        assert not [*tmp_path.glob("run-*/version-*")]


@AS_ROOT
@pytest.mark.parametrize("mode", [0o700, 0o755])
@pytest.mark.parametrize("below", ["", "deeper"])
@pytest.mark.parametrize(
    "made",
    [
        lambda root: SharedMemoryTransport("policy", owner=True, root=root),
        lambda root: IpcTransport("policy", owner=True, root=root),
        lambda root: FileTransport(root, owner=True),
    ],
    ids=["shared_memory", "ipc", "file"],
)
def test_a_root_of_somebody_else_is_a_typed_error(made, mode, below):
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        place = os.path.join(root, below)
        os.makedirs(place, exist_ok=True)
        os.chmod(root, mode)
        os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match="cannot be used|is not a directory|was refused"):
                made(place)
        finally:
            os.seteuid(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("child_closes", [False, True])
def test_a_lock_ends_with_its_process_although_a_child_of_it_lives(child_closes, tmp_path):
    path = tmp_path / "lock"
    path.touch()
    said, says = os.pipe()
    until, ends = os.pipe()
    if (pid := os.fork()) == 0:
        Hold(os.open(path, os.O_RDWR), fcntl.LOCK_SH).close()
        held = Hold(os.open(path, os.O_RDWR), fcntl.LOCK_SH)
        if os.fork() == 0:
            if child_closes:
                held.close()  # Its parent's lock it is, and stays.
            with open(path) as other, suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(says, b"lost")
            os.write(says, b"here")
            os.close(ends)
            os.read(until, 1)
        else:
            os.write(says, b"held" if os.read(said, 4) == b"here" else b"lost")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(said, 4) == b"held"
    Hold(os.open(path, os.O_RDWR), fcntl.LOCK_EX).close()  # While the child lives.
    for end in (said, says, until, ends):
        os.close(end)
