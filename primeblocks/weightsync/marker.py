"""The commit marker: small, self-checking, written last."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from ..errors import CorruptionError

__all__ = ["Marker", "Receipt"]


@dataclass(frozen=True)
class Receipt:
    """What one publish or receive did."""

    version: int
    bytes: int
    seconds: float
    digest: str


@dataclass(frozen=True)
class Marker:
    """Says that a version is whole, and how to tell.

    `run` names the life of the transport's owner: a trainer that starts over may publish its
    version 5 again, and it is not the old one. `digest` covers every other field.
    """

    run: str
    version: int
    plan: str
    size_bytes: int
    buckets: tuple[str, ...]
    digest: str

    @classmethod
    def make(
        cls, *, run: str, version: int, plan: str, size_bytes: int, buckets: tuple[str, ...]
    ) -> Marker:
        """A marker with its digest filled in."""
        fields = [run, version, plan, size_bytes, list(buckets)]
        digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return cls(run, version, plan, size_bytes, buckets, digest)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Marker:
        """Read a marker.

        Raises:
            CorruptionError: it is not what was written.
        """
        try:
            raw = json.loads(text)
            given = cls(**{**raw, "buckets": tuple(raw["buckets"])})
            made = {f.name: getattr(given, f.name) for f in fields(cls) if f.name != "digest"}
            right = cls.make(**made).digest == given.digest
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(f"a commit marker cannot be read: {error}") from error
        if not right:
            raise CorruptionError(f"the commit marker of version {given.version} fails its digest")
        return given
