import struct
from functools import partial

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from primeblocks.replay import Routes


@st.composite
def arguments(draw):
    """Arguments of `Routes.from_array`."""
    num_experts = draw(st.sampled_from([4, 256, 257, 65536]))
    tokens, layers, top_k = draw(
        st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 4))
    )
    step, start = draw(st.tuples(st.integers(0, 2**20), st.integers(0, 2**16)))
    first = start + step * np.arange(tokens * layers).reshape(tokens, layers, 1)
    missing = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    return {
        "array": (first + np.arange(top_k)) % num_experts,
        "num_experts": num_experts,
        "layer_ids": draw(st.permutations(range(50)))[:layers],
        "missing": np.array(missing, dtype=bool),
    }


@given(arguments=arguments(), pads=st.sampled_from([0, 0, 1, 9]))
def test_unpack_undoes_pack(arguments, pads):
    value = Routes.from_array(**arguments)
    value = value.pad(value.tokens + pads).with_missing(after=pads)
    assert Routes.unpack(value.pack()) == value


def mutated(payload, generator):
    """One damaged copy: bits flipped, bytes set, swapped, cut, added, moved or wiped."""
    data = bytearray(payload)
    a, b = sorted(int(i) for i in generator.integers(0, len(data), 2))
    match int(generator.integers(7)):
        case 0:
            data[a] ^= 1 << int(generator.integers(8))
        case 1:
            data[a : a + 4] = generator.bytes(4)
        case 2:
            data[a], data[b] = data[b], data[a]
        case 3:
            del data[a : b + 1]
        case 4:
            data[a:a] = generator.bytes(int(generator.integers(1, 9)))
        case 5:
            data[a:b] = data[a:b][::-1]
        case _:
            data[a:b] = bytes(b - a)
    return data


def test_no_mutation_crashes_or_is_accepted(full):
    """A million with `pytest --full`."""
    generator = np.random.default_rng(0)
    experts = generator.random((7, 3, 256)).argsort(-1)[..., :8]
    missing = np.arange(7) == 2
    value = Routes.from_array(experts, num_experts=256, layer_ids=[1, 2, 5], missing=missing)
    payload = bytes(value.pack())
    refused = unchanged = 0
    for _ in range(1_000_000 if full else 5_000):
        data = mutated(payload, generator)
        if data == payload:
            unchanged += 1
            continue
        with pytest.raises(CorruptionError):
            Routes.unpack(data)
        refused += 1
    assert refused > 10 * unchanged


def resealed(body, kind=b"PBRT", version=3):
    """A payload whose digest is right, whatever its body says."""
    data = struct.pack("<4sHHQ", kind, version, 0, len(body)) + bytes(body)
    return data + xxhash.xxh3_128_digest(data)


@given(st.binary(max_size=120))
def test_a_sealed_body_of_nonsense_never_crashes(body):
    with pytest.raises(CorruptionError):
        Routes.unpack(resealed(body))


@given(place=st.integers(0, 31), change=st.integers(1, 255))
def test_sealed_sizes_that_lie_never_crash(place, change):
    body = bytearray(VALUE.pack()[16:-16])
    body[place] ^= change
    if place >= 24:  # Where the rows start, in eight bytes.
        with pytest.raises(UsageError, match="these rows start at token"):
            Routes.unpack(resealed(body))
        return
    try:
        routes = Routes.unpack(resealed(body))
    except CorruptionError:
        return
    assert routes.experts.shape == VALUE.experts.shape  # num_experts alone


VALUE = Routes.from_array(np.arange(12).reshape(3, 2, 2), num_experts=16, layer_ids=[3, 5])


def test_the_payload_is_not_copied():
    payload = bytearray(VALUE.pack())
    again = Routes.unpack(memoryview(payload))
    assert np.shares_memory(again.experts, np.frombuffer(payload, np.uint8))
    assert not again.experts.flags.writeable


def test_the_format_is_as_documented():
    payload = bytes(VALUE.with_missing(after=1).pack(start=0))
    assert payload[:16] == struct.pack("<4sHHQ", b"PBRT", 3, 0, len(payload) - 32)
    assert payload[16:48] == struct.pack("<BxxxHHIIQQ", 0, 2, 0, 16, 2, 4, 0)
    assert payload[48:56] == struct.pack("<II", 3, 5)
    assert payload[56:72] == bytes([*range(12), 0, 0, 0, 0])
    assert payload[72:73] == bytes([0b00010000])
    assert payload[73:] == xxhash.xxh3_128_digest(payload[:73])


def test_padding_follows_the_missing_ones():
    payload = bytes(VALUE.pad(5).with_missing(after=1).pack())
    assert payload[16:48] == struct.pack("<BxxxHHIIQQ", 0, 2, 1, 16, 2, 6, 0)
    assert payload[80:82] == bytes([0b00000100, 0b00011000])
    body = bytearray(payload[16:-16])
    body[6] = 2
    with pytest.raises(CorruptionError, match="padding 2"):
        Routes.unpack(resealed(body))


def test_turns_join_by_where_they_start():
    generator = np.random.default_rng(0)
    experts = generator.random((9, 2, 16)).argsort(-1)[..., :3]
    whole = Routes.from_array(experts, num_experts=16, layer_ids=[0, 1])
    first = whole[:5].with_missing(after=1)  # the last sampled token has no row yet
    assert Routes.unpack(whole.pack(start=5), onto=first) == whole
    assert Routes.unpack(whole.pack(start=9), onto=whole) == whole
    with pytest.raises(UsageError, match="start at token 5. Pass the routes"):
        Routes.unpack(whole.pack(start=5))
    with pytest.raises(ShapeError, match="from token 8 on do not continue 6"):
        Routes.unpack(whole.pack(start=8), onto=first)
    with pytest.raises(ShapeError, match=r"0\.\.9; got 10"):
        whole.pack(start=10)


def test_another_version_or_kind_is_refused_by_name():
    body = VALUE.pack()[16:-16]
    with pytest.raises(UnsupportedError, match="version 2, .* reads version 3"):
        Routes.unpack(resealed(body, version=2))
    with pytest.raises(CorruptionError, match="XXXX.* not .*PBRT"):
        Routes.unpack(resealed(body, kind=b"XXXX"))


def test_sealed_nonsense_is_refused():
    body = bytearray(VALUE.pack()[16:-16])
    with pytest.raises(CorruptionError, match="do not contain"):
        Routes.unpack(resealed(body + b"0"))
    body[40] = 16
    with pytest.raises(CorruptionError, match="expert 16"):
        Routes.unpack(resealed(body))
    body[32:36] = body[36:40]
    with pytest.raises(CorruptionError, match=r"2 layers need .* distinct ids; got \(5, 5\)"):
        Routes.unpack(resealed(body))
    body[0] = 7
    with pytest.raises(CorruptionError, match="reserved bytes 7"):
        Routes.unpack(resealed(body))


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_rows_that_name_an_expert_twice_are_counted(top_k, seed):
    rows = np.random.default_rng(seed).integers(0, 20, (50, 2, top_k)).astype(np.uint8)
    missing = np.random.default_rng(seed).random(50) < 0.3
    twice = [
        [len(set(row)) < top_k and not lost for row in token]
        for token, lost in zip(rows.tolist(), missing, strict=True)
    ]
    take = partial(Routes.from_array, rows, num_experts=20, layer_ids=(0, 1), missing=missing)
    if not np.any(twice):
        assert take().tokens == 50
        return
    token, layer = np.argwhere(twice)[0]
    with pytest.raises(UsageError, match=f"^{np.sum(twice)} rows .* token {token} .* {layer}: "):
        take()
