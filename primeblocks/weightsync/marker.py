"""The commit record: small, self-checking, written last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import xxhash

from ..errors import CorruptionError

__all__ = ["Digests", "Marker", "Receipt"]

Digests = Mapping[str, Sequence[str]]
"""Name -> dtype and shape of a tensor, and the digests of its pieces."""


@dataclass(frozen=True)
class Receipt:
    """The result of one publish or receive: `bytes` counts the weights' bytes written or read.

    `held` has the `digest_tensors` of what the engine holds, where its `Subscriber` observes it:
    each was compared with what was sent. `verify_engine` takes them to look again later.
    """

    version: int
    bytes: int
    seconds: float
    digest: str
    held: Digests | None = None


@dataclass(frozen=True)
class Marker:
    """The commit record of a version: that it is whole, and the digests that show it.

    Attributes:
        run: names one life of the transport's owner: the version 5 of a trainer that starts over is
            not the old version 5.
        base: the version that this one is a delta to; None where it is full.
        sizes: bytes of each bucket of the plan as it travels; one sent in full has its own size.
        buckets: the digest of each whole bucket, however it travels.
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
        """Bytes that travelled for this version."""
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
        """Return a marker with its digest filled in."""
        fields = [run, version, plan, base, list(sizes), list(buckets)]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(fields).encode())
        return cls(run, version, plan, base, sizes, buckets, digest)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Marker:
        """Read a marker.

        Raises:
            CorruptionError: the text is not the one that was written.
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
