"""Hashes of the pages of a prompt, and a load of the longest prefix that a store has."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from itertools import takewhile
from time import monotonic
from typing import Any

import numpy as np

from ..errors import PlanError, check_counts
from .page import PageKey
from .store import TieredStore
from .tier import Loaded

__all__ = ["load_prefix", "page_hashes"]


def page_hashes(tokens: Any, *, page_tokens: int) -> list[bytes]:
    """Return a hash for each whole page of a prompt, over all tokens up to the page's end. Pure.

    Two prompts have equal hashes for the pages of their common prefix. Each hash is the SHA-256 of
    the hash before and the page's tokens, as 64-bit integers with the lowest byte first.

    Args:
        tokens: the token ids, as a list, an array, or a tensor in host memory.
        page_tokens: the number of tokens per page. Tokens after the last whole page get no hash.

    Raises:
        PlanError: `page_tokens` is below 1, or `tokens` is not one dim of 64-bit integers.
    """
    check_counts(page_tokens=page_tokens)
    try:
        ids = np.asarray(tokens)
    except (RuntimeError, TypeError, ValueError) as error:  # Of torch for one, of numpy for two.
        raise PlanError(
            f"a prompt is a line of integers in host memory: {error}. Pass tokens.cpu()."
        ) from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise PlanError(f"a prompt is a line of integers; got {ids.dtype} of shape {ids.shape}")
    if ids.size and ids.max() >= 1 << 63:  # It would be taken for a negative one.
        raise PlanError(f"token ids are below 2**63; got {ids.max()}")
    hashes, last = [], b""
    for end in range(page_tokens, ids.size + 1, page_tokens):
        page = ids[end - page_tokens : end].astype("<i8")
        last = hashlib.sha256(last + page.tobytes()).digest()
        hashes.append(last)
    return hashes


def load_prefix(
    store: TieredStore,
    keys: Sequence[PageKey],
    *,
    into: Sequence[Any],
    timeout_s: float,
    rollout: Hashable = None,
) -> list[Loaded]:
    """Load the pages of a prompt up to the first missing page, and wait for them.

    The result has one entry per loaded page. If a page turns out to be damaged, the result ends
    before it, but the buffers behind it may have been written. Each load counts as a use. The first
    page is used first, and so becomes the least recently used.

    Args:
        store: the store to load from.
        keys: the prompt's pages, in order. Make them from `page_hashes`.
        into: a buffer for each page, as in `TieredStore.load`.
        timeout_s: how long to wait for the pages.
        rollout: the name of the rollout that loads, as in `TieredStore.load`.

    Raises:
        DeadlineError: the pages were not ready within `timeout_s`. The loads are given up.
    """
    end = monotonic() + timeout_s
    held = store.holds(keys).wait(timeout_s=timeout_s)
    lead = sum(takewhile(bool, held))
    pending = store.load_batch(keys[:lead], into=into[:lead], rollout=rollout)
    return list(takewhile(bool, pending.wait(timeout_s=max(0.0, end - monotonic()))))
