import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from primeblocks.errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from primeblocks.weightsync.delta import deltas
from primeblocks.weightsync.delta import entries as delta_format
from primeblocks.weightsync.delta.deltas import apply_delta, encode_delta
from primeblocks.weightsync.delta.entries import (
    bits_bytes,
    flat_bits,
    pack_bits,
    pack_positions,
    positions_bytes,
    read_changes,
    unpack_bits,
    unpack_positions,
    write_entries,
)

DTYPES = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float32: torch.int32,
}


def bits(tensor):
    return tensor.view(DTYPES.get(tensor.dtype, tensor.dtype))


def same(one, other):
    """Bit for bit: NaN equals itself, 0.0 is not -0.0."""
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def entropy_bits(*shares):
    """Of one draw; what is left of 1 is a share too."""
    rest = 1 - sum(shares)
    return -sum(share * np.log2(share) for share in (*shares, rest) if share > 0)


def random_bits(dtype, numel, *, seed):
    """All bit patterns: NaNs of every kind, infinities, both zeros, subnormals."""
    words = np.random.default_rng(seed).integers(
        0, 256**dtype.itemsize, numel, dtype=f"u{dtype.itemsize}"
    )
    return torch.from_numpy(words).view(dtype)


def nudge(tensor, *, share, seed, steps=1):
    """A copy with `share` of its elements moved by up to `steps` in the last place."""
    generator = np.random.default_rng(seed)
    copy = tensor.clone()
    words = bits(copy).numpy().view(f"u{copy.itemsize}")
    chosen = generator.random(len(words)) < share
    moves = generator.integers(1, steps + 1, chosen.sum()) * generator.choice([-1, 1], chosen.sum())
    words[chosen] += moves.astype(words.dtype)
    return copy


def weights(numel, *, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 0.02).to(dtype)


