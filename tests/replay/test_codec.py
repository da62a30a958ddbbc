import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, UnsupportedError, UsageError
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


@given(arguments=arguments())
def test_unpack_undoes_pack(arguments):
    value = Routes.from_array(**arguments)
    assert Routes.unpack(value.pack()) == value


@given(arguments=arguments(), data=st.data())
def test_any_changed_byte_is_refused(arguments, data):
    payload = bytearray(Routes.from_array(**arguments).pack())
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptionError):
        Routes.unpack(payload)


@given(arguments=arguments(), data=st.data())
def test_lost_and_added_bytes_are_refused(arguments, data):
    payload = Routes.from_array(**arguments).pack()
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(CorruptionError):
        Routes.unpack(payload[:cut])
    with pytest.raises(CorruptionError):
        Routes.unpack(payload + payload[: cut + 1])


@pytest.fixture
def value():
    experts = np.arange(12).reshape(3, 2, 2)
    return Routes.from_array(experts, num_experts=16, layer_ids=[3, 5])


def test_the_payload_is_not_copied(value):
    payload = bytearray(value.pack())
    again = Routes.unpack(memoryview(payload))
    assert np.shares_memory(again.experts, np.frombuffer(payload, np.uint8))
    assert not again.experts.flags.writeable


def test_slices_and_single_layers_pack(value):
    assert Routes.unpack(value[1:].pack()) == value[1:]
    assert Routes.unpack(value.only([5]).pack()) == value.only([5])


def test_the_format_is_as_documented(value):
    payload = value.with_missing(after=1).pack()
    assert payload[:32] == struct.pack("<4sHHIIQ8x", b"PBRT", 1, 2, 16, 2, 4)
    assert payload[32:40] == struct.pack("<II", 3, 5)
    assert payload[40:56] == bytes([*range(12), 0, 0, 0, 0])
    assert payload[56:57] == bytes([0b00010000])
    assert payload[57:] == struct.pack("<I", zlib.crc32(payload[:57]))


def sealed(body):
    return bytes(body) + struct.pack("<I", zlib.crc32(body))


def test_another_version_is_refused_by_name(value):
    body = bytearray(value.pack()[:-4])
    body[4] = 2
    with pytest.raises(UnsupportedError, match="version 2"):
        Routes.unpack(sealed(body))


def test_sealed_nonsense_is_refused(value):
    body = bytearray(value.pack()[:-4])
    with pytest.raises(CorruptionError, match="not routes"):
        Routes.unpack(sealed(b"XXXX" + body[4:]))
    with pytest.raises(CorruptionError, match="do not hold"):
        Routes.unpack(sealed(body + b"0"))
    body[40] = 16
    with pytest.raises(UsageError, match="expert 16"):
        Routes.unpack(sealed(body))
