"""Exceptions of the library, by what went wrong.

    PrimeblocksError
    ├── UsageError (ValueError)           the caller can fix the arguments
    │   ├── ShapeError                    a tensor's shape or dtype does not fit
    │   ├── PlanError                     degrees, layouts or names do not fit together
    │   └── UnsupportedError              a combination that is refused, with reason and remedy
    ├── MissingPackageError (ImportError) an optional package is not installed
    ├── DeadlineError (TimeoutError)      a wait ended at its deadline
    ├── CorruptionError                   a checksum or digest did not match
    ├── CapacityError                     no room: pool, disk or buffer
    ├── TransferError                     a weight transfer was rolled back
    ├── EngineError                       the inference engine died or refused
    ├── RankError                         a rank of a process group failed
    ├── CancelledError                    the caller gave the operation up
    └── ClosedError                       used after close()

Messages carry numbers and a remedy.
"""

import operator
import signal
from typing import Any

# What counts fits in 64 bits.
_TOO_MANY = 1 << 63

__all__ = [
    "CancelledError",
    "CapacityError",
    "ClosedError",
    "CorruptionError",
    "DeadlineError",
    "EngineError",
    "MissingPackageError",
    "PlanError",
    "PrimeblocksError",
    "RankError",
    "ShapeError",
    "TransferError",
    "UnsupportedError",
    "UsageError",
    "check_counts",
    "check_version",
    "how_it_ended",
    "shown",
]


class PrimeblocksError(Exception):
    """Base of every error raised on purpose. `engines` lists by position those that met it."""

    engines: tuple[int, ...] = ()


class UsageError(PrimeblocksError, ValueError):
    """The arguments do not make sense together; nothing was changed."""


class ShapeError(UsageError):
    """A tensor's shape or dtype does not fit."""


class PlanError(UsageError):
    """Degrees, layouts or names do not fit together."""


class UnsupportedError(UsageError):
    """A combination that is refused, with the reason and a remedy."""


class MissingPackageError(PrimeblocksError, ImportError):
    """An optional package is not installed.

    Args:
        package: what could not be imported.
        extra: the extra of primeblocks that brings it.
        remedy: how to get it, where no extra does.
    """

    def __init__(self, package: str, extra: str | None = None, *, remedy: str = "") -> None:
        # There is no release yet: extras are installed from a clone.
        remedy = remedy or f"Run in your clone of primeblocks: pip install '.[{extra}]'"
        super().__init__(f"{package} is not installed. {remedy}")
        self.package = package
        self.extra = extra


class DeadlineError(PrimeblocksError, TimeoutError):
    """A wait ended at its deadline."""


class CorruptionError(PrimeblocksError):
    """Bytes are not what their checksum or digest says."""


class CapacityError(PrimeblocksError):
    """A pool, a disk or a buffer has no room left."""


class TransferError(PrimeblocksError):
    """A weight transfer failed and was rolled back; the old version is still served."""


class EngineError(PrimeblocksError):
    """The inference engine died or refused a call."""


class RankError(PrimeblocksError):
    """A rank of a process group failed; the message holds its traceback."""


class CancelledError(PrimeblocksError):
    """The caller gave the operation up."""


class ClosedError(PrimeblocksError):
    """The object was used after close()."""


def check_version(value: Any) -> int:
    """Return a policy version as an int: a count of updates, from 0 to 2**63 - 1. Local.

    Raises:
        UsageError: it is something else.
    """
    if (count := _count(value)) is None or not 0 <= count < _TOO_MANY:
        raise UsageError(
            "a policy version counts updates: an integer, not negative and below 2**63; got "
            f"{shown(value)}."
        )
    return count


def check_counts(*, least: int = 1, **counts: Any) -> None:
    """Refuse what is no whole number from `least` to 2**63 - 1. Local.

    Raises:
        PlanError: with its name; True and False are no numbers.
    """
    for name, value in counts.items():
        count = _count(value)
        if count is None or count >= _TOO_MANY:
            raise PlanError(f"{name} must be a whole number below 2**63; got {shown(value)}.")
        if count < least:
            raise PlanError(f"{name} must be at least {least}; got {shown(value)}.")


def _count(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def shown(value: Any) -> str:
    """Return a value as messages show it, cut to 80 characters. Local.

    Python itself spells out no integer of thousands of digits, and raises ValueError.
    """
    try:
        text = f"{value!r:.80}"
    except ValueError:
        text = f"one of {value.bit_length()} bits" if isinstance(value, int) else ""
    return text or f"a {type(value).__name__}"


def how_it_ended(exitcode: int | None) -> str:
    """Put the exit status of a child process into words: "was ended by SIGILL". Local.

    Args:
        exitcode: of `multiprocessing` or `subprocess`, which negate a signal; None while it runs.
    """
    if exitcode is None:
        return "goes on"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"