@st.composite
def histories(draw, versions):
    """Versions of one tensor; each moves some elements by little and some by anything."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    numel = draw(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 257, 1000, 5003]))
    seed = draw(st.integers(0, 2**32 - 1))
    tensors = [random_bits(dtype, numel, seed=seed)]
    for _ in range(versions - 1):
        little = draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.3, 0.6, 1]))
        wild = draw(st.sampled_from([0, 0, 0.01, 0.2]))
        steps = draw(st.sampled_from([1, 3, 200]))
        seed += 1
        new = nudge(tensors[-1], share=little, seed=seed, steps=min(steps, 2**dtype.itemsize))
        chosen = torch.from_numpy(np.random.default_rng(seed).random(numel) < wild)
        bits(new)[chosen] = bits(random_bits(dtype, numel, seed=seed))[chosen]
        tensors.append(new)
    return tensors


@given(histories(versions=2), st.integers(0, 2**32 - 1), st.sampled_from([0, 0.5]))
def test_a_delta_turns_old_into_new_also_what_was_applied_in_part_or_before(history, seed, share):
    old, new = history
    delta = encode_delta(new, old)
    changed = int((bits(new) != bits(old)).sum())
    if delta is None:
        assert new.numel() < 100 or changed > new.numel() / 4
        return
    assert len(delta) < new.numel() * new.itemsize
    done = torch.from_numpy(np.random.default_rng(seed).random(new.numel()) < share)
    target = old.clone()
    bits(target)[done] = bits(new)[done]
    for _ in range(2):
        apply_delta(target, delta)
        assert same(target, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_changes_are_small_and_random_ones_are_sent_in_full(dtype):
    old = random_bits(dtype, 50_001, seed=1)
    assert encode_delta(random_bits(dtype, 50_001, seed=2), old) is None
    assert len(encode_delta(old, old)) < 64
    # 13 bits for a change: 8.6 where, 4 what, and a little for those that carry further.
    delta = encode_delta(nudge(old, share=0.01, seed=3), old)
    assert len(delta) < 50_001 * 0.01 * 14 / 8 * 1.1


def test_chunks_and_segments_join_at_their_borders(monkeypatch):
    monkeypatch.setattr(delta_format, "_SEGMENT", 1000)
    monkeypatch.setattr(deltas, "_CHUNK", 300)
    old = weights(3500)
    new = nudge(old, share=0.05, seed=1)
    bits(new)[[0, 999, 1000, 2999, 3000, 3499]] ^= 0x7FF
    target = old.clone()
    apply_delta(target, encode_delta(new, old))
    assert same(target, new)


def test_views_parameters_and_matrices_are_written_in_place():
    whole = weights(5000)
    old = whole[3:4003].clone()
    new = nudge(old, share=0.01, seed=1)
    delta = encode_delta(nn.Parameter(new.view(40, 100)), old.view(40, 100))
    before = whole.clone()
    apply_delta(nn.Parameter(whole[3:4003].view(100, 40)), delta)
    assert same(whole[3:4003], new)
    assert same(whole[:3], before[:3])
    assert same(whole[4003:], before[4003:])


def test_a_single_element_may_have_any_stride():
    old, new = torch.arange(12).view(3, 4)[:1, 2], torch.arange(30).view(5, 6)[:1, 3]
    assert old.stride() == (4,)
    bits = flat_bits(new, 4)
    entries = read_changes([(bits, flat_bits(old, 4))])
    write_entries(flat_bits(old, 4), entries)
    assert same(old, new)


def test_device_spelling_equals_the_host_s():
    """The torch path, on tensors of the host."""
    for dtype, view in DTYPES.items():
        old = random_bits(dtype, 3001, seed=1)
        new = nudge(old, share=0.1, seed=2)
        by_torch = read_changes([(new.view(view), old.view(view))])
        by_numpy = read_changes([(flat_bits(new, new.itemsize), flat_bits(old, old.itemsize))])
        for one, other in zip(by_torch, by_numpy, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        target = old.clone()
        write_entries(target.view(view), by_numpy)
        assert same(target, new)


def test_every_flipped_byte_and_every_length_is_refused():
    old = weights(2000)
    new = nudge(old, share=0.02, seed=1)
    delta = encode_delta(new, old)
    for at in range(len(delta)):
        broken = bytearray(delta)
        broken[at] ^= 0x80
        refused(broken, old)
        refused(delta[:at], old)
    refused(delta + b"\0", old)
    refused(delta[1:], old)
    refused(delta + delta, old)


def refused(delta, old):
    target = old.clone()
    with pytest.raises(CorruptionError):
        apply_delta(target, delta)
    assert same(target, old)


def sealed(body):
    return body + xxhash.xxh3_128_digest(body)


def test_what_has_a_right_digest_and_is_no_delta_is_refused():
    old = weights(2000)
    delta = encode_delta(nudge(old, share=0.02, seed=1), old)
    body = delta[:-16]
    for wrong in (
        b"else" + body[4:],
        body[:5] + b"\x03" + body[6:],  # Elements of three bytes.
        body[:8] + struct.pack("<Q", 1 << 60) + body[16:],
        body[:16] + struct.pack("<I", 1 << 31) + body[20:],  # Too many positions.
        body[:16],
        body[:-1],
        body + b"\0",
        body[:28] + bytes(len(body) - 28),  # No positions where some were announced.
        body[:28] + b"\xff" * (len(body) - 28),
    ):
        refused(sealed(wrong), old)
    with pytest.raises(UnsupportedError, match="version 3"):
        apply_delta(old, sealed(body[:4] + b"\x03" + body[5:]))


@pytest.mark.parametrize("unstored", ["meta", "negated", "conjugated"])
def test_a_tensor_without_stored_bits_is_refused(unstored):
    old = weights(2000)
    delta = encode_delta(nudge(old, share=0.02, seed=1), old)
    target = {
        "meta": old.to("meta"),
        "negated": torch._neg_view(old),
        "conjugated": torch.zeros(1000, dtype=torch.complex64).conj(),
    }[unstored]
    kind = "meta tensor" if unstored == "meta" else "view"
    with pytest.raises(UnsupportedError, match=f"whose bits are stored; got a .*{kind}"):
        encode_delta(target, target)
    if unstored != "conjugated":  # It has other elements than the delta.
        with pytest.raises(UnsupportedError, match="whose bits are stored"):
            apply_delta(target, delta)


def test_a_position_beyond_the_end_is_refused():
    positions = np.array([5, 992])
    packed = memoryview(pack_positions(positions, 1000))
    assert positions_bytes(2, 993) == positions_bytes(2, 1000)
    assert unpack_positions(packed, 2, 993).tolist() == [5, 992]
    with pytest.raises(CorruptionError, match="beyond the end"):
        unpack_positions(packed, 2, 992)


@pytest.mark.parametrize("positions", [(1010, 990), (3, 3), (3, 2)])
def test_positions_that_do_not_ascend_are_refused(positions):
    """Two positions with one high part: the last of them says nothing about the other."""
    low, universe = 8, 1000  # As `pack_positions` chooses for two of them.
    bits = np.zeros(6, dtype=np.bool_)
    bits[(positions[0] >> low) + np.arange(2)] = True
    high = np.packbits(bits, bitorder="little").tobytes()
    packed = memoryview(high + pack_bits(np.array(positions), low))
    assert len(packed) == positions_bytes(2, universe)
    with pytest.raises(CorruptionError, match="2 positions do not ascend"):
        unpack_positions(packed, 2, universe)


@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 4]))
def test_a_hostile_delta_ends_in_a_typed_error_or_is_applied(rng, itemsize):
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[itemsize]
    old = torch.arange(1000).remainder(100).to(dtype)
    new = old.clone()
    new[torch.tensor(rng.sample(range(1000), 60))] += 1
    body = bytearray(encode_delta(new, old)[:-16])
    for _ in range(rng.choice([1, 1, 2, 8])):
        # The counts, or the streams behind them.
        at = rng.choice([rng.randrange(16, 32), rng.randrange(len(body))])
        body[at] ^= rng.randrange(1, 256)
    target = old.clone()
    try:
        apply_delta(target, sealed(bytes(body)))
    except (CorruptionError, ShapeError, UnsupportedError):
        assert same(target, old)


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_positions_come_back_and_cost_no_more_than_a_bitmap(universe, share, seed):
    positions = (np.random.default_rng(seed).random(universe) < share).nonzero()[0]
    packed = pack_positions(positions, universe)
    assert len(packed) == positions_bytes(len(positions), universe) <= universe / 8 + 8
    assert np.array_equal(unpack_positions(memoryview(packed), len(positions), universe), positions)


@pytest.mark.parametrize("share", [0.0003, 0.001, 0.01, 0.03, 0.1])
def test_sparse_positions_cost_at_most_0_6_bits_more_than_their_entropy(share):
    positions = (np.random.default_rng(0).random(1 << 20) < share).nonzero()[0]
    found = 8 * len(pack_positions(positions, 1 << 20)) / len(positions)
    assert found < entropy_bits(share) / share + 0.6


@given(st.integers(0, 40), st.integers(0, 32), st.integers(0, 2**32 - 1))
def test_bits_come_back(count, width, seed):
    values = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)
    packed = pack_bits(values, width)
    assert len(packed) == bits_bytes(count, width)
    found = unpack_bits(memoryview(packed), count, width, np.int64)
    assert np.array_equal(found, (values & np.uint64(2**width - 1)).astype(np.int64))


def test_refusals_name_the_numbers():
    tensor = weights(2000)
    delta = encode_delta(nudge(tensor, share=0.01, seed=1), tensor)
    with pytest.raises(ShapeError, match="2000 elements of 2 bytes.* 1999 of 2"):
        apply_delta(tensor[:1999], delta)
    with pytest.raises(ShapeError, match="2000 of 4"):
        apply_delta(tensor.float(), delta)
    with pytest.raises(ShapeError, match="contiguous"):
        apply_delta(weights(4000)[::2], delta)
    with pytest.raises(ShapeError, match="equal shapes"):
        encode_delta(tensor, tensor.half())
    with pytest.raises(ShapeError, match="equal shapes"):
        encode_delta(tensor, tensor[1:])
    with pytest.raises(ShapeError, match="contiguous"):
        encode_delta(tensor.view(40, 50).t(), tensor.view(40, 50).t())
    with pytest.raises(UnsupportedError, match="float64"):
        encode_delta(tensor.double(), tensor.double())
    with pytest.raises(UsageError, match="one device"):
        encode_delta(tensor, tensor.to("meta"))
