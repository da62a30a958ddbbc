"""Notes in a torch Store, with a deadline for every call, and the notes of one sync."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...errors import (
    CapacityError,
    DeadlineError,
    TransferError,
    UnsupportedError,
    check_version,
)
from ..held import left_s
from ..marker import as_corruption
from .transport import pauses

__all__ = ["Board", "Go", "Transaction", "file_store", "store_spec", "tcp_store"]

_LOOK_S, _LONGEST_LOOK_S = 0.005, 0.05
# The store may answer this long after a deadline, so that a late call, such as an abort, works.
_GRACE_S = 1.0
_OPEN_S = 30.0
# A TCPStore ends the connection for ever if a value is larger.
_MAX_BYTES = 8 << 20
_COMMIT, _ABORT = "commit", "abort"

T = TypeVar("T")


class Board:
    """The keys of one store under a prefix. Deadlines are times of time.monotonic().

    Each call runs in a thread of its own, because a store that hangs would block its caller for
    ever. The store may answer up to one second after the deadline. If a call hangs, the next call
    waits, until its own deadline, for the end of the first. Every method raises TransferError if
    the store fails or does not answer in time. A note has at most 8 MiB.
    """

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._hanging: threading.Thread | None = None

    def add(self, key: str, amount: int, *, deadline: float) -> int:
        return self.call(lambda: self._store.add(self._key(key), amount), deadline=deadline)

    def post(self, key: str, text: str, *, deadline: float) -> None:
        _check_size(text)
        self.call(lambda: self._store.set(self._key(key), text), deadline=deadline)

    def read_any(
        self, keys: Sequence[str], *, deadline: float, waits: bool = True
    ) -> tuple[str, str] | None:
        """Wait for the first of several notes. Return its key and text, or None at the deadline.

        Without `waits`, return None at once if none of the keys has a note.
        """

        def look() -> tuple[str, str] | None:
            pause = pauses(_LOOK_S, longest_s=_LONGEST_LOOK_S)
            while True:
                for key in keys:
                    if self._store.check([self._key(key)]):
                        return key, self._store.get(self._key(key)).decode(errors="replace")
                if not waits or time.monotonic() >= deadline:
                    return None
                threading.Event().wait(next(pause))

        return self.call(look, deadline=deadline)

    def replace(self, key: str, old: str, new: str, *, deadline: float) -> str:
        """Replace a note if it still equals `old`, and return the note that the key has now.

        With `old` "", write a note unless the key has one.
        """
        _check_size(new)
        said = self.call(
            lambda: self._store.compare_set(self._key(key), old, new), deadline=deadline
        )
        return said.decode(errors="replace")

    def read(self, key: str, *, deadline: float, waits: bool = True) -> str | None:
        """Wait for one note as `read_any` does, and return its text or None."""
        found = self.read_any([key], deadline=deadline, waits=waits)
        return None if found is None else found[1]

    def clear(self, keys: Iterable[str], *, deadline: float) -> None:
        """Empty notes that are not needed any more, if the store answers."""
        gone = [self._key(key) for key in keys]
        if gone:

            def empty() -> None:
                # Not delete_key: a reader that saw the key would wait until the store gives up.
                for key in gone:
                    self._store.set(key, "")

            with suppress(TransferError):
                self.call(empty, deadline=deadline)

    def call(self, work: Callable[[], T], *, deadline: float) -> T:
        """Run `work`, which may wait in the store, in a thread."""
        late = TransferError("the store does not answer in time. Check that its host is alive.")
        if self._hanging is not None:
            self._hanging.join(left_s(deadline))
            if self._hanging.is_alive():
                raise late
            self._hanging = None
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(work())
            except (RuntimeError, TypeError) as error:  # TypeError: not a valid key.
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(left_s(deadline) + _GRACE_S)
        if errors:
            text = str(errors[0]).splitlines()[0][:200]
            raise TransferError(f"the store does not answer: {text}") from errors[0]
        if not answers:
            self._hanging = thread
            raise late
        return answers[0]

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class Go(NamedTuple):
    """The decision to begin a sync, with a delta from `base` or in full, or to call the sync off.

    `error` says why the sync was called off. It is "" if the sync begins.
    """

    base: int | None
    error: str


class Transaction:
    """The notes of one sync: its readers, its sizes and digests, and the decision.

    The head of `group.py` draws the states. Every method raises TransferError if the store fails.
    """

    def __init__(self, board: Board, number: int, *, rank: int) -> None:
        self.number, self._board, self._rank = number, board, rank

    def post(self, key: str, value: Any, *, deadline: float) -> None:
        self._board.post(self._key(key), json.dumps(value), deadline=deadline)

    def clear(self, keys: Iterable[str], *, deadline: float) -> None:
        """Empty notes that no rank reads again, if the store answers."""
        self._board.clear([self._key(key) for key in keys], deadline=deadline)

    def read_begun(self, *, deadline: float) -> dict[str, Any] | None:
        """Reader: return version and plan, {} if the sync was called off, None at the deadline."""
        found = self._first_of("go", "begun", deadline=deadline)
        if found is None:
            return None
        if found[0] == "go":
            return {}
        with as_corruption("a note of the group"):
            begun = json.loads(found[1])
            return {"version": check_version(begun["version"]), "plan": str(begun["plan"])}

    def read_join(self, reader: int, *, deadline: float) -> int | None:
        """Rank 0: wait for a reader, and return the version that it holds.

        Raises TransferError if the reader did not join, or a rank called the sync off.
        """
        found = self._first_of("go", f"join/{reader}", deadline=deadline)
        if found is None:
            raise TransferError(
                f"reader {reader} did not ask in time. The reader must call receive() during a "
                "publish."
            )
        if found[0] == "go":
            raise TransferError(_go(found[1]).error)
        with as_corruption("a note of the group"):
            return _version(json.loads(found[1]))

    def decide(self, go: Go, *, deadline: float) -> Go:
        """Begin the sync, or call it off. Returns the first decision, which counts.

        Only rank 0 begins. If the sync is called off, the group can still be used.
        """
        said = self._board.replace(self._key("go"), "", json.dumps(go), deadline=deadline)
        return _go(said)

    def read_go(self, *, deadline: float) -> Go | None:
        """Reader: wait until the sync begins or is called off. Returns None at the deadline."""
        found = self._first_of("go", deadline=deadline)
        return None if found is None else _go(found[1])

    def read_or_abort(self, key: str, *, deadline: float) -> Any:
        """Wait for a note, or raise DeadlineError. Raises TransferError if the sync was aborted."""
        found = self._first_of("decision", key, deadline=deadline)
        if found is None:
            raise DeadlineError(f"the {key} did not arrive before the deadline")
        if found[0] == "decision":
            raise TransferError(found[1])
        with as_corruption("a note of the group"):
            return json.loads(found[1])

    def abort(self, why: str, *, deadline: float) -> str:
        """Decide that no rank loads the version. Returns the first decision, which counts."""
        return self._decide(f"{_ABORT}: {why}", deadline)

    def vote(self, voters: int, *, deadline: float) -> None:
        """Reader: report that this rank has the version. The last of `voters` commits."""
        votes = self._board.add(self._key("votes"), 1, deadline=deadline)
        if votes == voters:
            # The last voter decides, so no other rank has to be alive.
            self._decide(_COMMIT, deadline)

    def finish(self, last_step: Callable[[], None], *, deadline: float) -> None:
        """Do this rank's last step before the decision, and wait for the decision.

        If the step or the wait fails, this rank decides to abort. The first decision counts. It may
        be "commit", if the store did the step and only its answer was lost. Raises TransferError
        unless the decision is "commit".
        """
        decision, why = None, "waited for the other ranks until the deadline"
        try:
            last_step()
            decision = self._board.read(self._key("decision"), deadline=deadline)
        except TransferError as error:
            why = f"met {error}"
        if decision is None:
            decision = self.abort(f"rank {self._rank} {why}", deadline=deadline)
        if decision != _COMMIT:
            raise TransferError(decision)

    def _first_of(self, *keys: str, deadline: float) -> tuple[str, str] | None:
        found = self._board.read_any([self._key(key) for key in keys], deadline=deadline)
        return None if found is None else (found[0].removeprefix(self._key("")), found[1])

    def _decide(self, word: str, deadline: float) -> str:
        return self._board.replace(self._key("decision"), "", word, deadline=deadline)

    def _key(self, key: str) -> str:
        return f"{self.number}/{key}"


def _check_size(text: str) -> None:
    if (size := len(text.encode())) > _MAX_BYTES:
        raise CapacityError(
            f"a note has {size:,} bytes, but a store takes at most {_MAX_BYTES:,} bytes. Pass a "
            "larger bucket_bytes, so that the plan has fewer buckets."
        )


def _go(text: str) -> Go:
    with as_corruption("a note of the group"):
        base, error = json.loads(text)
        return Go(_version(base), str(error))


def _version(value: Any) -> int | None:
    return None if value is None else check_version(value)


def store_spec(store: dist.Store) -> dict[str, Any]:
    """Return the arguments that open a store in another process. JSON-able."""
    match store:
        case dist.FileStore():
            path: str = store.path  # type: ignore[attr-defined]  # Its stub lacks it.
            return {"kind": "file_store", "path": os.path.abspath(path)}
        case dist.TCPStore():
            return {"kind": "tcp_store", "host": store.host, "port": store.port}
    raise UnsupportedError(
        f"a {type(store).__name__} cannot be opened in another process. Pass a TCPStore, or a "
        "FileStore on a disk that all processes share."
    )


def file_store(path: str) -> dist.Store:
    return dist.FileStore(path)


def tcp_store(host: str, port: int) -> dist.Store:
    patience = timedelta(seconds=_OPEN_S)
    try:
        return dist.TCPStore(host, port, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:
        text = str(error).splitlines()[0][:200]
        raise TransferError(
            f"no store answers at {host}:{port}: {text}. Host the store where engines can reach "
            "it, under an address that they know."
        ) from error
