"""Templates of names: `{layer}` is one part between dots, `{*head}` any number of parts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from ...errors import PlanError

__all__ = ["fields_of", "fill", "match"]


def fields_of(template: str) -> frozenset[str]:
    """Return the names of a template's fields.

    Raises:
        PlanError: a field stands in it twice.
    """
    return frozenset(_parsed(template)[1])


def match(templates: Iterable[str], name: str) -> dict[str, str] | None:
    """Return the values of the fields in the first template that fits, or None."""
    for template in templates:
        found = _parsed(template)[0].fullmatch(name)
        if found:
            return found.groupdict()
    return None


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Return the name that a template makes of fields."""
    _, names, text = _parsed(template)
    filled = (fields[name] + after for name, after in zip(names, text[1:], strict=True))
    return text[0] + "".join(filled)


@cache
def _parsed(template: str) -> tuple[re.Pattern[str], tuple[str, ...], tuple[str, ...]]:
    """Return a template's pattern, its fields in order, and the text around them."""
    text = re.split(r"\{(\*?[a-z_]+)\}", template)
    fields = tuple(field.removeprefix("*") for field in text[1::2])
    if len(set(fields)) != len(fields):
        raise PlanError(f"a field stands twice in {template!r}")
    pattern = re.escape(text[0])
    for written, field, after in zip(text[1::2], fields, text[2::2], strict=True):
        values = ".+" if written.startswith("*") else r"[^.]+"
        pattern += f"(?P<{field}>{values}){re.escape(after)}"
    return re.compile(pattern), fields, tuple(text[::2])
