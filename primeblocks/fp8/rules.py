"""Rules that choose layers and weights by name. A rule that matches by accident is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import accumulate

from ..errors import UsageError

__all__ = ["Expression", "Rule", "choose", "choose_weights"]


Expression = str | re.Pattern[str] | tuple[str, ...] | list[str]
"""A regular expression, or the names that `convert` returned."""


class Rule:
    r"""A regular expression that names whole parts of dotted names, or several such names.

    `self_attn\.[qkvo]_proj` names `layers.0.self_attn.q_proj` and all parts of that module.
    `mlp.gate` matches inside `mlp.gate_up_proj` but does not name it, so `names` raises an error.

    Raises:
        UsageError: the expression is empty, or not a regular expression.
    """

    def __init__(self, argument: str, expression: Expression) -> None:
        self.given: tuple[str, ...] = ()
        if isinstance(expression, tuple | list):
            if not expression or not all(isinstance(name, str) for name in expression):
                raise UsageError(f"{argument} must be names; got {expression!r:.60}.")
            self.given = tuple(expression)
            self.argument = argument
            # The empty name is the name of the root, which contains all layers.
            self.text = "|".join(re.escape(name) or ".*" for name in expression)
            self._found = self._named = re.compile(rf"^(?:{self.text})(?=\.|$)")
            return
        if not isinstance(getattr(expression, "pattern", expression), str):
            raise UsageError(
                f"{argument} must be one regular expression; got {expression!r:.60}. "
                "Pass names as a tuple or a list."
            )
        try:
            self._found = re.compile(expression)
        except re.error as error:
            raise UsageError(
                f"{argument}={expression!r} is not a regular expression: {error}."
            ) from error
        self.text = self._found.pattern
        # Cut off flags at the beginning, because `_found` has them. In a verbose expression, a
        # newline ends a comment at the end.
        body = re.sub(r"^\(\?[aiLmsux]+\)", "", self.text)
        end = "\n" if self._found.flags & re.VERBOSE else ""
        self._named = re.compile(rf"(?:^|(?<=\.))(?:{body}{end})(?=\.|$)", self._found.flags)
        if not self.text:
            raise UsageError(f"{argument} is empty. To name everything, use '.*'.")
        self.argument = argument

    def names_weight(self, name: str) -> bool:
        """Return whether the rule names a parameter or its module. Pure.

        Raises:
            UsageError: as for `names`.
        """
        places = dict.fromkeys([name.rpartition(".")[0], name.removesuffix(".weight"), name])
        return any(self.names(place) for place in places if place)

    def names(self, name: str) -> bool:
        """Return whether the rule names whole parts of `name`. Pure.

        Raises:
            UsageError: the rule matches inside a word, by accident.
        """
        if self._named.search(name):
            return True
        found = self._found.search(name)
        if found is None:
            return False
        words = [word for word in name.split(".") if found.group().split(".")[-1] in word]
        raise UsageError(
            f"{self.argument}={self.text!r} is found inside {name!r}, but does not name it. To "
            f"name it, write whole words, such as {re.escape(words[-1] if words else name)!r}. To "
            f"leave it out, write a rule that is not found there, such as r'{self.text}(\\.|$)'."
        )


def choose(
    names: Iterable[str],
    *,
    only: Expression,
    exclude: Expression | None = None,
    among: str = "linear layers",
    meets: Callable[[Rule, str], bool] = Rule.names,
) -> tuple[str, ...]:
    """Return the names of modules that `only` names and `exclude` does not. Pure.

    Raises:
        UsageError: a rule, or a name of several, names no module, or matches inside a word by
            accident. Also raised if `exclude` names all modules that `only` names.
    """
    names, found = list(names), []
    whole = {part for name in names for part in accumulate(name.split("."), "{}.{}".format)}
    for rule in [Rule("only", only)] + ([] if exclude is None else [Rule("exclude", exclude)]):
        named = {name for name in names if meets(rule, name)}
        lost = [name for name in rule.given if name and name not in whole]
        if lost or not named:
            text = lost[0] if lost else rule.text
            hint = f"Their names look like {names[:3]}." if names else "Pass the whole model."
            raise UsageError(
                f"{rule.argument}={text!r} matches none of {len(names)} {among}. {hint}"
            )
        found.append(named)
    chosen = found[0].difference(*found[1:])
    if not chosen:
        raise UsageError(f"exclude={exclude!r} names all {among} that only={only!r} names.")
    return tuple(name for name in names if name in chosen)


def choose_weights(
    names: Iterable[str], *, only: Expression, exclude: Expression | None = None
) -> tuple[str, ...]:
    """Return the names of weights that `only` names, directly or through their modules. Pure.

    Biases are never chosen, whatever dims they have. Raises the errors of `choose`.
    """
    weights = [name for name in names if not name.endswith("bias")]
    return choose(weights, only=only, exclude=exclude, among="weights", meets=Rule.names_weight)
