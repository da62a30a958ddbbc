"""Pages on a CUDA device. Needs one."""

import pytest
import torch

from primeblocks.kvoffload import HostTier, PageKey, TieredStore
from tests.kvoffload.memory_tier import MemoryTier

PAGE, SOON = 1 << 20, 10.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_go_to_a_device_and_back_in_stream_order(pinned):
    sizes = {"page_bytes": PAGE, "attachment_bytes": 64}
    host = HostTier(capacity_bytes=4 << 20, pinned=pinned, **sizes)
    keys = [PageKey("s", bytes([n])) for n in range(8)]
    page = torch.empty(PAGE // 4, device="cuda")
    with TieredStore([host, MemoryTier(8, **sizes)]) as store:
        for number, key in enumerate(keys):
            torch.cuda._sleep(10_000_000)  # what writes the page comes late
            page.fill_(number)
            halves = [page[: len(page) // 2], page[len(page) // 2 :]]
            saved = store.save(key, halves, attachments={"routes": bytes([number])})
            assert saved.wait(timeout_s=SOON).stored
        into = [torch.full((PAGE // 4,), -1.0, device="cuda") for _ in keys]
        loaded = store.load_batch(keys, into=into).wait(timeout_s=SOON)
        for number, (found, got) in enumerate(zip(loaded, into, strict=True)):
            assert found.attachments == {"routes": bytes([number])}
            assert torch.equal(got, torch.full_like(got, number))


def test_a_page_may_lie_partly_on_the_device():
    host = HostTier(capacity_bytes=PAGE, page_bytes=PAGE, pinned=True)
    parts = [torch.rand(PAGE // 8, device="cuda"), torch.rand(PAGE // 8)]
    into = [torch.zeros(PAGE // 8), torch.zeros(PAGE // 8, device="cuda")]
    with TieredStore([host]) as store:
        store.save(PageKey("s", b"h"), parts).wait(timeout_s=SOON)
        assert store.load(PageKey("s", b"h"), into=into).wait(timeout_s=SOON)
    assert torch.equal(
        torch.cat([part.cpu() for part in into]), torch.cat([p.cpu() for p in parts])
    )
