"""Captured routes that vLLM has dropped become missing rows. Without this patch the engine dies."""

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import xxhash

from ..patch import Patch

__all__ = ["PATCH", "CapturedPages"]

_STORE = "vllm.distributed.aux_output_connector.worker:BlockObjectStore"
# vLLM's class, which exists when the patch is made.
_HostStore: Any = object


class CapturedPages(_HostStore):
    """vLLM's store of captured rows by page hash. A page without rows is filled with 0xFF.

    vLLM raises an error for a page that it evicted, or that a tier kept over a reset of the prefix
    cache. The engine then dies. Here every slot of such a page has the largest number. No router
    names one expert twice, so `routes_from_output` recognises the page as missing. One exception is
    a model without dense layers that chooses one of 256 or 65,536 experts per token. There a row
    that chose the last expert in every layer looks the same, and is taken for missing.

    If two different pages were put under one hash, a later hit may mean either page. The store
    therefore treats the hash as missing. To notice such pages, the store remembers digests of
    pages, also after it evicts the pages. It remembers sixteen times as many digests as it can
    store pages, and at least 65,536. A digest takes about 200 bytes. If the digest of the first
    page was forgotten, the store does not notice the second page.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self._digests: OrderedDict[str, int | None] = OrderedDict()  # None: two pages differ.
        self._remembered = max(16 * self.num_slots, 1 << 16)

    def put(
        self,
        objects: Iterable[Any],
        *,
        retain_keys: Iterable[str] = (),
        release_keys: Iterable[str] = (),
    ) -> None:
        """Store pages. Pages without room are missing later."""
        from vllm.distributed.aux_output_connector.store import BlockObjectStoreError

        super().put([], retain_keys=retain_keys, release_keys=release_keys)
        pages = list(objects)
        for each in pages:
            digest = xxhash.xxh3_64_intdigest(each.payload)
            if each.key not in self._digests and self._stored(each.key) is not None:
                self._digests[each.key] = None  # The first digest was forgotten. Pages may differ.
            if self._digests.setdefault(each.key, digest) != digest:
                self._digests[each.key] = None
            self._digests.move_to_end(each.key)
        try:
            super().put(pages)
        except BlockObjectStoreError:  # vLLM stores either all of a batch or none of it.
            for each in pages:
                with suppress(BlockObjectStoreError):
                    super().put([each])
        while len(self._digests) > self._remembered:
            self._digests.popitem(last=False)

    def get_concatenated(self, keys: list[str]) -> bytes:
        """Return the pages' rows, joined."""
        return b"".join(self._page(key) for key in keys)

    def _page(self, key: str) -> bytes:
        found = None
        if self._digests.get(key) is not None:
            self._digests.move_to_end(key)
            found = self._stored(key)
        return b"\xff" * self.object_nbytes if found is None else found

    def _stored(self, key: str) -> bytes | None:
        from vllm.distributed.aux_output_connector.store import BlockObjectStoreError

        with suppress(BlockObjectStoreError):
            return bytes(super().get_concatenated([key]))
        return None


def _captured_pages(stock_store: type) -> type:
    return type(CapturedPages.__name__, (CapturedPages, stock_store), {})


PATCH = Patch(
    name="missing_routes_survive",
    reason="A KV page that hits after its captured routes were evicted, or that a tier kept over a "
    "reset of the prefix cache, raises in the worker and ends the engine.",
    tested="vllm==0.32.*",
    replacements={_STORE: _captured_pages},
    asked=lambda config: config.aux_output_config.enabled,
    cpu_only=False,
)
