"""Pages from and to a CUDA device: `python -m benchmarks.kvoffload_parts.device`; seconds.

A store over a pinned host tier saves and loads 2 MiB pages on the device, against plain copies of
the same bytes between one pinned tensor and the device: the rate that the bus gives. All bytes come
back equal before anything is timed.
"""

from __future__ import annotations

from functools import partial

import torch

from primeblocks.kvoffload import HostTier, PageKey, TieredStore

from ..harness import compare, main

__all__ = ["figures"]

PAGE_BYTES, PAGES = 2 << 20, 256
SMALL_BYTES, SMALL = 4 << 10, 4
TIMEOUT_S = 60.0

Figures = dict[str, tuple[float, str, str]]


def figures(device: str = "cuda", page_bytes: int = PAGE_BYTES, count: int = PAGES) -> Figures:
    """Shares of the plain rate, both ways."""
    on_gpu = device == "cuda"
    pages = torch.randint(0, 256, (count, page_bytes), dtype=torch.uint8, device=device)
    back = torch.zeros_like(pages)
    pinned = torch.empty(count, page_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    keys = [PageKey("benchmark", number.to_bytes(8, "big")) for number in range(count)]
    host = HostTier(capacity_bytes=pages.nbytes, page_bytes=page_bytes, pinned=on_gpu)
    with TieredStore([host]) as store:

        def put() -> None:
            saved = store.save_batch(keys, list(pages)).wait(timeout_s=TIMEOUT_S)
            assert all(each.stored for each in saved)

        def get() -> None:
            assert all(store.load_batch(keys, into=list(back)).wait(timeout_s=TIMEOUT_S))

        def agree() -> None:
            put()
            get()
            assert torch.equal(pages, back)

        saving, down = compare(put, lambda: pinned.copy_(pages), agree=agree)
        loading, up = compare(get, lambda: back.copy_(pinned), agree=agree)
    ways = {"save": (saving, down), "load": (loading, up)}
    found: Figures = {}
    for way, (ours, plain) in ways.items():
        name = f"kvoffload.device.{way}"
        found[f"{name}_pcie_fraction"] = (plain.median / ours.median, "ratio", "one pinned copy")
        found[f"{name}_gb_per_s"] = (pages.nbytes / ours.median / 1e9, "GB/s", "")
        found[f"{name}_spread"] = (ours.spread, "ratio", "")
    return found


if __name__ == "__main__":
    main(figures, dry=partial(figures, "cpu", SMALL_BYTES, SMALL))
