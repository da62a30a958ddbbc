"""One slab of frames in host memory."""

import pytest
import torch

from primeblocks.errors import CapacityError, PlanError, UnsupportedError
from primeblocks.kvoffload import HostTier
from tests.kvoffload.conftest import FRAME, PAGE, SIZES


def test_frames_are_aligned_apart_and_as_many_as_fit():
    host = HostTier(capacity_bytes=3 * FRAME + 1, **SIZES)
    assert host.capacity_pages == 3
    for number in range(3):
        host.frame(number)[:] = number
    for number in range(3):
        frame = host.frame(number)
        assert frame.nbytes == FRAME
        assert frame.ctypes.data % 4096 == 0
        assert (frame == number).all()
    host.close()
    host.close()


def test_host_memory_without_room_for_a_page_is_refused():
    with pytest.raises(PlanError, match="4095 bytes does not hold one frame of 4096"):
        HostTier(capacity_bytes=FRAME - 1, **SIZES)
    with pytest.raises(PlanError, match="-1"):
        HostTier(capacity_bytes=FRAME, page_bytes=PAGE, attachment_bytes=-1)
    with pytest.raises(CapacityError, match="reserve"):
        HostTier(capacity_bytes=1 << 60, **SIZES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinned_memory_needs_a_device():
    with pytest.raises(UnsupportedError, match="CUDA"):
        HostTier(capacity_bytes=FRAME, pinned=True, **SIZES)
