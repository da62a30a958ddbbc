"""Whose a folder is: files of something else, two owners, forks."""

import os
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing

import pytest

from primeblocks.errors import ClosedError, PlanError, UsageError
from primeblocks.kvoffload import HostTier, TieredStore
from tests.deadlines import HANG_S
from tests.kvoffload.disk.small import (
    EXTRA,
    FRAME,
    PAGE,
    open_tier,
    record,
    state,
)


@pytest.mark.parametrize("name", ["index", "pages"])
def test_files_of_something_else_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("somebody's, and longer than any header of an index is")
    with pytest.raises(UsageError, match="another application"):
        open_tier(tmp_path)
    (tmp_path / "lock").touch()
    if name == "index":
        with pytest.raises(UsageError, match="not an index"):
            open_tier(tmp_path)
    else:
        open_tier(tmp_path).close()
    assert "somebody's" in (tmp_path / name).read_text()


@pytest.mark.parametrize("wal", [True, False])
def test_a_database_of_something_else_is_left_alone(tmp_path, wal):
    (tmp_path / "lock").touch()
    with closing(sqlite3.connect(tmp_path / "index")) as other:
        other.executescript(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
        other.executescript("CREATE TABLE pages (mine); INSERT INTO pages VALUES (7)")
    before = (tmp_path / "index").read_bytes()
    with pytest.raises(UsageError, match="not an index"):
        open_tier(tmp_path)
    assert (tmp_path / "index").read_bytes() == before


def test_a_tier_that_is_collected_leaves_the_folder_free(tmp_path):
    tier = open_tier(tmp_path)
    tier.put([record(0)])
    del tier
    host = HostTier(capacity_bytes=FRAME, page_bytes=PAGE, attachment_bytes=EXTRA)
    with pytest.raises(PlanError, match="around"):
        TieredStore([host, open_tier(tmp_path)], write="around")
    with closing(open_tier(tmp_path)) as tier:
        assert [*state(tier)] == [0]


def test_a_forked_child_has_no_part_in_the_folder(tmp_path):
    tier = open_tier(tmp_path)
    tier.put([record(0)])
    (asked, ask), (heard, say) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it has other threads
        child = os.fork()
    if child == 0:
        try:
            tier.put([record(1)])
        except ClosedError:
            tier.close()
            os.write(say, b"closed")
        os.read(asked, 1)  # and lives on
        os._exit(0)
    os.close(say)
    try:
        assert os.read(heard, 9) == b"closed"
        with pytest.raises(UsageError, match="another store"):
            open_tier(tmp_path)
        assert tier.put([record(2)]) == [None]
        tier.close()
        with closing(open_tier(tmp_path)) as tier:
            assert [*state(tier)] == [0, 2]
    finally:
        os.write(ask, b"1")
        os.waitpid(child, 0)
        for descriptor in (asked, ask, heard):
            os.close(descriptor)


FORK = """
import gc, os, sys
from tests.kvoffload.disk.small import key_of, open_tier, record, state
tier = open_tier(sys.argv[1])
tier.put([record(0)])
tier.drop([key_of(0)])
tier.put([record(1)])
child = os.fork()
if child == 0:
    tier.close()
    del tier
    gc.collect()
    sys.exit()  # as programs do, and not _exit
os.waitpid(child, 0)
assert os.path.getsize(sys.argv[1] + "/index-wal") > 0
assert tier.put([record(2)]) == [None]
print(*state(tier))
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_that_ends_leaves_the_log_alone(tmp_path):
    """SQLite would copy the log, delete it, and with it what the parent writes from then on."""
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "1 2\n", done.stderr
    with closing(open_tier(tmp_path)) as tier:
        assert [*state(tier)] == [1, 2]
