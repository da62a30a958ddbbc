"""Keys and checksums: pure round trips and refusals."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, PlanError, UsageError
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.page import checksum, frames_of, pack_attachments

keys = st.builds(
    PageKey,
    salt=st.text(max_size=6) | st.binary(max_size=6),
    hash=st.binary(max_size=6),
    group=st.integers(0, 2**32 - 1),
    version=st.none() | st.integers(-(2**63), 2**63 - 1),
    recipe=st.text(max_size=3),
)


@given(keys)
def test_decode_after_encode_is_the_identity(key):
    assert PageKey.decode(key.encode()) == key


@given(
    st.text(max_size=6) | st.binary(max_size=6), st.binary(max_size=6), st.integers(0, 2**32 - 1)
)
def test_a_key_tells_its_fields_and_survives_copies(salt, name, group):
    for version, recipe in (None, ""), (-(2**63), "fp8"), (0, "\u2603"):
        key = PageKey(salt, name, group, version, recipe)
        for each in (key, copy.copy(key), pickle.loads(pickle.dumps(key))):
            assert type(each) is PageKey
            fields = each.salt, each.hash, each.group, each.version, each.recipe
            assert fields == (salt, name, group, version, recipe)
        assert repr(salt) in f"{key}"
    with pytest.raises(AttributeError):
        key.version = 3


@given(st.binary(max_size=40))
def test_other_bytes_are_no_key(data):
    with contextlib.suppress(CorruptionError):
        assert PageKey.decode(data).encode() == data


@given(keys, st.data())
def test_a_key_with_a_changed_byte_is_another_key_or_none(key, data):
    encoded = bytearray(key.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CorruptionError):
        assert PageKey.decode(bytes(encoded)) != key


def test_the_checksum_covers_key_and_content():
    page = np.arange(64, dtype=np.uint8)
    digest = checksum(PageKey("a", b"h"), page)
    assert digest == checksum(PageKey("a", b"h"), page.copy())
    assert digest != checksum(PageKey("b", b"h"), page)
    assert digest != checksum(PageKey("a", b"h"), page[::-1].copy())


@given(st.integers(1, 10**6), st.integers(0, 10**4))
def test_a_frame_is_the_smallest_multiple_of_4096_that_holds_a_page(page, attachments):
    sizes = {"page_bytes": page, "attachment_bytes": attachments}
    frame, pages = frames_of("host", capacity_bytes=10**8, **sizes)
    assert frame % 4096 == 0
    assert pages == 10**8 // frame
    assert 0 <= frame - page - attachments < 4096


@pytest.mark.parametrize(
    ("name", "values", "takes"),
    [
        ("salt", [None, 3, bytearray(b"s")], "salt=. takes text or bytes"),
        ("hash", ["h", "", None, 7, [1], np.zeros(2)], "hash=. takes bytes"),
        ("recipe", [None, b"r", 3], "recipe=. takes text"),
        ("group", [None, "0", 1.0, True, -1, 2**32], "whole numbers from 0 to 4294967295"),
        ("version", ["1", "", 1.5, False, float("nan"), 2**63, 10**5000], "whole numbers"),
        ("salt", ["\ud800"], "cannot be written"),
        ("recipe", ["\ud800"], "cannot be written"),
    ],
)
def test_a_key_that_cannot_be_written_is_refused_at_once(name, values, takes):
    for value in values:
        with pytest.raises(PlanError, match=takes):
            PageKey(**{"salt": "s", "hash": b"h", name: value})


def test_a_key_takes_numbers_of_numpy():
    key = PageKey("s", b"h", group=np.uint8(3), version=np.int64(7))
    assert (key, key.group, key.version) == (PageKey("s", b"h", 3, 7), 3, 7)


@pytest.mark.parametrize("wrong", [{"routes": 5}, {"routes": "text"}, {"routes": None}, {3: b""}])
def test_attachments_that_are_not_bytes_are_refused(wrong):
    """A number would be packed as that many zeros."""
    with pytest.raises(UsageError, match="from names to bytes"):
        pack_attachments(wrong)
