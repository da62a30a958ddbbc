"""The commit marker: small, self-checking, written last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

import xxhash

from ..errors import CorruptionError

__all__ = ["Marker", "Receipt"]


@dataclass(frozen=True)
class Receipt:
    """What one publish or receive did: `bytes` is what it wrote or read of the weights' bytes."""

    version: int
    bytes: int
    seconds: float
    digest: str


@dataclass(frozen=True)
class Marker:
    """Says that a version is whole, and how to tell.

    Attributes:
        run: names the life of the transport's owner: a trainer that starts over may publish its
            version 5 again, and it is not the old one.
        base: the version that this one is a delta to; None where it is full.
        sizes: bytes of each bucket of the plan as it travels: a full one has its own size.
        buckets: the digest of each, whole, however it travels.
        digest: covers every other field.
    """

    run: str
    version: int
    plan: str
    base: int | None
    sizes: tuple[int, ...]
    buckets: tuple[str, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        """Bytes that travelled for it."""
        return sum(self.sizes)

    @classmethod
    def make(
        cls,
        *,
        run: str,
        version: int,
        plan: str,
        sizes: tuple[int, ...],
        buckets: tuple[str, ...],
        base: int | None = None,
    ) -> Marker:
        """A marker with its digest filled in."""
        fields = [run, version, plan, base, list(sizes), list(buckets)]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(fields).encode())
        return cls(run, version, plan, base, sizes, buckets, digest)

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
            lists = {"sizes": tuple(raw["sizes"]), "buckets": tuple(raw["buckets"])}
            given = cls(**{**raw, **lists})
            made = {f.name: getattr(given, f.name) for f in fields(cls) if f.name != "digest"}
            right = cls.make(**made).digest == given.digest
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptionError(f"a commit marker cannot be read: {error}") from error
        if not right:
            raise CorruptionError(f"the commit marker of version {given.version} fails its digest")
        return given
