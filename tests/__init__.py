"""Tests, by block. Under pytest, jaxtyping checks every annotation with `tests.typecheck`."""

from typing import Any


def __getattr__(name: str) -> Any:
    # On demand: a run that checks no annotations does without beartype.
    if name == "typecheck":
        from .annotations import typecheck

        return typecheck
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
