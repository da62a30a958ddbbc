"""Scan for bits in which two tensors differ, and writes of bits into a tensor.

On the host in numpy, whose scan is 3 times as fast as torch's `nonzero`; on a device in torch, so
that only what changed crosses the bus.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Bits", "Entries", "flat_bits", "read_changes", "write_entries"]

Bits = np.ndarray | Tensor
"""The elements of a tensor as integers, flat: numpy on the host, torch on a device."""

_AT_ONCE = 1 << 14  # entries
_MANY = 0.57  # The share of groups of 8 in a random tenth; above, numpy's `nonzero` has no branch.
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Entries(NamedTuple):
    """Bits to write: `element = element & ~mask | bits`, at ascending positions.

    Outside of `mask`, `bits` are zero, or what the element has there.
    """

    positions: np.ndarray
    bits: np.ndarray
    mask: np.ndarray


def flat_bits(tensor: Tensor, width: int) -> Bits:
    """Return a view of a contiguous tensor's bits, `width` bytes each."""
    # Not view(-1): a single element may have any stride.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(_TORCH[width])
    if tensor.device.type != "cpu":
        return flat
    # Not .numpy(): it forbids resizing the storage ever after, as offloading does.
    return np.from_dlpack(flat).view(f"u{width}")


def read_changes(pairs: Iterable[tuple[Bits, Bits]], *, update: bool = False) -> Entries:
    """Return the elements that differ between new and old; the mask is their exclusive or.

    Args:
        pairs: parts of both that follow each other, new first.
        update: whether to write the new ones to the old.
    """
    start, found = 0, []
    for new, old in pairs:
        scan = _scan_there if isinstance(new, Tensor) else _scan
        at, bits, mask = scan(new, old, update)  # type: ignore[arg-type]
        at += start
        start += len(new)
        found.append((at, bits, mask))
    return Entries(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _scan_there(new: Tensor, old: Tensor, update: bool) -> Entries:
    places = (new != old).nonzero().view(-1)
    after, before = new[places], old[places]
    if update:
        old[places] = after
    bits, was = (side.cpu().numpy().view(f"u{new.itemsize}") for side in (after, before))
    return Entries(places.cpu().numpy(), bits, bits ^ was)


def _scan(new: np.ndarray, old: np.ndarray, update: bool) -> Entries:
    differs = np.zeros(-(-len(new) // 8) * 8, dtype=np.bool_)
    np.not_equal(new, old, out=differs[: len(new)])
    at = _places(differs)
    bits = new.take(at)
    mask = bits ^ old.take(at)
    if update:
        old[at] = bits
    return Entries(at, bits, mask)


def write_entries(target: Bits, entries: Entries) -> None:
    """Write entries in place. Idempotent."""
    positions, bits, mask = entries
    if isinstance(target, np.ndarray):
        for start in range(0, len(positions), _AT_ONCE):  # What was read is written from the cache.
            here = slice(start, start + _AT_ONCE)
            at = positions[here]
            target[at] = target.take(at) & ~mask[here] | bits[here]
        return
    dtype = str(target.dtype).removeprefix("torch.")
    places, bits_there, keep = (
        torch.from_numpy(array).to(target.device)
        for array in (positions, bits.view(dtype), (~mask).view(dtype))
    )
    target[places] = target[places] & keep | bits_there


def _places(differs: np.ndarray) -> np.ndarray:
    """Return where `differs` is true; its length is a multiple of 8."""
    # Eight answers at a time: most are eight times no, and `nonzero` costs 1.2 ns an item.
    groups = differs.view(np.uint64)
    changed = (groups != 0).nonzero()[0]
    if len(changed) > _MANY * len(groups):
        return differs.nonzero()[0]
    inside = groups.take(changed).view(np.bool_).nonzero()[0]
    # Element i of the groups that are left is element i + shift of all.
    shift = changed - np.arange(len(changed))
    shift <<= 3
    inside += shift.take(inside >> 3)
    return inside
