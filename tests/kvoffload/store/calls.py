"""Small pages by number, saved and loaded with a deadline."""

from time import monotonic
from types import SimpleNamespace

import numpy as np

from primeblocks.kvoffload import PageKey
from primeblocks.kvoffload.evict import lru
from primeblocks.kvoffload.lower import Level
from tests.kvoffload.conftest import PAGE
from tests.kvoffload.memory_tier import SOON


def key_of(number, version=None):
    return PageKey("s", bytes([number]), version=version)


def page_of(number):
    return np.full(PAGE, number, dtype=np.uint8)


def save(store, number, version=None, **more):
    key = key_of(number, version)
    return store.save(key, page_of(number), **more).wait(timeout_s=SOON)


def load(store, number, version=None):
    """The tier that had the page, which is the one that `save` saved, or None."""
    into = np.zeros(PAGE, np.uint8)
    found = store.load(key_of(number, version), into=into).wait(timeout_s=SOON)
    assert into.tobytes() == (page_of(number).tobytes() if found else bytes(PAGE))
    return found.tier


def level_of(numbers=(), *, name="disk", pages=8, shared=False, evict=lru, clock=monotonic):
    """What a store knows of a lower tier that has these pages."""
    tier = SimpleNamespace(
        name=name, shared=shared, capacity_pages=pages, keys=lambda: list(map(key_of, numbers))
    )
    return Level(tier, evict, patience_s=1.0, clock=clock)
