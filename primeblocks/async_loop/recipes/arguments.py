"""Words of a command line as a value: what each flag is given, merged or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from ...errors import PlanError, shown

__all__ = ["Arguments", "Settings", "arguments_of", "merge", "words_of"]

# The words of every use of a flag; a flag that stands alone has one use without words.
Arguments = Mapping[str, tuple[tuple[str, ...], ...]]
# What a caller has: words, such as those of another block's `server_args`, or names and values.
Settings = Sequence[str] | Mapping[str, Any]

_FLAG = re.compile("--[a-zA-Z0-9][a-zA-Z0-9_-]*")
# Flags that vLLM collects: each use adds one.
_COLLECTED = ("--middleware",)


def arguments_of(settings: Settings) -> Arguments:
    """Read words, or engine arguments under vLLM's names. Pure.

    Raises:
        PlanError: a word without a flag, a short flag, or a value that has no form as a word, such
            as one that would be read as a flag.
    """
    if isinstance(settings, Mapping):
        return reduce(merge, (_named(*each) for each in settings.items()), {})
    if isinstance(settings, str):
        raise PlanError(f"settings are words, not one text; got {settings!r}. Use shlex.split.")
    if not isinstance(settings, Sequence) or not all(isinstance(word, str) for word in settings):
        raise PlanError(f"settings are words, or values by name; got {shown(settings)}.")
    uses: list[tuple[str, list[str]]] = []
    for word in settings:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if "." in flag:
                raise PlanError(f"{flag} sets a part of a value: pass the whole value as JSON")
            uses.append((_flag(flag), [_checked(flag, value)] if equals else []))
        elif re.match("-[a-zA-Z]", word) or not uses:
            raise PlanError(f"expected a flag such as --max-model-len; got {word!r}")
        else:
            uses[-1][1].append(_checked(uses[-1][0], word))
    return reduce(merge, ({flag: (tuple(words),)} for flag, words in uses), {})


def words_of(arguments: Arguments) -> list[str]:
    """Return the words of a command line. Pure."""
    return [word for flag, uses in arguments.items() for use in uses for word in (flag, *use)]


def merge(first: Arguments, second: Arguments) -> Arguments:
    """Return all flags of both. Objects in JSON are merged by key, middleware adds up. Pure.

    Raises:
        PlanError: the two want different values of a flag, or one to merge is no JSON.
    """
    merged = dict(first)
    for flag, uses in second.items():
        opposite = (
            flag.replace("--no-", "--", 1) if flag.startswith("--no-") else f"--no-{flag[2:]}"
        )
        if opposite in merged:
            raise PlanError(f"one part wants {opposite}, another {flag}: drop one of them")
        before = merged.get(flag)
        if before is None or before == uses:
            merged[flag] = uses
        elif flag in _COLLECTED:
            merged[flag] = before + tuple(use for use in uses if use not in before)
        else:
            merged[flag] = ((json.dumps(_joined(flag, _json(flag, before), _json(flag, uses))),),)
    return merged


def _flag(text: str) -> str:
    if not _FLAG.fullmatch(text):
        raise PlanError(f"expected a flag such as --max-model-len; got {text!r:.80}")
    return text.replace("_", "-")


def _checked(flag: str, value: str) -> str:
    """Return the value of a flag as one word of a command line."""
    if re.match("-[a-zA-Z-]", value) or "\0" in value:
        raise PlanError(f"{flag} is given {value!r:.80}, which would not be read as its value")
    return value


def _text(name: str, write: Callable[[Any], str], value: Any) -> str:
    try:
        return write(value)
    except (RecursionError, TypeError, ValueError) as error:
        raise PlanError(f"{name} has a value that cannot be written out: {error}") from error


def _named(name: str, value: Any) -> Arguments:
    flag = _flag(f"--{name}")
    match value:
        case bool():
            return {flag if value else f"--no-{flag[2:]}": ((),)}
        case str() | int() | float():
            return {flag: ((_checked(flag, _text(name, str, value)),),)}
        case Mapping():
            return {flag: ((_text(name, json.dumps, value),),)}
        case list() | tuple() if value and all(isinstance(each, str) for each in value):
            words = tuple(_checked(flag, each) for each in value)
            return {flag: tuple((each,) for each in words) if flag in _COLLECTED else (words,)}
    raise PlanError(f"{name} is a {type(value).__name__}, which is no word; got {shown(value)}")


def _json(flag: str, uses: tuple[tuple[str, ...], ...]) -> Any:
    words = [word for use in uses for word in use]
    if len(words) == 1 and words[0].startswith("{"):
        try:
            return json.loads(words[0])
        except ValueError as error:
            raise PlanError(f"{flag} is given {words[0]!r}, which is no JSON: {error}") from error
    return " ".join(words)


def _joined(path: str, first: Any, second: Any) -> Any:
    if first == second:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        common = {
            key: _joined(f"{path} {key}", first[key], second[key])
            for key in first.keys() & second.keys()
        }
        return first | second | common
    remedy = " Join connectors where they are made." if path.endswith("kv_connector") else ""
    raise PlanError(f"two parts want {path} to be {first!r} and {second!r}: drop one.{remedy}")
