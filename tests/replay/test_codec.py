import json
import math
import struct
import tracemalloc
from base64 import b64encode

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, ShapeError, UnsupportedError, UsageError
from primeblocks.replay import Routes, sets
from primeblocks.replay.sets import SetCode

CODINGS = st.sampled_from(["raw", "dense"])


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


def in_rising_order(routes):
    """What dense coding keeps: the sets."""
    experts = np.sort(routes.experts, axis=-1)
    model = routes.num_experts, routes.layer_ids
    return Routes(experts, *model, routes.missing, routes.padding)


@given(arguments=arguments(), pads=st.sampled_from([0, 0, 1, 9]))
def test_unpack_undoes_pack(arguments, pads):
    value = Routes.from_array(**arguments)
    value = value.pad(value.tokens + pads).with_missing(after=pads)
    assert Routes.unpack(value.pack()) == value
    if value.num_experts <= 1024:
        assert Routes.unpack(value.pack(coding="dense")) == in_rising_order(value)


@given(arguments=arguments(), coding=CODINGS, data=st.data())
def test_any_changed_byte_is_refused(arguments, coding, data):
    if arguments["num_experts"] > 1024:
        coding = "raw"
    payload = bytearray(Routes.from_array(**arguments).pack(coding=coding))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptionError):
        Routes.unpack(payload)


@given(arguments=arguments(), data=st.data())
def test_lost_and_added_bytes_are_refused(arguments, data):
    payload = bytes(Routes.from_array(**arguments).pack())
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(CorruptionError):
        Routes.unpack(payload[:cut])
    with pytest.raises(CorruptionError):
        Routes.unpack(payload + payload[: cut + 1])


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
    payloads = [bytes(value.pack(coding=coding)) for coding in ("raw", "dense")]
    refused = unchanged = 0
    for turn in range(1_000_000 if full else 50_000):
        payload = payloads[turn % 2]
        data = mutated(payload, generator)
        if data == payload:
            unchanged += 1
            continue
        with pytest.raises(CorruptionError):
            Routes.unpack(data)
        refused += 1
    assert refused > 10 * unchanged


def resealed(body, kind=b"PBRT", version=2):
    """A payload whose digest is right, whatever its body says."""
    data = struct.pack("<4sHHQ", kind, version, 0, len(body)) + bytes(body)
    return data + xxhash.xxh3_128_digest(data)


@given(st.binary(max_size=120))
def test_a_sealed_body_of_nonsense_never_crashes(body):
    with pytest.raises((CorruptionError, ShapeError, UsageError, UnsupportedError)):
        Routes.unpack(resealed(body))


@given(place=st.integers(0, 31), change=st.integers(1, 255), coding=CODINGS)
@example(place=16, change=1, coding="dense")  # A token less, whose bits are in the same bytes.
def test_sealed_sizes_that_lie_never_crash(place, change, coding):
    body = bytearray(VALUE.pack(coding=coding)[16:-16])
    body[place] ^= change
    try:
        routes = Routes.unpack(resealed(body))
    except (CorruptionError, ShapeError, UsageError, UnsupportedError):
        return
    assert routes.experts.shape == VALUE.experts.shape  # num_experts alone, or an unused byte


VALUE = Routes.from_array(np.arange(12).reshape(3, 2, 2), num_experts=16, layer_ids=[3, 5])


def test_the_payload_is_not_copied():
    payload = bytearray(VALUE.pack())
    again = Routes.unpack(memoryview(payload))
    assert np.shares_memory(again.experts, np.frombuffer(payload, np.uint8))
    assert not again.experts.flags.writeable


def test_a_buffer_can_be_used_again():
    buffer = bytearray(1000)
    payload = VALUE.pack(into=buffer)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), np.frombuffer(buffer, np.uint8))
    assert payload == VALUE.pack()
    with pytest.raises(ShapeError, match=rf"{len(payload)} bytes; got 10 bytes"):
        VALUE.pack(into=bytearray(10))
    with pytest.raises(ShapeError, match="writable: False"):
        VALUE.pack(into=bytes(1000))


def test_slices_and_single_layers_pack():
    assert Routes.unpack(VALUE[1:].pack()) == VALUE[1:]
    assert Routes.unpack(VALUE.select_layers([5]).pack()) == VALUE.select_layers([5])
    assert Routes.unpack(VALUE.select_layers([5]).pack(coding="dense")) == VALUE.select_layers([5])


def test_the_format_is_as_documented():
    payload = bytes(VALUE.with_missing(after=1).pack(start=0))
    assert payload[:16] == struct.pack("<4sHHQ", b"PBRT", 2, 0, len(payload) - 32)
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


