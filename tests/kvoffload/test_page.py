"""Keys, views and attachments: pure round trips and refusals."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import CorruptionError, PlanError, ShapeError, UnsupportedError
from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.page import (
    checksum,
    pack_attachments,
    page_view,
    unpack_attachments,
)

keys = st.builds(
    PageKey,
    salt=st.text(max_size=6) | st.binary(max_size=6),
    hash=st.binary(max_size=6),
    group=st.integers(0, 2**32 - 1),
    version=st.none() | st.integers(-(2**63), 2**63 - 1),
)


@given(keys)
def test_decode_after_encode_is_the_identity(key):
    assert PageKey.decode(key.encode()) == key


@given(keys, keys)
def test_different_keys_have_different_bytes(a, b):
    assert (a == b) == (a.encode() == b.encode())


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


@pytest.mark.parametrize("wrong", [{"group": -1}, {"group": 2**32}, {"version": 2**63}])
def test_numbers_that_no_file_can_hold_are_refused(wrong):
    with pytest.raises(PlanError, match=str(next(iter(wrong.values())))):
        PageKey("s", b"h", **wrong)


def test_the_checksum_covers_key_and_content():
    page = np.arange(64, dtype=np.uint8)
    digest = checksum(PageKey("a", b"h"), page)
    assert digest == checksum(PageKey("a", b"h"), page.copy())
    assert digest != checksum(PageKey("b", b"h"), page)
    assert digest != checksum(PageKey("a", b"h"), page[::-1].copy())


def test_a_view_shares_memory_with_any_kind_of_page():
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    for page in (tensor, np.zeros((3, 4), np.uint8), bytearray(12)):
        view = page_view(page, page_bytes=12, writable=True)
        view[:] = 1
        assert bytes(page_view(page, page_bytes=12, writable=False)) == b"\1" * 12


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (torch.zeros(3), "16 bytes; got 12"),
        (torch.zeros(4, 2)[:, 0], "contiguous"),
        (np.zeros((4, 2), np.float32)[:, 0], "contiguous"),
        (bytes(16), "read-only"),
    ],
)
def test_pages_that_do_not_fit_are_refused(page, message):
    with pytest.raises(ShapeError, match=message):
        page_view(page, page_bytes=16, writable=True)


def test_a_page_on_a_device_is_refused():
    with pytest.raises(UnsupportedError, match=r"meta.*\.cpu\(\)"):
        page_view(torch.zeros(4, device="meta"), page_bytes=16, writable=False)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=4))
def test_unpack_after_pack_is_the_identity(attachments):
    assert unpack_attachments(pack_attachments(attachments)) == attachments
