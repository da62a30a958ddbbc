"""Exceptions of the library, as a tree of classes:

    PrimeblocksError
    ├── UsageError (ValueError)           the caller can fix the arguments
    │   ├── ShapeError                    a tensor's shape or dtype does not fit
    │   ├── PlanError                     degrees, layouts or names do not fit together
    │   └── UnsupportedError              a combination that is refused, with reason and remedy
    ├── MissingPackageError (ImportError) an optional package is not installed
    ├── DeadlineError (TimeoutError)      a wait ended at its deadline
    ├── CorruptionError                   a checksum or digest did not match
    ├── CapacityError                     no room: pool, disk or buffer
    ├── TransferError                     a weight transfer or its check failed
    ├── EngineError                       the inference engine died or refused
    ├── RankError                         a rank of a process group failed
    ├── CancelledError                    the caller gave the operation up
    └── ClosedError                       used after close()

Error messages state the wrong values and a remedy.
"""

import errno
import operator
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Counts and versions fit in 64 bits with a sign.
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
    "lacks_files",
    "needs",
    "shown",
]


class PrimeblocksError(Exception):
    """Base class of every error that the library raises on purpose.

    `engines` lists the failed engines by their positions in the caller's list of engines.
    """

    engines: tuple[int, ...] = ()


class UsageError(PrimeblocksError, ValueError):
    """An argument is wrong, or arguments contradict each other.

    A call that raises this error changes nothing, unless the docstring of the call says otherwise.
    """


class ShapeError(UsageError):
    """A tensor has a wrong shape or dtype."""


class PlanError(UsageError):
    """Parallel degrees, layouts or names are wrong or contradict each other."""


class UnsupportedError(UsageError):
    """A combination of arguments, packages or devices is not supported.

    The message states the reason and a remedy.
    """


class MissingPackageError(PrimeblocksError, ImportError):
    """An optional package is not installed.

    Args:
        package: the package that could not be imported. Without `extra` and `remedy`, `package` is
            the whole message, as for other exceptions.
        extra: the extra of primeblocks that installs the package.
        remedy: instructions to install a package that is not in an extra.
    """

    def __init__(self, package: str, extra: str | None = None, *, remedy: str = "") -> None:
        # Before the first release, extras are installed from a clone.
        if extra is not None:
            remedy = remedy or f"Run in your clone of primeblocks: pip install '.[{extra}]'"
        super().__init__(f"{package} is not installed. {remedy}" if remedy else package)
        self.package = package
        self.extra = extra


class DeadlineError(PrimeblocksError, TimeoutError):
    """A wait ended at its deadline."""


class CorruptionError(PrimeblocksError):
    """Bytes do not match their checksum or digest."""


class CapacityError(PrimeblocksError):
    """A pool, a disk or a buffer has no room left."""


class TransferError(PrimeblocksError):
    """A weight transfer failed, or a check found that an engine has the wrong weights.

    After a failed transfer, engines serve the old version, unless the docstring of the call says
    otherwise.
    """


class EngineError(PrimeblocksError):
    """The inference engine died or refused a call."""


class RankError(PrimeblocksError):
    """A rank of a process group failed. The message includes the traceback or the reason."""


class CancelledError(PrimeblocksError):
    """The caller cancelled the operation."""


class ClosedError(PrimeblocksError):
    """The object was used after close()."""


@contextmanager
def needs(*packages: str, extra: str) -> Iterator[None]:
    """Convert a failed import of an optional package, in a `with` block, to a typed error. Local.

    Args:
        packages: top-level names. An import of another package that fails is not converted.
        extra: the extra of primeblocks that installs the packages.

    Raises:
        MissingPackageError: one of `packages` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in packages:
            raise
        raise MissingPackageError(name, extra) from error


def check_version(value: Any) -> int:
    """Return a policy version as an int. A version counts updates, from 0 to 2**63 - 1. Local.

    Raises:
        UsageError: `value` is a bool, or is not an integer from 0 to 2**63 - 1.
    """
    if (count := _count(value)) is None or not 0 <= count < _TOO_MANY:
        raise UsageError(
            f"a policy version must be an integer from 0 to 2**63 - 1; got {shown(value)}."
        )
    return count


def check_counts(*, least: int = 1, **counts: Any) -> None:
    """Check that each value is a whole number from `least` to 2**63 - 1. Local.

    Raises:
        PlanError: a value is out of range, is a bool, or is not a whole number. The message
            includes the name of the argument.
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
    """Return the repr of a value for an error message, cut to 80 characters. Local.

    Python does not convert integers of thousands of digits to text, so the result states the size
    of a long integer in bits.
    """
    try:
        text = f"{value!r:.80}"
    except ValueError:
        text = f"an int of {value.bit_length()} bits" if isinstance(value, int) else ""
    return text or f"a {type(value).__name__}"


def lacks_files(error: BaseException | None) -> bool:
    """Whether file descriptors are used up, by the causes of an error or by a trial. Local."""
    full = (errno.EMFILE, errno.ENFILE)
    for _ in range(100):  # Causes may be a circle.
        if isinstance(error, OSError) and error.errno in full:
            return True
        error = error and (error.__cause__ or error.__context__)
    try:  # A failed lookup of a host name has another errno.
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as met:
        return met.errno in full
    return False


def how_it_ended(exitcode: int | None) -> str:
    """Describe the exit status of a child process, such as "was ended by SIGILL". Local.

    Args:
        exitcode: the exit code from `multiprocessing` or `subprocess`, or None if the child still
            runs. An exit code of `-n` means that signal `n` ended the child.
    """
    if exitcode is None:
        return "goes on"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"
