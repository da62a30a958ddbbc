"""Small pages by number, saved and loaded with a deadline."""

from time import monotonic
from types import SimpleNamespace

import numpy as np

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import lru
from primeblocks.kvoffload.lower import Level
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON


def key_of(number):
    return PageKey("s", bytes([number]))


def page_of(number):
    return np.full(PAGE, number, dtype=np.uint8)


def save(store, number):
    return store.save(key_of(number), page_of(number)).wait(timeout_s=SOON)


def load(store, number):
    """The tier that had the page, or None."""
    into = np.zeros(PAGE, np.uint8)
    return store.load(key_of(number), into=into).wait(timeout_s=SOON).tier


def level_of(numbers=(), *, name="disk", pages=8, shared=False, evict=lru, clock=monotonic):
    """What a store knows of a lower tier that has these pages."""
    tier = SimpleNamespace(
        name=name, shared=shared, capacity_pages=pages, keys=lambda: list(map(key_of, numbers))
    )
    return Level(tier, evict, patience_s=1.0, clock=clock)
