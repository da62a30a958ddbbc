"""The commit record: small, self-checking, written last."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TypeGuard

import xxhash

from ..errors import CorruptionError, PrimeblocksError

__all__ = ["UNREADABLE", "Digests", "Marker", "Receipt", "as_corruption", "is_count"]

UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    zlib.error,
)
"""The errors of a parser that meets malformed text."""

Digests = Mapping[str, Sequence[str]]
"""Name -> dtype and shape of a tensor, and the digest of its bytes."""


@dataclass(frozen=True)
class Receipt:
    """The result of one publish or receive.

    `bytes` is the number of bytes of weights written or read.

    Attributes:
        seconds: how long the call took.
        digest: the digest of the version's commit marker.
        held: digests of the engine's tensors, if the `Subscriber` was made with `observe`. Each
            tensor was compared with the tensor that `load` got. Pass `held` to `verify_engine` to
            compare the engine's tensors again. Without `observe`, and after a publish, `held` has
            the value None.
        base: the version from which a delta led to this version. None for a full version.
    """

    version: int
    bytes: int
    seconds: float
    digest: str
    held: Digests | None = None
    base: int | None = None


@dataclass(frozen=True)
class Marker:
    """The commit record of a version. Its presence says that the version is complete.

    Attributes:
        run: identifies one life of the transport's owner. If a trainer starts over, its version 5
            is not the old version 5.
        plan: the fingerprint of the plan by which the version was sent.
        base: the version to which this version is a delta. None if this version is full.
        sizes: the bytes of each bucket as it travels. A bucket sent in full has its whole size.
        buckets: the digest of each whole bucket, whether it travels in full or as a delta.
        digest: covers all other fields.
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
        fields = [run, version, plan, base, list(sizes), list(buckets)]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(fields).encode())
        return cls(run, version, plan, base, sizes, buckets, digest)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Marker:
        """Read a marker, or raise CorruptionError for a text that `to_json` did not write."""
        with as_corruption("a commit marker"):
            raw = json.loads(text)
            lists = {"sizes": tuple(raw["sizes"]), "buckets": tuple(raw["buckets"])}
            given = cls(**{**raw, **lists})
            made = {f.name: getattr(given, f.name) for f in fields(cls) if f.name != "digest"}
            right = cls.make(**made).digest == given.digest and given._is_sound()
        if not right:
            raise CorruptionError(
                f"the commit marker of version {given.version} fails its digest. Publish again."
            )
        return given

    def _is_sound(self) -> bool:
        """Whether the fields make sense: numbers are counts, and the base is an older version."""
        counts = [self.version, *self.sizes, *([] if self.base is None else [self.base])]
        texts = [self.run, self.plan, *self.buckets]
        return (
            all(map(is_count, counts))
            and all(isinstance(text, str) for text in texts)
            and (self.base is None or self.base < self.version)
            and len(self.sizes) == len(self.buckets)
        )


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value that another process has written is a count below 2**63."""
    return type(value) is int and 0 <= value < 1 << 63


@contextmanager
def as_corruption(what: str) -> Iterator[None]:
    """Raise CorruptionError for a text that the parser in the block refuses."""
    try:
        yield
    except PrimeblocksError:
        raise
    except UNREADABLE as error:
        raise CorruptionError(
            f"{what} cannot be read: {str(error)[:200]}. Publish again."
        ) from error
