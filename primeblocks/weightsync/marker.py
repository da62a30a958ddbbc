"""The commit record: small, self-checking, written last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TypeGuard

import xxhash

from ..errors import CorruptionError, PrimeblocksError

__all__ = ["UNREADABLE", "Digests", "Marker", "Receipt", "as_corruption", "is_count"]

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a parser that met what nobody wrote."""

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
        with as_corruption("a commit marker"):
            raw = json.loads(text)
            lists = {"sizes": tuple(raw["sizes"]), "buckets": tuple(raw["buckets"])}
            given = cls(**{**raw, **lists})
            made = {f.name: getattr(given, f.name) for f in fields(cls) if f.name != "digest"}
            right = cls.make(**made).digest == given.digest and given._is_sound()
        if not right:
            raise CorruptionError(f"the commit marker of version {given.version} fails its digest")
        return given

    def _is_sound(self) -> bool:
        """Tell whether somebody may have meant it: numbers are counts, its base came before."""
        counts = [self.version, *self.sizes, *([] if self.base is None else [self.base])]
        texts = [self.run, self.plan, *self.buckets]
        return (
            all(map(is_count, counts))
            and all(isinstance(text, str) for text in texts)
            and (self.base is None or self.base < self.version)
            and len(self.sizes) == len(self.buckets)
        )


def is_count(value: object) -> TypeGuard[int]:
    """Tell whether a number that somebody else has written is a count, below 2**63."""
    return type(value) is int and 0 <= value < 1 << 63


@contextmanager
def as_corruption(what: str) -> Iterator[None]:
    """Raise CorruptionError for a text that is not the one that was written."""
    try:
        yield
    except PrimeblocksError:
        raise
    except UNREADABLE as error:
        raise CorruptionError(f"{what} cannot be read: {str(error)[:200]}") from error
