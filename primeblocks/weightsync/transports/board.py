"""A torch Store with deadlines, in which processes leave each other notes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...errors import TransferError, UnsupportedError

__all__ = ["Board", "open_store", "store_spec"]

_LOOK_S = 0.005
# A late call, to abort for example, still has this long; nothing else goes on after a deadline.
_GRACE_S = 1.0
_OPEN_S = 30.0


class Board:
    """Keys of one store under a prefix. Every call ends by its deadline (time.monotonic).

    Each call runs in a thread of its own: a store that hangs would keep its caller for ever, for
    its calls have no deadline that it always meets. A call made at the deadline or later waits a
    second for the store to answer. While a call hangs, no other is made beside it: the next one
    waits for it, until its own deadline and no second longer.

    Raises:
        TransferError: every method does, where the store is gone or does not answer in time.
    """

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._hanging: threading.Thread | None = None

    def add(self, key: str, amount: int, *, deadline: float) -> int:
        """Add to a number and return it."""
        total = self._call(lambda: self._store.add(self._key(key), amount), deadline)
        assert isinstance(total, int)
        return total

    def post(self, key: str, text: str, *, deadline: float) -> None:
        """Write a note."""
        self._call(lambda: self._store.set(self._key(key), text), deadline)

    def post_first(self, key: str, text: str, *, deadline: float) -> str:
        """Write a note unless there is one; return the one that stands: the first."""
        said = self._call(lambda: self._store.compare_set(self._key(key), "", text), deadline)
        assert isinstance(said, bytes)
        return said.decode(errors="replace")

    def read_any(self, keys: Sequence[str], *, deadline: float) -> tuple[str, str] | None:
        """Wait for the first of some notes; return its key and text, or None at the deadline."""

        def look() -> tuple[str, str] | None:
            while True:
                for key in keys:
                    if self._store.check([self._key(key)]):
                        return key, self._store.get(self._key(key)).decode(errors="replace")
                if time.monotonic() >= deadline:
                    return None
                threading.Event().wait(_LOOK_S)

        found = self._call(look, deadline)
        assert found is None or isinstance(found, tuple)
        return found

    def look(self, key: str, *, deadline: float) -> str | None:
        """Read a note that is there now; None where there is none."""

        def there() -> str | None:
            if not self._store.check([self._key(key)]):
                return None
            return self._store.get(self._key(key)).decode(errors="replace")

        found = self._call(there, deadline)
        assert found is None or isinstance(found, str)
        return found

    def remove(self, key: str, *, deadline: float) -> None:
        """Remove a note, if there is one."""
        self._call(lambda: self._store.delete_key(self._key(key)) or True, deadline)

    def replace(self, key: str, old: str, new: str, *, deadline: float) -> bool:
        """Write over a note if it is still the old one; return whether it is the new one now."""
        said = self._call(lambda: self._store.compare_set(self._key(key), old, new), deadline)
        assert isinstance(said, bytes)
        return said.decode() == new

    def read(self, key: str, *, deadline: float) -> str | None:
        """Wait for a note; None at the deadline."""
        found = self.read_any([key], deadline=deadline)
        return None if found is None else found[1]

    def wait_for(self, work: Callable[[], object], *, deadline: float) -> None:
        """Do work that waits in the store."""
        self._call(lambda: work() or True, deadline)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _call(self, work: Callable[[], Any], deadline: float) -> Any:
        late = TransferError("the store does not answer in time")
        if self._hanging is not None:
            self._hanging.join(max(0.0, deadline - time.monotonic()))
            if self._hanging.is_alive():
                raise late
            self._hanging = None
        answers: list[Any] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(work())
            except (RuntimeError, TypeError) as error:  # A key that a store cannot have, too.
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()) + _GRACE_S)
        if errors:
            text = str(errors[0]).splitlines()[0][:200]
            raise TransferError(f"the store does not answer: {text}") from errors[0]
        if not answers:
            self._hanging = thread
            raise late
        return answers[0]


def store_spec(store: dist.Store) -> dict[str, Any]:
    """Return what `open_store` needs in another process. JSON-able.

    Raises:
        UnsupportedError: it lives in this process, or does not say where it is.
    """
    match store:
        case dist.FileStore():
            path: str = store.path  # type: ignore[attr-defined]  # Its stub lacks it.
            return {"kind": "file", "path": os.path.abspath(path)}
        case dist.TCPStore():
            return {"kind": "tcp", "host": store.host, "port": store.port}
    raise UnsupportedError(
        f"a {type(store).__name__} cannot be opened in another process. Pass a TCPStore, or a "
        "FileStore on a disk that all share."
    )


def open_store(spec: Mapping[str, Any]) -> dist.Store:
    """Open the store whose `store_spec` this is.

    Raises:
        TransferError: it does not answer.
    """
    if spec["kind"] == "file":
        return dist.FileStore(spec["path"])
    try:
        return dist.TCPStore(
            spec["host"],
            spec["port"],
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_OPEN_S),
        )
    except RuntimeError as error:
        text = str(error).splitlines()[0][:200]
        raise TransferError(
            f"no store answers at {spec['host']}:{spec['port']}: {text}. Host it where engines "
            "reach it, under a name that they know."
        ) from error
