"""A bucket's delta, taken chunk by chunk and applied piece by piece, however both are cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError
from primeblocks.weightsync import describe, plan_sync
from primeblocks.weightsync.delta import deltas as buckets
from primeblocks.weightsync.delta import entries as delta_format
from primeblocks.weightsync.delta.deltas import apply_payloads, take_payload
from primeblocks.weightsync.digest import bucket_digest
from primeblocks.weightsync.held import packed_views

DTYPES = (torch.float64, torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.bool)


@st.composite
def cases(draw):
    """A plan of one bucket, its old bytes and its new ones."""
    sizes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=5)
    tensors = {
        f"{number}": torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)))
        for number, shape in enumerate(draw(sizes))
    }
    manifest = describe(tensors)
    plan = plan_sync([manifest], manifest.whole(), bucket_bytes=1 << 20)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, 2, plan.buckets[0].bytes, dtype=np.uint8)  # Bits that a bool may have.
    chosen = rng.random(len(old)) < draw(st.sampled_from([0, 0.01, 0.1, 0.9]))
    new = np.where(chosen, 1 - old, old)
    return plan, torch.from_numpy(old), torch.from_numpy(new)


def encoded(plan, index, new, old):
    """The delta between two whole buckets."""
    old = old.clone()
    return take_payload(plan, index, iter([(new.numpy(), old.numpy())]), old)


def chunks_of(plan, new, old, size):
    """Chunks of whole elements, as pieces give them."""
    for pair in zip(packed_views(plan, 0, new), packed_views(plan, 0, old), strict=True):
        one, other = (side.view(-1).view(torch.uint8).numpy() for side in pair)
        for at in range(0, len(one), 16 * size):
            yield one[at : at + 16 * size], other[at : at + 16 * size]


@given(cases(), st.sampled_from([1, 2, 5, 100]), st.sampled_from([700, 1000, 9000]))
def test_what_is_taken_in_chunks_is_what_is_encoded_at_once(case, size, segment):
    plan, old, new = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_format, "_SEGMENT", segment)
        patch.setattr(buckets, "CHUNK_BYTES", 300)
        whole, base = encoded(plan, 0, new, old), old.clone()
        payload = take_payload(plan, 0, chunks_of(plan, new, base, size), base)
        assert payload == whole
        assert base.equal(new)
        sent = memoryview(new.numpy().data if payload is None else payload)
        target = packed_views(plan, 0, old)
        # Boxes of a larger tensor lie with gaps; those are not written to.
        gaps = [torch.zeros(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype) for t in target]
        spread = [gap[..., : t.shape[-1]].copy_(t) for gap, t in zip(gaps, target, strict=True)]
        digests = [apply_payloads(plan, 0, pieces, [sent, sent]) for pieces in (target, spread)]
    assert old.equal(new)
    assert digests == [bucket_digest(packed_views(plan, 0, new))] * 2
    for gap, piece in zip(gaps, target, strict=True):
        assert gap[..., : piece.shape[-1]].view(torch.uint8).equal(piece.view(torch.uint8))
        assert not gap[..., piece.shape[-1] :].view(torch.uint8).any()


@given(cases(), st.data())
def test_a_payload_that_is_cut_or_flipped_is_refused(case, data):
    plan, old, new = case
    payload = encoded(plan, 0, new, old)
    if payload is None:
        return
    wanted, at = (
        bucket_digest(packed_views(plan, 0, new)),
        data.draw(st.integers(0, len(payload) - 1)),
    )
    flipped = bytearray(payload)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for broken in (payload[:at], bytes(flipped)):
        try:
            digest = apply_payloads(
                plan, 0, packed_views(plan, 0, old.clone()), [memoryview(broken)]
            )
        except CorruptionError:
            continue
        assert digest != wanted
