"""Late import of the package deep_ep, with a check of every name that this adapter calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import MissingPackageError, UnsupportedError

__all__ = ["load_deep_ep"]


def load_deep_ep(needed: Mapping[str, Sequence[str]], *, written_for: str) -> Any:
    """Import deep_ep and check that it is a known version. Local.

    Args:
        needed: dotted names inside of deep_ep, each with the parameters that this adapter passes.
        written_for: the known versions, for the message.

    Raises:
        MissingPackageError: deep_ep is not installed.
        UnsupportedError: the import of deep_ep fails, or deep_ep lacks a name or a parameter.
    """
    try:
        package = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise _broken(error) from error
        raise MissingPackageError(
            "deep_ep", remedy="Build it as https://github.com/deepseek-ai/DeepEP says."
        ) from error
    except Exception as error:  # It compares NCCL libraries and starts a compiler: anything fails.
        raise _broken(error) from error
    if missing := [gap for name in needed for gap in _gaps(package, name, needed[name])]:
        version = getattr(package, "__version__", "of unknown version")
        raise UnsupportedError(
            f"deep_ep {version} lacks {', '.join(missing)}. This adapter was written for "
            f"{written_for}. Install that version."
        )
    return package


def _broken(error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"deep_ep is installed but its import fails with {type(error).__name__}: {error}"
    )


def _gaps(package: Any, name: str, parameters: Sequence[str]) -> Iterator[str]:
    found = package
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        yield name
    elif parameters:
        has = inspect.signature(found).parameters
        yield from (f"{name}({parameter}=)" for parameter in parameters if parameter not in has)
