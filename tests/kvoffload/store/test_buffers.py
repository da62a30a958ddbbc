"""Pages as bytes: views, pieces, refusals, attachments."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primeblocks.errors import ShapeError, UnsupportedError
from primeblocks.kvoffload.copier import copy_pages
from primeblocks.kvoffload.page import pack_attachments, unpack_attachments
from primeblocks.kvoffload.pending import page_parts


def gather(page, frame):
    copy(page, frame, out=False)


def scatter(page, frame):
    copy(page, frame, out=True)


def copy(page, frame, *, out, size=None):
    size = len(frame) if size is None else size
    parts = page_parts(page, page_bytes=size, writable=out)
    copy_pages([parts], [torch.from_numpy(frame)], out=out, fences={})


def test_any_kind_of_buffer_is_a_page():
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    for page in (tensor, np.zeros((3, 4), np.uint8), bytearray(12)):
        scatter(page, np.ones(12, np.uint8))
        frame = np.zeros(12, np.uint8)
        gather(page, frame)
        assert bytes(frame) == b"\1" * 12


def test_a_page_of_one_element_may_have_any_stride():
    element = torch.zeros(2, 3, dtype=torch.float64)[:1, 1]
    copy(element, np.full(8, 63, np.uint8), out=True, size=8)
    assert element.view(torch.int64).item() == 0x3F3F3F3F3F3F3F3F


@pytest.mark.parametrize("size", [32 << 10, 40_000, 64 << 10, 72 << 10])
@pytest.mark.parametrize("offsets", [[0], [3], [0, 5, 8], [0, 0, 5]])
def test_pages_of_every_size_may_begin_anywhere(size, offsets):
    """Copied as bytes, as words, and one by one."""
    random = np.random.default_rng(size)
    pieces, into = [], []
    for offset in offsets:
        array = random.integers(0, 256, size + offset, np.uint8)
        pieces.append(torch.from_numpy(array)[offset:])
        into.append(torch.zeros(size + offset, dtype=torch.uint8)[offset:])
    before, page = torch.zeros(offsets[-1], dtype=torch.uint8), offsets[-1] + size * len(offsets)
    frame = np.zeros(page, np.uint8)
    copy([before, *pieces], frame, out=False, size=page)
    assert frame.tobytes() == b"".join(piece.numpy().tobytes() for piece in (before, *pieces))
    copy([before, *into], frame, out=True, size=page)
    assert all(map(torch.equal, into, pieces))


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5))
def test_scatter_after_gather_is_the_identity(parts):
    size = sum(map(len, parts))
    frame = np.zeros(size + 3, np.uint8)
    copy(parts, frame, out=False, size=size)
    assert frame.tobytes() == b"".join(parts) + bytes(3)
    into = [bytearray(len(part)) for part in parts]
    copy(into, frame, out=True, size=size)
    assert into == parts


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (torch.zeros(3), "16 bytes; got 12"),
        (torch.zeros(4, 2)[:, 0], "contiguous"),
        (np.zeros((4, 2), np.float32)[:, 0], "contiguous"),
        (bytes(16), "read-only"),
        ([torch.zeros(2), np.zeros(1, np.float32)], "16 bytes; got 12"),
        ([], "16 bytes; got 0"),
        ("sixteen letters.", "buffer of bytes; got 'sixteen letters.'"),
        ([bytearray(8), 8], "buffer of bytes; got 8"),
        (np.frombuffer(bytes(16), "M8[s]"), "buffer of bytes; got array"),
    ],
)
def test_pages_that_do_not_fit_are_refused(page, message):
    with pytest.raises(ShapeError, match=message):
        page_parts(page, page_bytes=16, writable=True)


def test_a_page_on_a_device_is_refused():
    with pytest.raises(UnsupportedError, match=r"meta.*\.cpu\(\)"):
        page_parts(torch.zeros(4, device="meta"), page_bytes=16, writable=False)


def test_an_array_of_references_is_refused():
    with pytest.raises(UnsupportedError, match="references"):
        page_parts(np.array([None, 1]), page_bytes=16, writable=False)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=4))
def test_unpack_after_pack_is_the_identity(attachments):
    assert unpack_attachments(pack_attachments(attachments)) == attachments