def crafted(num_experts, top_k, tokens):
    """A dense payload of zeros; of nothing where nothing can be coded so."""
    code = b""
    if top_k <= min(num_experts, 64):
        code = bytes(SetCode(num_experts, top_k).nbytes(tokens))
    sizes = struct.pack("<B3xHHIIQQ", 1, top_k, 0, num_experts, 1, tokens, 0)
    return resealed(sizes + bytes(4) + code + bytes((tokens + 7) // 8))


@pytest.mark.parametrize("model", [(8, 8), (7, 7), (1, 1), (2, 1), (9, 8), (256, 8), (1024, 1)])
def test_no_payload_expands_beyond_eight_times_its_bytes(model):
    kept, peaks, sizes = [], [], []
    for tokens in (1 << 16, 1 << 17):
        payload = crafted(*model, tokens)
        tracemalloc.start()
        routes = Routes.unpack(payload)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(len(payload))
        kept.append(routes.nbytes)
    assert kept[1] <= 8 * sizes[1]
    # While it decodes: arrays of one piece, and copies that grow with the payload.
    assert peaks[1] - peaks[0] <= 16 * (sizes[1] - sizes[0])


def test_no_code_has_more_groups_than_a_model_needs():
    """Cost beyond that of the bytes is by group; it was 16 s for 57 kB with 65,535 ids a row."""
    assert len(SetCode(1024, 64)._groups) == 16
    for model in ((1, 2), (4, 5), (256, 257), (256, 65535), (1024, 65535)):
        with pytest.raises(CorruptionError, match=f"top_k {model[1]} of {model[0]}"):
            Routes.unpack(crafted(*model, 1))
    with pytest.raises(UnsupportedError, match="1 to 64 of 1024 experts; got top_k 65"):
        Routes.unpack(crafted(1024, 65, 1))
    many = Routes.from_array(np.arange(65).reshape(1, 1, 65), num_experts=70, layer_ids=[0])
    assert Routes.unpack(many.pack()) == many
    with pytest.raises(UnsupportedError, match="1 to 64 of 70"):
        many.pack(coding="dense")


def test_tables_of_many_models_are_not_kept():
    for num_experts in range(4, 400):
        code = SetCode(num_experts, 4)
        code.decode(np.zeros(code.nbytes(1), np.uint8), 1)
    assert sets._guesses.cache_info().currsize <= 64
    assert sets._binomials.cache_info().currsize <= 64


def test_dense_numbers_are_the_combinatorial_number_system():
    rows = np.array([[0, 1, 2], [3, 0, 1], [15, 13, 14]]).reshape(3, 1, 3)
    routes = Routes.from_array(rows, num_experts=16, layer_ids=[0])
    payload = routes.pack(coding="dense")  # C(16, 3) = 560 sets: 10 bits, a byte and two planes
    numbers = [0, 1, math.comb(16, 3) - 1]
    planes = [sum(((n >> bit) & 1) << (7 - i) for i, n in enumerate(numbers)) for bit in (8, 9)]
    assert payload[52:57] == bytes([*(n & 255 for n in numbers), *planes])


def test_turns_join_by_where_they_start():
    generator = np.random.default_rng(0)
    experts = generator.random((9, 2, 16)).argsort(-1)[..., :3]
    whole = Routes.from_array(experts, num_experts=16, layer_ids=[0, 1])
    first = whole[:5].with_missing(after=1)  # the last sampled token has no row yet
    assert Routes.unpack(whole.pack(start=5), onto=first) == whole
    assert Routes.unpack(whole.pack(start=9), onto=whole) == whole
    with pytest.raises(UsageError, match="start at token 5: pass onto="):
        Routes.unpack(whole.pack(start=5))
    with pytest.raises(ShapeError, match="from token 8 on do not continue 6"):
        Routes.unpack(whole.pack(start=8), onto=first)
    with pytest.raises(ShapeError, match=r"0\.\.9; got 10"):
        whole.pack(start=10)


def test_dense_coding_of_8_of_256_is_under_six_tenths_of_base64_in_json():
    generator = np.random.default_rng(0)
    experts = generator.random((2000, 10, 256)).argsort(-1)[..., :8]
    routes = Routes.from_array(experts, num_experts=256, layer_ids=range(10))
    text = json.dumps({"routed_experts": b64encode(routes.experts.tobytes()).decode()})
    assert len(routes.pack(coding="dense")) < 0.6 * len(text)
    assert len(routes.pack()) < 0.76 * len(text)


def test_another_version_or_kind_is_refused_by_name():
    body = VALUE.pack()[16:-16]
    with pytest.raises(UnsupportedError, match="version 3; .* reads version 2"):
        Routes.unpack(resealed(body, version=3))
    with pytest.raises(CorruptionError, match="XXXX.* not .*PBRT"):
        Routes.unpack(resealed(body, kind=b"XXXX"))


def test_sealed_nonsense_is_refused():
    body = bytearray(VALUE.pack()[16:-16])
    with pytest.raises(CorruptionError, match="do not hold"):
        Routes.unpack(resealed(body + b"0"))
    body[40] = 16
    with pytest.raises(UsageError, match="expert 16"):
        Routes.unpack(resealed(body))
    body[0] = 7
    with pytest.raises(CorruptionError, match="coding 7"):
        Routes.unpack(resealed(body))


def test_a_dense_number_that_is_no_set_is_refused():
    one = Routes.from_array(np.arange(3).reshape(1, 1, 3), num_experts=16, layer_ids=[0])
    body = bytearray(one.pack(coding="dense")[16:-16])
    body[36:39] = b"\xff\x80\x80"  # 1023 of 560
    with pytest.raises(CorruptionError, match="1023 is no set: there are 560"):
        Routes.unpack(resealed(body))


def test_what_dense_coding_cannot_hold_is_refused():
    twice = Routes(np.zeros((3, 1, 2), np.uint8), 16, (0,), np.array([True, False, False]))
    with pytest.raises(UsageError, match=r"row 1 names an expert twice, \[0, 0\]"):
        twice.pack(coding="dense")
    assert Routes.unpack(twice.pack()) == twice
    many = Routes.from_array(np.arange(2).reshape(1, 1, 2), num_experts=1025, layer_ids=[0])
    with pytest.raises(UnsupportedError, match="1024 experts; got 1025"):
        many.pack(coding="dense")
    with pytest.raises(UsageError, match="zip"):
        many.pack(coding="zip")
