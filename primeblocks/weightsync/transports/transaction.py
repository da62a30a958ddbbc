"""One sync's notes on the board: who came, what is sent, and the decision that all follow."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ...errors import DeadlineError, TransferError, check_version
from ..agree import Agreement
from ..marker import as_corruption
from .board import Board

__all__ = ["Go", "Transaction", "next_generation"]

_MESSAGE_BYTES = 2048
_ERROR_CHARS = 250  # A character takes up to six bytes in JSON.
# The others hear this much later that rank 0 did not reach the store in time.
_GRACE_S = 1.0

_COMMIT, _ABORT = "commit", "abort"


def next_generation(board: Board, agreement: Agreement, *, deadline: float) -> int:
    """Return a number that rank 0 draws and tells the others; collective.

    What an earlier group left in the store is never read again.

    Raises:
        TransferError: not all ranks came in time, or rank 0 has no store.
    """
    mine: dict[str, Any] = {}
    if agreement.rank == 0:
        try:
            mine["generation"] = board.add("generations", 1, deadline=deadline)
        except TransferError as error:
            mine["error"] = str(error)[:_ERROR_CHARS]
    said = agreement.exchange(mine, size_bytes=_MESSAGE_BYTES, deadline=deadline + _GRACE_S)
    if "error" in said[0]:
        raise TransferError(f"rank 0: {said[0]['error']}")
    number: int = said[0]["generation"]
    return number


class Go(NamedTuple):
    """Rank 0's word once all have come: a delta to `base`, or that nothing is sent, and why."""

    base: int | None
    error: str


class Transaction:
    """Notes under one number. Every method raises TransferError where the store fails."""

    def __init__(self, board: Board, number: int, *, rank: int) -> None:
        self.number, self._board, self._rank = number, board, rank

    def post(self, key: str, value: Any, *, deadline: float) -> None:
        """Leave a note."""
        self._board.post(self._key(key), json.dumps(value), deadline=deadline)

    def read_begun(self, *, deadline: float) -> dict[str, Any] | None:
        """Reader: return what will be sent; {} if it was called off, None at the deadline."""
        found = self._first_of("go", "begun", deadline=deadline)
        if found is None:
            return None
        if found[0] == "go":
            return {}
        with as_corruption("a note of the group"):
            begun = json.loads(found[1])
            return {"version": check_version(begun["version"]), "plan": str(begun["plan"])}

    def read_join(self, reader: int, *, deadline: float) -> int | None:
        """Rank 0: wait for a reader; return the version that it holds.

        Raises:
            TransferError: it did not come, or a rank called the transaction off.
        """
        found = self._first_of("go", f"join/{reader}", deadline=deadline)
        if found is None:
            raise TransferError(f"reader {reader} did not ask in time")
        if found[0] == "go":
            raise TransferError(_go(found[1]).error)
        with as_corruption("a note of the group"):
            return _version(json.loads(found[1]))

    def go(self, base: int | None, *, deadline: float) -> Go:
        """Rank 0: begin, if nobody called it off. Returns the word that stands."""
        return self._first_go(Go(base, ""), deadline)

    def call_off(self, error: str, *, deadline: float) -> Go:
        """End it if it did not begin; the group can still be used. Returns the word that stands."""
        return self._first_go(Go(None, error), deadline)

    def read_go(self, *, deadline: float) -> Go | None:
        """Reader: wait until it begins or is called off; None at the deadline."""
        found = self._first_of("go", deadline=deadline)
        return None if found is None else _go(found[1])

    def read_or_abort(self, key: str, *, deadline: float) -> Any:
        """Wait for a note, unless the transaction is aborted.

        Raises:
            DeadlineError: there was none in time.
            TransferError: the transaction was aborted.
        """
        found = self._first_of("decision", key, deadline=deadline)
        if found is None:
            raise DeadlineError(f"waited for the {key} in vain")
        if found[0] == "decision":
            raise TransferError(found[1])
        with as_corruption("a note of the group"):
            return json.loads(found[1])

    def abort(self, why: str, *, deadline: float) -> str:
        """Decide that no rank loads it, and return the decision that stands: the first."""
        return self._decide(f"{_ABORT}: {why}", deadline)

    def vote(self, voters: int, *, deadline: float) -> None:
        """Reader: say that this rank has it all. The last of `voters` decides to commit."""
        votes = self._board.add(self._key("votes"), 1, deadline=deadline)
        if votes == voters:
            # No rank has to live longer than its own part.
            self._decide(_COMMIT, deadline)

    def follow(self, last: Callable[[], None], *, deadline: float) -> None:
        """Do this rank's last step before the decision, and wait for the decision.

        Raises:
            TransferError: the decision is not to commit.
        """
        said, why = None, "waited for the others in vain"
        try:
            last()
            said = self._board.read(self._key("decision"), deadline=deadline)
        except TransferError as error:
            # Was it done, and only the answer lost? What the others made of it stands.
            why = f"met {error}"
        if said is None:
            said = self.abort(f"rank {self._rank} {why}", deadline=deadline)
        if said != _COMMIT:
            raise TransferError(said)

    def _first_go(self, go: Go, deadline: float) -> Go:
        said = self._board.post_first(self._key("go"), json.dumps(go), deadline=deadline)
        return _go(said)

    def _first_of(self, *keys: str, deadline: float) -> tuple[str, str] | None:
        found = self._board.read_any([self._key(key) for key in keys], deadline=deadline)
        return None if found is None else (found[0].removeprefix(self._key("")), found[1])

    def _decide(self, word: str, deadline: float) -> str:
        return self._board.post_first(self._key("decision"), word, deadline=deadline)

    def _key(self, key: str) -> str:
        return f"{self.number}/{key}"


def _go(text: str) -> Go:
    with as_corruption("a note of the group"):
        base, error = json.loads(text)
        return Go(_version(base), str(error))


def _version(value: Any) -> int | None:
    return None if value is None else check_version(value)
