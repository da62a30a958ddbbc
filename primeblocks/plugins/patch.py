"""A patch of a host package, with its reason and its symbols."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError

__all__ = ["Patch", "ours", "replace"]


@dataclass(frozen=True)
class Patch:
    """One repair of a host package.

    Args:
        name: its name in the off switch and in messages.
        reason: the fault of the host without the patch.
        tested: the host versions with which the patch was tested, as a requirement.
        replacements: for each symbol (`module:path`) a function from the stock object to ours.
        asked: whether a configuration of the host needs it.
        cpu_only: it repairs the host's CPU platform and is not for other platforms.
        needs: names of patches without which it would do harm.
        compared: a host version whose code was compared but never run, as a requirement.
    """

    name: str
    reason: str
    tested: str
    replacements: Mapping[str, Callable[[Any], Any]]
    asked: Callable[[Any], bool]
    cpu_only: bool = True
    needs: tuple[str, ...] = ()
    compared: str = ""

    def applied(self) -> bool:
        """Return whether this process has all replacements. Local. Imports the symbols' modules."""
        return all(
            _owner(symbol) is not None and self.name in _patches(symbol)
            for symbol in self.replacements
        )

    def apply(self) -> None:
        """Replace the symbols, each at most once. Local. Imports the modules of the symbols.

        Raises:
            UnsupportedError: a symbol is missing. Nothing was replaced.
        """
        replace(self.replacements, name=self.name, tested=self.tested)


def replace(replacements: Mapping[str, Callable[[Any], Any]], *, name: str, tested: str) -> None:
    """Replace symbols in the name of a patch, each once. Arguments and errors as for `Patch`."""
    if missing := [symbol for symbol in replacements if _owner(symbol) is None]:
        raise UnsupportedError(
            f"{name} cannot be applied: {', '.join(missing)} is missing. It was tested with "
            f"{tested}. Install that version."
        )
    for symbol, replacement_of in replacements.items():
        if name not in _patches(symbol):
            original = ours(symbol)
            replacement = replacement_of(original)
            replacement.primeblocks_patch = name
            replacement.primeblocks_stock = original
            setattr(_owner(symbol), symbol.rpartition(":")[2].rpartition(".")[2], replacement)


def ours(symbol: str) -> Any:
    """Return the object that `module:path` names now. Local."""
    return getattr(_owner(symbol), symbol.rpartition(":")[2].rpartition(".")[2])


def _patches(symbol: str) -> set[str]:
    """Return the names of the patches on `module:path`."""
    found, names = ours(symbol), set()
    while hasattr(found, "primeblocks_stock"):
        names.add(found.primeblocks_patch)
        found = found.primeblocks_stock
    return names


def _owner(symbol: str) -> Any:
    """Return the object whose attribute `module:path` names, or None if a name is missing."""
    module, _, path = symbol.partition(":")
    *outer, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for name in outer:
        owner = getattr(owner, name, None)
    return owner if hasattr(owner, attribute) else None
