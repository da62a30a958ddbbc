"""Values as bytes: equal on their way back, refused by name before, and where a bit flipped."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from primeblocks import codec
from primeblocks.async_loop import ledger as packed
from primeblocks.async_loop.ledger import Partial
from primeblocks.errors import CorruptionError, ShapeError, UnsupportedError, UsageError

from .ledgers import make_partial, make_rollout, plain

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(st.characters()),  # Lone surrogates too.
)
dtypes = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="<"),
    arrays.unsigned_integer_dtypes(endianness="<"),
    arrays.floating_dtypes(endianness="<"),
    arrays.complex_number_dtypes(endianness="<", sizes=(64, 128)),
)
numbers = arrays.arrays(dtypes, arrays.array_shapes(min_dims=0, min_side=0, max_dims=3))
values = st.recursive(
    scalars | st.binary() | numbers | numbers.filter(lambda x: x.size).map(lambda x: x.flat[0]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_what_is_packed_comes_back_as_it_was(value):
    assert plain(codec.unpack(codec.pack(value, name="x"), name="x")) == plain(value)


@given(values, st.data())
def test_every_changed_byte_is_found(value, data):
    payload = bytearray(codec.pack(value, name="prompt 7"))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptionError, match="prompt 7"):
        codec.unpack(bytes(payload), name="prompt 7")
    with pytest.raises(CorruptionError, match="prompt 7"):
        codec.unpack(bytes(payload[: data.draw(st.integers(0, len(payload) - 1))]), name="prompt 7")


def test_a_payload_belongs_to_its_name():
    with pytest.raises(CorruptionError, match="prompt 8"):
        codec.unpack(codec.pack([1], name="prompt 7"), name="prompt 8")


def test_buffers_come_back_as_bytes_and_views_as_arrays_of_their_own():
    routes = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    kept = {
        "wire": memoryview(routes.tobytes())[3:],
        "grown": bytearray(b"abc"),
        "strided": routes[:, ::2, ::-1],
        "big": np.arange(3, dtype=">i4"),
    }
    back = codec.unpack(codec.pack(kept, name="x"), name="x")
    assert (back["wire"], back["grown"]) == (routes.tobytes()[3:], b"abc")
    assert np.array_equal(back["strided"], routes[:, ::2, ::-1])
    assert back["big"].tolist() == [0, 1, 2]
    back["strided"][:] = 0  # Nobody else's memory, and not read-only.
    kept["strided"].flags.writeable = False
    assert not codec.unpack(codec.pack(kept, name="x"), name="x")["strided"].flags.writeable


def test_lowered_arrays_and_bytes_are_not_copied():
    kept = {"routes": b"abc" * 100, "values": np.arange(6).reshape(2, 3)}
    _, (routes, values) = codec.lower(kept, name="x")
    assert routes is kept["routes"]
    assert np.shares_memory(np.asarray(values), kept["values"])


FIELDS = dataclasses.fields(Partial)
LOOP = []
LOOP.append(LOOP)
HUGE = 10**5000  # More digits than Python writes.


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"routes": torch.zeros(2)}, r"x\['routes'\] is a Tensor.*tensor\.numpy"),
        ({"a": [1, {2, 3}]}, r"^x\['a'\]\[1\] is a set.*routes\.pack\(\)"),
        ({"a": np.array([object()])}, "ndarray of object"),
        ({"a": np.array(["text"])}, "ndarray of <U4"),
        ({1: 2}, "^x has the key 1"),
        (LOOP, "contains itself"),
        ([HUGE], "JSON"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(value, said):
    with pytest.raises(UnsupportedError, match=said):
        codec.pack(value, name="x")


def test_a_class_that_would_come_back_as_another_is_refused():
    class Scored(Partial):
        pass

    scored = Scored(**{each.name: getattr(make_partial(3), each.name) for each in FIELDS})
    with pytest.raises(UnsupportedError, match="x is a Scored"):
        packed.pack_trajectory(scored, name="x")


def test_fields_of_a_later_release_are_refused_and_those_it_lacks_are_filled_in():
    rollout = make_rollout(1)
    fields = {each.name: getattr(rollout, each.name) for each in dataclasses.fields(rollout)}
    later = codec.pack(["rollout", {**fields, "mood": 1}], name="x")
    with pytest.raises(UnsupportedError, match="mood"):
        packed.unpack_trajectory(later, name="x")
    del fields["loss_mask"]
    earlier = codec.pack(["rollout", fields], name="x")
    assert packed.unpack_trajectory(earlier, name="x").loss_mask.all()
    head = codec.pack({"version": 3, "mood": 1}, name="x")
    with pytest.raises(UnsupportedError, match="mood"):
        packed.unpack_group(head, "p", (rollout,), name="x")
    head = codec.pack({"version": 3}, name="x")
    assert packed.unpack_group(head, "p", (rollout,), name="x").generate_s == 0


def test_a_partial_is_a_prompt_and_what_came_so_far():
    none = {"logprobs": np.zeros(0), "versions": np.zeros(0, np.int64)}
    empty = Partial(tokens=np.array([5]), prompt_length=1, **none)
    assert (empty.completion.tolist(), empty.loss_mask.dtype) == ([], np.bool_)
    whole = {
        "tokens": np.array([5, 6]),
        "prompt_length": 1,
        "logprobs": np.array([-1.0]),
        "versions": np.array([0]),
    }
    assert Partial(**whole).completion.tolist() == [6]
    assert empty.oldest_version > 1 << 60
    for change, error in (
        ({"prompt_length": 0}, ShapeError),
        ({"prompt_length": 3}, ShapeError),
        ({"logprobs": np.zeros(0)}, ShapeError),
        ({"loss_mask": np.array([True, True])}, ShapeError),
        ({"versions": np.array([-1])}, UsageError),
        ({"tokens": np.array([5, -6])}, UsageError),
        ({"logprobs": np.array([float("nan")])}, UsageError),
    ):
        with pytest.raises(error):
            Partial(**{**whole, **change})
