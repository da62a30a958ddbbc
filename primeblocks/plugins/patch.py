"""A patch of a host package: a reason, the symbols it replaces, and a proof that it is needed."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError

__all__ = ["Patch", "SelfTest", "ours", "replace", "stock"]


@dataclass(frozen=True)
class SelfTest:
    """The findings of a patch's self-test.

    Args:
        needed: the stock host still has the fault.
        effective: the host as it is in this process does not.
    """

    needed: bool
    effective: bool


@dataclass(frozen=True)
class Patch:
    """One repair of a host package.

    Args:
        name: what the off switch and the messages call it.
        reason: what is wrong without it.
        tested: the host versions it was tested with, as a requirement.
        replacements: for each symbol (`module:path`) a function from the stock object to ours.
        self_test: tries the stock and the current symbols; takes well under a second.
        asked: whether a configuration of the host has a use for it.
        cpu_only: it repairs the host's CPU platform and is not for others.
        needs: names of patches without which it would do harm.
        compared: a host version that it was compared with and never run in, as a requirement.
    """

    name: str
    reason: str
    tested: str
    replacements: Mapping[str, Callable[[Any], Any]]
    self_test: Callable[[], SelfTest]
    asked: Callable[[Any], bool]
    cpu_only: bool = True
    needs: tuple[str, ...] = ()
    compared: str = ""

    def applied(self) -> bool:
        """Say whether every symbol is ours in this process. Local; imports their modules."""
        return all(
            _owner(symbol) is not None and self.name in _patches(symbol)
            for symbol in self.replacements
        )

    def apply(self) -> None:
        """Replace the symbols; those that are ours already stay. Local; imports their modules.

        Raises:
            UnsupportedError: a symbol is missing; nothing was replaced.
        """
        replace(self.replacements, name=self.name, tested=self.tested)


def replace(replacements: Mapping[str, Callable[[Any], Any]], *, name: str, tested: str) -> None:
    """Replace symbols in the name of a patch, each once; arguments and errors as `Patch`."""
    if missing := [symbol for symbol in replacements if _owner(symbol) is None]:
        raise UnsupportedError(
            f"{name} cannot be applied: there is no {', '.join(missing)}. It was tested "
            f"with {tested}; install that."
        )
    for symbol, replacement_of in replacements.items():
        if name not in _patches(symbol):
            original = ours(symbol)
            replacement = replacement_of(original)
            replacement.primeblocks_patch = name
            replacement.primeblocks_stock = original
            setattr(_owner(symbol), symbol.rpartition(":")[2].rpartition(".")[2], replacement)


def ours(symbol: str) -> Any:
    """Return what `module:path` names now. Local."""
    return getattr(_owner(symbol), symbol.rpartition(":")[2].rpartition(".")[2])


def stock(symbol: str) -> Any:
    """Return what `module:path` named before patches replaced it. Local."""
    return _layers(symbol)[-1]


def _patches(symbol: str) -> set[str]:
    """Return the names of the patches that `module:path` has, one over the other."""
    return {layer.primeblocks_patch for layer in _layers(symbol)[:-1]}


def _layers(symbol: str) -> list[Any]:
    layers = [ours(symbol)]
    while hasattr(layers[-1], "primeblocks_stock"):
        layers.append(layers[-1].primeblocks_stock)
    return layers


def _owner(symbol: str) -> Any:
    """Return the object that holds the last name of `module:path`; None without such a symbol."""
    module, _, path = symbol.partition(":")
    *outer, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for name in outer:
        owner = getattr(owner, name, None)
    return owner if hasattr(owner, attribute) else None
