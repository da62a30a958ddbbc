"""One slab of frames in host memory."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from primeblocks.errors import CapacityError, PlanError, UnsupportedError
from primeblocks.kvoffload import HostTier, tier
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


@pytest.mark.parametrize("limit", [0, FRAME - 1, 2 * FRAME, 2 * FRAME + 1, 99 * FRAME])
@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_memory_is_pinned_in_chunks_of_whole_frames(limit, fails_at, monkeypatch):
    """Against a fake of CUDA's calls."""
    pinned, sizes = {}, []

    def register(at, size, flags):
        if len(sizes) == fails_at:
            return 2
        pinned[at] = size
        sizes.append(size)
        return 0

    def unregister(at):
        return 0 if pinned.pop(at, 0) else 1

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # It reads CUDA's error.
    monkeypatch.setattr(tier, "_PIN_BYTES", limit)
    step = min(5, max(1, limit // FRAME)) * FRAME
    if fails_at is not None and fails_at * step < 5 * FRAME:
        with pytest.raises(CapacityError, match="refused to pin the host tier: error 2"):
            HostTier(capacity_bytes=5 * FRAME, pinned=True, **SIZES)
    else:
        host = HostTier(capacity_bytes=5 * FRAME, pinned=True, **SIZES)
        assert sizes == [min(step, 5 * FRAME - start) for start in range(0, 5 * FRAME, step)]
        assert min(pinned) == host.frame(0).ctypes.data
        assert all(at + pinned[at] == after for at, after in pairwise(sorted(pinned)))
        host.close()
        host.close()
    assert pinned == {}
