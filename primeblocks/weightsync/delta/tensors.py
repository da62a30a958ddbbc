"""Lossless sparse deltas: the bits of a tensor that changed, and nothing else.

A delta is a set of overwrites, each of the low bits of one element: *the low w bits become b*. It
holds new bits, never differences. So applying it twice is harmless, and so is finishing one that
was applied in part. It is small because an optimizer step moves a weight by one unit in the last
place or two, and so leaves all but its low bits as they were.

A delta does not know its base: versions, and a digest of the result, are its sender's.
Derivation and numbers: docs/weightsync.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ...errors import ShapeError, UnsupportedError, UsageError
from .format import ITEMSIZES, Bytes, open_delta, read_segments, seal_delta, segments
from .scan import Bits, flat_bits, read_changes, write_entries

__all__ = ["DeltaInfo", "apply_delta", "encode_delta", "inspect_delta"]

# Elements; what is compared is still in the cache when it is gathered.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class DeltaInfo:
    """The facts of a delta, from its header and counts.

    Args:
        itemsize: bytes an element.
        numel: elements of the tensor it belongs to.
        changed: elements that it writes.
        size_bytes: of the delta.
    """

    itemsize: int
    numel: int
    changed: int
    size_bytes: int


def encode_delta(new: Tensor, old: Tensor) -> bytes | None:
    """Return the delta from `old` to `new`, bit for bit, or None where `new` is no more bytes.

    Bit patterns are compared: NaN and -0.0 are values like others. Local; reads both tensors
    once; on a device only what changed comes to the host. To keep `old` for the next call, apply
    the delta to it: cheaper than a copy.

    Raises:
        ShapeError: shapes or dtypes differ, or a tensor is not contiguous.
        UnsupportedError: elements of other than 1, 2 or 4 bytes, or a tensor without stored bits.
        UsageError: the tensors are on different devices.
    """
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ShapeError(
            f"a delta needs equal shapes and dtypes; got {new.dtype} {list(new.shape)} and"
            f" {old.dtype} {list(old.shape)}. Send the tensor in full where its shape changed."
        )
    if new.device != old.device:
        raise UsageError(f"new is on {new.device}, old on {old.device}. Keep both on one device.")
    one, other = _bits_of(new), _bits_of(old)

    def chunks(span: slice) -> Iterator[tuple[Bits, Bits]]:
        for at in range(span.start, span.stop, _CHUNK):
            here = slice(at, min(at + _CHUNK, span.stop))
            yield one[here], other[here]

    numel = new.numel()
    spans = segments(numel)
    return seal_delta(new.itemsize, numel, (read_changes(chunks(span)) for span in spans))


def apply_delta(target: Tensor, delta: Bytes) -> None:
    """Overwrite what changed, in place. Local; costs what changed, not what there is.

    Idempotent. On another base than the delta's it writes the same bits, and the result is not the
    new version: check versions first, and a digest after.

    Raises:
        CorruptionError: a byte of the delta was changed, added or lost; nothing was written.
        ShapeError: the target has other elements or is not contiguous; nothing was written.
        UnsupportedError: another version of the format, or the target has no stored bits.
    """
    opened = open_delta(delta)
    if target.itemsize != opened.itemsize or target.numel() != opened.numel:
        raise ShapeError(
            f"the delta is for {opened.numel} elements of {opened.itemsize} bytes; the target has"
            f" {target.numel()} of {target.itemsize}. Ask for the tensor in full."
        )
    bits = _bits_of(target)
    for span, entries in zip(segments(opened.numel), read_segments(opened), strict=True):
        write_entries(bits[span], entries)


def inspect_delta(delta: Bytes) -> DeltaInfo:
    """Return the facts of a delta, after checking its digest. Local; reads every byte once.

    Raises:
        CorruptionError: a byte was changed, added or lost.
        UnsupportedError: another version of the format.
    """
    opened = open_delta(delta)
    return DeltaInfo(
        itemsize=opened.itemsize,
        numel=opened.numel,
        changed=int(opened.counts[:, 0].sum()),
        size_bytes=memoryview(delta).nbytes,
    )


def _bits_of(tensor: Tensor) -> Bits:
    if tensor.is_meta or tensor.is_neg() or tensor.is_conj():
        raise UnsupportedError(
            "a delta needs a tensor whose bits are stored; got a "
            f"{'meta tensor' if tensor.is_meta else 'negated or conjugated view'} of "
            f"{list(tensor.shape)}. Pass the result of resolve_neg() or resolve_conj(), or a "
            "tensor that has memory."
        )
    if tensor.itemsize not in ITEMSIZES:
        raise UnsupportedError(
            f"elements of 1, 2 or 4 bytes, not {tensor.dtype}. View them as torch.int32."
        )
    if not tensor.is_contiguous():
        raise ShapeError(
            f"needs a contiguous tensor; got strides {tensor.stride()} for {list(tensor.shape)}."
            " Pass its local shard or .contiguous()."
        )
    return flat_bits(tensor, tensor.itemsize)
