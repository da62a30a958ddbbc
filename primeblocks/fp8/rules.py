"""Rules that choose layers and weights by name, and are refused where they name others."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import UsageError

__all__ = ["Rule", "choose"]


class Rule:
    r"""A regular expression that names whole parts of dotted names.

    `self_attn\.[qkvo]_proj` names `layers.0.self_attn.q_proj` and what lies in it; `mlp.gate` is
    found in `mlp.gate_up_proj`, but does not name it, so that asking is refused.

    Raises:
        UsageError: no regular expression, or an empty one.
    """

    def __init__(self, argument: str, expression: str | re.Pattern[str]) -> None:
        if not isinstance(getattr(expression, "pattern", expression), str):
            raise UsageError(
                f"{argument} must be one regular expression; got {expression!r:.60}. "
                "Join names with |."
            )
        try:
            self._found = re.compile(expression)
        except re.error as error:
            raise UsageError(
                f"{argument}={expression!r} is no regular expression: {error}"
            ) from error
        self.text = self._found.pattern
        # Flags at its beginning hold already; a comment at its end would hide what follows.
        body = re.sub(r"^\(\?[aiLmsux]+\)", "", self.text)
        end = "\n" if self._found.flags & re.VERBOSE else ""
        self._named = re.compile(rf"(?:^|(?<=\.))(?:{body}{end})(?=\.|$)", self._found.flags)
        if not self.text:
            raise UsageError(f"{argument} is empty; to name everything use '.*'")
        self.argument = argument

    def names(self, name: str) -> bool:
        """Say whether a part of `name` is what the rule names. Pure.

        Raises:
            UsageError: the rule is found in it by accident, inside a word.
        """
        if self._named.search(name):
            return True
        found = self._found.search(name)
        if found is None:
            return False
        words = [word for word in name.split(".") if found.group().split(".")[-1] in word]
        raise UsageError(
            f"{self.argument}={self.text!r} is found inside {name!r} and does not name it: was "
            f"that meant? Write whole words, such as {re.escape(words[-1] if words else name)!r}, "
            f"or a rule that is not found there, such as r'{self.text}(\\.|$)'."
        )


def choose(
    names: Iterable[str],
    *,
    only: str | re.Pattern[str],
    exclude: str | re.Pattern[str] | None = None,
    among: str = "linear layers",
) -> tuple[str, ...]:
    """Return the names that `only` names and `exclude` does not. Pure.

    Raises:
        UsageError: a rule names nothing, or is found in a name by accident.
    """
    every = list(names)
    chosen = _named(Rule("only", only), every, among)
    if exclude is None:
        return tuple(chosen)
    without = set(_named(Rule("exclude", exclude), every, among))
    return tuple(name for name in chosen if name not in without)


def _named(rule: Rule, names: list[str], among: str) -> list[str]:
    named = [name for name in names if rule.names(name)]
    if not named:
        raise UsageError(
            f"{rule.argument}={rule.text!r} matches none of {len(names)} {among}; "
            f"they are named like {names[:3]}"
        )
    return named
